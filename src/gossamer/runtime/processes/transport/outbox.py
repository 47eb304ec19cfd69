"""A node's outgoing messages: one task sends them one after another, since a node has one uplink."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError
from gossamer.messages import Encoded, framed_bytes
from gossamer.messages.tags import WINDOW, Sending, Traffic
from gossamer.runtime.processes.transport.peer import Peer, State
from gossamer.runtime.processes.transport.shaper import CATCH_UP_S, LATE_S, Shaper
from gossamer.runtime.processes.transport.wire import NUMBERS, abort, chunks

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.connection import Outgoing
    from gossamer.runtime.processes.transport.transport import Transport


class OwnSending(Sending):
    """One message on its way to one peer, sent in a round of this node; ``take_back`` cancels it."""

    def __init__(
        self, to: int, head: bytes, encoded: Encoded, round: int, take_back: Callable[[OwnSending], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.to, self.head, self.round = to, head, round
        self.buffers = encoded.buffers
        self.nbytes = len(head) + sum(buffer.nbytes for buffer in encoded.buffers)
        self.queued_at = loop.time()
        self.state = State.QUEUED
        self._versions = tuple(buffer._version for buffer in encoded.buffers)
        self._take_back = take_back
        self._done: asyncio.Future[None] = loop.create_future()

    @property
    def over(self) -> bool:
        return self.state not in (State.QUEUED, State.AGAIN)

    def __await__(self) -> Generator[Any, None, None]:
        # Shielded: the waiting task may be cancelled, and others wait for the same message.
        return asyncio.shield(self._done).__await__()

    def done(self) -> bool:
        return self._done.done()

    def cancel(self) -> bool:
        return self._take_back(self)

    def unchanged(self) -> bool:
        return all(
            buffer._version == seen for buffer, seen in zip(self.buffers, self._versions, strict=False)
        )

    def accept(self) -> None:
        """Release the tasks that wait."""
        if not self._done.done():
            self._done.set_result(None)

    def release(self) -> None:
        """Release the tasks that wait, and the memory."""
        self.buffers = ()
        self.accept()


@dataclass(eq=False)
class Cut:
    """A snapshot at the end of some rounds, before which messages are still to leave: by receiver, the number of the first
    message of a later round, if one has left."""

    rounds: int
    counts: dict[int, int | None]
    told: Callable[[dict[int, int]], None]


class Outbox:
    """One node's messages, and their numbers before its snapshots."""

    def __init__(self, node: Transport) -> None:
        self._node = node
        self._queue: OrderedDict[OwnSending, None] = OrderedDict()
        self._current: OwnSending | None = None
        self._sent_before = 0  # bytes, when it began to leave
        self._cuts: list[Cut] = []

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self._current is not None

    def put(self, sending: OwnSending) -> bool:
        """Queue a message; returns False if it is lost with its receiver."""
        if self._node.peers[sending.to].lost is not None:
            self._give_up(sending)
            return False
        self._queue[sending] = None
        self._node.wake()
        return True

    def saved_traffic(self) -> Traffic:
        """The counters, as if all that was sent had left."""
        traffic = self._node.traffic
        current = [] if self._current is None or self._current.over else [self._current]
        every = dict.fromkeys((*self._queue, *current))  # one whose connection broke is there twice
        new = [each for each in every if each.state is not State.AGAIN]
        gone = traffic.bytes_sent - self._sent_before if current else 0
        return replace(
            traffic,
            messages_sent=traffic.messages_sent + len(new),
            bytes_sent=traffic.bytes_sent + sum(framed_bytes(each.nbytes) for each in new) - gone,
        )

    def close(self) -> None:
        for peer in self._node.peers.values():
            self.drop(peer)

    # --- sending

    async def send_all(self) -> None:
        """Send what is queued for connected peers, forever."""
        peers = self._node.peers
        while True:
            self.tell()
            while (sending := next((each for each in self._queue if peers[each.to].outgoing), None)) is None:
                await self._node.changed()
                self.tell()
            del self._queue[sending]
            peer = peers[sending.to]
            assert peer.outgoing is not None
            self._current = sending
            await self._transmit(sending, peer, peer.outgoing)
            self._current = None
            self._node.wake()

    async def _transmit(self, sending: OwnSending, peer: Peer, connection: Outgoing) -> None:
        node, shaper, again = self._node, self._node.shaper, sending.state is State.AGAIN
        link: Outgoing | None = connection  # None for a message that the network loses
        lost, round_trip_s = (False, 0.0) if shaper is None else shaper.depart(sending.to)
        lost = lost and not again  # what had left once has a number, for which the peer waits
        if lost:
            link = None
        # With a shaper, a message is accepted a round trip after all but a window of it was taken.
        accepted_at = connection.written + sending.nbytes - WINDOW
        if shaper is not None and sending.nbytes <= WINDOW:
            sending.accept()
        begun = accepting = False
        free_at = max(sending.queued_at, node.loop.time() - LATE_S)
        start_s, self._sent_before = node.now(), node.traffic.bytes_sent
        for chunk in chunks(peer.number, sending.head, sending.buffers):
            while not (sending.over or link is None or link.closed or link.room(chunk.nbytes)):
                await node.changed()
                free_at = node.loop.time() - CATCH_UP_S
            if shaper is not None:
                if link is not None and link.written - link.unacknowledged >= accepted_at and not accepting:
                    accepting = True
                    peer.accepting.add(sending)
                    node.loop.call_later(round_trip_s, self._accept, sending, peer)
                await self._pass_uplink(shaper, sending, len(chunk.frame), free_at)
                free_at = -math.inf
                if link is not None and not shaper.reaches(sending.to):
                    if begun:
                        self._call_off(link, peer)
                    link, lost = None, True
            if sending.over or (link is not None and link.closed):
                break
            if not sending.unchanged():
                node.failed(
                    GossamerError(
                        f"a vector of a message to node {sending.to} was modified in place after it was sent; what is in"
                        " a message is immutable: compute a new vector"
                    )
                )
                sending.state = State.QUEUED  # what had left of it earlier, the peer has not got
                self.cancel(sending)
                break
            node.traffic.bytes_sent += len(chunk.frame)
            if link is not None:
                begun = True
                link.write(chunk.frame)
                link.written += chunk.nbytes
                link.unacknowledged += chunk.nbytes
        else:
            # From here on the receiver will see it: it can't be taken back.
            sending.state = State.SENT
            node.traffic.messages_sent += not again
            if lost:
                node.traffic.messages_lost += 1
                sending.release()
            elif shaper is None:
                sending.accept()
            if link is not None:
                self._use_number(link, peer, sending)
        if node.watch is not None and (sent := node.traffic.bytes_sent - self._sent_before):
            node.watch(sending.to, start_s, node.now(), sent)
        if link is not None:
            if begun and sending.state is State.CANCELLED:
                self._call_off(link, peer)
            while not (link.writable or link.closed):
                await node.changed()

    async def _pass_uplink(self, shaper: Shaper, sending: OwnSending, nbytes: int, since: float) -> None:
        """Wait until some bytes of a message have passed the uplink, or need not any more."""
        shaper.uplink.take(nbytes, since)
        while not sending.over and (wait := shaper.uplink.free - self._node.loop.time()) > 0:
            timer = self._node.loop.call_later(wait, self._node.wake)
            await self._node.changed()
            timer.cancel()
        if sending.over:
            shaper.uplink.give_back(self._node.loop.time())

    def _accept(self, sending: OwnSending, peer: Peer) -> None:
        peer.accepting.discard(sending)
        sending.accept()

    def _call_off(self, link: Outgoing, peer: Peer) -> None:
        if not link.closed:
            frame = abort(peer.number)
            self._node.traffic.bytes_sent += len(frame)
            link.write(frame)

    def _use_number(self, link: Outgoing, peer: Peer, sending: OwnSending) -> None:
        if sending.round > peer.first[0]:
            peer.first = sending.round, peer.number
        for cut in self._cuts:
            if cut.counts.get(peer.rank, 0) is None and sending.round >= cut.rounds:
                cut.counts[peer.rank] = peer.number
        peer.number = (peer.number + 1) % NUMBERS
        peer.unacknowledged.append((link.written, sending))

    # --- what becomes of messages otherwise

    def cancel(self, sending: OwnSending) -> bool:
        """Take a message back; returns whether it won't be received."""
        if sending.over or sending.state is State.AGAIN:
            return sending.state in (State.CANCELLED, State.LOST)
        sending.state = State.CANCELLED
        self._node.traffic.messages_cancelled += 1
        self._queue.pop(sending, None)
        sending.release()
        self._node.wake()
        return True

    def _give_up(self, sending: OwnSending) -> None:
        if sending.state is State.AGAIN:
            sending.state = State.SENT
        elif not sending.over:
            sending.state = State.LOST
            self._node.traffic.messages_lost += 1
        sending.release()

    def drop(self, peer: Peer) -> None:
        if self._current is not None and self._current.to == peer.rank:
            self._give_up(self._current)
        self.forget(peer)

    def forget(self, peer: Peer, state: State | None = None) -> None:
        """Give up the messages for a peer that are queued (in one state), and release those that it hasn't acknowledged."""
        for sending in [each for each in self._queue if each.to == peer.rank and state in (None, each.state)]:
            del self._queue[sending]
            self._give_up(sending)
        peer.forget()

    def park(self, peer: Peer) -> None:
        """A peer is not connected any more: the message for it that was about to leave waits."""
        if (current := self._current) is not None and current.to == peer.rank and not current.over:
            self._put_first(current)

    def resume(self, peer: Peer, expected: int) -> None:
        """A peer is connected again, and expects this message: later ones that had left are sent again."""
        for sending in reversed(peer.resume(expected)):
            self._put_first(sending)

    def _put_first(self, sending: OwnSending) -> None:
        self._queue[sending] = None
        self._queue.move_to_end(sending, last=False)

    # --- snapshots

    def cut(self, rounds: int, told: Callable[[dict[int, int]], None]) -> None:
        """A snapshot was taken of this node at the end of this many rounds; see :meth:`Transport.cut`."""
        counts: dict[int, int | None] = {}
        for peer in self._node.peers.values():
            if peer.used and peer.lost is None:
                since, number = peer.first
                counts[peer.rank] = number if since >= rounds else None
        self._cuts.append(Cut(rounds, counts, told))
        self.tell()

    def tell(self) -> None:
        """Report snapshots before which nothing is left to send."""
        if not self._cuts:
            return
        oldest: dict[int, int] = {}  # round, by receiver
        for each in (*self._queue, *([] if self._current is None else [self._current])):
            oldest[each.to] = min(each.round, oldest.get(each.to, each.round))
        for cut in list(self._cuts):
            peers = [peer for peer in map(self._node.peers.__getitem__, cut.counts) if peer.lost is None]
            if all(oldest.get(peer.rank, cut.rounds) >= cut.rounds for peer in peers):
                self._cuts.remove(cut)
                counts = ((peer, cut.counts[peer.rank]) for peer in peers)
                cut.told({peer.rank: peer.number if count is None else count for peer, count in counts})
