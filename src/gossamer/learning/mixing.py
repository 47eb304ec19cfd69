"""Mixing: weighted sums of vectors, some of which may be missing or known only in part.

Sums run in rank order, whatever the order of arrival, so that engines agree to the bit: the own value first, then a fused
multiply-add for each rank. Sums of many nodes are computed together, so that each vector is read from memory once: on a CPU
with MKL by its product of a sparse and a dense matrix, else by torch's sum of embeddings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.nn.functional import embedding_bag

from gossamer.learning.rows import Rows, select
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Model, Part

if TYPE_CHECKING:
    from gossamer.learning.aggregators import Aggregator

Missing = Literal["own", "renormalize"]
Fresh = Callable[[int], Tensor]  # length -> a new, writable vector
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch adds no unsigned integers but bytes; the bits of a sum are the same."""
CACHE_BYTES = 16 << 20  # of all rows in a block of columns: a core's share of the last-level cache
LEAST_COLUMNS = 512  # shorter pieces of 10,000 rows take longer to fetch than the cache saves
SHARE_BYTES = 4 << 20  # a thread's share of the work, at least
REACH = 2**31 - 1  # the largest index of a matrix for MKL
SHORT_RUN = 8  # fewer sums are not worth a separate product
_COLUMNS = 64  # blocks are multiples of this many columns; kernels round differently at narrower ones


@runtime_checkable
class Step(Protocol):
    """What a node does with its inbox at the end of an instant: :class:`Mix`, or the decoding of models."""

    @property
    def own(self) -> Any:
        """The node's own vector or model, if it is read."""

    def terms(self) -> tuple[list[Tensor], list[float]] | None:
        """See :meth:`Mix.terms`."""

    def run(self, fresh: Fresh) -> Any:
        """The result; called in any thread."""


@dataclass(eq=False, slots=True)
class Mix:
    """A mixing step that a node asked for: the arguments of :func:`combine`, and the aggregator that replaces it, if any."""

    own: Any
    inbox: Mapping[int, Any]
    weights: Mapping[int, float]
    self_weight: float | None
    missing: Missing | None
    aggregator: Aggregator | None = None
    absent: Missing = "own"

    def run(self, fresh: Fresh) -> Any:
        """The result, in a vector that ``fresh`` creates."""
        if self.aggregator is not None:
            return self.aggregator.mix(self, fresh)
        given = self.own, self.inbox, self.weights, self.self_weight
        return combine(*given, missing=self.missing, absent=self.absent, fresh=fresh)

    def terms(self) -> tuple[list[Tensor], list[float]] | None:
        """Vectors and their weights in the order of the sum, if this is a weighted sum of whole vectors."""
        rule = self.missing or ("own" if len(self.inbox) == len(self.weights) else self.absent)
        ranks = sorted(self.inbox)
        vectors = [self.own, *[self.inbox[rank] for rank in ranks]]
        if self.aggregator is not None or rule != "own" or set(map(type, vectors)) != {Tensor}:
            return None
        own = own_weight(self.inbox, self.weights, self.self_weight)
        return vectors, [own, *[self.weights[rank] for rank in ranks]]


def combine(
    own: Any,
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None = None,
    *,
    missing: Missing | None = None,
    absent: Missing = "own",
    fresh: Fresh = torch.empty,
) -> Any:
    """``self_weight * own + sum_j weights[j] * inbox[j]``, per coordinate.

    The order of the sum, to the bit: the own vector times its weight, then rank by rank a fused multiply-add. Where own
    values replace missing coordinates, a part's weight is added to that of the own vector first, and then
    ``weight * (values - own)`` at the part's coordinates, so that only these are touched.

    Args:
        own: a vector float32 [n], or a :class:`Model`; integers [n] are summed modulo 2^bits, with whole weights.
        inbox: rank -> a vector [n], a :class:`Part` of one, or a :class:`Model` if ``own`` is one.
        weights: rank -> weight, at least for every rank in the inbox.
        self_weight: weight of ``own``; None is one minus the sum of ``weights``.
        missing: for a coordinate that a rank in ``weights`` did not send, ``"own"`` takes the own value (the weight goes to
            self), and ``"renormalize"`` leaves it out and divides by the weight that is present. None is ``absent``.
        absent: see ``missing``.
        fresh: creates the result's vector.

    Returns:
        A new vector [n], or a new Model.

    Raises:
        ValueError: for a rank without a weight, or lengths that differ."""
    if isinstance(own, Model):
        halves = [{rank: half(payload, which) for rank, payload in inbox.items()} for which in range(2)]
        rule: dict[str, Any] = {"missing": missing, "absent": absent, "fresh": fresh}
        return Model(
            *(combine(*each, weights, self_weight, **rule) for each in zip(own, halves, strict=True))
        )
    if not own.is_floating_point():
        return _ring_sum(own, inbox, weights, _self_weight(inbox, weights, self_weight))
    if missing not in ("own", "renormalize", None):
        raise ValueError(f"combine: missing={missing!r}; accepted: 'own', 'renormalize'")
    if missing is None:
        whole = len(inbox) == len(weights) and not any(isinstance(each, Part) for each in inbox.values())
        missing = "own" if whole else absent
    renormalizes = missing == "renormalize"
    if renormalizes:
        own_part = _self_weight(inbox, weights, self_weight)
    else:
        partial = [weights[rank] for rank in sorted(inbox) if isinstance(inbox[rank], Part)]
        own_part = own_weight(inbox, weights, self_weight) + sum(partial)
    out = torch.mul(own, own_part, out=fresh(len(own)))
    present = torch.full_like(out, own_part) if renormalizes else None
    for rank in sorted(inbox):
        payload, weight = inbox[rank], weights[rank]
        if isinstance(payload, Part):
            where = _region(payload, own)
            values = payload.values
            _add_at(out, where, values if renormalizes else values - own.index_select(0, where), weight)
            if present is not None:
                _add_at(present, where, 1.0, weight)
        else:
            out.add_(checked(payload, own, rank), alpha=weight)
            if present is not None:
                present.add_(weight)
    if present is not None:
        out.div_(present)
        nothing = present == 0
        if nothing.any():
            torch.where(nothing, own, out, out=out)
    return out


def _ring_sum(
    own: Integer[Tensor, " n"], inbox: Mapping[int, Any], weights: Mapping[int, float], self_weight: float
) -> Integer[Tensor, " n"]:
    """The sum of integer vectors modulo 2^bits of their dtype: exact, in any order. An absent rank adds nothing."""
    wrong = [weight for weight in (self_weight, *weights.values()) if weight != int(weight)]
    if wrong:
        raise ValueError(f"combine: a weight of {wrong[0]} for integers; accepted: whole numbers")
    # The ring of 64 bits, of which those of fewer bits are quotients.
    signed = _SIGNED.get(own.dtype, own.dtype)
    total = own.view(signed).long() * int(self_weight)
    for rank, payload in inbox.items():
        vector = checked(payload, own, rank)
        if vector.dtype is not own.dtype:
            raise ValueError(f"combine: rank {rank} sent {vector.dtype}, own is {own.dtype}")
        total += vector.view(signed).long() * int(weights[rank])
    return total.to(signed).view(own.dtype)


def _self_weight(inbox: Mapping[int, Any], weights: Mapping[int, float], given: float | None) -> float:
    if not inbox.keys() <= weights.keys():
        lacking = sorted(inbox.keys() - weights.keys())
        raise ValueError(f"combine: no weight for ranks {lacking}; weights are given for {sorted(weights)}")
    return 1.0 - sum([weights[rank] for rank in sorted(weights)]) if given is None else given


def own_weight(inbox: Mapping[int, Any], weights: Mapping[int, float], given: float | None) -> float:
    """The weight of the own value, which includes that of the ranks which did not send."""
    self_weight = _self_weight(inbox, weights, given)
    if len(inbox) == len(weights):
        return self_weight
    return self_weight + sum(weights[rank] for rank in sorted(weights.keys() - inbox.keys()))


def half(payload: Any, which: int) -> Any:
    """The parameters (0) or the buffers (1) of a model; a ValueError for anything else."""
    if not isinstance(payload, Model):
        raise ValueError(f"combine: a {type(payload).__name__} can't be mixed with a Model")
    return payload[which]


def _add_at(
    vector: Float[Tensor, " n"], where: Int[Tensor, " k"], values: Float[Tensor, " k"] | float, weight: float
) -> None:
    """``vector[where] += weight * values``; a repeated index counts once."""
    # (This takes a third of the time of indexing by brackets.)
    vector.scatter_(0, where, vector.index_select(0, where).add_(values, alpha=weight))


def _region(part: Part, own: Float[Tensor, " n"]) -> Int[Tensor, " k"]:
    if part.size != len(own):
        raise ValueError(f"combine: a part of a vector of length {part.size} met one of length {len(own)}")
    if part.where.shape != part.values.shape:
        raise ValueError(f"combine: {part.where.shape[0]} indices for {part.values.shape[0]} values")
    return part.where.to(own.device, torch.int64)


def checked(vector: Any, own: Tensor, rank: int) -> Tensor:
    """The vector itself; a ValueError if it is no tensor, or its length is not that of ``own``."""
    if not isinstance(vector, Tensor):
        found = type(vector).__name__
        raise ValueError(f"combine: rank {rank} sent {found}; accepted: a vector, a Part or a Model")
    if vector.shape != own.shape:
        raise ValueError(f"combine: rank {rank} sent shape {tuple(vector.shape)}, own is {tuple(own.shape)}")
    return vector


@dataclass(eq=False, slots=True)
class Sum:
    """``weights[0] * vectors[0] + weights[1] * vectors[1] + ...`` of vectors [P]."""

    vectors: Sequence[Tensor]
    weights: Sequence[float]

    def write(self, out: Float[Tensor, " params"]) -> None:
        """Compute this sum alone, as :func:`combine` does."""
        torch.mul(self.vectors[0], self.weights[0], out=out)
        for vector, weight in zip(self.vectors[1:], self.weights[1:], strict=True):
            out.add_(vector, alpha=weight)


def mix_rows(
    rows: Rows, sums: Sequence[Sum], workers: Workers, results: Sequence[Float[Tensor, " params"]]
) -> bool:
    """Write sums of vectors into new rows, whose version counters stay as they are. False, and nothing done, if the vectors
    differ in shape, type or device, or if no kernel on this machine has the bits of ``combine``."""
    vectors = [vector for each in sums for vector in each.vectors]
    numbers, written = rows.numbers(vectors), rows.numbers(results)
    wide = numbers is not None and rows.matrix.stride(0) >= _COLUMNS
    if numbers is None or written is None or not wide or not _in_order(stacked=False):
        mixed = mix_stacked(sums) if vectors[0].device.type != "cpu" or _in_order(stacked=True) else None
        if mixed is not None:
            torch._foreach_copy_([row.data for row in results], list(mixed.unbind()))
        return mixed is not None
    columns = rows.matrix.stride(0)  # with the padding between rows: widths are multiples of 16 then
    most = max(1, REACH // columns)
    firsts = np.cumsum([0, *(len(each.vectors) for each in sums)])
    runs = [
        _sparse(sums[start:stop], numbers[firsts[start] : firsts[stop]], select(written[start:stop]), most)
        for start, stop in _runs(written, most)
    ]
    pool = rows.matrix.as_strided((rows.rows, columns), (columns, 1))
    size = 4 * columns * (len(set(numbers.tolist())) + len(sums))
    cached = min(size // CACHE_BYTES, columns // LEAST_COLUMNS)
    units = columns // _COLUMNS
    blocks = min(units, max(1, cached, min(workers.count, size // SHARE_BYTES)))
    edges = [units * block // blocks * _COLUMNS for block in range(blocks)] + [columns]

    def block(number: int) -> None:
        for add in runs:
            add(pool[:, edges[number] : edges[number + 1]])

    workers.map(block, range(blocks))
    return True


def _runs(written: Int[np.ndarray, " sums"], most: int) -> list[tuple[int, int]]:
    """Ranges of at most ``most`` sums whose rows are adjacent, or of any sums if such ranges were short."""
    ends = [*(np.flatnonzero(np.diff(written) != 1) + 1).tolist(), len(written)]
    if len(ends) * SHORT_RUN > len(written):
        ends = [len(written)]
    ranges = zip([0, *ends[:-1]], ends, strict=True)
    return [(at, min(at + most, stop)) for start, stop in ranges for at in range(start, stop, most)]


def _sparse(
    sums: Sequence[Sum], numbers: Int[np.ndarray, " terms"], target: slice | Tensor, most: int
) -> Callable[[Float[Tensor, "rows columns"]], None]:
    """A function that writes the columns of sums of rows, which are given by number, into the target rows: without copies
    where at most ``most`` rows lie between the first and the last."""
    read, positions = np.unique(numbers, return_inverse=True)
    first, stop = int(read[0]), int(read[-1]) + 1
    near = stop - first <= most
    source = slice(first, stop) if near else torch.from_numpy(read)  # else a copy
    indices = torch.from_numpy((numbers - first if near else positions).astype(np.int32))
    shape = len(sums), stop - first if near else len(read)
    starts, weights = _starts(sums).int(), _weights(sums)

    def add(columns: Float[Tensor, "rows columns"]) -> None:
        matrix = torch.sparse_csr_tensor(starts, indices, weights, size=shape, check_invariants=False)
        out = columns[target] if isinstance(target, slice) else columns.new_empty(len(sums), columns.shape[1])
        torch.addmm(out, matrix, columns[source], beta=0, out=out)
        if not isinstance(target, slice):
            columns[target] = out

    return add


def mix_stacked(sums: Sequence[Sum]) -> Float[Tensor, "sums params"] | None:
    """The sums of vectors on one device by few launches; None if the vectors differ in shape, type or device."""
    vectors = [vector for each in sums for vector in each.vectors]
    if len({(vector.shape, vector.dtype, vector.device) for vector in vectors}) > 1:
        return None
    distinct = {(vector.data_ptr(), *vector.stride()): vector for vector in vectors}
    numbers = {place: number for number, place in enumerate(distinct)}
    positions = torch.tensor([numbers[vector.data_ptr(), *vector.stride()] for vector in vectors])
    device, dtype = vectors[0].device, vectors[0].dtype
    table = torch.stack(list(distinct.values()))
    starts, weights = _starts(sums)[:-1].to(device), _weights(sums).to(device, dtype)
    return embedding_bag(positions.to(device), table, starts, mode="sum", per_sample_weights=weights)


def _starts(sums: Sequence[Sum]) -> Int[Tensor, " starts"]:
    """Sum i has the terms from ``starts[i]`` to ``starts[i + 1]``, of those of all sums."""
    return torch.from_numpy(np.cumsum([0, *(len(each.vectors) for each in sums)]))


def _weights(sums: Sequence[Sum]) -> Float[Tensor, " terms"]:
    return torch.tensor([weight for each in sums for weight in each.weights], dtype=torch.float32)


@cache
def _in_order(stacked: bool) -> bool:
    """Whether :func:`mix_stacked`, or else :func:`_sparse`, adds in order here, to the bits of ``combine``."""
    if not (stacked or torch._C.has_mkl):
        return False
    rng = np.random.default_rng(0)
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33)
    terms = [(rng.integers(0, 20, size=count), rng.normal(size=count)) for count in counts]
    for columns in (*((16, 48) if stacked else ()), 64, 80, 128, 1040):
        table = torch.from_numpy(rng.normal(size=(20 + len(terms), columns))).float()
        sums = [Sum([table[number] for number in numbers], weights.tolist()) for numbers, weights in terms]
        expected = torch.empty(len(sums), columns)
        for out, each in zip(expected, sums, strict=True):
            each.write(out)
        if stacked:
            found = mix_stacked(sums)
        else:
            with warnings.catch_warnings():
                # torch warns once per process that its sparse matrices may still change.
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
                _sparse(sums, np.concatenate([numbers for numbers, _ in terms]), slice(20, None), 1000)(table)
            found = table[20:]
        if found is None or not torch.equal(found, expected):
            return False
    return True
