"""Messages between nodes: asyncio TCP, one connection a pair and direction, under the receiver's credit.

A node dials each peer when it first has a message for it, and sends on that connection only; the peer's
credit comes back on it, and the peer's own messages come on a connection that the peer dials. So two nodes
that dial each other at once need no tie-break, and a connection's reader knows which frames may come.

One task per node sends, message by message in the order of :meth:`Transport.send`, as a node has one uplink:
a message is not begun before the one ahead of it was handed to the kernel, whatever its receiver is (only messages for a
peer that is not connected wait separately). At most
:data:`~gossamer.messages.tags.WINDOW` bytes of a connection's chunks are unacknowledged; the kernel is told to
hold little that it has not put on the wire (TCP_NOTSENT_LOWAT), and asyncio's own buffer holds at most a
chunk. So what was "sent" is at the receiver or within one window of it, and a message can be taken back while
most of it is still here.

A connection that breaks is dialled again, and continues with the message that the peer expects next; at most a window of
messages is sent again, and none arrives twice. A peer is lost when it can't be reached, or (with heartbeats) is
silent, for ``detection_s``; it is dialled from then on, and found when it answers.

Between hosts, connections use TLS (:mod:`gossamer.runtime.processes.security.trust`), and a stranger without a key of the run
gets no further than the handshake. With a :class:`~gossamer.runtime.processes.transport.shaper.Shaper`, chunks leave and are
acknowledged as the network of the experiment lets them.

The files, each of which knows those before it: ``wire`` (frames), ``shaper`` (the network of the experiment), ``peer`` (what
connections share, and the state of one peer), ``outbox`` (sending), ``connection`` (both ends of one), ``peering`` (dialling,
losing and finding peers), and this one, the interface to a node's process.
"""

from __future__ import annotations

import asyncio
import socket

from gossamer.messages import Encoded, encode, freeze, pack_head
from gossamer.messages.tags import Payload, Sending, Tag, Traffic
from gossamer.runtime.processes.transport.connection import Incoming
from gossamer.runtime.processes.transport.outbox import Outbox, OwnSending
from gossamer.runtime.processes.transport.peer import RECEIVE_BYTES, Endpoint
from gossamer.runtime.processes.transport.peering import Peering

_BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted: all peers may dial at once."""
AT_ONCE = 32
"""Connections that are accepted before those accepted earlier are looked at (and strangers among them counted)."""


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket for :class:`Transport`; port 0 lets the system choose one.

    Accepted connections inherit its small receive buffer, also those of peers that dial before the transport has started.
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
    """One node's messages to its peers; belongs to one event loop, and is called from there only.

    Args:
        listener: a listening socket (:func:`listen`); closed by :meth:`close`.
        end: the node, its settings, and the functions to call.

    Attributes:
        rounds: rounds that this node has ended: what is sent belongs to the next one.
    """

    def __init__(self, listener: socket.socket, end: Endpoint) -> None:
        end.check_host(*listener.getsockname()[:2])
        self._end, self._listener = end, listener
        self._outbox = Outbox(end)
        self._peering = Peering(end, self._outbox)
        self._server: asyncio.Server | None = None
        self.rounds = 0

    async def start(self) -> None:
        """Accept connections, and begin to send."""
        end = self._end
        self._server = await end.loop.create_server(
            lambda: Incoming(self._peering), sock=self._listener, backlog=AT_ONCE
        )
        self._listener.listen(_BACKLOG)  # asyncio knows one number for both
        end.spawn(self._outbox.send_all())
        if end.heartbeat_s is not None:
            end.spawn(self._peering.watch(end.heartbeat_s / 2))

    @property
    def traffic(self) -> Traffic:
        """Counts what this node has sent and received by now; assigned counters continue from there."""
        return self._end.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._end.traffic = traffic

    @property
    def lost_on_the_way(self) -> int:
        """Messages that were sent, and that the network lost."""
        return self._outbox.lost_on_the_way

    def saved_traffic(self) -> Traffic:
        """The counters, as if all that was sent had left."""
        return self._outbox.saved_traffic()

    def send(self, to: int, payload: Payload | Encoded, tag: Tag) -> Sending:
        """Queue a message; later changes to the payload make no difference to it.

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
        if not 0 <= to < len(end.addresses) or to == end.rank:
            last = len(end.addresses) - 1
            raise ValueError(f"to: rank {to}; accepted: 0 to {last}, except this node ({end.rank})")
        encoded = payload if isinstance(payload, Encoded) else encode(freeze(payload, lambda tensor: False))
        head = pack_head(tag, end.now(), encoded.structure)
        sending = OwnSending(to, head, encoded, self.rounds, self._outbox.cancel)
        if sending.nbytes > end.limit:
            raise ValueError(
                f"a message of {sending.nbytes} bytes to rank {to}; the limit is {end.limit} bytes"
            )
        if self._outbox.put(sending):
            self._peering.want(end.peers[to])
        return sending

    def cut(self, number: int) -> None:
        """Tell every peer that was sent anything which messages were sent before the end of the last round, as soon as
        these have left; see :attr:`Endpoint.told`."""
        self._outbox.cut(number, self.rounds)

    def mark_lost(self, rank: int, why: str, incarnation: int | None = None) -> None:
        """Treat a peer as dead: what is queued for it and sent to it later counts as lost and does not wait.

        Its connections are closed; ``lost`` is not called. It is found again when it answers, or by :meth:`mark_found`.

        Args:
            rank: the peer.
            why: the cause.
            incarnation: the incarnation that is known to be over, which is not listened to and not dialled any more.
        """
        self._peering.mark_lost(self._end.peers[rank], why, incarnation)

    def mark_found(self, rank: int) -> None:
        """Treat a lost peer as alive again: the next message to it dials it."""
        self._peering.mark_found(self._end.peers[rank])

    def move(self, rank: int, address: tuple[str, int]) -> None:
        """A peer's next process listens at another address."""
        self._end.addresses[rank] = address

    @property
    def busy(self) -> bool:
        """Whether a message is still to be sent."""
        return self._outbox.busy

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every message was handed over and acknowledged, was cancelled, or is lost.

        Raises:
            TimeoutError: after this many seconds.
        """
        async with asyncio.timeout(timeout):
            while self.busy or not all(peer.settled for peer in self._end.peers.values()):
                await self._end.changed()

    async def close(self) -> None:
        """Close everything at once and wait until it is closed; what was not :meth:`flush` ed may be lost."""
        end = self._end
        end.closing = True
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
        for peer in end.peers.values():
            peer.reached()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
