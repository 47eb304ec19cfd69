"""The messages of one node on their way out: one task sends them, one after the other, as a node has one uplink."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from gossamer.errors import GossamerError
from gossamer.messages import framed_bytes
from gossamer.messages.tags import WINDOW, Traffic
from gossamer.runtime.processes.transport.contact import Contact, Contacts, Unacknowledged
from gossamer.runtime.processes.transport.endpoint import Endpoint
from gossamer.runtime.processes.transport.link import Outward
from gossamer.runtime.processes.transport.marks import Marks
from gossamer.runtime.processes.transport.metering import CATCH_UP_S, LATE_S
from gossamer.runtime.processes.transport.sending import OwnSending, State
from gossamer.runtime.processes.transport.shaper import Departure, Shaper
from gossamer.runtime.processes.transport.wire import NUMBERS, abort, chunks


class Outbox:
    """What one node has to send.

    Args:
        end: this node's end of all connections.
        contacts: the peers.
        marks: told what is the next to leave.
        now: this node's clock in seconds.
        failed: called with what the node did wrong (it modified what it had sent).
        watch: see :class:`~gossamer.runtime.processes.transport.transport.Transport`.

    Attributes:
        lost_on_the_way: messages that were sent, and that the network lost.
    """

    def __init__(
        self,
        end: Endpoint,
        contacts: Contacts,
        marks: Marks,
        *,
        now: Callable[[], float],
        failed: Callable[[Exception], None],
        watch: Callable[[int, float, float, int], None] | None,
    ) -> None:
        self._end, self._contacts, self._marks = end, contacts, marks
        self._now, self._failed, self._watch = now, failed, watch
        self.lost_on_the_way = 0
        self._queue: OrderedDict[OwnSending, None] = OrderedDict()
        self._current: OwnSending | None = None
        self._sent_before = 0  # bytes, when it began to leave

    @property
    def first(self) -> OwnSending | None:
        """The message that is leaving, or is the next to leave."""
        return self._current or next(iter(self._queue), None)

    @property
    def busy(self) -> bool:
        """Whether a message is still to be sent."""
        return self.first is not None or any(contact.waiting for contact in self._contacts.values())

    def put(self, sending: OwnSending) -> bool:
        """Queue a message; whether it is on its way, and not lost with its receiver."""
        if self._contacts[sending.to].lost is not None:
            self._give_up(sending)
            return False
        self._queue[sending] = None
        return True

    def saved_traffic(self) -> Traffic:
        """The counters, as if all that was sent had left."""
        waiting = [sending for contact in self._contacts.values() for sending in contact.waiting]
        current = [] if self._current is None or self._current.over else [self._current]
        new = [each for each in (*self._queue, *waiting, *current) if each.state is not State.AGAIN]
        traffic = self._end.traffic
        gone = traffic.bytes_sent - self._sent_before if current else 0
        return replace(
            traffic,
            messages_sent=traffic.messages_sent + len(new),
            bytes_sent=traffic.bytes_sent + sum(framed_bytes(each.nbytes) for each in new) - gone,
        )

    def close(self) -> None:
        """Send nothing any more."""
        if self._current is not None:
            self._queue[self._current] = None
            self._current = None
        for sending in self._queue:
            if not sending.over:
                self._give_up(sending)
            sending.release()
        self._queue.clear()
        for contact in self._contacts.values():
            self.forget(contact)

    async def send_all(self, want: Callable[[Contact], None]) -> None:
        """Send what is queued, without end.

        Args:
            want: called with a peer that there is a message for, and that isn't connected.
        """
        while True:
            self._marks.tell(self.first)
            while not self._queue:
                await self._end.changed()
                self._marks.tell(self.first)
            sending, _ = self._queue.popitem(last=False)
            contact = self._contacts[sending.to]
            if contact.down:
                contact.waiting[sending] = None
                continue
            self._current = sending
            if contact.outgoing is None:
                want(contact)
            await self._transmit(sending, contact)
            self._current = None
            if not sending.over:
                place = contact.waiting if contact.down else self._queue
                place[sending] = None
                place.move_to_end(sending, last=False)
            elif self._end.shaper is None or sending.state is not State.SENT:
                sending.accept()
            self._end.wake()

    async def _transmit(self, sending: OwnSending, contact: Contact) -> None:
        """Send a message; if its connection breaks on the way, it isn't over yet."""
        again = sending.state is State.AGAIN
        if not again:
            sending.state = State.LEAVING
        link = await self._connect(sending, contact)
        if sending.over or link is None:
            return
        departure = None if self._end.shaper is None else self._end.shaper.depart(sending.to)
        lost = departure is not None and departure.lost
        if lost:
            link = None
        if departure is not None:
            self._expect_acceptance(sending, departure, link)
        number, begun = contact.number, False
        free_at = max(sending.queued_at, self._end.loop.time() - LATE_S)
        start_s, sent_before = self._now(), self._end.traffic.bytes_sent
        self._sent_before = sent_before
        for chunk in chunks(number, sending.head, sending.buffers):
            while not (sending.over or link is None or link.closed or link.room(chunk.nbytes)):
                await self._end.changed()
                free_at = self._end.loop.time() - CATCH_UP_S
            if self._end.shaper is not None:
                await self._pass_uplink(self._end.shaper, sending, len(chunk.frame), free_at)
                free_at = -math.inf
                if link is not None and not self._end.shaper.reaches(sending.to):
                    if begun:
                        self._call_off(link, contact)
                    link, lost = None, True
            if sending.over or (link is not None and link.closed):
                break
            if not sending.unchanged():
                self._failed(
                    GossamerError(
                        f"a vector of a message to node {sending.to} was modified in place after it was sent; what is in"
                        " a message is immutable: compute a new vector"
                    )
                )
                if again:
                    sending.state = State.QUEUED  # what had left of it, the peer has not got
                self.cancel(sending)
                break
            self._write(link, chunk.frame)
            if link is not None:
                begun = True
                link.written += chunk.nbytes
                link.unacknowledged += chunk.nbytes
        else:
            # From here on the receiver will see it: it can't be taken back any more.
            sending.state = State.SENT
            self._end.traffic.messages_sent += not again
            if lost:
                self._end.traffic.messages_lost += 1
                self.lost_on_the_way += 1
                sending.release()
            if link is not None:
                self._use_number(link, contact, sending)
        if self._watch is not None and (sent := self._end.traffic.bytes_sent - sent_before):
            self._watch(sending.to, start_s, self._now(), sent)
        if link is not None:
            if begun and sending.state is State.CANCELLED:
                self._call_off(link, contact)
            while not (link.writable or link.closed):
                await self._end.changed()

    async def _connect(self, sending: OwnSending, contact: Contact) -> Outward | None:
        """The connection to a message's receiver; None if there is none yet, or the message needs none any more."""
        while not (sending.over or contact.down or contact.outgoing is not None):
            await self._end.changed()
        return contact.outgoing

    async def _pass_uplink(self, shaper: Shaper, sending: OwnSending, nbytes: int, since: float) -> None:
        """Wait until some bytes of a message have passed the uplink, or needn't any more."""
        shaper.uplink.take(nbytes, since)
        while not sending.over and (wait := shaper.uplink.free - self._end.loop.time()) > 0:
            timer = self._end.loop.call_later(wait, self._end.wake)
            await self._end.changed()
            timer.cancel()
        if sending.over:
            shaper.uplink.give_back(self._end.loop.time())

    def _expect_acceptance(self, sending: OwnSending, departure: Departure, link: Outward | None) -> None:
        """A message that begins to leave is accepted when all but a window of it is acknowledged, a round trip later."""
        beyond = sending.nbytes - WINDOW
        if beyond <= 0:
            sending.accept()
        elif link is not None:
            link.accept_after(beyond, departure.round_trip_s, sending)

    def _call_off(self, link: Outward, contact: Contact) -> None:
        """Have the receiver discard what it has of the message that was begun."""
        if not link.closed:
            self._write(link, abort(contact.number))
            self._use_number(link, contact, None)

    def _use_number(self, link: Outward, contact: Contact, sending: OwnSending | None) -> None:
        if sending is not None and sending.round > contact.first[0]:
            contact.first = sending.round, contact.number
        contact.number = (contact.number + 1) % NUMBERS
        contact.unacknowledged.append(Unacknowledged(link.written, sending))

    def _write(self, link: Outward | None, frame: bytes) -> None:
        self._end.traffic.bytes_sent += len(frame)
        if link is not None:
            link.write(frame)

    def cancel(self, sending: OwnSending) -> bool:
        """Take a message back; gives whether it won't be received."""
        if sending.over or sending.state is State.AGAIN:
            return sending.state in (State.CANCELLED, State.LOST)
        sending.state = State.CANCELLED
        self._end.traffic.messages_cancelled += 1
        self._queue.pop(sending, None)
        self._contacts[sending.to].waiting.pop(sending, None)
        sending.release()
        self._end.wake()
        return True

    def _give_up(self, sending: OwnSending) -> None:
        if sending.state is State.AGAIN:
            sending.state = State.SENT
        else:
            sending.state = State.LOST
            self._end.traffic.messages_lost += 1
        sending.release()

    def drop(self, contact: Contact) -> None:
        """Let go of all messages for a peer."""
        for sending in [sending for sending in self._queue if sending.to == contact.rank]:
            del self._queue[sending]
            self._give_up(sending)
        if self._current is not None and self._current.to == contact.rank and not self._current.over:
            self._give_up(self._current)
        self.forget(contact)

    def forget(self, contact: Contact, state: State | None = None) -> None:
        """Let go of the messages that wait for a peer (in one state), and of those that it hasn't acknowledged."""
        for sending in [each for each in contact.waiting if state is None or each.state is state]:
            del contact.waiting[sending]
            self._give_up(sending)
        contact.forget()

    def resume(self, contact: Contact) -> None:
        """A peer is connected: what waited for it goes first."""
        for sending in reversed(contact.waiting):
            self._queue[sending] = None
            self._queue.move_to_end(sending, last=False)
        contact.waiting.clear()
        self._end.wake()
