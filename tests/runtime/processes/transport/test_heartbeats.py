"""Signs of life: who stands still is noticed, who does not is left alone, and what heartbeats carry."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from transport_scene import LIMIT, TOKEN, dial, network, on_loop, proxied

from gossamer.messages import FrameError, wire_bytes
from gossamer.runtime.processes.transport.decoder import Decoder
from gossamer.runtime.processes.transport.wire import STATUS_BYTES, Beat, beat, hello, leave

BEATS = {"heartbeat_s": 0.04, "detection_s": 0.2}


@pytest.mark.usefixtures("wire")
@on_loop
async def test_a_peer_that_stands_still_is_lost() -> None:
    async with proxied([[], []], **BEATS) as ((a, b), proxies):
        a.send(1, "t", "t")
        await b.receive(1)
        for proxy in proxies:
            proxy.flowing.clear()
        await a.until(lambda: a.lost)
        await b.until(lambda: b.lost)
        assert a.lost == [(1, "silent for 0.2 s")]
        assert b.lost == [(0, "silent for 0.2 s")]


@on_loop
async def test_silence_alone_is_no_loss() -> None:
    async with network(2, **BEATS) as ((a, b), _):
        a.send(1, "t", "t")
        await b.receive(1)
        # Until each has heard more beats than would do to be lost without them.
        await a.until(lambda: len(a.statuses) > 20)
        await b.until(lambda: len(b.statuses) > 20)
        assert a.lost == b.lost == []
        # Heartbeats are no traffic.
        assert a.traffic.bytes_sent == b.traffic.bytes_received == wire_bytes("t", "t")
        assert b.traffic.bytes_sent == a.traffic.bytes_received == 0


@on_loop
async def test_without_heartbeats_silence_is_not_judged() -> None:
    async with proxied([[], []], detection_s=0.05) as ((a, b), proxies):
        a.send(1, 0, "t")
        await b.receive(1)
        proxies[1].flowing.clear()
        a.send(1, 1, "t")
        a.transport.keep([1])
        await asyncio.sleep(0.2)
        assert a.lost == []
        proxies[1].flowing.set()
        await b.receive(2)


@on_loop
async def test_who_was_stopped_itself_blames_nobody() -> None:
    async with network(2, **BEATS) as ((a, b), _):
        a.send(1, "t", "t")
        await b.receive(1)
        time.sleep(0.5)  # both, longer than the detection
        before = len(a.statuses), len(b.statuses)
        await a.until(lambda: len(a.statuses) > before[0] + 5)
        await b.until(lambda: len(b.statuses) > before[1] + 5)
        assert a.lost == b.lost == []


@pytest.mark.usefixtures("wire")
@on_loop
async def test_heartbeats_carry_a_status_both_ways() -> None:
    said = {0: b"", 1: b"from b"}
    listening = iter(range(2))

    async with network(2, heartbeat_s=60.0, detection_s=120.0, status=lambda: said[next(listening) % 2]) as (
        (a, b),
        _,
    ):
        a.send(1, "t", "t")
        await b.receive(1)
        a.transport.beat()  # the first asks for a's status, which is what a peer takes for granted
        b.transport.beat()
        await a.until(lambda: a.statuses)
        assert a.statuses == [(1, b"from b")]
        assert b.statuses == []


@on_loop
async def test_a_status_is_said_between_the_chunks_of_a_message() -> None:
    status = bytes(range(256)) * (STATUS_BYTES // 256)
    async with network(2, heartbeat_s=0.01, detection_s=10.0, status=lambda: status) as ((a, b), _):
        for n in range(5):
            a.send(1, torch.full((200_000,), float(n)), "t")
        inbox = await b.receive(5)
        assert [float(got.payload[-1]) for got in inbox] == [0, 1, 2, 3, 4]
        await b.until(lambda: b.statuses)
        assert set(b.statuses) == {(0, status)}


@on_loop
async def test_kept_peers_are_connected_without_a_message() -> None:
    async with network(3, detection_s=0.3) as ((a, b, c), _):
        a.transport.keep([1])
        while a.transport.connected != {1}:
            await asyncio.sleep(0)
        assert b.transport.connected == {0}
        assert c.transport.connected == frozenset()
        await c.transport.close()
        a.transport.keep([2])
        await a.until(lambda: a.lost)
        assert [rank for rank, _ in a.lost] == [2]
        assert "could not be reached for 0.3 s" in a.lost[0][1]


@on_loop
async def test_who_leaves_says_so() -> None:
    async with network(2) as ((a, b), _):
        a.send(1, "t", "t")
        await b.receive(1)
        await a.transport.close()
        await b.until(lambda: b.lost)
        assert b.lost == [(0, "closed its connections")]


@pytest.mark.parametrize("cuts", [[], list(range(60))])
def test_frames_of_heartbeats(cuts: list[int]) -> None:
    sent = hello(1, TOKEN) + beat() + beat(b"well") + leave() + beat(b"x" * 20)
    decoder = Decoder(LIMIT)
    edges = [0, *[cut for cut in cuts if cut < len(sent)], len(sent)]
    events = [event for i, edge in enumerate(edges[1:]) for event in decoder.feed(sent[edges[i] : edge])]
    assert [event.status for event in events if isinstance(event, Beat)] == [b"", b"well", b"x" * 20]
    assert len(events) == 5
    assert decoder.idle
    assert decoder.frame_bytes == 0


def test_a_status_has_a_limit() -> None:
    with pytest.raises(ValueError, match="a status of 4097 bytes; accepted: at most 4096"):
        beat(b"x" * 4097)
    frame = bytearray(beat(b"x" * 4096))
    frame[1:3] = (4097).to_bytes(2, "little")
    with pytest.raises(FrameError, match="announced a status of 4097 bytes, limit 4096"):
        list(Decoder(LIMIT).feed(hello(1, TOKEN) + frame))


@on_loop
async def test_who_has_not_said_who_it_is_has_no_status() -> None:
    async with network(2) as ((a, _), _):
        async with await dial(a, beat(b"hello")) as end:
            await end.until_closed()
        assert a.statuses == []
        assert a.events[0][1].endswith("does not speak gossamer's protocol")
