"""How a record is closed: models, tables, and the status, which is there also where the rest can't be written."""

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
    """The status of a run that ended for some reason; see :class:`~gossamer.runtime.outcome.Outcome`."""
    return {"failed": "failed", "stopped": "stopped"}.get(reason, "done")  # type: ignore[return-value]


def close_record(
    folder: RunFolder,
    status: Status,
    error: str | None,
    write_outcome: Callable[[], None] | None = None,
    **figures: Any,
) -> str | None:
    """Write what is left to write, tables, and the status, which is there when all else is, or when it can't be (a full disk,
    ...); what could not be put into tables stays in its segments.

    Args:
        folder: whose record it is; nobody writes to it any more.
        status: how the run ended.
        error: why, if it failed.
        write_outcome: writes what there is beside rows; None where nothing is.
        figures: what else the status says; see :meth:`~gossamer.results.folder.RunFolder.write_status`.

    Returns:
        What kept it from being written, in one line; None where nothing did.
    """
    unwritten = None
    try:
        if write_outcome is not None:
            write_outcome()
        compact(folder)
    except (OSError, BadInput, PolarsError, SafetensorError) as trouble:  # (of a full disk, each has its own)
        unwritten = f"the record can't be written: {trouble}"
        status, error = "failed", error or unwritten
    try:
        folder.write_status(status, error=error, **figures)
    except OSError as trouble:
        unwritten = unwritten or f"the record can't be written: {trouble}"
    return unwritten


def close_after(error: BaseException, folder: RunFolder, **figures: Any) -> None:
    """Close the record of a run that an error ends, which is what is to be raised: that the record can't be written is only
    logged."""
    status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    if (unwritten := close_record(folder, status, cause(error), **figures)) is not None:
        log.warning(unwritten)
