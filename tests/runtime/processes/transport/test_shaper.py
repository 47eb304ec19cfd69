"""A node's part of a network on a clock that the test controls, against closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from fake_loop import FakeLoop
from given_network import Given

from gossamer.network import Conditions, Network, Path, UniformNetwork, delivery
from gossamer.network.network import Access
from gossamer.runtime.processes.transport.shaper import LATE_S, Shaper, is_limited, simplified

RATE = 1e6  # bytes a second: a byte takes a microsecond
PIECE = 16_384


class Fixed(Conditions):
    """Rates and paths that a test sets; other pairs have no path."""

    def __init__(self, rates: list[float], paths: dict[tuple[int, int], Path]) -> None:
        self.rates, self._paths = np.array(rates), paths

    def path(self, source: int, to: int) -> Path | None:
        return self._paths.get((source, to))


def ignore(*_: Any) -> None:
    pass


# --- a node's part of a network


def test_unlimited_network_needs_no_shaper() -> None:
    free = Access(np.full(6, math.inf))
    for network, limited in [
        (UniformNetwork(), False),
        (UniformNetwork(latency_s=1e-3), True),
        (UniformNetwork(uplink_mbps=100), True),
        (UniformNetwork(loss=0.1), True),
        (UniformNetwork(jitter_s=0.1), True),
        (Given(at=free), False),
        (Given(at=free, later=((1.0, free),)), True),
        (Given(at=Fixed([math.inf] * 6, {})), True),
    ]:
        assert is_limited(network, 3, 1) is limited
        assert (Shaper.of(0, network, 3, 1, FakeLoop()) is not None) is limited


def test_simplifications_are_reported() -> None:
    assert simplified(UniformNetwork(bandwidth_mbps=5), 3, 1) == []
    [text] = simplified(UniformNetwork(sharing="rtt-fair"), 3, 1)
    assert text.startswith("network.sharing: the engine processes approximates rtt-fair")
    [text] = simplified(Given(at=Access(np.full(7, RATE))), 3, 1)
    assert "link between uplinks and downlinks" in text


def shaper(network: Network, rank: int = 0, nodes: int = 3) -> tuple[Shaper, FakeLoop]:
    loop = FakeLoop()
    return Shaper(rank, network, nodes, 7, loop), loop


def test_message_rate_is_the_slowest_link_before_the_receiver() -> None:
    rates = [8e6, 9e6, 9e6, 1e3, 1e3, 1e3, 4e6, 5e6]
    paths = {
        (0, 1): Path((0, 4)),
        (0, 2): Path((0, 7, 6, 5)),
        (1, 0): Path((1, 3)),
    }
    node, _ = shaper(Given(at=Fixed(rates, {**paths, (1, 2): Path((1, 5), rate=1e6)})))
    for to, rate in [(1, 8e6), (2, 4e6), (1, 8e6)]:
        assert node.depart(to)[0] is False
        assert node.uplink.rate == rate
    other, _ = shaper(Given(at=Fixed(rates, {(1, 2): Path((1, 5), rate=1e6)})), rank=1)
    other.depart(2)
    assert other.uplink.rate == 1e6
    assert other.depart(0)[0] is True  # no path
    assert other.uplink.rate == 9e6


def test_lost_message_occupies_only_the_uplink() -> None:
    """As in the simulator, also when rates change under way, and after its path vanished and returned."""
    narrow, rates = {(0, 1): Path((0, 4), rate=1e3)}, [8e6] * 6
    sure = Fixed(rates, {(0, 1): Path((0, 4), rate=1e3, loss=1.0)})
    halved = Fixed([4e6] * 6, narrow)
    node, loop = shaper(Given(at=sure, later=((1.0, halved),)))
    node.start(loop.now)
    assert node.depart(1)[0] is True
    assert node.uplink.rate == 8e6
    loop.run()
    assert node.uplink.rate == 4e6
    assert node.depart(1)[0] is False
    assert node.uplink.rate == 1e3
    later = ((1.0, Fixed(rates, {})), (2.0, Fixed(rates, narrow)))
    node, loop = shaper(Given(at=Fixed(rates, narrow), later=later))
    node.start(loop.now)
    assert node.depart(1)[0] is False
    loop.run()
    assert node.uplink.rate == 8e6


def test_message_is_delivered_though_its_path_now_loses_all() -> None:
    """It left on an earlier path; with a loss of 1, no draw would give a latency now."""
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.05, 0.0, 1.0)))
    arrived: list[float] = []
    node.arrive(1, 100, ignore, True, lambda: arrived.append(loop.now))
    start = loop.now
    loop.run()
    assert arrived == [start]


def test_losses_are_determined_by_pair_and_message_number() -> None:
    node, _ = shaper(UniformNetwork(loss=0.3, latency_s=0.1), rank=2)
    path = Path((2, 3), loss=0.3, latency_s=0.1)
    fates: dict[int, list[tuple[bool, float]]] = {0: [], 1: []}
    for to in [0, 1] * 300:
        fates[to].append(node.depart(to))
    for to, drawn in fates.items():
        assert [lost for lost, _ in drawn] == [delivery(path, 7, 2, to, k) is None for k in range(300)]
        assert {round_trip_s for lost, round_trip_s in drawn if not lost} == {0.2}
    assert fates[0] != fates[1]


def test_latency_follows_the_message_number_and_keeps_order() -> None:
    """The receiver counts lost messages too, so that both ends number messages alike."""
    path = Path((1, 3), latency_s=0.05, jitter_s=0.03, loss=0.4)
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.05, 0.03, 0.4)))
    latencies = {k: latency for k in range(200) if (latency := delivery(path, 7, 1, 0, k)) is not None}
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


def test_cut_message_uses_a_number() -> None:
    path = Path((1, 3), jitter_s=0.03)
    node, loop = shaper(Given(at=Access(np.full(6, math.inf), 0.0, 0.03)))
    start, arrived = loop.now, []
    node.arrive(1, PIECE, ignore, False, None)
    node.arrive(1, 5, ignore, True, None)
    node.arrive(1, PIECE, ignore, True, lambda: arrived.append(loop.now))
    loop.run()
    assert arrived == [pytest.approx(start + delivery(path, 7, 1, 0, 1))]


def test_senders_do_not_wait_for_each_others_latency() -> None:
    far, near = Path((1, 3), latency_s=0.2), Path((2, 3), latency_s=0.01)
    node, loop = shaper(Given(at=Fixed([math.inf] * 6, {(1, 0): far, (2, 0): near})))
    start, arrived = loop.now, []
    for source in (1, 2):
        node.arrive(
            source, 100, ignore, True, lambda source=source: arrived.append((source, loop.now - start))
        )
    loop.run()
    assert arrived == [(2, pytest.approx(0.01)), (1, pytest.approx(0.2))]


def test_fifo_takes_messages_in_turn_and_fair_shares_the_rate() -> None:
    """Pieces of two messages arrive alternately: fifo passes the earlier message first, fair passes both together."""
    ends: dict[str, list[tuple[int, float]]] = {}
    for sharing in ("fifo", "fair"):
        node, loop = shaper(UniformNetwork(downlink_mbps=8, sharing=sharing))
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


def test_network_changes_count_from_the_start_of_the_run() -> None:
    def conditions(mbps: float) -> Conditions:
        return UniformNetwork(bandwidth_mbps=mbps).conditions(3, 1)

    node, loop = shaper(Given(at=conditions(8), later=((1.0, conditions(16)), (3.0, Fixed([1e6] * 6, {})))))
    noted, arrived = [], []
    node.changed = lambda: noted.append(loop.now)
    loop.run(until=150.0)
    node.start(150.0)
    assert node.depart(1)[0] is False
    node.uplink.take(4_000_000, loop.now)
    for _ in range(40):
        node.arrive(1, 100_000, ignore, True, lambda: arrived.append(loop.now))
    loop.run(until=151.5)
    assert noted == [151.0]
    assert node.uplink.free == pytest.approx(152.5)  # 1 s at 1 MB/s, 1.5 s at 2 MB/s
    loop.run(until=152.6)
    # The first began a tenth of a second, at the sender's rate, before it arrived.
    assert arrived[-1] == pytest.approx(152.45)
    assert len(arrived) == 40
    loop.run()
    assert noted == [151.0, 153.0]
    assert node.depart(1)[0] is True
