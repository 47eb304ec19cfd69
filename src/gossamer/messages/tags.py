"""Messages between nodes: tags, payloads, counters, and the handle of a message in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor

Tag = str | int | tuple[str | int, ...]
"""The subject of a message. A receiver requests a tag or a prefix of it."""

Payload = Any
"""None, bool, int (64 bits), float, str, bytes, a tensor of any dtype, :class:`Model`, :class:`Part`, :class:`Coded`, and
lists and dicts of these."""

WINDOW = 64 * 1024  # bytes of a message that may be sent and not yet acknowledged

INDEX_DTYPES = (
    *(torch.uint8, torch.uint16, torch.uint32),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
"""The types that the coordinates of a part may have."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""What a process counts. The sum over a thousand nodes is below 2^63, as tables need it."""

LONGEST_S = 1e10
"""The latest time of a run, and its longest duration, in seconds: three hundred years."""

_NO_BUFFERS = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Part:
    """A subset of a vector's coordinates, as sent by sparsifying codecs: the values [k], the coordinates
    (int64 [k]; other integers are converted), and the length of the whole vector. Coordinates are sent in the
    narrowest type that the length allows."""

    values: Tensor
    where: Tensor
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.where, Tensor) and self.where.dtype in INDEX_DTYPES:
            object.__setattr__(self, "where", self.where.long())

    def over(self, vector: Tensor) -> Tensor:
        """A copy of ``vector`` [size] with the values of this part at its coordinates."""
        return vector.scatter(0, self.where, self.values)


def dense(vector: Tensor | Part) -> Tensor:
    """A vector, with zeros at the coordinates that a part lacks."""
    return vector.over(vector.values.new_zeros(vector.size)) if isinstance(vector, Part) else vector


@dataclass(frozen=True, eq=False)
class Coded:
    """The parameters of a model as encoded by a codec: a tensor or a list. The result of
    :meth:`~gossamer.codecs.Codec.decode` is kept for other receivers of a broadcast in the same process."""

    payload: Payload
    decoded: list[Tensor | Part] = field(default_factory=list, init=False, repr=False)


class Model(NamedTuple):
    """A model: parameters (a flat vector, float32 [P]) and buffers (float32 [B]; integer buffers as whole numbers).

    Models support addition, subtraction, negation, and multiplication and division by numbers; these apply to
    parameters and buffers. The model in a message may have only some of the parameters, as a :class:`Part`;
    :meth:`over` fills in the rest."""

    parameters: Tensor
    buffers: Tensor = _NO_BUFFERS

    def over(self, own: Model) -> Model:
        """The whole model, with the values of ``own`` where this model has none."""
        part: Any = self.parameters
        return Model(part.over(own.parameters), self.buffers) if isinstance(part, Part) else self

    def flatten(self) -> Tensor:
        """Parameters and buffers in one vector [P + B]."""
        return torch.cat(tuple(self))

    def unflatten(self, v: Tensor) -> Model:
        """The model in such a vector."""
        return Model(v[: len(self.parameters)], v[len(self.parameters) :])

    def _apply(self, function: Callable[..., Tensor], *others: Any) -> Model:
        of_parameters = [other.parameters if isinstance(other, Model) else other for other in others]
        parameters, buffers = function(self.parameters, *of_parameters), self.buffers
        of_buffers = [other.buffers if isinstance(other, Model) else other for other in others]
        # Most models have none, and an operation on nothing takes as long as one on a short vector.
        if any(vector.numel() for vector in (buffers, *of_buffers) if isinstance(vector, Tensor)):
            buffers = function(buffers, *of_buffers)
        return Model(parameters, buffers)

    def __add__(self, other: Model) -> Model:  # type: ignore[override]
        return self._apply(torch.add, other)

    def __sub__(self, other: Model) -> Model:
        return self._apply(torch.sub, other)

    def __neg__(self) -> Model:
        return self._apply(torch.neg)

    def __mul__(self, factor: float) -> Model:  # type: ignore[override]
        return self._apply(torch.mul, factor)

    def __rmul__(self, factor: float) -> Model:  # type: ignore[override]
        return self * factor

    def __truediv__(self, divisor: float) -> Model:
        return self._apply(torch.div, divisor)


class Message(Struct, frozen=True, eq=False, repr_omit_defaults=True):
    """One message as its receiver sees it; ``sent_at`` is the sender's clock in seconds when it was queued.
    Tensors in the payload are immutable: compute new ones. ``number`` counts a pair's messages for the
    engine's checkpoints; it is -1 if they are not counted. ``again`` marks a message that a restarted node has
    from its checkpoint: the node's counters, which go on, include it already. ``values`` counts the values in the tag and in
    the containers of the payload; it is 1 if they are not counted, since the sender is in the same process. ``form`` is the
    form of the payload (:class:`~gossamer.node.expectations.Expectations`) once it is known; all receivers of a broadcast
    share it."""

    source: int
    tag: tuple[str | int, ...]
    payload: Payload
    sent_at: float
    versions: tuple[tuple[Tensor, int], ...] = ()
    number: int = -1
    again: bool = False
    values: int = 1
    form: list[Any] = []

    def unchanged(self) -> bool:
        """Whether its tensors, which the receivers of a broadcast may share, have not been modified."""
        for tensor, version in self.versions:  # noqa: SIM110 - called for every message; all() takes three times as long
            if tensor._version != version:
                return False
        return True


@dataclass(slots=True)
class Traffic:
    """The traffic of one node so far: whole frames with their headers, without handshakes and credit.

    Summed over all nodes: sent = received + lost + in flight, and received = taken + late + superseded + refused +
    unread. Cancelled and unsent messages are in none of these."""

    bytes_sent: Count = 0  # including the sent parts of cancelled and lost messages
    bytes_received: Count = 0
    messages_sent: Count = 0  # whole messages that have left this node, including lost ones
    messages_received: Count = 0  # whole messages that have arrived at this node
    messages_cancelled: Count = 0  # cancelled by this node before or during transmission
    messages_lost: Count = (
        0  # sent by this node and lost by the network, or on the way to a node that was away
    )
    messages_unsent: Count = 0  # calls to a peer known to be away: nothing was sent
    messages_late: Count = 0  # arrived after this node continued without them (gather), or had ended
    messages_superseded: Count = 0  # arrived and were replaced by a newer one (drain)
    messages_taken: Count = 0  # arrived and were used: by this node's algorithm, or by a service of the node
    messages_refused: Count = (
        0  # arrived malformed, above the limit of unread ones, or were dropped by a wrapper
    )

    def add(self, other: Traffic) -> None:
        """Add another node's traffic, or more of this node's."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTERS = tuple(counter.name for counter in fields(Traffic))
"""The names of the counters of a node's traffic."""


class Sending(ABC):
    """A message that was queued. Awaiting it returns when at most one window of it is still unacknowledged."""

    __slots__ = ()

    @abstractmethod
    def __await__(self) -> Generator[Any, None, None]: ...

    @abstractmethod
    def done(self) -> bool:
        """Whether awaiting it would return at once."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancel the message: it is removed if it is still queued; otherwise it stops at the next chunk, and
        the receiver discards it. Returns True if the receiver won't see it, False if it was already sent
        completely."""


PRIVATE = "~"
"""With what the first part of a private tag begins."""


class PrivateTag(tuple[str | int, ...]):
    """The tag of something that acts around a node, such as a middleware. The algorithm neither sends nor takes messages
    under it."""

    __slots__ = ()


def is_private(tag: tuple[str | int, ...]) -> bool:
    """Whether messages under this tag, or prefix of one, are not the algorithm's."""
    return bool(tag) and type(tag[0]) is str and tag[0].startswith(PRIVATE)


def as_tag(tag: Tag) -> tuple[str | int, ...]:
    """The tuple form of a tag: ``"model"`` is ``("model",)``; TypeError for anything but str, int and tuples of these."""
    if type(tag) is int or type(tag) is str:
        return (tag,)
    parts = tag if isinstance(tag, tuple) else (tag,)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int):
            kind = type(part).__name__
            raise TypeError(f"tag {tag!r}: {kind} in a tag; accepted: str, int, or a tuple of these")
    return parts


def given_tag(tag: Tag) -> tuple[str | int, ...]:
    """The tuple form of a tag that is given to a node. Errors are those of :func:`as_tag`, and ValueError for a tag that
    begins with ``~`` and is no :class:`PrivateTag`."""
    if type(tag) is int:
        return (tag,)
    parts = as_tag(tag)
    if is_private(parts) and type(parts) is not PrivateTag:
        raise ValueError(
            f"tag {tag!r}: such tags are private; accepted: tags that do not begin with {PRIVATE}"
        )
    return parts


def matches(prefix: tuple[str | int, ...], tag: tuple[str | int, ...]) -> bool:
    """Whether a tag begins with a prefix."""
    return tag[: len(prefix)] == prefix
