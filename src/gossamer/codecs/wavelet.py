"""Wavelet codecs: coordinates are ranked and sent in the wavelet domain.

The discrete wavelet transform T (PyWavelets, periodic extension) of the flat vector is orthogonal, so the
mean of the coefficients is the transform of the mean. A receiver that replaces missing coefficients by its
own thus averages in the wavelet domain, as in JWINS. Vectors are padded with their last value to a multiple
of 2^levels.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.codecs.codec import Own, parameter_count, vector_in
from gossamer.codecs.sparsify import ShareSparsifier, TopK, coordinates_in
from gossamer.config.registry import register
from gossamer.errors import BadInput, listed
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node


_coefficients: MutableMapping[Tensor, tuple[tuple[int, str, int], Tensor]] = WeakTensorKeyDictionary()
"""Cache of the transforms of existing vectors, since a node decodes several messages over the model that it
has sent."""


class _Wavelets(ShareSparsifier):
    """Base class of codecs that send the wavelet coefficients that have changed most, with their indices:

        z = T(x),   S = the k largest of |z - y|,   send z[S],   y[S] <- z[S]

    Receivers use their own coefficients for the others, and transform back.

    Args:
        wavelet: name of an orthogonal wavelet in PyWavelets.
        levels: depth of the decomposition."""

    wavelet: str = "sym2"
    levels: int = Field(default=4, ge=1, le=10)

    @field_validator("wavelet")
    @classmethod
    def _orthogonal(cls, name: str) -> str:
        import pywt

        # The filters of dmey are truncated, so it is orthogonal in name only.
        discrete = [wavelet for wavelet in pywt.wavelist(kind="discrete") if wavelet != "dmey"]
        if name not in discrete or not pywt.Wavelet(name).orthogonal:
            orthogonal = [wavelet for wavelet in discrete if pywt.Wavelet(wavelet).orthogonal]
            raise BadInput(f"codec.wavelet: got {name!r}; accepted: {listed(orthogonal)}")
        return name

    def forward(self, vector: Float[Tensor, " params"]) -> Float[Tensor, " n"]:
        key = vector._version, self.wavelet, self.levels
        if (known := _coefficients.get(vector)) is None or known[0] != key:
            known = _coefficients[vector] = key, _transformed(vector, self.wavelet, self.levels)
        return known[1]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values, packed = payload
        size = parameter_count(node)
        values, length = vector_in(values, torch.float32), _padded(size, self.wavelet, self.levels)[1]
        where = coordinates_in(packed, len(values), length)
        coefficients = values if where is None else self.forward(own()).scatter(0, where, values)
        return _inverse(coefficients, size, self.wavelet, self.levels)


@register("codec", "wavelet")
class Wavelet(_Wavelets, TopK):
    """Sends a fixed share of the wavelet coefficients in every round (DecentralizePy's ``Wavelet``).

    Args:
        fraction: the share of the coefficients to send."""

    fraction: float = Field(default=0.1, gt=0, le=1)


@register("codec", "jwins")
class JWINS(_Wavelets):
    """JWINS (Dhasade et al., "Get More for Less in Decentralized Learning Systems", ICDCS 2023): ``wavelet``
    with a share of the coefficients that each node redraws in every round, keyed by rank and round
    (randomized cut-off, section III).

    Args:
        fractions: the shares to draw from, uniformly. The default is that of the configurations shipped with
            DecentralizePy.
        whole_from: a share of at least this value sends all coefficients without indices (DecentralizePy's
            ``metadata_cap``)."""

    fractions: tuple[float, ...] = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 1.0)
    whole_from: float = Field(default=0.5, gt=0, le=1)

    @field_validator("fractions")
    @classmethod
    def _shares(cls, fractions: Sequence[float]) -> Sequence[float]:
        if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
            raise BadInput(
                f"codec.fractions: got {list(fractions)}; accepted: numbers in (0, 1], at least one"
            )
        return fractions

    def share(self, node: Node, round: int) -> float:
        share = self.fractions[int(node.rng("~codec/jwins", round).integers(len(self.fractions)))]
        return 1.0 if share >= self.whole_from else share


@lru_cache(maxsize=8)
def _padded(size: int, wavelet: str, levels: int) -> tuple[int, int]:
    """The depth of the decomposition of a vector [size], and the number of its coefficients."""
    import pywt

    depth = min(levels, pywt.dwt_max_level(size, wavelet))
    return depth, -(-size // 2**depth) * 2**depth


def _transformed(vector: Float[Tensor, " params"], wavelet: str, levels: int) -> Float[Tensor, " n"]:
    """T of a vector."""
    import pywt

    depth, length = _padded(len(vector), wavelet, levels)
    x = np.pad(vector.cpu().numpy(), (0, length - len(vector)), mode="edge")
    return torch.from_numpy(np.concatenate(pywt.wavedec(x, wavelet, level=depth, mode="periodization")))


def _inverse(
    coefficients: Float[Tensor, " n"], size: int, wavelet: str, levels: int
) -> Float[Tensor, " params"]:
    """T^-1, for a vector [size]."""
    import pywt

    depth, length = _padded(size, wavelet, levels)
    bands = np.split(coefficients.cpu().numpy(), [length >> level for level in range(depth, 0, -1)])
    return torch.from_numpy(pywt.waverec(bands, wavelet, mode="periodization")[:size])
