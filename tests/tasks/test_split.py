from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.tasks.data import split_by_owner


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    fraction=st.floats(0.01, 0.99),
    purpose=st.sampled_from([None, "test-split"]),
    seed=st.integers(0, 99),
)
def test_split_covers_all_samples_and_trains_every_owner(sizes, fraction, purpose, seed):
    owners = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    train, test = split_by_owner(owners, fraction, purpose)
    assert sorted([*train, *test]) == list(range(sum(sizes)))
    assert all(np.all(np.diff(part) > 0) for part in (train, test))
    for owner, size in enumerate(sizes):
        trained, tested = np.sum(owners[train] == owner), np.sum(owners[test] == owner)
        assert trained >= 1
        assert tested >= 1 or size == 1
        if 1 <= round(fraction * size) < size:
            assert trained == round(fraction * size)


def test_first_samples_are_trained_on_without_a_purpose():
    train, test = split_by_owner(np.array([1, 0, 1, 1, 0, 1, 0, 0]), 0.5)
    assert train.tolist() == [0, 1, 2, 4]
    assert test.tolist() == [3, 5, 6, 7]


def test_draw_of_an_owner_is_independent_of_other_owners():
    def trained(owner: int, *sizes: int) -> list[int]:
        owners = np.repeat(np.arange(len(sizes)), sizes)
        train, _ = split_by_owner(owners, 0.5, "test-split")
        return (train[owners[train] == owner] - sum(sizes[:owner])).tolist()

    alone = trained(1, 30, 20)
    assert alone != list(range(10))
    assert trained(1, 30, 20, 7) == trained(1, 4, 20) == alone
    assert trained(0, 20) != alone
    assert trained(0, 20) == trained(0, 20)


@pytest.mark.parametrize("fraction", [0.2, 0.7])
def test_shares_are_rounded_for_each_owner(fraction):
    owners = np.repeat([0, 1], [10, 100])
    train, _ = split_by_owner(owners, fraction, "test-split")
    assert np.bincount(owners[train]).tolist() == [10 * fraction, 100 * fraction]
