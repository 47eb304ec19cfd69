"""The gradient as a component: DP-SGD (Abadi et al., CCS 2016) as a user would write it, against closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer import BadInput, Node
from gossamer.learning import BatchLoss, Gradient
from scenario import FEATURES, LR, data, experiment, play, wide


class PerSampleClip(Gradient):
    """The mean of the gradients of single samples, each cut to a norm, with Gaussian noise."""

    clip: float = 0.5
    noise: float = 0.0

    def compute(
        self, loss: BatchLoss, module: nn.Module, batch: tuple[Any, Tensor], rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        values = [loss(inputs[k : k + 1], targets[k : k + 1]) for k in range(len(targets))]
        gradients = torch.stack([loss.gradient(value) for value in values])
        cut = gradients * (self.clip / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
        drawn = torch.from_numpy(rng.standard_normal(gradients.shape[1]).astype("float32"))
        noise = self.noise * self.clip * drawn
        return torch.stack(values).mean(), (cut.sum(0) + noise) / len(targets)


class Halved(Gradient):
    def compute(self, loss: BatchLoss, module: nn.Module, batch: Any, rng: Any) -> Any:
        assert module.training
        mean = loss(*batch)
        return mean, loss.gradient(mean) / 2


class Wrong(Gradient):
    def compute(self, loss: BatchLoss, module: nn.Module, batch: Any, rng: Any) -> Any:
        return loss(*batch), torch.zeros(FEATURES + 1)


def clipped(described: Any, rank: int, w: np.ndarray, clip: float) -> np.ndarray:
    """The mean clipped gradient of (x w - y)^2 / 2 over a node's samples."""
    x, y = data(described, rank)
    gradients = (x @ w - y)[:, None] * x
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return np.asarray((gradients * np.minimum(clip / norms, 1)).mean(0))


async def two_steps(node: Node) -> Any:
    start = wide(node.parameters)
    asked = wide(await node.gradient(batch="full"))
    loss = await node.train(2)
    return start, asked, wide(node.parameters), loss


def test_steps_and_gradients_are_those_of_the_rule(tmp_path: Path) -> None:
    played, described = play(tmp_path, two_steps, 2, gradient=PerSampleClip()), experiment(two_steps, 2)
    for rank in range(2):
        start, asked, end, loss = played.values[rank]
        first = clipped(described, rank, start, 0.5)
        np.testing.assert_allclose(asked, first, atol=1e-6)
        between = start - LR * first
        np.testing.assert_allclose(end, between - LR * clipped(described, rank, between, 0.5), atol=1e-6)
        x, y = data(described, rank)
        assert loss == pytest.approx(
            np.mean([((x @ w - y) ** 2).mean() / 2 for w in (start, between)]), rel=1e-5
        )


@pytest.mark.parametrize("engine", [pytest.param("processes", marks=pytest.mark.slow), "simulate"])
def test_draws_of_a_rule_repeat_under_every_engine(tmp_path: Path, engine: str) -> None:
    from gossamer import Experiment, run

    fields = {
        "name": "t",
        "nodes": 3,
        "task": {"name": "least-squares", "features": FEATURES, "samples": 48},
        "algorithm": "d-psgd",
        "gradient": PerSampleClip(noise=1.0),
        "stop": {"rounds": 2},
    }
    engines = [{"name": "simulate", "workers": 2}, {"name": engine}]
    ours, theirs = (
        run(Experiment.of({**fields, "engine": e}), tmp_path / str(k)) for k, e in enumerate(engines)
    )
    assert torch.equal(ours.parameters, theirs.parameters)  # type: ignore[arg-type]
    quiet = run(Experiment.of({**fields, "gradient": PerSampleClip()}), tmp_path / "quiet")
    assert not torch.equal(ours.parameters, quiet.parameters)  # type: ignore[arg-type]
    assert ours.setup["trainer"] == "sequential"


@pytest.mark.parametrize("trainer", ["fused", "batched"])
def test_trainers_that_know_the_mean_only_are_refused(tmp_path: Path, trainer: str) -> None:
    with pytest.raises(
        BadInput, match=rf"engine.trainer: '{trainer}' with the gradient .*Halved; accepted: auto, sequential"
    ):
        play(tmp_path, two_steps, 2, gradient=Halved(), engine={"name": "simulate", "trainer": trainer})


def test_auto_does_not_take_kernels_for_a_rule_of_ones_own(tmp_path: Path) -> None:
    """The kernels' steps are those of the mean, which are twice as long."""
    engine = {"name": "simulate", "trainer": "auto"}
    halved, whole = (
        play(tmp_path / str(k), two_steps, 2, engine=engine, **fields).values[0]
        for k, fields in enumerate(({"gradient": Halved()}, {}))
    )
    np.testing.assert_allclose(halved[1], whole[1] / 2, rtol=1e-5)


def test_wrong_results_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"gradient: .*Wrong returns .*; accepted: a loss of one value, and a gradient"
    ):
        play(tmp_path, two_steps, 2, gradient=Wrong())
