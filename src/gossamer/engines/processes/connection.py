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

from gossamer.engines.processes.sending import OwnSending
from gossamer.engines.processes.wire import Arrived, Credited, Decoder, Event, Hello, credit, hello
from gossamer.messages import WINDOW, Message
from gossamer.payload import CHUNK_BYTES, FrameError

if TYPE_CHECKING:
    from gossamer.engines.processes.transport import Transport

HELLO_TIMEOUT_S = 10.0
"""Seconds that a new connection may take to say who it is."""


class Connection(asyncio.BufferedProtocol):
    """What both directions share: reading into the transport's one buffer, and refusing what is wrong."""

    link: asyncio.Transport

    def __init__(self, owner: Transport, limit: int | None) -> None:
        self.owner = owner
        self.decoder = Decoder(limit)
        self.closed = False
        self.writable = True

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
        try:
            for event in self.decoder.feed(self.owner._received[:nbytes]):
                self.handle(event)
                if self.closed:
                    return
        except FrameError as error:
            self.refuse(str(error))

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        raise NotImplementedError

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
        super().__init__(owner, owner.limit)
        self.rank: int | None = None
        self._counted = 0
        self._taken = 0
        self._credited = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.closed:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(
                HELLO_TIMEOUT_S, self.refuse, f"did not say who it is within {HELLO_TIMEOUT_S} s"
            )

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        self._count()
        if not self.closed:
            self._give_credit()

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            self._greet(event)
        elif isinstance(event, Arrived) and self.rank is not None:
            message = Message(self.rank, event.tag, event.payload, event.sent_at)
            self._count(partial(self.owner._arrived, message), ends=True)
        else:
            self._count(ends=True)

    def _greet(self, said: Hello) -> None:
        owner = self.owner
        if not hmac.compare_digest(said.token, owner._token):
            self.refuse("has the token of another run")
        elif said.rank >= len(owner._addresses) or said.rank == owner.rank:
            self.refuse(f"says that it is rank {said.rank} of {len(owner._addresses)}")
        elif said.rank in owner._incoming:
            self.refuse(f"says that it is rank {said.rank}, which is connected already")
        else:
            self._no_deadline()
            self.rank = said.rank
            owner._incoming[said.rank] = self
            self.link.write(hello(owner.rank, owner._token))

    def _count(self, deliver: Callable[[], None] | None = None, *, ends: bool = False) -> None:
        """Take what came in since the last time, and deliver the message that it completes."""
        nbytes = self.decoder.frame_bytes - self._counted
        self._counted += nbytes
        shaper = self.owner._shaper
        if shaper is not None and self.rank is not None and nbytes:
            shaper.arrive(
                self.rank, nbytes, partial(self._take, nbytes, self.decoder.chunk_bytes), ends, deliver
            )
            return
        self.owner.traffic.bytes_received += nbytes
        self._taken = self.decoder.chunk_bytes
        if deliver is not None:
            deliver()

    def _take(self, nbytes: int, chunk_bytes: int) -> None:
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
            self.link.write(credit(due))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._give_credit()

    def refuse(self, reason: str) -> None:
        self.close()
        who = f"stranger at {_show(self.link.get_extra_info('peername'))}" if self.rank is None else self.rank
        self.owner._event("refused", f"{who} {reason}")
        if self.rank is not None:
            self.owner._lose(self.rank, f"refused: {reason}")

    def connection_lost(self, error: Exception | None) -> None:
        self._no_deadline()
        expected = self.closed
        super().connection_lost(error)
        if self.rank is not None:
            if self.owner._incoming.get(self.rank) is self:
                del self.owner._incoming[self.rank]
            if not expected:
                self.owner._lose(self.rank, str(error or "closed its connection"))
        elif not expected:
            self.refuse("went away without saying who it is")

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@dataclass(eq=False, slots=True)
class _Expected:
    """A message that is accepted some seconds after so many bytes of its connection are acknowledged."""

    acknowledged: int
    after_s: float
    sending: OwnSending
    timed: bool = False


class Outgoing(Connection):
    """A connection that this node dialled: its messages go out, credit comes in."""

    def __init__(self, owner: Transport, to: int) -> None:
        super().__init__(owner, None)
        self.to = to
        self.begun = 0
        self.written = 0
        self.unacknowledged = 0
        self._expected: deque[_Expected] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Writing then waits until asyncio has handed everything to the kernel.
        self.link.set_write_buffer_limits(high=0)
        dialled = self.link.get_extra_info("socket")
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK_BYTES)
        if not self.closed:
            self.link.write(hello(self.owner.rank, self.owner._token))

    def room(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes may be written now."""
        return self.writable and self.unacknowledged + nbytes <= WINDOW

    def handle(self, event: Event) -> None:
        if isinstance(event, Hello):
            if event.rank != self.to or not hmac.compare_digest(event.token, self.owner._token):
                self.refuse(f"answered as rank {event.rank}, or with the token of another run")
        elif isinstance(event, Credited):
            if event.nbytes > self.unacknowledged:
                self.refuse(f"acknowledged {event.nbytes} bytes of {self.unacknowledged}")
                return
            self.unacknowledged -= event.nbytes
            self._accept()
            self.owner._wake.set()

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
        self.owner._event("refused", f"{self.to} {reason}")
        self.owner._lose(self.to, f"refused: {reason}")

    def resume_writing(self) -> None:
        super().resume_writing()
        self.owner._wake.set()

    def connection_lost(self, error: Exception | None) -> None:
        expected = self.closed
        super().connection_lost(error)
        if self.owner._outgoing.get(self.to) is self:
            del self.owner._outgoing[self.to]
        for unacknowledged in self._expected:
            unacknowledged.sending.accept()
        if not expected:
            self.owner._lose(self.to, str(error or "closed the connection"))


def _show(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if address else "an unknown address"
