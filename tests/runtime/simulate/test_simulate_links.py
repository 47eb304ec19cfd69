"""Links that carry one message at a time, against closed forms. A byte takes a microsecond (1,000 ns) at 8 Mbit/s."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links_scene import BYTE, US, Scene, size

from gossamer.messages.tags import WINDOW


@given(st.integers(0, 200_000), st.integers(0, 10**6))
def test_one_message_takes_latency_plus_transmission(length: int, latency_us: int) -> None:
    scene = Scene(bandwidth_mbps=8.0, latency_s=latency_us / 1e6)
    scene.send(0, 1, length)
    assert scene.play() == [(1, 0, latency_us * US + size(bytes(length)) * BYTE, length)]


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_narrower_of_uplink_and_downlink_limits_a_message(up: float, down: float) -> None:
    scene = Scene(uplink_mbps=up, downlink_mbps=down, latency_s=0.5)
    scene.send(0, 1, 10_000)
    expected = 0.5 + size(bytes(10_000)) * 8 / (min(up, down) * 1e6)
    assert scene.play()[0][2] == pytest.approx(expected * 1e9, abs=2)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=6))
def test_messages_of_one_uplink_leave_one_after_the_other(lengths: list[int]) -> None:
    scene = Scene(8, bandwidth_mbps=8.0, latency_s=0.01)
    for to, length in enumerate(lengths, start=1):
        scene.send(0, to, length)
    expected, sent = [], 0
    for to, length in enumerate(lengths, start=1):
        sent += size(bytes(length)) * BYTE
        expected.append((to, 0, sent + 10_000 * US, length))
    assert scene.play() == expected


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=6))
def test_senders_to_one_downlink_are_served_in_rank_order(lengths: list[int]) -> None:
    scene = Scene(8, bandwidth_mbps=8.0, latency_s=0.01)
    for source, length in reversed(list(enumerate(lengths, start=1))):
        scene.send(source, 0, length)
    expected, taken = [], 10_000 * US
    for source, length in enumerate(lengths, start=1):
        taken += size(bytes(length)) * BYTE
        expected.append((0, source, taken, length))
    assert scene.play() == expected


def test_downlink_serves_the_earliest_first_bit_first() -> None:
    scene = Scene(bandwidth_mbps=8.0)
    duration = size(bytes(1000)) * BYTE
    scene.at(100 * US, lambda: scene.send(2, 0, 1000))
    scene.at(200 * US, lambda: scene.send(1, 0, 1000))
    assert scene.play() == [(0, 2, 100 * US + duration, 1000), (0, 1, 100 * US + 2 * duration, 1000)]


def test_unlimited_links_cost_only_latency() -> None:
    scene = Scene(latency_s=0.25)
    for length in (0, 10, 10_000_000):
        scene.send(0, 1, length)
    assert scene.play() == [(1, 0, 250_000 * US, length) for length in (0, 10, 10_000_000)]


def test_message_without_any_cost_arrives_at_once() -> None:
    scene = Scene()
    scene.send(0, 1, 5)
    assert scene.arrived == []  # but not within the call
    assert scene.play() == [(1, 0, 0, 5)]


def test_opposite_directions_do_not_share_bandwidth() -> None:
    scene = Scene(bandwidth_mbps=8.0)
    scene.send(0, 1, 10_000)
    scene.send(1, 0, 10_000)
    arrival = size(bytes(10_000)) * BYTE
    assert sorted(scene.play()) == [(0, 1, arrival, 10_000), (1, 0, arrival, 10_000)]


@settings(max_examples=40)
@given(st.integers(0, 60_000))
def test_bytes_are_counted_as_they_leave(at_us: int) -> None:
    first, second = size(bytes(20_000)), size(bytes(30_000))
    scene = Scene(bandwidth_mbps=8.0, latency_s=0.1)
    scene.send(0, 1, 20_000)
    scene.send(0, 2, 30_000)
    seen = []
    scene.at(at_us * US, lambda: seen.append(scene.links.traffic(0)))
    scene.play()
    assert seen[0].bytes_sent == min(at_us, first + second)
    assert seen[0].messages_sent == (at_us >= first) + (at_us >= first + second)
    assert seen[0].bytes_received == 0
    assert scene.links.traffic(1).bytes_received == first
    assert scene.links.traffic(2).messages_received == 1


@settings(max_examples=60)
@given(st.integers(0, 25_000))
def test_cancelled_transfer_counts_sent_bytes_and_frees_the_uplink(at_us: int) -> None:
    first, second, third = size(bytes(10_000)), size(bytes(5_000)), size(bytes(1_000))
    scene = Scene(bandwidth_mbps=8.0)
    scene.send(0, 1, 10_000)
    cancelled = scene.send(0, 2, 5_000)
    scene.send(0, 3, 1_000)
    outcome: list[bool] = []
    scene.at(at_us * US, lambda: outcome.append(cancelled.cancel()))
    arrived = scene.play()
    gone = min(max(at_us - first, 0), second)
    assert outcome == [at_us < first + second]
    assert [entry[0] for entry in arrived] == ([1, 3] if outcome[0] else [1, 2, 3])
    assert arrived[-1] == (3, 0, (first + gone + third) * BYTE, 1_000)
    traffic = scene.links.traffic(0)
    assert traffic.bytes_sent == first + gone + third
    assert traffic.messages_sent == (2 if outcome[0] else 3)


def test_cancelled_message_frees_the_receivers_downlink() -> None:
    """After the bytes that had left, the downlink serves the next sender."""
    scene = Scene(bandwidth_mbps=8.0, latency_s=0.01)
    sending = scene.send(0, 1, 1_000_000)
    scene.at(100_000 * US, sending.cancel)
    scene.at(200_000 * US, lambda: scene.send(2, 1, 1_000))
    assert scene.play() == [(1, 2, 210_000 * US + size(bytes(1_000)) * BYTE, 1_000)]


def test_message_sent_after_a_cancellation_leaves_when_sent() -> None:
    scene = Scene(bandwidth_mbps=8.0)
    sending = scene.send(0, 1, 1_000_000)
    scene.at(100_000 * US, sending.cancel)
    scene.at(150_000 * US, lambda: scene.send(0, 1, 1_000))
    assert [entry[2] for entry in scene.play()] == [150_000 * US + size(bytes(1_000)) * BYTE]


@settings(max_examples=25)
@given(st.integers(WINDOW, 400_000), st.sampled_from([0, 10_000]), st.sampled_from([4.0, 8.0, 16.0]))
def test_send_returns_when_one_window_is_unacknowledged(length: int, latency_us: int, down: float) -> None:
    scene = Scene(uplink_mbps=8.0, downlink_mbps=down, latency_s=latency_us / 1e6)
    slowest = min(8.0, down) * 125_000

    async def play() -> None:
        await scene.send(0, 1, length)
        whole = size(bytes(length))
        expected = 2 * latency_us / 1e6 + (whole - WINDOW) / slowest
        assert scene.core.now() == pytest.approx(expected, abs=3e-9)

    scene.live(play)


def test_awaiting_a_finished_send_returns_at_once() -> None:
    scene = Scene(bandwidth_mbps=8.0)

    async def play() -> None:
        large, small = scene.send(0, 1, 200_000), scene.send(0, 1, 10)
        await small
        now = scene.core.now_ns
        await large
        assert scene.core.now_ns == now

    scene.live(play)


@pytest.mark.parametrize("queued", [False, True])
def test_cancelling_a_message_wakes_its_awaiter(queued: bool) -> None:
    scene = Scene(bandwidth_mbps=8.0, latency_s=0.01)

    async def play() -> None:
        sendings = [scene.send(0, 1, 200_000) for _ in range(2)]
        chosen = sendings[1 if queued else 0]
        scene.at(50_000 * US, chosen.cancel)
        await chosen
        assert scene.core.now_ns == 50_000 * US

    scene.live(play)
