"""Quantizing codecs, which encode every value in fewer bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8, UInt16
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import PADDING, Codec, Own, parameter_count, vector_in
from gossamer.config.registry import register
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.learning.parameters import Layout
    from gossamer.node import Node

_Values = Float[np.ndarray, " n"]
_Starts = Int[np.ndarray, " blocks"]
_Scales = Float[np.ndarray, " blocks"]
_LARGEST = 65504.0
"""The largest float16 number."""


class _Rounded(Codec):
    """Base class of codecs that send values in another floating-point type."""

    final: ClassVar[bool] = True
    _dtype: ClassVar[torch.dtype]

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        return [vector.to(self._dtype)]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        (values,) = payload
        return vector_in(values, self._dtype).float()


@register("codec", "float16")
class Float16(_Rounded):
    """Sends values in half precision, rounded to nearest. Values beyond its range become its largest
    number."""

    _dtype = torch.float16

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        return super().encode(node, vector.clamp(-_LARGEST, _LARGEST), round)


@register("codec", "bfloat16")
class BFloat16(_Rounded):
    """Sends values as bfloat16 (16 bits), rounded to nearest: float32's range with 8 bits of precision."""

    _dtype = torch.bfloat16


class _ScaledCodec(Codec):
    """Base class of codecs that send small whole numbers and one scale (float32) for each block of values.

    Args:
        block: the values that share a scale: a number of adjacent values, "vector" for all values, or
            "tensor" for those of one tensor of the model (not after a sparsifier, whose output mixes
            tensors)."""

    final: ClassVar[bool] = True

    block: Annotated[int, Field(ge=1, le=2**53)] | Literal["vector", "tensor"] = "vector"

    @property
    def comes_first(self) -> bool:
        return self.block == "tensor"

    def starts(self, node: Node, count: int) -> Int[np.ndarray, " blocks"]:
        """The starts of the blocks of ``count`` values. ValueError if the values can't be divided by
        tensors."""
        if isinstance(self.block, int):
            return np.arange(0, count, self.block)
        if self.block == "vector":
            return np.zeros(min(count, 1), np.int64)
        if count != parameter_count(node):
            raise ValueError(
                f"blocks by tensor: got {count} values; accepted: {parameter_count(node)}, a model's parameters"
            )
        return np.array([field.start for field in node.layout if math.prod(field.shape)])

    def longest_block(self, layout: Layout, count: int) -> int:
        """The length of the longest block of ``count`` values of a model."""
        if self.block == "tensor":
            return max(math.prod(field.shape) for field in layout.parameters)
        return count if self.block == "vector" else min(self.block, count)

    def payload(
        self, codes: UInt16[np.ndarray, " n"], scales: Float[np.ndarray, " blocks"], bits: int
    ) -> list[Payload]:
        """The payload for numbers below 2^bits."""
        return [torch.from_numpy(_packed(codes, bits)), torch.from_numpy(scales), len(codes)]

    def opened(
        self, node: Node, payload: list[Payload], bits: int
    ) -> tuple[UInt16[np.ndarray, " n"], Float[np.ndarray, " #n"]]:
        """The numbers in a payload, and the scale of each. ValueError for anything that :meth:`payload` does
        not produce."""
        packed, scales, count = payload
        data, scales = vector_in(packed, torch.uint8), vector_in(scales, torch.float32)
        if type(count) is not int or len(data) != -(-count * bits // 8):
            raise ValueError(f"{len(data)} bytes for {count!r} values of {bits} bits")
        # Checked before any memory of that size is allocated.
        if not 0 <= count <= parameter_count(node) + PADDING:
            raise ValueError(f"{count} values of a vector of {parameter_count(node)}")
        starts = self.starts(node, count)
        if len(scales) != len(starts):
            raise ValueError(f"{len(scales)} scales for {len(starts)} blocks")
        codes = _unpacked(data.cpu().numpy(), bits, count)
        return codes, _spread(scales.cpu().numpy(), starts, count)


def _spread(
    scales: Float[np.ndarray, " blocks"], starts: Int[np.ndarray, " blocks"], count: int
) -> Float[np.ndarray, " spread"]:
    """The scale of each value, or one scale for all if there is a single block."""
    return scales if len(scales) <= 1 else np.repeat(scales, np.diff(starts, append=count))


class _Levels(_ScaledCodec):
    """Base class of quantizers to s levels of either sign, as multiples of a block's scale m:

        q = floor(s x / m + u),   decoded as m q / s

    with u ~ U[0, 1) for each value, which is unbiased, or u = 1/2, which rounds to nearest. The noise is
    keyed by the sender, the round and the number of vectors that the sender has already encoded. A block with
    non-finite values decodes to NaN."""

    per_stream: ClassVar[bool] = False  # so that no two vectors of a node get the same noise

    @property
    @abstractmethod
    def s(self) -> int:
        """The number of levels."""

    @property
    def bits_a_value(self) -> int:
        """Bits of a number from -s to s."""
        return (2 * self.s).bit_length()

    @abstractmethod
    def scales(self, x: _Values, starts: _Starts) -> _Scales:
        """The scale m of each block of the values x [n]; the blocks begin at ``starts``."""

    def noise(self, node: Node, count: int, round: int) -> Float[np.ndarray, " n"] | float:
        """u."""
        memory = self.memory(node)
        rng = node.rng(f"~codec/{self.name_of()}", round, memory["encoded"])
        memory["encoded"] += 1
        return rng.random(count, dtype=np.float32)

    def begin(self, node: Node) -> None:
        self.memory(node)["encoded"] = 0

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        x = vector.cpu().numpy()
        starts = self.starts(node, len(x))
        scales = self.scales(x, starts) if len(x) else np.empty(0, np.float32)
        u = self.noise(node, len(x), round)
        # x / m comes first, because s / m may overflow. A block that is zero or has non-finite values becomes
        # zeros.
        finite = np.isfinite(scales)
        divisors = _spread(np.where(finite & (scales > 0), scales, np.inf), starts, len(x))
        with np.errstate(invalid="ignore"):
            q = x / divisors.astype(np.float32)
        if not finite.all():
            np.nan_to_num(q, copy=False)
        q *= np.float32(self.s)
        q += u
        np.floor(q, out=q)
        np.clip(q, -self.s, self.s, out=q)
        q += np.float32(self.s)
        return self.payload(
            q.astype(np.uint16), np.where(finite, scales, np.float32(np.nan)), self.bits_a_value
        )

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        codes, scales = self.opened(node, payload, self.bits_a_value)
        values = codes.astype(np.float32)
        values -= np.float32(self.s)
        values /= np.float32(self.s)
        values *= scales
        return torch.from_numpy(values)


@register("codec", "quantize")
class Quantize(_Levels):
    """Uniform quantization: m is a block's largest magnitude, s = 2^(bits - 1) - 1, and each number takes
    ``bits`` bits.

    Algorithms that send differences need blocks of at most 8 s^2 values, or "nearest".

    Args:
        bits: bits per value.
        rounding: "stochastic", which is unbiased, or "nearest"."""

    bits: int = Field(default=8, ge=2, le=16)
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    @property
    def s(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def contracts_only_with(self, layout: Layout, count: int) -> str | None:
        # The largest value of a block is exact. Any other x < m / s has the expected error x (m / s - x), which
        # exceeds x^2 by at most (m / s)^2 / 8. So n values lose less than m^2 if n <= 8 s^2.
        limit = 8 * self.s**2
        if self.rounding == "nearest" or self.longest_block(layout, count) <= limit:
            return None
        return f"rounding: nearest, or blocks of at most {limit} values"

    def scales(self, x: _Values, starts: _Starts) -> _Scales:
        return np.maximum.reduceat(np.abs(x), starts)

    def noise(self, node: Node, count: int, round: int) -> Float[np.ndarray, " n"] | float:
        return 0.5 if self.rounding == "nearest" else super().noise(node, count, round)


@register("codec", "qsgd")
class QSGD(_Levels):
    """QSGD (Alistarh et al., NeurIPS 2017, section 3.1): unbiased rounding to s levels of the Euclidean norm m = ||x||_2.

    Args:
        levels: s.
        contract: divide by 1 + min(n / s^2, sqrt(n) / s), with n the block's length, as CHOCO-SGD requires:
            the error is then below that of sending nothing (Koloskova et al., ICML 2019, section 3.5)."""

    levels: int = Field(default=16, ge=1, le=2**14)
    contract: bool = False

    @property
    def s(self) -> int:
        return self.levels

    def contracts_only_with(self, layout: Layout, count: int) -> str | None:
        return None if self.contract else "contract: true"

    def scales(self, x: _Values, starts: _Starts) -> _Scales:
        return np.sqrt(np.add.reduceat(np.square(x, dtype=np.float64), starts)).astype(np.float32)

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values = super().decode(node, source, payload, own)
        if not self.contract or not isinstance(values, Tensor):
            return values
        starts = self.starts(node, len(values))
        n = np.diff(starts, append=len(values))
        divisors = 1 + np.minimum(n / self.s**2, np.sqrt(n) / self.s)
        return values / torch.from_numpy(_spread(divisors.astype(np.float32), starts, len(values)))


@register("codec", "sign")
class Sign(_ScaledCodec):
    """One bit per value: sign(x) times the mean magnitude of its block (Karimireddy et al., "Error Feedback
    Fixes SignSGD", ICML 2019, scaled sign). Zero counts as positive. Only for algorithms that send
    differences, which feed back the error."""

    only_differences: ClassVar[bool] = True

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        x = vector.cpu().numpy()
        starts = self.starts(node, len(x))
        sums = np.add.reduceat(np.abs(x), starts, dtype=np.float64) if len(x) else np.empty(0)
        scales = sums / np.diff(starts, append=len(x))
        return self.payload((x >= 0).astype(np.uint16), scales.astype(np.float32), 1)

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        codes, scales = self.opened(node, payload, 1)
        return torch.from_numpy((codes.astype(np.float32) * 2 - 1) * scales)


def _packed(codes: UInt16[np.ndarray, " n"], bits: int) -> UInt8[np.ndarray, " bytes"]:
    """Numbers below 2^bits as bytes: first the low byte of each number, if it has 8 bits or more, then the
    remaining bits, lowest first."""
    if bits >= 8:
        low = codes.astype(np.uint8)
        return low if bits == 8 else np.concatenate([low, _packed(codes >> 8, bits - 8)])
    # Eight numbers fill the lowest ``bits`` bytes of one 64-bit word.
    words = np.zeros(-(-len(codes) // 8), np.uint64)
    for position in range(8):
        column = codes[position::8].astype(np.uint64)
        column <<= np.uint64(bits * position)
        words[: len(column)] |= column
    octets = words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :bits]
    return octets.reshape(-1)[: -(-len(codes) * bits // 8)]


def _unpacked(data: UInt8[np.ndarray, " bytes"], bits: int, count: int) -> UInt16[np.ndarray, " n"]:
    """The numbers given to :func:`_packed`."""
    if bits >= 8:
        codes = data[:count].astype(np.uint16)
        return codes if bits == 8 else codes + (_unpacked(data[count:], bits - 8, count) << np.uint16(8))
    octets = np.zeros((-(-count // 8), 8), np.uint8)
    whole, rest = divmod(len(data), bits)
    octets[:whole, :bits] = data[: whole * bits].reshape(-1, bits)
    octets[whole : whole + 1, :rest] = data[whole * bits :]
    words, codes = octets.view("<u8").reshape(-1), np.empty((len(octets), 8), np.uint16)
    for position in range(8):
        codes[:, position] = (words >> np.uint64(bits * position)) & np.uint64((1 << bits) - 1)
    return codes.reshape(-1)[:count]
