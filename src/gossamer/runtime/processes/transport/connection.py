"""Connections: the side that dialled sends (:class:`Outgoing`), the other side acknowledges
(:class:`Incoming`)."""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from gossamer.messages import CHUNK_BYTES, FrameError
from gossamer.messages.tags import WINDOW, Message
from gossamer.runtime.processes.transport import wire
from gossamer.runtime.processes.transport.peer import Peer
from gossamer.runtime.processes.transport.wire import Arrived, Credited, Decoder, Event, Hello, Kind

if TYPE_CHECKING:
    from gossamer.runtime.processes.transport.transport import Transport

HELLO_TIMEOUT_S = 10.0
"""Seconds that a new connection has to prove its rank."""


class Tls:
    """One end of a connection under TLS, without a socket; ``secured`` is called when the handshake is done.

    (asyncio's own TLS needs 256 KiB per connection, and messages in its second write buffer can't be
    cancelled.)"""

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, secured: Callable[[], None] = lambda: None
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read: Callable[[int, memoryview], int] = self._end.read  # type: ignore[assignment]  # into a buffer
        self._secure, self._secured = False, secured

    @property
    def certificate(self) -> bytes | None:
        return self._end.getpeercert(binary_form=True)

    def open(self, data: bytes | memoryview, into: memoryview) -> Iterator[memoryview]:
        """Decrypt bytes from the wire. Yields the plain text piece by piece, each in ``into``.

        Raises:
            FrameError: for anything that a correct peer does not send.
        """
        self._incoming.write(data)
        try:
            if not self._secure:
                self._end.do_handshake()
                self._secure = True
                self._secured()
            while length := self._read(len(into), into):
                yield into[:length]
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise FrameError(f"broke TLS: {reason}") from None

    def due(self) -> bytes:
        return self._outgoing.read()

    def seal(self, frame: bytes) -> bytes:
        self._end.write(frame)
        return self._outgoing.read()


class Connection(asyncio.BufferedProtocol):
    """The common part of both directions: reading into the shared buffer, TLS, heartbeats and refusals."""

    link: asyncio.Transport
    who: str  # describes the other end in reports

    def __init__(self, transport: Transport, limit: int | None, tls: Tls | None) -> None:
        self.transport, self.tls = transport, tls
        self.decoder = Decoder(limit)
        self.peer: Peer | None = None  # once it has proved its rank
        self.closed = False
        self.silent = 0  # ticks since the last sign of life on it
        self.writable = True
        self.why = "closed its connection"  # why the connection ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.link = transport
        self.transport.connections.add(self)
        if self.transport.closing:
            self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.transport.received

    def buffer_updated(self, nbytes: int) -> None:
        data = self.transport.received[:nbytes]
        try:
            if self.tls is None:
                self._take(data)
            else:
                self._decrypt(self.tls, data)
        except FrameError as error:
            self.refuse(str(error))

    def _decrypt(self, tls: Tls, data: bytes | memoryview) -> None:
        try:
            for piece in tls.open(data, self.transport.opened):
                self._take(piece)
                if self.closed:
                    return
        finally:
            if not self.closed and (due := tls.due()):
                self.link.write(due)

    def _take(self, data: memoryview) -> None:
        if self.closed:
            return
        for event in self.decoder.feed(data):
            if event is Kind.LEAVE and self.peer is not None:
                self.transport.lose(self.peer, "closed its connections", ended=True)
            elif event is not Kind.BEAT:
                self.handle(event)
            if self.closed:
                return
        if self.peer is not None:
            self.silent = 0

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Close the connection and report the refusal. This incarnation of the peer stays refused."""
        if self.closed:
            return
        self.close()
        self.why = reason
        self.transport.report_refusal(f"{self.who} {reason}")
        if self.peer is not None:
            self.transport.lose(self.peer, f"refused: {reason}", ended=True)

    def has_key_of(self, rank: int) -> bool:
        """Whether the other end has presented a rank's certificate; True without TLS."""
        security = self.transport.security
        return self.tls is None or security is None or security.belongs_to(self.tls.certificate, rank)

    def has_token(self, hello: Hello) -> bool:
        return hmac.compare_digest(hello.token, self.transport.token)

    def write(self, frame: bytes) -> None:
        self.link.write(frame if self.tls is None else self.tls.seal(frame))

    def beat(self) -> None:
        if self.writable and not self.closed:
            self.write(wire.BEAT)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if error is not None:
            self.why = str(error)
        self.transport.connections.discard(self)
        self.transport.wake()

    def close(self) -> None:
        """Close at once, without waiting for a peer that does not read."""
        self.closed = True
        self.link.abort()


class Outgoing(Connection):
    """A connection that this node dialled: its messages go out, credit comes in.

    Attributes:
        greeted: a future of None once the peer has answered, or of the reason why it has not.
        written: bytes of chunks without headers.
        unacknowledged: those of them that the peer has not acknowledged.
    """

    def __init__(self, transport: Transport, to: Peer) -> None:
        tls = None
        if transport.security is not None:
            tls = Tls(transport.security.client, server_side=False, secured=self._say_hello)
        super().__init__(transport, None, tls)
        self.to = to
        host, port = transport.addresses[to.rank]
        self.who = f"{to.rank} (dialled at {host}:{port})"
        self.greeted: asyncio.Future[str | None] = transport.loop.create_future()
        self.written = self.unacknowledged = 0
        self._greeted_at = 0.0
        to.dialled += 1
        self._number = to.dialled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing then waits until asyncio has handed everything to the kernel, which buffers few unsent bytes.
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
            self._decrypt(self.tls, b"")  # starts the handshake

    def _say_hello(self) -> None:
        if self.has_key_of(self.to.rank):
            transport = self.transport
            self.write(
                wire.hello(transport.rank, transport.token, transport.incarnation, connection=self._number)
            )
        else:
            self.refuse("answered with another rank's key")

    def room(self, nbytes: int) -> bool:
        return self.writable and self.unacknowledged + nbytes <= WINDOW

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Credited):
            if event.nbytes > self.unacknowledged:
                self.refuse(f"acknowledged {event.nbytes} bytes of {self.unacknowledged}")
                return
            self.unacknowledged -= event.nbytes
            self.to.redial_s = 0.0
            self.to.acknowledge(self.written - self.unacknowledged)
            self.transport.wake()

    def _greet(self, hello: Hello) -> None:
        peer = self.to
        if hello.rank != peer.rank:
            self.refuse(f"answered as rank {hello.rank}")
        elif not self.has_token(hello):
            self.refuse("answered with the token of another run")
        elif hello.connection != self._number:
            self.refuse(f"answered connection {hello.connection} on connection {self._number}")
        elif (stale := peer.stale(hello.incarnation)) is not None:
            self.refuse(f"answered {stale}")
        else:
            self.transport.meet(peer, hello.incarnation)
            self.transport.send_queue.resume(peer, hello.expected)
            self.peer = peer
            peer.outgoing = self
            if peer.apart:
                self.transport.contact(peer.rank, None)
            self._greeted_at = self.transport.loop.time()
            self.greeted.set_result(None)
            self.transport.wake()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.wake()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.greeted.done():
            self.greeted.set_result(self.why)
        if self.to.outgoing is self:
            self.to.outgoing = None
            if self.transport.loop.time() - self._greeted_at >= self.transport.detection_s:
                self.to.redial_s = 0.0
            self.transport.send_queue.requeue_current(self.to)
            self.transport.broke(self.to)


class Incoming(Connection):
    """A connection that a peer dialled: its messages come in, credit goes out."""

    def __init__(self, transport: Transport) -> None:
        security = transport.security
        super().__init__(
            transport, transport.limit, None if security is None else Tls(security.server, server_side=True)
        )
        self._counted = 0  # bytes of frames
        self._taken = 0  # bytes of chunks that the network has let through
        self._credited = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        host, port, *_ = transport.get_extra_info("peername") or ("an unknown address", "?")
        self.who = f"stranger at {host}:{port}"
        if not self.closed:
            reason = f"did not identify itself within {HELLO_TIMEOUT_S} s"
            self._deadline = self.transport.loop.call_later(HELLO_TIMEOUT_S, self.refuse, reason)
            self.transport.admit(self)

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        if self.peer is not None:
            self._pass_on()
            if not self.closed:
                self._give_credit()

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Arrived):
            assert self.peer is not None
            number, values = self.decoder.expected - 1, event.values
            message = Message(
                self.peer.rank, event.tag, event.payload, event.sent_at, number=number, values=values
            )
            self._pass_on(partial(self._deliver, message), ends=True)
        else:
            self._pass_on(ends=True)

    def _greet(self, hello: Hello) -> None:
        transport, rank = self.transport, hello.rank
        if rank >= len(transport.addresses) or rank == transport.rank:
            self.refuse(f"claims to be rank {rank} of {len(transport.addresses)}")
        elif not self.has_key_of(rank):
            self.refuse(f"claims to be rank {rank}, but does not have its key")
        elif not self.has_token(hello):
            self.refuse("has the token of another run")
        elif (stale := transport.peers[rank].stale(hello.incarnation, hello.connection)) is not None:
            self.refuse(f"claims to be rank {rank}, {stale}")
        else:
            self._welcome(transport.peers[rank], hello)

    def _welcome(self, peer: Peer, hello: Hello) -> None:
        transport = self.transport
        self._identified()
        transport.meet(peer, hello.incarnation)
        peer.lost_at = transport.loop.time() + transport.detection_s
        peer.close_incoming()
        peer.answered = hello.connection
        peer.incoming, self.peer, self.who = self, peer, str(peer.rank)
        self.decoder.expected = peer.expected
        self.write(
            wire.hello(
                transport.rank, transport.token, transport.incarnation, hello.connection, peer.expected
            )
        )
        if peer.used or peer.apart:
            transport.dial(peer)

    def _deliver(self, message: Message) -> None:
        if not self.transport.closing:
            self.transport.traffic.messages_received += 1
            self.transport.deliver(message)

    def _pass_on(self, deliver: Callable[[], None] | None = None, *, ends: bool = False) -> None:
        """Pass the bytes since the last call through the network. Afterwards, ``deliver`` the message that they
        complete, if any."""
        nbytes = self.decoder.frame_bytes - self._counted
        self._counted += nbytes
        taken = partial(self._let_through, nbytes, self.decoder.chunk_bytes)
        if self.transport.shaper is not None and self.peer is not None and nbytes:
            self.transport.shaper.arrive(self.peer.rank, nbytes, taken, ends, deliver)
            return
        taken()
        if deliver is not None:
            deliver()

    def _let_through(self, nbytes: int, chunk_bytes: int) -> None:
        """The network lets ``nbytes`` bytes through; in total, ``chunk_bytes`` of chunks have passed."""
        self.transport.traffic.bytes_received += nbytes
        self._taken = max(self._taken, chunk_bytes)
        if not self.closed:
            self._give_credit()

    def _give_credit(self) -> None:
        """Acknowledge the bytes that have passed: at least a chunk at a time, and all when a message ends."""
        due = self._taken - self._credited
        if self.decoder.chunk_bytes - self._credited > WINDOW:
            self.refuse(f"sent more than its window of {WINDOW} bytes")
        elif self.writable and (due >= CHUNK_BYTES or (due and self.decoder.idle)):
            self._credited += due
            self.write(wire.credit(due))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.peer is not None:
            self._give_credit()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._identified()
        if self.peer is not None and self.peer.incoming is self:
            self.peer.close_incoming()
            self.transport.broke(self.peer)

    def _identified(self) -> None:
        """The other end has proved its rank, or is gone."""
        if self._deadline is not None:
            self._deadline.cancel()
            self.transport.strangers.pop(self, None)
