"""What nodes know of one another: whatever is heard in which order, all end with the same; a node speaks for itself."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.messages import FrameError
from gossamer.runtime.processes.standalone.roster import (
    AHEAD_S,
    DIGEST_BYTES,
    LEAP,
    MOST_ENTRIES,
    Entry,
    Report,
    Roster,
    State,
)
from gossamer.runtime.processes.transport.wire import STATUS_BYTES

DIGEST = bytes(DIGEST_BYTES)


HIGHEST = 2**32 - 1


def rosters(nodes: int, incarnation: int = 1) -> list[Roster]:
    return [Roster(rank, nodes, incarnation, DIGEST) for rank in range(nodes)]


def tell(source: Roster, to: Roster, nodes: int) -> dict[int, State]:
    return to.take(Report.unpack(source.report().pack(), nodes))


entries = st.builds(
    Entry,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(State),
    st.integers(0, 100),
    st.integers(0, 3),
)
reports = st.builds(
    Report,
    st.just(DIGEST),
    st.sampled_from([None, "time", "stopped", "rounds"]),
    st.dictionaries(st.integers(1, 5), entries),
)


@given(st.lists(reports, max_size=6), st.randoms(use_true_random=False))
def test_order_and_repetition_make_no_difference(said: list[Report], order: random.Random) -> None:
    known = []
    for turn in (said, [*order.sample(said, len(said)), *said]):
        roster = Roster(0, 6, 1, DIGEST)
        for report in turn:
            roster.take(report)
        known.append([roster[rank] for rank in range(6)])
    assert known[0] == known[1]


@given(reports)
def test_a_report_travels_unchanged(report: Report) -> None:
    assert Report.unpack(report.pack(), 6) == report


@given(st.binary(max_size=100))
def test_what_is_no_report_is_refused_as_a_frame_is(data: bytes) -> None:
    with pytest.raises(FrameError, match="^sent a report"):
        Report.unpack(data, 6)


@pytest.mark.parametrize(
    "row",
    [
        [6, 1, 0, 0, 0, 0],
        [0, -1, 0, 0, 0, 0],
        [0, 1, 0, 4, 0, 0],
        [0, 1, 0, 0, 2**32, 0],
        [0, 1, 0, 0, 0],
        ["0", 1, 0, 0, 0, 0],
        [True, 1, 0, 0, 0, 0],
    ],
)
def test_entries_that_no_node_has_are_refused(row: list[object]) -> None:
    with pytest.raises(FrameError):
        Report.unpack(msgpack.packb([DIGEST, None, [row]]), 6)


def test_news_goes_round_in_as_many_steps_as_nodes_are_apart() -> None:
    known = rosters(6)
    for rank in range(5):  # along a line
        tell(known[rank], known[rank + 1], 6)
    assert known[5].unheard() == []
    known[0].say(state=State.DONE)
    for rank in range(5):
        assert tell(known[rank], known[rank + 1], 6) == {0: State.DONE}
    assert tell(known[4], known[5], 6) == {}
    assert known[5].of_state(State.DONE) == [0]


def test_a_node_that_is_said_to_be_lost_contradicts() -> None:
    a, b, c = rosters(3)
    for source, to in ((a, b), (b, a), (c, a)):
        tell(source, to, 3)
    assert a.lose(2)
    assert not a.lose(2)
    tell(a, b, 3)
    assert b.of_state(State.LOST) == [2]
    tell(b, c, 3)
    assert c.own == Entry(1, 1, State.RUNNING, 0, HIGHEST)
    assert tell(c, b, 3) == {2: State.RUNNING}
    tell(a, b, 3)  # older news
    assert b.of_state(State.LOST) == []


def test_what_a_node_says_of_itself_is_not_undone_by_who_loses_it_afterwards() -> None:
    a, b = rosters(2)
    b.say(state=State.DONE, round=7)
    tell(b, a, 2)
    assert not a.lose(1)
    assert a[1] == Entry(1, 0, State.DONE, 7, HIGHEST)


def test_a_later_process_of_a_rank_is_another_one() -> None:
    a, b = rosters(2)
    tell(b, a, 2)
    a.go()
    a.lose(1)
    again = Roster(1, 2, 2, DIGEST)
    assert tell(again, a, 2) == {1: State.RUNNING}
    assert not again.again
    tell(a, again, 2)  # which knows by now that it is there, and that it was before
    assert again.again
    tell(a, b, 2)
    assert b.superseded


def test_who_is_started_again_before_anybody_went_was_not_there_before() -> None:
    a, b, c = rosters(3)
    for source, to in ((b, a), (a, c)):
        tell(source, to, 3)
    again = Roster(1, 3, 2, DIGEST)
    for source, to in ((again, a), (a, again)):
        tell(source, to, 3)
    assert not again.again
    a.go()
    tell(a, again, 3)
    assert not again.again  # a has gone with this process
    c.go()
    tell(c, again, 3)
    assert again.again  # c with the one before


def test_a_forged_entry_neither_ends_a_node_nor_has_it_refused() -> None:
    now_s = 10**9
    a, b, c = (Roster(rank, 3, now_s, DIGEST, clock=lambda: now_s) for rank in range(3))
    for source, to in ((b, a), (c, a), (a, b), (a, c)):
        tell(source, to, 3)
    for number in (LEAP + 1, HIGHEST - 1, HIGHEST):
        forged = {1: Entry(now_s, number, State.LOST, 0, 0)}
        for each in (a, b):
            assert each.take(Report(DIGEST, None, forged), 2) == {}
    for incarnation in (now_s + AHEAD_S + 1, HIGHEST):
        forged = {1: Entry(incarnation, 0, State.LOST, 0, 0)}
        for each in (a, b):
            assert each.take(Report(DIGEST, None, forged), 2) == {}
        with pytest.raises(FrameError, match="more than a day from now"):
            a.take(Report(DIGEST, None, forged), 1)
    assert not b.superseded
    assert b.own.number == 0
    a.lose(1)
    tell(a, b, 3)
    assert tell(b, a, 3) == {1: State.RUNNING}


def test_the_highest_number_is_not_exceeded() -> None:
    a, b = rosters(2)
    a.take(
        Report(DIGEST, None, {0: Entry(1, HIGHEST, State.LOST, 0, 1)}), 0
    )  # as if a liar had got it there in steps
    tell(a, b, 2)
    assert b[0] == a.own
    assert a.own.number == HIGHEST


def test_it_is_over_when_nobody_runs_any_more() -> None:
    a, b, c = rosters(3)
    tell(b, a, 3)
    a.say(state=State.DONE)
    assert not a.over()
    a.lose(1)
    assert not a.over()  # nothing is known of the third
    c.say(state=State.LEFT)
    tell(c, a, 3)
    assert a.over()


def test_the_end_of_all_is_heard_once() -> None:
    a, b = rosters(2)
    a.end = "time"
    tell(a, b, 2)
    assert b.end == "time"
    b.end = "time"
    a.end = "stopped"
    tell(b, a, 2)
    assert a.end == "stopped"


@pytest.mark.parametrize("state", [State.DONE, State.LEFT])
def test_an_end_by_rounds_is_heard_by_who_has_none_left(state: State) -> None:
    a, b = rosters(2)
    a.end = "rounds"
    tell(a, b, 2)
    assert b.end is None
    b.say(state=state)
    tell(a, b, 2)
    assert b.end == "rounds"


def test_the_next_living_rank_goes_round() -> None:
    roster = Roster(2, 4, 1, DIGEST)
    assert roster.next_living([]) == 3
    roster.lose(3)
    assert roster.next_living([]) == 0
    assert roster.next_living([0]) == 1
    assert roster.next_living([0, 1]) is None
    assert Roster(0, 1, 1, DIGEST).next_living([]) is None


def test_a_report_of_many_nodes_fits_and_all_are_told_in_turn() -> None:
    nodes = 1000
    full = Roster(0, nodes, 2**32 - 1, DIGEST, clock=lambda: 2**32)
    full.take(
        Report(
            DIGEST,
            None,
            {rank: Entry(2**32 - 1, 2**32 - 1, State.RUNNING, 10**6, 2**32 - 1) for rank in range(1, nodes)},
        )
    )
    full.take(Report(DIGEST, None, {500: Entry(2**32 - 1, 2**32 - 1, State.DONE, 10**6, 2**32 - 1)}))
    told: set[int] = set()
    for _ in range(2 * nodes // MOST_ENTRIES + 1):
        report = full.report()
        assert len(report.pack()) <= STATUS_BYTES
        assert {0, 500} <= report.entries.keys()
        told |= report.entries.keys()
    assert told == set(range(nodes))
