"""The end of a connection that was dialled: it acknowledges what comes in."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.messages import CHUNK_BYTES
from gossamer.messages.tags import WINDOW, Message
from gossamer.runtime.processes.security.tls import Tls
from gossamer.runtime.processes.transport.connection import Connection, Keeper
from gossamer.runtime.processes.transport.contact import Contact
from gossamer.runtime.processes.transport.endpoint import Endpoint
from gossamer.runtime.processes.transport.marks import Marks
from gossamer.runtime.processes.transport.wire import Arrived, Event, Hello, Marked, credit, hello

HELLO_TIMEOUT_S = 10.0
"""Seconds that a new connection may take to say, and prove, who it is."""


class Incoming(Connection):
    """A connection that a peer dialled: its messages come in, credit goes out.

    Args:
        end: this node's end of all connections.
        keeper: told what is learnt of the peer.
        marks: told of the peer's cuts.
    """

    def __init__(self, end: Endpoint, keeper: Keeper, marks: Marks) -> None:
        security = end.security
        super().__init__(
            end, keeper, end.limit, None if security is None else Tls(security.server, server_side=True)
        )
        self._marks = marks
        self._host = ""
        self._counted = 0
        self._taken = 0
        self._credited = 0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def expected(self) -> int:
        """The number of the message that is to come next, or must come again if the connection ends here."""
        return self.decoder.expected

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
        self.end.guard.enter(host, self)

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
            number = self.expected - 1
            message = Message(self.contact.rank, event.tag, event.payload, event.sent_at, number=number)
            self.contact.arrived += 1
            self._count(partial(self._deliver, self.contact, message), ends=True)
        elif isinstance(event, Marked):
            if self.contact is not None:
                self._marks.hear(self.contact, event.cut, event.message)
        else:
            self._count(ends=True)

    def _greet(self, said: Hello) -> None:
        end, rank = self.end, said.rank
        if rank >= end.size or rank == end.rank:
            self.refuse(f"says that it is rank {rank} of {end.size}")
            return
        security = end.security
        if self.tls and security and not security.belongs_to(self.tls.certificate, rank):
            self.refuse(f"says that it is rank {rank}, but has not got its key")
            return
        contact = self.keeper.contacts[rank]
        if not hmac.compare_digest(said.token, end.token):
            if self.tls is not None:  # it's a peer, and shall know why
                self.write(hello(end.rank, end.token, end.incarnation, said.connection))
            self.refuse(
                f"(rank {rank}) has the token of another run" if self.tls else "has the token of another run"
            )
        elif (stale := contact.stale(said.incarnation, said.connection)) is not None:
            self.refuse(f"says that it is rank {rank}, {stale}")
        else:
            self._known()
            self.keeper.meet(contact, said.incarnation)
            contact.hang_up()
            contact.incoming, self.contact = self, contact
            contact.answered = said.connection
            self.decoder.expect(contact.expected)
            self.write(hello(end.rank, end.token, end.incarnation, said.connection, contact.expected))
            self.keeper.came(contact)

    def _deliver(self, contact: Contact, message: Message) -> None:
        self.end.traffic.messages_received += 1
        self.end.deliver(message)
        contact.delivered += 1
        self._marks.pass_on(contact)

    def _count(self, deliver: Callable[[], None] | None = None, *, ends: bool = False) -> None:
        """Take what came in since the last time, and deliver the message that it completes."""
        nbytes = self.decoder.frame_bytes - self._counted
        self._counted += nbytes
        shaper = self.end.shaper
        if shaper is not None and self.contact is not None and nbytes:
            taken = partial(self._take_credit, nbytes, self.decoder.chunk_bytes)
            shaper.arrive(self.contact.rank, nbytes, taken, ends, deliver)
            return
        self.end.traffic.bytes_received += nbytes
        self._taken = self.decoder.chunk_bytes
        if deliver is not None:
            deliver()

    def _take_credit(self, nbytes: int, chunk_bytes: int) -> None:
        """The network lets some bytes through; with them, so many of chunks are here."""
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
        if self.contact is not None:
            self._give_credit()

    def refuse(self, reason: str) -> None:
        self.close()
        if self.contact is None:
            who = f"stranger at {_show(self.link.get_extra_info('peername'))}"
            self.end.guard.tell(self._host, f"{who} {reason}")
        else:
            self.keeper.refuse(self.contact, reason)

    def connection_lost(self, error: Exception | None) -> None:
        expected = self.closed
        super().connection_lost(error)
        contact = self.contact
        if contact is not None:
            if contact.incoming is self:
                contact.hang_up()
                self.keeper.gone(contact, str(error or "closed its connection"))
        elif not (
            expected or self.end.guard.has_nodes(self._host)
        ):  # as a node does that dies while it dials
            self.refuse("went away without saying who it is")
        self._known()

    def _known(self) -> None:
        """It has said who it is, or never will."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.end.guard.leave(self._host, self)


def _show(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if address else "an unknown address"
