"""Messages between processes: asyncio TCP, one connection a pair and direction, under the receiver's credit.

A node dials each peer when it first has a message for it, and sends on that connection only; the peer's
credit comes back on it, and the peer's own messages come on a connection that the peer dials. So two nodes
that dial each other at once need no tie-break, and a connection's reader knows which frames may come.

One task per node sends, message by message in the order of :meth:`Transport.send`, as a node has one uplink:
a message is not begun before the one ahead of it was handed to the kernel, whoever its receiver is (only what is for a
peer that can't be reached just now steps aside). At most
:data:`~gossamer.messages.tags.WINDOW` bytes of a connection's chunks are unacknowledged; the kernel is told to
hold little that it has not put on the wire (TCP_NOTSENT_LOWAT), and asyncio's own buffer holds at most a
chunk. So what was "sent" is at the receiver or within one window of it, and a message can be taken back while
most of it is still here.

A connection that breaks is dialled again, and goes on with the message that the peer expects next; at most a window of
messages is sent again, and none arrives twice. A peer is lost when it can't be reached, or (with heartbeats) is
silent, for ``detection_s``; it is looked for from then on, and found when it answers.

Between hosts, connections are TLS (:mod:`gossamer.runtime.processes.security.trust`), and whoever has no key of the run
gets no further than the handshake. With a :class:`~gossamer.runtime.processes.transport.shaper.Shaper`, chunks leave and are
acknowledged as a network of an experiment lets them.

Of its parts each knows those before it: the endpoint (who this node is, and what its connections share), the contacts (what
it knows of each peer), marks and outbox (what it has to say to them), the two ends of a connection, and peering, which dials
peers, loses and finds them, and is what connections report to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from gossamer.errors import BadInput
from gossamer.messages import Encoded, encode, freeze, pack_head
from gossamer.messages.tags import Message, Payload, Sending, Tag, Traffic
from gossamer.runtime.processes.security.trust import Security
from gossamer.runtime.processes.transport.contact import Contacts
from gossamer.runtime.processes.transport.endpoint import RECEIVE_BYTES, Endpoint
from gossamer.runtime.processes.transport.incoming import Incoming
from gossamer.runtime.processes.transport.marks import Marks
from gossamer.runtime.processes.transport.outbox import Outbox
from gossamer.runtime.processes.transport.peering import Peering, Watch
from gossamer.runtime.processes.transport.sending import OwnSending
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.wire import TOKEN_BYTES

_BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted: all peers may dial at once."""
_AT_ONCE = 32
"""Connections that are accepted before those that were accepted earlier are looked at (and strangers among them counted)."""


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket, for :class:`Transport` to accept from; port 0 lets the system choose one.

    Its small receive buffer is inherited by what it accepts, from the first connection on: also by peers that
    dial before the transport has started.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
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
        incarnation: how often this node was started before.
        heartbeat_s: seconds of silence on a connection after which a heartbeat is sent; None sends none.
        detection_s: seconds without a sign of life after which a peer is lost. With heartbeats, one that stands still is
            noticed within ``detection_s + heartbeat_s / 2`` seconds; without, only one that can't be dialled.
        found: called with a rank when a lost peer is there again, or one was restarted.
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
        if security is None:
            _check_loopback([listener.getsockname(), *addresses])
        self._end = Endpoint(
            rank,
            list(addresses),
            token,
            incarnation=incarnation,
            limit=limit,
            deliver=deliver,
            event=event,
            shaper=shaper,
            security=security,
        )
        self._contacts = Contacts()
        self._marks = Marks(self._contacts, marked, told)
        self._outbox = Outbox(self._end, self._contacts, self._marks, now=now, failed=failed, watch=watch)
        watching = Watch(heartbeat_s, detection_s, lost, found, status, heard, relinked)
        self._peering = Peering(self._end, self._contacts, self._outbox, watching)
        self._listener = listener
        self._now = now
        self._heartbeat_s = heartbeat_s
        self._server: asyncio.Server | None = None
        self.rounds = 0
        """Rounds that this node has ended: what is sent belongs to the one that is on."""

    async def start(self) -> None:
        """Accept connections, and begin to send."""
        end = self._end
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._server = await end.loop.create_server(
            lambda: Incoming(end, self._peering, self._marks), sock=self._listener, backlog=_AT_ONCE
        )
        self._listener.listen(_BACKLOG)  # asyncio knows one number for both
        end.spawn(self._outbox.send_all(self._peering.want))
        if end.guard.names:
            end.spawn(self._locate_hosts())
        if self._heartbeat_s is not None:
            end.spawn(self._peering.watch(self._heartbeat_s / 2))

    async def _locate_hosts(self) -> None:
        """Find out once from which addresses the hosts come that go by a name, one after the other in the background."""
        guard = self._end.guard
        for name in sorted(guard.names):
            with suppress(OSError, ValueError):  # who is not known by now has the places that everybody has
                found = await self._end.loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                guard.locate(name, {str(address[0]) for *_, address in found})

    @property
    def traffic(self) -> Traffic:
        """What this node has sent and received by now; assigned to, its counters go on from there."""
        return self._end.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._end.traffic = traffic

    @property
    def lost_on_the_way(self) -> int:
        """Messages that were sent, and that the network lost."""
        return self._outbox.lost_on_the_way

    @property
    def connected(self) -> frozenset[int]:
        """The peers that are connected, in one direction or the other."""
        return frozenset(rank for rank, contact in self._contacts.items() if contact.connected)

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
            payload: what is sent. An :class:`~gossamer.messages.Encoded` is not copied and must not change: a
                broadcast encodes once, and an immutable snapshot need not be copied at all.
            tag: what it is about.

        Raises:
            TypeError: for a payload or tag that can't travel.
            ValueError: for a rank that can't be sent to, and a message larger than the limit.
            RuntimeError: when closed.
        """
        end = self._end
        if end.closing:
            raise RuntimeError("the transport is closed")
        if not 0 <= to < end.size or to == end.rank:
            raise ValueError(f"to: rank {to}; accepted: 0 to {end.size - 1}, this node ({end.rank}) apart")
        encoded = payload if isinstance(payload, Encoded) else encode(freeze(payload, lambda tensor: False))
        head = pack_head(tag, self._now(), encoded.structure)
        sending = OwnSending(to, head, encoded, self.rounds, self._outbox.cancel)
        if sending.nbytes > end.limit:
            raise ValueError(
                f"a message of {sending.nbytes} bytes to rank {to}; the limit is {end.limit} bytes"
            )
        if self._outbox.put(sending):
            self._peering.want(self._contacts[to])
            end.wake()
        return sending

    def cut(self, number: int) -> None:
        """Tell every peer to whom anything was sent which messages were sent before the end of the last round, as soon as
        these have left; see ``told``."""
        self._marks.cut(number, self.rounds)
        self._marks.tell(self._outbox.first)

    def saved_traffic(self) -> Traffic:
        """The counters, as if all that was sent had left."""
        return self._outbox.saved_traffic()

    def mark_lost(self, rank: int, why: str, incarnation: int | None = None) -> None:
        """Take a peer for dead: what is queued for it and sent to it later counts as lost and does not wait.

        Its connections are closed; ``lost`` is not called. It is found again when it answers, or :meth:`mark_found`.

        Args:
            rank: the peer.
            why: the cause.
            incarnation: which of its lives is known to be over: it isn't listened to any more, and not looked for.
        """
        self._peering.mark_lost(self._contacts[rank], why, incarnation)

    def move(self, rank: int, address: tuple[str, int]) -> None:
        """A peer's next process listens at another address."""
        self._end.addresses[rank] = address

    def mark_found(self, rank: int) -> None:
        """Take a lost peer for alive again: the next message to it dials it."""
        self._peering.mark_found(self._contacts[rank])

    def refuse(self, rank: int, reason: str) -> None:
        """Have no more to do with this life of a peer, which said what no peer says; it is lost, and the reason an event."""
        self._peering.refuse(self._contacts[rank], reason)

    @property
    def busy(self) -> bool:
        """Whether a message is still to be sent."""
        return self._outbox.busy

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message was handed over and acknowledged, was cancelled, or is lost.

        Raises:
            TimeoutError: after so many seconds.
        """
        async with asyncio.timeout(timeout):
            while self.busy or not all(contact.settled for contact in self._contacts.values()):
                await self._end.changed()

    async def close(self) -> None:
        """Close everything at once and wait until it is closed; what was not :meth:`flush` ed may be lost."""
        end = self._end
        end.closing = True
        if end.shaper is not None:
            end.shaper.close()
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()
        for connection in end.connections:
            connection.say_goodbye()
        tasks = list(end.tasks)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(end.connections):
            connection.close()
        while end.connections:
            await end.changed()
        if self._server is not None:
            await self._server.wait_closed()
        end.guard.close()
        self._outbox.close()
        for contact in self._contacts.values():
            contact.reached()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome


def _check_loopback(addresses: Iterable[tuple[Any, ...]]) -> None:
    for host, port, *_ in addresses:
        if not _is_loopback(host):
            raise BadInput(f"address {host}:{port}: not loopback; accepted: with keys")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
