"""Settings of glibc's allocator: returning memory to the system at every step costs more than it saves."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP, _LARGE = 1 << 30, 1 << 20


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for later tensors. Returns whether the system uses glibc and the setting
    succeeded."""
    libc, options = _glibc(), (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    return libc is not None and all(libc.mallopt(option, _KEEP) for option in options)


def trim() -> None:
    """Return memory freed by this thread to the system. Call it in a process that is about to wait."""
    if (libc := _glibc()) is not None:
        # glibc trims a thread's own heap only when a large block is freed there.
        libc.mallopt(_M_TRIM_THRESHOLD, 0)
        libc.free(libc.malloc(_LARGE))
        libc.malloc_trim(0)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP)


@cache  # each lookup of a function creates classes that only the garbage collector frees
def _glibc() -> Any:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not all(hasattr(libc, name) for name in ("mallopt", "malloc_trim")):
        return None
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return libc
