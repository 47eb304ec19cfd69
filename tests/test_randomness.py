from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.randomness import SHARED, generator, key, torch_seed

Keys = st.tuples(
    st.integers(0, 2**64),
    st.text(max_size=5),
    st.integers(-1, 1000),
    st.lists(st.integers(0, 100), max_size=3),
)


@given(Keys, Keys)
def test_different_arguments_have_different_keys(
    one: tuple[int, str, int, list[int]], other: tuple[int, str, int, list[int]]
) -> None:
    def of(arguments: tuple[int, str, int, list[int]]) -> int:
        seed, purpose, rank, counters = arguments
        return key(seed, purpose, rank, *counters)

    assert of(one) == of(one)
    # A separator keeps 1, 12 apart from 11, 2; a purpose that contains it may collide.
    if one != other and "\x1f" not in one[1] + other[1]:
        assert of(one) != of(other)


def test_key_value_is_stable() -> None:
    """A saved experiment gives the same result in another process and another year."""
    assert key(1, "partition", SHARED) == 0xB008B25C872EC4C7ED8176F4F42F43A2
    assert 0 <= key(1, "partition", SHARED) < 2**128


def test_generator_is_philox_with_that_key() -> None:
    expected = np.random.Generator(np.random.Philox(key=key(7, "batch", 3, 2)))
    assert generator(7, "batch", 3, 2).random(9).tolist() == expected.random(9).tolist()


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(0, 50))
def test_generators_are_fresh_and_independent_of_global_state(seed: int, rank: int) -> None:
    first = generator(seed, "x", rank, 3).random(4)
    np.random.default_rng().random()
    torch.rand(3)
    assert np.array_equal(first, generator(seed, "x", rank, 3).random(4))
    assert not np.array_equal(first, generator(seed, "x", rank, 4).random(4))
    assert not np.array_equal(first, generator(seed, "x", rank + 1, 3).random(4))
    assert not np.array_equal(first, generator(seed + 1, "x", rank, 3).random(4))
    assert not np.array_equal(first, generator(seed, "y", rank, 3).random(4))


def test_streams_of_neighbouring_keys_are_uncorrelated() -> None:
    draws = np.array([generator(7, "x", rank).standard_normal(4000) for rank in range(8)])
    correlation = np.corrcoef(draws) - np.eye(8)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)
    assert draws.mean() == pytest.approx(0, abs=5 / np.sqrt(32_000))


def test_torch_seeds_are_distinct_and_valid() -> None:
    seeds = {torch_seed(seed, "train", rank, 0) for seed in range(5) for rank in range(5)}
    assert len(seeds) == 25
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
