"""The C library's allocator, set for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Sets the C library to keep freed memory for its next allocation. Call it before JAX starts.

    XLA on a CPU allocates the scratch memory of a step anew at every step. By default the C library returns blocks of
    that size to the kernel, which then clears and maps every page again: a third of the processor time of a small
    model's step. With these settings the pages stay mapped, and the process never shrinks.

    Returns:
      Whether the C library accepted the settings; only GNU's has them.
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
