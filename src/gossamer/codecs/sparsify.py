"""Sparsifying codecs: only some coordinates are sent. For the others, receivers use their own values, or
renormalize (``gather.missing``).

Such partial models are those of DecentralizePy (Dhasade et al., "Decentralized Learning Made Easy with
DecentralizePy", EuroMLSys 2023), from whose code the rules are taken: ``PartialModel`` is top-k, with its
accumulation as ``accumulate: decentralizepy``; ``SubSampling`` is random-k, which here draws exactly k
coordinates instead of each one with a probability. They send values of the model, not differences, so
receivers do not need earlier messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import MutableMapping
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.codecs import indices
from gossamer.codecs.codec import (
    STATE,
    Codec,
    Own,
    further_stream,
    parameter_count,
    sends_own_model,
    vector_in,
)
from gossamer.config.ranges import NonNegativeFloat32
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.learning.parameters import Layout
    from gossamer.node import Node


_INFINITY = np.int32(0x7F80_0000)  # the bits of infinity as float32


def part_of(
    vector: Float[Tensor, " params"], where: Int[Tensor, " k"]
) -> tuple[Float[Tensor, " k"], Tensor | None]:
    """The values at some coordinates, in ascending order, and the packed coordinates; None stands for all
    coordinates."""
    if len(where) == len(vector):
        return vector.clone(), None
    packed = torch.from_numpy(indices.packed(where.cpu().numpy(), len(vector)))
    _opened[packed] = (len(where), len(vector), where)
    return vector.index_select(0, where), packed


def coordinates_in(packed: Payload, count: int, size: int) -> Int[Tensor, " k"] | None:
    """The coordinates of ``count`` values in a vector [size], as packed by :func:`part_of`; None for all of
    them. ValueError for anything that it does not produce."""
    if packed is None and count == size:
        return None
    data = vector_in(packed, torch.uint8)
    if (opened := _opened.get(data)) is None or opened[:2] != (count, size):
        where = torch.from_numpy(indices.unpacked(data.cpu().numpy(), count, size))
        opened = _opened[data] = (count, size, where)
    return opened[2]


_opened: MutableMapping[Tensor, tuple[int, int, Tensor]] = WeakTensorKeyDictionary()
"""Cache of unpacked indices, kept as long as the packed ones exist, so that the receivers in a simulation
need not unpack them."""


def count_of(share: float, size: int) -> int:
    """The number of coordinates in a share of ``size``, at least one."""
    return max(1, round(share * size))


def largest(values: Float[Tensor, " n"], count: int) -> Int[Tensor, " k"]:
    """The positions of the ``count`` largest magnitudes, ascending. Ties go to the lower position; NaN counts
    as infinite."""
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    # NumPy's partition is many times faster than torch's topk, and faster on the bits of magnitudes, which
    # have the same order, than on floats.
    bits = values.cpu().numpy().view(np.int32) & 0x7FFF_FFFF
    np.minimum(bits, _INFINITY, out=bits)
    smallest = np.partition(bits, len(bits) - count)[len(bits) - count]
    chosen = np.flatnonzero(bits >= smallest)
    if (surplus := len(chosen) - count) > 0:
        equal = np.flatnonzero(bits[chosen] == smallest)
        chosen = np.delete(chosen, equal[len(equal) - surplus :])
    return torch.from_numpy(chosen).to(values.device)


class ChangeSparsifier(Codec):
    """Base class of codecs that send the coordinates that have changed most since a reference y, which starts
    as the node's initial model:

        S = selected by |x - y|,   send x[S],   y[S] <- x[S]

    A difference (:meth:`Codec.compress`) has no reference: y = 0. In a further stream of the node's model, y starts as
    that of the first stream, and in one of other vectors as 0.

    Args:
        accumulate: true: unsent changes accumulate, those by mixing included (error feedback). A lost or cancelled
            message counts as sent. false: only the round's local changes count, those since the model s at its start,
            after the previous round's mixing (DecentralizePy's default). "decentralizepy": its ``accumulation`` with
            ``accumulate_averaging_changes``, as in its configurations of JWINS. It clears the accumulated change of
            the sent coordinates before it adds the round's whole change, that has just been sent included:
            y[S] <- s[S] in place of x[S]. So a coordinate that changed much is often sent in the next round too. In
            a further stream of other vectors than the node's model, s is the vector before."""

    sparse: ClassVar[bool] = True

    accumulate: bool | Literal["decentralizepy"] = True

    @abstractmethod
    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        """The coordinates to send, given the change of each coordinate; ascending."""

    def forward(self, vector: Float[Tensor, " params"]) -> Float[Tensor, " n"]:
        """The vector in the basis in which coordinates are selected."""
        return vector

    def begin(self, node: Node) -> None:
        memory = self.memory(node)
        if further_stream():
            first, own = node.state[STATE][self.name_of()], sends_own_model(node)
            memory |= first if own else {name: torch.zeros_like(vector) for name, vector in first.items()}
            return
        memory["last"] = self.forward(node.parameters)
        if self.accumulate == "decentralizepy":
            memory["start"] = memory["last"]

    def end_round(self, node: Node) -> None:
        if sends_own_model(node):
            self._start(node, node.parameters)

    def _start(self, node: Node, s: Float[Tensor, " params"]) -> None:
        """Note s, on which the next changes are based."""
        if self.accumulate is not True:
            self.memory(node)["start" if self.accumulate else "last"] = self.forward(node.store(s))

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        memory, transformed = self.memory(node), self.forward(vector)
        where = self.select(node, transformed - memory["last"], round)
        values, packed = part_of(transformed, where)
        if self.accumulate:
            y = values if self.accumulate is True else memory["start"].index_select(0, where)
            last = memory["last"].scatter(0, where, y)
            memory["last"] = node.store(last) if transformed is vector else last
        if not sends_own_model(node):
            self._start(node, vector)
        return [values, packed]

    def compress(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        transformed = self.forward(vector)
        return [*part_of(transformed, self.select(node, transformed, round))]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values, packed = payload
        values, size = vector_in(values, torch.float32), parameter_count(node)
        where = coordinates_in(packed, len(values), size)
        return values if where is None else Part(values, where, size)


class ShareSparsifier(ChangeSparsifier):
    """Base class of codecs that send a share of the coordinates: the k = round(share n), at least one, that
    changed most."""

    @abstractmethod
    def share(self, node: Node, round: int) -> float:
        """The share of the coordinates to send in a round."""

    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        return largest(change, count_of(self.share(node, round), len(change)))


@register("codec", "top-k")
class TopK(ShareSparsifier):
    """Sends a fixed share of the coordinates in every round, with their indices.

    Args:
        fraction: the share of the coordinates to send."""

    fraction: float = Field(gt=0, le=1)

    def share(self, node: Node, round: int) -> float:
        return self.fraction


@register("codec", "threshold")
class Threshold(ChangeSparsifier):
    """Sends the coordinates that have changed by more than a threshold, if any, with their indices.

    Args:
        threshold: the minimum change: absolute, or a multiple of the root mean square of all changes.
        relative: whether the threshold is such a multiple."""

    threshold: NonNegativeFloat32
    relative: bool = False

    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        scale = float(change.double().square().mean().sqrt()) if self.relative else 1.0
        return torch.nonzero(change.abs() > self.threshold * scale).flatten()


class _Numbered(Codec):
    """Base class of codecs that send a number instead of indices."""

    sparse: ClassVar[bool] = True

    support: Literal["own", "common"] = "own"

    @property
    def common_support(self) -> bool:
        return self.support == "common"

    @abstractmethod
    def number(self, node: Node, round: int) -> int:
        """The number, from 0, that encodes a node's coordinates in a round."""

    @abstractmethod
    def coordinates(self, number: int, size: int) -> Int[Tensor, " k"]:
        """The coordinates of a vector [size] encoded by a number, ascending. ValueError for an invalid
        number."""

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        number = self.number(node, round)
        where = self.coordinates(number, len(vector)).to(vector.device)
        return [vector.index_select(0, where), number]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values, number = payload
        values, size = vector_in(values, torch.float32), parameter_count(node)
        if type(number) is not int or number < 0:
            raise ValueError(f"the number {number!r}; accepted: a whole number from 0")
        where = self.coordinates(number, size)
        if len(values) != len(where):
            raise ValueError(f"{len(values)} values; accepted: {len(where)}")
        return Part(values, where, size)


@register("codec", "random-k")
class RandomK(_Numbered):
    """Sends k = round(fraction P) coordinates, at least one, redrawn in every round. The seed of the draw
    is sent instead of indices.

    Args:
        fraction: share of the coordinates that is sent.
        support: "own": every node draws its own coordinates; "common": all nodes send the same ones in a round."""

    fraction: float = Field(gt=0, le=1)

    def number(self, node: Node, round: int) -> int:
        return int(node.rng("~codec/random-k", round, shared=self.common_support).integers(2**63))

    def coordinates(self, number: int, size: int) -> Int[Tensor, " k"]:
        return _random_coordinates(number, size, count_of(self.fraction, size))


@lru_cache(maxsize=64)  # drawn once for all receivers of a simulation
def _random_coordinates(seed: int, size: int, count: int) -> Int[Tensor, " k"]:
    """The coordinates encoded by a seed, ascending."""
    coordinates = np.random.default_rng(seed).choice(size, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(coordinates))


@register("codec", "round-robin")
class RoundRobin(_Numbered):
    """Sends one block of adjacent coordinates in each round, in turn: block (round + shift) mod ``blocks``.
    The lengths of blocks differ by at most one. The block's number is sent instead of indices.

    Args:
        blocks: number of blocks.
        support: "own": the shift is the node's rank; "common": it is 0, so that all nodes send the same block
            in a round.
    """

    blocks: int = Field(ge=1)

    def check(self, layout: Layout) -> None:
        if self.blocks > layout.size:
            raise BadInput(
                f"codec.blocks: {self.blocks} of {layout.size} parameters; accepted: 1 to {layout.size}"
            )

    def number(self, node: Node, round: int) -> int:
        return (round + (0 if self.common_support else node.rank)) % self.blocks

    def coordinates(self, number: int, size: int) -> Int[Tensor, " k"]:
        if number >= self.blocks:
            raise ValueError(f"block {number} of {self.blocks}")
        return torch.arange(number * size // self.blocks, (number + 1) * size // self.blocks)


@register("codec", "stc")
class STC(Codec):
    """STC (Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE
    TNNLS 2020, Algorithm 1): sends the signs of the k = round(fraction P) largest coordinates and their mean
    magnitude m, which decode to m sign(x). Zero counts as positive. Only for algorithms that send
    differences, which feed back the error, as the paper's nodes do.

    Args:
        fraction: share of the coordinates that is sent."""

    sparse: ClassVar[bool] = True
    only_differences: ClassVar[bool] = True

    fraction: float = Field(default=0.01, gt=0, le=1)

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        values, packed = part_of(vector, largest(vector, count_of(self.fraction, len(vector))))
        signs = torch.from_numpy(np.packbits(values.cpu().numpy() >= 0))
        return [values.abs().mean(dtype=torch.float64).float().reshape(1), packed, signs, len(values)]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        mean, packed, signs, count = payload
        mean, size = vector_in(mean, torch.float32), parameter_count(node)
        signs = vector_in(signs, torch.uint8).cpu().numpy()
        fits = type(count) is int and 0 <= count <= size and (len(mean), len(signs)) == (1, -(-count // 8))
        if not fits:
            raise ValueError(f"{len(signs)} bytes for {count!r} signs of a vector of {size}")
        positive = torch.from_numpy(np.unpackbits(signs, count=count).astype(bool)).to(mean.device)
        where = coordinates_in(packed, count, size)
        values = torch.where(positive, mean, -mean)
        return values if where is None else Part(values, where, size)
