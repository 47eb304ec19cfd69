"""Sparse ternary compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import Codec, Own, parameter_count, vector_in
from gossamer.codecs.sparsify import coordinates_in, count_of, largest, part_of
from gossamer.config.registry import register
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node


@register("codec", "stc")
class STC(Codec):
    """STC (Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID Data", IEEE TNNLS 2020,
    Algorithm 1): of the k = round(fraction P) largest coordinates, the signs and the mean magnitude m; they decode to m
    sign(x). Only for algorithms that send differences: they feed back what is lost, as the paper's nodes do.

    Args:
        fraction: share of the coordinates that is sent.
    """

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
