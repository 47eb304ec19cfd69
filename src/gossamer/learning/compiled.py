"""Loops that numba compiles once and keeps on disk: next to their source, or in the user's cache folder where that can't be
written (``NUMBA_CACHE_DIR`` names another one)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from numba import njit

log = logging.getLogger("gossamer")


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A function that Python calls, compiled at its first call. It releases Python's lock."""
    loop = inspect.unwrap(function)  # the tests wrap functions to check their arguments
    try:
        made = njit(nogil=True, cache=True, **options)(loop)
    except RuntimeError:  # no folder is writable
        return njit(nogil=True, **options)(loop)
    made._cache.save_overload = _forgiving(made._cache.save_overload)
    return made


def _forgiving(save: Callable[..., None]) -> Callable[..., None]:
    """Go on without a saved loop, e.g. at the end of a quota: it is compiled again in the next process."""

    @wraps(save)
    def saved(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _say(str(error))

    return saved


@cache
def _say(error: str) -> None:
    log.warning("compiled loops can't be kept (%s); set NUMBA_CACHE_DIR to a writable folder", error)
