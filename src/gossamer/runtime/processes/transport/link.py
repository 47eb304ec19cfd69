"""A connection, as those see it who neither make it nor read from it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gossamer.runtime.processes.transport.sending import OwnSending


@runtime_checkable
class Link(Protocol):
    """A connection with a peer, in one direction or the other."""

    closed: bool

    def beat(self, status: bytes, *, always: bool) -> None:
        """Say how this node is, if that is new; ``always``, that it's alive, if nothing was said since the last time."""

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more will come."""

    def close(self) -> None:
        """Close at once, without waiting for a peer that does not read."""


@runtime_checkable
class Inward(Link, Protocol):
    """One that the peer dialled."""

    @property
    def expected(self) -> int:
        """The number of the message that is to come next, or must come again if the connection ends here."""


@runtime_checkable
class Outward(Link, Protocol):
    """One that this node dialled, and that was answered.

    Attributes:
        writable: whether the kernel has taken all that was written.
        written: bytes of chunks, headers apart.
        unacknowledged: those of them that the peer has not acknowledged.
    """

    writable: bool
    written: int
    unacknowledged: int

    def room(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes may be written now."""

    def write(self, frame: bytes) -> None:
        """Write a frame."""

    def accept_after(self, nbytes: int, after_s: float, sending: OwnSending) -> None:
        """A message is accepted so many seconds after so many bytes more are acknowledged."""
