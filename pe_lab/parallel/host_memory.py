"""What freed memory becomes on a host that computes."""

from __future__ import annotations

import ctypes
import sys

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory for its next use. For training on a CPU; call it before JAX starts.

    XLA on a CPU allocates the scratch memory of a step anew at every step. By default the C library gives pieces as
    large as that back to the kernel, which then clears and maps every page of them again: a third of the processor
    time of a small model's step. Kept, they stay mapped, and the process stays as large as it ever was.

    Returns:
      Whether the C library took the settings; only GNU's knows them.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Never map a piece by itself; one heap for all threads, since only the main one can grow past 64 MiB; and never
    # cut its unused end off.
    return all(mallopt(*setting) == 1 for setting in ((_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1), (_M_TRIM_THRESHOLD, -1)))
