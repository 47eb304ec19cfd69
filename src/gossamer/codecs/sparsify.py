"""Sparsifying codecs: some coordinates are sent, and receivers take their own values for the others, or renormalize
(``gather.missing``).

Such partial models are those of DecentralizePy (Dhasade et al., "Decentralized Learning Made Easy with DecentralizePy",
EuroMLSys 2023), from whose code the rules were read: ``PartialModel`` is top-k, ``SubSampling`` is random-k, which here draws
exactly k coordinates instead of each with a probability. They send values of the model, not differences, so receivers need
not know earlier messages.
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
from gossamer.codecs.codec import Codec, Own, parameter_count, vector_in
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
    """The values at some coordinates, ascending, and these as they travel; None stands for all coordinates."""
    if len(where) == len(vector):
        return vector.clone(), None
    packed = torch.from_numpy(indices.packed(where.cpu().numpy(), len(vector)))
    _opened[packed] = (len(where), len(vector), where)
    return vector.index_select(0, where), packed


def coordinates_in(packed: Payload, count: int, size: int) -> Int[Tensor, " k"] | None:
    """The coordinates of ``count`` values in a vector [size], as :func:`part_of` has packed them; None for all of them. A
    ValueError for anything that it does not make."""
    if packed is None and count == size:
        return None
    data = vector_in(packed, torch.uint8)
    if (opened := _opened.get(data)) is None or opened[:2] != (count, size):
        where = torch.from_numpy(indices.unpacked(data.cpu().numpy(), count, size))
        opened = _opened[data] = (count, size, where)
    return opened[2]


_opened: MutableMapping[Tensor, tuple[int, int, Tensor]] = WeakTensorKeyDictionary()
"""The unpacked form of packed indices, as long as these exist: the receivers of a simulation need not unpack them."""


def count_of(share: float, size: int) -> int:
    """How many of ``size`` coordinates a share is: at least one."""
    return max(1, round(share * size))


def largest(values: Float[Tensor, " n"], count: int) -> Int[Tensor, " k"]:
    """Where the ``count`` largest magnitudes are, ascending. Of equal ones the first count, and NaN counts as infinite."""
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    # (NumPy partitions many times as fast as torch finds the largest, and the bits of magnitudes, which have the same
    # order, faster than floats.)
    bits = values.cpu().numpy().view(np.int32) & 0x7FFF_FFFF
    np.minimum(bits, _INFINITY, out=bits)
    smallest = np.partition(bits, len(bits) - count)[len(bits) - count]
    chosen = np.flatnonzero(bits >= smallest)
    if (surplus := len(chosen) - count) > 0:
        equal = np.flatnonzero(bits[chosen] == smallest)
        chosen = np.delete(chosen, equal[len(equal) - surplus :])
    return torch.from_numpy(chosen).to(values.device)


class ChangeSparsifier(Codec):
    """Base of the codecs that send what has changed most since a reference y, initially the node's initial model:

        S = selected by |x - y|,   send x[S],   y[S] <- x[S]

    A difference (:meth:`Codec.compress`) has no reference: y = 0.

    Args:
        accumulate: whether changes that were not sent count on (error feedback; DecentralizePy's ``accumulation`` with
            ``accumulate_averaging_changes``); a message that is lost or taken back counts as sent. Else y is the model at
            the start of the round, as the round before left it after mixing, so that only the round's local changes count
            (DecentralizePy's default)."""

    sparse: ClassVar[bool] = True

    accumulate: bool = True

    @abstractmethod
    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        """The coordinates that are sent of those that changed so, ascending."""

    def forward(self, vector: Float[Tensor, " params"]) -> Float[Tensor, " n"]:
        """A vector in the basis in which coordinates are selected."""
        return vector

    def begin(self, node: Node) -> None:
        self.memory(node)["last"] = self.forward(node.parameters)

    def end_round(self, node: Node) -> None:
        if not self.accumulate:
            self.begin(node)

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        memory, transformed = self.memory(node), self.forward(vector)
        where = self.select(node, transformed - memory["last"], round)
        values, packed = part_of(transformed, where)
        if self.accumulate:
            last = memory["last"].scatter(0, where, values)
            memory["last"] = node.store(last) if transformed is vector else last
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
    """Base of the codecs that send a share of the coordinates: k = round(share n), at least one, that changed most."""

    @abstractmethod
    def share(self, node: Node, round: int) -> float:
        """The share of the coordinates that is sent in a round."""

    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        return largest(change, count_of(self.share(node, round), len(change)))


@register("codec", "top-k")
class TopK(ShareSparsifier):
    """Sends the same share of the coordinates in every round, with their indices.

    Args:
        fraction: the share."""

    fraction: float = Field(gt=0, le=1)

    def share(self, node: Node, round: int) -> float:
        return self.fraction


@register("codec", "threshold")
class Threshold(ChangeSparsifier):
    """Sends the coordinates that have changed by more than a threshold, with their indices; perhaps none.

    Args:
        threshold: the change; absolute, or a multiple of the root mean square of all changes.
        relative: whether it is such a multiple."""

    threshold: float = Field(ge=0)
    relative: bool = False

    def select(self, node: Node, change: Float[Tensor, " n"], round: int) -> Int[Tensor, " k"]:
        scale = float(change.double().square().mean().sqrt()) if self.relative else 1.0
        return torch.nonzero(change.abs() > self.threshold * scale).flatten()


class _Numbered(Codec):
    """Base of the codecs that send a number in place of indices."""

    sparse: ClassVar[bool] = True

    support: Literal["own", "common"] = "own"

    @property
    def common_support(self) -> bool:
        return self.support == "common"

    @abstractmethod
    def number(self, node: Node, round: int) -> int:
        """The number, from 0, that stands for a node's coordinates in a round."""

    @abstractmethod
    def coordinates(self, number: int, size: int) -> Int[Tensor, " k"]:
        """The coordinates of a vector [size] that a number stands for, ascending; a ValueError for none."""

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        number = self.number(node, round)
        where = self.coordinates(number, len(vector)).to(vector.device)
        return [vector.index_select(0, where), number]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values, number = payload
        values, size = vector_in(values, torch.float32), parameter_count(node)
        if type(number) is not int or number < 0:
            raise ValueError(f"the number {number!r}; accepted: one from 0 on")
        where = self.coordinates(number, size)
        if len(values) != len(where):
            raise ValueError(f"{len(values)} values; accepted: {len(where)}")
        return Part(values, where, size)


@register("codec", "random-k")
class RandomK(_Numbered):
    """Sends k = round(fraction P) coordinates, at least one, that are drawn afresh in every round; the seed of the draw
    travels in place of indices.

    Args:
        fraction: share of the coordinates that is sent.
        support: "own": every node draws its own coordinates; "common": all nodes send the same ones in a round."""

    fraction: float = Field(gt=0, le=1)

    def number(self, node: Node, round: int) -> int:
        return int(node.rng("~codec/random-k", round, shared=self.common_support).integers(2**63))

    def coordinates(self, number: int, size: int) -> Int[Tensor, " k"]:
        return _drawn(number, size, count_of(self.fraction, size))


@lru_cache(maxsize=64)  # so that the receivers of a simulation draw once
def _drawn(seed: int, size: int, count: int) -> Int[Tensor, " k"]:
    """Coordinates that a seed stands for, ascending."""
    drawn = np.random.default_rng(seed).choice(size, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn))


@register("codec", "round-robin")
class RoundRobin(_Numbered):
    """Sends one block of adjacent coordinates after the other, one in a round: of ``blocks`` blocks, which differ in length
    by at most one coordinate, block (round + shift) mod ``blocks``, whose number travels.

    Args:
        blocks: their number.
        support: "own": the shift is the node's rank; "common": it is 0, so that all nodes in one round send the same block.
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
    """STC (Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE TNNLS 2020,
    Algorithm 1): of the k = round(fraction P) largest coordinates, the signs and the mean magnitude m; they decode to m
    sign(x). Only for algorithms that send differences: they feed back what is lost, as the paper's nodes do.

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
