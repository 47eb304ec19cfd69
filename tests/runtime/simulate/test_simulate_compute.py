from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from gossamer.learning.computation import Computation, ComputationKind
from gossamer.node.waiting import NodeTask
from gossamer.runtime.simulate.compute import Compute
from gossamer.runtime.simulate.core import Core, Order


class Scene:
    """Computations that take ``work`` seconds and return their job; batches are noted."""

    def __init__(self) -> None:
        self.core = Core()
        self.batches: list[tuple[ComputationKind, list[Any]]] = []
        self.committed: list[tuple[float, Any]] = []
        self.compute = Compute(self.core, lambda computation: computation.work, self._execute)

    def _execute(self, kind: ComputationKind, jobs: Sequence[Any]) -> list[Any]:
        self.batches.append((kind, list(jobs)))
        if "broken" in jobs:
            raise ZeroDivisionError("on purpose")
        return list(jobs)

    def submit(
        self, rank: int, work: float, job: Any, kind: ComputationKind = ComputationKind.TRAIN
    ) -> NodeTask[Any]:
        def commit(result: Any) -> Any:
            self.committed.append((self.core.now(), result))
            return result

        async def wait() -> Any:
            return await self.compute.submit(Computation(kind, rank, 0, work, lambda: job, commit))

        return self.core.spawn(wait())

    async def sleep(self, seconds: float) -> None:
        done = self.core.slot()
        self.core.after(seconds, Order.TIMER, 99, done.set_result, None)
        await done

    def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.core.run(script())


def test_concurrent_work_is_one_batch_committed_at_due_times() -> None:
    scene = Scene()

    async def script() -> None:
        tasks = [scene.submit(rank, work, f"job {rank}") for rank, work in ((2, 3.0), (0, 1.0), (1, 2.0))]
        await asyncio.gather(*tasks)

    scene.play(script)
    assert scene.batches == [(ComputationKind.TRAIN, ["job 2", "job 0", "job 1"])]
    assert scene.committed == [(1.0, "job 0"), (2.0, "job 1"), (3.0, "job 2")]


def test_batches_hold_one_kind_and_one_job_per_node() -> None:
    scene = Scene()

    async def script() -> None:
        tasks = [
            scene.submit(0, 1.0, "first"),
            scene.submit(0, 1.0, "next"),
            scene.submit(1, 1.5, "gradient", ComputationKind.GRADIENT),
            scene.submit(2, 2.5, "other"),
        ]
        await asyncio.gather(*tasks)

    scene.play(script)
    assert scene.batches == [
        (ComputationKind.TRAIN, ["first", "other"]),
        (ComputationKind.GRADIENT, ["gradient"]),
        (ComputationKind.TRAIN, ["next"]),
    ]
    assert scene.committed == [(1.0, "first"), (1.5, "gradient"), (2.0, "next"), (2.5, "other")]


def test_cancelled_computation_is_skipped_and_the_next_starts() -> None:
    scene = Scene()

    async def script() -> None:
        first, second = scene.submit(0, 5.0, "first"), scene.submit(0, 1.0, "second")
        await scene.sleep(0.25)
        first.cancel()
        await second

    scene.play(script)
    assert scene.batches == [(ComputationKind.TRAIN, ["second"])]
    assert scene.committed == [(1.25, "second")]


def test_result_cancelled_after_computation_is_not_committed() -> None:
    scene = Scene()

    async def script() -> None:
        early, late = scene.submit(0, 1.0, "early"), scene.submit(1, 5.0, "late")
        await early
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await scene.sleep(10)

    scene.play(script)
    assert scene.batches == [(ComputationKind.TRAIN, ["early", "late"])]
    assert scene.committed == [(1.0, "early")]


def test_error_is_raised_where_the_computation_is_awaited() -> None:
    scene = Scene()

    async def script() -> None:
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            await scene.submit(0, 1.0, "broken")
        assert await scene.submit(0, 1.0, "fine") == "fine"

    scene.play(script)
    assert scene.committed == [(2.0, "fine")]


def test_error_in_a_batch_fails_only_its_own_node() -> None:
    scene = Scene()

    async def script() -> None:
        fine, broken = scene.submit(0, 1.0, "fine"), scene.submit(1, 1.0, "broken")
        results = await asyncio.gather(fine, broken, return_exceptions=True)
        assert results[0] == "fine"
        assert isinstance(results[1], ZeroDivisionError)

    scene.play(script)


def test_vectors_are_written_before_jobs_are_prepared() -> None:
    """An optimizer may read the parameters when it makes its state."""
    order: list[str] = []
    core = Core()
    compute = Compute(core, lambda _: 1.0, lambda kind, jobs: list(jobs), lambda: order.append("settle"))

    async def script() -> None:
        computation = Computation(
            ComputationKind.TRAIN, 0, 0, 1.0, lambda: order.append("prepare"), lambda result: None
        )
        await compute.submit(computation)

    core.run(script())
    assert order == ["settle", "prepare"]


def test_duration_is_requested_at_the_start_and_may_fail() -> None:
    """An exception in a user's profile fails that computation; the node's others go on."""
    core = Core()
    asked: list[tuple[float, Any]] = []

    def seconds(computation: Computation) -> float:
        asked.append((core.now(), computation.first_step))
        return 2.0 if computation.first_step != 1 else -1.0

    compute = Compute(core, seconds, lambda kind, jobs: list(jobs))

    async def script() -> None:
        computations = [
            Computation(ComputationKind.TRAIN, 0, step, 1.0, lambda: None, lambda result: core.now())
            for step in range(3)
        ]
        first, broken, last = (core.spawn(compute.submit(item)) for item in computations)
        with pytest.raises(ValueError, match=r"got -1\.0"):
            await broken
        assert (await first, await last) == (2.0, 4.0)

    core.run(script())
    assert asked == [(0.0, 0), (2.0, 1), (2.0, 2)]
