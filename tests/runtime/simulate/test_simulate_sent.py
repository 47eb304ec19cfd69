"""The bytes that all nodes together have sent: for random scripts, their sum at every instant."""

from __future__ import annotations

import random
from typing import Any

import pytest
from links_scene import SHARINGS, US, Drawn, Scene, of_size, star

from gossamer.network import Path, UniformNetwork
from gossamer.runtime.simulate.core import NEVER_NS, Deadlock
from gossamer.runtime.simulate.sent import MANY_ENDS, SentBytes

NODES = 4
MS = 1000 * US


def network(rng: random.Random, sharing: str, kind: str) -> Any:
    if kind == "latency":
        return UniformNetwork(latency_s=rng.choice([0.0, 0.02]))
    if kind == "changing":  # rates change, stop and recover, and paths vanish, also within messages
        states = []
        for k in range(40):
            path = {"latency_s": rng.choice([0.0, 0.01])}
            mbps = [rng.choice([0.0, 0.3, 8.0, 40.0]) for _ in range(2 * NODES)]
            state = star(NODES, mbps, **path)
            if rng.random() < 0.3:
                gone = rng.randrange(NODES)
                state._path = lambda source, to, gone=gone: (
                    None if to == gone else Path((source, NODES + to))  # type: ignore[misc]
                )
            states.append((0.005 * (k + 1), state))
        states.append((0.3, star(NODES)))
        return Drawn(sharing=sharing, first=star(NODES), then=tuple(states))
    lossy = {"loss": 0.3, "jitter_s": 0.01} if kind == "lossy" else {}
    return UniformNetwork(sharing=sharing, bandwidth_mbps=rng.choice([8.0, 7.3]), latency_s=0.003, **lossy)


@pytest.mark.parametrize("kind", ["plain", "lossy", "changing", "latency"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("seed", range(4))
def test_total_is_the_sum_over_nodes(sharing: str, kind: str, seed: int) -> None:
    """At random instants, also several times at one of them, among sends, cancellations and departures. Messages that
    are leaving may count with the byte that they have begun; afterwards the two are equal."""
    rng = random.Random(f"{sharing} {kind} {seed}")
    scene = Scene(NODES, network(rng, sharing, kind))
    links, sendings, asked = scene.links, [], []

    def send() -> None:
        source, to = rng.sample(range(NODES), 2)
        sendings.append(scene.send(source, to, of_size(rng.choice([100, 5_000, 70_001]))))

    def cancel() -> None:
        if sendings:
            rng.choice(sendings).cancel()

    def depart() -> None:
        links.leave(rank := rng.randrange(NODES), silently=rng.random() < 0.5)
        scene.at(scene.core.now_ns + 3 * MS, lambda: links.join(rank))

    def ask() -> None:
        before = links.network_bytes()  # asking is no event: it settles nothing
        leaving = sum(len(list(links._leaving(rank))) for rank in range(NODES))
        total = sum(links.traffic(rank).bytes_sent for rank in range(NODES))
        assert 0 <= before - total <= leaving
        assert before == links.network_bytes()
        asked.append(before)

    for _ in range(60):
        scene.at(rng.randrange(250 * MS), rng.choice([send, send, send, cancel, depart]))
    for _ in range(80):
        scene.at(rng.randrange(600 * MS), ask)
    scene.play()
    assert asked == sorted(asked)
    assert len(set(asked)) > 5
    total = sum(links.traffic(rank).bytes_sent for rank in range(NODES))
    assert links.network_bytes() == total
    traffics = [links.traffic(rank) for rank in range(NODES)]
    sent, received, lost = (
        sum(getattr(traffic, f"messages_{fate}") for traffic in traffics)
        for fate in ("sent", "received", "lost")
    )
    assert sent == received + lost
    assert links._on_the_way == [0] * NODES


def test_half_of_a_message_is_half_of_its_bytes() -> None:
    """By hand: 100 kB at 1 MB/s, of which 25 kB have left after 25 ms, and two nodes that send at once."""
    scene = Scene(NODES, bandwidth_mbps=8.0)
    seen: list[int] = []
    scene.send(0, 1, of_size(100_000))
    scene.at(50 * MS, lambda: scene.send(2, 3, of_size(10_000)))
    for at_ms in (0, 25, 55, 60, 100, 130):
        scene.at(at_ms * MS, lambda: seen.append(scene.links.network_bytes()))
    scene.play()
    assert seen == [0, 25_000, 60_000, 70_000, 110_000, 110_000]


def test_many_outdated_ends_are_forgotten() -> None:
    sent = SentBytes()
    for k in range(5 * MANY_ENDS):
        sent.flow("message", 0, 0.0, 1e-3, k, 10**12 - k)
    assert len(sent._ends) <= 2 * MANY_ENDS
    assert sent.by(10**6) == pytest.approx(1e-3 * (10**6 - 5 * MANY_ENDS), abs=1)
    assert sent.ended(10**6) == []
    assert sent.ended(2 * 10**12) == ["message"]
    sent.stop("message", 10**9)
    assert sent.by(2 * 10**12) == 10**9


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("mbps", [0.0, 1e-300])
def test_a_link_that_recovers_continues_and_one_that_does_not_ends_time(sharing: str, mbps: float) -> None:
    """8 Mbit/s, a stop from 50 ms to 150 ms, and 200 kB: they arrive after 300 ms, and count as 50 kB in between."""
    stop, go = (0.05, star(2, mbps)), (0.15, star(2))
    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=(stop, go)))
    sending, seen = scene.send(0, 1, of_size(200_000)), []
    scene.at(100 * MS, lambda: seen.append((scene.links.network_bytes(), sending.done())))
    assert [arrival[2] for arrival in scene.play()] == [pytest.approx(300 * MS, abs=3)]
    assert seen == [(50_000, False)]

    scene = Scene(2, Drawn(sharing=sharing, first=star(2), then=(stop,)))
    scene.send(0, 1, of_size(100_000))
    with pytest.raises(Deadlock, match="nothing happens in 4.6e.09 s, the longest virtual time"):
        while True:
            scene.core.advance()
    assert scene.arrived == []
    assert scene.core.now_ns < NEVER_NS
    assert scene.links.traffic(0).messages_sent == 0
