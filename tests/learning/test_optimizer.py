from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import BadInput
from gossamer.config.registry import build, names
from gossamer.learning.optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    State,
)

SIZE, STEPS = 17, 20
AHEAD = (0, 3, 11)
"""Steps that each row has taken before the rows are stacked."""

CASES: list[tuple[Optimizer, dict[str, Any]]] = [
    (SGD(lr=0.1), {}),
    (SGD(lr=0.1, momentum=0.9), {"momentum": 0.9}),
    (SGD(lr=0.1, momentum=0.9, nesterov=True), {"momentum": 0.9, "nesterov": True}),
    (SGD(lr=0.1, weight_decay=0.05), {"weight_decay": 0.05}),
    (
        SGD(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    (SGD(lr=0.1, momentum=0.9, dampening=0.4), {"momentum": 0.9, "dampening": 0.4}),
    (SGD(lr=0.1, momentum=0.9, dampening=1.0), {"momentum": 0.9, "dampening": 1.0}),
    (SGD(lr=0.1, dampening=0.4), {"dampening": 0.4}),
    (Adam(lr=0.01), {}),
    (Adam(lr=0.01, beta1=0.7, beta2=0.9, eps=1e-4), {"betas": (0.7, 0.9), "eps": 1e-4}),
    (Adam(lr=0.01, weight_decay=0.1), {"weight_decay": 0.1}),
    (Adam(lr=0.01, beta2=0.8, amsgrad=True), {"betas": (0.9, 0.8), "amsgrad": True}),
    (AdamW(lr=0.01), {}),
    (AdamW(lr=0.01, weight_decay=0.3), {"weight_decay": 0.3}),
    (AdamW(lr=0.01, beta2=0.8, amsgrad=True), {"betas": (0.9, 0.8), "amsgrad": True}),
    (Adamax(lr=0.02), {}),
    (
        Adamax(lr=0.02, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.1),
        {"betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.1},
    ),
    (NAdam(lr=0.02), {}),
    (
        NAdam(lr=0.02, beta1=0.7, beta2=0.9, eps=1e-4, momentum_decay=0.3),
        {"betas": (0.7, 0.9), "eps": 1e-4, "momentum_decay": 0.3},
    ),
    (NAdam(lr=0.02, weight_decay=0.1), {"weight_decay": 0.1}),
    (
        NAdam(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    (RAdam(lr=0.02), {}),
    (RAdam(lr=0.02, beta1=0.7, beta2=0.9, eps=1e-4), {"betas": (0.7, 0.9), "eps": 1e-4}),
    (RAdam(lr=0.02, beta2=0.5), {"betas": (0.9, 0.5)}),  # never rectified
    (RAdam(lr=0.02, weight_decay=0.1), {"weight_decay": 0.1}),
    (
        RAdam(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    (RMSprop(lr=0.01), {}),
    (
        RMSprop(lr=0.01, alpha=0.8, eps=1e-3, weight_decay=0.1),
        {"alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    ),
    (RMSprop(lr=0.01, momentum=0.9), {"momentum": 0.9}),
    (RMSprop(lr=0.01, centered=True), {"centered": True}),
    (RMSprop(lr=0.01, momentum=0.5, centered=True), {"momentum": 0.5, "centered": True}),
    (Adagrad(lr=0.1), {}),
    (Adagrad(lr=0.1, lr_decay=0.2), {"lr_decay": 0.2}),
    (
        Adagrad(lr=0.1, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.1),
        {"initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.1},
    ),
    (Adadelta(lr=1.0), {}),
    (Adadelta(lr=0.5, rho=0.7, eps=1e-3, weight_decay=0.1), {"rho": 0.7, "eps": 1e-3, "weight_decay": 0.1}),
    (ASGD(lr=0.1), {}),
    (
        ASGD(lr=0.1, lambd=0.3, alpha=0.6, t0=5, weight_decay=0.1),
        {"lambd": 0.3, "alpha": 0.6, "t0": 5, "weight_decay": 0.1},
    ),
    (Rprop(lr=0.01), {}),
    (
        Rprop(lr=0.01, eta_minus=0.3, eta_plus=1.7, min_step=0.004, max_step=0.02),
        {"etas": (0.3, 1.7), "step_sizes": (0.004, 0.02)},
    ),
]
IDS = [f"{case[0].name_of()}-{case[1]}" for case in CASES]

every_case = pytest.mark.parametrize(("optimizer", "options"), CASES, ids=IDS)


def torchs(name: str) -> Any:
    """torch's optimizer class of this name."""
    return {key.lower(): value for key, value in vars(torch.optim).items()}[name]


def gradients(seed: int, steps: int = STEPS) -> torch.Tensor:
    return torch.randn(steps, SIZE, generator=torch.Generator().manual_seed(seed))


def reference(
    optimizer: Optimizer, options: dict[str, Any], start: torch.Tensor, steps: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Parameters and state after steps of torch's optimizer."""
    parameter = torch.nn.Parameter(start.clone())
    other = torchs(optimizer.name_of())([parameter], lr=optimizer.lr, **options)
    for gradient in steps:
        parameter.grad = gradient.clone()
        other.step()
    return parameter.detach(), other.state[parameter]


def walk(optimizer: Optimizer, parameters: torch.Tensor, state: State, steps: torch.Tensor) -> None:
    for gradient in steps:
        optimizer.step(parameters, gradient.clone(), state, optimizer.lr)


def stacked(
    optimizer: Optimizer, ahead: tuple[int, ...] = AHEAD
) -> tuple[torch.Tensor, State, torch.Tensor, list[torch.Tensor]]:
    """Parameters, state, starts and gradients of rows that have taken different numbers of steps."""
    starts = torch.linspace(-1, 1, SIZE) * torch.tensor([[1.0], [2.0], [-0.5]])
    rows, states = list(starts.clone()), [optimizer.init(start) for start in starts]
    steps = [gradients(node, more + STEPS) for node, more in enumerate(ahead)]
    for row, state, taken, more in zip(rows, states, steps, ahead, strict=True):
        walk(optimizer, row, state, taken[:more])
    # Trainers stack single states like this.
    state = {name: torch.stack([single[name] for single in states]) for name in states[0]}
    return torch.stack(rows), state, starts, steps


def test_optimizers_are_the_elementwise_ones_of_torch() -> None:
    others = {"lbfgs", "sparseadam", "adafactor", "muon", "optimizer"}
    available = {key.lower() for key, value in vars(torch.optim).items() if isinstance(value, type)}
    assert set(names("optimizer")) == available - others == {case[0].name_of() for case in CASES}


@pytest.mark.parametrize("name", sorted(names("optimizer")))
def test_defaults_match_torch(name: str) -> None:
    """The learning rate has no default."""
    theirs = torchs(name)([torch.nn.Parameter(torch.zeros(1))]).defaults
    renamed = {
        "betas": ("beta1", "beta2"),
        "etas": ("eta_minus", "eta_plus"),
        "step_sizes": ("min_step", "max_step"),
    }
    for key, values in renamed.items():
        theirs |= dict(zip(values, theirs.pop(key, ()), strict=False))
    fields = names("optimizer")[name].model_fields
    shared = fields.keys() - Optimizer.model_fields.keys()
    assert {key: fields[key].default for key in shared} == {key: theirs[key] for key in shared}
    unsupported = {"lr", "maximize", "foreach", "differentiable", "capturable", "fused"}
    assert theirs.keys() - shared - unsupported <= (
        {"decoupled_weight_decay"} if name.startswith("adam") else set()
    )


@every_case
def test_steps_match_torch(optimizer: Optimizer, options: dict[str, Any]) -> None:
    start = torch.linspace(-1, 1, SIZE)
    parameters = start.clone()
    walk(optimizer, parameters, optimizer.init(parameters), gradients(0))
    expected, _ = reference(optimizer, options, start, gradients(0))
    torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(parameters, start)


@every_case
def test_stacked_nodes_step_like_single_ones(optimizer: Optimizer, options: dict[str, Any]) -> None:
    parameters, state, starts, steps = stacked(optimizer)
    walk(optimizer, parameters, state, torch.stack([row[-STEPS:] for row in steps], dim=1))
    for node, row in enumerate(parameters):
        expected, _ = reference(optimizer, options, starts[node], steps[node])
        torch.testing.assert_close(row, expected, rtol=2e-6, atol=2e-6)


@every_case
def test_state_has_one_vector_or_one_value_per_node(optimizer: Optimizer, options: dict[str, Any]) -> None:
    single, stack = optimizer.init(torch.ones(SIZE)), optimizer.init(torch.ones(3, SIZE))
    assert single.keys() == stack.keys()
    for name, value in single.items():
        assert value.shape in ((SIZE,), (1,)), name
        assert stack[name].shape == (3, *value.shape), name
        assert torch.equal(stack[name], value.expand(3, -1)), name


def test_asgd_average_matches_torch() -> None:
    optimizer, options = ASGD(lr=0.1, lambd=0.3, t0=5), {"lambd": 0.3, "t0": 5}
    parameters, state, starts, steps = stacked(optimizer)
    walk(optimizer, parameters, state, torch.stack([row[-STEPS:] for row in steps], dim=1))
    for node, average in enumerate(state["average"]):
        last, theirs = reference(optimizer, options, starts[node], steps[node])
        torch.testing.assert_close(average, theirs["ax"], rtol=2e-6, atol=2e-6)
        assert (average - last).abs().max() > 0.01


def test_step_uses_the_learning_rate_of_the_call() -> None:
    parameters = torch.zeros(2)
    SGD(lr=0.1).step(parameters, torch.ones(2), {}, 0.5)
    assert parameters.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("optimizer", [SGD(lr=1.0), Adam(lr=0.1), ASGD(lr=1.0)], ids=str)
def test_zero_learning_rate_changes_nothing(optimizer: Optimizer) -> None:
    """Schedules may end with a rate of zero."""
    parameters = torch.ones(SIZE)
    optimizer.step(parameters, torch.ones(SIZE), optimizer.init(parameters), 0.0)
    assert torch.equal(parameters, torch.ones(SIZE))


# --- clipping ---


def clipped(gradient: torch.Tensor, value: float | None, norm: float | None) -> torch.Tensor:
    """The gradient, spread over two parameters, as torch's functions clip it."""
    parameters = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(SIZE - 5))]
    for parameter, part in zip(parameters, gradient.split([5, SIZE - 5]), strict=True):
        parameter.grad = part.clone()
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters, value)
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize(("value", "norm"), [(0.5, None), (None, 1.5), (0.5, 1.5), (100.0, 1000.0)])
def test_gradient_clipping_matches_torch(value: float | None, norm: float | None) -> None:
    optimizer = SGD(lr=1.0, clip_value=value, clip_norm=norm)
    steps = gradients(1, 3) * torch.tensor([[0.01], [1.0], [10.0]])  # the first is within all bounds
    expected = torch.stack([clipped(row, value, norm) for row in steps])
    stack = torch.zeros(3, SIZE)
    optimizer.step(stack, steps.clone(), {}, 1.0)
    torch.testing.assert_close(-stack, expected, rtol=1e-6, atol=1e-7)
    for row, gradient in zip(expected, steps, strict=True):
        single = torch.zeros(SIZE)
        optimizer.step(single, gradient.clone(), {}, 1.0)
        torch.testing.assert_close(-single, row, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(names("optimizer")))
def test_optimizers_clip_before_weight_decay(name: str) -> None:
    """Weight decay is added after clipping."""
    options = {} if name == "rprop" else {"weight_decay": 0.1}
    plain = build("optimizer", {"name": name, "lr": 0.1, **options})
    clipping = build("optimizer", {"name": name, "lr": 0.1, "clip_value": 0.3, "clip_norm": 1.0, **options})
    assert isinstance(plain, Optimizer)
    assert isinstance(clipping, Optimizer)
    one, other = torch.ones(SIZE), torch.ones(SIZE)
    states = plain.init(one), clipping.init(other)
    for gradient in gradients(2, 4):
        plain.step(one, clipped(gradient, 0.3, 1.0), states[0], 0.1)
        clipping.step(other, gradient.clone(), states[1], 0.1)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


# --- invalid settings ---


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "sgd", "clip_norm": 0}, "optimizer.clip_norm: got 0; accepted: greater than 0"),
        ({"name": "adam", "clip_value": -1}, "optimizer.clip_value: got -1; accepted: greater than 0"),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "dampening": 0.1},
            "optimizer.nesterov: got True with momentum 0.9 and dampening 0.1;"
            " accepted: True with a momentum above 0 and dampening 0",
        ),
        ({"name": "rmsprop", "alpha": 1.0}, "optimizer.alpha: got 1.0; accepted: less than 1"),
        ({"name": "rprop", "eta_plus": 1}, "optimizer.eta_plus: got 1; accepted: greater than 1"),
        (
            {"name": "rprop", "min_step": 2, "max_step": 1},
            "optimizer.min_step: got 2; accepted: at most 1",
        ),
        (
            {"name": "rprop", "schedule": {"name": "step", "every": 2}},
            "optimizer.schedule: rprop sets its step sizes itself; accepted: null",
        ),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput) as failure:
        build("optimizer", {"lr": 0.1, **fields})
    assert failure.value.problems == (problem,)
