"""Quantizing codecs: every value in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import Codec, vector_in
from gossamer.config.registry import register
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node

_LARGEST = 65504.0
"""The largest number of float16."""


@register("codec", "float16")
class Float16(Codec):
    """Values in half precision, rounded to nearest; numbers beyond its range become the largest that it has."""

    final: ClassVar[bool] = True

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        return [vector.clamp(-_LARGEST, _LARGEST).half()]

    def decode(
        self, node: Node, source: int, payload: list[Payload], own: Callable[[], Float[Tensor, " params"]]
    ) -> Tensor | Part:
        (values,) = payload
        return vector_in(values, torch.float16).float()


@register("codec", "quantize")
class Quantize(Codec):
    """Uniform quantization with stochastic rounding, which is unbiased: with m = max |x| and s = 2^(bits - 1) - 1,

        q = floor(s x / m + u),   u ~ U[0, 1) for each value,   decoded as m q / s

    q, of -s to s, is packed into ``bits`` bits a value. A vector that is not finite decodes to NaN.

    Args:
        bits: bits a value.
    """

    final: ClassVar[bool] = True

    bits: int = Field(default=8, ge=2, le=16)

    @property
    def levels(self) -> int:
        """s."""
        return int(2 ** (self.bits - 1)) - 1

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        s, largest = self.levels, float(vector.abs().max()) if len(vector) else 0.0
        if 0 < largest < math.inf:
            noise = node.rng("~codec/quantize", round).random(len(vector), dtype=np.float32)
            # (x / m first: s / m may overflow.)
            q = (
                (vector / largest)
                .mul_(s)
                .add_(torch.from_numpy(noise).to(vector.device))
                .floor_()
                .clamp_(-s, s)
            )
        else:
            q = torch.zeros_like(vector)
        codes = q.cpu().numpy().astype(np.int32) + s
        return [torch.from_numpy(_packed(codes, self.bits)), largest, len(vector)]

    def decode(
        self, node: Node, source: int, payload: list[Payload], own: Callable[[], Float[Tensor, " params"]]
    ) -> Tensor | Part:
        packed, largest, count = payload
        data = vector_in(packed, torch.uint8)
        if type(count) is not int or type(largest) is not float or len(data) != -(-count * self.bits // 8):
            raise ValueError(f"{len(data)} bytes for {count!r} values of {self.bits} bits")
        codes = _unpacked(data.cpu().numpy(), self.bits, count) - self.levels
        return torch.from_numpy(codes.astype(np.float32)).div_(self.levels).mul_(largest)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from 0 to 2^bits - 1 as uint8 bytes, ``bits`` bits each, the lowest first."""
    planes = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(planes.astype(np.uint8), bitorder="little")


def _unpacked(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The numbers that :func:`_packed` was given, int64 [count]."""
    planes = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return planes @ (1 << np.arange(bits))
