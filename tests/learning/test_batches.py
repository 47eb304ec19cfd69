from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import BadInput
from gossamer.learning.batches import BatchStream


def stream(n: int, batch_size: int | str, rank: int = 0, seed: int = 1) -> BatchStream:
    return BatchStream(seed, rank, np.arange(n, dtype=np.int64) * 3, batch_size)  # type: ignore[arg-type]


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 4))
def test_every_sample_occurs_once_per_epoch(n: int, batch_size: int, epochs: int) -> None:
    batches = stream(n, batch_size)
    size = min(n, batch_size)
    count = -(-n * epochs // size)
    drawn = np.concatenate([batches.batch(k).numpy() for k in range(count)])
    for epoch in range(epochs):
        assert sorted(drawn[epoch * n : (epoch + 1) * n]) == [3 * i for i in range(n)]
    assert max(Counter(drawn.tolist()).values()) <= -(-count * size // n)


@given(st.integers(1, 30), st.integers(1, 40), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_batch_depends_only_on_its_number(n: int, batch_size: int, numbers: list[int]) -> None:
    used = stream(n, batch_size)
    for number in numbers:
        assert used.batch(number).tolist() == stream(n, batch_size).batch(number).tolist()
        assert len(used.batch(number)) == used.batch_size == min(n, batch_size)


def test_epochs_ranks_and_seeds_are_shuffled_differently() -> None:
    orders = {
        tuple(stream(50, 50, rank, seed).batch(number).tolist())
        for rank in range(2)
        for seed in range(2)
        for number in range(2)
    }
    assert len(orders) == 8


def test_full_batch_holds_all_samples_in_order() -> None:
    batches = stream(7, "full")
    assert batches.batch_size == 7
    assert batches.batch(0).tolist() == batches.batch(5).tolist() == [0, 3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("batch_size", [4, "full"])
def test_node_without_samples_cannot_train(batch_size: int | str) -> None:
    with pytest.raises(BadInput, match="partition: node 2 has no samples to train on"):
        stream(0, batch_size, rank=2).batch(0)
