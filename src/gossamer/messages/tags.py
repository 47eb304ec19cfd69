"""Messages between nodes: tags, payloads, counters, and the handle of a message on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tag = str | int | tuple[str | int, ...]
"""The subject of a message; a receiver asks for a tag or for a prefix of it."""

Payload = Any
"""None, bool, int (64 bits), float, str, bytes, a tensor of any dtype, :class:`Model`, :class:`Part`, :class:`Coded`, and
lists and dicts of these."""

WINDOW = 64 * 1024  # bytes of a message that may be sent and not yet acknowledged

INDEX_DTYPES = (
    *(torch.uint8, torch.uint16, torch.uint32),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
"""The types that the coordinates of a part may have."""

_NO_BUFFERS = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Part:
    """Some coordinates of a vector, as sparsifying codecs send them: their values [k], the coordinates (int64 [k]; other
    integers are converted), and the length of the whole vector. Coordinates travel in as few bytes as the length needs."""

    values: Tensor
    where: Tensor
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.where, Tensor) and self.where.dtype in INDEX_DTYPES:
            object.__setattr__(self, "where", self.where.long())

    def over(self, vector: Tensor) -> Tensor:
        """A new vector: these coordinates, and those of ``vector`` [size] elsewhere."""
        return vector.scatter(0, self.where, self.values)


def dense(vector: Tensor | Part) -> Tensor:
    """A vector, with zeros at the coordinates that a part lacks."""
    return vector.over(vector.values.new_zeros(vector.size)) if isinstance(vector, Part) else vector


@dataclass(frozen=True, eq=False)
class Coded:
    """The parameters of a model as a codec has encoded them: a tensor or a list. What
    :meth:`~gossamer.codecs.Codec.decode` makes of it is kept for other receivers of a broadcast in one process."""

    payload: Payload
    decoded: list[Tensor | Part] = field(default_factory=list, init=False, repr=False)


class Model(NamedTuple):
    """A model: parameters (a flat vector, float32 [P]) and buffers (float32 [B]; integer buffers as whole numbers).

    Models are added, subtracted, negated, and multiplied and divided by numbers, parameters and buffers alike. The model
    of a message may have only some of its parameters, as a :class:`Part`; :meth:`over` fills in the rest."""

    parameters: Tensor
    buffers: Tensor = _NO_BUFFERS

    def over(self, own: Model) -> Model:
        """The whole model, with the values of ``own`` where this one has none."""
        part: Any = self.parameters
        return Model(part.over(own.parameters), self.buffers) if isinstance(part, Part) else self

    def flatten(self) -> Tensor:
        """Parameters and buffers in one vector [P + B]."""
        return torch.cat(tuple(self))

    def unflatten(self, v: Tensor) -> Model:
        """The model that such a vector stands for."""
        return Model(v[: len(self.parameters)], v[len(self.parameters) :])

    def _each(self, function: Callable[..., Tensor], *others: Any) -> Model:
        pairs = [other if isinstance(other, Model) else (other, other) for other in others]
        return Model(*(function(*halves) for halves in zip(self, *pairs, strict=True)))

    def __add__(self, other: Model) -> Model:  # type: ignore[override]
        return self._each(torch.add, other)

    def __sub__(self, other: Model) -> Model:
        return self._each(torch.sub, other)

    def __neg__(self) -> Model:
        return self._each(torch.neg)

    def __mul__(self, factor: float) -> Model:  # type: ignore[override]
        return self._each(torch.mul, factor)

    def __rmul__(self, factor: float) -> Model:  # type: ignore[override]
        return self * factor

    def __truediv__(self, divisor: float) -> Model:
        return self._each(torch.div, divisor)


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """One message as its receiver sees it; ``sent_at`` is the sender's clock in seconds when it was queued.
    Tensors in the payload are immutable: compute new ones. ``number`` counts a pair's messages for the engine's
    checkpoints; -1 where nobody counts. ``form`` has the form of the payload
    (:class:`~gossamer.node.expectations.Expectations`) once it is known; all receivers of a broadcast share it."""

    source: int
    tag: tuple[str | int, ...]
    payload: Payload
    sent_at: float
    versions: tuple[tuple[Tensor, int], ...] = ()
    number: int = -1
    form: list[Any] = field(default_factory=list, repr=False, compare=False)

    def unchanged(self) -> bool:
        """Whether nobody has written the tensors in it, which receivers of one broadcast may share."""
        for tensor, version in self.versions:  # noqa: SIM110 - asked of every message; all() takes three times as long
            if tensor._version != version:
                return False
        return True


@dataclass(slots=True)
class Traffic:
    """The traffic of one node so far: whole frames with their headers, without handshakes and credit."""

    bytes_sent: int = 0  # cancelled and lost messages included as far as they were sent
    bytes_received: int = 0
    messages_sent: int = 0  # whole messages that have left this node, lost ones included
    messages_received: int = 0
    messages_cancelled: int = 0  # taken back by this node, before or while they were sent
    messages_lost: int = 0  # of this node, by the network or for a dead peer
    messages_late: int = 0  # came in after this node went on without them (gather), or had ended
    messages_superseded: int = 0  # came in and gave way to a newer one (drain)
    messages_taken: int = 0  # came in and were taken by this node's algorithm
    messages_refused: int = 0  # came in and were malformed


class Sending(ABC):
    """A message that was queued. Awaiting it returns when at most one window of it is still unacknowledged."""

    @abstractmethod
    def __await__(self) -> Generator[Any, None, None]: ...

    @abstractmethod
    def done(self) -> bool:
        """Whether awaiting it would return at once."""

    @abstractmethod
    def cancel(self) -> bool:
        """Take the message back: removed if still queued, else stopped at the next chunk and discarded by the receiver. True
        if the receiver won't see it; False if it was already sent whole."""


def as_tag(tag: Tag) -> tuple[str | int, ...]:
    """The tuple form of a tag: ``"model"`` is ``("model",)``; TypeError for anything but str, int and tuples of these."""
    if type(tag) is int or type(tag) is str:
        return (tag,)
    parts = tag if isinstance(tag, tuple) else (tag,)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            found = type(part).__name__
            raise TypeError(f"tag {tag!r}: {found} in a tag; accepted: str, int, or a tuple of these")
    return parts


def matches(prefix: tuple[str | int, ...], tag: tuple[str | int, ...]) -> bool:
    """Whether a tag begins with a prefix."""
    return tag[: len(prefix)] == prefix
