"""Properties of the algorithms that have closed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from numpy.typing import NDArray

import gossamer
from gossamer import Experiment, Run
from gossamer.runtime.setup import prepare

LEAST_SQUARES: dict[str, Any] = {
    "nodes": 6,
    "seed": 2,
    "task": {"name": "least-squares", "features": 5, "samples": 60, "noise": 0.3},
    "batch_size": "full",
    "optimizer": {"name": "sgd", "lr": 0.2},
    "engine": {"name": "simulate", "trainer": "batched"},
    "stop": {"rounds": 20},
}


def play(out: Path, **changes: Any) -> Run:
    return gossamer.run(Experiment.of({**LEAST_SQUARES, **changes}), out)


def models(run: Run) -> NDArray[np.float64]:
    assert run.parameters is not None
    return run.parameters.double().numpy()


def data(experiment: Experiment) -> tuple[NDArray[np.float64], NDArray[np.float64], list[NDArray[np.int64]]]:
    """Inputs [samples, features], targets [samples], and each node's samples."""
    setup = prepare(experiment)
    inputs, targets = (tensor.double().numpy() for tensor in setup.task.train)
    return inputs, targets[:, 0], setup.parts


@pytest.mark.parametrize("name", ["all-reduce", "centralized"])
def test_equal_shares_follow_full_batch_gradient_descent(tmp_path: Path, name: str) -> None:
    """x_T = x* + (I - lr H)^T (x_0 - x*), with H and x* of all the data."""
    run = play(tmp_path, algorithm=name)
    experiment = Experiment.of({**LEAST_SQUARES, "algorithm": name})
    inputs, targets, _ = data(experiment)
    H = inputs.T @ inputs / len(inputs)
    best = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    start = prepare(experiment).initial(0).parameters.double().numpy()
    expected = best + np.linalg.matrix_power(np.eye(5) - 0.2 * H, 20) @ (start - best)
    np.testing.assert_allclose(models(run)[0], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - best).max() > 1e-3, "it has converged, which proves little"


@pytest.mark.parametrize(
    "topology", ["ring", "star", {"name": "random-regular", "degree": 3, "every_rounds": 1}]
)
def test_d_psgd_moves_the_mean_model_by_the_mean_gradient(tmp_path: Path, topology: Any) -> None:
    """mean x_i(r + 1) = mean x_i(r) - lr mean g_i(x_i(r)) for doubly stochastic W (Lian et al., 2017)."""
    settings = {"algorithm": "d-psgd", "topology": topology, "initial": "independent"}
    inputs, targets, parts = data(Experiment.of({**LEAST_SQUARES, **settings}))
    ends = [models(play(tmp_path, **settings, stop={"rounds": rounds})) for rounds in (1, 2, 3, 4)]
    for before, after in pairwise(ends):
        gradients = [
            inputs[part].T @ (inputs[part] @ x - targets[part]) / len(part)
            for part, x in zip(parts, before, strict=True)
        ]
        step = 0.2 * np.mean(gradients, axis=0)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0) - step, rtol=1e-5, atol=1e-6)
        assert np.abs(step).max() > 1e-3


RING = reference.metropolis_hastings(reference.adjacency(6, [(i, (i + 1) % 6) for i in range(6)]))
HETEROGENEOUS: dict[str, Any] = {
    "task": {"name": "least-squares", "features": 10, "samples": 300, "groups": 6, "heterogeneity": 1.0},
    "partition": "natural",
    "optimizer": {"name": "sgd", "lr": 0.01},
    "evaluation": {"every_rounds": None},
}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"name": "d2", "exact_diffusion": True}, partial(reference.d2, W=(RING + np.eye(6)) / 2)),
        pytest.param(
            {"name": "gradient-tracking"},
            partial(reference.gradient_tracking, W=RING),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"name": "gradient-tracking", "variant": "diging"},
            partial(reference.gradient_tracking, W=RING, step_first=False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["d2", "dsgt", "diging"],
)
def test_corrections_keep_their_precision_at_small_steps(
    tmp_path: Path, algorithm: dict[str, Any], expected: Callable[..., NDArray[np.float64]]
) -> None:
    """A correction is a sum over rounds. A rounding error in proportion to the model that enters it in each round would
    not be small for long: after 300 rounds it was 3e-4 for d2."""
    settings = {**HETEROGENEOUS, "algorithm": algorithm, "stop": {"rounds": 300}}
    experiment = Experiment.of({**LEAST_SQUARES, **settings})
    inputs, targets, parts = data(experiment)
    learners = [reference.Learner(inputs[part], targets[part], 0.01) for part in parts]
    start = prepare(experiment).initial(0).parameters.double().numpy()
    exact = expected(learners, np.tile(start, (6, 1)), 300)
    np.testing.assert_allclose(models(play(tmp_path, **settings)), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("topology", ["ring", "star", "complete", {"name": "random-regular", "degree": 3}])
@pytest.mark.parametrize("seed", [1, 2])
def test_mixing_alone_contracts_by_the_spectral_gap(tmp_path: Path, topology: Any, seed: int) -> None:
    """Without training, ||X - mean|| shrinks to |lambda_2(W)| of itself, or less (Xiao and Boyd, 2004)."""
    run = play(
        tmp_path,
        seed=seed,
        algorithm="d-psgd",
        topology=topology,
        initial="independent",
        optimizer={"name": "sgd", "lr": 1e-12},
        evaluation={"every_rounds": 1},
        stop={"rounds": 6},
    )
    W = reference.metropolis_hastings(reference.adjacency(6, run.setup["graphs"]["0"]))
    second = np.sort(np.abs(np.linalg.eigvalsh(W)))[-2]
    distances = run.metrics.filter(node=-1).sort("round")["consensus_distance"].to_numpy()
    assert len(distances) == 7
    assert distances[0] > 0.1
    # Rounding to float32 sets a floor.
    assert (distances[1:] <= second * distances[:-1] * (1 + 1e-4) + 1e-6).all()


def test_exponential_graph_averages_exactly_in_log_n_rounds(tmp_path: Path) -> None:
    """Ying et al. (2021): one peer a round, a power of two of nodes, weights 1/2."""
    settings = {
        "nodes": 8,
        "algorithm": "d-psgd",
        "topology": "one-peer-exponential",
        "initial": "independent",
        "optimizer": {"name": "sgd", "lr": 1e-12},
    }
    experiment = Experiment.of({**LEAST_SQUARES, **settings})
    start = np.stack([prepare(experiment).initial(rank).parameters.double().numpy() for rank in range(8)])
    early, end = (models(play(tmp_path, **settings, stop={"rounds": rounds})) for rounds in (2, 3))
    np.testing.assert_allclose(end, np.tile(start.mean(axis=0), (8, 1)), atol=1e-6)
    assert np.abs(early - start.mean(axis=0)).max() > 1e-2
