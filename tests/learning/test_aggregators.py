"""Aggregators against NumPy references that follow the papers' definitions, and in mixing."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import BadInput, Experiment
from gossamer.config.registry import build
from gossamer.learning import Aggregator, CoordinateMean, DeviationMean, Krum, Mean, Median, TrimmedMean
from gossamer.learning.mixing import Mix, combine, own_weight
from gossamer.messages.tags import Model, Part
from gossamer.runtime.setup import prepare

P = 5
Array = np.ndarray
Vectors = st.lists(st.lists(st.integers(-8, 8), min_size=P, max_size=P), min_size=1, max_size=9)


def aggregated(aggregator: Aggregator, models: list[Any], weights: list[float] | None = None) -> Array:
    """Aggregate of the node's own model, which comes first, and the others."""
    own, *others = [torch.tensor(model, dtype=torch.float32) for model in models]
    given = weights or [1 / len(models)] * len(models)
    return aggregator.aggregate(own, others, given[1:], given[0]).double().numpy()


def trimmed(models: Any, count: int) -> Array:
    """Mean per coordinate after removing the extremes one at a time."""
    columns = []
    for column in np.array(models, dtype=float).T:
        left = list(column)
        for _ in range(count):
            left.remove(max(left))
            left.remove(min(left))
        columns.append(sum(left) / len(left))
    return np.array(columns)


def krum(models: Any, f: int, m: int) -> Array:
    """A score sums the nearest n - f - 2 distances: the least sum over any n - f - 2 others."""
    x = np.array(models, dtype=float)
    n = len(x)
    scores = []
    for i in range(n):
        distances = [sum((x[i] - x[j]) ** 2) for j in range(n) if j != i]
        scores.append(min(sum(subset) for subset in combinations(distances, n - f - 2)))
    chosen = sorted(range(n), key=lambda i: (scores[i], i))[:m]
    return x[chosen].mean(axis=0)


@given(Vectors, st.data())
def test_mean_is_weighted(models: list[list[int]], data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0, 1, width=16), min_size=len(models), max_size=len(models)))
    expected = np.array(weights) @ np.array(models, dtype=float)
    np.testing.assert_allclose(aggregated(Mean(), models, weights), expected, atol=1e-4)


@given(Vectors, st.sampled_from([0.0, 1.0, 2.0, 3.5]), st.data())
def test_deviation_mean_weights_values_by_distance_from_the_mean(
    models: list[list[int]], power: float, data: Any
) -> None:
    drawn = data.draw(st.lists(st.integers(1, 9), min_size=len(models), max_size=len(models)))
    weights = [weight / sum(drawn) for weight in drawn]
    result = aggregated(DeviationMean(power=power), models, weights)
    for column, value in zip(np.array(models, dtype=float).T, result, strict=True):
        mean = np.dot(weights, column)
        pulls = weights * np.abs(column - mean) ** power
        expected = np.average(column, weights=pulls) if np.ptp(column) else column[0]
        assert value == pytest.approx(expected, abs=1e-3)
        assert column.min() - 1e-4 <= value <= column.max() + 1e-4
    if power == 0:
        np.testing.assert_allclose(result, np.array(weights) @ np.array(models, dtype=float), atol=1e-4)


@pytest.mark.parametrize(("farthest", "power"), [(0.003, 16.0), (0.003, 40.0), (1e14, 2.0), (1e8, 8.0)])
def test_deviation_mean_handles_extreme_deviations(farthest: float, power: float) -> None:
    [result] = aggregated(DeviationMean(power=power), [[0.0], [0.0], [farthest]], [1 / 3] * 3)
    pulls = np.array([1, 1, 2.0**power])
    assert result / farthest == pytest.approx(pulls[2] / pulls.sum(), rel=1e-4)


@given(Vectors)
def test_coordinate_mean_counts_each_model_once(models: list[list[int]]) -> None:
    expected = np.array(models, dtype=float).mean(axis=0)
    result = aggregated(CoordinateMean(), models, [0.5] + [0.1] * (len(models) - 1))
    np.testing.assert_allclose(result, expected, atol=1e-5)


@given(Vectors, st.integers(0, 4), st.floats(0, 0.49))
def test_trimmed_mean_drops_the_extremes(models: list[list[int]], count: int, share: float) -> None:
    count = min(count, (len(models) - 1) // 2)
    np.testing.assert_allclose(
        aggregated(TrimmedMean(count=count), models), trimmed(models, count), atol=1e-5
    )
    np.testing.assert_allclose(
        aggregated(TrimmedMean(share=share), models), trimmed(models, int(share * len(models))), atol=1e-5
    )


@pytest.mark.parametrize("models", [1, 2, 4, 10])
def test_trimmed_share_of_almost_half_leaves_a_value(models: int) -> None:
    share = float(np.nextafter(0.5, 0))
    values = [[float(value)] for value in range(models)]
    assert aggregated(TrimmedMean(share=share), values).tolist() == [(models - 1) / 2]


def test_trimmed_share_tolerates_rounding_errors() -> None:
    """0.3 - 0.2 is a little less than 0.1, but trims one of ten models."""
    models = [[float(value)] for value in [100, *range(9)]]
    assert aggregated(TrimmedMean(share=0.3 - 0.2), models).tolist() == [sum(range(1, 9)) / 8]


@given(Vectors)
def test_median_matches_numpy(models: list[list[int]]) -> None:
    np.testing.assert_allclose(aggregated(Median(), models), np.median(models, axis=0), atol=1e-6)


@given(Vectors.filter(lambda models: len(models) >= 3), st.data())
def test_krum_averages_the_models_of_lowest_score(models: list[list[int]], data: Any) -> None:
    f = data.draw(st.integers(0, (len(models) - 3) // 2))
    m = data.draw(st.integers(1, len(models) - f))
    result = aggregated(Krum(byzantine=f, selected=m), models)
    np.testing.assert_allclose(result, krum(models, f, m), atol=1e-5)


@pytest.mark.parametrize("wrong", [1e6, -1e6, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "aggregator", [TrimmedMean(count=2), Median(), Krum(byzantine=2), Krum(byzantine=2, selected=3)], ids=str
)
def test_byzantine_models_are_left_out(aggregator: Aggregator, wrong: float) -> None:
    """The result stays within the range of the honest models, whatever the two others send."""
    honest = np.random.default_rng(0).normal(size=(5, P))
    result = aggregated(aggregator, [*honest.tolist(), [wrong] * P, [wrong] + [0.0] * (P - 1)])
    assert (result >= honest.min(axis=0) - 1e-6).all()
    assert (result <= honest.max(axis=0) + 1e-6).all()


def mixed(
    aggregator: Aggregator, own: Any, inbox: Any, weights: Any, self_weight: float | None = None
) -> Any:
    return Mix(own, inbox, weights, self_weight, "own", aggregator).run(torch.empty)


def test_inbox_is_aggregated_in_rank_order_with_its_weights() -> None:
    own, inbox = torch.tensor([1.0, 2.0]), {7: torch.tensor([4.0, 4.0]), 2: torch.tensor([0.0, 8.0])}
    weights = {2: 0.25, 7: 0.5, 9: 0.125}  # 9 is missing
    assert torch.equal(mixed(Mean(), own, inbox, weights), combine(own, inbox, weights))
    assert mixed(Median(), own, inbox, weights).tolist() == [1.0, 4.0]


def test_model_of_weight_zero_is_left_out() -> None:
    own, inbox = torch.tensor([100.0]), {1: torch.tensor([1.0]), 2: torch.tensor([3.0])}
    for aggregator in (Median(), CoordinateMean(), TrimmedMean(share=0.4)):
        assert mixed(aggregator, own, inbox, {1: 0.5, 2: 0.5}, self_weight=0.0).tolist() == [2.0]
        assert mixed(aggregator, own, inbox, {1: 0.0, 2: 0.5}, self_weight=0.0).tolist() == [3.0]


def test_buffers_are_aggregated_like_the_parameters() -> None:
    models = [Model(torch.tensor([float(k), 0.0]), torch.tensor([10.0 * k])) for k in (1, 5, 2)]
    result = mixed(Median(), models[0], {1: models[1], 2: models[2]}, {1: 0.3, 2: 0.3})
    assert (result.parameters.tolist(), result.buffers.tolist()) == ([2.0, 0.0], [20.0])
    # Parameters of 1, 6 and 2 deviate by -2, 3 and -1 from their mean 3; buffers are averaged.
    models[1] = Model(torch.tensor([6.0, 0.0]), torch.tensor([50.0]))
    third = {1: 1 / 3, 2: 1 / 3}
    result = mixed(DeviationMean(power=1.0), models[0], {1: models[1], 2: models[2]}, third)
    torch.testing.assert_close(result.parameters, torch.tensor([3 + (9 - 4 - 1) / 6, 0.0]))
    torch.testing.assert_close(result.buffers, torch.tensor([80 / 3]))


def test_krum_takes_the_buffers_of_the_chosen_model() -> None:
    models = [Model(torch.tensor([float(k), 0.0]), torch.tensor([10.0 * k])) for k in (1, 5, 2)]
    result = mixed(Krum(byzantine=0), models[0], {1: models[1], 2: models[2]}, {1: 0.3, 2: 0.3})
    assert (result.parameters.tolist(), result.buffers.tolist()) == ([1.0, 0.0], [10.0])


def test_krum_scores_ignore_buffers() -> None:
    buffers = [1e6, 0.0, 3.0]  # the first model's running variance is large; its parameters are in the middle
    models = [
        Model(torch.tensor([x]), torch.tensor([b])) for x, b in zip([2.0, 1.0, 9.0], buffers, strict=True)
    ]
    result = mixed(Krum(byzantine=0, selected=2), models[0], dict(enumerate(models[1:], 1)), {1: 0.3, 2: 0.3})
    assert (result.parameters.tolist(), result.buffers.tolist()) == ([1.5], [5e5])


def test_tiny_own_weight_counts_as_zero() -> None:
    """1 - 49 times 1/49 is 1.1e-16."""
    weights = dict.fromkeys(range(1, 50), 1 / 49)
    assert own_weight(weights, weights, None) != 0
    inbox = {rank: torch.tensor([float(rank)]) for rank in weights}
    for aggregator in (Median(), CoordinateMean(), TrimmedMean(share=0.4)):
        assert mixed(aggregator, torch.tensor([1e6]), inbox, weights).tolist() == [25.0]


def test_vector_in_place_of_a_model_is_refused() -> None:
    own = Model(torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match="a Tensor can't be mixed with a Model"):
        mixed(Median(), own, {1: torch.ones(2)}, {1: 0.5})


def test_parts_are_averaged_per_coordinate() -> None:
    own, part = torch.tensor([1.0, 2.0, 3.0]), Part(torch.tensor([5.0, 7.0]), torch.tensor([1, 2]), 3)
    assert mixed(CoordinateMean(), own, {4: part}, {4: 0.9}).tolist() == [1.0, 3.5, 5.0]
    assert mixed(Median(), own, {4: part}, {4: 0.9}).tolist() == [1.0, 3.5, 5.0]  # filled with the own values
    far = Part(torch.tensor([50.0]), torch.tensor([0]), 3)
    assert mixed(Median(), own, {4: part, 5: far}, {4: 0.3, 5: 0.3}).tolist() == [1.0, 2.0, 3.0]


def test_too_few_models_are_refused() -> None:
    with pytest.raises(ValueError, match="krum got 4 models, the node's own included; accepted: at least 5"):
        aggregated(Krum(byzantine=1), [[0.0]] * 4)
    with pytest.raises(ValueError, match="trimmed-mean got 2 models"):
        aggregated(TrimmedMean(count=1), [[0.0]] * 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"name": "trimmed-mean"},
            "aggregator: trimmed-mean with count None and share None; accepted: exactly one of them",
        ),
        (
            {"name": "trimmed-mean", "share": 0.5},
            "aggregator.share: got 0.5; accepted: less than 0.5",
        ),
        ({"name": "krum"}, "aggregator.byzantine: missing"),
    ],
)
def test_invalid_settings_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as failure:
        build("aggregator", spec)
    assert failure.value.problems[0].startswith(message)


def experiment(**fields: Any) -> Experiment:
    return Experiment.of(
        {
            "nodes": 6,
            "task": {"name": "digits", "samples": 120},
            "topology": {"name": "random-regular", "degree": 4},
            "algorithm": "d-psgd",
            "stop": {"rounds": 2},
            **fields,
        }
    )


def test_default_aggregator_is_the_mean() -> None:
    assert experiment().model_dump(mode="json")["aggregator"] == {"name": "mean"}
    assert prepare(experiment()).aggregator is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"algorithm": "d2"},
            "aggregator: krum, for d2; accepted: mean, or one of",
        ),
        (
            {"topology": "ring"},
            "aggregator: krum takes at least 5 models, and node 0 has 3, its own included; accepted: more neighbours",
        ),
    ],
)
def test_aggregator_that_cannot_work_is_refused_before_the_run(fields: dict[str, Any], message: str) -> None:
    described = experiment(aggregator={"name": "krum", "byzantine": 1}, **fields)
    with pytest.raises(BadInput) as failure:
        prepare(described)
    assert failure.value.problems[0].startswith(message)
