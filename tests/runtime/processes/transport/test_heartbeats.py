"""Heartbeats: a silent peer is lost, and an idle one is not."""

from __future__ import annotations

import asyncio
import time

import pytest
from transport_scene import LIMIT, TOKEN, Peer, dial, network, on_loop, proxied

from gossamer.messages import wire_bytes
from gossamer.runtime.processes.transport.wire import BEAT, LEAVE, Decoder, Kind, hello

BEATS = {"heartbeat_s": 0.04, "detection_s": 0.2}


async def meet(a: Peer, b: Peer) -> None:
    await a.send(1, "t", "t")
    await b.receive(1)


@pytest.mark.usefixtures("wire")
@on_loop
async def test_silent_peer_is_lost() -> None:
    async with proxied([[], []], **BEATS) as ((a, b), proxies):
        await meet(a, b)
        for proxy in proxies:
            proxy.flowing.clear()
        await a.until(lambda: a.lost)
        await b.until(lambda: b.lost)
        assert a.lost == [(1, "silent for 0.2 s")]
        assert b.lost == [(0, "silent for 0.2 s")]


@on_loop
async def test_idle_peer_is_not_lost() -> None:
    async with proxied([[], []], **BEATS) as ((a, b), (_, before_b)):
        await meet(a, b)
        passed = len(before_b.passed)
        while len(before_b.passed) < passed + 40 * len(BEAT):  # both ways: four detection times
            await asyncio.sleep(0.01)
        assert a.lost == b.lost == []
        # Heartbeats do not count as traffic.
        assert a.traffic.bytes_sent == b.traffic.bytes_received == wire_bytes("t", "t")
        assert b.traffic.bytes_sent == a.traffic.bytes_received == 0


@on_loop
async def test_silence_means_nothing_without_heartbeats() -> None:
    async with proxied([[], []], detection_s=0.05) as ((a, b), proxies):
        await meet(a, b)
        proxies[1].flowing.clear()
        a.send(1, 1, "t")
        await asyncio.sleep(0.2)
        assert a.lost == []
        proxies[1].flowing.set()
        await b.receive(2)


@on_loop
async def test_stopped_node_blames_no_peer() -> None:
    async with proxied([[], []], **BEATS) as ((a, b), (_, before_b)):
        await meet(a, b)
        time.sleep(0.5)  # stops both nodes, for longer than detection takes
        passed = len(before_b.passed)
        while len(before_b.passed) < passed + 10 * len(BEAT):
            await asyncio.sleep(0.01)
        assert a.lost == b.lost == []


@on_loop
async def test_closing_node_tells_its_peers() -> None:
    async with network(2) as ((a, b), _):
        await meet(a, b)
        await a.transport.close()
        await b.until(lambda: b.lost)
        assert b.lost == [(0, "closed its connections")]


def test_heartbeats_are_events_but_not_traffic() -> None:
    decoder = Decoder(LIMIT)
    _, *events = decoder.feed(hello(1, TOKEN) + BEAT + BEAT + LEAVE + BEAT)
    assert events == [Kind.BEAT, Kind.BEAT, Kind.LEAVE, Kind.BEAT]
    assert decoder.idle
    assert decoder.frame_bytes == 0


@on_loop
async def test_heartbeat_of_a_stranger_is_refused() -> None:
    async with network(2) as ((a, _), _):
        async with await dial(a, BEAT * 4) as end:
            await end.until_closed()
        assert a.events[0][1].endswith("does not speak gossamer's protocol")
