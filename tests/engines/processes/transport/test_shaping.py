"""Buckets, lines and a node's part of a network, on a clock of the test's own: closed forms."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from given_network import Given
from hypothesis import given
from hypothesis import strategies as st

from gossamer.engines.processes.transport.shaping import (
    CATCH_UP_S,
    LATE_S,
    Bucket,
    Departure,
    Downlink,
    Line,
    Shaper,
    is_limited,
    simplified,
)
from gossamer.network import Conditions, Network, Path, Uniform
from gossamer.network.fate import fate
from gossamer.network.network import Access

RATE = 1e6  # bytes a second: a byte takes a microsecond
PIECE = 16_384


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """A clock that stands where the test puts it; timers are late by a time that may be set."""

    def __init__(self) -> None:
        self.now, self.late = 100.0, 0.0
        self._timers: list[tuple[float, int, Timer, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        timer = Timer()
        heapq.heappush(self._timers, (when, next(self._numbers), timer, callback, args))
        return timer

    def run(self, until: float = math.inf) -> None:
        while self._timers and self._timers[0][0] + self.late <= until:
            when, _, timer, callback, args = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.now = max(self.now, when + self.late)
                callback(*args)
        if not math.isinf(until):
            self.now = max(self.now, until)


class Fixed(Conditions):
    """Rates and paths as a test gives them; of pairs that it doesn't name, there is no path."""

    def __init__(self, rates: list[float], paths: dict[tuple[int, int], Path]) -> None:
        self.rates, self._paths = np.array(rates), paths

    def path(self, source: int, to: int) -> Path | None:
        return self._paths.get((source, to))


def ignore(*_: Any) -> None:
    pass


# --- a bucket


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 100)), min_size=1, max_size=20))
def test_bytes_pass_one_after_another_and_only_when_they_are_there(
    taken: list[tuple[int, float]],
) -> None:
    """The closed form: the last byte of what came i-th passes at max over j <= i of (its start + all from j to i)."""
    bucket = Bucket(RATE)
    for i, (nbytes, since) in enumerate(taken):
        due = max(taken[j][1] + sum(n for n, _ in taken[j : i + 1]) / RATE for j in range(i + 1))
        assert bucket.take(nbytes, since) == pytest.approx(due, abs=1e-9)


def test_an_unlimited_bucket_takes_no_time() -> None:
    bucket = Bucket()
    assert bucket.take(10**9, 3.0) == 3.0
    assert bucket.take(10**9, -math.inf) == 3.0
    bucket.change(RATE, 4.0)
    assert bucket.take(10**6, 4.0) == 5.0


def test_what_has_not_passed_when_the_rate_changes_passes_at_the_new_one() -> None:
    bucket = Bucket(RATE)
    bucket.take(3_000_000, 0.0)
    assert bucket.change(RATE / 2, 1.0) == 2.0
    assert bucket.free == 5.0  # a million bytes in the first second, two in the next four
    bucket.change(4 * RATE, 3.0)
    assert bucket.free == 3.25
    bucket.change(math.inf, 3.125)
    assert bucket.free == 3.125


def test_a_link_of_rate_zero_goes_on_where_it_was() -> None:
    bucket = Bucket(RATE)
    bucket.take(2_000_000, 0.0)
    bucket.change(0.0, 1.0)
    assert bucket.free > 1e5
    bucket.change(RATE, 7.0)
    assert bucket.free == pytest.approx(8.0, abs=1e-4)


def test_what_is_given_back_takes_no_time() -> None:
    bucket = Bucket(RATE)
    bucket.take(2_000_000, 0.0)
    bucket.give_back(0.5)
    assert bucket.take(1_000_000, 0.0) == 1.5
    bucket.give_back(9.0)
    assert bucket.free == 1.5


def test_a_bucket_knows_for_how_long_something_has_passed() -> None:
    bucket = Bucket(RATE)
    assert bucket.busy_seconds(5.0) == 0.0
    bucket.take(1_000_000, 10.0)
    assert [bucket.busy_seconds(now) for now in (10.25, 11.0, 12.0)] == [0.25, 1.0, 1.0]
    bucket.take(1_000_000, 20.0)
    bucket.change(RATE / 2, 20.5)  # half of it takes a second now
    assert bucket.busy_seconds(20.5) == pytest.approx(1.5)
    bucket.give_back(21.0)
    assert bucket.busy_seconds(30.0) == pytest.approx(2.0)


# --- a line


def test_a_line_keeps_its_order_whatever_is_due_first() -> None:
    loop, made = FakeLoop(), []
    line = Line(loop)
    for name, instant in [("a", 101.0), ("b", 100.5), ("c", 102.0), ("d", 102.0)]:
        line.add(instant, lambda at, name=name: made.append((name, at, loop.now)))
    assert made == []
    loop.run()
    assert made == [("a", 101, 101), ("b", 101, 101), ("c", 102, 102), ("d", 102, 102)]
    line.add(50.0, lambda at: made.append(at))
    assert made[-1] == 50.0  # at once
    assert len(line) == 0


def test_a_line_that_is_stretched_and_cleared() -> None:
    loop, made = FakeLoop(), []
    line = Line(loop)
    line.add(101.0, made.append)
    line.add(104.0, made.append)
    loop.run(until=100.5)
    line.stretch(2.0, loop.now)
    loop.run(until=105.0)
    assert made == [101.5]
    assert loop.now == 105.0
    line.clear()
    loop.run()
    assert made == [101.5]


# --- a downlink


def pour(loop: FakeLoop, downlink: Downlink, at: float, size: int, up: float, turn: int = 0) -> list[float]:
    """A message, whose pieces come in as an uplink of a rate lets them; gives where its arrival is noted."""
    arrived: list[float] = []
    ends = [*range(PIECE, size, PIECE), size]
    for begin, end in itertools.pairwise([0, *ends]):
        when, nbytes = loop.now + at + end / up, end - begin
        done = arrived.append if end == size else None
        loop.call_at(
            when,
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


def test_a_downlink_serves_one_message_after_another() -> None:
    loop = FakeLoop()
    downlink, start, size = Downlink(RATE, loop), loop.now, 500_000
    flows = [pour(loop, downlink, 0.0, size, RATE, turn) for turn in range(3)]
    loop.run()
    # What the others have here by then is taken up to LATE_S ahead of the first one's next piece.
    for number, [at] in enumerate(flows, start=1):
        assert number * size / RATE <= at - start + 1e-9 <= number * size / RATE + LATE_S + 3 * PIECE / RATE
    assert flows[-1][0] == pytest.approx(start + 3 * size / RATE)


def test_a_downlink_is_shared_by_what_comes_in_at_the_same_time() -> None:
    loop = FakeLoop()
    downlink, start, size = Downlink(RATE, loop), loop.now, 500_000
    flows = [pour(loop, downlink, 0.0, size, RATE) for _ in range(3)]
    loop.run()
    last = start + 3 * size / RATE
    assert max(at for [at] in flows) == pytest.approx(last)
    assert min(at for [at] in flows) > last - 3 * PIECE / RATE


def test_a_flow_that_joins_half_way() -> None:
    """Alone for half a second, then at half of the rate: 0.5 + 2 * 0.5 seconds; the other has the rest to itself."""
    loop = FakeLoop()
    downlink, start = Downlink(RATE, loop), loop.now
    first = pour(loop, downlink, 0.0, 1_000_000, RATE)
    second = pour(loop, downlink, 0.5, 1_000_000, RATE)
    loop.run()
    assert first == [pytest.approx(start + 1.5, abs=3 * PIECE / RATE)]
    assert second == [pytest.approx(start + 2.0)]


def test_late_timers_don_t_slow_a_flow() -> None:
    """Each piece comes in up to some time late, but for the last one; the message does not."""
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


def test_places_are_filled_again_a_little_before_their_turn() -> None:
    loop, taken = FakeLoop(), []
    downlink, start = Downlink(RATE, loop), loop.now
    for number in range(20):
        downlink.enter(PIECE, start, 0, lambda n=number: taken.append((n, loop.now)))
    loop.run()
    assert [number for number, _ in taken] == list(range(20))
    for number, at in taken:
        assert at == pytest.approx(max(start, start + number * PIECE / RATE - LATE_S), abs=PIECE / RATE)


def test_a_downlink_whose_rate_changes_under_way() -> None:
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
    # 0.25 s, then 2 s at a quarter, then the last quarter of the bytes.
    assert arrived == [pytest.approx(start + 2.5)]


def test_a_downlink_that_is_cleared_lets_nothing_pass() -> None:
    loop, seen = FakeLoop(), []
    downlink = Downlink(RATE, loop)
    for _ in range(10):
        downlink.enter(100_000, loop.now, 0, lambda: seen.append("taken"), lambda at: seen.append("passed"))
    before = len(seen)
    downlink.clear()
    loop.run()
    assert len(seen) == before < 10


# --- a node's part of a network


def test_nothing_is_shaped_where_nothing_is_limited() -> None:
    free = Access(np.full(6, math.inf))
    for network, limited in [
        (Uniform(), False),
        (Uniform(latency_s=1e-3), True),
        (Uniform(uplink_mbps=100), True),
        (Uniform(loss=0.1), True),
        (Uniform(jitter_s=0.1), True),
        (Given(at=free), False),
        (Given(at=free, later=((1.0, free),)), True),
        (Given(at=Fixed([math.inf] * 6, {})), True),
    ]:
        assert is_limited(network, 3, 1) is limited
        assert (Shaper.of(0, network, 3, 1, FakeLoop()) is not None) is limited


def test_what_is_simplified_is_said() -> None:
    assert simplified(Uniform(bandwidth_mbps=5), 3, 1) == []
    [text] = simplified(Uniform(sharing="rtt-fair"), 3, 1)
    assert text.startswith("network.sharing: the engine processes comes near to rtt-fair")
    [text] = simplified(Given(at=Access(np.full(7, RATE))), 3, 1)
    assert "link between uplinks and downlinks" in text


def shaper(network: Network, rank: int = 0, nodes: int = 3) -> tuple[Shaper, FakeLoop]:
    loop = FakeLoop()
    return Shaper(rank, network, nodes, 7, loop), loop


def test_the_slowest_link_before_the_receiver_s_is_the_rate_of_a_message() -> None:
    rates = [8e6, 9e6, 9e6, 1e3, 1e3, 1e3, 4e6, 5e6]
    paths = {
        (0, 1): Path((0, 4)),
        (0, 2): Path((0, 7, 6, 5)),
        (1, 0): Path((1, 3)),
    }
    node, _ = shaper(Given(at=Fixed(rates, {**paths, (1, 2): Path((1, 5), rate=1e6)})))
    for to, rate in [(1, 8e6), (2, 4e6), (1, 8e6)]:
        assert node.depart(to).lost is False
        assert node.uplink.rate == rate
    other, _ = shaper(Given(at=Fixed(rates, {(1, 2): Path((1, 5), rate=1e6)})), rank=1)
    other.depart(2)
    assert other.uplink.rate == 1e6
    assert other.depart(0).lost is True  # no path
    assert other.uplink.rate == 9e6


def test_what_is_lost_takes_the_uplink_alone() -> None:
    """As in the simulator: also when the rates change under way, and after its path is gone and back."""
    narrow, rates = {(0, 1): Path((0, 4), rate=1e3)}, [8e6] * 6
    sure = Fixed(rates, {(0, 1): Path((0, 4), rate=1e3, loss=1.0)})
    halved = Fixed([4e6] * 6, narrow)
    node, loop = shaper(Given(at=sure, later=((1.0, halved),)))
    node.start(loop.now)
    assert node.depart(1).lost is True
    assert node.uplink.rate == 8e6
    loop.run()
    assert node.uplink.rate == 4e6
    assert node.depart(1).lost is False
    assert node.uplink.rate == 1e3
    later = ((1.0, Fixed(rates, {})), (2.0, Fixed(rates, narrow)))
    node, loop = shaper(Given(at=Fixed(rates, narrow), later=later))
    node.start(loop.now)
    assert node.depart(1).lost is False
    loop.run()
    assert node.uplink.rate == 8e6


def test_what_arrives_over_a_path_that_came_to_lose_everything_is_delivered() -> None:
    """It left while there was another one; no number of draws would find its latency now."""
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.05, 0.0, 1.0)))
    arrived: list[float] = []
    node.arrive(1, 100, ignore, True, lambda: arrived.append(loop.now))
    start = loop.now
    loop.run()
    assert arrived == [start]


def test_losses_are_those_of_the_pair_s_messages_by_number() -> None:
    node, _ = shaper(Uniform(loss=0.3, latency_s=0.1), rank=2)
    path = Path((2, 3), loss=0.3, latency_s=0.1)
    fates: dict[int, list[Departure]] = {0: [], 1: []}
    for to in [0, 1] * 300:
        fates[to].append(node.depart(to))
    for to, drawn in fates.items():
        assert [departure.lost for departure in drawn] == [
            fate(path, 7, 2, to, k) is None for k in range(300)
        ]
        assert {departure.round_trip_s for departure in drawn if not departure.lost} == {0.2}
    assert fates[0] != fates[1]


def test_messages_arrive_a_latency_later_in_their_order_and_by_their_number() -> None:
    """The receiver counts the messages that were lost, so that both ends mean the same by a message's number."""
    path = Path((1, 3), latency_s=0.05, jitter_s=0.03, loss=0.4)
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.05, 0.03, 0.4)))
    latencies = {k: latency for k in range(200) if (latency := fate(path, 7, 1, 0, k)) is not None}
    assert 80 < len(latencies) < 160
    arrived: list[tuple[int, float]] = []
    start = loop.now
    for number, k in enumerate(latencies):
        loop.run(until=start + 0.01 * number)
        node.arrive(1, 100, ignore, True, lambda k=k: arrived.append((k, loop.now)))
    loop.run()
    assert [k for k, _ in arrived] == list(latencies)
    latest = 0.0
    for number, (k, at) in enumerate(arrived):
        latest = max(latest, start + 0.01 * number + latencies[k])
        assert at == pytest.approx(latest)


def test_a_message_that_was_cut_has_a_number_too() -> None:
    path = Path((1, 3), jitter_s=0.03)
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.0, 0.03)))
    start, arrived = loop.now, []
    node.arrive(1, PIECE, ignore, False, None)
    node.arrive(1, 5, ignore, True, None)
    node.arrive(1, PIECE, ignore, True, lambda: arrived.append(loop.now))
    loop.run()
    assert arrived == [pytest.approx(start + fate(path, 7, 1, 0, 1))]


def test_two_senders_messages_don_t_wait_for_each_other_s_latency() -> None:
    far, near = Path((1, 3), latency_s=0.2), Path((2, 3), latency_s=0.01)
    node, loop = shaper(Given(at=Fixed([math.inf] * 6, {(1, 0): far, (2, 0): near})))
    start, arrived = loop.now, []
    for source in (1, 2):
        node.arrive(
            source, 100, ignore, True, lambda source=source: arrived.append((source, loop.now - start))
        )
    loop.run()
    assert arrived == [(2, pytest.approx(0.01)), (1, pytest.approx(0.2))]


def test_by_default_a_node_receives_one_message_at_a_time() -> None:
    """Of two messages whose pieces come in by turns, the one that began first passes first; shared, both pass together."""
    ends: dict[str, list[tuple[int, float]]] = {}
    for sharing in ("fifo", "fair"):
        node, loop = shaper(Uniform(downlink_mbps=8, sharing=sharing))
        start, noted = loop.now, ends.setdefault(sharing, [])
        for number, source in itertools.product(range(30), (1, 2)):
            last = number == 29
            done = (lambda s=source, n=noted, o=loop, t=start: n.append((s, o.now - t))) if last else None
            node.arrive(source, PIECE, ignore, last, done)
        loop.run()
    whole = 60 * PIECE / RATE
    assert ends["fifo"][1] == (2, pytest.approx(whole))
    assert ends["fifo"][0] == (1, pytest.approx(whole / 2, abs=LATE_S + 2 * PIECE / RATE))
    assert ends["fair"] == [(1, pytest.approx(whole - PIECE / RATE)), (2, pytest.approx(whole))]


def test_the_network_changes_from_the_run_s_start_on() -> None:
    def at(mbps: float) -> Conditions:
        return Uniform(bandwidth_mbps=mbps).conditions(3, 1)

    node, loop = shaper(Given(at=at(8), later=((1.0, at(16)), (3.0, Fixed([1e6] * 6, {})))))
    noted, arrived = [], []
    node.changed = lambda: noted.append(loop.now)
    loop.run(until=150.0)
    node.start(150.0)
    assert node.depart(1).lost is False
    node.uplink.take(4_000_000, loop.now)
    for _ in range(40):
        node.arrive(1, 100_000, ignore, True, lambda: arrived.append(loop.now))
    loop.run(until=151.5)
    assert noted == [151.0]
    assert node.uplink.free == pytest.approx(152.5)  # 1 s at 1 MB/s, 1.5 s at 2 MB/s
    loop.run(until=152.6)
    # The first of them began a tenth of a second, at the sender's rate, before it was here.
    assert arrived[-1] == pytest.approx(152.45)
    assert len(arrived) == 40
    loop.run()
    assert noted == [151.0, 153.0]
    assert node.depart(1).lost is True
    node.close()
