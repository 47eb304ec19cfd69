"""The end of a run's record: segments become tables, and the status is written last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer.errors import BadInput, RecordError, RunFailed, cause
from gossamer.results.folder import RunFolder, write_json, write_table
from gossamer.results.reading import read_events, read_metrics, read_setup, read_timeline, segments
from gossamer.results.schema import Status

log = logging.getLogger("gossamer")


def compact(folder: RunFolder) -> None:
    """Turn all segments, which must be closed, into ``metrics.parquet``, ``events.parquet`` and, if recorded,
    ``timeline.parquet``; graphs go into ``setup.json``. A segment is removed only after its rows are on disk
    elsewhere, so a kill at any time loses nothing."""
    path = folder.path
    for kind, read in (("metrics", read_metrics), ("events", read_events), ("timeline", read_timeline)):
        if kind != "timeline" or segments(path, kind):
            write_table(path / f"{kind}.parquet", read(path))
            _remove(segments(path, kind))
    if (graphs := segments(path, "graphs")) and (path / "setup.json").exists():
        write_json(path / "setup.json", read_setup(path))
        _remove(graphs)
    with suppress(OSError):  # not empty, or missing
        folder.segments.rmdir()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def close_record(
    folder: RunFolder,
    reason: str,
    error: str | None,
    write_outcome: Callable[[], None] = lambda: None,
    **figures: Any,
) -> str | None:
    """Write models (``write_outcome``), tables and, last, the status. The status is written even if the rest
    can't be (e.g. on a full disk): rows then stay in their segments, and the run has failed. Returns the
    first error in one line, or None. ``reason`` and ``figures`` are those of an
    :class:`~gossamer.runtime.outcome.Outcome`."""
    statuses: dict[str, Status] = {"failed": "failed", "stopped": "stopped", "diverged": "diverged"}
    status, problem = statuses.get(reason, "done"), None
    for temporary in folder.checkpoints.glob("*/.*.tmp"):  # left by nodes that were killed while writing
        temporary.unlink(missing_ok=True)
    try:
        write_outcome()
        compact(folder)
        if status == "diverged":
            error = str(read_events(folder.path).filter(event="diverged")["detail"].first())
    except (OSError, BadInput) as failure:
        problem = _reason(failure)
        status, error = "failed", error or problem
    try:
        folder.write_status(status, error=error, **figures)
    except (OSError, BadInput) as failure:
        problem = problem or _reason(failure)
    return problem


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, RecordError) else f"the record can't be written: {failure}"


def close_after(error: BaseException, folder: RunFolder) -> None:
    """Close the record of a run ended by an error. A failure to write it is only logged, since the error
    itself is raised."""
    reason = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    text = str(error) if isinstance(error, RunFailed) else cause(error)
    problem = close_record(folder, reason, text)
    if problem is not None and not isinstance(error, RecordError):
        log.warning(problem)
