"""Mixing: weighted sums of vectors, some of which may be missing or known only in part.

Sums run in rank order, whatever the order of arrival, and use the same kernels under every engine, so that engines agree
to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gossamer.messages.tags import Model, Part

if TYPE_CHECKING:
    from gossamer.learning.aggregators import Aggregator

Missing = Literal["own", "renormalize"]
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch adds no unsigned integers but bytes; the bits of a sum are the same."""
Fresh = Callable[[int], Tensor]
"""length -> a new, writable vector"""


@dataclass(frozen=True, eq=False, slots=True)
class Mix:
    """A mixing step that a node asked for: the arguments of :func:`combine`, and the aggregator that replaces it, if any."""

    own: Any
    inbox: Mapping[int, Any]
    weights: Mapping[int, float]
    self_weight: float | None
    missing: Missing | None
    aggregator: Aggregator | None = None
    absent: Missing = "own"

    def run(self, fresh: Fresh) -> Any:
        """The result, in a vector that ``fresh`` creates."""
        given = self.own, self.inbox, self.weights, self.self_weight
        if self.aggregator is not None:
            return self.aggregator.mix(*given, fresh)
        return combine(*given, missing=self.missing, absent=self.absent, fresh=fresh)

    def terms(self) -> tuple[list[Tensor], list[float]] | None:
        """Vectors and their weights in the order of the sum, if this is a weighted sum of whole vectors; else None."""
        rule = self.missing or ("own" if len(self.inbox) == len(self.weights) else self.absent)
        if self.aggregator is not None or rule != "own" or type(self.own) is not Tensor:
            return None
        inbox, vectors = self.inbox, [self.own]
        ranks = sorted(inbox)
        for rank in ranks:
            if type(inbox[rank]) is not Tensor:
                return None
            vectors.append(inbox[rank])
        own = own_weight(inbox, self.weights, self.self_weight)
        return vectors, [own, *[self.weights[rank] for rank in ranks]]


def combine(
    own: Any,
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None = None,
    *,
    missing: Missing | None = None,
    absent: Missing = "own",
    fresh: Fresh = torch.empty,
) -> Any:
    """``self_weight * own + sum_j weights[j] * inbox[j]``, per coordinate.

    The order of the sum, to the bit: the own vector times its weight, then rank by rank a fused multiply-add. Where own
    values replace missing coordinates, a part's weight is added to that of the own vector first, and then
    ``weight * (values - own)`` at the part's coordinates, so that only these are touched.

    Args:
        own: a vector float32 [n], or a :class:`Model`; integers [n] are summed modulo 2^bits, with whole weights.
        inbox: rank -> a vector [n], a :class:`Part` of one, or a :class:`Model` if ``own`` is one.
        weights: rank -> weight, at least for every rank in the inbox.
        self_weight: weight of ``own``; None is one minus the sum of ``weights``.
        missing: for a coordinate that a rank in ``weights`` did not send, ``"own"`` takes the own value (the weight goes to
            self), and ``"renormalize"`` leaves it out and divides by the weight that is present. None is ``absent`` for
            ranks that sent nothing, and ``"own"`` for the coordinates that a part lacks.
        absent: see ``missing``.
        fresh: creates the result's vector.

    Returns:
        A new vector [n], or a new Model.

    Raises:
        ValueError: for a rank without a weight, or lengths that differ.
    """
    if isinstance(own, Model):
        halves = [{rank: half(payload, which) for rank, payload in inbox.items()} for which in range(2)]
        rule: dict[str, Any] = {"missing": missing, "absent": absent, "fresh": fresh}
        return Model(
            *(combine(*each, weights, self_weight, **rule) for each in zip(own, halves, strict=True))
        )
    if isinstance(own, Tensor) and not own.is_floating_point():
        return _ring_sum(own, inbox, weights, self_weight)
    if missing is None and absent == "renormalize" and len(inbox) < len(weights):
        inbox = {rank: _filled(payload, own) for rank, payload in inbox.items()}
        missing = "renormalize"
    out = fresh(len(own))
    if missing == "renormalize":
        return _renormalize(own, inbox, weights, _self_weight(inbox, weights, self_weight), out)
    if missing in ("own", None):
        return _fill_with_own(own, inbox, weights, own_weight(inbox, weights, self_weight), out)
    raise ValueError(f"combine: missing={missing!r}; accepted: 'own', 'renormalize'")


def _ring_sum(
    own: Integer[Tensor, " n"],
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None,
) -> Integer[Tensor, " n"]:
    """The sum of integer vectors modulo 2^bits of their dtype: exact, in any order. An absent rank adds nothing.

    Raises:
        ValueError: for weights that are not whole numbers, or vectors of another dtype.
    """
    self_weight = _self_weight(inbox, weights, self_weight)
    wrong = [weight for weight in (self_weight, *weights.values()) if weight != int(weight)]
    if wrong:
        raise ValueError(f"combine: a weight of {wrong[0]} for integers; accepted: whole numbers")
    # The ring of 64 bits, of which those of fewer bits are quotients.
    signed = _SIGNED.get(own.dtype, own.dtype)
    total = own.view(signed).long() * int(self_weight)
    for rank, payload in inbox.items():
        vector = checked(payload, own, rank)
        if vector.dtype is not own.dtype:
            raise ValueError(f"combine: rank {rank} sent {vector.dtype}, own is {own.dtype}")
        total += vector.view(signed).long() * int(weights[rank])
    return total.to(signed).view(own.dtype)


def _self_weight(inbox: Mapping[int, Any], weights: Mapping[int, float], given: float | None) -> float:
    if not inbox.keys() <= weights.keys():
        lacking = sorted(inbox.keys() - weights.keys())
        raise ValueError(f"combine: no weight for ranks {lacking}; weights are given for {sorted(weights)}")
    return 1.0 - sum([weights[rank] for rank in sorted(weights)]) if given is None else given


def own_weight(inbox: Mapping[int, Any], weights: Mapping[int, float], given: float | None) -> float:
    """The weight of the own value, which includes that of the ranks which did not send."""
    self_weight = _self_weight(inbox, weights, given)
    if len(inbox) == len(weights):
        return self_weight
    return self_weight + sum(weights[rank] for rank in sorted(weights.keys() - inbox.keys()))


def half(payload: Any, which: int) -> Any:
    """The parameters (0) or the buffers (1) of a model.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(payload, Model):
        raise ValueError(
            f"combine: a {type(payload).__name__} can't be mixed with a Model; accepted: a Model"
        )
    return payload[which]


def _fill_with_own(
    own: Float[Tensor, " n"],
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float,
    out: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    partial = [weights[rank] for rank in sorted(inbox) if isinstance(inbox[rank], Part)]
    torch.mul(own, self_weight + sum(partial), out=out)
    for rank in sorted(inbox):
        payload, weight = inbox[rank], weights[rank]
        if isinstance(payload, Part):
            where = _region(payload, own)
            _add_at(out, where, payload.values - own.index_select(0, where), weight)
        else:
            out.add_(checked(payload, own, rank), alpha=weight)
    return out


def _renormalize(
    own: Float[Tensor, " n"],
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float,
    out: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    torch.mul(own, self_weight, out=out)
    present = torch.full_like(out, self_weight)
    for rank in sorted(inbox):
        payload, weight = inbox[rank], weights[rank]
        if isinstance(payload, Part):
            where = _region(payload, own)
            _add_at(out, where, payload.values, weight)
            _add_at(present, where, 1.0, weight)
        else:
            out.add_(checked(payload, own, rank), alpha=weight)
            present.add_(weight)
    if len(own) and present.amin() > 0:
        return out.div_(present)
    # Where all weights are 0, the own value stays.
    torch.where(present == 0, own, out.div_(present), out=out)
    return out


def _filled(payload: Any, own: Float[Tensor, " n"]) -> Any:
    """A part with the own values where it has none; anything else as it came."""
    if not isinstance(payload, Part):
        return payload
    return own.scatter(0, _region(payload, own), payload.values)


def _add_at(
    vector: Float[Tensor, " n"], where: Int[Tensor, " k"], values: Float[Tensor, " k"] | float, weight: float
) -> None:
    """``vector[where] += weight * values``; a repeated index counts once."""
    # (This takes a third of the time of indexing by brackets.)
    vector.scatter_(0, where, vector.index_select(0, where).add_(values, alpha=weight))


def _region(part: Part, own: Float[Tensor, " n"]) -> Int[Tensor, " k"]:
    """The coordinates of a part of a vector like ``own``.

    Raises:
        ValueError: for another length, or a number of indices that differs from that of values.
    """
    if part.size != len(own):
        raise ValueError(f"combine: a part of a vector of length {part.size} met one of length {len(own)}")
    if part.where.shape != part.values.shape:
        raise ValueError(f"combine: {part.where.shape[0]} indices for {part.values.shape[0]} values")
    return part.where.to(own.device, torch.int64)


def checked(vector: Any, own: Tensor, rank: int) -> Tensor:
    """A whole vector, as it came.

    Raises:
        ValueError: if it is none, or its length is not that of ``own``.
    """
    if not isinstance(vector, Tensor):
        raise ValueError(
            f"combine: rank {rank} sent {type(vector).__name__}; accepted: a vector, a Part or a Model"
        )
    if vector.shape != own.shape:
        raise ValueError(f"combine: rank {rank} sent shape {tuple(vector.shape)}, own is {tuple(own.shape)}")
    return vector
