"""Sparsifying codecs: some coordinates are sent, and receivers take their own values for the others.

Such partial models are those of DecentralizePy (Dhasade et al., "Decentralized Learning Made Easy with DecentralizePy",
EuroMLSys 2023), from whose code the rules were read: ``PartialModel`` is top-k, ``SubSampling`` is random-k, which here draws
exactly k coordinates instead of each with a probability. They send values of the model, not differences, so receivers need
not know earlier messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import Codec, parameter_count, vector_in
from gossamer.config.registry import register
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node


class Sparsifier(Codec):
    """A codec that sends k = round(fraction P) coordinates, at least one.

    Args:
        fraction: share of the coordinates that is sent.
    """

    sparse: ClassVar[bool] = True

    fraction: float = Field(gt=0, le=1)

    def count(self, size: int) -> int:
        """k, of a vector [size]."""
        return max(1, round(self.fraction * size))


@register("codec", "top-k")
class TopK(Sparsifier):
    """Sends the coordinates that have changed most, with their indices (int32).

    The change of a coordinate is counted from a reference y, initially the node's initial model:

        S = the k largest of |x - y|,   send x[S],   y[S] <- x[S]

    Args:
        accumulate: whether changes that were not sent count on (error feedback; DecentralizePy's ``accumulation`` with
            ``accumulate_averaging_changes``). Else y is the model at the start of the round, as the round before left it
            after mixing, so that only the round's local changes count (DecentralizePy's default).
    """

    accumulate: bool = True

    def begin(self, node: Node) -> None:
        self.memory(node)["last"] = node.parameters

    def end_round(self, node: Node) -> None:
        if not self.accumulate:
            self.memory(node)["last"] = node.parameters

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        memory = self.memory(node)
        change = (vector - memory["last"]).abs_()
        where = torch.topk(change, self.count(len(vector)), sorted=False).indices.sort().values
        values = vector.index_select(0, where)
        if self.accumulate:
            memory["last"] = node.store(memory["last"].scatter(0, where, values))
        return [values, where.int()]

    def decode(
        self, node: Node, source: int, payload: list[Payload], own: Callable[[], Float[Tensor, " params"]]
    ) -> Tensor | Part:
        values, where = payload
        size = parameter_count(node)
        values, where = vector_in(values, torch.float32), vector_in(where, torch.int32)
        if len(values) != len(where) or (len(where) and not 0 <= int(where.min()) <= int(where.max()) < size):
            raise ValueError(f"{len(values)} values with {len(where)} indices for a vector of {size}")
        return Part(values, where, size)


@register("codec", "random-k")
class RandomK(Sparsifier):
    """Sends coordinates that are drawn afresh in every round; the seed of the draw travels in place of indices.

    Args:
        support: "own": every node draws its own coordinates; "common": all nodes send the same ones in a round.
    """

    support: Literal["own", "common"] = "own"

    @property
    def common_support(self) -> bool:
        return self.support == "common"

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        seed = int(node.rng("~codec/random-k", round, shared=self.common_support).integers(2**63))
        where = _drawn(seed, len(vector), self.count(len(vector)))
        return [vector.index_select(0, where.to(vector.device)), seed]

    def decode(
        self, node: Node, source: int, payload: list[Payload], own: Callable[[], Float[Tensor, " params"]]
    ) -> Tensor | Part:
        values, seed = payload
        values, size = vector_in(values, torch.float32), parameter_count(node)
        if type(seed) is not int or seed < 0 or len(values) != self.count(size):
            raise ValueError(
                f"{len(values)} values with the seed {seed!r}; accepted: {self.count(size)} values"
            )
        return Part(values, _drawn(seed, size, len(values)), size)


@lru_cache(maxsize=64)  # so that the receivers of a simulation draw once
def _drawn(seed: int, size: int, count: int) -> Int[Tensor, " k"]:
    """Coordinates that a seed stands for, ascending."""
    drawn = np.random.default_rng(seed).choice(size, count, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn))
