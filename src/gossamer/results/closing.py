"""Closing a record: models, tables, and the status, which is written even if the rest can't be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from polars.exceptions import PolarsError
from safetensors import SafetensorError

from gossamer.errors import BadInput, cause
from gossamer.results.folder import RunFolder, Status
from gossamer.results.recorder import compact

log = logging.getLogger("gossamer")


def status_of(reason: str) -> Status:
    """The status for the reason of an :class:`~gossamer.runtime.outcome.Outcome`."""
    return {"failed": "failed", "stopped": "stopped"}.get(reason, "done")  # type: ignore[return-value]


def close_record(
    folder: RunFolder,
    status: Status,
    error: str | None,
    write_outcome: Callable[[], None] | None = None,
    **figures: Any,
) -> str | None:
    """Write models, tables, and at last the status. If something can't be written (a full disk, ...), rows stay in their
    segments, and the run has failed.

    Args:
        folder: the record, to which nothing else writes any more.
        status: how the run ended.
        error: why it failed.
        write_outcome: writes everything but rows; None if there is nothing.
        figures: see :meth:`~gossamer.results.folder.RunFolder.write_status`.

    Returns:
        The first error in one line; None if everything was written.
    """
    unwritten = None
    try:
        if write_outcome is not None:
            write_outcome()
        compact(folder)
    except (
        OSError,
        BadInput,
        PolarsError,
        SafetensorError,
    ) as trouble:  # each library has its own for a full disk
        unwritten = f"the record can't be written: {trouble}"
        status, error = "failed", error or unwritten
    try:
        folder.write_status(status, error=error, **figures)
    except OSError as trouble:
        unwritten = unwritten or f"the record can't be written: {trouble}"
    return unwritten


def close_after(error: BaseException, folder: RunFolder, **figures: Any) -> None:
    """Close the record of a run that an error ends. A failure to write it is only logged, since the error is raised."""
    status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    if (unwritten := close_record(folder, status, cause(error), **figures)) is not None:
        log.warning(unwritten)
