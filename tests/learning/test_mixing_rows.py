"""Mixing of whole rows, many sums at once, against one sum at a time; and the threads that share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.learning import mixing
from gossamer.learning.mixing import Mix, Sum, combine, mix_rows, mix_stacked
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers


@pytest.fixture(scope="module", params=[1, 2])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    if not (mixing._in_order(stacked=True) and mixing._in_order(stacked=False)):
        pytest.skip("no kernel sums whole rows in order here")
    shared = Workers(request.param)
    yield shared
    shared.close()


@st.composite
def graphs(draw: Any) -> tuple[int, list[dict[int, float]]]:
    """Number of rows, and for some of them (whose owners mix) weights of others: none, one or many."""
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
    # Zeros of either sign are equal.
    return (vector + 0.0).view(torch.int32).tolist()


def mixed(rows: Rows, sums: list[Sum], workers: Workers) -> list[torch.Tensor]:
    """The sums in new rows."""
    results = [rows.fresh() for _ in sums]
    assert mix_rows(rows, sums, workers, results)
    return results


@settings(max_examples=60)
@given(
    length=st.integers(1, 3000),
    graph=graphs(),
    sparse=st.booleans(),
    gaps=st.lists(st.booleans(), max_size=12),
    seed=st.integers(0, 2**31),
    cache=st.sampled_from([1, 1 << 12, 1 << 20]),
    reach=st.sampled_from([1, 3000, 10_000, 2**31 - 1]),
)
def test_sums_of_rows_are_those_of_combine_to_the_bit(
    workers: Workers,
    length: int,
    graph: tuple[int, list[dict[int, float]]],
    sparse: bool,
    gaps: list[bool],
    seed: int,
    cache: int,
    reach: int,
) -> None:
    count, asked = graph
    rows = Rows(length)
    rng = torch.Generator().manual_seed(seed)
    held, between = [], []
    for number in range(count):
        if number < len(gaps) and gaps[number]:
            between.append(rows.fresh())  # then they don't lie together
        held.append(rows.fresh().copy_(torch.randn(length, generator=rng) * 10 ** (number % 3)))
    free = between[::2]
    del between[::2], free  # and results go where there is room
    before = [row.clone() for row in held]
    sums, expected = [], []
    for each in asked:
        rank, weights = int(each[-1]), {other: weight for other, weight in each.items() if other >= 0}
        inbox = {other: held[other] for other in weights}
        terms = Mix(held[rank], inbox, weights, None, "own").terms()
        assert terms is not None
        sums.append(Sum(*terms))
        expected.append(combine(held[rank], inbox, weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "CACHE_BYTES", cache)
        patch.setattr(mixing, "LEAST_COLUMNS", 64)
        patch.setattr(mixing, "REACH", reach)
        if not sparse:
            patch.setattr(mixing, "_in_order", lambda stacked: stacked)
        got = mixed(rows, sums, workers)
    stacked = mix_stacked(sums)
    assert stacked is not None
    for one, other in zip(stacked, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert bits(one) == bits(other)
        assert rows.number(one) is not None
    assert all(torch.equal(row, kept) for row, kept in zip(held, before, strict=True))


def test_weights_of_the_absent_are_the_own_rows_as_in_combine(workers: Workers) -> None:
    rows = Rows(100)
    own, other = (rows.fresh().copy_(torch.randn(100)) for _ in range(2))
    weights = {1: 0.1, 2: 0.3, 5: 0.2}
    terms = Mix(own, {2: other}, weights, None, "own").terms()
    assert terms is not None
    got = mixed(rows, [Sum(*terms)], workers)
    assert bits(got[0]) == bits(combine(own, {2: other}, weights))


def test_a_vector_that_comes_twice_counts_twice(workers: Workers) -> None:
    rows = Rows(100)
    own, other = (rows.fresh().copy_(torch.randn(100)) for _ in range(2))
    weights = {1: 0.1, 2: 0.3}
    inbox = {1: other, 2: other}
    terms = Mix(own, inbox, weights, None, "own").terms()
    assert terms is not None
    got = mixed(rows, [Sum(*terms)], workers)
    assert bits(got[0]) == bits(combine(own, inbox, weights))


def test_what_a_new_row_held_before_does_not_matter(workers: Workers) -> None:
    rows = Rows(1024)  # no padding between rows
    vectors = [rows.fresh().copy_(torch.randn(1024)) for _ in range(3)]
    held = [rows.fresh().fill_(float("nan")) for _ in range(3)]
    del held
    sums = [Sum([vector], [2.0]) for vector in vectors]
    got = mixed(rows, sums, workers)
    assert all(torch.equal(one, vector * 2) for one, vector in zip(got, vectors, strict=True))


def test_a_kernel_in_another_order_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(sums: list[Sum]) -> torch.Tensor | None:
        return mix_stacked([Sum(each.vectors[::-1], each.weights[::-1]) for each in sums])

    monkeypatch.setattr(mixing, "mix_stacked", backwards)
    assert not mixing._in_order.__wrapped__(stacked=True)


def test_writing_sums_does_not_count_as_a_modification(workers: Workers) -> None:
    """A node has its row before the row is written, and notices when somebody modifies it."""
    rows = Rows(100)
    vectors = [rows.fresh().copy_(torch.randn(100)) for _ in range(2)]
    result = rows.fresh()
    version = result._version
    assert mix_rows(rows, [Sum(vectors, [0.5, 0.5])], workers, [result])
    torch.testing.assert_close(result, (vectors[0] + vectors[1]) / 2)
    assert result._version == version


def test_unlike_vectors_are_not_stacked() -> None:
    assert mix_stacked([Sum([torch.ones(2), torch.ones(3)], [0.5, 0.5])]) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: sums of vectors on a GPU")
def test_sums_on_a_gpu_are_those_of_combine(workers: Workers) -> None:
    rows = Rows(1000, "cuda")
    vectors = [rows.fresh().normal_() for _ in range(8)]
    sums, expected = [], []
    for rank in range(8):
        inbox = {other: vectors[other] for other in range(8) if other != rank}
        mix = Mix(vectors[rank], inbox, dict.fromkeys(inbox, 0.1), None, "own")
        terms = mix.terms()
        assert terms is not None
        sums.append(Sum(*terms))
        expected.append(mix.run(rows.vector))
    got = mixed(rows, sums, workers)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_beyond_what_32_bits_count_are_mixed_as_well(workers: Workers) -> None:
    """Memory is only taken by the rows that are written."""
    rows = Rows(7850)
    most = len(rows._array) - 100
    for first in (250_000, 290_000, 600_000):
        if first > most:
            pytest.skip(f"the store has room for {most} rows, which is less than {first}")
        rows.rows = first + 50
        vectors = [rows._row(number).normal_() for number in (3, first - 5, first - 1)]
        results = [rows._row(first + number) for number in range(8)]
        sums = [Sum(vectors, [0.5, 0.25, float(number)]) for number in range(8)]
        assert mix_rows(rows, sums, workers, results)
        for number, result in enumerate(results):
            mix = Mix(vectors[0], {1: vectors[1], 2: vectors[2]}, {1: 0.25, 2: float(number)}, 0.5, "own")
            assert bits(result) == bits(mix.run(torch.empty))
        del vectors, results, sums
