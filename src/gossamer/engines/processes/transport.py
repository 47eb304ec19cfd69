"""Messages between processes: asyncio TCP, one connection a pair and direction, under the receiver's credit.

A node dials each peer when it first has a message for it, and sends on that connection only; the peer's
credit comes back on it, and the peer's own messages come on a connection that the peer dials. So two nodes
that dial each other at once need no tie-break, and a connection's reader knows which frames may come.

One task per node sends, message by message in the order of :meth:`Transport.send`, as a node has one uplink:
a message is not begun before the one ahead of it was handed to the kernel, whoever its receiver is (only what is for a
peer that can't be reached just now steps aside). At most
:data:`~gossamer.messages.WINDOW` bytes of a connection's chunks are unacknowledged; the kernel is told to
hold little that it has not put on the wire (TCP_NOTSENT_LOWAT), and asyncio's own buffer holds at most a
chunk. So what was "sent" is at the receiver or within one window of it, and a message can be taken back while
most of it is still here.

A connection that breaks is dialled again, and goes on with the message that the peer expects next; at most a window of
messages is sent again, and none arrives twice. A peer is lost when it can't be reached, or (with heartbeats) is
silent, for ``detection_s``; it is looked for from then on, and found when it answers.

Between hosts, connections are TLS (:mod:`gossamer.engines.processes.security`), and who is not in the peers file gets no
further than its handshake. With a :class:`~gossamer.engines.processes.shaping.Shaper`, chunks leave and are acknowledged as a
network of an experiment lets them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gossamer.engines.processes.connection import Connection, Incoming, Outgoing
from gossamer.engines.processes.contact import Contact, Unacknowledged
from gossamer.engines.processes.guard import Guard
from gossamer.engines.processes.peering import Peering, Watch
from gossamer.engines.processes.security import Security
from gossamer.engines.processes.sending import OwnSending, State
from gossamer.engines.processes.shaping import CATCH_UP_S, LATE_S, Departure, Shaper
from gossamer.engines.processes.wire import NUMBERS, TOKEN_BYTES, abort, chunks, mark
from gossamer.errors import BadInput, GossamerError
from gossamer.messages import WINDOW, Message, Payload, Sending, Tag, Traffic
from gossamer.payload import BEGIN_BYTES, CHUNK_BYTES, Encoded, encode, framed_bytes, freeze, pack_head

_RECEIVE_BYTES = 64 * 1024
_BACKLOG = 4096


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket, for :class:`Transport` to accept from; port 0 lets the system choose one.

    Its small receive buffer is inherited by what it accepts, from the first connection on: also by peers that
    dial before the transport has started.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class Transport:
    """One node's end of all its connections; lives in one event loop, and is called from there only.

    Args:
        rank: this node.
        listener: a listening socket (:func:`listen`); closed by :meth:`close`.
        addresses: (host, port) of every rank.
        token: 16 bytes that only this run's nodes know; who has not got them is refused.
        limit: bytes (head and buffers; chunk headers apart) of the largest message that is sent and accepted.
        deliver: called with each message, in the order in which its sender sent it.
        lost: called with a rank and why, once, when a peer can't be reached or is refused.
        event: called with a kind and a text; the kind is ``"refused"``.
        now: this node's clock in seconds, for ``Message.sent_at``.
        failed: called with what the node did wrong (it modified what it had sent).
        watch: called when a message has left, or was taken back on its way: receiver, when its first chunk and its last
            one were written (seconds of this node's clock), bytes.
        shaper: what the network does to messages; None is nothing. Closed by :meth:`close`.
        security: keys and certificates; None is for loopback only.
        insecure: do without ``security`` between hosts all the same: whoever is on the way can read and change everything.
        incarnation: how often this node was started before.
        heartbeat_s: seconds of silence on a connection after which a heartbeat is sent; None sends none.
        detection_s: seconds without a sign of life after which a peer is lost. With heartbeats, one that stands still is
            noticed within ``detection_s + heartbeat_s / 2`` seconds; without, only one that can't be dialled.
        found: called with a rank when a lost peer is there again, or one was started anew.
        status: what heartbeats say, at most 4 KiB. A new status is said within half of ``heartbeat_s``.
        heard: called with a rank and its status when a heartbeat comes in.
        marked: called with a rank, the number of a cut and that of a message when all messages before that one, which the
            peer had sent before the cut, are delivered.
        told: called with the number of a cut and some ranks when all that was sent before it has left, and these peers,
            to whom anything was sent, were told of it.
        relinked: called with a rank when a connection to it broke and was made again: what it was told of cuts may be lost.

    Raises:
        ValueError: for a token of another length, or a rank without address.
        BadInput: for an address that is not loopback without ``security``.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        addresses: Sequence[tuple[str, int]],
        token: bytes,
        *,
        limit: int,
        deliver: Callable[[Message], None],
        lost: Callable[[int, str], None],
        event: Callable[[str, str], None],
        now: Callable[[], float],
        failed: Callable[[Exception], None],
        watch: Callable[[int, float, float, int], None] | None = None,
        shaper: Shaper | None = None,
        security: Security | None = None,
        insecure: bool = False,
        incarnation: int = 0,
        heartbeat_s: float | None = None,
        detection_s: float = 10.0,
        found: Callable[[int], None] | None = None,
        status: Callable[[], bytes] | None = None,
        heard: Callable[[int, bytes], None] | None = None,
        marked: Callable[[int, int, int], None] | None = None,
        told: Callable[[int, list[int]], None] | None = None,
        relinked: Callable[[int], None] | None = None,
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"token: {len(token)} bytes; accepted: {TOKEN_BYTES}")
        if not 0 <= rank < len(addresses):
            raise ValueError(f"rank: {rank}; accepted: 0 to {len(addresses) - 1}, one address each")
        if security is None and not insecure:
            _check_loopback([listener.getsockname(), *addresses])
        self.rank = rank
        self.size = len(addresses)
        self.limit = limit
        self.incarnation = incarnation
        self.traffic = Traffic()
        self.lost_on_the_way = 0
        """Messages that were sent, and that the network lost."""
        self.rounds = 0
        """Rounds that this node has ended: what is sent belongs to the one that is on."""
        self._listener = listener
        self._addresses = addresses
        self._token = token
        self._deliver, self._now = deliver, now
        self._failed, self._watch = failed, watch
        self._shaper, self._security = shaper, security
        self._heartbeat_s = heartbeat_s
        self._marked, self._told, self._relinked = marked, told, relinked
        self._telling: dict[
            int, list[int]
        ] = {}  # cuts of which some peer isn't told yet, with all whom they concern
        self._loop = asyncio.get_running_loop()
        hosts = [host for host, *_ in addresses]
        self._guard = Guard(hosts, lambda line: event("refused", line), self._loop.time)
        self._server: asyncio.Server | None = None
        self._queue: OrderedDict[OwnSending, None] = OrderedDict()
        self._current: OwnSending | None = None
        self._sent_before = 0  # bytes, when it began to leave
        self._connections: set[Connection] = set()
        self._peering = Peering(self, Watch(heartbeat_s, detection_s, lost, found, status, heard))
        self._contacts = self._peering.contacts
        self._tasks: set[asyncio.Task[None]] = set()
        # What is shaped is read chunk by chunk.
        self._received = memoryview(
            bytearray(_RECEIVE_BYTES if shaper is None else BEGIN_BYTES + CHUNK_BYTES)
        )
        self._opened = memoryview(bytearray(0 if security is None else len(self._received)))
        self._closing = False
        # Set whenever something changed that the sender, flush() or close() may wait for.
        self._wake = asyncio.Event()
        if shaper is not None:
            shaper.changed = self._wake.set

    async def start(self) -> None:
        """Accept connections, and begin to send."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self._server = await self._loop.create_server(
            lambda: Incoming(self), sock=self._listener, backlog=_BACKLOG
        )
        self._spawn(self._send_all())
        if self._guard.names:
            self._spawn(self._locate_hosts())
        if self._heartbeat_s is not None:
            self._spawn(self._peering.watch(self._heartbeat_s / 2))

    async def _locate_hosts(self) -> None:
        """Find out once from which addresses the hosts come that go by a name, one after the other in the background."""
        for name in sorted(self._guard.names):
            with suppress(OSError, ValueError):  # who is not known by now has the places that everybody has
                found = await self._loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                self._guard.locate(name, {str(address[0]) for *_, address in found})

    @property
    def connected(self) -> frozenset[int]:
        """The peers that are connected, in one direction or the other."""
        return frozenset(rank for rank, contact in self._contacts.items() if contact.connected)

    def incarnation_of(self, rank: int) -> int | None:
        """How often a peer was started before, as far as it has said so."""
        return self._peering.contact(rank).incarnation

    def keep(self, ranks: Iterable[int]) -> None:
        """Be connected with these peers, whether there are messages for them or not; calling it again replaces them."""
        self._peering.keep(ranks)

    def beat(self) -> None:
        """Send heartbeats at once, to whom the newest status was not sent yet."""
        self._peering.beat()

    def send(self, to: int, payload: Payload | Encoded, tag: Tag) -> Sending:
        """Queue a message; what becomes of the payload afterwards makes no difference to it.

        Args:
            to: the receiver's rank.
            payload: what is sent. An :class:`~gossamer.payload.Encoded` is not copied and must not change: a
                broadcast encodes once, and an immutable snapshot need not be copied at all.
            tag: what it is about.

        Raises:
            TypeError: for a payload or tag that can't travel.
            ValueError: for a rank that can't be sent to, and a message larger than the limit.
            RuntimeError: when closed.
        """
        if self._closing:
            raise RuntimeError("the transport is closed")
        if not 0 <= to < len(self._addresses) or to == self.rank:
            raise ValueError(
                f"to: rank {to}; accepted: 0 to {len(self._addresses) - 1}, this node ({self.rank}) apart"
            )
        encoded = payload if isinstance(payload, Encoded) else encode(freeze(payload, lambda tensor: False))
        head = pack_head(tag, self._now(), encoded.structure)
        sending = OwnSending(self, to, head, encoded)
        if sending.nbytes > self.limit:
            raise ValueError(
                f"a message of {sending.nbytes} bytes to rank {to}; the limit is {self.limit} bytes"
            )
        contact = self._peering.contact(to)
        if contact.lost is not None:
            self._give_up(sending)
        else:
            self._queue[sending] = None
            self._peering.want(contact)
            self._wake.set()
        return sending

    def cut(self, number: int) -> None:
        """Tell every peer to whom anything was sent which messages were sent before the end of the last round, as soon as
        these have left; see ``told``."""
        concerned = [contact for contact in self._contacts.values() if contact.used and contact.lost is None]
        for contact in concerned:
            contact.marks.append((number, self.rounds))
        self._telling[number] = [contact.rank for contact in concerned]
        self._tell_marks()

    def saved_traffic(self) -> Traffic:
        """The counters, as if all that was sent had left."""
        waiting = [sending for contact in self._contacts.values() for sending in contact.waiting]
        current = [] if self._current is None or self._current.over else [self._current]
        new = [each for each in (*self._queue, *waiting, *current) if each.state is not State.AGAIN]
        gone = self.traffic.bytes_sent - self._sent_before if current else 0
        return replace(
            self.traffic,
            messages_sent=self.traffic.messages_sent + len(new),
            bytes_sent=self.traffic.bytes_sent + sum(framed_bytes(each.nbytes) for each in new) - gone,
        )

    def mark_lost(self, rank: int, why: str, incarnation: int | None = None) -> None:
        """Take a peer for dead: what is queued for it and sent to it later counts as lost and does not wait.

        Its connections are closed; ``lost`` is not called. It is found again when it answers, or :meth:`mark_found`.

        Args:
            rank: the peer.
            why: the cause.
            incarnation: which of its lives is known to be over: it isn't listened to any more, and not looked for.
        """
        self._peering.mark_lost(self._peering.contact(rank), why, incarnation)

    def mark_found(self, rank: int) -> None:
        """Take a lost peer for alive again: the next message to it dials it."""
        self._peering.mark_found(self._peering.contact(rank))

    def refuse(self, rank: int, reason: str) -> None:
        """Have no more to do with this life of a peer, which said what no peer says; it is lost, and the reason an event."""
        self._peering.refuse(self._peering.contact(rank), reason)

    @property
    def busy(self) -> bool:
        """Whether a message is still to be sent."""
        return (
            bool(self._queue)
            or self._current is not None
            or any(contact.waiting for contact in self._contacts.values())
        )

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message was handed over and acknowledged, was cancelled, or is lost.

        Raises:
            TimeoutError: after so many seconds.
        """
        async with asyncio.timeout(timeout):
            while self.busy or not all(contact.settled for contact in self._contacts.values()):
                await self._changed()

    async def close(self) -> None:
        """Close everything at once and wait until it is closed; what was not :meth:`flush` ed may be lost."""
        self._closing = True
        if self._shaper is not None:
            self._shaper.close()
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()
        for connection in self._connections:
            connection.say_goodbye()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        while self._connections:
            await self._changed()
        if self._server is not None:
            await self._server.wait_closed()
        if self._current is not None:
            self._queue[self._current] = None
            self._current = None
        for sending in self._queue:
            if not sending.over:
                self._give_up(sending)
            sending.release()
        self._queue.clear()
        for contact in self._contacts.values():
            contact.reached()
            self._forget(contact)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _changed(self) -> None:
        """Wait until something changed; the caller checks its condition right before and right after."""
        self._wake.clear()
        await self._wake.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_all(self) -> None:
        while True:
            self._tell_marks()
            while not self._queue:
                await self._changed()
                self._tell_marks()
            sending, _ = self._queue.popitem(last=False)
            contact = self._peering.contact(sending.to)
            if contact.down:
                contact.waiting[sending] = None
                continue
            self._current = sending
            await self._transmit(sending, contact)
            self._current = None
            if not sending.over:
                place = contact.waiting if contact.down else self._queue
                place[sending] = None
                place.move_to_end(sending, last=False)
            elif self._shaper is None or sending.state is not State.SENT:
                sending.accept()
            self._wake.set()

    async def _transmit(self, sending: OwnSending, contact: Contact) -> None:
        """Send a message; if its connection breaks on the way, it isn't over yet."""
        again = sending.state is State.AGAIN
        if not again:
            sending.state = State.LEAVING
        link = await self._connect(sending, contact)
        if sending.over or link is None:
            return
        departure = None if self._shaper is None else self._shaper.depart(sending.to)
        lost = departure is not None and departure.lost
        if lost:
            link = None
        if departure is not None:
            self._expect_acceptance(sending, departure, link)
        number, begun = contact.number, False
        free_at = max(sending.queued_at, self._loop.time() - LATE_S)
        start_s, sent_before = self._now(), self.traffic.bytes_sent
        self._sent_before = sent_before
        for chunk in chunks(number, sending.head, sending.buffers):
            while not (sending.over or link is None or link.closed or link.room(chunk.nbytes)):
                await self._changed()
                free_at = self._loop.time() - CATCH_UP_S
            if self._shaper is not None:
                await self._pass_uplink(self._shaper, sending, len(chunk.frame), free_at)
                free_at = -math.inf
                if link is not None and not self._shaper.reaches(sending.to):
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
                self._cancel(sending)
                break
            self._write(link, chunk.frame)
            if link is not None:
                begun = True
                link.written += chunk.nbytes
                link.unacknowledged += chunk.nbytes
        else:
            # From here on the receiver will see it: it can't be taken back any more.
            sending.state = State.SENT
            self.traffic.messages_sent += not again
            if lost:
                self.traffic.messages_lost += 1
                self.lost_on_the_way += 1
                sending.release()
            if link is not None:
                self._use_number(link, contact, sending)
        if self._watch is not None and (sent := self.traffic.bytes_sent - sent_before):
            self._watch(sending.to, start_s, self._now(), sent)
        if link is not None:
            if begun and sending.state is State.CANCELLED:
                self._call_off(link, contact)
            while not (link.writable or link.closed):
                await self._changed()

    async def _connect(self, sending: OwnSending, contact: Contact) -> Outgoing | None:
        """The connection to a message's receiver; None if there is none yet, or the message needs none any more."""
        if contact.outgoing is None:
            self._peering.want(contact)
        while not (sending.over or contact.down or contact.outgoing is not None):
            await self._changed()
        return contact.outgoing

    async def _pass_uplink(self, shaper: Shaper, sending: OwnSending, nbytes: int, since: float) -> None:
        """Wait until some bytes of a message have passed the uplink, or needn't any more."""
        shaper.uplink.take(nbytes, since)
        while not sending.over and (wait := shaper.uplink.free - self._loop.time()) > 0:
            timer = self._loop.call_later(wait, self._wake.set)
            await self._changed()
            timer.cancel()
        if sending.over:
            shaper.uplink.give_back(self._loop.time())

    def _expect_acceptance(self, sending: OwnSending, departure: Departure, link: Outgoing | None) -> None:
        """A message that begins to leave is accepted when all but a window of it is acknowledged, a round trip later."""
        beyond = sending.nbytes - WINDOW
        if beyond <= 0:
            sending.accept()
        elif link is not None:
            link.accept_after(beyond, departure.round_trip_s, sending)

    def _call_off(self, link: Outgoing, contact: Contact) -> None:
        """Have the receiver discard what it has of the message that was begun."""
        if not link.closed:
            self._write(link, abort(contact.number))
            self._use_number(link, contact, None)

    def _use_number(self, link: Outgoing, contact: Contact, sending: OwnSending | None) -> None:
        if sending is not None and sending.round > contact.first[0]:
            contact.first = sending.round, contact.number
        contact.number = (contact.number + 1) % NUMBERS
        contact.unacknowledged.append(Unacknowledged(link.written, sending))

    def _write(self, link: Outgoing | None, frame: bytes) -> None:
        self.traffic.bytes_sent += len(frame)
        if link is not None:
            link.write(frame)

    def _cancel(self, sending: OwnSending) -> bool:
        if sending.over or sending.state is State.AGAIN:
            return sending.state in (State.CANCELLED, State.LOST)
        sending.state = State.CANCELLED
        self.traffic.messages_cancelled += 1
        self._queue.pop(sending, None)
        self._peering.contact(sending.to).waiting.pop(sending, None)
        sending.release()
        self._wake.set()
        return True

    def _arrived(self, contact: Contact, message: Message) -> None:
        self.traffic.messages_received += 1
        self._deliver(message)
        contact.delivered += 1
        self._pass_marks(contact)

    # --- cuts

    def _tell_marks(self) -> None:
        """Tell peers of cuts before which nothing is left to send."""
        if not self._telling:
            return
        first = self._current or next(iter(self._queue), None)
        for contact in self._contacts.values():
            while contact.marks and contact.lost is None:
                number, rounds = contact.marks[0]
                link = contact.outgoing
                if link is None or (first is not None and first.round < rounds):
                    break
                if any(sending.round < rounds for sending in contact.waiting):
                    break
                since, message = contact.first
                link.write(mark(number, message if since >= rounds else contact.number))
                contact.marks.pop(0)
        for number, ranks in list(self._telling.items()):
            left = {rank for rank in ranks if self._contacts[rank].lost is None}
            if not any(number == owed for rank in left for owed, _ in self._contacts[rank].marks):
                del self._telling[number]
                if self._told is not None:
                    self._told(number, sorted(left))

    def _relink(self, contact: Contact) -> None:
        if self._relinked is not None:
            self._relinked(contact.rank)

    def _pass_marks(self, contact: Contact) -> None:
        """A peer's cuts before which all that it sent is delivered."""
        while contact.marked and contact.marked[0][2] <= contact.delivered:
            number, message, _ = contact.marked.popleft()
            if self._marked is not None:
                self._marked(contact.rank, number, message)

    def _give_up(self, sending: OwnSending) -> None:
        if sending.state is State.AGAIN:
            sending.state = State.SENT
        else:
            sending.state = State.LOST
            self.traffic.messages_lost += 1
        sending.release()

    def _drop(self, contact: Contact) -> None:
        """Let go of all messages for a peer."""
        for sending in [sending for sending in self._queue if sending.to == contact.rank]:
            del self._queue[sending]
            self._give_up(sending)
        if self._current is not None and self._current.to == contact.rank and not self._current.over:
            self._give_up(self._current)
        self._forget(contact)

    def _forget(self, contact: Contact, state: State | None = None) -> None:
        """Let go of the messages that wait for a peer (in one state), and of those that it hasn't acknowledged."""
        for sending in [each for each in contact.waiting if state is None or each.state is state]:
            del contact.waiting[sending]
            self._give_up(sending)
        contact.forget()

    def _resume(self, contact: Contact) -> None:
        """A peer is connected: what waited for it goes first."""
        for sending in reversed(contact.waiting):
            self._queue[sending] = None
            self._queue.move_to_end(sending, last=False)
        contact.waiting.clear()
        self._wake.set()


def _check_loopback(addresses: Iterable[tuple[Any, ...]]) -> None:
    for host, port, *_ in addresses:
        if not _is_loopback(host):
            raise BadInput(
                f"address {host}:{port}: not loopback; accepted: with keys and a peers file, or insecure on purpose"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
