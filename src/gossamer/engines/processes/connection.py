"""The two ends of a connection: who dialled sends messages on it, who was dialled acknowledges them."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.engines.processes.contact import Contact
from gossamer.engines.processes.sending import OwnSending
from gossamer.engines.processes.tls import Tls
from gossamer.engines.processes.wire import (
    Arrived,
    Beat,
    Credited,
    Decoder,
    Event,
    Hello,
    Left,
    Marked,
    beat,
    credit,
    hello,
    leave,
)
from gossamer.messages import WINDOW, Message
from gossamer.payload import CHUNK_BYTES, FrameError

if TYPE_CHECKING:
    from gossamer.engines.processes.transport import Transport

HELLO_TIMEOUT_S = 10.0
"""Seconds that a new connection may take to say, and prove, who it is."""


class Connection(asyncio.BufferedProtocol):
    """What both directions share: reading into the transport's one buffer, heartbeats, and refusing what is wrong."""

    link: asyncio.Transport

    def __init__(self, owner: Transport, limit: int | None, tls: Tls | None) -> None:
        self.owner = owner
        self.decoder = Decoder(limit)
        self.tls = tls
        self.contact: Contact | None = None
        """Who is at the other end, once it has proved that."""
        self.closed = False
        self.writable = True
        self._spoke = False
        self._status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.link = transport
        self.owner._connections.add(self)
        if self.owner._closing:
            self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        # Filled and read to its end within one callback of the loop, so that all connections can share it.
        return self.owner._received

    def buffer_updated(self, nbytes: int) -> None:
        data = self.owner._received[:nbytes]
        try:
            if self.tls is None:
                self._take(data)
            else:
                self._open(self.tls, data)
        except FrameError as error:
            self.refuse(str(error))

    def _open(self, tls: Tls, data: memoryview) -> None:
        insecure = not tls.secure
        try:
            for piece in tls.open(data, self.owner._opened):
                if insecure:  # data may come with the last of the handshake
                    insecure = False
                    self.secured()
                if not self.closed:
                    self._take(piece)
                if self.closed:
                    return
        finally:
            if not self.closed and (due := tls.due()):
                self.link.write(due)
        if insecure and tls.secure:
            self.secured()

    def _take(self, data: memoryview) -> None:
        for event in self.decoder.feed(data):
            if type(event) is Beat:
                if self.contact is not None:
                    self.owner._peering.heard(self.contact, event.status)
            elif type(event) is Left:
                if self.contact is not None:
                    self.owner._peering.left(self.contact)
            else:
                self.handle(event)
            if self.closed:
                return
        if self.contact is not None:
            self.contact.silent = 0

    def secured(self) -> None:
        """The handshake of TLS is done; nothing that was said under it is taken yet."""

    def handle(self, event: Event) -> None:
        """Take a frame."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Have no more to do with what is at the other end."""
        raise NotImplementedError

    def write(self, frame: bytes) -> None:
        """Write a frame."""
        self._spoke = True
        self.link.write(frame if self.tls is None else self.tls.seal(frame))

    def beat(self, status: bytes, *, always: bool) -> None:
        """Say how this node is, if that is new; ``always``, that it's alive, if nothing was said since the last time."""
        if self.writable and (status != self._status or (always and not self._spoke)):
            self.write(beat(status))
            self._status = status
        self._spoke = self._spoke and not always

    def say_goodbye(self) -> None:
        """Tell a peer that nothing more will come."""
        if self.contact is not None and not self.closed:
            self.write(leave())

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.owner._connections.discard(self)
        self.owner._wake.set()

    def close(self) -> None:
        """Close at once, without waiting for a peer that does not read."""
        self.closed = True
        self.link.abort()


class Incoming(Connection):
    """A connection that a peer dialled: its messages come in, credit goes out."""

    def __init__(self, owner: Transport) -> None:
        security = owner._security
        super().__init__(
            owner, owner.limit, None if security is None else Tls(security.server, server_side=True)
        )
        self._host = ""
        self._counted = 0
        self._taken = 0
        self._credited = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.closed:
            return
        peername = transport.get_extra_info("peername")
        host = peername[0] if peername else ""
        self._host = host
        self._deadline = asyncio.get_running_loop().call_later(
            HELLO_TIMEOUT_S, self.refuse, f"did not say who it is within {HELLO_TIMEOUT_S} s"
        )
        self.owner._guard.enter(host, self)

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        contact = self.contact
        if contact is None:
            return
        self._count()
        if not self.closed:
            self._give_credit()

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Arrived) and self.contact is not None:
            number = self.decoder.expected - 1
            message = Message(self.contact.rank, event.tag, event.payload, event.sent_at, number=number)
            self.contact.arrived += 1
            self._count(partial(self.owner._arrived, self.contact, message), ends=True)
        elif isinstance(event, Marked):
            if self.contact is not None:
                self.contact.marked.append((event.cut, event.message, self.contact.arrived))
                self.owner._pass_marks(self.contact)
        else:
            self._count(ends=True)

    def _greet(self, said: Hello) -> None:
        owner, rank = self.owner, said.rank
        if rank >= owner.size or rank == owner.rank:
            self.refuse(f"says that it is rank {rank} of {owner.size}")
            return
        security = owner._security
        if self.tls and security and not security.belongs_to(self.tls.certificate, rank):
            self.refuse(f"says that it is rank {rank}, but has not got its key")
            return
        contact = owner._peering.contact(rank)
        if not hmac.compare_digest(said.token, owner._token):
            if self.tls is not None:  # it's a peer, and shall know why
                self.write(hello(owner.rank, owner._token, owner.incarnation, said.connection))
            self.refuse(
                f"(rank {rank}) has the token of another run" if self.tls else "has the token of another run"
            )
        elif (stale := contact.stale(said.incarnation, said.connection)) is not None:
            self.refuse(f"says that it is rank {rank}, {stale}")
        else:
            self._known()
            owner._peering.meet(contact, said.incarnation)
            contact.hang_up()
            contact.incoming, self.contact = self, contact
            contact.answered = said.connection
            self.decoder.expect(contact.expected)
            self.write(hello(owner.rank, owner._token, owner.incarnation, said.connection, contact.expected))
            owner._peering.came(contact)

    def _count(self, deliver: Callable[[], None] | None = None, *, ends: bool = False) -> None:
        """Take what came in since the last time, and deliver the message that it completes."""
        nbytes = self.decoder.frame_bytes - self._counted
        self._counted += nbytes
        shaper = self.owner._shaper
        if shaper is not None and self.contact is not None and nbytes:
            taken = partial(self._take_credit, nbytes, self.decoder.chunk_bytes)
            shaper.arrive(self.contact.rank, nbytes, taken, ends, deliver)
            return
        self.owner.traffic.bytes_received += nbytes
        self._taken = self.decoder.chunk_bytes
        if deliver is not None:
            deliver()

    def _take_credit(self, nbytes: int, chunk_bytes: int) -> None:
        """The network lets some bytes through; with them, so many of chunks are here."""
        self.owner.traffic.bytes_received += nbytes
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
        if self.contact is not None:
            self._give_credit()

    def refuse(self, reason: str) -> None:
        self.close()
        if self.contact is None:
            who = f"stranger at {_show(self.link.get_extra_info('peername'))}"
            self.owner._guard.tell(self._host, f"{who} {reason}")
        else:
            self.owner._peering.refuse(self.contact, reason)

    def connection_lost(self, error: Exception | None) -> None:
        expected = self.closed
        super().connection_lost(error)
        contact = self.contact
        if contact is not None:
            if contact.incoming is self:
                contact.hang_up()
                self.owner._peering.gone(contact, str(error or "closed its connection"))
        elif not expected and not self.owner._guard.has_nodes(
            self._host
        ):  # as a node does that dies while it dials
            self.refuse("went away without saying who it is")
        self._known()

    def _known(self) -> None:
        """It has said who it is, or never will."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.owner._guard.leave(self._host, self)


@dataclass(eq=False, slots=True)
class _Expected:
    """A message that is accepted some seconds after so many bytes of its connection are acknowledged."""

    acknowledged: int
    after_s: float
    sending: OwnSending
    timed: bool = False


class Outgoing(Connection):
    """A connection that this node dialled: its messages go out, credit comes in.

    Args:
        owner: the node's transport.
        to: whom it dials.
    """

    def __init__(self, owner: Transport, to: Contact) -> None:
        security = owner._security
        super().__init__(owner, None, None if security is None else Tls(security.client, server_side=False))
        self.to = to
        self.greeted: asyncio.Future[str | None] = owner._loop.create_future()
        """Done when the peer has answered, or with why it has not."""
        self.written = 0
        self.unacknowledged = 0
        self._number = to.dialled
        self._expected: deque[_Expected] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing then waits until asyncio has handed everything to the kernel.
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

    def secured(self) -> None:
        security = self.owner._security
        assert self.tls is not None
        assert security is not None
        if security.belongs_to(self.tls.certificate, self.to.rank):
            self._say_hello()
        else:
            self.refuse("answered with another rank's key")

    def _say_hello(self) -> None:
        owner = self.owner
        self.write(hello(owner.rank, owner._token, owner.incarnation, self._number))

    def room(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes may be written now."""
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
            self._accept()
            self.owner._wake.set()

    def _greet(self, said: Hello) -> None:
        owner, contact = self.owner, self.to
        if said.rank != contact.rank or not hmac.compare_digest(said.token, owner._token):
            self.refuse(f"answered as rank {said.rank}, or with the token of another run")
        elif said.connection != self._number:
            self.refuse(f"answered connection {said.connection} on connection {self._number}")
        elif (stale := contact.stale(said.incarnation, None)) is not None:
            self.refuse(f"answered {stale}")
        else:
            owner._peering.meet(contact, said.incarnation)
            contact.resume(said.expected)
            self.contact = contact
            self.greeted.set_result(None)
            owner._peering.reached(contact, self)

    def accept_after(self, nbytes: int, after_s: float, sending: OwnSending) -> None:
        """A message is accepted so many seconds after so many bytes more are acknowledged."""
        self._expected.append(_Expected(self.written + nbytes, after_s, sending))

    def _accept(self) -> None:
        acknowledged = self.written - self.unacknowledged
        while self._expected and self._expected[0].sending.accepted:
            self._expected.popleft()
        for expected in self._expected:
            if expected.timed or expected.sending.accepted:  # (what was cancelled is never acknowledged)
                continue
            if acknowledged < expected.acknowledged:
                break
            expected.timed = True
            self.owner._loop.call_later(expected.after_s, expected.sending.accept)

    def refuse(self, reason: str) -> None:
        self.close()
        if self.contact is None:
            host, port = self.owner._addresses[self.to.rank][:2]
            self.owner._guard.tell(host, f"{self.to.rank} (dialled at {host}:{port}) {reason}")
            self._fail(reason)
        else:
            self.owner._peering.refuse(self.contact, reason)

    def _fail(self, why: str) -> None:
        if not self.greeted.done():
            self.greeted.set_result(why)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.owner._wake.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        why = str(error or "closed the connection")
        self._fail(why)
        for expected in self._expected:
            if expected.timed:  # (what is not acknowledged waits for the next connection)
                expected.sending.accept()
        if self.to.outgoing is self:
            self.owner._peering.broke(self.to, why)


def _show(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if address else "an unknown address"
