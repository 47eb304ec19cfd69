"""Messages between nodes: asyncio TCP, one connection per pair and direction, with credit-based flow control.

A node dials a peer when it first has a message for it, and sends only on that connection. The peer's credit
comes back on it; the peer's own messages come on a connection that the peer dials. So two nodes that dial
each other at once need no tie-break, and a connection's reader knows which frames to expect.

One task per node sends the messages in the order of :meth:`Transport.send`, since a node has one uplink. At
most :data:`~gossamer.messages.tags.WINDOW` bytes of a connection's chunks are unacknowledged. The kernel
buffers few unsent bytes (TCP_NOTSENT_LOWAT), and asyncio's own buffer holds at most a chunk. So all "sent"
bytes except one window have reached the receiver, and a message can be cancelled while most of it is still here.

A broken connection is dialled again, and continues with the message that the peer expects next. At most a
window of messages is sent again, and none arrives twice. A peer is lost when it can't be reached, or (with
heartbeats) is silent, for ``detection_s``. It is still dialled after that, and counts as alive again once it answers.

Between hosts, connections use TLS (:mod:`gossamer.runtime.processes.security`), and a stranger without a key
of the run gets no further than the handshake. With a
:class:`~gossamer.runtime.processes.transport.shaper.Shaper`, chunks leave and are acknowledged as the
experiment's network allows."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gossamer.errors import BadInput
from gossamer.messages import BEGIN_BYTES, CHUNK_BYTES, Encoded, encode, freeze, pack_head
from gossamer.messages.tags import Message, Payload, Sending, Tag, Traffic
from gossamer.runtime.processes.security import Security
from gossamer.runtime.processes.transport.connection import Connection, Incoming, Outgoing
from gossamer.runtime.processes.transport.peer import Peer, Peers, State, TcpSending
from gossamer.runtime.processes.transport.send_queue import SendQueue
from gossamer.runtime.processes.transport.shaper import Shaper
from gossamer.runtime.processes.transport.wire import LEAVE

RECEIVE_BYTES = 64 * 1024
"""A connection's receive buffer in the kernel, and the most bytes read at a time."""
_BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted: all peers may dial at once."""
AT_ONCE = 32
"""Most connections accepted at a time, before they are served (and the strangers among them counted)."""
STRANGERS = 32
"""Most open connections that have not proved a rank, in addition to one for each node."""
REFUSALS = 64
"""Most refusals that are reported."""
REDIAL_FIRST_S, REDIAL_LAST_S = 0.05, 5.0
"""Seconds between a failed dial and the next one, at first and at most; doubled each time."""


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket for :class:`Transport`; port 0 lets the system choose one.

    Accepted connections inherit its small receive buffer, also those of peers that dial before the transport
    has started."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


@dataclass(eq=False)
class Transport:
    """A node's messages to its peers. It belongs to the event loop in which it is created, and may be called
    only from there.

    Without ``security``, it accepts addresses on loopback only (:class:`~gossamer.errors.BadInput`).
    """

    listener: socket.socket  # from :func:`listen`; closed by :meth:`close`
    rank: int
    addresses: list[tuple[str, int]]  # of every rank
    token: bytes  # 16 bytes that only this run's nodes know; a peer without them is refused
    limit: int  # bytes (head and buffers, without chunk headers) of the largest message, sent or accepted
    deliver: Callable[[Message], None]  # called with messages, each sender's in the order of sending
    contact: Callable[[int, str | None], None]
    """Called with a rank and the reason when a peer can't be reached, is silent or is refused; with None when
    a lost peer is back or was restarted, or a peer that is apart has been reached."""
    refused: Callable[[str], None]  # called with a line about a refused stranger or peer
    now: Callable[[], float]  # this node's clock in seconds, for ``Message.sent_at``
    # Called with an error of this node: it modified a sent vector, or its timeline can't be written.
    failed: Callable[[BaseException], None]
    watch: Callable[[int, float, float, int], None] | None = None
    """Called when a message has left, or was cancelled while it was being sent: receiver, times at which its
    first and last chunks were written (seconds of this node's clock), bytes."""
    shaper: Shaper | None = None  # applies the network to messages; None has no effect
    security: Security | None = None
    incarnation: int = 0  # number of earlier starts of this node
    heartbeat_s: float | None = None  # two heartbeats are sent in this time
    detection_s: float = 10.0
    """Seconds without a sign of life after which a peer is lost. With heartbeats, a frozen peer is detected
    within ``detection_s + heartbeat_s / 2`` seconds; without them, only a peer that can't be dialled is."""

    traffic: Traffic = field(default_factory=Traffic, init=False)
    rounds: int = field(default=0, init=False)  # completed; messages belong to the next round
    connections: set[Connection] = field(default_factory=set, init=False)
    strangers: dict[Incoming, None] = field(default_factory=dict, init=False)  # the oldest first
    peers: Peers = field(default_factory=Peers, init=False)
    closing: bool = field(default=False, init=False)
    _refusals: int = field(default=0, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _server: asyncio.Server | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.addresses = list(self.addresses)
        for host, port in (*self.addresses, self.listener.getsockname()[:2]):
            self._check(host, port)
        # Incoming bytes are consumed within one callback of the loop, so all connections share the memory.
        # With a shaper, bytes are read chunk by chunk.
        size = RECEIVE_BYTES if self.shaper is None else BEGIN_BYTES + CHUNK_BYTES
        self.received = memoryview(bytearray(size))
        self.opened = memoryview(bytearray(0 if self.security is None else size))
        self.send_queue = SendQueue(self)
        self._changed = asyncio.Event()
        if self.shaper is not None:
            self.shaper.changed = self.wake

    def _check(self, host: str, port: int) -> None:
        if self.security is None and not _is_loopback(host):
            raise BadInput(f"address {host}:{port}: not loopback; accepted: loopback, or TLS keys")

    def locate(self, rank: int, host: str, port: int) -> None:
        """Set the address at which a peer listens."""
        self._check(host, port)
        self.addresses[rank] = host, port

    async def start(self) -> None:
        self._server = await self.loop.create_server(
            lambda: Incoming(self), sock=self.listener, backlog=AT_ONCE
        )
        self.listener.listen(_BACKLOG)  # asyncio has only one parameter for both
        self._spawn(self.send_queue.send_all())
        if self.heartbeat_s is not None:
            self._spawn(self._beat(self.heartbeat_s / 2, self.detection_s))

    def wake(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something changes. The caller checks its condition right before and right after."""
        self._changed.clear()
        await self._changed.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    # --- for the node

    def send(self, to: int, payload: Payload | Encoded, tag: Tag) -> Sending:
        """Queue a message. Later changes to the payload do not affect it.

        Args:
            to: the receiver's rank.
            payload: the content. An :class:`~gossamer.messages.Encoded` is not copied and must not change: a
                broadcast encodes once, and an immutable snapshot need not be copied at all.
            tag: the message's tag.

        Raises:
            TypeError: for a payload or tag that can't be sent.
            ValueError: for a message larger than the limit.
        """
        encoded = payload if isinstance(payload, Encoded) else encode(freeze(payload, lambda tensor: False))
        head = pack_head(tag, self.now(), encoded.structure)
        sending = TcpSending(to, head, encoded, self.rounds, self.send_queue.cancel)
        if sending.nbytes > self.limit:
            raise ValueError(
                f"a message of {sending.nbytes} bytes to rank {to}; the limit is {self.limit} bytes"
            )
        peer = self.peers[to]
        self.send_queue.put(sending)
        if peer.lost is None:
            peer.used = True
            if peer.outgoing is None:
                self.dial(peer)
        return sending

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all messages are acknowledged, cancelled or lost. Raises TimeoutError after ``timeout`` s."""
        async with asyncio.timeout(timeout):
            while self.send_queue.busy or any(peer.unacknowledged for peer in self.peers.values()):
                await self.changed()

    def add_snapshot(self, report: Callable[[dict[int, int]], None]) -> None:
        """Call ``report`` with the number of messages sent to each peer before the end of the last round, once
        all of these have left."""
        self.send_queue.add_snapshot(self.rounds, report)

    def mark_lost(self, rank: int, why: str, incarnation: int | None = None, *, apart: bool = False) -> None:
        """Treat a peer as dead: messages that are queued for it, or sent to it later, count as unsent at once.

        Its connections are closed; ``contact`` is not called. It counts as alive again when it answers, or
        after :meth:`mark_found`. If ``incarnation`` is given, that incarnation is over: it is neither accepted nor
        dialled any more. A peer that is ``apart`` is dialled until it answers, and counts as lost until
        :meth:`mark_found`, since the other direction may be cut."""
        peer = self.peers[rank]
        if incarnation is not None:
            if peer.incarnation is not None and incarnation < peer.incarnation:
                return  # its next incarnation is already known
            self._end_incarnation(peer, incarnation)
        if peer.lost is None:
            self._drop(peer, why)
        peer.apart = apart
        if apart:
            peer.ended = -1  # if its messages were refused, it may try again, as after any introduction
            self.dial(peer)

    def mark_found(self, rank: int) -> None:
        """Treat a lost peer as alive again: the next message to it dials it."""
        peer = self.peers[rank]
        peer.lost, peer.apart, peer.ended, peer.redial_s = None, False, -1, 0.0
        peer.lost_at = self.loop.time() + self.detection_s
        peer.redial_now.set()

    async def close(self) -> None:
        """Close everything at once, and wait for it. Without an earlier :meth:`flush`, messages may be
        lost."""
        self.closing = True
        if self._server is None:
            self.listener.close()
        else:
            self._server.close()
        for connection in self.connections:
            if connection.peer is not None and not connection.closed:
                connection.write(LEAVE)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self.connections):
            connection.close()
        while self.connections:
            await self.changed()
        if self._server is not None:
            await self._server.wait_closed()
        for peer in self.peers.values():
            self.send_queue.drop(peer)

    # --- strangers

    def admit(self, stranger: Incoming) -> None:
        """Register an incoming connection that has not proved its rank. If there are too many, close the oldest."""
        self.strangers[stranger] = None
        if len(self.strangers) > STRANGERS + len(self.addresses):
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.refuse("did not identify itself while others connected")

    def report_refusal(self, line: str) -> None:
        """Report a refusal, unless there were too many already."""
        self._refusals += 1
        if self._refusals <= REFUSALS:
            self.refused(line)
        elif self._refusals == REFUSALS + 1:
            self.refused("further refusals are not shown")

    # --- dialling

    def dial(self, peer: Peer) -> None:
        """Dial a peer until it answers. A dial that is already waiting is made at once."""
        peer.redial_now.set()
        if peer.dial is None and peer.outgoing is None and not self.closing:
            if not peer.redial_s:
                peer.lost_at = self.loop.time() + self.detection_s
            peer.dial = self._spawn(self._dial(peer))

    async def _dial(self, peer: Peer) -> None:
        peer.redial_now.clear()
        why = broken = "its connections break as soon as they are made"
        while peer.outgoing is None:
            if peer.redial_s:
                left_s = peer.lost_at - self.loop.time()
                if left_s <= 0 and peer.lost is None:
                    self.lose(peer, f"could not be reached for {self.detection_s:g} s: {why}")
                    peer.redial_now.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(peer.redial_s, left_s) if left_s > 0 else peer.redial_s):
                        await peer.redial_now.wait()
                peer.redial_now.clear()
            peer.redial_s = min(2 * peer.redial_s, REDIAL_LAST_S) or REDIAL_FIRST_S
            why = await self._dial_once(peer) or broken
        peer.dial = None

    async def _dial_once(self, peer: Peer) -> str | None:
        """Dial a peer once. Returns None, or the reason why it did not answer."""
        host, port = self.addresses[peer.rank]
        link = None
        try:
            async with asyncio.timeout(self.detection_s):
                _, link = await self.loop.create_connection(lambda: Outgoing(self, peer), host, port)
                return await link.greeted
        except OSError as error:  # TimeoutError is one
            return str(error) or f"did not answer within {self.detection_s:g} s"
        finally:
            if link is not None and peer.outgoing is not link:
                link.close()

    # --- reports of connections

    def meet(self, peer: Peer, incarnation: int) -> None:
        """Take a peer's incarnation from its greeting on a new connection."""
        restarted = peer.incarnation is not None and incarnation > peer.incarnation
        if incarnation != peer.incarnation:
            peer.disconnect()
            self.send_queue.requeue_current(peer)
            self.send_queue.forget(peer, State.RESEND)
            peer.restarted(incarnation)
        peer.apart = peer.apart and not restarted
        if peer.apart:
            return
        lost, peer.lost = peer.lost, None
        if restarted or lost is not None:
            self.contact(peer.rank, None)

    def broke(self, peer: Peer) -> None:
        """A connection with a peer is gone: dial the peer, unless messages to it still have a connection."""
        if peer.outgoing is None and (peer.lost is None or peer.apart):
            self.dial(peer)

    # --- losing peers

    def lose(self, peer: Peer, why: str, *, ended: bool = False) -> None:
        """Treat a peer as lost until it is reached again or, if it has ``ended``, until it is restarted."""
        if self.closing:
            return
        if ended:
            self._end_incarnation(peer, peer.incarnation or 0)
        was_lost = peer.lost is not None
        self._drop(peer, why)
        if not ended and peer.used:
            self.dial(peer)
        if not was_lost:
            self.contact(peer.rank, why)

    def _end_incarnation(self, peer: Peer, incarnation: int) -> None:
        """An incarnation of a peer is over: it is neither accepted nor dialled any more."""
        peer.ended = max(peer.ended, incarnation)
        if peer.dial is not None:
            peer.dial.cancel()
            peer.dial = None

    def _drop(self, peer: Peer, why: str) -> None:
        peer.lost = peer.lost or why
        self.send_queue.drop(peer)
        peer.disconnect()
        self.wake()

    async def _beat(self, tick_s: float, detection_s: float) -> None:
        """Send heartbeats, and detect silent peers.

        Silence is counted in ticks, not by the clock: a process that was itself stopped blames no peer. Each connection
        counts by itself, since a network may be cut in one direction."""
        while True:
            await asyncio.sleep(tick_s)
            for connection in list(self.connections):
                if connection.peer is not None:
                    connection.beat()
            for peer in list(self.peers.values()):
                for link in (peer.outgoing, peer.incoming):
                    if link is not None and not link.closed:
                        link.silent += 1
                        if link.silent * tick_s > detection_s:
                            self.lose(peer, f"silent for {detection_s:g} s")
