"""The structured-concurrency contract: spawned tasks, cancellation, exceptions and deadlocks."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gossamer import Deadlock, Node, RunFailed
from gossamer.results.observer import Observer
from gossamer.runtime.simulate import core, host
from scenario import play


class Limit(Observer):
    """Ends a run that records too many rows, since it would go on for ever."""

    def __init__(self, rows: int) -> None:
        self.left = rows

    def row(self, row: Mapping[str, Any]) -> None:
        self.left -= 1
        assert self.left > 0, "the run goes on for ever"


# --- spawned tasks ---


def test_spawned_task_runs_concurrently_and_returns_its_value(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async def work() -> str:
            await node.sleep(1)
            return "done"

        task = node.spawn(work())
        await node.sleep(0.5)
        assert not task.done()
        return await task, node.now()

    assert play(tmp_path, script, 1).values[0] == ("done", 1.0)


def test_spawned_tasks_live_until_every_node_has_finished(tmp_path: Path) -> None:
    """Node 0 returns at once and still answers node 1; its waiting task is cancelled at the end."""
    ended: list[str] = []

    async def script(node: Node) -> Any:
        if node.rank == 0:

            async def answer() -> None:
                try:
                    while True:
                        message = await node.receive("question")
                        node.send(message.source, message.payload + 1, "answer")
                finally:
                    ended.append(f"at {node.now()}")

            node.spawn(answer())
            return None
        answers = []
        for question in range(3):
            await node.sleep(1)
            node.send(0, question, "question")
            answers.append((await node.receive("answer")).payload)
        return answers

    assert play(tmp_path, script).values[1] == [1, 2, 3]
    assert ended == ["at 3.0"]


def test_node_keeps_answering_after_its_last_round(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async def answer() -> None:
            while True:
                message = await node.receive("question")
                node.send(message.source, None, "answer")

        node.spawn(answer())
        async for _ in node.rounds():
            await node.train(1 + 3 * node.rank)
            node.send(1 - node.rank, None, "question")
            await node.receive("answer")
        return node.now()

    assert play(tmp_path, script, stop={"rounds": 3}).values == {0: 3.0, 1: 12.0}


def test_task_never_awaited_is_cancelled_at_the_end(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        return node.spawn(node.sleep(100))

    task = play(tmp_path, script, 1).values[0]
    assert task.cancelled()


def test_time_limit_ends_every_task_of_every_node(tmp_path: Path) -> None:
    ended: list[tuple[int, str, float]] = []

    async def script(node: Node) -> None:
        async def wait(name: str) -> None:
            try:
                await node.receive("never")
            finally:
                ended.append((node.rank, name, node.now()))

        node.spawn(wait("spawned"))
        await wait("run")

    recorded = play(tmp_path, script, stop={"time_s": 2.5}).run
    assert sorted(ended) == [(r, name, 2.5) for r in range(2) for name in ("run", "spawned")]
    assert recorded.status == "done"


def test_spawned_tasks_may_spawn_tasks(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async def inner() -> float:
            await node.sleep(1)
            return node.now()

        async def outer() -> float:
            return await node.spawn(inner())

        return await node.spawn(outer())

    assert play(tmp_path, script, 1).values[0] == 1.0


# --- cancellation ---


def test_cancelling_a_task_leaves_other_tasks_running(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        task, other = node.spawn(node.sleep(10)), node.spawn(node.sleep(1))
        await node.sleep(0.5)
        task.cancel()
        await other
        assert task.cancelled()
        return node.now()

    assert play(tmp_path, script, 1).values[0] == 1.0


def test_cancelled_sleep_leaves_no_timer_behind(tmp_path: Path) -> None:
    """Otherwise the run would end only when the last timer is due."""

    async def script(node: Node) -> Any:
        task = node.spawn(node.sleep(1000))
        await node.sleep(1)
        task.cancel()
        await node.receive("never")

    with pytest.raises(Deadlock) as failure:
        play(tmp_path, script, 1)
    assert "node 0 for tag 'never' from anyone" in str(failure.value)


@pytest.mark.parametrize("stop", [{"rounds": 1}, {"time_s": 5.0}])
def test_protocol_ended_by_a_cancelled_task_fails_its_node(tmp_path: Path, stop: Any) -> None:
    """Awaiting a cancelled task raises CancelledError: the node must not just fall silent."""

    async def script(node: Node) -> None:
        if node.rank == 1:
            task = node.spawn(node.sleep(10))
            await node.sleep(1)
            task.cancel()
            await task
        await node.sleep(3)

    with pytest.raises(RunFailed) as failure:
        play(tmp_path, script, stop=stop)
    assert failure.value.node == 1
    assert "CancelledError" in str(failure.value)


# --- exceptions ---


def test_exception_fails_the_run_and_names_node_round_and_cause(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async for r in node.rounds():
            await node.sleep(1)
            if node.rank == 1 and r == 2:
                raise ZeroDivisionError("on purpose")

    with pytest.raises(
        RunFailed, match=r"node 1 failed in round 2: ZeroDivisionError: on purpose"
    ) as failure:
        play(tmp_path, script, 3, stop={"rounds": 5})
    error = failure.value
    assert (error.node, error.round) == (1, 2)
    assert "raise ZeroDivisionError" in error.traceback
    assert "test_node_tasks.py" in str(error)
    assert error.folder is not None
    assert (error.folder / "experiment.yaml").exists()


@pytest.mark.parametrize("awaited", [False, True])
def test_exception_in_a_spawned_task_fails_the_node(tmp_path: Path, awaited: bool) -> None:
    async def script(node: Node) -> None:
        async def fail() -> None:
            await node.sleep(1)
            raise KeyError("lost")

        async for r in node.rounds():
            if node.rank == 1 and r == 1:
                task = node.spawn(fail())
                if awaited:
                    await task
            await node.sleep(2)

    with pytest.raises(RunFailed, match="node 1 failed in round 1: KeyError: 'lost'") as failure:
        play(tmp_path, script, stop={"rounds": 3})
    assert (failure.value.node, failure.value.round) == (1, 1)


def test_failure_names_the_round_in_which_it_happened(tmp_path: Path) -> None:
    """The protocol goes on until the failure of its spawned task is noticed and it is cancelled."""

    async def script(node: Node) -> None:
        async def fail() -> None:
            raise KeyError("lost")

        async for r in node.rounds():
            if r == 2:
                node.spawn(fail())
            for _ in range(3):  # the task fails in the first of these turns
                await asyncio.sleep(0)

    with pytest.raises(RunFailed, match="node 0 failed in round 2: KeyError: 'lost'") as failure:
        play(tmp_path, script, 1, stop={"rounds": 20})
    assert failure.value.round == 2


def test_task_failing_after_its_protocol_returned_fails_the_run(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        async def fail() -> None:
            await node.sleep(1)
            raise KeyError("late")

        if node.rank == 0:
            node.spawn(fail())
        else:
            await node.sleep(5)

    with pytest.raises(RunFailed, match="node 0 failed in round 0: KeyError: 'late'"):
        play(tmp_path, script)


def test_exception_on_cancellation_at_the_end_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(node: Node) -> None:
        async def work() -> None:
            try:
                await node.sleep(100)
            finally:
                raise ValueError("on the way out")

        node.spawn(work())
        await node.sleep(1)

    assert play(tmp_path, script).run.status == "done"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.filterwarnings("ignore")
def test_unawaited_coroutine_of_node_fails_its_node_in_every_run(tmp_path: Path) -> None:
    """Python warns once in a process, and never where warnings are ignored."""

    async def script(node: Node) -> None:
        await node.sleep(1)
        if node.rank == 1:
            node.sleep(1)  # type: ignore[unused-coroutine]

    for _ in range(2):
        with pytest.raises(
            RunFailed, match=r"node 1 .*'Node.sleep' was never awaited \(test_node_tasks.py, line \d+\)$"
        ):
            play(tmp_path, script)


def test_call_cancelled_before_it_starts_counts_as_awaited(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.spawn(node.sleep(1)).cancel()
        await node.sleep(1)
        return node.now()

    assert play(tmp_path, script, 1).values[0] == 1.0


def test_python_still_warns_of_other_unawaited_coroutines(tmp_path: Path) -> None:
    class Host(Observer):
        """An observer with a coroutine that it drops."""

        async def forgotten(self) -> None: ...

        def start(self, description: Mapping[str, Any]) -> None:
            self.forgotten()

    async def script(node: Node) -> None:
        await node.sleep(1)

    with pytest.warns(RuntimeWarning, match="forgotten' was never awaited"):
        assert play(tmp_path, script, observer=Host()).run.status == "done"


def test_failing_node_ends_the_tasks_of_all_nodes(tmp_path: Path) -> None:
    ended: list[tuple[int, float]] = []

    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.sleep(1)
            raise ValueError("first")
        try:
            node.spawn(node.receive("never"))
            await node.sleep(100)
        finally:
            ended.append((node.rank, node.now()))

    with pytest.raises(RunFailed, match="node 0"):
        play(tmp_path, script, 3)
    assert sorted(ended) == [(1, 1.0), (2, 1.0)]
    gc.collect()  # a task left pending would warn now, which is an error


def test_metrics_recorded_before_a_failure_are_kept(tmp_path: Path) -> None:
    from gossamer import load_run

    async def script(node: Node) -> None:
        async for r in node.rounds():
            assert r < 3, "enough"
            await node.sleep(1)

    with pytest.raises(RunFailed) as failure:
        play(tmp_path, script, stop={"rounds": 5}, evaluation={"every_rounds": 1})
    assert failure.value.folder is not None
    kept = load_run(failure.value.folder)
    assert kept.status == "failed"
    assert kept.error is not None
    assert "enough" in kept.error
    assert kept.metrics["round"].max() == 3


# --- deadlocks and spinning ---


def test_deadlock_fails_and_names_each_wait(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.receive(("model", 7), source=2)
        elif node.rank == 1:
            await node.gather([0, 2], "grad")
        else:
            node.spawn(node.receive())
            await node.receive("left")

    with pytest.raises(Deadlock) as failure:
        play(tmp_path, script, 3)
    text = str(failure.value)
    assert "node 0 for tag ('model', 7) from ranks [2]" in text
    assert "node 1 for tag 'grad' from ranks [0, 2]" in text
    assert "node 2 for tag 'left' from anyone; any message from anyone" in text or (
        "node 2 for any message from anyone; tag 'left' from anyone" in text
    )


def test_deadlocked_gather_names_only_the_missing_ranks(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        if node.rank == 0:
            await node.gather([1, 2], "m")
        elif node.rank == 1:
            node.send(0, None, "m")

    with pytest.raises(Deadlock, match=r"node 0 for tag 'm' from ranks \[2\]") as failure:
        play(tmp_path, script, 3)
    assert "node 1 for" not in str(failure.value)
    assert str(failure.value).endswith("; nodes 1, 2 returned after 0 rounds")


def test_deadlock_is_detected_under_evaluation_by_time(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        await node.receive("never")

    evaluation = {"every_rounds": None, "every_s": 1.0}
    with pytest.raises(Deadlock, match="nodes 0, 1 for tag 'never'"):
        play(tmp_path, script, evaluation=evaluation, observer=Limit(300))


def test_node_that_never_lets_time_pass_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_PASSES", 50)

    async def script(node: Node) -> None:
        await node.sleep(1)
        while node.rank == 2:
            await node.sleep(0)

    with pytest.raises(RunFailed, match=r"is stuck at 1\.0+ s: node 2 ") as failure:
        play(tmp_path, script, 3)
    assert failure.value.node == 2


def test_node_whose_rounds_take_no_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run with a time limit would never reach it."""
    monkeypatch.setattr(host, "MAX_PASSES", 50)

    async def script(node: Node) -> None:
        await node.sleep(1)
        async for _ in node.rounds():
            if node.rank != 2:
                await node.sleep(0.25)

    stop = {"time_s": 10.0}
    with pytest.raises(
        RunFailed, match=r"node 2 failed in round \d+: .*without letting time pass"
    ) as failure:
        play(tmp_path, script, 3, stop=stop)
    assert failure.value.node == 2
    assert failure.value.folder is not None
    # A few rounds that take no time, with time between them, are no error.

    async def now_and_then(node: Node) -> None:
        async for r in node.rounds():
            if r % 20 == 0:
                await node.sleep(1)

    recorded = play(tmp_path, now_and_then, 2, stop=stop, evaluation={"every_rounds": 20}).run
    assert recorded.status == "done"
    assert recorded.metrics["round"].max() >= 180


@pytest.mark.parametrize("how", ["protocol", "spawned"])
def test_endless_loop_of_asyncio_sleep_zero_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(core, "MAX_PASSES", 50)
    ended: list[int] = []

    async def script(node: Node) -> None:
        async def spin() -> None:
            while True:
                await asyncio.sleep(0)

        await node.sleep(1)
        try:
            if node.rank == 1:
                await (spin() if how == "protocol" else node.spawn(spin()))
            await node.sleep(5)
        finally:
            ended.append(node.rank)

    with pytest.raises(RunFailed, match=r"is stuck at 1\.0+ s: .*without letting time pass") as failure:
        play(tmp_path, script, 3)
    assert failure.value.folder is not None
    assert sorted(ended) == [0, 1, 2]
    gc.collect()  # a loop or task left behind would warn now, which is an error


def test_many_short_sleeps_do_not_count_as_spinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_PASSES", 50)

    async def script(node: Node) -> Any:
        for _ in range(200):
            await node.sleep(0.01)
        return node.now()

    assert play(tmp_path, script, 1).values[0] == pytest.approx(2.0)


def test_simulation_uses_no_asyncio_timers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a timer of asyncio")

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", refuse)
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", refuse)

    async def script(node: Node) -> Any:
        other = 1 - node.rank
        async for r in node.rounds():
            await node.train()
            await node.send(other, node.parameters, ("m", r))
            await node.mix(await node.gather([other], ("m", r), timeout=1.0), {other: 0.5})
            with pytest.raises(TimeoutError):
                await node.receive(timeout=0.1)
            await node.sleep(0.1)
        return node.round

    assert play(tmp_path, script, stop={"rounds": 3}).values == {0: 3, 1: 3}
