"""Sums of many nodes at once in compiled loops, against :func:`combine`, on one thread and several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.learning import mixing, mixing_kernels, parameters
from gossamer.learning.mixing import Mix, Sum, combine, mix_rows
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.messages.tags import Part


@pytest.fixture(scope="module", params=[1, 2])
def workers(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    shared = ThreadPool(request.param)
    yield shared
    shared.close()


@contextmanager
def compiled(loops: bool = True) -> Iterator[None]:
    """Use the compiled loops for any amount of work, or never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "_allowed", loops)
        patch.setattr(mixing, "LOADING_NS", 0.0)
        yield


@st.composite
def graphs(draw: Any) -> tuple[int, list[dict[int, float]]]:
    """Number of rows, and for each row that is mixed the weights of none, one or many other rows."""
    count = draw(st.integers(1, 12))
    mixing = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    weights: list[dict[int, float]] = [{} for _ in range(count)]
    weight = st.floats(-1, 1) | st.sampled_from([0.0, 1.0, 1 / 3])
    for rank in mixing:
        others = [other for other in range(count) if other != rank]
        chosen = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        weights[rank] = {other: draw(weight) for other in chosen}
    return count, [weights[rank] | {-1: float(rank)} for rank in mixing]


def bits(vector: torch.Tensor) -> list[int]:
    """Bit patterns, with NaN normalized: its payload is unspecified."""
    return vector.nan_to_num(nan=1e30).view(torch.int32).tolist()


def mixed(rows: Rows, sums: list[Sum], workers: ThreadPool) -> list[torch.Tensor]:
    """The sums, written to new rows."""
    results = [rows.fresh() for _ in sums]
    with compiled():
        assert mix_rows(sums, results, workers) == "together"
    return results


@settings(max_examples=60)
@given(
    length=st.integers(1, 3000),
    graph=graphs(),
    gaps=st.lists(st.booleans(), max_size=12),
    seed=st.integers(0, 2**31),
    cache=st.sampled_from([0, 1 << 30]),
    share=st.sampled_from([1, 1 << 30]),
    special=st.sampled_from([None, 0.0, -0.0, np.nan, np.inf, 1e-42]),
    differences=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_sums_of_rows_have_the_bits_of_combine(
    workers: ThreadPool,
    length: int,
    graph: tuple[int, list[dict[int, float]]],
    gaps: list[bool],
    seed: int,
    cache: int,
    share: int,
    special: float | None,
    differences: list[bool],
) -> None:
    count, mixes = graph
    rows = Rows(length)
    rng = torch.Generator().manual_seed(seed)
    held, between = [], []
    for number in range(count):
        if number < len(gaps) and gaps[number]:
            between.append(rows.fresh())  # makes the rows non-contiguous
        held.append(rows.fresh().copy_(torch.randn(length, generator=rng) * 10 ** (number % 3)))
        if special is not None:
            held[-1][torch.rand(length, generator=rng) < 0.1] = special
    free = between[::2]
    del between[::2], free  # results may fill the freed gaps
    before = [row.clone() for row in held]
    sums, expected = [], []
    for entry, differs in zip(mixes, differences, strict=False):
        rank, weights = int(entry[-1]), {other: weight for other, weight in entry.items() if other >= 0}
        inbox = {other: held[other] for other in weights}
        terms = Mix(held[rank], inbox, weights, None, "own", differences=differs).terms()
        assert terms is not None
        sums.append(Sum(*terms))
        expected.append(combine(held[rank], inbox, weights, differences=differs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "CACHE_BYTES", cache)
        patch.setattr(mixing, "SHARE_BYTES", share)
        got = mixed(rows, sums, workers)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert bits(one) == bits(other)
        assert rows.owns(one)
    assert all(bits(row) == bits(kept) for row, kept in zip(held, before, strict=True))


@given(
    length=st.integers(0, 200),
    terms=st.integers(1, 33),
    aligned=st.booleans(),
    based=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_unfused_sums_have_the_bits_of_numpy(
    length: int, terms: int, aligned: bool, based: bool, seed: int
) -> None:
    """torch sums this way on machines without fused multiply-add."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(terms, length)).astype(np.float32)
    weights = rng.normal(size=terms).astype(np.float32)
    base = rng.normal(size=length).astype(np.float32) if based else None
    expected = np.zeros(length, np.float32) if based else vectors[0] * weights[0]
    for vector, weight in zip(
        vectors if based else vectors[1:], weights if based else weights[1:], strict=True
    ):
        expected += (vector if base is None else vector - base) * weight
    memory = np.full(length + 16, 7, dtype=np.float32)
    start = -(memory.ctypes.data // 4) % 16 + (0 if aligned else 1)
    start %= 16
    result = memory[start : start + length]
    addresses = np.array([vector.ctypes.data for vector in vectors])
    edges = np.array([0, terms])
    to = np.array([memory.ctypes.data + 4 * start])
    streamed = True if aligned else None
    bases = np.array([] if base is None else [base.ctypes.data], np.int64)
    flags = None, streamed, True if based else None
    mixing_kernels.add_rows(addresses, edges, weights, bases, to, 0, length, *flags)
    assert np.array_equal(result, expected)
    assert (memory[:start] == 7).all()
    assert (memory[start + length :] == 7).all()


def test_loops_are_unfused_where_torch_is() -> None:
    code = """
from gossamer.learning import mixing, mixing_kernels
assert mixing_kernels.FUSED is None and mixing._loaded() is mixing_kernels
"""
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}, check=True
    )


def test_loops_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    load = mixing._loaded.__wrapped__
    assert load() is mixing_kernels
    monkeypatch.setattr(mixing_kernels, "FUSED", None if mixing_kernels.FUSED else True)
    assert load() is None
    monkeypatch.setattr(mixing, "_loaded", lambda: None)
    vectors = [torch.randn(70), torch.randn(70)]
    result = torch.empty(70)
    with compiled():
        assert "different bits" in mix_rows([Sum(vectors, [0.5, 0.25])], [result], ThreadPool(1))
    assert bits(result) == bits(combine(vectors[0], {1: vectors[1]}, {1: 0.25}, 0.5))


def test_loops_are_loaded_only_for_enough_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "_allowed", True)
    monkeypatch.setattr(mixing, "_worked", 0.0)
    sums, results, workers = [Sum([torch.ones(10)], [0.5])], [torch.empty(10)], ThreadPool(1)
    assert "too little work" in mix_rows(sums, results, workers)
    mixing.sort_columns(torch.randn(5, 4_000_000))
    assert mix_rows(sums, results, workers) == "together"


@pytest.mark.parametrize("missing", ["own", "renormalize"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@given(length=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 2**31), special=st.booleans())
def test_mixed_parts_have_the_bits_of_torch(
    missing: Any, index: torch.dtype, length: int, share: float, seed: int, special: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    own, inbox = torch.randn(length, generator=rng), {}
    for rank in range(3):
        where = torch.nonzero(torch.rand(length, generator=rng) < share).flatten()
        if special and rank == 1:  # descending indices; a repeated one counts once
            where = where.flip(0).repeat_interleave(2)
        values = torch.randn(len(where), generator=rng) if rank != 1 else torch.full((len(where),), 0.5)
        inbox[rank] = Part(values, where.to(index), length)
    weights = {0: 0.3, 1: 0.1, 2: 1 / 3}
    for differences in (False, True):
        with compiled(False):
            plain = combine(own, inbox, weights, missing=missing, differences=differences)
        with compiled():
            got = combine(own, inbox, weights, missing=missing, differences=differences)
        assert bits(got) == bits(plain)


@given(count=st.integers(1, 20), columns=st.sampled_from([1, 15, 512, 1100]), seed=st.integers(0, 2**31))
def test_columns_are_sorted_with_nan_last(count: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, size=(count, columns)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    values[rng.random(values.shape) < 0.1] = np.inf
    expected = np.sort(values, axis=0)
    mixing_kernels.sort_columns(values)
    np.testing.assert_array_equal(values, expected)


def test_weights_of_missing_peers_go_to_the_own_row(workers: ThreadPool) -> None:
    rows = Rows(100)
    own, other = (rows.fresh().copy_(torch.randn(100)) for _ in range(2))
    weights = {1: 0.1, 2: 0.3, 5: 0.2}
    terms = Mix(own, {2: other}, weights, None, "own").terms()
    assert terms is not None
    got = mixed(rows, [Sum(*terms)], workers)
    assert bits(got[0]) == bits(combine(own, {2: other}, weights))


def test_vector_given_twice_counts_twice(workers: ThreadPool) -> None:
    rows = Rows(100)
    own, other = (rows.fresh().copy_(torch.randn(100)) for _ in range(2))
    weights = {1: 0.1, 2: 0.3}
    inbox = {1: other, 2: other}
    terms = Mix(own, inbox, weights, None, "own").terms()
    assert terms is not None
    got = mixed(rows, [Sum(*terms)], workers)
    assert bits(got[0]) == bits(combine(own, inbox, weights))


def test_previous_contents_of_a_result_row_do_not_matter(workers: ThreadPool) -> None:
    rows = Rows(1024)  # no padding between rows
    vectors = [rows.fresh().copy_(torch.randn(1024)) for _ in range(3)]
    held = [rows.fresh().fill_(float("nan")) for _ in range(3)]
    del held
    sums = [Sum([vector], [2.0]) for vector in vectors]
    got = mixed(rows, sums, workers)
    assert all(torch.equal(one, vector * 2) for one, vector in zip(got, vectors, strict=True))


def test_writing_sums_leaves_the_version_counter_alone(workers: ThreadPool) -> None:
    """A node gets its row before the sum is written, and must not take the sum for an in-place write."""
    rows = Rows(100)
    vectors = [rows.fresh().copy_(torch.randn(100)) for _ in range(2)]
    result = rows.fresh()
    version = result._version
    with compiled():
        mix_rows([Sum(vectors, [0.5, 0.5])], [result], workers)
    torch.testing.assert_close(result, (vectors[0] + vectors[1]) / 2)
    assert result._version == version


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: sums of vectors on a GPU"
)


@needs_gpu
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("length", [10, 3000])
def test_sums_on_a_gpu_have_the_bits_of_combine(
    workers: ThreadPool, length: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(mixing, "_loaded_kernel", lambda device: None)
    rows = Rows(length, "cuda")
    vectors = [rows.fresh().normal_() for _ in range(8)]
    sums, expected = [], []
    for rank in range(8):
        inbox = {other: vectors[other] for other in range(rank)}
        mix = Mix(vectors[rank], inbox, dict.fromkeys(inbox, 0.1), None, "own", differences=rank % 2 == 1)
        terms = mix.terms()
        assert terms is not None
        sums.append(Sum(*terms))
        expected.append(mix.run(rows.vector))
    results = [rows.fresh() for _ in sums]
    assert (mix_rows(sums, results, workers) == "together") is kernel
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


@needs_gpu
def test_non_finite_sums_on_a_gpu_are_not_marked_finite(workers: ThreadPool) -> None:
    rows = Rows(3000, "cuda")
    vectors = [torch.full_like(rows.fresh(), value) for value in (1.0, 3e38, float("inf"))]
    vectors.append(vectors[0].index_fill(0, torch.tensor([2999], device="cuda"), float("nan")))
    sums = [Sum([vector], [2.0]) for vector in vectors]
    results = [rows.fresh() for _ in sums]
    mix_rows(sums, results, workers)
    assert [hasattr(row, parameters._SEEN) for row in results] == [True, False, False, False]
    assert list(map(parameters.is_finite, results)) == [True, False, False, False]
