"""Connections that break, peers that return, and bytes of old connections, which do nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from transport_scene import TOKEN, Peer, RawEnd, accept, dial, message, network, on_loop, proxied

from gossamer.messages import encode, wire_bytes
from gossamer.messages.tags import WINDOW
from gossamer.network import UniformNetwork
from gossamer.runtime.processes.transport import transport as module
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.processes.transport.wire import Arrived, Hello, Kind, credit, hello


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redial at once."""
    monkeypatch.setattr(module, "REDIAL_FIRST_S", 0.001)
    monkeypatch.setattr(module, "REDIAL_LAST_S", 0.02)


def contents(draw: random.Random, count: int) -> list[Any]:
    """Numbered payloads of all sizes."""
    return [
        {"n": n, "v": torch.full((draw.choice([0, 1, 500, 20_000, 60_000]),), float(n))} for n in range(count)
    ]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_messages_arrive_exactly_once_despite_repeated_cuts(seed: int) -> None:
    draw = random.Random(seed)
    cuts = [[draw.randrange(1, 400_000) for _ in range(8)] for _ in range(2)]
    async with proxied(cuts) as (peers, proxies):
        payloads = [contents(draw, 25) for _ in peers]
        for peer, sent in zip(peers, payloads, strict=True):
            for payload in sent:
                peer.send(1 - peers.index(peer), payload, "t")
        for peer, sent in zip(peers, reversed(payloads), strict=True):
            inbox = await peer.receive(25)
            assert [got.payload["n"] for got in inbox] == list(range(25))
            for got, due in zip(inbox, sent, strict=True):
                assert torch.equal(got.payload["v"], due["v"])
        for peer in peers:
            await peer.transport.flush()
        for peer, other, sent in zip(peers, reversed(peers), payloads, strict=True):
            once = sum(wire_bytes("t", payload) for payload in sent)
            assert peer.traffic.messages_sent == other.traffic.messages_received == len(other.inbox) == 25
            assert peer.traffic.bytes_sent >= other.traffic.bytes_received >= once
            assert peer.traffic.messages_lost == 0
            assert peer.lost == peer.found == []
            assert peer.events == []
        assert not any(proxy.cuts for proxy in proxies)  # all cuts took place


@pytest.mark.usefixtures("wire")
@on_loop
async def test_cancelled_messages_stay_cancelled_after_a_break() -> None:
    async with proxied([[], [100_000]]) as ((a, b), _):
        first = a.send(1, torch.zeros(900_000), "first")
        a.send(1, 1, "t")
        while a.traffic.bytes_sent < 90_000:
            await asyncio.sleep(0)
        assert first.cancel()
        for n in range(30):
            a.send(1, torch.full((5000,), n), "t")
        inbox = await b.receive(31)
        assert [got.tag for got in inbox] == [("t",)] * 31
        assert a.traffic.messages_cancelled == 1
        assert a.traffic.messages_sent == b.traffic.messages_received == 31


@on_loop
async def test_only_undelivered_messages_are_resent() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        sendings = [a.send(1, n, "t") for n in range(4)]
        async with await accept(listener, 1) as end:
            await end.until(lambda: len(end.events) == 5)
            end.reset()
        for sending in sendings:
            await sending
        assert not sendings[3].cancel()
        # The peer has taken two of them, but did not acknowledge them.
        async with await accept(listener, 1, connection=2, expected=2) as end:
            await end.until(lambda: len(end.events) == 1)
            assert end.events == [Hello(0, TOKEN, 0, 2, 0)]
            end.decoder.expected = 2
            await end.until(lambda: len(end.events) == 3)
            assert [event.payload for event in end.events if isinstance(event, Arrived)] == [2, 3]
            assert not sendings[3].cancel()
            assert a.traffic.messages_sent == 4
            assert a.traffic.bytes_sent == 6 * wire_bytes("t", 0)
            assert a.traffic.messages_cancelled == 0


@on_loop
async def test_acknowledged_messages_are_released() -> None:
    async with network(2) as ((a, b), _):
        for n in range(50):
            await a.send(1, torch.zeros(3000), n)
        await a.transport.flush()
        await b.receive(50)
        assert len(a.transport.peers[1].unacknowledged) == 0


@on_loop
async def test_message_modified_before_resending_is_reported_not_sent() -> None:
    tensor = torch.zeros(3)
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        a.send(1, encode(tensor), "t")
        a.send(1, 5, "t")
        async with await accept(listener, 1) as end:
            await end.until(lambda: len(end.events) == 3)
            end.reset()
        tensor.fill_(7)
        async with await accept(listener, 1, connection=2) as end:
            await end.until(lambda: len(end.events) == 2)
            arrived = end.events[1]
            assert isinstance(arrived, Arrived)
            assert arrived.payload == 5
        assert "was modified in place" in str(a.failures[0])


@on_loop
async def test_absent_peer_does_not_hold_up_other_peers() -> None:
    async with network(2, raw_ranks=1) as ((a, b), (listener,)):
        listener.close()
        away = [a.send(2, n, "t") for n in range(3)]
        for n in range(3):
            await a.send(1, n, "t")
        assert [got.payload for got in await b.receive(3)] == [0, 1, 2]
        assert a.transport.send_queue.busy
        assert away[0].cancel()
        assert a.traffic.messages_lost == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (hello(1, TOKEN, 3, 1), "claims to be rank 1, on a connection that is known already"),
        (hello(1, TOKEN, 2, 9), "claims to be rank 1, in its incarnation 2, which is over"),
    ],
)
@on_loop
async def test_old_greetings_are_refused(data: bytes, reason: str) -> None:
    """A replay, or bytes of an earlier incarnation."""
    async with network(1, raw_ranks=1) as ((a,), _):
        async with await dial(a, hello(1, TOKEN, 3, 1)) as first:
            await first.until(lambda: first.events)
            async with await dial(a, data) as end:
                await end.until_closed()
                assert end.events == []
            await first.say(message(0, "still here")[0])
            assert (await a.receive(1))[0].payload == "still here"
        assert [text.split(" ", 3)[3] for _, text in a.events] == [reason]
        assert a.lost == []


@on_loop
async def test_newer_connection_replaces_the_older_and_continues_it() -> None:
    async with network(1, raw_ranks=1) as ((a,), _):
        async with await dial(a, hello(1, TOKEN)) as first:
            large = message(1, torch.zeros(50_000))
            await first.say(message(0, 0)[0] + large[0] + large[1])
            await a.receive(1)
            while a.traffic.bytes_received < sum(map(len, large[:2])):
                await asyncio.sleep(0)
            async with await dial(a, hello(1, TOKEN, 0, 2)) as second:
                await second.until(lambda: second.events)
                assert second.events == [Hello(0, TOKEN, 0, 2, 1)]
                await first.until_closed()
                await second.say(message(1, 1)[0] + message(2, 2)[0])
                assert [got.payload for got in await a.receive(3)] == [0, 1, 2]
        assert a.events == a.lost == a.found == []


@pytest.mark.parametrize("number", [0, 2, 2**32 - 1])
@on_loop
async def test_out_of_order_messages_are_refused_and_not_delivered(number: int) -> None:
    async with network(1, raw_ranks=1) as ((a,), _):
        async with await dial(a, hello(1, TOKEN) + message(0, "first")[0]) as end:
            await a.receive(1)
            await end.say(message(number, "again")[0])
            await end.until_closed()
        assert len(a.inbox) == 1
        assert a.lost == [(1, f"refused: began message {number} where message 1 was due")]
        # This incarnation stays refused.
        async with await dial(a, hello(1, TOKEN, 0, 2)) as end:
            await end.until_closed()
        # The next one starts from zero.
        async with await dial(a, hello(1, TOKEN, 1, 1) + message(0, "second")[0]):
            assert [got.payload for got in await a.receive(2)] == ["first", "second"]
        assert a.found == [1]
        assert len(a.events) == 2


@on_loop
async def test_restarted_peer_gets_unfinished_and_queued_messages() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        a.send(1, "sent", "t")
        a.send(1, torch.zeros(100_000), "t")
        async with await accept(listener, 1) as end:
            await end.until(lambda: end.decoder.chunk_bytes > WINDOW // 2)
            end.reset()
        a.send(1, "queued", "t")
        # A complete message may have reached the last incarnation; unfinished ones go to the new one.
        async with await accept(listener, 1, incarnation=1, connection=2) as end:
            while len(end.events) < 3:
                taken = end.decoder.chunk_bytes
                await end.read()
                if end.decoder.chunk_bytes > taken:
                    await end.say(credit(end.decoder.chunk_bytes - taken))
            large, queued = end.events[1:]
            assert isinstance(large, Arrived)
            assert isinstance(queued, Arrived)
            assert large.payload.shape == (100_000,)
            assert queued.payload == "queued"
        assert a.found == [1]
        assert (a.traffic.messages_sent, a.traffic.messages_lost) == (3, 0)


@on_loop
async def test_message_numbers_restart_with_each_incarnation() -> None:
    listeners = [listen() for _ in range(2)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    a = Peer(0, listeners[0], addresses)
    await a.transport.start()
    for incarnation in range(3):
        losses = incarnation + 1
        b = Peer(1, listeners[1], addresses, incarnation=incarnation)
        await b.transport.start()
        for n in range(3):
            await b.send(0, f"({incarnation}, {n})", "t")
        await a.receive(3 * incarnation + 3)
        for n in range(3):
            a.send(1, n, "t")
        assert [got.payload for got in await b.receive(3)] == [0, 1, 2]
        assert a.transport.peers[1].incarnation == incarnation
        await b.transport.close()
        await a.until(lambda losses=losses: len(a.lost) == losses)
        if incarnation < 2:
            listeners[1] = listen(*addresses[1])
    await a.transport.close()
    assert [got.payload for got in a.inbox] == [f"({k}, {n})" for k in range(3) for n in range(3)]
    assert a.found == [1, 1]
    assert a.lost == [(1, "closed its connections")] * 3
    assert a.traffic.messages_lost == 0


@on_loop
async def test_lost_peer_is_found_when_it_can_be_reached_again() -> None:
    async with proxied([[], []], detection_s=0.2, heartbeat_s=0.05) as ((a, b), proxies):
        await a.send(1, "before", "t")
        await b.send(0, "before", "t")
        await b.receive(1)
        for proxy in proxies:
            proxy.flowing.clear()
        await a.until(lambda: a.lost)
        await b.until(lambda: b.lost)
        await a.send(1, "lost", "t")
        assert a.traffic.messages_unsent == 1
        assert "silent for 0.2 s" in a.lost[0][1] or "could not be reached" in a.lost[0][1]
        for proxy in proxies:
            proxy.flowing.set()
        await a.until(lambda: a.found)
        await b.until(lambda: b.found)
        await a.send(1, "after", "t")
        assert [got.payload for got in await b.receive(2)] == ["before", "after"]


@on_loop
async def test_ended_incarnation_is_ignored() -> None:
    async with network(1, raw_ranks=1) as ((a,), _):
        a.transport.mark_lost(1, "killed", incarnation=4)
        async with await dial(a, hello(1, TOKEN, 4)) as end:
            await end.until_closed()
        assert a.found == []
        async with await dial(a, hello(1, TOKEN, 5)) as end:
            await end.until(lambda: end.events)
        assert a.found == [1]
        a.transport.mark_lost(1, "killed", incarnation=4)  # outdated news
        assert a.transport.peers[1].lost is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hello(1, TOKEN, 0, 7), "answered connection 7 on connection 1"),
        (hello(1, TOKEN, 0, 1, 3), "expects message 3 after message -1"),
    ],
)
@on_loop
async def test_inconsistent_answers_are_refused(answer: bytes, reason: str) -> None:
    async with network(1, raw_ranks=1, detection_s=0.3) as ((a,), (listener,)):
        a.send(1, 1, "t")
        end, _ = await asyncio.get_running_loop().sock_accept(listener)
        end.setblocking(False)
        async with RawEnd(end) as peer:
            await peer.say(answer)
            await a.until(lambda: a.events)
        assert reason in a.events[0][1]
        await a.until(lambda: a.lost)


@on_loop
async def test_cancelled_message_uses_no_number() -> None:
    async with network(1, raw_ranks=1) as ((a,), (listener,)):
        large = a.send(1, torch.zeros(100_000), "t")
        async with await accept(listener, 1) as end:
            await end.until(lambda: end.decoder.chunk_bytes == WINDOW)
            assert large.cancel()
            await end.until(lambda: Kind.ABORT in end.events)
            end.reset()
        a.send(1, "next", "t")
        async with await accept(listener, 1, connection=2, expected=0) as end:
            await end.until(lambda: len(end.events) == 2)
            assert isinstance(end.events[1], Arrived)


async def break_on_the_uplink(a: Peer, listener: Any) -> None:
    """Send three messages to node 1, and break the connection during the second, which takes half a second."""
    for payload in (0, torch.ones(15_000), 2):
        a.send(1, payload, "t")
    async with await accept(listener, 1) as end:
        await end.until(lambda: any(isinstance(event, Arrived) for event in end.events))
        end.reset()


@on_loop
async def test_break_during_an_uplink_transfer_keeps_message_order() -> None:
    shaper = Shaper.of(0, UniformNetwork(bandwidth_mbps=1), 2, 0, asyncio.get_running_loop())
    async with network(1, raw_ranks=1, shaper=shaper) as ([a], [listener]):
        await break_on_the_uplink(a, listener)
        async with await accept(listener, 1, connection=2, expected=0) as end:  # the first did not arrive
            await end.until(lambda: sum(isinstance(event, Arrived) for event in end.events) == 3)
            arrived = [event.payload for event in end.events if isinstance(event, Arrived)]
            assert (arrived[0], len(arrived[1]), arrived[2]) == (0, 15_000, 2)


@on_loop
async def test_snapshot_counts_the_messages_before_it() -> None:
    """Messages of three rounds wait for a peer, behind an older message to another peer."""
    async with network(1, raw_ranks=2) as ([a], [first, second]):
        a.send(1, 0, "t")
        a.send(2, torch.zeros(WINDOW), "t")  # waits for credit
        a.send(2, 0, "t")
        async with await accept(second, 2) as blocking:
            await blocking.read()
            a.transport.rounds = 1
            counted: list[dict[int, int]] = []
            a.transport.add_snapshot(counted.append)
            a.send(1, 1, "t")
            a.transport.rounds = 2
            a.send(1, 2, "t")
            async with await accept(first, 1) as late:
                while a.transport.peers[1].outgoing is None:
                    await asyncio.sleep(0)
                credited = 0
                while not any(isinstance(event, Arrived) for event in blocking.events):
                    await blocking.read()
                    taken = blocking.decoder.chunk_bytes
                    await blocking.say(credit(taken - credited))
                    credited = taken
                await late.until(lambda: len(late.events) == 4)  # with the greeting
                assert [event.payload for event in late.events if isinstance(event, Arrived)] == [0, 1, 2]
                assert counted == [{1: 1, 2: 2}]


@on_loop
async def test_peer_that_keeps_hanging_up_is_lost_without_rapid_redials() -> None:
    async with network(1, raw_ranks=1, detection_s=0.2) as ((a,), (listener,)):
        a.send(1, 1, "t")

        async def answer() -> None:
            for number in itertools.count(1):
                async with await accept(listener, 1, connection=number):
                    pass

        answering = asyncio.ensure_future(answer())
        await a.until(lambda: a.lost)
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering
        assert (
            "could not be reached for 0.2 s: its connections break as soon as they are made" in a.lost[0][1]
        )
        assert a.transport.peers[1].dialled < 30  # pauses grow to 0.02 s


@on_loop
async def test_lost_message_is_not_resent_after_a_break() -> None:
    shaper = Shaper.of(0, UniformNetwork(bandwidth_mbps=1, loss=0.5), 2, 0, asyncio.get_running_loop())
    lost = [False, True, False]
    drawn: list[int] = []

    def depart(to: int) -> tuple[bool, float]:
        drawn.append(to)
        return lost[len(drawn) - 1], 0.0

    shaper.depart = depart  # type: ignore[method-assign]
    async with network(1, raw_ranks=1, shaper=shaper) as ([a], [listener]):
        await break_on_the_uplink(a, listener)
        async with await accept(listener, 1, connection=2, expected=1) as end:
            await end.until(lambda: end.events)
            end.decoder.expected = 1
            await end.until(lambda: any(isinstance(event, Arrived) for event in end.events))
            assert [event.payload for event in end.events if isinstance(event, Arrived)] == [2]
    assert (len(drawn), a.traffic.messages_lost) == (3, 1)
