"""A connection, whoever dialled: who dialled sends messages on it (outgoing.py), who was dialled acknowledges them
(incoming.py)."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from gossamer.messages import FrameError
from gossamer.runtime.processes.security.tls import Tls
from gossamer.runtime.processes.transport.contact import Contact, Contacts
from gossamer.runtime.processes.transport.decoder import Decoder
from gossamer.runtime.processes.transport.endpoint import Endpoint
from gossamer.runtime.processes.transport.link import Outward
from gossamer.runtime.processes.transport.wire import Beat, Event, Left, beat, leave


@runtime_checkable
class Keeper(Protocol):
    """Whom connections tell what they learn of peers (peering.py)."""

    contacts: Contacts

    def meet(self, contact: Contact, incarnation: int) -> None:
        """A peer has named its incarnation, on a new connection."""

    def came(self, contact: Contact) -> None:
        """A peer has dialled this node."""

    def reached(self, contact: Contact, link: Outward) -> None:
        """A peer has answered this node."""

    def gone(self, contact: Contact, why: str) -> None:
        """A connection that a peer had dialled is gone."""

    def broke(self, contact: Contact, why: str) -> None:
        """A connection to a peer is gone."""

    def left(self, contact: Contact) -> None:
        """A peer has closed its connections on purpose."""

    def heard(self, contact: Contact, status: bytes) -> None:
        """A heartbeat has come in."""

    def refuse(self, contact: Contact, reason: str) -> None:
        """A peer does what no peer does."""


class Connection(asyncio.BufferedProtocol):
    """What both directions share: reading into the node's one buffer, heartbeats, and refusing what is wrong.

    Args:
        end: this node's end of all of them.
        keeper: told what is learnt of the peer.
        limit: see :class:`~gossamer.runtime.processes.transport.decoder.Decoder`.
        tls: None is none.
    """

    link: asyncio.Transport

    def __init__(self, end: Endpoint, keeper: Keeper, limit: int | None, tls: Tls | None) -> None:
        self.end, self.keeper = end, keeper
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
                self._open(self.tls, data)
        except FrameError as error:
            self.refuse(str(error))

    def _open(self, tls: Tls, data: memoryview) -> None:
        insecure = not tls.secure
        try:
            for piece in tls.open(data, self.end.opened):
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
                    self.keeper.heard(self.contact, event.status)
            elif type(event) is Left:
                if self.contact is not None:
                    self.keeper.left(self.contact)
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
        self.end.connections.discard(self)
        self.end.wake()

    def close(self) -> None:
        """Close at once, without waiting for a peer that does not read."""
        self.closed = True
        self.link.abort()
