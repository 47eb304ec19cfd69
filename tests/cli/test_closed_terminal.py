"""A run whose terminal is closed, as when an ssh session ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from forked import FORKER
from gossamer import Experiment, load_run


def test_run_whose_terminal_is_closed_ends_in_order(tmp_path: Path) -> None:
    """It has its record and its report, and the exit code of a run that was stopped."""
    fields = {
        "nodes": 2,
        "task": {"name": "least-squares", "features": 3, "samples": 16},
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 1000},
        "stop": {"rounds": 10**6},
    }
    Experiment.of(fields).save(tmp_path / "experiment.yaml")
    ours, theirs = os.openpty()
    arguments = ("run", str(tmp_path / "experiment.yaml"), "--out", str(tmp_path / "runs"))
    child = FORKER.program(*arguments, output=Path(os.ttyname(theirs)))
    try:
        os.close(theirs)
        shown = b""
        while b"round 1" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        child.send_signal(signal.SIGHUP)
        assert child.wait() == 130
    finally:
        child.end()
    run = load_run(tmp_path / "runs")
    assert run.status == "stopped"
    assert (run.path / "report.html").is_file()
