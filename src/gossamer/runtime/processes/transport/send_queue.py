"""A node's outgoing messages: one task sends them one after another, since a node has one uplink."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.messages import framed_bytes
from gossamer.messages.tags import WINDOW, Traffic
from gossamer.runtime.processes.transport.peer import Peer, State, TcpSending
from gossamer.runtime.processes.transport.shaper import CATCH_UP_S, LATE_S, Shaper
from gossamer.runtime.processes.transport.wire import abort, chunks

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.connection import Outgoing
    from gossamer.runtime.processes.transport.transport import Transport


@dataclass(eq=False)
class PendingSnapshot:
    """A snapshot at the end of ``rounds`` rounds, whose earlier messages have not all left. ``counts`` holds,
    by receiver, the number of the first message of a later round; None if none has left yet."""

    rounds: int
    counts: dict[int, int | None]
    report: Callable[[dict[int, int]], None]


class SendQueue:
    """A node's outgoing messages, and their counts at its snapshots."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._queue: OrderedDict[TcpSending, None] = OrderedDict()
        self._current: TcpSending | None = None
        self._snapshots: list[PendingSnapshot] = []

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self._current is not None

    def put(self, sending: TcpSending) -> None:
        """Queue a message, unless its receiver is lost: then it counts as unsent."""
        if self._transport.peers[sending.to].lost is not None:
            self._give_up(sending)
        else:
            self._queue[sending] = None
            self._transport.wake()

    def _pending(self) -> dict[TcpSending, None]:
        """The messages that are queued or being sent, each once (one is both after a broken connection)."""
        current = [] if self._current is None or self._current.over else [self._current]
        return dict.fromkeys((*self._queue, *current))

    def saved_traffic(self) -> Traffic:
        """The counters, as if all pending messages had left."""
        traffic = self._transport.traffic
        new = [sending for sending in self._pending() if sending.state is not State.RESEND]
        unsent = sum(framed_bytes(sending.nbytes) - sending.left for sending in new)
        sent = traffic.messages_sent + len(new)
        return replace(traffic, messages_sent=sent, bytes_sent=traffic.bytes_sent + unsent)

    # --- sending

    async def send_all(self) -> None:
        """Send the messages for connected peers, forever."""
        peers = self._transport.peers
        while True:
            self.report_snapshots()
            while (sending := next((s for s in self._queue if peers[s.to].outgoing), None)) is None:
                await self._transport.changed()
                self.report_snapshots()
            del self._queue[sending]
            peer = peers[sending.to]
            assert peer.outgoing is not None
            self._current = sending
            await self._transmit(sending, peer, peer.outgoing)
            self._current, sending.left = None, 0
            self._transport.wake()

    async def _transmit(self, sending: TcpSending, peer: Peer, link: Outgoing) -> None:
        transport, shaper, again = self._transport, self._transport.shaper, sending.state is State.RESEND
        lost, round_trip_s = (False, 0.0) if shaper is None else shaper.depart(sending.to)
        lost = lost and not again  # the peer waits for the number of a message that had left before
        # With a shaper, a message is accepted one round trip after all but a window of it was taken.
        accepted_at, accepting = link.written + sending.nbytes - WINDOW, shaper is None
        if shaper is not None and sending.nbytes <= WINDOW:
            sending.accept()
        free_at = max(sending.queued_at, transport.loop.time() - LATE_S)
        start_s, sending.left, begun = transport.now(), 0, False
        for chunk in chunks(peer.number, sending.head, sending.buffers):
            while not (sending.over or lost or link.closed or link.room(chunk.nbytes)):
                await transport.changed()
                free_at = transport.loop.time() - CATCH_UP_S
            if shaper is not None:
                if not (lost or accepting) and link.written - link.unacknowledged >= accepted_at:
                    accepting = True
                    transport.loop.call_later(round_trip_s, sending.accept)
                await self._pass_uplink(shaper, sending, len(chunk.frame), free_at)
                free_at = -math.inf
                if not (lost or shaper.reaches(sending.to)):
                    lost = True
                    if begun:
                        self._abort_message(link, peer)
            if sending.over or (link.closed and not lost):
                break
            if not sending.unchanged():
                self._refuse(sending)
                break
            transport.traffic.bytes_sent += len(chunk.frame)
            sending.left += len(chunk.frame)
            if not lost:
                begun = True
                link.write(chunk.frame)
                link.written += chunk.nbytes
                link.unacknowledged += chunk.nbytes
        else:
            # From here on the receiver will get the message, so it can't be cancelled.
            sending.state = State.SENT
            transport.traffic.messages_sent += not again
            if lost:
                transport.traffic.messages_lost += 1
                self._queue.pop(sending, None)  # it is there again if its connection has broken meanwhile
                sending.release()
            else:
                self._use_number(link, peer, sending)
                if shaper is None:
                    sending.accept()
        if transport.watch is not None and sending.left:
            transport.watch(sending.to, start_s, transport.now(), sending.left)
        if not lost:
            if begun and sending.state is State.CANCELLED:
                self._abort_message(link, peer)
            while not (link.writable or link.closed):
                await transport.changed()

    async def _pass_uplink(self, shaper: Shaper, sending: TcpSending, nbytes: int, since: float) -> None:
        """Wait until some bytes of a message have passed the uplink, or no longer need to."""
        shaper.uplink.take(nbytes, since)
        while not sending.over and (wait := shaper.uplink.free - self._transport.loop.time()) > 0:
            timer = self._transport.loop.call_later(wait, self._transport.wake)
            await self._transport.changed()
            timer.cancel()
        if sending.over:
            shaper.uplink.give_back(self._transport.loop.time())

    def _abort_message(self, link: Outgoing, peer: Peer) -> None:
        if not link.closed:
            frame = abort(peer.number)
            self._transport.traffic.bytes_sent += len(frame)
            link.write(frame)

    def _refuse(self, sending: TcpSending) -> None:
        """Fail the node, because it modified a message after sending it."""
        self._transport.failed(
            GossamerError(
                f"a vector of a message to node {sending.to} was modified in place after it was"
                " sent; vectors in messages are immutable: compute a new vector"
            )
        )
        sending.state = State.QUEUED  # the peer did not receive the part that had left earlier
        self.cancel(sending)

    def _use_number(self, link: Outgoing, peer: Peer, sending: TcpSending) -> None:
        if sending.round > peer.first[0]:
            peer.first = sending.round, peer.number
        for snapshot in self._snapshots:
            if snapshot.counts.get(peer.rank, 0) is None and sending.round >= snapshot.rounds:
                snapshot.counts[peer.rank] = peer.number
        peer.number += 1
        peer.unacknowledged.append((link.written, sending))

    # --- messages that are cancelled, lost or sent again

    def cancel(self, sending: TcpSending) -> bool:
        """Cancel a message. Returns whether it will not be received."""
        if sending.over or sending.state is State.RESEND:
            return sending.state in (State.CANCELLED, State.LOST)
        sending.state = State.CANCELLED
        self._transport.traffic.messages_cancelled += 1
        self._queue.pop(sending, None)
        sending.release()
        self._transport.wake()
        return True

    def _give_up(self, sending: TcpSending) -> None:
        if sending.state is State.RESEND:
            sending.state = State.SENT
        elif not sending.over:
            sending.state = State.LOST
            self._transport.traffic.messages_unsent += 1
        sending.release()

    def drop(self, peer: Peer) -> None:
        """Drop all messages for a peer."""
        if self._current is not None and self._current.to == peer.rank:
            self._give_up(self._current)
        self.forget(peer)

    def forget(self, peer: Peer, state: State | None = None) -> None:
        """Drop the queued messages for a peer (all, or in one state), and release the unacknowledged ones."""
        for sending in [s for s in self._queue if s.to == peer.rank and state in (None, s.state)]:
            del self._queue[sending]
            self._give_up(sending)
        peer.forget()

    def requeue_current(self, peer: Peer) -> None:
        """A peer is no longer connected: put the message that was being sent to it back into the queue."""
        if (current := self._current) is not None and current.to == peer.rank and not current.over:
            self._put_first(current)

    def resume(self, peer: Peer, expected: int) -> None:
        """A peer is connected again: send message ``expected``, and later ones that had left, again."""
        for sending in reversed(peer.resume(expected)):
            self._put_first(sending)

    def _put_first(self, sending: TcpSending) -> None:
        self._queue[sending] = None
        self._queue.move_to_end(sending, last=False)

    # --- snapshots

    def add_snapshot(self, rounds: int, report: Callable[[dict[int, int]], None]) -> None:
        """This node was saved at the end of this many rounds; see :meth:`Transport.add_snapshot`."""
        counts: dict[int, int | None] = {}
        for peer in self._transport.peers.values():
            if peer.used and peer.lost is None:
                since, number = peer.first
                counts[peer.rank] = number if since >= rounds else None
        self._snapshots.append(PendingSnapshot(rounds, counts, report))
        self.report_snapshots()

    def report_snapshots(self) -> None:
        """Report the snapshots whose earlier messages have all left."""
        peers = self._transport.peers
        for snapshot in list(self._snapshots):
            reached = {rank: number for rank, number in snapshot.counts.items() if peers[rank].lost is None}
            if not any(s.round < snapshot.rounds and s.to in reached for s in self._pending()):
                self._snapshots.remove(snapshot)
                numbers = {rank: peers[rank].number if n is None else n for rank, n in reached.items()}
                snapshot.report(numbers)
