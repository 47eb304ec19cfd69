"""asyncio's objects in authors' code: they work as under asyncio, alone and inside a running event loop (as in a notebook)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gossamer import Node, RunFailed
from scenario import Played, play

Script = Callable[[Node], Coroutine[Any, Any, Any]]


def inside(tmp_path: Path, script: Script, nodes: int = 1, **fields: Any) -> Played:
    """Play a script while an event loop runs in this thread, which can be used afterwards."""

    async def cell() -> Played:
        loop, task, hooks = asyncio.get_running_loop(), asyncio.current_task(), sys.get_asyncgen_hooks()
        try:
            return play(tmp_path, script, nodes, **fields)
        finally:
            assert asyncio.get_running_loop() is loop
            assert asyncio.current_task() is task
            assert sys.get_asyncgen_hooks() == hooks
            await asyncio.sleep(0)

    return asyncio.run(cell())


WHERE = pytest.mark.parametrize("played", [play, inside])


async def scene(spawn: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[str]:
    """Tasks that wait for each other by all of asyncio's means. Returns the order in which they resume."""
    log: list[str] = []
    ready, queue, lock = asyncio.Event(), asyncio.Queue[int](2), asyncio.Lock()
    turns = asyncio.get_running_loop().create_future()

    async def work(name: str, sleeps: int, *, fails: bool = False) -> str:
        try:
            log.append(f"{name} starts")
            for _ in range(sleeps):
                await asyncio.sleep(0)
                log.append(f"{name} goes on")
            await ready.wait()
            log.append(f"{name} is ready")
            async with lock:
                await asyncio.sleep(0)
                log.append(f"{name} had the lock")
            if fails:
                raise KeyError(name)
        except asyncio.CancelledError:
            log.append(f"{name} is cancelled")
            raise
        return name

    async def produce() -> None:
        for k in range(5):
            await queue.put(k)
            log.append(f"put {k}")
        turns.set_result("turned")

    async def consume(name: str) -> int:
        total = 0
        while (k := await queue.get()) < 3:
            log.append(f"{name} got {k}")
            total += k
            await asyncio.sleep(0)
        return total

    first, second, third = (spawn(work(name, k)) for k, name in enumerate("abc"))
    consumers = asyncio.gather(consume("x"), consume("y"))
    shielded = asyncio.shield(second)
    producer = spawn(produce())
    await asyncio.sleep(0)
    ready.set()
    log.append(f"main: {await turns}")
    done, left = await asyncio.wait([first, second, third], return_when=asyncio.FIRST_COMPLETED)
    log.append(f"main: {len(done)} of {len(done) + len(left)}")
    third.cancel()
    ended = await asyncio.gather(third, work("d", 0), work("e", 1, fails=True), return_exceptions=True)
    log.append(f"main: {[type(end).__name__ for end in ended]}")
    waiting = asyncio.ensure_future(asyncio.shield(spawn(work("f", 2))))
    await asyncio.sleep(0)
    waiting.cancel()
    for cancelled in (waiting, asyncio.create_task(work("g", 9))):
        cancelled.cancel()
        try:
            await cancelled
        except asyncio.CancelledError:
            log.append("main: cancelled")
    log.append(f"main: {await consumers} {await shielded} {await producer}")
    for ended_task in asyncio.as_completed([spawn(work("h", 1)), spawn(work("i", 0))]):
        log.append(f"main: {await ended_task}")
    condition = asyncio.Condition()

    async def notified(name: str) -> None:
        async with condition:
            await condition.wait()
            log.append(f"{name} is notified")

    waiters = [spawn(notified(name)) for name in "jk"]
    await asyncio.sleep(0)
    async with condition:
        condition.notify_all()
    await asyncio.wait(waiters)
    return log


@WHERE
def test_order_in_which_tasks_resume_is_that_of_asyncio(
    tmp_path: Path, played: Callable[..., Played]
) -> None:
    expected = asyncio.run(scene(asyncio.ensure_future))
    assert len(expected) > 40

    async def script(node: Node) -> Any:
        await node.sleep(1)
        return await scene(node.spawn), node.now()

    assert played(tmp_path, script, 1).values[0] == (expected, 1.0)


@WHERE
def test_event_made_by_one_task_wakes_others_in_virtual_time(
    tmp_path: Path, played: Callable[..., Played]
) -> None:
    async def script(node: Node) -> Any:
        ready = asyncio.Event()

        async def wait(seconds: float) -> float:
            await ready.wait()
            await node.sleep(seconds)
            return node.now()

        waiting = asyncio.gather(wait(0.5), wait(0.25))
        await node.sleep(2)
        ready.set()
        return await waiting

    assert played(tmp_path, script, 2).values == {0: [2.5, 2.25], 1: [2.5, 2.25]}


def test_coroutines_given_to_asyncio_are_tasks_of_the_node(tmp_path: Path) -> None:
    """They are cancelled with it, after its spawned tasks or before."""
    ended: list[tuple[int, str, float]] = []

    async def script(node: Node) -> Any:
        async def endless(name: str) -> None:
            try:
                await node.sleep(1000)
            finally:
                ended.append((node.rank, name, node.now()))

        tasks = asyncio.create_task(endless("create_task")), asyncio.gather(endless("gather"))
        tasks += (asyncio.shield(endless("shield")),)
        await node.sleep(1 + node.rank)
        return tasks[0]

    task = play(tmp_path, script).values[0]
    assert sorted(ended) == [
        (rank, name, 2.0) for rank in (0, 1) for name in ("create_task", "gather", "shield")
    ]
    assert task.cancelled()


def test_exceptions_of_coroutines_given_to_gather_are_its_own(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        never = [node.receive(("never", k), timeout=0.5) for k in range(2)]
        results = await asyncio.gather(*never, node.sleep(1), return_exceptions=True)
        with pytest.raises(TimeoutError):
            await asyncio.gather(node.receive("never", timeout=0.5))
        return [type(result).__name__ for result in results], node.now()

    assert play(tmp_path, script, 1).values[0] == (["TimeoutError", "TimeoutError", "NoneType"], 1.5)


def test_exception_of_a_created_task_that_nobody_awaits_fails_the_node(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        async def fail() -> None:
            raise KeyError("lost")

        task = asyncio.create_task(fail())
        await node.sleep(1)
        return task

    with pytest.raises(RunFailed, match="node 0 failed in round 0: KeyError: 'lost'"):
        play(tmp_path, script, 1)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda node: asyncio.sleep(1), "the event loop's call_later"),
        (lambda node: asyncio.wait_for(node.spawn(node.sleep(2)), 1.0), "the event loop's (call_later|time)"),
        (lambda node: asyncio.wait([node.spawn(node.sleep(1))], timeout=1.0), "the event loop's call_later"),
        (lambda node: asyncio.to_thread(print), "the event loop's run_in_executor"),
        (lambda node: in_group(), "TaskGroup"),
        (lambda node: timed(1.0), "the event loop's time"),
        (lambda node: timed(None), "timeout"),
    ],
)
@WHERE
def test_what_does_not_work_in_virtual_time_is_refused_in_one_line(
    tmp_path: Path, played: Callable[..., Played], call: Callable[[Node], Any], what: str
) -> None:
    async def script(node: Node) -> None:
        await call(node)

    with pytest.raises(
        RunFailed,
        match=rf"^node 0 failed in round 0: GossamerError: {what} of asyncio does not work in virtual time; accepted:"
        r" node\.sleep, node\.spawn, and timeout= of gather, receive and ask \(test_simulate_adapter\.py, line \d+\)$",
    ):
        played(tmp_path, script, 1)


async def in_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))


async def timed(seconds: float | None) -> None:
    async with asyncio.timeout(seconds):
        pass


def test_async_generators_end_within_the_run(tmp_path: Path) -> None:
    """An event loop outside would end them after the run, when nothing can be awaited any more."""
    ended: list[float] = []

    async def script(node: Node) -> Any:
        async def numbers() -> Any:
            try:
                for k in range(10):
                    await node.sleep(1)
                    yield k
            finally:
                ended.append(node.now())

        async for k in numbers():
            if k == 2:
                break
        await node.sleep(1)

    inside(tmp_path, script)
    assert ended == [3.0]
