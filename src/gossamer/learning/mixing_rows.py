"""Mixing of many nodes at once: weighted sums of whole vectors, where each vector is read from memory once.

The sums are those of :func:`gossamer.learning.mixing.combine` to the bit: the own value first, then a fused multiply-add in
rank order. Which kernel does this depends on the machine: see :func:`_kernel`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from gossamer.learning.rows import Rows, select
from gossamer.learning.workers import Workers

CACHE_BYTES = 16 << 20
"""Size of a block of columns of all rows that are read or written: a core's share of the last-level cache, since shorter
pieces of rows are slow to fetch."""
LEAST_COLUMNS = 512
"""Shorter pieces of rows (with 10,000 rows and more) take longer to fetch than the cache saves."""
SHARE_BYTES = 4 << 20
"""A thread's share of the work, at least."""
REACH = 2**31 - 1
"""The largest index of a matrix for MKL, which counts by 32 bits."""
SHORT_RUN = 8
"""Fewer sums are not worth a separate product."""
_COLUMNS = 64
"""Blocks begin at multiples of this many columns and are no narrower, where kernels would round differently."""


@dataclass(eq=False, slots=True)
class Sum:
    """``weights[0] * vectors[0] + weights[1] * vectors[1] + ...`` of vectors [P]."""

    vectors: Sequence[Tensor]
    weights: Sequence[float]

    def write(self, out: Float[Tensor, " params"]) -> None:
        """Compute this sum alone, as :func:`gossamer.learning.mixing.combine` does."""
        torch.mul(self.vectors[0], self.weights[0], out=out)
        for vector, weight in zip(self.vectors[1:], self.weights[1:], strict=True):
            out.add_(vector, alpha=weight)


class _Terms:
    """The terms of all sums, one sum after the other, of rows that are given by number [t].

    Attributes:
        weights: of each term, float32 [t].
        starts: sum i has the terms from ``starts[i]`` to ``starts[i + 1]``; int64 [sums + 1].
        read: the numbers of distinct rows, ascending [d].
        positions: of each term's row among these [t].
    """

    def __init__(self, sums: Sequence[Sum], numbers: Int[np.ndarray, " t"]) -> None:
        self.weights = torch.tensor([weight for each in sums for weight in each.weights], dtype=torch.float32)
        self.starts = torch.from_numpy(np.cumsum([0, *(len(each.vectors) for each in sums)]))
        self.read, self.positions = np.unique(numbers, return_inverse=True)


_Add = Callable[[Float[Tensor, "rows columns"], slice | Tensor], None]
"""(columns of all rows, the rows of the results): write the sums."""
_Kernel = Callable[[_Terms], _Add]


def mix_rows(
    rows: Rows, sums: Sequence[Sum], workers: Workers, results: Sequence[Float[Tensor, " params"]]
) -> bool:
    """Write sums of whole rows into new rows, whose version counters stay as they are.

    Returns:
        Whether this was possible: False if a vector is no whole row, or no kernel on this machine has the bits of
        ``combine``.
    """
    vectors = [vector for each in sums for vector in each.vectors]
    if vectors[0].device.type != "cpu":
        mixed = mix_stacked(sums)
        if mixed is None:
            return False
        torch._foreach_copy_([row.data for row in results], list(mixed.unbind()))
        return True
    numbers, written = rows.numbers(vectors), rows.numbers(results)
    # With the padding between rows: widths are multiples of 16 then.
    columns = rows.matrix.stride(0)
    kernel = _kernel(columns >= _COLUMNS)
    if numbers is None or kernel is None:
        return False
    assert written is not None
    firsts = np.cumsum([0, *(len(each.vectors) for each in sums)])
    runs = [
        (kernel(_Terms(sums[start:stop], numbers[firsts[start] : firsts[stop]])), select(written[start:stop]))
        for start, stop in _runs(written, max(1, REACH // columns))
    ]
    pool = rows.matrix.as_strided((rows.rows, columns), (columns, 1))

    size = 4 * columns * (len(set(numbers.tolist())) + len(sums))
    units = max(1, columns // _COLUMNS)
    cached = min(size // CACHE_BYTES, columns // LEAST_COLUMNS)
    blocks = min(units, max(1, cached, min(workers.count, size // SHARE_BYTES)))
    edges = [units * block // blocks * _COLUMNS for block in range(blocks)] + [columns]

    def block(number: int) -> None:
        for add, target in runs:
            add(pool[:, edges[number] : edges[number + 1]], target)

    workers.map(block, range(blocks))
    return True


def _runs(written: Int[np.ndarray, " s"], most: int) -> list[tuple[int, int]]:
    """Ranges of at most ``most`` sums whose rows are adjacent, or of any sums if such ranges were short."""
    ends = [*(np.flatnonzero(np.diff(written) != 1) + 1).tolist(), len(written)]
    if len(ends) * SHORT_RUN > len(written):
        ends = [len(written)]
    ranges = zip([0, *ends[:-1]], ends, strict=True)
    return [(at, min(at + most, stop)) for start, stop in ranges for at in range(start, stop, most)]


def mix_stacked(sums: Sequence[Sum]) -> Float[Tensor, "sums params"] | None:
    """The sums of vectors on one device by few launches; None if the vectors differ in shape, type or device."""
    vectors = [vector for each in sums for vector in each.vectors]
    if len({(vector.shape, vector.dtype, vector.device) for vector in vectors}) > 1:
        return None
    distinct = {(vector.data_ptr(), *vector.stride()): vector for vector in vectors}
    numbers = {place: number for number, place in enumerate(distinct)}
    terms = _Terms(sums, np.array([numbers[vector.data_ptr(), *vector.stride()] for vector in vectors]))
    device = vectors[0].device
    return embedding_bag(
        torch.from_numpy(terms.positions).to(device),
        torch.stack(list(distinct.values())),
        terms.starts[:-1].to(device),
        mode="sum",
        per_sample_weights=terms.weights.to(device, vectors[0].dtype),
    )


@functools.cache
def _kernel(wide: bool) -> _Kernel | None:
    """The fastest kernel that sums in order by fused multiply-adds here, as ``combine`` does; None if none does."""
    kernels: list[_Kernel] = [_sparse, _bags] if wide and torch._C.has_mkl else [_bags]
    return next((kernel for kernel in kernels if _in_order(kernel, wide)), None)


def _in_order(kernel: _Kernel, wide: bool) -> bool:
    rng = np.random.default_rng(0)
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33)
    sums = [(rng.integers(0, 20, size=terms), rng.normal(size=terms)) for terms in counts]
    numbers = np.concatenate([numbers for numbers, _ in sums])
    for columns in (64, 80, 128, 1040) if wide else (16, 48):
        table = torch.from_numpy(rng.normal(size=(20 + len(sums), columns))).float()
        expected = torch.empty(len(sums), columns)
        given = [Sum([table[number] for number in which], weights.tolist()) for which, weights in sums]
        for out, each in zip(expected, given, strict=True):
            each.write(out)
        with warnings.catch_warnings():
            # torch warns once per process that its sparse matrices may still change.
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
            kernel(_Terms(given, numbers))(table, slice(20, None))
        if not torch.equal(table[20:], expected):
            return False
    return True


def _sparse(terms: _Terms) -> _Add:
    """MKL's product of a sparse and a dense matrix, from rows to rows without copies."""
    sums, starts, read = len(terms.starts) - 1, terms.starts.int(), terms.read
    first, stop = int(read[0]), int(read[-1]) + 1
    among_read = torch.from_numpy(terms.positions.astype(np.int32))
    among_near = torch.from_numpy((read[terms.positions] - first).astype(np.int32))

    def add(columns: Float[Tensor, "rows columns"], target: slice | Tensor) -> None:
        near = (stop - first) * columns.stride(0) <= REACH
        source = columns[first:stop] if near else columns[torch.from_numpy(read)]  # else a copy
        indices, size = among_near if near else among_read, (sums, len(source))
        matrix = torch.sparse_csr_tensor(starts, indices, terms.weights, size=size, check_invariants=False)
        out = columns[target] if isinstance(target, slice) else columns.new_empty(sums, columns.shape[1])
        torch.addmm(out, matrix, source, beta=0, out=out)
        if not isinstance(target, slice):
            columns[target] = out

    return add


def _bags(terms: _Terms) -> _Add:
    """torch's sums of embeddings, which take a contiguous table."""
    source, positions, offsets = select(terms.read), torch.from_numpy(terms.positions), terms.starts[:-1]

    def add(columns: Float[Tensor, "rows columns"], target: slice | Tensor) -> None:
        # Pieces that fit into one core's cache.
        width = max(1, (1 << 20) // (4 * len(terms.read) * _COLUMNS)) * _COLUMNS
        for piece in torch.split(columns, width, dim=1):
            piece[target] = embedding_bag(
                positions, piece[source].contiguous(), offsets, mode="sum", per_sample_weights=terms.weights
            )

    return add
