"""Mixing against a NumPy reference that works coordinate by coordinate."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.learning.mixing import combine, own_weight
from gossamer.messages.tags import Model, Part

N = 6
Values = st.floats(-10, 10, width=32)
Weight = st.floats(0.0, 1.0, width=16)
Vector = st.lists(Values, min_size=N, max_size=N).map(torch.tensor)


@st.composite
def parts(draw: Any) -> Part:
    indices = draw(st.lists(st.integers(0, N - 1), unique=True, max_size=N))
    values = draw(st.lists(Values, min_size=len(indices), max_size=len(indices)))
    return Part(torch.tensor(values), torch.tensor(indices, dtype=torch.int32), N)


Payload = st.one_of(Vector, parts())
Inboxes = st.dictionaries(st.integers(0, 5), Payload, max_size=4)


def coordinates(payload: Any) -> dict[int, float]:
    """The sent values by coordinate."""
    if isinstance(payload, torch.Tensor):
        return dict(enumerate(payload.tolist()))
    return dict(zip(payload.where.tolist(), payload.values.tolist(), strict=True))


def reference(own: Any, inbox: Any, weights: Any, self_weight: float | None, missing: str) -> np.ndarray:
    own = own.double().numpy()
    rest = 1 - sum(weights.values()) if self_weight is None else self_weight
    sent = {rank: coordinates(inbox[rank]) if rank in inbox else {} for rank in weights}
    out = np.zeros(N)
    for i in range(N):
        total, present = rest * own[i], rest
        for rank, weight in weights.items():
            if i in sent[rank]:
                total, present = total + weight * sent[rank][i], present + weight
            elif missing == "own":
                total += weight * own[i]
        if missing == "own":
            out[i] = total
        else:
            out[i] = own[i] if abs(present) < 1e-12 else total / present
    return out


@given(Vector, Inboxes, st.dictionaries(st.integers(0, 5), Weight), st.none() | Weight)
def test_missing_values_are_replaced_by_the_nodes_own(
    own: torch.Tensor, inbox: Any, more: dict[int, float], self_weight: float | None
) -> None:
    weights = {**dict.fromkeys(inbox, 0.125), **more}
    got = combine(own, inbox, weights, self_weight=self_weight)
    expected = reference(own, inbox, weights, self_weight, "own")
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-4, atol=1e-4)


@given(
    Vector,
    Inboxes,
    st.dictionaries(st.integers(0, 5), st.floats(0.125, 1, width=16)),
    st.sampled_from([0.5, 1]),
)
def test_renormalize_divides_by_the_weight_present(
    own: torch.Tensor, inbox: Any, more: dict[int, float], self_weight: float
) -> None:
    weights = {**dict.fromkeys(inbox, 0.25), **more}
    got = combine(own, inbox, weights, self_weight=self_weight, missing="renormalize")
    expected = reference(own, inbox, weights, self_weight, "renormalize")
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-4, atol=1e-4)


@given(
    Vector,
    Inboxes,
    st.dictionaries(st.integers(0, 5), st.floats(0.125, 1, width=16)),
    st.sampled_from(["own", "renormalize"]),
)
def test_differences_are_what_mixing_adds(
    own: torch.Tensor, inbox: Any, more: dict[int, float], missing: Any
) -> None:
    weights = {**dict.fromkeys(inbox, 0.0625), **{rank: weight / 8 for rank, weight in more.items()}}
    got = combine(own, inbox, weights, missing=missing, differences=True)
    expected = reference(own, inbox, weights, None, missing) - own.double().numpy()
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_differences_are_rounded_in_proportion_to_themselves() -> None:
    """The differences of neighbouring float32 numbers are exact, and so are their sums with powers of two."""
    own = torch.tensor([1000.0, -3.0, 0.1])
    above, below = torch.nextafter(own, torch.tensor(1e9)), torch.nextafter(own, torch.tensor(-1e9))
    got = combine(own, {1: above, 2: below, 3: above}, {1: 0.25, 2: 0.125, 3: 0.25}, differences=True)
    up, down = above.double() - own.double(), below.double() - own.double()
    assert got.double().tolist() == (0.5 * up + 0.125 * down).tolist()
    rounded = combine(own, {1: above, 2: below, 3: above}, {1: 0.25, 2: 0.125, 3: 0.25}) - own
    assert rounded.tolist() != got.tolist()


def test_differences_of_models_include_buffers_and_absent_ranks_add_nothing() -> None:
    own = Model(torch.zeros(2), torch.ones(1))
    got = combine(own, {4: Model(torch.ones(2), torch.full((1,), 5.0))}, {4: 0.25, 5: 0.25}, differences=True)
    assert got.parameters.tolist() == [0.25, 0.25]
    assert got.buffers.tolist() == [1.0]
    alone = combine(torch.ones(3), {}, {5: 0.5}, differences=True)
    assert alone.tolist() == [0.0] * 3


def test_differences_of_integers_are_exact_in_their_ring() -> None:
    own, theirs = torch.tensor([250, 3], dtype=torch.uint8), torch.tensor([4, 1], dtype=torch.uint8)
    got = combine(own, {1: theirs, 2: own}, {1: 3, 2: 1}, differences=True)
    assert got.tolist() == [3 * (4 - 250) % 256, 3 * (1 - 3) % 256]


@given(Vector, Inboxes, st.randoms(use_true_random=False), st.sampled_from(["own", "renormalize"]))
def test_order_of_the_inbox_does_not_change_the_bits(
    own: torch.Tensor, inbox: dict[int, Any], shuffle: random.Random, missing: Any
) -> None:
    weights = {rank: 0.1 + 0.01 * rank for rank in inbox}
    order = list(inbox)
    shuffle.shuffle(order)
    shuffled = {rank: inbox[rank] for rank in order}
    other_weights = {rank: weights[rank] for rank in reversed(order)}
    one = combine(own, inbox, weights, missing=missing)
    other = combine(own, shuffled, other_weights, missing=missing)
    assert torch.equal(one, other)


@given(Vector, st.dictionaries(st.integers(0, 5), Payload, max_size=4))
def test_combine_does_not_write_its_inputs(own: torch.Tensor, inbox: Any) -> None:
    before = own.clone()
    kept = {rank: coordinates(payload) for rank, payload in inbox.items()}
    weights = dict.fromkeys(inbox, 0.25)
    combine(own, inbox, weights)
    combine(own, inbox, weights, self_weight=1.0, missing="renormalize")
    assert torch.equal(own, before)
    assert {rank: coordinates(payload) for rank, payload in inbox.items()} == kept


def test_own_value_stays_where_no_weight_is_present() -> None:
    own = torch.tensor([1.0, 2.0, 3.0])
    got = combine(
        own,
        {1: Part(torch.tensor([9.0]), torch.tensor([1]), 3)},
        {1: 0.5},
        self_weight=0.0,
        missing="renormalize",
    )
    assert got.tolist() == [1.0, 9.0, 3.0]


@pytest.mark.parametrize("missing", ["own", "renormalize"])
def test_cancelling_weights_are_accepted(missing: Any) -> None:
    own = torch.tensor([1.0, 2.0, 3.0])
    got = combine(
        own, {1: Part(torch.tensor([9.0]), torch.tensor([1]), 3)}, {1: -1.0}, self_weight=1.0, missing=missing
    )
    assert got.tolist() == ([0.0, -7.0, 0.0] if missing == "own" else [1.0, 2.0, 3.0])


@pytest.mark.parametrize("missing", ["own", "renormalize"])
def test_indices_outside_the_vector_are_refused(missing: Any) -> None:
    for index in (3, -1):
        part = Part(torch.tensor([9.0]), torch.tensor([index]), 3)
        with pytest.raises(IndexError):
            combine(torch.ones(3), {1: part}, {1: 0.5}, missing=missing)


def test_parameters_and_buffers_are_both_mixed() -> None:
    own = Model(torch.zeros(2), torch.ones(1))
    got = combine(own, {4: Model(torch.ones(2), torch.full((1,), 5.0))}, {4: 0.25, 5: 0.25})
    assert got.parameters.tolist() == [0.25, 0.25]
    assert got.buffers.tolist() == [2.0]


def test_weights_are_summed_exactly() -> None:
    """sum() of ten times 0.1 is less than 1 in Python 3.11, and 1 since 3.12."""
    weights = dict.fromkeys(range(10), 0.1)
    assert own_weight(weights, weights, None) == 0.0
    assert own_weight({}, weights, 0.0) == 1.0


def test_result_is_allocated_by_the_given_function() -> None:
    made = []

    def fresh(length: int) -> torch.Tensor:
        made.append(torch.empty(length))
        return made[-1]

    assert combine(torch.ones(3), {}, {}, fresh=fresh) is made[0]


def test_unknown_rule_for_missing_values_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="missing"):
        combine(torch.ones(1), {}, {}, missing="drop")  # type: ignore[arg-type]
