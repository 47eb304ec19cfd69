"""Links whose rate all transfers share, against closed forms. A byte takes a microsecond (1,000 ns) at 8 Mbit/s."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from links_scene import BYTE, SHARINGS, US, Drawn, Map, Scene, of_size, size, star

from gossamer.messages.tags import WINDOW
from gossamer.network import Path

LENGTH = of_size(100_000)
"""The payload of a message that takes 100 ms of a whole link."""
MS = 1000 * US


def fair(first: Map, nodes: int = 6, **options: object) -> Scene:
    return Scene(nodes, Drawn(sharing="fair", first=first, **options))


def times(scene: Scene) -> dict[tuple[int, int], int]:
    return {(source, to): ns for to, source, ns, _ in scene.play()}


@settings(max_examples=25)
@given(st.integers(0, 200_000), st.integers(0, 10**6), st.floats(0.1, 100), st.floats(0.1, 100))
def test_one_flow_takes_latency_plus_its_narrowest_link(
    length: int, latency_us: int, up: float, down: float
) -> None:
    scene = fair(star(2, [up, 1.0, 1.0, down], latency_s=latency_us / 1e6), 2)
    scene.send(0, 1, length)
    expected = latency_us / 1e6 + size(bytes(length)) * 8 / (min(up, down) * 1e6)
    assert scene.play() == [(1, 0, pytest.approx(expected * 1e9, abs=2), length)]


@pytest.mark.parametrize("flows", [1, 2, 3, 5])
@pytest.mark.parametrize("out", [True, False])
def test_flows_over_one_bottleneck_have_equal_shares(flows: int, out: bool) -> None:
    scene = fair(star(6))
    for other in range(1, flows + 1):
        scene.send(*((0, other) if out else (other, 0)), LENGTH)
    assert {round(ns / US) for ns in times(scene).values()} == {flows * 100_000}


def test_flow_that_joins_half_way_halves_the_rate() -> None:
    scene = fair(star(6))
    scene.send(0, 1, LENGTH)
    scene.at(50 * MS, lambda: scene.send(0, 2, LENGTH))
    # The first: 50 ms alone, then half the rate for 100 ms. The second then has 50 ms left, alone.
    assert times(scene) == {(0, 1): 150 * MS, (0, 2): 200 * MS}


def test_flow_limited_elsewhere_leaves_its_share_to_others() -> None:
    scene = fair(star(3, [2.0, 8.0, 8.0, 8.0, 8.0, 8.0]), 3)
    scene.send(0, 2, of_size(100_000))
    scene.send(1, 2, of_size(300_000))
    assert {round(ns / US) for ns in times(scene).values()} == {400_000}


def test_inner_links_and_path_limits_are_respected() -> None:
    """Two flows cross a link of 6 Mbit/s; one of them is limited to 2."""
    paths = {(0, 2): Path((0, 8, 6)), (1, 3): Path((1, 8, 7), rate=2 * 125_000)}
    scene = fair(Map([8.0] * 8 + [6.0], lambda source, to: paths[source, to]), 4)
    scene.send(0, 2, of_size(200_000))
    scene.send(1, 3, of_size(100_000))
    assert {round(ns / US) for ns in times(scene).values()} == {400_000}


def test_rtt_fair_shares_are_inverse_to_round_trip_time() -> None:
    """Latencies of 10 and 30 ms: three quarters and a quarter; a path without latency counts as one of 0.05 ms."""
    latencies = {1: 0.01, 2: 0.03, 3: 0.0, 4: 0.00015}
    first = Map([8.0] * 10, lambda source, to: Path((source, 5 + to), latencies[to]))
    scene = Scene(5, Drawn(sharing="rtt-fair", first=first))
    for to, share in ((1, 0.75), (2, 0.25)):
        scene.send(0, to, of_size(round(share * 100_000)))
    scene.at(10**9, lambda: [scene.send(0, 3, of_size(75_000)), scene.send(0, 4, of_size(25_000))])
    ends = times(scene)
    for to, latency in latencies.items():
        begin = 0 if to < 3 else 10**9
        assert ends[0, to] == pytest.approx(begin + 100 * MS + latency * 1e9, abs=2)


def test_messages_of_one_pair_follow_one_another() -> None:
    scene = fair(star(3, latency_s=0.01), 3)
    for length in (of_size(50_000), of_size(20_000), of_size(30_000)):
        scene.send(0, 1, length)
    scene.send(0, 2, of_size(100_000))  # has half of the uplink throughout
    assert [(to, ns) for to, _, ns, _ in scene.play()] == [
        (1, 110 * MS),
        (1, 150 * MS),
        (1, 210 * MS),
        (2, 210 * MS),
    ]


def test_unlimited_links_cost_only_latency() -> None:
    first = Map([math.inf] * 6, lambda source, to: Path((source, 3 + to), 0.1 * to))
    scene = fair(first, 3)
    for to in (1, 2, 1):
        scene.send(0, to, 1000)
    assert [(to, ns) for to, _, ns, _ in scene.play()] == [(1, 100 * MS), (1, 100 * MS), (2, 200 * MS)]


def in_turn(nodes: int, mbps: float | list[float]) -> Scene:
    return Scene(nodes, Drawn(sharing="in-turn", first=star(nodes, mbps)))


def test_in_turn_sharing_sends_one_message_at_a_time() -> None:
    scene = in_turn(4, 8.0)
    for to in (2, 1, 2, 3):
        scene.send(0, to, LENGTH)
    assert [(to, ns) for to, _, ns, _ in scene.play()] == [
        (2, 100 * MS),
        (1, 200 * MS),
        (2, 300 * MS),
        (3, 400 * MS),
    ]


def test_in_turn_sharing_lets_a_slow_receiver_block_senders() -> None:
    """Node 3 takes 2 Mbit/s: two senders share that, and their messages to node 2 wait behind it."""
    scene = in_turn(4, [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 2.0])
    for source in (0, 1):
        scene.send(source, 3, LENGTH)
        scene.send(source, 2, LENGTH)
    assert times(scene) == {(0, 3): 800 * MS, (1, 3): 800 * MS, (0, 2): 1000 * MS, (1, 2): 1000 * MS}


def test_in_turn_sharing_skips_cancelled_messages() -> None:
    scene = in_turn(4, 8.0)
    first, second = scene.send(0, 1, LENGTH), scene.send(0, 2, LENGTH)
    scene.send(0, 3, LENGTH)
    taken: list[bool] = []
    scene.at(50 * MS, lambda: taken.extend(sending.cancel() for sending in (second, first)))
    assert times(scene) == {(0, 3): 150 * MS}
    assert taken == [True, True]
    assert scene.links.traffic(0).bytes_sent == 150_000


@settings(max_examples=30)
@example(294)  # its binary progress is rounded slightly down
@given(st.integers(0, 450))
def test_cancelled_transfer_counts_sent_bytes_and_frees_its_share(at_ms: int) -> None:
    """Two messages of a pair share an uplink with another pair's message; the second is cancelled."""
    scene = fair(star(3), 3)
    scene.send(0, 1, of_size(50_000))
    second = scene.send(0, 1, of_size(100_000))
    scene.send(0, 2, of_size(150_000))
    outcome: list[bool] = []
    scene.at(at_ms * MS, lambda: outcome.append(second.cancel()))
    ends = times(scene)
    gone = min(max(at_ms - 100, 0) * 500, 100_000)
    assert outcome == [at_ms < 300]
    traffic = scene.links.traffic(0)
    assert traffic.bytes_sent == 200_000 + gone
    assert (traffic.messages_sent, traffic.messages_cancelled) == ((2, 1) if outcome[0] else (3, 0))
    assert scene.links.traffic(1).bytes_received == 50_000 + gone
    assert ends[0, 2] == pytest.approx((200_000 + gone) * BYTE, abs=2)  # the uplink is never idle
    assert scene.busy(0)[0] == pytest.approx((200_000 + gone) / 1e6)


def test_cancelled_message_lets_the_next_of_its_pair_begin() -> None:
    scene = fair(star(2), 2)
    first = scene.send(0, 1, LENGTH)
    scene.send(0, 1, of_size(10_000))
    scene.at(30 * MS, first.cancel)
    assert times(scene) == {(0, 1): 40 * MS}
    assert scene.watched == [(0, 1, 0, 30 * MS, 30_000), (0, 1, 30 * MS, 40 * MS, 10_000)]
    assert first.cancel()
    assert scene.links.traffic(0).messages_cancelled == 1


@settings(max_examples=25)
@given(st.integers(0, 400))
def test_bytes_are_counted_as_they_leave(at_ms: int) -> None:
    scene = fair(star(3, latency_s=1.0), 3)
    scene.send(0, 1, of_size(100_000))
    scene.send(0, 2, of_size(200_000))
    seen = []
    scene.at(at_ms * MS, lambda: seen.append((scene.links.traffic(0), scene.busy(0)[0])))
    scene.play()
    assert seen[0][0].bytes_sent == pytest.approx(min(at_ms * 1000, 300_000), abs=2)
    assert seen[0][0].messages_sent == (at_ms >= 200) + (at_ms >= 300)
    assert seen[0][1] == pytest.approx(min(at_ms / 1000, 0.3), abs=1e-5)


def test_send_returns_when_one_window_is_unacknowledged() -> None:
    scene = fair(star(3, latency_s=0.02), 3)

    async def play() -> None:
        sending, small = scene.send(0, 1, of_size(WINDOW + 100_000)), scene.send(0, 2, of_size(50_000))
        await small
        assert scene.core.now_ns == 0
        await sending  # 50 KB leave at half the rate beside the other message, the next 50 KB alone
        assert scene.core.now_ns == pytest.approx(150 * MS + 2 * 20 * MS, abs=2)

    scene.live(play)


def test_cancelling_a_message_wakes_its_awaiter() -> None:
    scene = fair(star(2), 2)

    async def play() -> None:
        for sending in [scene.send(0, 1, 200_000) for _ in range(2)]:
            scene.at(scene.core.now_ns + 50 * MS, sending.cancel)
            before = scene.core.now_ns
            await sending
            assert scene.core.now_ns == before + 50 * MS

    scene.live(play)


Sends = list[tuple[int, int, int, int]]
sends = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 30_000), st.integers(0, 100)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25)
@given(sends, st.sampled_from(SHARINGS))
def test_messages_arrive_in_order_within_link_capacity(sent: Sends, sharing: str) -> None:
    rates = [2.0, 8.0, 4.0, 8.0, 1.0, 8.0, 1.0, 4.0, 8.0, 16.0]
    scene = Scene(5, Drawn(sharing=sharing, first=star(5, rates, latency_s=0.003)))
    lengths = defaultdict(list)
    for source, hop, length, at_ms in sorted(sent, key=lambda send: send[3]):
        to = (source + hop) % 5
        lengths[source, to].append(length)
        scene.at(at_ms * MS, lambda source=source, to=to, length=length: scene.send(source, to, length))
    received = defaultdict(list)
    for to, source, _, length in scene.play():
        received[source, to].append(length)
    assert received == lengths
    for rank in range(5):
        transfers = [transfer for transfer in scene.watched if transfer[0] == rank]
        traffic = scene.links.traffic(rank)
        assert traffic.bytes_sent == sum(transfer[4] for transfer in transfers)
        incoming = sum(
            size(bytes(length)) for pair, all_ in lengths.items() for length in all_ if pair[1] == rank
        )
        assert traffic.bytes_received == incoming
        for begin in {transfer[2] for transfer in transfers}:
            for end in {transfer[3] for transfer in transfers if transfer[3] > begin}:
                inside = sum(
                    nbytes for _, _, start, stop, nbytes in transfers if begin <= start and stop <= end
                )
                assert inside <= rates[rank] * 125_000 * (end - begin) / 1e9 + 1


@pytest.mark.parametrize("sharing", SHARINGS)
def test_unrelated_pairs_and_timers_change_nothing(sharing: str) -> None:
    def arrivals(unrelated: bool) -> list[tuple[int, int, int, int]]:
        scene = Scene(
            8, Drawn(sharing=sharing, first=star(8, 7.3, latency_s=0.0011, jitter_s=0.0007, loss=0.1))
        )
        for step in range(60):
            source, to = step * 7 % 4, (step * 7 % 4 + 1 + step % 3) % 4
            scene.at(step * 1_234_567, lambda s=source, t=to, n=step: scene.send(s, t, 1000 + 317 * n % 5000))
            if unrelated:
                scene.at(step * 1_111_111, lambda n=step: scene.send(4 + n % 2, 6 + n % 2, 3000 + n))
                scene.at(step * 777_777, lambda: None)
        return [arrival for arrival in scene.play() if arrival[0] < 4]

    alone = arrivals(False)
    assert 40 < len(alone) < 60
    assert arrivals(True) == alone
