"""The end of a connection that dialled: messages go out on it, under the peer's credit."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import deque
from dataclasses import dataclass

from gossamer.messages import CHUNK_BYTES
from gossamer.messages.tags import WINDOW
from gossamer.runtime.processes.security.tls import Tls
from gossamer.runtime.processes.transport.connection import Connection, Keeper
from gossamer.runtime.processes.transport.contact import Contact
from gossamer.runtime.processes.transport.endpoint import Endpoint
from gossamer.runtime.processes.transport.sending import OwnSending
from gossamer.runtime.processes.transport.wire import Credited, Event, Hello, hello


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
        end: this node's end of all connections.
        keeper: told what is learnt of the peer.
        to: whom it dials.
    """

    def __init__(self, end: Endpoint, keeper: Keeper, to: Contact) -> None:
        security = end.security
        super().__init__(
            end, keeper, None, None if security is None else Tls(security.client, server_side=False)
        )
        self.to = to
        self.greeted: asyncio.Future[str | None] = end.loop.create_future()
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
        security = self.end.security
        assert self.tls is not None
        assert security is not None
        if security.belongs_to(self.tls.certificate, self.to.rank):
            self._say_hello()
        else:
            self.refuse("answered with another rank's key")

    def _say_hello(self) -> None:
        end = self.end
        self.write(hello(end.rank, end.token, end.incarnation, self._number))

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
            self.end.wake()

    def _greet(self, said: Hello) -> None:
        end, contact = self.end, self.to
        if said.rank != contact.rank:
            self.refuse(f"answered as rank {said.rank}")
        elif not hmac.compare_digest(said.token, end.token):
            self.refuse("answered with the token of another run")
        elif said.connection != self._number:
            self.refuse(f"answered connection {said.connection} on connection {self._number}")
        elif (stale := contact.stale(said.incarnation, None)) is not None:
            self.refuse(f"answered {stale}")
        else:
            self.keeper.meet(contact, said.incarnation)
            contact.resume(said.expected)
            self.contact = contact
            self.greeted.set_result(None)
            self.keeper.reached(contact, self)

    def accept_after(self, nbytes: int, after_s: float, sending: OwnSending) -> None:
        """A message is accepted so many seconds after so many bytes more are acknowledged."""
        self._expected.append(_Expected(self.written + nbytes, after_s, sending))

    def _accept(self) -> None:
        acknowledged = self.written - self.unacknowledged
        while self._expected and self._expected[0].sending.done():
            self._expected.popleft()
        for expected in self._expected:
            if expected.timed or expected.sending.done():  # (what was cancelled is never acknowledged)
                continue
            if acknowledged < expected.acknowledged:
                break
            expected.timed = True
            self.end.loop.call_later(expected.after_s, expected.sending.accept)

    def refuse(self, reason: str) -> None:
        self.close()
        if self.contact is None:
            host, port = self.end.addresses[self.to.rank][:2]
            self.end.guard.tell(host, f"{self.to.rank} (dialled at {host}:{port}) {reason}")
            self._fail(reason)
        else:
            self.keeper.refuse(self.contact, reason)

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
        for expected in self._expected:
            if expected.timed:  # (what is not acknowledged waits for the next connection)
                expected.sending.accept()
        if self.to.outgoing is self:
            self.keeper.broke(self.to, why)
