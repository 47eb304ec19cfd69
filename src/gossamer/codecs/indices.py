"""Sorted indices in the fewest bits that their number allows.

If k of P coordinates are sent and all are equally likely, the gap to the next index is geometric with a = k /
P, and an ideal code for all indices takes P H(a) bits, where H is the binary entropy: 4.7 bits per index for
a = 0.1. This holds for any indices, since the length depends only on k and P. Asymmetric numeral systems
(Duda, 2013; the library constriction) come within a few bytes of it.

A gap is coded as its lowest b bits, which are equally likely, and the number above them: one escape for each
multiple of 1024, and the remainder.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import constriction
import numpy as np
from jaxtyping import Int, UInt8, UInt32

_ESCAPE = 1024


def packed(indices: Int[np.ndarray, " k"], size: int) -> UInt8[np.ndarray, " bytes"]:
    """Distinct indices below ``size``, ascending, as bytes."""
    if not len(indices):
        return np.empty(0, np.uint8)
    low, model, uniform = _models(len(indices), size)
    gaps = np.diff(indices, prepend=-1) - 1
    highs = gaps >> low
    escapes, rests = highs // _ESCAPE, highs & (_ESCAPE - 1)
    symbols = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, dtype=np.int32)
    symbols[np.arange(len(gaps)) + np.cumsum(escapes)] = rests
    coder = constriction.stream.stack.AnsCoder()
    if low:
        coder.encode_reverse((gaps & ((1 << low) - 1)).astype(np.int32), uniform)
    coder.encode_reverse(symbols, model)
    words: UInt32[np.ndarray, " words"] = coder.get_compressed()
    missing = max(_length(len(indices), size) - len(words), 0)
    return np.pad(words.astype("<u4"), (0, missing)).view(np.uint8)


def unpacked(data: UInt8[np.ndarray, " bytes"], count: int, size: int) -> Int[np.ndarray, " k"]:
    """The ``count`` indices given to :func:`packed`. ValueError for bytes that do not encode such indices."""
    if len(data) % 4 or not 0 <= count <= size or (len(data) and not count):
        raise ValueError(f"{len(data)} bytes for {count} indices below {size}")
    words = np.trim_zeros(np.frombuffer(data.tobytes(), "<u4").astype(np.uint32), "b")
    if not count:
        return np.empty(0, np.int64)
    low, model, uniform = _models(count, size)
    coder = constriction.stream.stack.AnsCoder(words)
    symbols = coder.decode(model, count)
    limit = count + (size >> low) // _ESCAPE
    while (remaining := count - int(np.count_nonzero(symbols < _ESCAPE))) and len(symbols) <= limit:
        symbols = np.concatenate([symbols, coder.decode(model, remaining)])
    highs = np.cumsum(symbols.astype(np.int64))[symbols < _ESCAPE]
    gaps = np.diff(highs, prepend=0) << low
    if low and len(gaps) == count:
        gaps += coder.decode(uniform, count)
    indices = np.cumsum(gaps + 1) - 1
    if len(indices) != count or indices[-1] >= size:
        raise ValueError(f"indices that are not {count} below {size}")
    return indices


def _length(count: int, size: int) -> int:
    """Words for ``count`` indices, including padding: a few more than their entropy, so that the size of a
    message does not depend on which coordinates are sent."""
    share, rest = count / size, 1 - count / size
    bits = -count * math.log2(share) - ((size - count) * math.log2(rest) if rest else 0.0)
    return int(1.001 * bits / 32) + 3


@lru_cache(maxsize=64)
def _models(count: int, size: int) -> tuple[int, Any, Any]:
    """b, and the distributions of the symbols and of the lowest b bits."""
    low = min(max((size // count).bit_length() - 6, 0), 16)
    # Products of floats are the same on every processor; powers may not be.
    stays = 1 - count / size
    for _ in range(low):
        stays *= stays
    tail = np.cumprod(np.full(_ESCAPE, stays))
    rests = np.append(1.0, tail[:-1]) * (1 - stays)
    model = constriction.stream.model.Categorical(np.append(rests, tail[-1]).clip(1e-7), perfect=False)
    return low, model, constriction.stream.model.Uniform(1 << low) if low else None
