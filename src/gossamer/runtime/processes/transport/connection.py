"""Connections: the side that dialled sends messages (:class:`Outgoing`), the other side acknowledges (:class:`Incoming`)."""

from __future__ import annotations

import asyncio
import hmac
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gossamer.messages import CHUNK_BYTES, FrameError
from gossamer.messages.tags import WINDOW, Message
from gossamer.runtime.processes.security.trust import Tls
from gossamer.runtime.processes.transport.peer import Peer
from gossamer.runtime.processes.transport.wire import (
    BEAT,
    LEAVE,
    Arrived,
    Credited,
    Decoder,
    Event,
    Hello,
    Kind,
    Marked,
    credit,
    hello,
)

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.peering import Peering

HELLO_TIMEOUT_S = 10.0
"""Seconds that a new connection has to prove its rank."""


class Connection(asyncio.BufferedProtocol, ABC):
    """Both directions: reading into the node's one buffer, TLS, heartbeats, and refusing what is wrong."""

    link: asyncio.Transport

    def __init__(self, peering: Peering, limit: int | None, tls: Tls | None) -> None:
        self.peering, self.end, self.tls = peering, peering.end, tls
        self.decoder = Decoder(limit)
        self.peer: Peer | None = None  # once it has proved its rank
        self.closed = False
        self.writable = True
        self._spoke = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.link = transport
        self.end.connections.add(self)
        if self.end.closing:
            self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.end.received

    def buffer_updated(self, nbytes: int) -> None:
        data = self.end.received[:nbytes]
        try:
            if self.tls is None:
                self._take(data)
            else:
                self._decrypt(self.tls, data)
        except FrameError as error:
            self.refuse(str(error))

    def _decrypt(self, tls: Tls, data: memoryview) -> None:
        try:
            for piece in tls.open(data, self.end.opened):
                if not self.closed:
                    self._take(piece)
                if self.closed:
                    return
        finally:
            if not self.closed and (due := tls.due()):
                self.link.write(due)

    def _take(self, data: memoryview) -> None:
        for event in self.decoder.feed(data):
            if event is Kind.LEAVE and self.peer is not None:
                self.peering.left(self.peer)
            elif event is not Kind.BEAT:
                self.handle(event)
            if self.closed:
                return
        if self.peer is not None:
            self.peer.silent = 0

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Take a frame."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Close the connection, and report why."""

    def write(self, frame: bytes) -> None:
        """Write a frame."""
        self._spoke = True
        self.link.write(frame if self.tls is None else self.tls.seal(frame))

    def beat(self) -> None:
        """Send a heartbeat, if nothing else was sent since the last one."""
        if self.writable and not self.closed and not self._spoke:
            self.write(BEAT)
        self._spoke = False

    def say_goodbye(self) -> None:
        """Tell a peer that nothing more will come."""
        if self.peer is not None and not self.closed:
            self.write(LEAVE)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.end.connections.discard(self)
        self.end.wake()

    def close(self) -> None:
        """Close at once, without waiting for a peer that does not read."""
        self.closed = True
        self.link.abort()


class Outgoing(Connection):
    """A connection that this node dialled: its messages go out, credit comes in.

    Args:
        peering: told what happens.
        to: the peer that is dialled.

    Attributes:
        greeted: done when the peer has answered, or with the reason why it has not.
        written: bytes of chunks without headers.
        unacknowledged: those of them that the peer has not acknowledged.
    """

    def __init__(self, peering: Peering, to: Peer) -> None:
        security, tls = peering.end.security, None
        if security is not None:
            tls = Tls(security.client, server_side=False, secured=self._say_hello)
        super().__init__(peering, None, tls)
        self.to = to
        self.greeted: asyncio.Future[str | None] = self.end.loop.create_future()
        self.written = self.unacknowledged = 0
        self._number = to.dialled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing then waits until asyncio has handed everything to the kernel, which holds little that it has not sent.
        self.link.set_write_buffer_limits(high=0)
        dialled = self.link.get_extra_info("socket")
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK_BYTES)
        if self.closed:
            return
        if self.tls is None:
            self._say_hello()
        else:
            self.link.write(self.tls.begin())

    def _say_hello(self) -> None:
        if (
            self.tls
            and self.end.security
            and not self.end.security.belongs_to(self.tls.certificate, self.to.rank)
        ):
            self.refuse("answered with another rank's key")
        else:
            self.write(hello(self.end.rank, self.end.token, self.end.incarnation, self._number))

    def room(self, nbytes: int) -> bool:
        """Whether a chunk of this size may be written now."""
        return self.writable and self.unacknowledged + nbytes <= WINDOW

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Credited):
            if event.nbytes > self.unacknowledged:
                self.refuse(f"acknowledged {event.nbytes} bytes of {self.unacknowledged}")
                return
            self.unacknowledged -= event.nbytes
            self.to.acknowledge(self.written - self.unacknowledged)
            self.end.wake()

    def _greet(self, said: Hello) -> None:
        peer = self.to
        if said.rank != peer.rank:
            self.refuse(f"answered as rank {said.rank}")
        elif not hmac.compare_digest(said.token, self.end.token):
            self.refuse("answered with the token of another run")
        elif said.connection != self._number:
            self.refuse(f"answered connection {said.connection} on connection {self._number}")
        elif (stale := peer.stale(said.incarnation, None)) is not None:
            self.refuse(f"answered {stale}")
        else:
            self.peering.meet(peer, said.incarnation)
            peer.resume(said.expected)
            self.peer = peer
            self.greeted.set_result(None)
            self.peering.reached(peer, self)

    def refuse(self, reason: str) -> None:
        self.close()
        if self.peer is None:
            host, port = self.end.addresses[self.to.rank]
            self.end.guard.tell(host, f"{self.to.rank} (dialled at {host}:{port}) {reason}")
            self._fail(reason)
        else:
            self.peering.refuse(self.peer, reason)

    def _fail(self, why: str) -> None:
        if not self.greeted.done():
            self.greeted.set_result(why)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.end.wake()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        why = str(error or "closed the connection")
        self._fail(why)
        if self.to.outgoing is self:
            self.peering.broke(self.to, why)


class Incoming(Connection):
    """A connection that a peer dialled: its messages come in, credit goes out."""

    def __init__(self, peering: Peering) -> None:
        security = peering.end.security
        tls = None if security is None else Tls(security.server, server_side=True)
        super().__init__(peering, peering.end.limit, tls)
        self._host = ""
        self._counted = 0  # bytes of frames
        self._taken = 0  # bytes of chunks that the network has let through
        self._credited = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.closed:
            return
        self._host, *_ = transport.get_extra_info("peername") or ("an unknown address",)
        reason = f"did not say who it is within {HELLO_TIMEOUT_S} s"
        self._deadline = self.end.loop.call_later(HELLO_TIMEOUT_S, self.refuse, reason)
        self.end.guard.enter(self._host, self.refuse)

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        if self.peer is not None:
            self._count()
            if not self.closed:
                self._give_credit()

    def handle(self, event: Event) -> None:
        peer = self.peer
        if isinstance(event, Hello):
            self._greet(event)
        elif peer is None:
            return
        elif isinstance(event, Arrived):
            number = self.decoder.expected - 1
            message = Message(peer.rank, event.tag, event.payload, event.sent_at, number=number)
            peer.arrived += 1
            self._count(partial(self._deliver, peer, message), ends=True)
        elif isinstance(event, Marked):  # messages before it may still be on their way through the network
            peer.marked.append((event.snapshot, event.message, peer.arrived))
            self._pass_marks(peer)
        else:
            self._count(ends=True)

    def _greet(self, said: Hello) -> None:
        end, rank = self.end, said.rank
        if rank >= len(end.addresses) or rank == end.rank:
            self.refuse(f"says that it is rank {rank} of {len(end.addresses)}")
            return
        if self.tls and end.security and not end.security.belongs_to(self.tls.certificate, rank):
            self.refuse(f"says that it is rank {rank}, but has not got its key")
            return
        peer = end.peers[rank]
        if not hmac.compare_digest(said.token, end.token):
            self.refuse("has the token of another run")
        elif (stale := peer.stale(said.incarnation, said.connection)) is not None:
            self.refuse(f"says that it is rank {rank}, {stale}")
        else:
            self._is_no_stranger()
            self.peering.meet(peer, said.incarnation)
            peer.hang_up()
            peer.incoming, self.peer = self, peer
            peer.answered = said.connection
            self.decoder.expect(peer.expected)
            self.write(hello(end.rank, end.token, end.incarnation, said.connection, peer.expected))
            self.peering.came(peer)

    def _deliver(self, peer: Peer, message: Message) -> None:
        if self.end.closing:
            return
        self.end.traffic.messages_received += 1
        self.end.deliver(message)
        peer.delivered += 1
        self._pass_marks(peer)

    def _pass_marks(self, peer: Peer) -> None:
        """Report the peer's snapshots before which all that it sent is delivered."""
        while peer.marked and peer.marked[0][2] <= peer.delivered:
            snapshot, message, _ = peer.marked.popleft()
            if self.end.marked is not None:
                self.end.marked(peer.rank, snapshot, message)

    def _count(self, deliver: Callable[[], None] | None = None, *, ends: bool = False) -> None:
        """Take what came in since the last time, and deliver the message that it completes."""
        nbytes = self.decoder.frame_bytes - self._counted
        self._counted += nbytes
        taken = partial(self._let_through, nbytes, self.decoder.chunk_bytes)
        if self.end.shaper is not None and self.peer is not None and nbytes:
            self.end.shaper.arrive(self.peer.rank, nbytes, taken, ends, deliver)
            return
        taken()
        if deliver is not None:
            deliver()

    def _let_through(self, nbytes: int, chunk_bytes: int) -> None:
        """The network lets some bytes through, and with them this many of all chunks."""
        self.end.traffic.bytes_received += nbytes
        self._taken = max(self._taken, chunk_bytes)
        if not self.closed:
            self._give_credit()

    def _give_credit(self) -> None:
        """Acknowledge what was taken: a chunk or more at a time, and all of it when a message ends."""
        due = self._taken - self._credited
        if self.decoder.chunk_bytes - self._credited > WINDOW:
            self.refuse(f"sent more than its window of {WINDOW} bytes")
        elif self.writable and (due >= CHUNK_BYTES or (due and self.decoder.idle)):
            self._credited += due
            self.write(credit(due))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.peer is not None:
            self._give_credit()

    def refuse(self, reason: str) -> None:
        self.close()
        if self.peer is None:
            host, port, *_ = self.link.get_extra_info("peername") or (self._host, "?")
            self.end.guard.tell(self._host, f"stranger at {host}:{port} {reason}")
        else:
            self.peering.refuse(self.peer, reason)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self.peer is not None and self.peer.incoming is self:
            self.peer.hang_up()
            self.peering.gone(self.peer, str(error or "closed its connection"))
        self._is_no_stranger()

    def _is_no_stranger(self) -> None:
        """It has proved its rank, or is gone."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.end.guard.leave(self._host, self.refuse)
