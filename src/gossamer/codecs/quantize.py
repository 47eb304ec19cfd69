"""Quantizing codecs: every value in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8, UInt16
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import Codec, parameter_count, vector_in
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

    q, of -s to s, is packed into ``bits`` bits a value. A vector that is not finite decodes to NaN. The noise u is keyed by
    the sender, the round and the number of vectors that it has encoded before.

    Args:
        bits: bits a value.
    """

    final: ClassVar[bool] = True

    bits: int = Field(default=8, ge=2, le=16)

    @property
    def levels(self) -> int:
        """s."""
        return int(2 ** (self.bits - 1)) - 1

    def begin(self, node: Node) -> None:
        self.memory(node)["encoded"] = 0

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        s, largest = self.levels, float(vector.abs().max()) if len(vector) else 0.0
        memory = self.memory(node)
        noise = node.rng("~codec/quantize", round, memory["encoded"]).random(len(vector), dtype=np.float32)
        memory["encoded"] += 1
        if 0 < largest < math.inf:
            # (x / m first: s / m may overflow.)
            q = (vector / largest).mul_(s).add_(torch.from_numpy(noise).to(vector.device))
            codes = q.floor_().clamp_(-s, s).add_(s).cpu().numpy().astype(np.uint16)
        else:
            codes = np.full(len(vector), s, dtype=np.uint16)
        return [torch.from_numpy(_packed(codes, self.bits)), largest, len(vector)]

    def decode(
        self, node: Node, source: int, payload: list[Payload], own: Callable[[], Float[Tensor, " params"]]
    ) -> Tensor | Part:
        packed, largest, count = payload
        data = vector_in(packed, torch.uint8)
        if type(count) is not int or type(largest) is not float or len(data) != -(-count * self.bits // 8):
            raise ValueError(f"{len(data)} bytes for {count!r} values of {self.bits} bits")
        if not 0 <= count <= (size := parameter_count(node)):  # before anything of that size is allocated
            raise ValueError(f"{count} values of a vector of {size}")
        codes = _unpacked(data.cpu().numpy(), self.bits, count).astype(np.float32)
        return torch.from_numpy(codes).sub_(self.levels).div_(self.levels).mul_(largest)


def _packed(codes: UInt16[np.ndarray, " n"], bits: int) -> UInt8[np.ndarray, " bytes"]:
    """Numbers below 2^bits as bytes, ``bits`` bits each, the lowest first."""
    octets = codes.astype("<u2", copy=False).view(np.uint8).reshape(-1, 2)
    planes = np.unpackbits(octets, axis=1, count=bits, bitorder="little")
    return np.packbits(planes, bitorder="little")


def _unpacked(data: UInt8[np.ndarray, " bytes"], bits: int, count: int) -> UInt16[np.ndarray, " n"]:
    """The numbers that :func:`_packed` was given. (One byte for each bit, and no more, is in memory meanwhile.)"""
    planes = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    octets = np.zeros((count, 2), dtype=np.uint8)
    octets[:, : -(-bits // 8)] = np.packbits(planes, axis=1, bitorder="little")
    return octets.view("<u2")[:, 0].astype(np.uint16, copy=False)
