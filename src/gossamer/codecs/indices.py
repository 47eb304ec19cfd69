"""Sorted indices in as few bits as their number allows.

Of P coordinates, k are sent, each of them as likely as the next one: then the gap to the next index is geometric with
a = k / P, and an ideal code for all of them takes P H(a) bits, H the binary entropy: 4.7 bits an index where a = 0.1. This
holds for any indices, since the length depends only on k and P. Asymmetric numeral systems (Duda, 2013; the library
constriction) reach it to within some bytes.
"""

from __future__ import annotations

from functools import lru_cache

import constriction
import numpy as np
from jaxtyping import Int, UInt8, UInt32

_GAPS = 1024
"""A gap is written as its remainder by this number, after as many escapes as it holds this number."""


def packed(indices: Int[np.ndarray, " k"], size: int) -> UInt8[np.ndarray, " bytes"]:
    """Distinct indices below ``size``, ascending, as bytes."""
    if not len(indices):
        return np.empty(0, np.uint8)
    gaps = np.diff(indices, prepend=-1) - 1
    escapes, rests = np.divmod(gaps, _GAPS)
    symbols = np.full(len(gaps) + int(escapes.sum()), _GAPS, dtype=np.int32)
    symbols[np.arange(len(gaps)) + np.cumsum(escapes)] = rests
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols, _model(len(indices), size))
    words: UInt32[np.ndarray, " words"] = coder.get_compressed()
    return words.astype("<u4").view(np.uint8)


def unpacked(data: UInt8[np.ndarray, " bytes"], count: int, size: int) -> Int[np.ndarray, " k"]:
    """The ``count`` indices that :func:`packed` was given.

    Raises:
        ValueError: for bytes that stand for no such indices.
    """
    if not 0 <= count <= size or len(data) % 4 or (len(data) and not count):
        raise ValueError(f"{len(data)} bytes for {count} indices below {size}")
    if not count:
        return np.empty(0, np.int64)
    words = np.ascontiguousarray(data).view("<u4").astype(np.uint32)
    if len(words) and not words[-1]:
        raise ValueError("indices that end with a zero word")
    coder, model = constriction.stream.stack.AnsCoder(words), _model(count, size)
    symbols = np.empty(0, np.int32)
    while (left := count - int((symbols < _GAPS).sum())) and len(symbols) <= count + size // _GAPS:
        symbols = np.concatenate([symbols, coder.decode(model, left)])
    gaps = symbols.astype(np.int64) + (symbols < _GAPS)
    indices = np.cumsum(gaps)[symbols < _GAPS] - 1
    if len(indices) != count or indices[-1] >= size:
        raise ValueError(f"indices up to {indices[-1]} of {count} below {size}")
    return indices


@lru_cache(maxsize=64)
def _model(count: int, size: int) -> constriction.stream.model.Categorical:
    """The distribution of a gap's rest, and of an escape. (Products of floats are the same on every processor; powers are
    not.)"""
    stays = 1 - count / size
    tail = np.cumprod(np.full(_GAPS, stays))
    rests = np.append(1.0, tail[:-1]) * (count / size)
    return constriction.stream.model.Categorical(np.append(rests, tail[-1]).clip(1e-7), perfect=False)
