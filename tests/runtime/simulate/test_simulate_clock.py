from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import Deadlock, RunFailed
from gossamer.runtime.simulate import clock as clock_module
from gossamer.runtime.simulate.clock import NS, Clock, Order, VirtualLoop, to_ns

Events = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from([order for order in Order if order < Order.END]), st.integers(0, 3)
    ),
    max_size=25,
)


def drain(clock: Clock) -> None:
    """Advance until no event is left."""
    try:
        while True:
            clock.advance()
    except Deadlock:
        return


def noting(log: list[object], note: object) -> Callable[[], None]:
    return lambda: log.append(note)


@given(Events)
def test_events_run_by_time_kind_rank_and_insertion_order(events: list[tuple[int, Order, int]]) -> None:
    clock, log = Clock(), []
    for number, (time, order, rank) in enumerate(events):
        clock.at(time * NS, order, rank, noting(log, (time, order, rank, number)))
    drain(clock)
    assert log == sorted(log)


@given(Events, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_interleaving_of_ranks(
    events: list[tuple[int, Order, int]], random: object
) -> None:
    """The same events with the ranks interleaved differently; the order within each rank stays."""

    def run(interleaved: list[tuple[int, tuple[int, Order, int]]]) -> list[object]:
        clock, log = Clock(), []
        for number, (time, order, rank) in interleaved:
            clock.at(time * NS, order, rank, noting(log, (rank, number)))
        drain(clock)
        return log

    numbered = list(enumerate(events))
    queues = {rank: [item for item in numbered if item[1][2] == rank] for rank in range(4)}
    shuffled = []
    while any(queues.values()):
        rank = random.choice([rank for rank, queue in queues.items() if queue])  # type: ignore[attr-defined]
        shuffled.append(queues[rank].pop(0))
    assert run(numbered) == run(shuffled)


def test_mixes_run_after_other_events_and_before_the_end() -> None:
    clock, log = Clock(), []
    clock.at(NS, Order.END, 0, noting(log, "end"))
    clock.at(NS, Order.TIMER, 0, noting(log, "timer"))
    clock.at(NS, Order.DELIVERY, 5, noting(log, "delivery"))

    def commit() -> None:
        log.append("commit")
        clock.when_quiet(1, noting(log, "mix 1"))
        clock.when_quiet(
            0, lambda: (log.append("mix 0"), clock.at(NS, Order.TIMER, 0, noting(log, "after mix")))
        )

    clock.at(NS, Order.COMMIT, 9, commit)
    clock.at(NS, Order.ARRIVAL, 9, noting(log, "arrival"))
    drain(clock)
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
    assert clock.now() == 1.0


def test_event_added_for_the_current_instant_runs_in_order() -> None:
    clock, log = Clock(), []
    clock.at(NS, Order.TIMER, 0, noting(log, "timer"))
    clock.at(NS, Order.ARRIVAL, 7, lambda: clock.at(NS, Order.DELIVERY, 7, noting(log, "delivery")))
    drain(clock)
    assert log == ["delivery", "timer"]


def test_event_set_in_the_past_runs_now() -> None:
    clock, log = Clock(), []
    clock.at(NS, Order.TIMER, 0, lambda: clock.at(0, Order.TIMER, 0, lambda: log.append(clock.now())))
    drain(clock)
    assert log == [1.0]


def test_cancelled_event_does_not_run() -> None:
    clock, log = Clock(), []
    event = clock.after(1.0, Order.TIMER, 0, noting(log, "cancelled"))
    clock.after(2.0, Order.TIMER, 0, noting(log, "kept"))
    event.cancel()
    drain(clock)
    assert log == ["kept"]


def test_cancelled_events_leave_the_heap() -> None:
    clock, log = Clock(), []
    clock.after(5000.0, Order.TIMER, 1, noting(log, "late"))
    largest = 0
    for number in range(10_000):
        clock.after(1000.0 + number, Order.TIMER, 0, noting(log, "cancelled")).cancel()
        largest = max(largest, len(clock._heap))
    assert largest < 3000
    clock.after(1.0, Order.TIMER, 2, noting(log, "soon"))
    drain(clock)
    assert log == ["soon", "late"]
    assert clock.now() == 5000.0


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60), st.integers(0, 3))
def test_many_cancellations_leave_other_events_unchanged(events: list[tuple[int, bool]], rounds: int) -> None:
    clock, log = Clock(), []
    scheduled = [
        (clock.after(float(time), Order.TIMER, 0, noting(log, (time, number))), kept)
        for number, (time, kept) in enumerate(events)
    ]
    for _ in range(rounds * 600):
        clock.after(7.5, Order.TIMER, 0, noting(log, "cancelled")).cancel()
    for event, kept in scheduled:
        if not kept:
            event.cancel()
            event.cancel()
    drain(clock)
    assert log == sorted((time, number) for number, (time, kept) in enumerate(events) if kept)


@given(st.integers(0, 2**62 - 1))
def test_whole_nanoseconds_are_kept(ns: int) -> None:
    clock = Clock()
    clock.at(ns, Order.TIMER, 0, lambda: None)
    clock.advance()
    assert clock.now_ns == ns


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
    clock = Clock()
    clock.waiting = lambda: "node 3 for tag 'm'"
    with pytest.raises(Deadlock, match="all nodes wait and nothing is under way: node 3 for tag 'm'"):
        clock.advance()


def test_spinning_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that schedules another event for the same instant whenever it runs."""
    monkeypatch.setattr(clock_module, "MAX_PASSES", 100)
    clock = Clock()

    def spin(passes: int) -> None:
        for _ in range(passes):
            clock.after(0.0, Order.TIMER, 4, lambda: None)
            clock.advance()

    clock.after(2.0, Order.TIMER, 0, lambda: None)
    clock.advance()
    spin(90)
    clock.after(1.0, Order.TIMER, 0, lambda: None)
    clock.advance()  # time has passed, so the count restarts
    spin(90)
    with pytest.raises(RunFailed, match=r"is stuck at 3\.0+ s: node 4 ") as failure:
        spin(20)
    assert failure.value.node == 4


def test_node_spinning_through_mixes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MAX_PASSES", 100)
    clock = Clock()

    def again() -> None:
        clock.when_quiet(6, again)

    def spin() -> None:
        for _ in range(1000):
            clock.advance()

    again()
    with pytest.raises(RunFailed, match="node 6 ") as failure:
        spin()
    assert failure.value.node == 6


def test_loop_turns_at_one_instant_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MAX_PASSES", 100)
    clock = Clock()
    for second in range(3):  # time has passed, so the count restarts
        for _ in range(90):
            clock.count_turn()
        clock.after(1.0, Order.TIMER, 0, lambda: None)
        clock.advance()
        assert clock.now() == second + 1
    with pytest.raises(RunFailed, match=r"is stuck at 3\.0+ s: .*without letting time pass"):
        for _ in range(101):
            clock.count_turn()


def test_loop_advances_the_clock_when_idle() -> None:
    clock = Clock()
    loop = VirtualLoop(clock)

    async def main() -> list[float]:
        times = []
        for seconds in (1.5, 10_000_000.0):
            done = loop.create_future()
            clock.after(seconds, Order.TIMER, 0, lambda done=done: done.set_result(None))  # type: ignore[misc]
            await done
            times.append(loop.time())
        return times

    try:
        assert loop.run_until_complete(main()) == [1.5, 10_000_001.5]
    finally:
        loop.close()


def test_asyncio_timer_is_refused_instead_of_hanging() -> None:
    """``asyncio.sleep`` in an algorithm would never return: virtual time ignores it."""
    clock = Clock()
    loop = VirtualLoop(clock)

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("asyncio.sleep hangs the run")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(RunFailed, match="sleep"):
            loop.run_until_complete(asyncio.sleep(1.0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
