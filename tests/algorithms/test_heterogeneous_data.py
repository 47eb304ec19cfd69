"""Corrected algorithms reach the optimum of the average loss with a constant step on heterogeneous data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from timing import Data, least_squares, play, wide

from gossamer import BadInput, Node, NodeWrapper
from gossamer.messages import encode
from gossamer.messages.tags import Payload
from gossamer.runtime.setup import prepare

RING = (np.eye(5) + np.roll(np.eye(5), 1, axis=0) + np.roll(np.eye(5), -1, axis=0)) / 3


def distance(out: Path, algorithm: dict[str, Any], rounds: int = 28, **optimizer: Any) -> float:
    """Largest distance of a node from the optimum, on a ring of five."""
    experiment = least_squares(
        5, rounds, algorithm=algorithm, optimizer={"name": "sgd", "lr": 0.5, **optimizer}
    )
    run = play(experiment, out)
    assert run.parameters is not None
    return float(np.abs(wide(run.parameters) - Data(experiment).optimum).max())


CORRECTED: list[dict[str, Any]] = [
    {"name": "d2"},
    {"name": "d2", "exact_diffusion": True},
    {"name": "gradient-tracking"},
    {"name": "relay-sum", "tree": "spanning"},
    {"name": "relay-sum", "tree": "spanning", "stand_in": "initial"},
]


@pytest.mark.parametrize("algorithm", CORRECTED, ids=str)
def test_constant_step_reaches_the_optimum(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    assert distance(tmp_path, algorithm) < 2e-3


def test_diging_reaches_the_optimum_with_a_smaller_step(tmp_path: Path) -> None:
    assert distance(tmp_path, {"name": "gradient-tracking", "variant": "diging"}, 40, lr=0.12) < 5e-3


@pytest.mark.parametrize("algorithm", [{"name": "d-psgd"}, {"name": "qg-momentum"}], ids=str)
def test_plain_averaging_stalls_on_heterogeneous_data(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    assert distance(tmp_path, algorithm) > 4e-2


@pytest.mark.parametrize("algorithm", CORRECTED[:3], ids=str)
def test_dropping_learning_rate_still_reaches_the_optimum(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The correction is scaled with the learning rate."""
    schedule = {"name": "step", "every": 14, "factor": 0.5}
    assert distance(tmp_path, algorithm, schedule=schedule) < 2e-3


def test_d2_with_a_changing_rate_matches_lin_et_al(tmp_path: Path) -> None:
    """X^{t+1} = W (X^t - eta_t ((X^{t-1} - X^t) / eta_{t-1} + G^t - G^{t-1})): D2+."""
    factors = [0.2, 0.2, 0.05, 0.05, 0.0125, 0.0125]
    experiment = least_squares(
        5,
        6,
        algorithm="d2",
        optimizer={"name": "sgd", "lr": 0.2, "schedule": {"name": "step", "every": 2, "factor": 0.25}},
    )
    data = Data(experiment)
    X, before, G = data.initial, None, None
    for t, lr in enumerate(factors):
        last, G = G, np.stack([data.gradient(rank, x) for rank, x in enumerate(X)])
        moved = G if before is None else (before - X) / factors[t - 1] + G - last
        before, X = X, RING @ (X - lr * moved)
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    np.testing.assert_allclose(wide(run.parameters), X, rtol=1e-5, atol=1e-5)


def test_learning_rate_of_zero_keeps_models_finite(tmp_path: Path) -> None:
    """Nothing is divided by the rate (this schedule ends at zero)."""
    schedule = {"name": "linear", "start": 1.0, "end": 0.0, "rounds": 3}
    for name in ("d2", "gradient-tracking", "qg-momentum"):
        run = play(
            least_squares(5, 6, algorithm=name, optimizer={"name": "sgd", "lr": 0.2, "schedule": schedule}),
            tmp_path,
        )
        assert run.parameters is not None
        assert run.parameters.isfinite().all(), name


class Checkpoint(NodeWrapper):
    """Checks at every sending that the node's state can be encoded."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        encode(node.state)
        return payload


@pytest.mark.parametrize(
    "algorithm",
    [
        "d2",
        "gradient-tracking",
        "qg-momentum",
        {"name": "sgp", "overlap": 2},
        {"name": "relay-sum", "tree": "spanning", "stand_in": "initial"},
        "gossip-learning",
        {"name": "gossip-learning-on-receipt", "period_s": 0.05},
    ],
    ids=str,
)
def test_state_can_be_stored_at_every_sending(tmp_path: Path, algorithm: Any) -> None:
    play(least_squares(3, 3, algorithm=algorithm, wrappers=[Checkpoint()]), tmp_path)


def refused(out: Path, problem: str, **changes: Any) -> None:
    with pytest.raises(BadInput, match=problem):
        play(least_squares(**{"nodes": 4, "rounds": 1, **changes}), out)
    assert not (out / "experiment").exists()


def test_d2_refuses_a_matrix_without_guaranteed_convergence(tmp_path: Path) -> None:
    """An even ring has the eigenvalue 1/3 + 2/3 cos(pi) = -1/3."""
    refused(
        tmp_path,
        r"topology: the smallest eigenvalue .* is -0\.333333, for d2; accepted: above -1/3",
        algorithm="d2",
    )
    play(least_squares(4, 1, algorithm={"name": "d2", "exact_diffusion": True}), tmp_path)
    play(least_squares(5, 1, algorithm="d2"), tmp_path)


def test_d2_refuses_an_asymmetric_matrix(tmp_path: Path) -> None:
    for topology in ("exponential", {"name": "star", "weights": "uniform"}):
        refused(tmp_path, r"topology\.weights: not symmetric, for d2", algorithm="d2", topology=topology)


@pytest.mark.parametrize("algorithm", ["gradient-tracking", "qg-momentum"])
def test_matrix_that_is_not_doubly_stochastic_is_refused(tmp_path: Path, algorithm: str) -> None:
    """A directed graph may be doubly stochastic, as the exponential one is."""
    problem = rf"topology\.weights: not doubly stochastic \(column 0 .*\), for {algorithm}"
    refused(tmp_path, problem, algorithm=algorithm, topology={"name": "star", "weights": "uniform"})
    prepare(least_squares(8, 3, algorithm=algorithm, topology="exponential"))


def test_d2_accepts_a_changing_topology(tmp_path: Path) -> None:
    topology = {"name": "random-regular", "degree": 2, "every_rounds": 1}
    play(least_squares(4, 2, algorithm="d2", topology=topology), tmp_path)


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ({"name": "adam", "lr": 0.1}, r"optimizer\.name: adam for qg-momentum; accepted: sgd"),
        (
            {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            r"optimizer\.momentum: 0\.9 for qg-momentum.*accepted: 0",
        ),
    ],
)
def test_qg_momentum_refuses_other_momentum(tmp_path: Path, optimizer: dict[str, Any], problem: str) -> None:
    refused(tmp_path, problem, algorithm="qg-momentum", optimizer=optimizer)


def test_qg_momentum_uses_the_weight_decay_of_the_optimizer(tmp_path: Path) -> None:
    """g + lambda x in the place of g, as in the authors' code: after one round W (x - eta (g + lambda x))."""
    experiment = least_squares(
        5, 1, algorithm="qg-momentum", optimizer={"name": "sgd", "lr": 0.1, "weight_decay": 0.5}
    )
    data = Data(experiment)
    stepped = np.stack([x - 0.1 * (data.gradient(rank, x) + 0.5 * x) for rank, x in enumerate(data.initial)])
    run = play(experiment, tmp_path)
    assert run.parameters is not None
    np.testing.assert_allclose(wide(run.parameters), RING @ stepped, rtol=1e-5, atol=1e-6)
