"""Networks that change, lose and delay messages, for every way to share links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links_scene import SHARINGS, US, Drawn, Map, Scene, of_size, star

from gossamer.messages.tags import WINDOW
from gossamer.network import Conditions, Network, Path, UniformNetwork, delivery
from gossamer.network.network import BYTES_PER_MEGABIT

MS = 1000 * US
both = pytest.mark.parametrize("sharing", SHARINGS)


def cut_off(source: int, to: int) -> None:
    return None


# --- changes


@both
@settings(max_examples=15)
@given(st.integers(1, 99), st.sampled_from([1.0, 4.0, 8.0, 40.0]))
def test_transfer_under_way_continues_at_the_new_rate(sharing: str, at_ms: int, mbps: float) -> None:
    """A message of 100 KB starts at 8 Mbit/s and ends at the new rate; another one waits behind it."""
    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=((at_ms / 1000, star(2, mbps)),)))
    scene.send(0, 1, of_size(100_000))
    scene.send(0, 1, of_size(50_000))
    rest = (100_000 - 1000 * at_ms) * 8 / mbps
    expected = [at_ms * MS + rest * US, at_ms * MS + (rest + 50_000 * 8 / mbps) * US]
    assert [arrival[2] for arrival in scene.play()] == pytest.approx(expected, abs=3)
    assert scene.busy(0)[0] == pytest.approx(expected[1] / 1e9, abs=1e-5)
    assert [(transfer[2], transfer[3]) for transfer in scene.watched] == [
        (0, scene.arrived[0][2]),
        (scene.arrived[0][2], scene.arrived[1][2]),
    ]


@both
@pytest.mark.parametrize("mbps", [2.0, 8.0, 32.0])
def test_changed_downlink_rate_applies_to_a_transfer_under_way(sharing: str, mbps: float) -> None:
    """The receiver takes 1 MB/s for 40 ms, then the rate of its downlink, up to the sender's 2 MB/s."""
    first, then = star(2, [16.0, 16.0, 8.0, 8.0]), star(2, [16.0, 16.0, 8.0, mbps])
    scene = Scene(2, Drawn(sharing=sharing, first=first, then=((0.04, then),)))
    scene.send(0, 1, of_size(100_000))
    if sharing == "fifo":  # bits sent within 40 ms are under way; the last one leaves at 50 ms
        expected = max(40 * MS + 60_000 * 8 / mbps * US, 50 * MS)
    else:
        expected = 40 * MS + 60_000 * 8 / min(mbps, 16) * US
    assert scene.play()[0][2] == pytest.approx(expected, abs=3)


@both
def test_new_latency_applies_to_messages_leaving_afterwards(sharing: str) -> None:
    then = ((0.05, star(2, latency_s=0.3)), (0.25, star(2, latency_s=0.0)))
    scene = Scene(2, Drawn(sharing=sharing, first=star(2, latency_s=0.02), then=then))
    for _ in range(3):
        scene.send(0, 1, of_size(100_000))
    # The third leaves at 200 ms with the latency of that instant; messages of a pair keep their order.
    assert [arrival[2] for arrival in scene.play()] == [120 * MS, 500 * MS, 600 * MS]
    scene.send(0, 1, of_size(100_000))
    assert scene.play()[-1][2] == 700 * MS


@both
def test_shorter_latency_does_not_reorder_messages(sharing: str) -> None:
    then = ((0.05, star(2, latency_s=0.0)),)
    scene = Scene(2, Drawn(sharing=sharing, first=star(2, latency_s=1.0), then=then))
    scene.send(0, 1, of_size(100_000))
    scene.send(0, 1, of_size(10_000))
    arrived = scene.play()
    assert [arrival[3] for arrival in arrived] == [of_size(100_000), of_size(10_000)]
    assert arrived[0][2] == 1100 * MS
    assert arrived[1][2] >= 1100 * MS


@both
def test_vanished_path_loses_the_messages_on_it(sharing: str) -> None:
    """The first message has arrived, the second is on the path, the third leaves without one, the fourth after its return."""
    then = ((0.15, Map([8.0] * 4, cut_off)), (0.25, star(2)))
    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=then))
    for _ in range(4):
        scene.send(0, 1, of_size(100_000))
    assert [arrival[2] for arrival in scene.play()] == [100 * MS, 400 * MS]
    traffic = scene.links.traffic(0)
    assert (traffic.bytes_sent, traffic.messages_sent, traffic.messages_lost) == (400_000, 4, 2)
    assert scene.links.traffic(1).messages_received == 2


def without(nodes: int, *gone: tuple[int, int]) -> Map:
    """A star without some of its paths."""
    return Map(
        [8.0] * (2 * nodes), lambda source, to: None if (source, to) in gone else Path((source, nodes + to))
    )


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize(("at_ms", "first_ms"), [(10, 30), (40, 60)])
def test_messages_behind_a_lost_one_are_received_at_once(lost: int, at_ms: int, first_ms: int) -> None:
    """The first one or two messages of a downlink are lost; the 20 KB of each later one have arrived or are under way."""
    gone = without(6, *((source, 5) for source in range(lost)))
    scene = Scene(6, Drawn(first=star(6), then=((at_ms / 1000, gone),)))
    for source in range(4):
        scene.send(source, 5, of_size(100_000 if source < lost else 20_000))
    behind = range(lost, 4)
    assert scene.play() == [
        (5, source, (first_ms + 20 * k) * MS, of_size(20_000)) for k, source in enumerate(behind)
    ]


@both
def test_transfer_resumes_when_a_stalled_link_recovers(sharing: str) -> None:
    then = ((0.05, star(2, [0.0, 8.0, 8.0, 8.0])), (1.05, star(2)))
    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=then))
    scene.send(0, 1, of_size(100_000))
    assert scene.play()[0][2] == 1100 * MS


@both
def test_change_at_time_zero_applies_from_the_start(sharing: str) -> None:
    scene = Scene(2, Drawn(sharing=sharing, first=star(2, 1.0), then=((0.0, star(2, 4.0)), (0.0, star(2)))))
    scene.send(0, 1, of_size(100_000))
    assert scene.play()[0][2] == 100 * MS


class Endless(Network):
    """8 and 4 Mbit/s alternately, 10 ms each, without end."""

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return star(nodes)

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        return ((turn / 100, star(nodes, 4.0 if turn % 2 else 8.0)) for turn in count(1))


@both
def test_endless_changes_are_lazy_and_keep_nothing_alive(sharing: str) -> None:
    scene = Scene(2, Endless(sharing=sharing))
    scene.send(0, 1, of_size(75_000))
    assert [arrival[2] for arrival in scene.play()] == [pytest.approx(100 * MS, abs=10)]
    assert scene.core.now_ns < 110 * MS


@both
def test_transfers_finish_at_once_when_links_become_unlimited(sharing: str) -> None:
    then = ((0.05, star(2, math.inf)),)
    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=then))
    for _ in range(3):
        scene.send(0, 1, of_size(100_000))
    assert [arrival[2] for arrival in scene.play()] == [50 * MS] * 3


def test_fifo_rate_is_the_narrowest_before_the_downlink() -> None:
    """An inner link of 4 Mbit/s and a path's limit of 2 bound a transfer; neither is shared."""
    paths = {1: Path((0, 6, 4)), 2: Path((0, 5), rate=2 * BYTES_PER_MEGABIT)}
    first = Map([8.0] * 6 + [4.0], lambda source, to: paths[to] if source == 0 else Path((source, 6, 3 + to)))
    scene = Scene(3, Drawn(first=first))
    scene.send(0, 1, of_size(100_000))
    scene.send(0, 2, of_size(100_000))
    scene.send(2, 1, of_size(10_000))
    assert [arrival[:3] for arrival in scene.play()] == [(1, 0, 200 * MS), (1, 2, 210 * MS), (2, 0, 600 * MS)]


# --- loss and jitter


@both
def test_message_without_a_path_is_lost_but_uses_the_uplink(sharing: str) -> None:
    first = Map([8.0] * 6, lambda source, to: None if to == 1 else Path((source, 3 + to)))
    scene = Scene(3, Drawn(sharing=sharing, first=first))
    lost = scene.send(0, 1, of_size(100_000))
    scene.send(0, 2, of_size(100_000))
    # By round-trip time, a missing path has next to no weight.
    assert scene.play() == [
        (2, 0, pytest.approx((100 if sharing == "rtt-fair" else 200) * MS, rel=2e-4), of_size(100_000))
    ]
    assert not lost.cancel()
    traffic = scene.links.traffic(0)
    assert (traffic.bytes_sent, traffic.messages_sent, traffic.messages_lost) == (200_000, 2, 1)
    assert scene.links.traffic(1).bytes_received == 0


@both
def test_awaiting_a_lost_message_ends_when_it_has_left(sharing: str) -> None:
    scene = Scene(2, Drawn(sharing=sharing, first=Map([8.0] * 4, cut_off)))

    async def play() -> None:
        await scene.send(0, 1, of_size(WINDOW + 100_000))
        assert scene.core.now_ns == (WINDOW + 100_000) * US

    scene.live(play)


@both
def test_cancelled_lost_message_counts_as_cancelled(sharing: str) -> None:
    scene = Scene(2, Drawn(sharing=sharing, first=Map([8.0] * 4, cut_off)))
    lost = scene.send(0, 1, of_size(100_000))
    scene.at(40 * MS, lost.cancel)
    assert scene.play() == []
    traffic = scene.links.traffic(0)
    assert (traffic.bytes_sent, traffic.messages_cancelled, traffic.messages_lost) == (40_000, 1, 0)
    assert scene.links.traffic(1).bytes_received == 0


def survivors(sharing: str, mbps: float | None, seed: int = 1) -> set[int]:
    """The lengths of the messages of a pair that arrive."""
    scene = Scene(3, UniformNetwork(sharing=sharing, bandwidth_mbps=mbps, loss=0.3), seed=seed)
    for k in range(24):
        scene.at(k * MS, lambda k=k: [scene.send(0, 1, k), scene.send(2, 1, 100)])  # type: ignore[misc]
    arrived = {length for _, source, _, length in scene.play() if source == 0}
    assert scene.links.traffic(0).messages_lost == 24 - len(arrived)
    assert scene.links.traffic(0).messages_sent == 24
    return arrived


def test_losses_depend_only_on_seed_pair_and_message_number() -> None:
    path = Path((), loss=0.3)
    expected = {k for k in range(24) if delivery(path, 1, 0, 1, k) is not None}
    assert 10 < len(expected) < 24
    for sharing in SHARINGS:
        for mbps in (None, 8.0, 0.1):
            assert survivors(sharing, mbps) == expected
    assert survivors("fifo", None, seed=2) != expected


@both
@pytest.mark.parametrize("mbps", [None, 8.0])
def test_jittered_messages_of_a_pair_keep_their_order(sharing: str, mbps: float | None) -> None:
    scene = Scene(2, UniformNetwork(sharing=sharing, bandwidth_mbps=mbps, latency_s=0.05, jitter_s=0.04))
    for k in range(100):
        scene.at(k * MS, lambda k=k: scene.send(0, 1, k))  # type: ignore[misc]
    arrived = scene.play()
    assert [length for _, _, _, length in arrived] == list(range(100))
    delays = [ns - k * MS for k, (_, _, ns, _) in enumerate(arrived)]
    assert delays[0] == pytest.approx((delivery(Path((), 0.05, 0.04), 1, 0, 1, 0) or 0) * 1e9, abs=50 * US)
    assert len({round(delay / MS) for delay in delays}) > 10
    assert all(before[2] <= after[2] for before, after in zip(arrived, arrived[1:], strict=False))


# --- watching and counting


@both
def test_broadcast_over_unlimited_links_is_watched(sharing: str) -> None:
    scene = Scene(3, UniformNetwork(sharing=sharing, latency_s=0.5))
    scene.links.send(0, (1, 2), b"", ("t",))
    assert [transfer[:4] for transfer in scene.watched] == [(0, 1, 0, 0), (0, 2, 0, 0)]
    assert scene.busy(0)[0] is None


@both
def test_uplink_use_is_bytes_sent_over_capacity(sharing: str) -> None:
    """The path carries a quarter, then an eighth, of the uplink's bandwidth, which doubles."""
    then = ((0.2, star(2, 16.0, rate=250_000.0)),)
    scene = Scene(2, Drawn(sharing=sharing, first=star(2, 8.0, rate=250_000.0), then=then))
    scene.send(0, 1, of_size(100_000))
    seen: list[float] = []
    for at_ms in (100, 200, 300, 400, 500):
        scene.at(at_ms * MS, lambda: seen.append(scene.busy(0)[0]))
    scene.play()
    assert seen == pytest.approx([0.025, 0.05, 0.0625, 0.075, 0.075], abs=1e-6)


@both
def test_unlimited_link_reports_no_use(sharing: str) -> None:
    """Even though the path has a limit; once the links are limited, later bytes count."""
    then = ((0.2, star(2, 8.0, rate=250_000.0)),)
    scene = Scene(2, Drawn(sharing=sharing, first=star(2, [math.inf] * 4, rate=250_000.0), then=then))
    scene.send(0, 1, of_size(100_000))
    seen: list[tuple[float | None, float | None]] = []
    for at_ms in (100, 300, 500):
        scene.at(
            at_ms * MS,
            lambda: seen.append((scene.busy(0)[0], scene.busy(1)[1])),
        )
    scene.play()
    assert seen[0] == (None, None)
    assert seen[1:] == [pytest.approx((0.025, 0.0), abs=1e-6), pytest.approx((0.05, 0.1), abs=1e-6)]


@both
def test_inner_bottleneck_leaves_uplinks_partly_unused(sharing: str) -> None:
    """Two uplinks of 1 MB/s behind a link of 0.5 MB/s, which each has alone (fifo) or both share."""
    conditions = Map([8.0] * 8 + [4.0], lambda source, to: Path((source, 8, 4 + to)))
    scene = Scene(4, Drawn(sharing=sharing, first=conditions))
    for source in (0, 1):
        scene.send(source, 2 + source, of_size(200_000))
    seen: list[float | None] = []
    scene.at(200 * MS, lambda: seen.extend(scene.busy(source)[0] for source in (0, 1)))
    scene.play()
    rate = 500_000 if sharing == "fifo" else 250_000
    assert seen == pytest.approx([0.2 * rate / 1e6] * 2, abs=1e-6)


def test_uplink_is_busy_while_a_message_is_on_it() -> None:
    scene = Scene(3, bandwidth_mbps=8.0)
    scene.send(0, 1, of_size(50_000))
    cancelled = scene.send(0, 1, of_size(50_000))
    scene.at(70 * MS, cancelled.cancel)
    scene.at(200 * MS, lambda: scene.send(0, 2, of_size(100_000)))
    seen = []
    for at_ms in (30, 60, 150, 250, 400):
        scene.at(at_ms * MS, lambda: seen.append(scene.busy(0)[0]))
    scene.play()
    assert seen == pytest.approx([0.03, 0.06, 0.07, 0.12, 0.17])


@both
def test_cancelling_a_whole_queue_from_its_front_is_counted(sharing: str) -> None:
    scene = Scene(4, UniformNetwork(sharing=sharing, bandwidth_mbps=8.0))
    queue = [scene.send(0, 1 + k % 3, of_size(30_000)) for k in range(30)]
    scene.at(45 * MS, lambda: [sending.cancel() for sending in queue])
    scene.at(100 * MS, lambda: scene.send(0, 1, of_size(10_000)))
    arrived = scene.play()
    assert arrived[-1] == (1, 0, 110 * MS, of_size(10_000))
    traffic = scene.links.traffic(0)
    assert traffic.bytes_sent == pytest.approx(55_000, abs=3)  # three transfers at once on shared links
    assert traffic.messages_cancelled == 31 - traffic.messages_sent


@both
@pytest.mark.parametrize("every_ms", [0.5, 1.5])
def test_changes_on_other_links_do_not_matter(sharing: str, every_ms: float) -> None:
    """A byte takes a millisecond; another node's uplink changes often."""

    def conditions(elsewhere: float) -> Map:
        return Map([0.008, elsewhere, *[8.0] * 6], lambda source, to: Path((source, 4 + to)))

    then = [(every_ms / 1000 * k, conditions(8.0 + k % 2)) for k in range(1, 500)]
    scene = Scene(4, Drawn(sharing=sharing, first=conditions(8.0), then=then))
    scene.send(0, 1, of_size(1000))
    assert scene.play()[0][2] == pytest.approx(1000 * MS, abs=US)


@pytest.mark.parametrize("elsewhere_s", [[], [1.05], [1.05, 1.1], [0.5]])
def test_bits_on_a_long_path_keep_their_times_through_changes(elsewhere_s: list[float]) -> None:
    """1 MB leaves at 10 MB/s for 0.1 s, then very slowly; the downlink slows down while the last bits arrive."""

    def conditions(up: float, down: float, other: float) -> Map:
        return Map(
            [up, other, 8.0, 8.0, 8.0, down, 8.0, 8.0],
            lambda source, to: Path((source, 4 + to), latency_s=1.0),
        )

    then, up, down, other = [], 80.0, 80.0, 8.0
    for at_s, link in sorted([(0.1, "up"), (1.15, "down"), *((at_s, "other") for at_s in elsewhere_s)]):
        up, down = (0.008 if link == "up" else up), (0.8 if link == "down" else down)
        other = 17 - other if link == "other" else other
        then.append((at_s, conditions(up, down, other)))
    scene = Scene(4, Drawn(sharing="fifo", first=conditions(80.0, 80.0, 8.0), then=then))
    scene.send(0, 1, of_size(1_001_000))
    assert scene.play()[0][2] == pytest.approx(2100 * MS, abs=US)


@both
def test_nothing_crosses_a_stopped_link_after_a_path_change(sharing: str) -> None:
    """100 KB at 1 MB/s; from 0.05 s to 10 s the uplink is stopped, and the path has another limit."""

    def conditions(mbps: float, limit: float) -> Map:
        return Map([mbps, *[8.0] * 7], lambda source, to: Path((source, 4 + to), rate=limit))

    then = [(0.05, conditions(0.0, 9e5)), (10.0, conditions(8.0, 1e6))]
    scene = Scene(4, Drawn(sharing=sharing, first=conditions(8.0, 1e6), then=then))
    scene.send(0, 1, of_size(100_000))
    assert scene.play()[0][2] == pytest.approx(10_050 * MS, abs=US)
