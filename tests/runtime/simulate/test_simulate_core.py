from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import Deadlock, RunFailed
from gossamer.node.waiting import NodeTask, Slot, resolve
from gossamer.runtime.simulate import core as core_module
from gossamer.runtime.simulate.core import NS, Core, Order, to_ns
from gossamer.runtime.simulate.fiber import SimSlot

Events = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from([order for order in Order if order < Order.END]), st.integers(0, 3)
    ),
    max_size=25,
)


def drain(core: Core) -> None:
    """Advance until no event is left."""
    try:
        while True:
            core.advance()
    except Deadlock:
        return


def noting(log: list[object], note: object) -> Callable[[], None]:
    return lambda: log.append(note)


@given(Events)
def test_events_run_by_time_kind_rank_and_insertion_order(events: list[tuple[int, Order, int]]) -> None:
    core, log = Core(), []
    for number, (time, order, rank) in enumerate(events):
        core.at(time * NS, order, rank, noting(log, (time, order, rank, number)))
    drain(core)
    assert log == sorted(log)


@given(Events, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_interleaving_of_ranks(
    events: list[tuple[int, Order, int]], random: object
) -> None:
    """The same events with the ranks interleaved differently; the order within each rank stays."""

    def run(interleaved: list[tuple[int, tuple[int, Order, int]]]) -> list[object]:
        core, log = Core(), []
        for number, (time, order, rank) in interleaved:
            core.at(time * NS, order, rank, noting(log, (rank, number)))
        drain(core)
        return log

    numbered = list(enumerate(events))
    queues = {rank: [item for item in numbered if item[1][2] == rank] for rank in range(4)}
    shuffled = []
    while any(queues.values()):
        rank = random.choice([rank for rank, queue in queues.items() if queue])  # type: ignore[attr-defined]
        shuffled.append(queues[rank].pop(0))
    assert run(numbered) == run(shuffled)


def test_mixes_run_after_other_events_and_before_the_end() -> None:
    core, log = Core(), []
    core.at(NS, Order.END, 0, noting(log, "end"))
    core.at(NS, Order.TIMER, 0, noting(log, "timer"))
    core.at(NS, Order.DELIVERY, 5, noting(log, "delivery"))

    def commit() -> None:
        log.append("commit")
        core.when_quiet(1, noting(log, "mix 1"))
        core.when_quiet(
            0, lambda: (log.append("mix 0"), core.at(NS, Order.TIMER, 0, noting(log, "after mix")))
        )

    core.at(NS, Order.COMMIT, 9, commit)
    core.at(NS, Order.ARRIVAL, 9, noting(log, "arrival"))
    drain(core)
    assert log == [
        "commit",
        "arrival",
        "delivery",
        "timer",
        "mix 0",
        "mix 1",
        "after mix",
        "end",
    ]
    assert core.now() == 1.0


def test_event_added_for_the_current_instant_runs_in_order() -> None:
    core, log = Core(), []
    core.at(NS, Order.TIMER, 0, noting(log, "timer"))
    core.at(NS, Order.ARRIVAL, 7, lambda: core.at(NS, Order.DELIVERY, 7, noting(log, "delivery")))
    drain(core)
    assert log == ["delivery", "timer"]


def test_event_set_in_the_past_runs_now() -> None:
    core, log = Core(), []
    core.at(NS, Order.TIMER, 0, lambda: core.at(0, Order.TIMER, 0, lambda: log.append(core.now())))
    drain(core)
    assert log == [1.0]


def test_cancelled_event_does_not_run() -> None:
    core, log = Core(), []
    event = core.after(1.0, Order.TIMER, 0, noting(log, "cancelled"))
    core.after(2.0, Order.TIMER, 0, noting(log, "kept"))
    event.cancel()
    drain(core)
    assert log == ["kept"]


def test_cancelled_events_leave_the_heap() -> None:
    core, log = Core(), []
    core.after(5000.0, Order.TIMER, 1, noting(log, "late"))
    largest = 0
    for number in range(10_000):
        core.after(1000.0 + number, Order.TIMER, 0, noting(log, "cancelled")).cancel()
        largest = max(largest, core._scheduled)
    assert largest < 3000
    core.after(1.0, Order.TIMER, 2, noting(log, "soon"))
    drain(core)
    assert log == ["soon", "late"]
    assert core.now() == 5000.0


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60), st.integers(0, 3))
def test_many_cancellations_leave_other_events_unchanged(events: list[tuple[int, bool]], rounds: int) -> None:
    core, log = Core(), []
    scheduled = [
        (core.after(float(time), Order.TIMER, 0, noting(log, (time, number))), kept)
        for number, (time, kept) in enumerate(events)
    ]
    for _ in range(rounds * 600):
        core.after(7.5, Order.TIMER, 0, noting(log, "cancelled")).cancel()
    for event, kept in scheduled:
        if not kept:
            event.cancel()
            event.cancel()
    drain(core)
    assert log == sorted((time, number) for number, (time, kept) in enumerate(events) if kept)


@given(st.integers(0, 2**62 - 1))
def test_whole_nanoseconds_are_kept(ns: int) -> None:
    core = Core()
    core.at(ns, Order.TIMER, 0, lambda: None)
    core.advance()
    assert core.now_ns == ns


@pytest.mark.parametrize(
    ("seconds", "ns"), [(0.0, 0), (1e-9, 1), (4e-10, 0), (0.1, 100_000_000), (2**25, 2**25 * NS)]
)
def test_seconds_are_rounded_to_nanoseconds(seconds: float, ns: int) -> None:
    assert to_ns(seconds) == ns


@pytest.mark.parametrize("seconds", [-1e-12, float("inf"), float("nan")])
def test_invalid_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"seconds: got .*; accepted: a finite number, at least 0"):
        to_ns(seconds)


def test_deadlock_error_quotes_what_nodes_wait_for() -> None:
    core = Core()
    core.waiting = lambda: "node 3 for tag 'm'"
    with pytest.raises(Deadlock, match="all nodes wait and nothing is under way: node 3 for tag 'm'"):
        core.advance()


def test_spinning_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that schedules another event for the same instant whenever it runs."""
    monkeypatch.setattr(core_module, "MAX_PASSES", 100)
    core = Core()

    def spin(passes: int) -> None:
        for _ in range(passes):
            core.after(0.0, Order.TIMER, 4, lambda: None)
            core.advance()

    core.after(2.0, Order.TIMER, 0, lambda: None)
    core.advance()
    spin(90)
    core.after(1.0, Order.TIMER, 0, lambda: None)
    core.advance()  # time has passed, so the count restarts
    spin(90)
    with pytest.raises(RunFailed, match=r"is stuck at 3\.0+ s: node 4 ") as failure:
        spin(20)
    assert failure.value.node == 4


def test_node_spinning_through_mixes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_PASSES", 100)
    core = Core()

    def again() -> None:
        core.when_quiet(6, again)

    def spin() -> None:
        for _ in range(1000):
            core.advance()

    again()
    with pytest.raises(RunFailed, match="node 6 ") as failure:
        spin()
    assert failure.value.node == 6


def test_turns_at_one_instant_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_PASSES", 100)
    core = Core()

    async def turns(passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)

    async def main() -> None:
        for _ in range(3):  # time passes, so the count restarts
            await turns(90)
            await asleep(core, 1.0)
        await turns(101)

    with pytest.raises(RunFailed, match=r"is stuck at 3\.0+ s: .*without letting time pass"):
        core.run(main())


def asleep(core: Core, seconds: float) -> SimSlot:
    slot = core.slot()
    core.after(seconds, Order.TIMER, 0, resolve, slot)
    return slot


def test_core_advances_time_when_all_coroutines_wait() -> None:
    core = Core()

    async def main() -> list[float]:
        times = []
        for seconds in (1.5, 10_000_000.0):
            await asleep(core, seconds)
            times.append(core.now())
        return times

    assert core.run(main()) == [1.5, 10_000_001.5]


def test_fibers_resume_in_the_order_in_which_they_were_woken() -> None:
    core, log = Core(), []

    async def work(name: str, seconds: float) -> str:
        log.append(f"{name} starts")
        await asleep(core, seconds)
        log.append(f"{name} resumes")
        await asyncio.sleep(0)
        log.append(f"{name} ends")
        return name

    async def main() -> list[str]:
        fibers = [core.spawn(work(name, 1.0)) for name in "ab"]
        log.append("main waits")
        return [await fiber for fiber in fibers]

    assert core.run(main()) == ["a", "b"]
    assert log == [
        *("main waits", "a starts", "b starts"),
        *("a resumes", "b resumes", "a ends", "b ends"),
    ]


def test_cancelling_a_fiber_cancels_what_it_awaits() -> None:
    """As asyncio's tasks do: a slot, another fiber, or, if it is about to continue, its next step."""
    core, ended = Core(), []

    async def noting(name: str, awaited: Any) -> None:
        try:
            await awaited
        except asyncio.CancelledError:
            ended.append((name, core.now()))
            raise

    async def main() -> None:
        inner = core.spawn(noting("inner", asleep(core, 5.0)))
        outer = core.spawn(noting("outer", inner))
        due = asleep(core, 1.0)
        woken = core.spawn(noting("woken", due))
        await asleep(core, 0.5)
        assert outer.cancel()
        await asyncio.wait([inner, outer])
        assert (inner.cancelled(), outer.cancelled(), woken.done()) == (True, True, False)
        await asyncio.sleep(0)
        due.set_result(None)
        assert woken.cancel()  # its result is there, but it has not continued yet
        with pytest.raises(asyncio.CancelledError):
            await woken
        assert not woken.cancel()
        with pytest.raises(asyncio.CancelledError):
            woken.result()

    core.run(main())
    assert ended == [("inner", 0.5), ("outer", 0.5), ("woken", 0.5)]


def test_fiber_tells_how_it_ended() -> None:
    core = Core()

    async def fail() -> None:
        raise KeyError("lost")

    async def give() -> int:
        return 3

    async def main() -> None:
        failing, giving = core.spawn(fail()), core.spawn(give())
        assert isinstance(giving, NodeTask)
        assert isinstance(core.slot(), Slot)
        with pytest.raises(asyncio.InvalidStateError):
            giving.result()
        assert not giving.done()
        with pytest.raises(KeyError, match="lost"):
            await failing
        assert isinstance(failing.exception(), KeyError)
        assert (giving.result(), giving.exception(), giving.cancelled()) == (3, None, False)

    core.run(main())


def test_awaiting_what_nothing_can_end_is_an_error() -> None:
    """A future of another event loop, or a slot for which another task waits already."""
    core = Core()
    loop = asyncio.new_event_loop()
    slot = core.slot()

    async def wait(awaited: Any) -> None:
        await awaited

    async def main() -> None:
        core.spawn(wait(slot))
        await asyncio.sleep(0)
        for awaited in (loop.create_future(), slot):
            with pytest.raises(RuntimeError, match="which nothing in this simulation can end"):
                await core.spawn(wait(awaited))
        slot.set_result(None)

    try:
        core.run(main())
    finally:
        loop.close()
