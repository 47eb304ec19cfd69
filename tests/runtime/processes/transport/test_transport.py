"""The transport over loopback: several nodes in one event loop, and raw sockets as misbehaving peers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from transport_scene import LIMIT, TOKEN, RawEnd, accept, dial, is_done, message, network, on_loop, settle

from gossamer.errors import RecordError
from gossamer.messages import CHUNK_BYTES, encode, raw, wire_bytes
from gossamer.messages.encoding import DTYPES
from gossamer.messages.tags import WINDOW, Model, Part, Sending
from gossamer.runtime.processes.transport import connection as module
from gossamer.runtime.processes.transport import transport
from gossamer.runtime.processes.transport.wire import (
    BEGIN,
    Arrived,
    Decoder,
    Hello,
    Kind,
    credit,
    hello,
)


@pytest.mark.usefixtures("wire")
@on_loop
async def test_messages_of_a_sender_arrive_in_order_and_whole() -> None:
    async with network(3) as ((a, b, c), _):
        for i in range(20):
            a.send(2, torch.full((i * 3000,), i), ("s", i))
            b.send(2, i, ("s", i))
        inbox = await c.receive(40)
        for source in (0, 1):
            assert [got.tag for got in inbox if got.source == source] == [("s", i) for i in range(20)]
        for i, got in enumerate(got for got in inbox if got.source == 0):
            assert torch.equal(got.payload, torch.full((i * 3000,), i))
        assert [got.sent_at for got in inbox if got.source == 1] == [float(i) for i in range(20)]


@pytest.mark.usefixtures("wire")
@on_loop
async def test_every_kind_of_payload_arrives_bit_for_bit() -> None:
    tensors = []
    for dtype in DTYPES:
        tensor = torch.empty(3, 7_001, dtype=dtype)
        noise = torch.randint(0, 2 if dtype is torch.bool else 256, (tensor.nbytes,), dtype=torch.uint8)
        raw(tensor)[:] = raw(noise)
        tensors.append(tensor)
    part = Part(torch.ones(2), torch.tensor([3, 1]), 5)
    async with network(2) as ((a, b), _):
        a.send(
            1,
            {"all": tensors, 1: [None, True, 2.5, b"\x00", "é"], "part": part, "m": Model(*torch.ones(2, 3))},
            "t",
        )
        (got,) = await b.receive(1)
    for sent, received in zip(tensors, got.payload["all"], strict=True):
        assert received.dtype is sent.dtype
        assert received.shape == sent.shape
        assert bytes(raw(received)) == bytes(raw(sent))
    assert got.payload[1] == [None, True, 2.5, b"\x00", "é"]
    assert got.payload["part"].where.tolist() == [3, 1]
    assert isinstance(got.payload["m"], Model)


@pytest.mark.usefixtures("wire")
@on_loop
async def test_payload_changed_after_send_arrives_unchanged() -> None:
    tensor = torch.zeros(100_000)
    async with network(2) as ((a, b), _):
        payload = [tensor]
        a.send(1, payload, "t")
        tensor.fill_(9)
        payload.append(tensor)
        (got,) = await b.receive(1)
        assert len(got.payload) == 1
        assert not got.payload[0].any()


@on_loop
async def test_unwritable_timeline_is_reported() -> None:
    def watch(*_: object) -> None:
        raise RecordError(Path("timeline-0.jsonl"), OSError(28, "No space left on device"))

    async with network(2, watch=watch) as ((a, _), _):
        a.send(1, torch.zeros(3), "t")
        await a.until(lambda: a.failures)
        assert str(a.failures[0]) == "timeline-0.jsonl can't be written: No space left on device"


@on_loop
async def test_encoded_payload_modified_early_is_reported_not_sent() -> None:
    """An encoded payload is not copied: its owner must not modify it until it has left."""
    tensor, other = torch.zeros(100_000), torch.ones(3)
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        sending = a.send(1, encode(tensor), "t")
        after = a.send(1, encode(other), "after")
        async with await accept(listener, 1) as end:
            await end.until(lambda: end.decoder.chunk_bytes == WINDOW)
            assert a.failures == []
            tensor.fill_(7)
            await end.say(credit(WINDOW))
            await end.until(lambda: isinstance(end.events[-1], Arrived))
            await sending
            await after
            [failure] = a.failures
            assert "a vector of a message to node 1 was modified in place after it was sent" in str(failure)
            # The part that had left is aborted; the message behind it arrives.
            _, aborted, arrived = end.events
            assert aborted is Kind.ABORT
            assert isinstance(arrived, Arrived)
            assert a.traffic.messages_sent == 1
            assert a.traffic.bytes_sent == end.decoder.frame_bytes
            assert sending.cancel()


@pytest.mark.usefixtures("wire")
@on_loop
async def test_small_encoded_payload_modified_early_is_reported() -> None:
    tensor = torch.zeros(3)
    async with network(2) as ((a, b), _):
        sending = a.send(1, encode({"v": [tensor]}), "t")
        tensor.fill_(7)
        await sending
        await a.send(1, "next", "t")
        assert [got.payload for got in await b.receive(1)] == ["next"]
        assert len(a.failures) == 1


@pytest.mark.usefixtures("wire")
@on_loop
async def test_payload_may_be_modified_once_it_has_left() -> None:
    tensor = torch.zeros(100_000)
    async with network(2) as ((a, b), _):
        a.send(1, encode(tensor), "t")
        await a.transport.flush()
        tensor.fill_(7)
        await a.send(1, None, "t")
        got, _ = await b.receive(2)
        assert not got.payload.any()
        assert a.failures == []


@pytest.mark.usefixtures("wire")
@on_loop
async def test_traffic_matches_wire_bytes_on_both_sides() -> None:
    payloads = [
        None,
        torch.zeros(100_000),
        {"a": torch.zeros(4096 - 7)},
        b"x" * CHUNK_BYTES,
        [1, torch.zeros(0)],
    ]
    async with network(2) as ((a, b), _):
        for payload in payloads:
            a.send(1, payload, ("t", 5))
        a.send(1, encode(payloads[1]), ("t", 5))
        await a.transport.flush()
        due = sum(wire_bytes(("t", 5), payload) for payload in [*payloads, payloads[1]])
        assert a.traffic.bytes_sent == b.traffic.bytes_received == due
        assert a.traffic.messages_sent == b.traffic.messages_received == 6
        assert (a.traffic.bytes_received, b.traffic.bytes_sent, a.traffic.messages_lost) == (0, 0, 0)


@on_loop
async def test_bytes_on_the_socket_match_wire_bytes() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        a.send(1, torch.zeros(15_000), "t")
        async with await accept(listener, 1) as end:
            loop = asyncio.get_running_loop()
            due = len(hello(0, TOKEN)) + wire_bytes("t", torch.zeros(15_000))
            taken = b""
            while len(taken) < due:
                taken += await loop.sock_recv(end.end, 65_536)
            assert len(taken) == due
            greeting, arrived = Decoder(LIMIT).feed(taken)
            assert greeting == Hello(0, TOKEN, 0, 1, 0)
            assert isinstance(arrived, Arrived)


@on_loop
async def test_window_holds_against_a_receiver_that_gives_no_credit() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        small = a.send(1, None, "s")
        large = a.send(1, torch.zeros(100_000), "l")
        async with await accept(listener, 1) as end:
            await small
            # A small chunk, then full ones: one more would exceed the window.
            await end.until(lambda: end.decoder.chunk_bytes > WINDOW - CHUNK_BYTES)
            await settle()
            assert end.decoder.frame_bytes == a.traffic.bytes_sent
            assert end.decoder.chunk_bytes <= WINDOW
            assert not await is_done(large)
            with pytest.raises(TimeoutError):
                await a.transport.flush(0.01)
            # Credit for one chunk releases one more.
            taken = end.decoder.chunk_bytes
            await end.say(credit(CHUNK_BYTES))
            await end.until(lambda: end.decoder.chunk_bytes == taken + CHUNK_BYTES)
            await settle()
            assert end.decoder.frame_bytes == a.traffic.bytes_sent
            # The send completes while its last window is still unacknowledged.
            while not await is_done(large):
                uncredited = a.transport.peers[1].outgoing.unacknowledged
                await end.say(credit(uncredited // 2))
                await end.read()
            assert 0 < a.transport.peers[1].outgoing.unacknowledged <= WINDOW


@pytest.mark.usefixtures("wire")
@on_loop
async def test_cancel_while_queued_sends_nothing() -> None:
    async with network(2) as ((a, b), _):
        first, second, third = (a.send(1, i, "t") for i in range(3))
        assert second.cancel()
        assert second.cancel()
        await second
        await first
        await third
        assert [got.payload for got in await b.receive(2)] == [0, 2]
        assert a.traffic.bytes_sent == 2 * wire_bytes("t", 0)
        assert not first.cancel()


@on_loop
async def test_cancel_in_flight_stops_at_the_next_chunk() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        large = a.send(1, torch.zeros(100_000), "l")
        after = a.send(1, 5, "after")
        async with await accept(listener, 1) as end:
            await end.until(lambda: end.decoder.chunk_bytes == WINDOW)
            assert large.cancel()
            assert large.cancel()
            await large
            # The abort needs no credit; the next message does.
            await end.until(lambda: Kind.ABORT in end.events)
            assert end.decoder.frame_bytes == WINDOW + BEGIN.size + 3 * 7 + 5 == a.traffic.bytes_sent
            assert not await is_done(after)
            await end.say(credit(WINDOW))
            await end.until(lambda: isinstance(end.events[-1], Arrived))
            await after
            assert a.traffic.messages_sent == 1
            assert a.traffic.messages_lost == 0


@pytest.mark.usefixtures("wire")
@on_loop
async def test_receiver_discards_a_cancelled_message() -> None:
    async with network(2) as ((a, b), _):
        large = a.send(1, torch.zeros(900_000), "l")
        while a.traffic.bytes_sent == 0:
            await asyncio.sleep(0)
        assert large.cancel()
        await a.send(1, 5, "after")
        await a.transport.flush()
        assert [got.payload for got in b.inbox] == [5]
        assert a.traffic.bytes_sent == b.traffic.bytes_received
        assert 0 < a.traffic.bytes_sent < 900_000 * 4


@pytest.mark.parametrize("how", ["reset", "close"])
@on_loop
async def test_death_of_a_peer_is_reported_once_and_frees_waiters(how: str) -> None:
    async with network(2, raw_ranks=1, detection_s=0.3) as ((a, b), (listener,)):
        sendings = [a.send(2, torch.zeros(100_000), i) for i in range(3)]
        back = await dial(a, hello(2, TOKEN))
        other = a.send(1, "hello", "t")
        async with await accept(listener, 2) as end:
            await end.until(lambda: end.decoder.chunk_bytes == WINDOW)
            for connection in (end, back):
                connection.reset() if how == "reset" else connection.end.close()
            for sending in sendings:
                await sending
        await other
        assert (await b.receive(1))[0].payload == "hello"
        assert [rank for rank, _ in a.lost] == [2]
        assert a.traffic.messages_unsent == 3
        late = a.send(2, None, "late")
        await late
        assert late.cancel()
        assert a.traffic.messages_unsent == 4
        assert a.traffic.messages_sent == 1
        assert b.lost == []


@on_loop
async def test_refused_dial_loses_the_peer() -> None:
    async with network(1, raw_ranks=1, detection_s=0.3) as ((a,), (listener,)):
        listener.close()
        await a.send(1, 1, "t")
        assert len(a.lost) == 1
        assert "refused" in a.lost[0][1].lower() or "Connect call failed" in a.lost[0][1]
        assert a.traffic.messages_unsent == 1
        assert a.traffic.bytes_sent == 0


@pytest.mark.usefixtures("wire")
@on_loop
async def test_peer_marked_lost_can_be_marked_found() -> None:
    async with network(2, detection_s=0.3) as ((a, b), _):
        await a.send(1, 1, "t")
        await b.receive(1)
        queued = [a.send(1, torch.zeros(100_000), "t") for _ in range(2)]
        a.transport.mark_lost(1, "no heartbeat")
        a.transport.mark_lost(1, "no heartbeat")
        for sending in queued:
            await sending
        assert a.traffic.messages_unsent == 2
        assert a.lost == []
        a.transport.mark_found(1)
        await a.send(1, 2, "t")
        assert [got.payload for got in await b.receive(2)] == [1, 2]


@pytest.mark.usefixtures("wire")
@on_loop
async def test_mark_lost_while_dialling_leaves_no_trace() -> None:
    async with network(2) as ((a, b), _):
        a.send(1, 1, "t")
        assert a.transport.peers[1].dial is not None
        a.transport.mark_lost(1, "gone")
        a.transport.mark_found(1)
        await a.send(1, 2, "t")
        assert [got.payload for got in await b.receive(1)] == [2]


@pytest.mark.usefixtures("wire")
@on_loop
async def test_messages_over_the_limit_are_not_sent() -> None:
    async with network(2, limit=1000) as ((a, b), _):
        with pytest.raises(ValueError, match=r"a message of 4025 bytes to rank 1; the limit is 1000 bytes"):
            a.send(1, torch.zeros(1000), "t")
        await a.send(1, 1, "t")
        await b.receive(1)
        assert a.traffic.messages_sent == 1


@on_loop
async def test_messages_over_the_limit_are_refused() -> None:
    async with network(3, limit=1000) as ((a, b, _), _):
        async with await dial(
            a, hello(2, TOKEN) + message(0, 7)[0] + message(1, torch.zeros(1000))[0]
        ) as end:
            await end.until_closed()
        b.send(0, 8, "t")
        assert [(got.source, got.payload) for got in await a.receive(2)] == [(2, 7), (1, 8)]
        assert a.events == [("refused", "2 announced 4025 bytes, limit 1000")]
        assert a.lost == [(2, "refused: announced 4025 bytes, limit 1000")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak gossamer's protocol"),
        (bytes(range(256)) * 300, "does not speak gossamer's protocol"),
        (hello(1, b"another run's to"), "has the token of another run"),
        (hello(2, TOKEN), "claims to be rank 2 of 2"),
        (hello(0, TOKEN), "claims to be rank 0 of 2"),
    ],
)
@on_loop
async def test_strangers_are_refused_without_disturbing_peers(said: bytes, reason: str) -> None:
    async with network(2) as ((a, b), _):
        b.send(0, 1, "t")
        await a.receive(1)
        async with await dial(a, said) as end:
            await end.until_closed()
            assert end.events == []
        await b.send(0, 2, "t")
        await a.receive(2)
        assert len(a.events) == 1
        assert a.events[0][1].startswith("stranger at 127.0.0.1:")
        assert a.events[0][1].endswith(reason)
        assert a.lost == b.lost == []


@on_loop
async def test_connection_that_does_not_identify_itself_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.02)
    async with network(2) as ((a, b), _):
        async with await dial(a, hello(1, TOKEN)[:5]) as end:
            await end.until_closed()
        await a.until(lambda: len(a.events) == 1)
        assert "did not identify itself within 0.02 s" in a.events[0][1]
        await b.send(0, 1, "t")
        await a.receive(1)


@pytest.mark.parametrize("data", [b"", hello(1, TOKEN)[:5]])
@on_loop
async def test_disconnect_during_the_greeting_is_not_reported(data: bytes) -> None:
    async with network(2) as ((a, b), _):
        async with await dial(a, data):
            while not a.transport.strangers:
                await asyncio.sleep(0)
        while a.transport.strangers:
            await asyncio.sleep(0)
        assert a.events == []
        await b.send(0, 1, "t")
        await a.receive(1)


@on_loop
async def test_peer_that_sends_beyond_its_window_is_refused() -> None:
    async with network(2) as ((a, _), _):
        async with await dial(a, hello(1, TOKEN)) as end:
            await end.until(lambda: end.events)
            incoming = a.transport.peers[1].incoming
            incoming.pause_writing()  # as if the peer did not read its credit
            await end.say(b"".join(message(0, torch.zeros(100_000))[:5]))
            await a.until(lambda: a.events)
        assert a.events == [("refused", f"1 sent more than its window of {WINDOW} bytes")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hello(0, TOKEN), "answered as rank 0"),
        (hello(1, b"another run's to"), "the token of another run"),
        (hello(1, TOKEN) + credit(10**9), "acknowledged 1000000000 bytes of"),
        (hello(1, TOKEN) + message(0, 1)[0], "unexpected frame"),
    ],
)
@on_loop
async def test_malformed_answers_are_refused(answer: bytes, reason: str) -> None:
    async with network(1, raw_ranks=1, detection_s=0.3) as ((a,), (listener,)):
        sending = a.send(1, torch.zeros(100_000), "t")
        end, _ = await asyncio.get_running_loop().sock_accept(listener)
        end.setblocking(False)
        async with RawEnd(end) as peer:
            await peer.say(answer)
            await sending
        assert len(a.events) == len(a.lost) == 1
        assert reason in a.events[0][1]
        assert a.traffic.messages_unsent == 1


@on_loop
async def test_all_to_all_messages_arrive() -> None:
    async with network(8) as (peers, _):
        for source, to in itertools.permutations(range(8), 2):
            peers[source].send(to, torch.full((250_000,), float(source)), "t")
        for rank, peer in enumerate(peers):
            inbox = await peer.receive(7)
            assert {got.source for got in inbox} == set(range(8)) - {rank}
            assert all(bool((got.payload == got.source).all()) for got in inbox)
            await peer.transport.flush()
        assert sum(peer.traffic.bytes_sent for peer in peers) == sum(
            peer.traffic.bytes_received for peer in peers
        )
        assert not any(peer.lost or peer.events for peer in peers)


@on_loop
async def test_close_releases_waiting_sends() -> None:
    async with network(1, raw_ranks=1) as ((a,), _):
        sendings = [a.send(1, torch.zeros(100_000), "t") for _ in range(2)]

        async def wait(sending: Sending) -> None:
            await sending

        waiting: list[Awaitable[None]] = [asyncio.ensure_future(wait(sending)) for sending in sendings]
        await settle()
        await a.transport.close()
        await a.transport.close()
        await asyncio.gather(*waiting)
        assert a.traffic.messages_unsent == 2
        assert a.lost == []


@pytest.mark.usefixtures("wire")
@on_loop
async def test_close_during_incoming_connections_is_quiet() -> None:
    async with network(3) as ((a, b, c), _):
        b.send(0, torch.zeros(500_000), "t")
        c.send(0, torch.zeros(500_000), "t")
        async with await dial(a, b""):
            await a.transport.close()
        assert a.events == []


@on_loop
async def test_unsendable_payload_is_refused() -> None:
    async with network(2) as ((a, _), _):
        with pytest.raises(TypeError, match="set can't be sent"):
            a.send(1, {1}, "t")


@on_loop
async def test_connection_flood_is_bounded_and_peers_still_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "STRANGERS", 5)
    monkeypatch.setattr(transport, "REFUSALS", 3)
    async with network(2) as ((a, b), _), AsyncExitStack() as stack:
        for _ in range(40):
            await stack.enter_async_context(await dial(a, b""))
            await settle()
            assert len(a.transport.strangers) <= 5 + 2
        await b.send(0, 1, "t")
        await a.receive(1)
        texts = [text for _, text in a.events]
        assert texts[3:] == ["further refusals are not shown"]
        assert all(text.endswith("did not identify itself while others connected") for text in texts[:3])
