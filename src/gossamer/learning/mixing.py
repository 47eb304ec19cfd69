"""Mixing: weighted sums of vectors, some of which may be missing or incomplete.

Sums run in rank order, regardless of the order of arrival, so that engines agree bit by bit: the node's own
value first, then a fused multiply-add for each rank. :func:`combine` computes one sum with torch's
operations. A simulation computes the sums of many nodes together in compiled loops, with the same bits; the
loops also handle parts of models and sorting. Loading them takes some tenths of a second. A simulation loads
them once it has spent about as long without them; real nodes never do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gossamer.learning.parameters import note_finite
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Model, Part

Missing = Literal["own", "renormalize"]
Fresh = Callable[[int], Tensor]  # length -> a new, writable vector
Terms = tuple[list[Tensor], list[float], Tensor | None]  # the arguments of a :class:`Sum`
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch adds no unsigned integers except bytes, so signed ones are used; the bits of a sum are the same."""
LOADING_NS = 2e8  # work without the compiled loops after which they are loaded
SHARE_BYTES = 4 << 20  # minimum share of the work for a thread
CACHE_BYTES = 8 << 20  # larger results bypass the cache, since they would be evicted before they are read
MAX_SORTED = 256  # models per column; the loop's time is quadratic in their number
# Approximate times of torch's operations.
_NS_PER_CALL = 1e3
_NS_PER_TERM = 0.25
_NS_PER_INDEX = 5.0
_NS_PER_SORTED = 12.0


@runtime_checkable
class InboxJob(Protocol):
    """A node's work on its inbox at the end of an instant: a :class:`Mix`, or the decoding of models."""

    own: Any
    """The node's own vector or model, if it is read."""

    def prepare(self) -> None:
        """Take the values that the job reads. Called when everything else of the instant is done."""

    def terms(self) -> Terms | None:
        """See :meth:`Mix.terms`."""

    def run(self, fresh: Fresh) -> Any:
        """Compute the result. Called in any thread."""

    def commit(self, result: Any) -> Any:
        """Apply the result, and return the value of the node's call."""


@runtime_checkable
class MixingRule(Protocol):
    """What replaces :func:`combine` (:class:`gossamer.learning.Aggregator`)."""

    def mix(self, step: Mix, fresh: Fresh) -> Any:
        """The result of a mixing step, in vectors that ``fresh`` creates."""


@dataclass(eq=False)
class Mix:
    """A mixing step requested by a node: the arguments of :func:`combine`, and the rule that replaces it, if any."""

    own: Any
    inbox: Mapping[int, Any]
    weights: Mapping[int, float]
    self_weight: float | None
    missing: Missing | None
    aggregator: MixingRule | None = None
    absent: Missing = "own"
    differences: bool = False

    def prepare(self) -> None:
        """Nothing to do: all values are present."""

    def commit(self, result: Any) -> Any:
        """Return the result unchanged."""
        return result

    def run(self, fresh: Fresh) -> Any:
        """The result, in a vector that ``fresh`` creates."""
        if self.aggregator is not None:
            return self.aggregator.mix(self, fresh)
        terms = self.own, self.inbox, self.weights, self.self_weight
        rule: dict[str, Any] = {"missing": self.missing, "absent": self.absent}
        return combine(*terms, **rule, differences=self.differences, fresh=fresh)

    def terms(self) -> Terms | None:
        """Vectors and their weights in the order of the sum, and the vector that is subtracted from each, if this is a
        weighted sum of whole vectors."""
        inbox, weights = self.inbox, self.weights
        rule = self.missing or ("own" if len(inbox) == len(weights) else self.absent)
        ranks = sorted(inbox)
        vectors = [self.own, *[inbox[rank] for rank in ranks]]
        if self.aggregator is not None or rule != "own" or set(map(type, vectors)) != {Tensor}:
            return None
        own, shares = own_weight(inbox, weights, self.self_weight), [weights[rank] for rank in ranks]
        return (vectors[1:], shares, self.own) if self.differences else (vectors, [own, *shares], None)


_NUMBERS = frozenset((float, int))


def check_arguments(call: str, inbox: object, weights: object, *own: object) -> None:
    """Refuse arguments of ``node.combine`` or ``node.mix`` of other kinds, such as in another order, with a TypeError."""
    of_numbers = isinstance(weights, Mapping) and (
        _NUMBERS.issuperset(map(type, weights.values())) or not any(map(_is_vector, weights.values()))
    )
    if (
        of_numbers
        and isinstance(inbox, Mapping)
        and all(isinstance(vector, Tensor | Model) for vector in own)
    ):
        return
    given = ", ".join(_described(argument) for argument in (*own, inbox, weights))
    accepted = ["own (a vector or a Model)"] * len(own) + [
        "inbox (rank -> vector)",
        "weights (rank -> number)",
    ]
    raise TypeError(f"node.{call}: got {given}; accepted: {', '.join(accepted)}")


def _is_vector(weight: object) -> bool:
    return isinstance(weight, Part | Model) or (isinstance(weight, Tensor) and weight.dim() > 0)


def _described(argument: object) -> str:
    if isinstance(argument, Mapping):
        kinds = {type(value).__name__: None for value in argument.values()}
        return f"{type(argument).__name__} of {' and '.join(kinds) or 'nothing'}"
    return type(argument).__name__


def combine(
    own: Any,
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None = None,
    *,
    missing: Missing | None = None,
    absent: Missing = "own",
    differences: bool = False,
    fresh: Fresh = torch.empty,
) -> Any:
    """``self_weight * own + sum_j weights[j] * inbox[j]``, per coordinate.

    The order of the operations determines every bit: the own vector times its weight, then a fused
    multiply-add for each rank. If own values replace missing coordinates, a part's weight is first added to
    that of the own vector; then ``weight * (values - own)`` is added at the part's coordinates, so that no
    others are touched.

    With ``differences``, the result is what mixing adds to ``own``: ``sum_j weights[j] * (inbox[j] - own)``. Each
    difference is formed before it is summed, so rounding is in proportion to the differences, not to the vectors.

    Args:
        own: a vector float32 [n], or a :class:`Model`. Integers [n] are summed modulo 2^bits, with integer
            weights.
        inbox: rank -> a vector [n], a :class:`Part` of one, or a :class:`Model` if ``own`` is one.
        weights: rank -> weight, at least for every rank in the inbox.
        self_weight: weight of ``own``; None is one minus the sum of ``weights``.
        missing: for a coordinate that a rank in ``weights`` did not send, ``"own"`` uses the own value (its
            weight goes to self), and ``"renormalize"`` leaves it out and divides by the present weight. None
            is ``absent``.
        absent: see ``missing``.
        differences: sum differences from ``own``.
        fresh: creates the result's vector.

    Returns:
        A new vector [n], or a new Model.

    Raises:
        ValueError: for a rank without a weight, or different lengths."""
    if isinstance(own, Model):
        halves = [{rank: half(payload, h) for rank, payload in inbox.items()} for h in range(2)]
        rule: dict[str, Any] = {
            "missing": missing,
            "absent": absent,
            "differences": differences,
            "fresh": fresh,
        }
        pairs = zip(own, halves, strict=True)
        return Model(*(combine(*pair, weights, self_weight, **rule) for pair in pairs))
    if not own.is_floating_point():
        rest = _self_weight(inbox, weights, self_weight)
        if differences:
            rest = -math.fsum(weights[rank] for rank in inbox)
        return _ring_sum(own, inbox, weights, rest)
    if missing not in ("own", "renormalize", None):
        raise ValueError(f"combine: missing={missing!r}; accepted: 'own', 'renormalize'")
    if missing is None:
        has_parts = any(isinstance(payload, Part) for payload in inbox.values())
        missing = "own" if len(inbox) == len(weights) and not has_parts else absent
    renormalizes = missing == "renormalize"
    if renormalizes:
        own_part = _self_weight(inbox, weights, self_weight)
    else:
        partial = [weights[rank] for rank, payload in inbox.items() if isinstance(payload, Part)]
        own_part = own_weight(inbox, weights, self_weight) + math.fsum(partial)
    out = fresh(len(own))
    if differences:
        out.zero_()
    else:
        torch.mul(own, own_part, out=out)
    present = torch.full_like(out, own_part) if renormalizes else None
    for rank in sorted(inbox):
        payload, weight = inbox[rank], weights[rank]
        if isinstance(payload, Part):
            where = _region(payload, own)
            _add_at(out, where, payload.values, None if renormalizes and not differences else own, weight)
            if present is not None:
                _add_at(present, where, torch.ones_like(payload.values), None, weight)
        else:
            vector = checked(payload, own, rank)
            out.add_(vector - own if differences else vector, alpha=weight)
            if present is not None:
                present.add_(weight)
    if present is not None:
        out.div_(present)
        empty = present == 0
        if empty.any():
            torch.where(empty, torch.zeros_like(own) if differences else own, out, out=out)
    return out


def _ring_sum(
    own: Integer[Tensor, " n"], inbox: Mapping[int, Any], weights: Mapping[int, float], self_weight: float
) -> Integer[Tensor, " n"]:
    """The sum of integer vectors modulo 2^bits of their dtype, which is exact in any order. An absent rank
    adds nothing."""
    fractions = [weight for weight in (self_weight, *weights.values()) if weight != int(weight)]
    if fractions:
        raise ValueError(f"combine: a weight of {fractions[0]} for integers; accepted: whole numbers")
    # Computed in the 64-bit ring, of which the smaller rings are quotients.
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
        unknown = sorted(inbox.keys() - weights.keys())
        raise ValueError(f"combine: no weight for ranks {unknown}; weights are given for {sorted(weights)}")
    return 1.0 - math.fsum(weights.values()) if given is None else given


def own_weight(inbox: Mapping[int, Any], weights: Mapping[int, float], given: float | None) -> float:
    """The weight of the own value, including the weights of the ranks that did not send."""
    self_weight = _self_weight(inbox, weights, given)
    if len(inbox) == len(weights):
        return self_weight
    return self_weight + math.fsum(weights[rank] for rank in weights.keys() - inbox.keys())


def half(payload: Any, index: int) -> Any:
    """The parameters (0) or the buffers (1) of a model. ValueError for anything else."""
    if not isinstance(payload, Model):
        raise ValueError(f"combine: a {type(payload).__name__} can't be mixed with a Model")
    return payload[index]


def _add_at(
    vector: Float[Tensor, " n"],
    where: Int[Tensor, " k"],
    values: Float[Tensor, " k"],
    own: Float[Tensor, " n"] | None,
    weight: float,
) -> None:
    """``vector[where] += weight * (values - own[where])``, or ``weight * values`` without ``own``. A repeated
    index counts once."""
    loops = _loops(5 * _NS_PER_CALL + len(where) * _NS_PER_INDEX)
    vectors = [vector, where, values, vector if own is None else own]
    if loops is not None and all(v.is_contiguous() and v.device.type == "cpu" for v in vectors):
        arrays = [v.numpy() for v in vectors]
        if loops.add_at(*arrays[:3], None if own is None else arrays[3], np.float32(weight), loops.FUSED):
            return
    if own is not None:
        values = values - own.index_select(0, where)
    # This takes a third of the time of indexing with brackets.
    vector.scatter_(0, where, vector.index_select(0, where).add_(values, alpha=weight))


def _region(part: Part, own: Float[Tensor, " n"]) -> Int[Tensor, " k"]:
    if part.size != len(own):
        raise ValueError(f"combine: a part of a vector of length {part.size} met one of length {len(own)}")
    if part.where.shape != part.values.shape:
        raise ValueError(f"combine: {part.where.shape[0]} indices for {part.values.shape[0]} values")
    return part.where.to(own.device)


def checked(vector: Any, own: Tensor, rank: int) -> Tensor:
    """The vector itself. ValueError if it is not a tensor, or has another length than ``own``."""
    if not isinstance(vector, Tensor):
        kind = type(vector).__name__
        raise ValueError(f"combine: rank {rank} sent {kind}; accepted: a vector, a Part or a Model")
    if vector.shape != own.shape:
        raise ValueError(f"combine: rank {rank} sent shape {tuple(vector.shape)}, own is {tuple(own.shape)}")
    return vector


@dataclass(eq=False, slots=True)
class Sum:
    """``weights[0] * vectors[0] + weights[1] * vectors[1] + ...`` of vectors [P]. A ``base`` [P] is first subtracted
    from each vector."""

    vectors: Sequence[Tensor]
    weights: Sequence[float]
    base: Tensor | None = None

    def write(self, out: Float[Tensor, " params"]) -> None:
        """Compute only this sum, as :func:`combine` does."""
        if self.base is not None:
            out.zero_()
            for vector, weight in zip(self.vectors, self.weights, strict=True):
                out.add_(vector - self.base, alpha=weight)
            return
        torch.mul(self.vectors[0], self.weights[0], out=out)
        for vector, weight in zip(self.vectors[1:], self.weights[1:], strict=True):
            out.add_(vector, alpha=weight)


def mix_rows(sums: Sequence[Sum], results: Sequence[Float[Tensor, " params"]], threads: ThreadPool) -> str:
    """Write sums of rows into other rows, without changing their version counters. All rows are float32,
    contiguous, of one length and on one device. Returns a description of the method, for the record."""
    method = ""
    for based in (False, True):
        chosen = [k for k, total in enumerate(sums) if (total.base is not None) is based]
        if chosen:
            method = _mix_alike([sums[k] for k in chosen], [results[k] for k in chosen], threads)
    return method


def _mix_alike(sums: Sequence[Sum], results: Sequence[Float[Tensor, " params"]], threads: ThreadPool) -> str:
    """:func:`mix_rows` for sums that all have a base, or all have none."""
    terms, length = sum(len(total.vectors) for total in sums), len(results[0])
    if results[0].device.type != "cpu":
        kernel = _loaded_kernel(results[0].device)
        if kernel is not None:
            note_finite(results, kernel.add_rows(*_addresses(sums, results), length).tolist())
            return "together"
    elif loops := _loops(terms * (_NS_PER_CALL + length * _NS_PER_TERM)):
        tables = [table.numpy() for table in _addresses(sums, results)]
        based = None if sums[0].base is None else True
        streamed = True if 4 * length * len(sums) > CACHE_BYTES and not (tables[-1] % 64).any() else None
        shares = max(1, min(threads.count, 4 * length * terms // SHARE_BYTES))
        units = -(-length // loops.WIDTH)
        edges = [min(units * share // shares * loops.WIDTH, length) for share in range(shares + 1)]

        def add(share: int) -> None:
            columns = edges[share], edges[share + 1]
            loops.add_rows(*tables, *columns, loops.FUSED, streamed, based)

        threads.map(add, range(shares))
        return "together"
    for total, row in zip(sums, results, strict=True):
        total.write(row.data)
    if results[0].device.type != "cpu":
        return "one at a time: Triton can't build the kernel here"
    few = _worked < LOADING_NS
    return f"one at a time: {'too little work for' if few else 'different bits from'} compiled loops"


def _addresses(
    sums: Sequence[Sum], results: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The input of the compiled loops, on the device of the results: the addresses of all terms; the starts of the
    sums among them (sum i has those from ``starts[i]`` to ``starts[i + 1]``); the terms' weights; the addresses of
    the bases, if the sums have any; and the addresses of the results."""
    lengths = [len(total.vectors) for total in sums]
    terms = chain.from_iterable(total.vectors for total in sums)
    bases = [total.base.data_ptr() for total in sums if total.base is not None]
    tables = [
        torch.from_numpy(np.fromiter(map(Tensor.data_ptr, terms), np.int64, sum(lengths))),
        torch.from_numpy(np.cumsum([0, *lengths])),
        torch.tensor(list(chain.from_iterable(total.weights for total in sums)), dtype=torch.float32),
        torch.tensor(bases, dtype=torch.int64),
        torch.from_numpy(np.fromiter(map(Tensor.data_ptr, results), np.int64, len(results))),
    ]
    vectors, starts, weights, subtracted, written = (table.to(results[0].device) for table in tables)
    return vectors, starts, weights, subtracted, written


def sort_columns(models: Float[Tensor, "models params"]) -> Float[Tensor, "models params"]:
    """The values of each column in ascending order, NaN last. ``models`` may be overwritten."""
    few = len(models) <= MAX_SORTED and models.device.type == "cpu" and models.dtype is torch.float32
    loops = _loops(models.numel() * _NS_PER_SORTED) if few else None
    if loops is None:
        return models.sort(dim=0).values
    loops.sort_columns(models.numpy())
    return models


# --- the compiled loops

_allowed = False
_worked = 0.0  # estimated nanoseconds of work that the loops would have taken


def allow_compiled_loops() -> None:
    """Allow this process to load the loops from now on."""
    global _allowed
    _allowed = True


def _loops(nanoseconds: float) -> ModuleType | None:
    """The compiled loops, if this process has had enough work for them. Otherwise None, and the estimated
    work is counted."""
    global _worked
    if not _allowed:
        return None
    if _worked < LOADING_NS:
        _worked += nanoseconds
        return None
    return _loaded()


@cache
def _loaded() -> ModuleType | None:
    """The loops; None if their sums differ from torch's on this machine."""
    from gossamer.learning import mixing_kernels as loops

    def add(total: Sum, out: Tensor) -> None:
        tables = [table.numpy() for table in _addresses([total], [out])]
        loops.add_rows(*tables, 0, len(out), loops.FUSED, None, None if total.base is None else True)

    length = 2 * loops.WIDTH + loops.LANES + 3  # runs every form of the inner loop
    return loops if _in_order(add, length, torch.device("cpu")) else None


@cache
def _loaded_kernel(device: torch.device) -> ModuleType | None:
    """The kernel for a GPU; None if there is no Triton or no C compiler, which Triton needs, or if the sums differ from
    torch's."""
    try:
        from gossamer.learning import mixing_gpu

        def add(total: Sum, out: Tensor) -> None:
            mixing_gpu.add_rows(*_addresses([total], [out]), len(out))

        return mixing_gpu if _in_order(add, mixing_gpu.BLOCK + 3, device) else None
    except Exception:  # noqa: BLE001 - of any kind, if Triton can't build a kernel
        return None


def _in_order(add: Callable[[Sum, Tensor], None], length: int, device: torch.device) -> bool:
    """Whether sums have the same bits as :func:`combine`, checked on a small case."""
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(20, length))).float().to(device)
    for count, base in product((1, 2, 3, 6, 33), (None, table[0])):
        numbers, weights = rng.integers(0, 20, size=count), rng.normal(size=count)
        result, expected = torch.empty(2, length, dtype=torch.float32, device=device).unbind()
        total = Sum([table[number] for number in numbers], weights.tolist(), base)
        total.write(expected)
        add(total, result)
        if not torch.equal(result, expected):
            return False
    return True
