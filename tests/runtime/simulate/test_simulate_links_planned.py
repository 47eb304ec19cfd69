"""Departures on fifo links that are planned ahead: as if each were planned when the message before it has left."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from links_scene import BYTE, TAG, US, Drawn, Scene, of_size, star

from gossamer.network import Path, UniformNetwork
from gossamer.runtime.simulate import fifo
from gossamer.runtime.simulate.core import Order

NODES = 4
MS = 1000 * US


def network(rng: random.Random, kind: str) -> Any:
    if kind == "changing":  # rates change and stop, paths lose messages or vanish
        states = []
        for k in range(30):
            mbps = [rng.choice([0.0, 1.0, 8.0]) for _ in range(2 * NODES)]
            gone, loss = rng.randrange(NODES), rng.choice([0.0, 0.3])
            state = star(NODES, mbps)
            state._path = lambda source, to, gone=gone, loss=loss: (
                None if to == gone else Path((source, NODES + to), 0.002, loss=loss)
            )
            states.append((0.007 * (k + 1), state))
        return Drawn(first=star(NODES), then=(*states, (0.3, star(NODES))))
    varied = {"loss": 0.3, "jitter_s": 0.01} if kind == "lossy" else {}
    up, down = rng.choice([(8.0, 8.0), (8.0, 2.0), (8.0, None), (None, 8.0)])
    return UniformNetwork(uplink_mbps=up, downlink_mbps=down, latency_s=0.003, **varied)


def played(kind: str, seed: int) -> list[Any]:
    """What can be seen of a random script of broadcasts, cancellations and departures: arrivals, transfers, acceptances,
    counters and total bytes. Times lie on a grid, so that much happens at one instant."""
    rng = random.Random(f"{kind} {seed}")
    scene = Scene(NODES, network(rng, kind))
    links, seen, sendings = scene.links, list[Any](), list[Any]()

    def send() -> None:
        source = rng.randrange(NODES)
        to = rng.sample([rank for rank in range(NODES) if rank != source], rng.randint(1, 3))
        for sending in links.send(source, to, bytes(of_size(rng.choice([1000, 5000, 70_001]))), TAG):
            sendings.append(sending)
        news.set()

    def cancel() -> None:
        for sending in rng.sample(sendings, min(len(sendings), 3)):
            seen.append(("cancelled", scene.core.now_ns, sending.cancel()))

    def depart() -> None:
        links.leave(rank := rng.randrange(NODES), silently=rng.random() < 0.5)
        scene.at(scene.core.now_ns + 3 * MS, lambda: links.join(rank))

    def ask() -> None:
        done = [sending.done() for sending in sendings]
        counted = [links.traffic(rank) for rank in range(NODES)]
        seen.append((scene.core.now_ns, links.network_bytes(), done, counted, *map(scene.busy, range(NODES))))

    async def play() -> None:
        number = 0
        while scene.core.now_ns < 250 * MS or number < len(sendings):
            if number == len(sendings):
                news.clear()
                await news.wait()
            else:
                await sendings[number]
                seen.append(("accepted", number, scene.core.now_ns))
                number += 1

    news = asyncio.Event()
    scene.at(250 * MS, news.set)
    for _ in range(60):
        scene.at(rng.randrange(250) * MS, rng.choice([*[send] * 6, cancel, depart]))
    for _ in range(40):
        scene.at(rng.randrange(900) * MS, ask)
    scene.live(play)
    scene.play()
    return [scene.arrived, sorted(scene.watched), *seen]


@pytest.mark.parametrize("kind", ["plain", "lossy", "changing"])
@pytest.mark.parametrize("seed", range(4))
def test_planning_ahead_changes_nothing(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fifo, "AHEAD", 1)
    one_by_one = played(kind, seed)
    assert len(one_by_one[0]) > 10
    for ahead in (2, 8, 1000):
        monkeypatch.setattr(fifo, "AHEAD", ahead)
        assert played(kind, seed) == one_by_one


def test_message_costs_two_events() -> None:
    """Five messages of 1,000 bytes, each of which takes 1,000 us on the uplink and then arrives after 5 ms."""
    scene, events = Scene(8, bandwidth_mbps=8.0, latency_s=0.005), list[Order]()
    plan = scene.core.at

    def counted(time_ns: int, order: Order, *others: Any, **named: Any) -> Any:
        events.append(order)
        return plan(time_ns, order, *others, **named)

    scene.core.at = counted  # type: ignore[method-assign]
    scene.links.send(0, range(1, 6), bytes(of_size(1000)), TAG)
    arrived = scene.play()
    assert [(to, at_ns) for to, _, at_ns, _ in arrived] == [
        (k, 1000 * BYTE * k + 5 * MS) for k in range(1, 6)
    ]
    assert sorted(events) == [Order.ARRIVAL] * 5 + [Order.DELIVERY] * 5


def test_cancelled_draws_are_drawn_again() -> None:
    """The k-th message of a pair that leaves has the k-th draw of loss, also if one before it was cancelled."""

    def lost(cancelled: bool) -> list[int]:
        scene = Scene(2, bandwidth_mbps=8.0, loss=0.5, seed=3)
        sendings = [scene.send(0, 1, 1000 + k) for k in range(12)]
        if cancelled:
            sendings[5].cancel()
        return [length - 1000 for *_, length in scene.play()]

    all_of_them = lost(cancelled=False)
    assert 0 < len(all_of_them) < 12
    shifted = [
        k + (k >= 5) for k in all_of_them if k < 11
    ]  # the draw of message 6 is that of message 5 before
    assert lost(cancelled=True) == shifted
