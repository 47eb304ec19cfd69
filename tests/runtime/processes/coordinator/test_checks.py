"""What nodes may report in a run, beyond the schemas of their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from msgspec import structs

from gossamer import Experiment, files
from gossamer.messages.tags import Traffic
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.runtime.processes.coordinator import checks as module
from gossamer.runtime.processes.coordinator.checks import SKEW_S, Checks
from gossamer.runtime.processes.protocol import (
    CurrentRound,
    Done,
    FromProcess,
    Marked,
    Progress,
    Ready,
    Row,
    Unreachable,
    Violation,
)
from gossamer.runtime.setup import Setup, prepare
from hostile_messages import TRAFFIC, VALUES


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepare(
        Experiment.of(
            {
                "nodes": 4,
                "task": {"name": "digits", "model": "logistic"},
                "algorithm": "d-psgd",
                "topology": "ring",
                "stop": {"rounds": 5},
                "engine": "processes",
            }
        )
    )


@pytest.fixture
def checks(setup: Setup) -> Checks:
    return Checks(setup, None, local=True)


def row(view: list[int] | None = None, values: Any = VALUES, **columns: Any) -> Row:
    return Row(2, values, TRAFFIC, columns, None, view)


def at(**values: Any) -> Row:
    return row(values=structs.replace(VALUES, **values))


REFUSED: dict[str, FromProcess] = {
    "an address": Ready("10.0.0.1", 80),
    "a time": Progress(1, SKEW_S + 60.0, Traffic()),
    "a round": Progress(10**9, 1.0, Traffic()),
    "rounds": Done(10**9),
    "a current round": CurrentRound(1, 10**9),
    "a peer": Unreachable(4, "silent"),
    "another peer": CurrentRound(4, 1),
    "a receiver": Marked(1, {4: 1}),
    "a row's time": at(time_s=SKEW_S + 60.0),
    "a row's wall time": at(wall_s=SKEW_S + 60.0),
    "a row's round": at(round=10**9),
    "a row's age": at(model_age_s=1.6),
    "a view": row([0, 4]),
    "a long view": row([0, 1, 2, 3, 0]),
    "a column of every row": row(node=2),
    "a counter": row(bytes_sent=2),
    "a metric's text": row(test_accuracy="high"),
    "a metric's list": row(test_accuracy=[0.5]),
    "an unknown metric's text": row(test_words="high"),
    "an unknown metric's texts": row(test_words=[1.0, ["high"]]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_report_that_no_node_makes_is_refused(checks: Checks, name: str) -> None:
    with pytest.raises(Violation, match="node 1"):
        checks.check(1, REFUSED[name])


def test_honest_reports_are_accepted(checks: Checks) -> None:
    for message in (
        Ready("::1", 80),
        Progress(3, 1.0, TRAFFIC),
        row([0, 1, 3], test_accuracy=0.5, test_loss=float("nan"), loss_of_mine="high", test_f1=[[1.0], None]),
        row(test_accuracy=None, test_loss=None, text="words", list=["a", {"b": 1}]),
        at(train_loss=float("inf")),
        Marked(7, {0: 1, 3: 2}),
    ):
        checks.check(1, message)


def test_joined_node_may_listen_anywhere(setup: Setup) -> None:
    Checks(setup, None, local=False).check(1, Ready("10.0.0.1", 80))


def test_clock_continues_from_the_checkpoint(setup: Setup, tmp_path: Any) -> None:
    times_s = dict.fromkeys(range(4), 5_000.0)
    saved = RunCheckpoint(tmp_path, 1, dict.fromkeys(range(4), 10**9), times_s, 9_000.0, {})
    resumed = Checks(setup, saved, local=True)
    resumed.check(1, Progress(10**9 + 1, 5_001.0, Traffic()))
    resumed.check(1, at(round=10**9 + 1, time_s=5_001.0, wall_s=9_001.0))
    with pytest.raises(Violation, match=r"accepted: at most 50\d\d s by now"):
        resumed.check(1, Progress(10**9 + 1, 9_001.0, Traffic()))


def counted(checks: Checks, sent: Callable[[int], Row], most: int = 1_000) -> int:
    """How many rows are accepted."""
    for number in range(most):
        try:
            checks.check(1, sent(number))
        except Violation:
            return number
    return most


def test_rows_of_a_run_fit_into_a_table_that_can_be_read(
    setup: Setup, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 20_000)
    accepted = counted(checks, lambda number: row())
    columns = len(checks._columns)
    assert columns > 25
    assert 5 * accepted * columns <= 20_000 < 5 * (accepted + 1) * columns  # of four nodes and the network
    checks.check(2, row())  # other nodes have their own share
    resumed = Checks(setup, None, local=True)
    resumed.resume(pl.DataFrame({"node": [1] * accepted}))
    assert counted(resumed, lambda number: row()) == 0


def test_columns_of_all_rows_are_limited(checks: Checks) -> None:
    assert (
        counted(checks, lambda number: row(**{f"c{number}_{k}": 1 for k in range(100)}, test_accuracy=0.5))
        == 50
    )


def test_events_of_a_node_are_limited(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 2)
    assert [checks.records(1) for _ in range(5)] == [True, True, None, False, False]
    assert checks.records(2)
