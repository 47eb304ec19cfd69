"""Closing of records: a status records any write failure, and rows stay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gossamer import load_run
from gossamer.results import closing
from gossamer.results.closing import close_after, close_record
from gossamer.results.folder import RunFolder, write_json

EXPERIMENT = "{nodes: 1, task: {name: least-squares}, stop: {rounds: 1}}"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "run", experiment=EXPERIMENT, environment={"command": ["test"]})
    write_json(
        made.path / "setup.json",
        {"nodes": 1, "directed": False, "samples": [1], "labels": None, "graphs": {"0": []}},
    )
    with made.segment("metrics") as metrics:
        metrics.append({"node": 0, "round": 0})
    return made


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def compact(folder: RunFolder) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(closing, "compact", compact)


NO_SPACE = "the record can't be written: [Errno 28] No space left on device"


def recorded(folder: RunFolder, status: str, error: str | None) -> bool:
    """Whether the record has this status and error; asserts that it has its row."""
    run = load_run(folder.path)
    assert run.metrics.height == 1
    return (run.status, run.error) == (status, error)


@pytest.mark.parametrize(
    ("reason", "status"),
    [("rounds", "done"), ("time", "done"), ("target", "done"), ("failed", "failed"), ("stopped", "stopped")],
)
def test_a_record_is_closed_with_its_status(folder: RunFolder, reason: str, status: str) -> None:
    assert close_record(folder, reason, None) is None
    assert recorded(folder, status, None)
    assert not folder.segments.exists()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("error", [None, "it failed before"])
def test_failed_closing_is_returned_and_recorded(folder: RunFolder, error: str | None) -> None:
    assert close_record(folder, "rounds", error) == NO_SPACE
    assert recorded(folder, "failed", error or NO_SPACE)
    assert folder.segments.exists()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("error", "status"), [(ArithmeticError("the well is dry"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_original_error_is_recorded_over_closing_error(
    folder: RunFolder, error: BaseException, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        close_after(error, folder)
    assert caplog.messages == [NO_SPACE]
    cause = "ArithmeticError: the well is dry" if status == "failed" else "KeyboardInterrupt"
    assert recorded(folder, "failed", cause)  # (its tables are missing)
