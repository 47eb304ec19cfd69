"""What nodes say to each other: tags, messages, and the handle of a message on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Tag = str | int | tuple[str | int, ...]
"""What a message is about; a receiver asks for a tag or for a prefix of it."""

Payload = Any
"""None, bool, int (64 bits), float, str, bytes, a tensor of any dtype, :class:`Part`, :class:`Model`, and
lists and dicts of these."""

WINDOW = 64 * 1024
"""Bytes of a message that may be sent and not yet acknowledged."""


class Model(NamedTuple):
    """Parameters (flat vector, float32 [P]) and buffers (float32 [B]; integer buffers as whole numbers)."""

    parameters: Tensor
    buffers: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Some coordinates of a vector.

    Args:
        values: the coordinates' values, shape [k].
        where: the first of k consecutive coordinates; or the name of an index set that sender and receiver
            have registered (``Node.index_set``), so that no index travels; or the indices themselves, an
            integer tensor of shape [k].
        size: length of the whole vector.
    """

    values: Tensor
    where: int | str | Tensor
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """One message as its receiver sees it; ``sent_at`` is the sender's clock in seconds when it was queued.
    Tensors in the payload are immutable: compute new ones. ``number`` counts a pair's messages for the engine's
    checkpoints; -1 where nobody counts."""

    source: int
    tag: tuple[str | int, ...]
    payload: Payload
    sent_at: float
    versions: tuple[tuple[Tensor, int], ...] = ()
    number: int = -1

    def unchanged(self) -> bool:
        """Whether nobody has written the tensors in it, which receivers of one broadcast may share."""
        for tensor, version in self.versions:  # noqa: SIM110 - asked of every message; all() takes three times as long
            if tensor._version != version:
                return False
        return True


@dataclass(slots=True)
class Traffic:
    """What one node has put on and taken from the wire so far: whole frames, headers included, handshakes and
    credit not.

    Args:
        bytes_sent: by this node, cancelled and lost messages included as far as they were sent.
        bytes_received: by this node.
        messages_sent: whole messages that have left this node, lost ones included.
        messages_received: messages that came in.
        messages_cancelled: messages of this node that it took back, before or while they were sent.
        messages_lost: messages of this node that the network lost, or that were for a dead peer.
        messages_late: messages that came in after this node went on without them (:meth:`Node.gather`), or had ended.
        messages_superseded: messages that came in and gave way to a newer one (:meth:`Node.drain`).
        messages_taken: messages that came in and were taken by this node's algorithm.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_cancelled: int = 0
    messages_lost: int = 0
    messages_late: int = 0
    messages_superseded: int = 0
    messages_taken: int = 0


class Sending(ABC):
    """A message that was queued. Awaiting it returns when at most one window of it is still
    unacknowledged."""

    @abstractmethod
    def __await__(self) -> Generator[Any, None, None]: ...

    @abstractmethod
    def cancel(self) -> bool:
        """Take the message back: removed if still queued, else stopped at the next chunk and discarded by the
        receiver.

        Returns:
            True if the receiver won't see the message; False if it was already sent whole.
        """


def as_tag(tag: Tag) -> tuple[str | int, ...]:
    """The tuple form of a tag: ``"model"`` is ``("model",)``.

    Raises:
        TypeError: for anything but str, int and tuples of these.
    """
    if type(tag) is int or type(tag) is str:
        return (tag,)
    parts = tag if isinstance(tag, tuple) else (tag,)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise TypeError(
                f"tag {tag!r}: {type(part).__name__} in a tag; accepted: str, int, or a tuple of these"
            )
    return parts


def matches(prefix: tuple[str | int, ...], tag: tuple[str | int, ...]) -> bool:
    """Whether a tag begins with a prefix."""
    return tag[: len(prefix)] == prefix
