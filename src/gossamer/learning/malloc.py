"""Settings of glibc's allocator: returning memory to the system at every step costs more than it saves."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30
_LARGE = 1 << 20


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors.

    Returns:
        Whether this is glibc and it agreed.
    """
    mallopt = _libc_function("mallopt")
    return (
        mallopt is not None
        and bool(mallopt(_M_MMAP_THRESHOLD, _KEEP))
        and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP))
    )


def trim() -> None:
    """Return memory that this thread has freed to the system, for a process that will wait for a while."""
    mallopt, malloc_trim = _libc_function("mallopt"), _libc_function("malloc_trim")
    malloc, free = _libc_function("malloc"), _libc_function("free")
    if mallopt is None or malloc_trim is None or malloc is None or free is None:
        return
    # glibc returns the end of a thread's own heap only when something large is freed there.
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    mallopt(_M_TRIM_THRESHOLD, 0)
    free(malloc(_LARGE))
    malloc_trim(0)
    mallopt(_M_TRIM_THRESHOLD, _KEEP)


@cache  # each lookup creates classes, which only the garbage collector frees
def _libc_function(name: str) -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
