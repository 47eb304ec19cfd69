"""Mixing in compiled loops, with the same bits as torch's operations. Importing this module loads numba,
which takes some tenths of a second, so :mod:`~gossamer.learning.mixing` imports it only if there is enough
work.

Loops are compiled at the first call with new types (:mod:`~gossamer.learning.compiled`).

A flag is True or None, which differ in type, so that each combination is compiled separately. ``fused``: a product and a
sum are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gossamer.learning.compiled import compiled

COLUMNS = 512
"""Width of a block: the pieces of a thousand rows that are read again and again stay in a core's cache."""
LANES, REGISTERS = 16, 4
WIDTH = LANES * REGISTERS
_SMALL = torch.full((1,), 2.0**-12, dtype=torch.float32)
FUSED = True if (-1 - 2 * _SMALL).add(1 + _SMALL, alpha=1 + 2.0**-12).item() != 0 else None
"""Whether torch's kernels round a product and a sum once here, which depends on the processor and torch's settings."""
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)


def _strip(lanes: int, registers: int) -> Any:
    """A function that computes ``lanes * registers`` adjacent columns of a weighted sum in registers. Of its arguments, the
    first two are the addresses of arrays: where the terms' vectors begin, and their weights. The last address is that
    of the vector that is subtracted from each of them, if there is one."""
    vector = ir.VectorType(_FLOAT, lanes)
    step = 4 * lanes

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors, weights, first, stop, offset, result, base, _, _, _ = arguments
        fused, streamed, based = (flag is not types.none for flag in signature.args[-3:])

        def fma(x: Any, weight: Any, total: Any) -> Any:
            if not fused:
                return builder.fadd(builder.fmul(x, weight), total)
            kind = ir.FunctionType(vector, [vector] * 3)
            name = f"llvm.fma.v{lanes}f32"
            return builder.call(
                cgutils.get_or_insert_function(builder.module, kind, name), [x, weight, total]
            )

        def pointer(base: Any, displacement: Any, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, displacement), kind.as_pointer())

        # A product added to -0 is the product, to the bit, so the first term needs no special case. Sums of differences
        # begin with 0, since there may be none.
        zero = ir.Constant(vector, [0.0 if based else -0.0] * lanes)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(registers)]
        for total in totals:
            builder.store(zero, total)
        subtracted = []
        if based:
            address = builder.add(base, offset)
            for number in range(registers):
                subtracted.append(builder.load(pointer(address, _INT64(number * step), vector), align=4))
        with cgutils.for_range_slice(builder, first, stop, _INT64(1), _INT64) as (term, _):
            begin = builder.load(pointer(vectors, builder.mul(term, _INT64(8)), _INT64))
            weight = builder.load(pointer(weights, builder.mul(term, _INT64(4)), _FLOAT))
            lane = builder.insert_element(ir.Constant(vector, ir.Undefined), weight, ir.IntType(32)(0))
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
            spread = builder.shuffle_vector(lane, lane, everywhere)
            address = builder.add(begin, offset)
            for number, total in enumerate(totals):
                x = builder.load(pointer(address, _INT64(number * step), vector), align=4)
                if based:
                    x = builder.fsub(x, subtracted[number])
                builder.store(fma(x, spread, builder.load(total)), total)
        address = builder.add(result, offset)
        for number, total in enumerate(totals):
            target = pointer(address, _INT64(number * step), vector)
            stored = builder.store(builder.load(total), target, align=step if streamed else 4)
            if streamed:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    def strip(
        typing: Any,
        vectors: Any,
        weights: Any,
        first: Any,
        stop: Any,
        offset: Any,
        result: Any,
        base: Any,
        fused: Any,
        streamed: Any,
        based: Any,
    ) -> Any:
        return types.none(*[types.int64] * 7, fused, streamed, based), lower

    return intrinsic(strip)


_wide, _narrow, _single = _strip(LANES, REGISTERS), _strip(LANES, 1), _strip(1, 1)


def _fenced(typing: Any) -> Any:
    """Make streamed values visible to other threads."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), lower


_fence = intrinsic(_fenced)


@compiled
def add_rows(
    vectors: Any,
    starts: Any,
    weights: Any,
    bases: Any,
    results: Any,
    first: int,
    stop: int,
    fused: Any,
    streamed: Any,
    based: Any,
) -> None:
    """Write the columns from ``first`` to ``stop`` of weighted sums. Vectors are given by the address of their first value.

    Args:
        vectors: of all terms of all sums, int64 [terms].
        starts: sum i has the terms from ``starts[i]`` to ``starts[i + 1]``, int64 [sums + 1].
        weights: of the terms, float32 [terms].
        bases: the vectors that are subtracted from the terms of each sum, int64 [sums], if ``based``.
        results: where the sums are written, int64 [sums]; they overlap no vector that is read.
        streamed: write past the cache, which pays for more values than it holds. Results are aligned to 64 bytes then, and
            ``first`` is a multiple of 16.
    """
    terms, factors = vectors.ctypes.data, weights.ctypes.data
    for left in range(first, stop, COLUMNS):
        right = min(left + COLUMNS, stop)
        for i in range(len(results)):
            begin, end, result = starts[i], starts[i + 1], results[i]
            base = 0 if based is None else bases[i]
            column = left
            while column + WIDTH <= right:
                _wide(terms, factors, begin, end, 4 * column, result, base, fused, streamed, based)
                column += WIDTH
            while column + LANES <= right:
                _narrow(terms, factors, begin, end, 4 * column, result, base, fused, streamed, based)
                column += LANES
            while column < right:
                _single(terms, factors, begin, end, 4 * column, result, base, fused, None, based)
                column += 1
    if streamed is not None:
        _fence()


def _added(typing: Any, x: Any, weight: Any, total: Any, fused: Any) -> Any:
    """``x * weight + total`` of float32."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, total, _ = arguments
        if signature.args[-1] is types.none:
            return builder.fadd(builder.fmul(x, weight), total)
        return builder.fma(x, weight, total)

    return types.float32(types.float32, types.float32, types.float32, fused), lower


_add = intrinsic(_added)


@compiled
def add_at(vector: Any, where: Any, values: Any, own: Any, weight: Any, fused: Any) -> bool:
    """``vector[where] += weight * (values - own[where])``; without ``own`` (None), ``weight * values``. Returns False and
    does nothing unless ``where`` [k] ascends strictly within the vector."""
    last = -1
    for index in where:
        if index <= last:
            return False
        last = index
    if last >= len(vector):
        return False
    for i in range(len(where)):
        index = where[i]
        value = values[i] if own is None else values[i] - own[index]
        vector[index] = _add(value, weight, vector[index], fused)
    return True


@compiled
def sort_columns(rows: Any) -> None:
    """Sort each column of a matrix [rows, columns] in place, NaN last."""
    count, width = rows.shape
    for left in range(0, width, COLUMNS):
        right = min(left + COLUMNS, width)
        for last in range(count - 1, 0, -1):
            for i in range(last):
                low, high = rows[i, left:right], rows[i + 1, left:right]
                for column in range(right - left):
                    x, y = low[column], high[column]
                    swap = x > y or x != x
                    low[column] = y if swap else x
                    high[column] = x if swap else y
