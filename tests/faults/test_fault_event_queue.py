"""The event queue: ordered events, and one absence for overlapping intervals of a node."""

from __future__ import annotations

import math
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from gossamer.faults import FaultEventQueue, FaultInterval

times = st.integers(0, 20).map(float)
lengths = st.one_of(st.integers(1, 10).map(float), st.just(math.inf))
absences = st.builds(
    lambda from_s, length, kind, node: FaultInterval(from_s, from_s + length, kind, node),
    times,
    lengths,
    st.sampled_from(["crash", "leave"]),
    st.integers(0, 2),
)


@given(st.lists(absences, max_size=12), st.lists(absences, max_size=3))
def test_node_is_away_during_all_of_its_intervals(
    intervals: list[FaultInterval], late: list[FaultInterval]
) -> None:
    queue = FaultEventQueue(iter(sorted(intervals, key=lambda interval: interval.from_s)))
    for interval in late:
        queue.add(interval)
    events = [event for now in range(40) for event in queue.due(float(now))]
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)
    for node in range(3):
        own = [event for event in events if event.node == node]
        assert [event.what == "return" for event in own] == [k % 2 == 1 for k in range(len(own))]
        for now in range(40):
            absent = sum(1 if event.what != "return" else -1 for event in own if event.time_s <= now)
            assert absent == any(s.node == node and s.from_s <= now < s.to_s for s in intervals + late)
        for_good = any(s.node == node and math.isinf(s.to_s) for s in intervals + late)
        assert not (queue.returns(node) and for_good)
    assert queue.next_s == math.inf


def test_endless_intervals_are_taken_only_when_due() -> None:
    taken = []

    def intervals() -> object:
        for number in count():
            taken.append(number)
            yield FaultInterval(number, number + 0.5, "crash", 0)

    queue = FaultEventQueue(intervals())  # type: ignore[arg-type]
    assert len(list(queue.due(10.2))) == 21
    assert len(taken) == 12
    assert queue.next_s == 10.5
    assert queue.returns(0)


def test_intervals_without_a_node_start_and_end() -> None:
    queue = FaultEventQueue(iter([FaultInterval(1.0, 2.0, "partition", detail="groups of 2, 2")]))
    assert [(e.time_s, e.what, e.detail) for e in queue.due(5.0)] == [
        (1.0, "partition", "groups of 2, 2"),
        (2.0, "healed", ""),
    ]
