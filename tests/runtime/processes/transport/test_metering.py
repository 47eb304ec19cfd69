"""Buckets, lines and downlinks on a clock that the test controls, against closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from fake_loop import FakeLoop
from hypothesis import given
from hypothesis import strategies as st

from gossamer.runtime.processes.transport.shaper import CATCH_UP_S, LATE_S, Bucket, Downlink, OrderedCalls

RATE = 1e6  # bytes a second: a byte takes a microsecond
PIECE = 16_384


def ignore(*_: Any) -> None:
    pass


# --- a bucket


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 100)), min_size=1, max_size=20))
def test_bucket_passes_bytes_in_order_and_not_before_arrival(
    taken: list[tuple[int, float]],
) -> None:
    """The closed form: the last byte of message i passes at the maximum over j <= i of (start of j + time of j to i)."""
    bucket = Bucket(RATE)
    for i, (nbytes, since) in enumerate(taken):
        due = max(taken[j][1] + sum(n for n, _ in taken[j : i + 1]) / RATE for j in range(i + 1))
        assert bucket.take(nbytes, since) == pytest.approx(due, abs=1e-9)


def test_unlimited_bucket_takes_no_time() -> None:
    bucket = Bucket()
    assert bucket.take(10**9, 3.0) == 3.0
    assert bucket.take(10**9, -math.inf) == 3.0
    bucket.change(RATE, 4.0)
    assert bucket.take(10**6, 4.0) == 5.0


def test_rate_change_applies_to_bytes_still_to_pass() -> None:
    bucket = Bucket(RATE)
    bucket.take(3_000_000, 0.0)
    bucket.change(RATE / 2, 1.0)
    assert bucket.free == 5.0  # a million bytes in the first second, two in the next four
    bucket.change(4 * RATE, 3.0)
    assert bucket.free == 3.25
    bucket.change(math.inf, 3.125)
    assert bucket.free == 3.125


def test_stalled_bucket_continues_where_it_was() -> None:
    bucket = Bucket(RATE)
    bucket.take(2_000_000, 0.0)
    bucket.change(0.0, 1.0)
    assert bucket.free > 1e5
    bucket.change(RATE, 7.0)
    assert bucket.free == pytest.approx(8.0, abs=1e-4)


def test_returned_bytes_take_no_time() -> None:
    bucket = Bucket(RATE)
    bucket.take(2_000_000, 0.0)
    bucket.give_back(0.5)
    assert bucket.take(1_000_000, 0.0) == 1.5
    bucket.give_back(9.0)
    assert bucket.free == 1.5


# --- a line


def test_line_keeps_its_order_regardless_of_due_times() -> None:
    loop, calls = FakeLoop(), []
    line = OrderedCalls(loop)
    for name, instant in [("a", 101.0), ("b", 100.5), ("c", 102.0), ("d", 102.0)]:
        line.add(instant, lambda name=name: calls.append((name, loop.now)))
    assert calls == []
    loop.run()
    assert calls == [("a", 101), ("b", 101), ("c", 102), ("d", 102)]
    line.add(50.0, lambda: calls.append("at once"))
    assert calls[-1] == "at once"


# --- a downlink


def pour(loop: FakeLoop, downlink: Downlink, at: float, size: int, up: float, turn: int = 0) -> list[float]:
    """Send a message whose pieces arrive at the rate ``up`` of an uplink; gives the list that notes its arrival."""
    arrived: list[float] = []
    ends = [*range(PIECE, size, PIECE), size]
    for begin, end in itertools.pairwise([0, *ends]):
        instant, nbytes = loop.now + at + end / up, end - begin
        done = arrived.append if end == size else None
        loop.call_at(
            instant,
            lambda nbytes=nbytes, done=done: downlink.enter(
                nbytes, loop.now - nbytes / up, turn, ignore, done
            ),
        )
    return arrived


@pytest.mark.parametrize("up", [RATE / 4, RATE / 1.5, RATE, 1.5 * RATE, 40 * RATE, math.inf])
@pytest.mark.parametrize("size", [100, PIECE, 70_000, 1_000_000])
def test_one_flow_arrives_at_the_rate_of_the_slower_link(up: float, size: int) -> None:
    loop = FakeLoop()
    arrived = pour(loop, Downlink(RATE, loop), 0.0, size, up)
    start = loop.now
    loop.run()
    assert arrived == [pytest.approx(start + size / min(up, RATE), abs=1e-9)]


def test_downlink_serves_one_message_after_another() -> None:
    loop = FakeLoop()
    downlink, start, size = Downlink(RATE, loop), loop.now, 500_000
    flows = [pour(loop, downlink, 0.0, size, RATE, turn) for turn in range(3)]
    loop.run()
    # Pieces of later messages may be taken up to LATE_S ahead of the first one's next piece.
    for number, [at] in enumerate(flows, start=1):
        assert number * size / RATE <= at - start + 1e-9 <= number * size / RATE + LATE_S + 3 * PIECE / RATE
    assert flows[-1][0] == pytest.approx(start + 3 * size / RATE)


def test_downlink_is_shared_by_simultaneous_messages() -> None:
    loop = FakeLoop()
    downlink, start, size = Downlink(RATE, loop), loop.now, 500_000
    flows = [pour(loop, downlink, 0.0, size, RATE) for _ in range(3)]
    loop.run()
    last = start + 3 * size / RATE
    assert max(at for [at] in flows) == pytest.approx(last)
    assert min(at for [at] in flows) > last - 3 * PIECE / RATE


def test_flow_that_joins_half_way_halves_the_rate() -> None:
    """The first: half a second alone, then half the rate, 0.5 + 2 * 0.5 seconds. The second has the rest alone."""
    loop = FakeLoop()
    downlink, start = Downlink(RATE, loop), loop.now
    first = pour(loop, downlink, 0.0, 1_000_000, RATE)
    second = pour(loop, downlink, 0.5, 1_000_000, RATE)
    loop.run()
    assert first == [pytest.approx(start + 1.5, abs=3 * PIECE / RATE)]
    assert second == [pytest.approx(start + 2.0)]


def test_late_timers_do_not_slow_a_flow() -> None:
    """Each piece except the last may arrive late; the message does not."""
    loop, rng = FakeLoop(), np.random.default_rng(1)
    downlink, start, size, arrived = Downlink(RATE, loop), loop.now, 100 * PIECE, []
    for number in range(1, 101):
        due = start + number * PIECE / RATE
        late = CATCH_UP_S * float(rng.random()) if 1 < number < 100 else 0.0
        since = -PIECE / RATE - (CATCH_UP_S if number > 1 else 0)
        loop.call_at(
            due + late,
            lambda since=since, n=number: downlink.enter(
                PIECE, loop.now + since, 0, ignore, arrived.append if n == 100 else None
            ),
        )
    loop.run()
    assert arrived == [pytest.approx(start + size / RATE)]


def test_pieces_are_taken_slightly_before_their_turn() -> None:
    loop, taken = FakeLoop(), []
    downlink, start = Downlink(RATE, loop), loop.now
    for number in range(20):
        downlink.enter(PIECE, start, 0, lambda n=number: taken.append((n, loop.now)))
    loop.run()
    assert [number for number, _ in taken] == list(range(20))
    for number, at in taken:
        assert at == pytest.approx(max(start, start + number * PIECE / RATE - LATE_S), abs=PIECE / RATE)


def test_downlink_rate_change_applies_under_way() -> None:
    loop, arrived = FakeLoop(), []
    downlink, start = Downlink(RATE, loop), loop.now
    for _ in range(9):
        downlink.enter(100_000, start, 0, ignore)
    downlink.enter(100_000, start, 0, ignore, arrived.append)
    loop.run(until=start + 0.25)
    downlink.change(RATE / 4)
    loop.run(until=start + 2.25)
    assert arrived == []
    downlink.change(RATE)
    loop.run()
    # 0.25 s, then 2 s at a quarter of the rate, then the last quarter of the bytes.
    assert arrived == [pytest.approx(start + 2.5)]
