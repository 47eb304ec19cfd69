from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer

SIZE, STEPS = 17, 20
CASES: list[tuple[Optimizer, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (SGD(lr=0.1), torch.optim.SGD, {}),
    (SGD(lr=0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (SGD(lr=0.1, momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD(lr=0.1, weight_decay=0.05), torch.optim.SGD, {"weight_decay": 0.05}),
    (
        SGD(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    (Adam(lr=0.01), torch.optim.Adam, {}),
    (Adam(lr=0.01, beta1=0.7, beta2=0.9, eps=1e-4), torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 1e-4}),
    (Adam(lr=0.01, weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    (AdamW(lr=0.01), torch.optim.AdamW, {}),
    (AdamW(lr=0.01, weight_decay=0.3), torch.optim.AdamW, {"weight_decay": 0.3}),
]


def gradients(seed: int) -> torch.Tensor:
    return torch.randn(STEPS, SIZE, generator=torch.Generator().manual_seed(seed))


def reference(kind: Any, options: dict[str, Any], lr: float, start: torch.Tensor, seed: int) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=lr, **options)
    for gradient in gradients(seed):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("optimizer", "kind", "options"), CASES, ids=[str(case[0]) for case in CASES])
def test_steps_are_those_of_torch(optimizer: Optimizer, kind: Any, options: dict[str, Any]) -> None:
    start = torch.linspace(-1, 1, SIZE)
    parameters = start.clone()
    state = optimizer.init(parameters)
    for gradient in gradients(0):
        optimizer.step(parameters, gradient.clone(), state, optimizer.lr)
    expected = reference(kind, options, optimizer.lr, start, 0)
    torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(parameters, start)


@pytest.mark.parametrize(("optimizer", "kind", "options"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_stack_of_nodes_is_each_node_by_itself(
    optimizer: Optimizer, kind: Any, options: dict[str, Any]
) -> None:
    starts = torch.linspace(-1, 1, SIZE) * torch.tensor([[1.0], [2.0], [-0.5]])
    parameters = starts.clone()
    # States stack from single ones, as the trainers stack them.
    singles = [optimizer.init(start) for start in starts]
    state = {name: torch.stack([single[name] for single in singles]) for name in singles[0]}
    for step in torch.stack([gradients(seed) for seed in range(3)], dim=1):
        optimizer.step(parameters, step.clone(), state, optimizer.lr)
    for node in range(3):
        expected = reference(kind, options, optimizer.lr, starts[node], node)
        torch.testing.assert_close(parameters[node], expected, rtol=1e-6, atol=1e-6)


def test_the_learning_rate_is_that_of_the_call() -> None:
    parameters = torch.zeros(2)
    SGD(lr=0.1).step(parameters, torch.ones(2), {}, 0.5)
    assert parameters.tolist() == [-0.5, -0.5]
