"""Runs that fail: one clear error, all rows recorded before it, and no process left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from user_algorithms import Interrupted

import gossamer
from forked import FORKER, Child
from gossamer import BadInput, Deadlock, Experiment, Observer, Run, RunFailed, load_run
from recorded import check_network_rows, rounds_of

pytestmark = pytest.mark.usefixtures("no_process_is_left")

NODES, VICTIM, AT, ROUNDS = 4, 2, 3, 6
DEADLINE_S = 60.0


def play(out: Path, *, observer: Observer | None = None, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 4, "samples": 40},
        "topology": "complete",
        "algorithm": {"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT},
        "batch_size": "full",
        "evaluation": {"every_rounds": 1},
        "engine": {"name": "simulate", "trainer": "sequential"},
        "stop": {"rounds": ROUNDS},
    }
    return gossamer.run(Experiment.of({**settings, **changes}), out, observer=observer)


def recorded(error: RunFailed) -> Run:
    """Load the record of a failed run, which has the error and no models."""
    assert error.folder is not None
    run = load_run(error.folder)
    assert run.status == "failed"
    assert run.error == str(error)
    assert run.parameters is None
    return run


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process is dead, though perhaps not yet reaped by its new parent."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("engine", ["simulate", "processes"])
@pytest.mark.parametrize("by", ["exception", "spawned"])
def test_exception_ends_the_run_and_is_named(tmp_path: Path, engine: str, by: str) -> None:
    algorithm = {"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT, "by": by}
    with pytest.raises(RunFailed) as caught:
        play(tmp_path, algorithm=algorithm, engine={"name": engine})
    error = caught.value
    assert (error.node, error.round) == (VICTIM, AT)
    assert "node 2 failed in round 3: ArithmeticError: the well is dry" in str(error)
    assert "user_algorithms.py" in str(error)
    assert "_raise" in error.traceback
    run = recorded(error)
    # Three rounds were completed. (A real node goes on while its task fails.)
    assert rounds_of(run, VICTIM)[:4] == [0, 1, 2, 3]
    if engine == "simulate":  # (rows of other real nodes may not have arrived by then)
        assert rounds_of(run, -1)[:3] == [0, 1, 2]
    assert not (run.path / "segments").exists()


@pytest.mark.parametrize("by", ["forgotten", "rebound"])
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_call_without_await_ends_the_run_and_is_named(tmp_path: Path, engine: str, by: str) -> None:
    algorithm = {"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT, "by": by}
    with pytest.raises(
        RunFailed,
        match=r"coroutine 'Node.train' was never awaited \(user_algorithms.py, line \d+\)$",
    ) as caught:
        play(tmp_path, algorithm=algorithm, engine={"name": engine})
    assert (caught.value.node, caught.value.round) == (VICTIM, AT)
    recorded(caught.value)


def test_deadlock_names_a_node_that_has_returned(tmp_path: Path) -> None:
    algorithm = {"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT, "by": "return"}
    with pytest.raises(RunFailed, match=f"node {VICTIM} returned after {AT} rounds$"):
        play(tmp_path, algorithm=algorithm, engine={"name": "simulate"})


def test_no_node_runs_after_a_second_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that never waits would go on without end."""
    monkeypatch.setattr(Interrupted, "turns", [])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(tmp_path, algorithm="user_algorithms:Interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    assert Interrupted.turns == [0]


def test_failure_before_the_first_round_is_named(tmp_path: Path) -> None:
    algorithm = {"name": "user_algorithms:Fragile", "victim": 1, "at": 0}
    with pytest.raises(RunFailed, match="node 1 failed in round 0: ArithmeticError") as caught:
        play(tmp_path, algorithm=algorithm)
    assert rounds_of(recorded(caught.value), 0) == [0]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_loss_exception_is_attributed_to_its_node(tmp_path: Path, engine: str) -> None:
    """Even though the simulator computes the steps of many nodes together."""
    with pytest.raises(RunFailed, match="OverflowError: a target beyond all measure") as caught:
        play(
            tmp_path,
            task={"name": "user_tasks:poisoned", "owners": NODES, "bad": VICTIM},
            partition="natural",
            algorithm="local",
            engine={"name": engine, "trainer": "sequential"},
        )
    assert (caught.value.node, caught.value.round) == (VICTIM, 0)


BEYOND = "OverflowError: an output beyond all measure"
EVERY_S = {"every_rounds": None, "every_s": 0.05}


@pytest.mark.parametrize(
    ("evaluation", "stop", "round"),
    [
        ({"every_rounds": 1}, {"rounds": ROUNDS}, AT + 1),
        (EVERY_S, {"time_s": 60.0}, None),
        ({"every_rounds": None}, {"time_s": 2.0}, None),
    ],
    ids=["rounds", "time", "end"],
)
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_metric_exception_is_attributed_to_the_evaluated_node(
    tmp_path: Path, engine: str, evaluation: dict[str, Any], stop: dict[str, Any], round: int | None
) -> None:
    with pytest.raises(RunFailed, match=rf"^node 2 failed in round \d+: {BEYOND}") as caught:
        play(
            tmp_path,
            task="user_tasks:touchy",
            algorithm={"name": "user_algorithms:Lone", "victim": VICTIM, "at": AT if round else 0},
            compute={"name": "constant", "seconds_per_step": 0.1},
            evaluation=evaluation,
            stop=stop,
            engine={"name": engine, **({"pace": True} if engine == "processes" else {})},
        )
    assert caught.value.node == VICTIM
    if round is not None:
        assert caught.value.round == round
    assert "user_tasks.py" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    recorded(caught.value)


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_wrapper_exception_is_attributed_to_the_receiver(tmp_path: Path, engine: str) -> None:
    with pytest.raises(
        RunFailed, match=r"node 2 failed in round \d: .*UnicodeError: it is all Greek"
    ) as caught:
        play(
            tmp_path,
            algorithm={"name": "user_algorithms:Fragile", "at": ROUNDS},
            wrappers=[{"name": "user_algorithms:Deaf", "victim": VICTIM, "at": AT}],
            engine={"name": engine},
        )
    # A sender may be a round ahead of the receiver.
    assert (caught.value.node, caught.value.round) in ((VICTIM, AT - 1), (VICTIM, AT))
    assert "user_algorithms.py" in str(caught.value)
    assert rounds_of(recorded(caught.value), VICTIM)[:3] == [0, 1, 2]


@pytest.mark.parametrize("deed", ["in-place", "in-place-and-write"])
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_in_place_write_during_training_fails_its_node(tmp_path: Path, engine: str, deed: str) -> None:
    with pytest.raises(RunFailed, match="node 2 failed in round 3: .*modified in place") as caught:
        play(
            tmp_path,
            algorithm={"name": "user_algorithms:Lone", "victim": VICTIM, "at": AT, "deed": deed},
            engine={"name": engine, "trainer": "sequential"},
        )
    assert (caught.value.node, caught.value.round) == (VICTIM, AT)
    assert rounds_of(recorded(caught.value), VICTIM) == [0, 1, 2, 3]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_task_function_that_raises_is_bad_input(tmp_path: Path, engine: str) -> None:
    with pytest.raises(BadInput) as caught:
        play(tmp_path, task="user_tasks:raises", engine={"name": engine})
    [problem] = caught.value.problems
    assert problem.startswith("task: 'user_tasks:raises' raised ZeroDivisionError: the shelf is empty")
    assert "user_tasks.py" in problem
    assert not list(tmp_path.iterdir())


def test_deadlock_names_every_wait(tmp_path: Path) -> None:
    with pytest.raises(Deadlock) as caught:
        play(tmp_path, algorithm="user_algorithms:Silence", engine={"name": "simulate"})
    assert "all nodes wait and nothing is under way" in str(caught.value)
    for wait in (
        "node 0 for tag ('never', 0, 0) from ranks [1]",
        "node 1 for tag ('never', 1, 0) from ranks [2]",
        "node 2 for tag ('never', 2, 0) from ranks [3]",
        "node 3 for tag 'nothing' from ranks [0]",
    ):
        assert wait in str(caught.value)
    assert rounds_of(recorded(caught.value), 0) == [0]


def test_messages_with_a_wrong_tag_are_named(tmp_path: Path) -> None:
    described = {"algorithm": "user_algorithms:WrongTag", "engine": {"name": "simulate"}}
    message = "node 0 for tag ('model', 0) from ranks [1, 2, 3] (unread: tag ('m', 0) from ranks [1, 2, 3])"
    with pytest.raises(Deadlock) as caught:
        play(tmp_path, **described)
    assert message in str(caught.value)

    class Says(Observer):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def say(self, text: str) -> None:
            self.texts.append(text)

    play(tmp_path, **described, stop={"time_s": 1.0}, observer=(observer := Says()))
    assert any(text.startswith(f"no node has completed a round: {message}") for text in observer.texts)


def test_killed_node_ends_the_run(tmp_path: Path) -> None:
    algorithm = {"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT, "by": "sigkill"}
    with pytest.raises(RunFailed, match=r"node 2 died in round \d: killed by SIGKILL") as caught:
        play(tmp_path, algorithm=algorithm, engine={"name": "processes"})
    assert caught.value.node == VICTIM
    run = recorded(caught.value)
    assert rounds_of(run, VICTIM) == [0, 1, 2, 3]
    assert run.events.filter(event="lost")["node"].to_list() == [VICTIM]


def test_others_finish_without_a_killed_node(tmp_path: Path) -> None:
    """With gather.lost_peer: skip, the others run to the end."""
    run = play(
        tmp_path,
        algorithm={"name": "user_algorithms:Fragile", "victim": VICTIM, "at": AT, "by": "sigkill"},
        gather={"lost_peer": "skip"},
        engine={"name": "processes"},
    )
    assert run.status == "done"
    for rank in set(range(NODES)) - {VICTIM}:
        assert rounds_of(run, rank) == list(range(ROUNDS + 1))
    assert rounds_of(run, VICTIM) == [0, 1, 2, 3]
    # The rounds at which all survivors were evaluated have network rows.
    check_network_rows(run, range(ROUNDS + 1))
    assert run.parameters is not None
    ended = np.isfinite(run.parameters.numpy()).all(axis=1)
    assert ended.tolist() == [rank != VICTIM for rank in range(NODES)]
    [event] = run.events.filter(event="lost").to_dicts()
    assert event["node"] == VICTIM
    assert "SIGKILL" in event["detail"]


def test_node_that_cannot_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"node \d failed at start: .*ConnectionError: the licence server is down"
    ) as caught:
        play(
            tmp_path,
            task="user_tasks:refuses_to_fork",
            initial="independent",  # (a common one is made before the fork)
            engine={"name": "processes"},
        )
    assert caught.value.node in range(NODES)
    assert "user_tasks.py" in caught.value.traceback
    assert recorded(caught.value).metrics.is_empty()


def launch(tmp_path: Path, **changes: Any) -> Child:
    """Start a very long run as a program of its own."""
    fields: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "samples": 40},
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 20},
        "engine": "processes",
        "stop": {"rounds": 1_000_000},
    }
    Experiment.of({**fields, **changes}).save(tmp_path / "experiment.yaml")
    arguments = ("run", str(tmp_path / "experiment.yaml"), "--out", str(tmp_path / "runs"), "--no-report")
    return FORKER.program(*arguments, output=tmp_path / "output")


def test_killed_launcher_leaves_no_process_and_readable_rows(tmp_path: Path) -> None:
    launcher, out = launch(tmp_path), tmp_path / "runs"
    try:

        def rows_are_there() -> bool:
            assert launcher.poll() is None, "the launcher ended by itself"
            rows = b"".join(path.read_bytes() for path in out.glob("*/*/segments/metrics-*.jsonl"))
            return all(rows.count(b'"node":%d,' % rank) >= 2 for rank in range(NODES))

        wait_until(rows_are_there, "every node has recorded rows")
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) == 1 + NODES, "a fork server and its nodes"
    finally:
        launcher.end()
    wait_until(lambda: all(map(is_gone, family)), "every process of the run is gone")
    run = load_run(out)
    assert run.status == "running or killed"
    assert run.parameters is None
    for rank in range(NODES):
        assert rounds_of(run, rank)[:2] == [0, 20]


def test_run_stopped_while_nodes_start_ends_in_order(tmp_path: Path) -> None:
    launcher = launch(
        tmp_path,
        task={"name": "user_tasks:slow_to_fork", "folder": str(tmp_path), "seconds": 2.0},
        algorithm="local",
        initial="independent",  # (a common model is made before the fork)
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("starting-*"))) == NODES, "every node starts")
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(DEADLINE_S)
    finally:
        launcher.end()
    run = load_run(tmp_path / "runs")
    assert run.status == "stopped"
