"""The memory of this machine: how much there is, what does not fit it, and the C library's allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pe_lab.errors import UnsupportedError
from pe_lab.parallel.topology import GIB, chip_of

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# The limit of a container, in version 2 and in version 1 of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """The bytes of memory that this process may use, 0 if that is unknown: the machine's, or its container's."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(Path(limit).read_text()))
    return found


_ADVICE = "Make the model or the batch smaller, or shard it over more devices (config.mesh)."


def check_memory(needed: int, what: str, devices: Sequence[Any] = (), advice: str = _ADVICE) -> None:
    """`UnsupportedError` for what needs more bytes than the host and these local devices have together.

    `what` needs them, and `advice` is what to do, for the message.
    """
    host = host_memory()
    there = host + sum(chip_of(device).memory for device in devices if device.platform != "cpu")
    if host and needed > there:
        raise UnsupportedError(
            f"{what} needs at least {needed / GIB:,.1f} GiB, and this machine and its devices have "
            f"{there / GIB:,.1f}. {advice}"
        )


def keep_freed_memory() -> bool:
    """Sets the C library to keep freed memory, before JAX starts; whether it can, which only GNU's does.

    Call it before the first thread: once a thread has a heap of its own, the library keeps their largest number.

    XLA on a CPU allocates the scratch memory of a step anew at every step. By default the C library returns blocks of
    that size to the kernel, which then clears and maps every page again: a third of the processor time of a small
    model's step. With these settings the pages stay mapped, and the process never shrinks.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # No block is mapped by itself; all threads share one heap, because only the main heap can grow past 64 MiB; and
    # the unused end of the heap is never returned.
    return all(mallopt(*setting) == 1 for setting in ((_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1), (_M_TRIM_THRESHOLD, -1)))


def return_freed_memory() -> None:
    """Returns freed memory to the kernel, where the C library can: takes about 0.1 s for each GB.

    Else it keeps most of what saves have freed: 16 GB after seven saves of 6 GB (docs/log.md).
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
