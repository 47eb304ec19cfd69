from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.tasks import LeastSquares


def solution(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    return np.linalg.lstsq(x.double().numpy(), y.double().numpy(), rcond=None)[0].T


@settings(max_examples=15)
@given(features=st.integers(1, 12), targets=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_noiseless_solution_fits_training_and_test_set(features, targets, seed):
    task = LeastSquares(features=features, targets=targets, samples=60, test_samples=20, noise=0).load(
        None, seed
    )
    model = task.model()
    assert [tuple(p.shape) for p in model.parameters()] == [(targets, features)]
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(solution(*task.train)))
        assert task.loss(model(task.train[0]), task.train[1]).item() < 1e-10
        assert task.loss(model(task.test[0]), task.test[1]).item() < 1e-10


def test_loss_and_gradient_match_closed_form():
    task = LeastSquares(features=4, samples=30).load(None, 3)
    x, y = (t.double() for t in task.train)
    model = task.model().double()
    loss = task.loss(model(x), y)
    loss.backward()
    residual = x @ model.weight.T - y
    assert loss.item() == pytest.approx((residual**2).sum().item() / (2 * 30))
    torch.testing.assert_close(model.weight.grad, (residual.T @ x) / 30)


def test_residual_has_the_noise_level():
    task = LeastSquares(features=5, samples=20_000, noise=0.3).load(None, 1)
    x, y = task.train
    residual = y.numpy() - x.numpy() @ solution(x, y).T
    assert residual.std() == pytest.approx(0.3, rel=0.03)  # standard error: 0.5 %


def test_loss_is_half_the_mean_squared_error_down_to_half_the_noise_variance():
    task = LeastSquares(features=5, samples=20_000, targets=2, noise=0.1).load(None, 1)
    x, y = (values.double() for values in task.train)
    fitted = torch.from_numpy(x.numpy() @ solution(x, y).T)
    loss = task.loss(fitted, y).item()
    assert loss == pytest.approx(0.5 * np.square(fitted.numpy() - y.numpy()).mean())
    assert loss == pytest.approx(0.005, rel=0.03)


def test_data_are_keyed_by_the_seed():
    one, again, other = (LeastSquares().load(None, seed) for seed in (1, 1, 2))
    assert torch.equal(one.train[1], again.train[1])
    assert not torch.equal(one.train[0], other.train[0])
    assert not torch.equal(one.train[0], one.test[0])


def test_owners_disagree_only_with_heterogeneity():
    def weights(heterogeneity: float) -> np.ndarray:
        task = LeastSquares(features=3, samples=40, groups=4, noise=0, heterogeneity=heterogeneity).load(
            None, 1
        )
        owner = task.groups
        assert owner.bincount().tolist() == [10] * 4
        return np.concatenate(
            [solution(task.train[0][owner == g], task.train[1][owner == g]) for g in range(4)]
        )

    same, apart = weights(0.0), weights(1.0)
    assert np.ptp(same, axis=0).max() < 1e-5
    assert np.ptp(apart, axis=0).min() > 1e-2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"features": 0}, "greater than 0"),
        ({"noise": -1}, "greater than or equal to 0"),
        ({"groups": 11, "samples": 10}, "accepted: at most as many groups as samples"),
        ({"heterogeneity": 1}, "accepted: heterogeneity with groups only"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(BadInput, match=message):
        build("task", {"name": "least-squares", **parameters})
