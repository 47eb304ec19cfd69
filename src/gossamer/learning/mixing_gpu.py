"""Sums of rows on a GPU: one launch of a Triton kernel for all of them."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 1024  # columns of one instance


@no_type_check
@triton.jit
def _add_rows(
    vectors, starts, weights, bases, written, finite, length, count, BLOCK: tl.constexpr, BASED: tl.constexpr
):
    # The sums of one block of columns run next to each other, so that a vector that several sums read is in the cache.
    row = tl.program_id(0) % count
    columns = tl.program_id(0) // count * BLOCK + tl.arange(0, BLOCK)
    inside = columns < length
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    if BASED:
        vector = tl.load(bases + row).to(tl.pointer_type(tl.float32))
        base = tl.load(vector + columns, mask=inside, other=0.0)
        total = tl.zeros((BLOCK,), tl.float32)
        for term in range(first, end):
            vector = tl.load(vectors + term).to(tl.pointer_type(tl.float32))
            difference = tl.load(vector + columns, mask=inside, other=0.0) - base
            total = tl.fma(difference, tl.load(weights + term), total)
    else:
        vector = tl.load(vectors + first).to(tl.pointer_type(tl.float32))
        total = tl.load(vector + columns, mask=inside, other=0.0) * tl.load(weights + first)
        for term in range(first + 1, end):
            vector = tl.load(vectors + term).to(tl.pointer_type(tl.float32))
            total = tl.fma(tl.load(vector + columns, mask=inside, other=0.0), tl.load(weights + term), total)
    result = tl.load(written + row).to(tl.pointer_type(tl.float32))
    tl.store(result + columns, total, mask=inside)
    infinite = tl.max(tl.where(total - total == 0.0, 0, 1))  # infinity minus itself is NaN
    tl.store(finite + row, 0, mask=infinite != 0)


def add_rows(
    vectors: Int[Tensor, " terms"],
    starts: Int[Tensor, " starts"],
    weights: Float[Tensor, " terms"],
    bases: Int[Tensor, " bases"],
    written: Int[Tensor, " sums"],
    length: int,
) -> Bool[Tensor, " sums"]:
    """Write sums of rows into other rows, with the same bits as :func:`~gossamer.learning.mixing.combine`.

    Args:
        vectors: addresses of the terms. (All arguments are on the GPU.)
        starts: the terms of sum i are those from ``starts[i]`` to ``starts[i + 1]``.
        weights: the terms' weights.
        bases: addresses of the vectors that are subtracted from the terms of each sum; empty for none.
        written: addresses of the results.
        length: number of values in a row.

    Returns:
        Whether all values of a sum are finite."""
    count = len(written)
    finite = torch.ones(count, dtype=torch.int8, device=written.device)
    grid = (count * triton.cdiv(length, BLOCK),)
    tables, based = (vectors, starts, weights, bases, written, finite), len(bases) > 0
    _add_rows[grid](*tables, length, count, BLOCK=BLOCK, BASED=based)
    return finite.bool()
