"""Users' case O04: optimizers of the user's own, groups of parameters, and the order of arguments of a mean."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor, nn

import gossamer
from gossamer import Algorithm, BadInput, Experiment, Node, RunFailed
from gossamer.learning import Optimizer
from gossamer.runtime.setup import prepare

BASE: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "digits", "model": "logistic", "samples": 200},
    "topology": "ring",
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "evaluation": {"every_rounds": 1, "samples": 20},
    "stop": {"rounds": 1},
}
P = 650


def described(**fields: Any) -> Experiment:
    return Experiment.of({**BASE, **fields})


class Subtracting(Optimizer):
    def init(self, parameters: Tensor) -> Any:
        return {}

    def update(self, parameters: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        parameters.sub_(gradient * state.get("rate", 1.0), alpha=lr)


class Masked(Subtracting):
    """Its mask is as long as the model."""

    def init(self, parameters: Tensor) -> Any:
        return {"rate": torch.ones(P)}


class Number(Subtracting):
    def init(self, parameters: Tensor) -> Any:
        return {"t": 0}


class Nothing(Subtracting):
    def init(self, parameters: Tensor) -> Any:
        return None


class Pair(Subtracting):
    def init(self, parameters: Tensor) -> Any:
        return parameters.clone(), parameters.clone()


class Table(Subtracting):
    def init(self, parameters: Tensor) -> Any:
        return {"history": torch.zeros(2, len(parameters))}


class Raising(Subtracting):
    def init(self, parameters: Tensor) -> Any:
        raise OverflowError("no state")


class RaisingUpdate(Subtracting):
    def update(self, parameters: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        raise OverflowError("no step")


def test_mask_as_long_as_the_model_is_a_state() -> None:
    assert prepare(described(optimizer={"name": f"{__name__}:Masked", "lr": 0.1})).trainer


@pytest.mark.parametrize("engine", ["simulate", "processes"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "Number",
            ".init returns 't': int; accepted: a mapping of names to tensors, [P] or, for counters, [1]",
        ),
        ("Nothing", ".init returns NoneType; accepted: a mapping of names to tensors"),
        ("Pair", ".init returns tuple of 2; accepted: a mapping of names to tensors"),
        ("Table", ".init returns 'history': (2, 650) of torch.float32; accepted: a mapping of names"),
        (
            "Raising",
            ".init: OverflowError: no state (test_cases_optimizers.py, line ",
        ),
        ("RaisingUpdate", ".update: OverflowError: no step (test_cases_optimizers.py, line "),
    ],
)
def test_optimizer_without_a_state_or_a_step_is_refused(name: str, problem: str, engine: str) -> None:
    with pytest.raises(BadInput) as caught:
        prepare(described(optimizer={"name": f"{__name__}:{name}", "lr": 0.1}, engine=engine))
    assert str(caught.value).startswith(f"optimizer: {__name__}:{name}{problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("no_decay", ["bias"]),
        ("groups", [{"params": "0.*", "lr": 0.1}]),
        ("param_groups", []),
        ("lr", {"head": 0.1, "body": 0.01}),
        ("weight_decay", {"bias": 0}),
    ],
)
def test_groups_of_parameters_are_refused_with_a_way_out(field: str, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        described(optimizer={"name": "adamw", "lr": 0.01, field: value})
    line = str(caught.value)
    assert line.startswith(f"optimizer.{field}: got ")
    assert line.endswith(
        "an optimizer of your own with groups, in a few lines (docs/extending.md#groups-of-parameters)"
    )
    pages = Path(__file__).parents[2] / "docs" / "extending.md"
    assert "### Groups of parameters\n" in pages.read_text()


def test_documented_groups_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty full-batch steps of one node, against torch.optim.AdamW with two groups, in float64."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    [block] = [
        b
        for b in re.findall(r"^```python\n((?s:.*?))^```$", text, re.MULTILINE)
        if "class MatricesDecay" in b
    ]
    (tmp_path / "mine_optimizer.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine_optimizer", None)
    fields: dict[str, Any] = {
        "nodes": 1,
        "task": {"name": "digits", "model": "mine_optimizer:net", "samples": 200},
        "algorithm": {"name": "local", "local_steps": 20},
        "batch_size": "full",
        "optimizer": {"name": "mine_optimizer:MatricesDecay", "lr": 0.01, "weight_decay": 0.0},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    experiment = described(**fields)
    setup = prepare(experiment)
    run = gossamer.run(experiment, tmp_path)
    module: nn.Module = importlib.import_module("mine_optimizer").net((1, 8, 8), 10).double()
    for field, parameter in zip(setup.layout.parameters, module.parameters(), strict=True):
        parameter.data = field.of(setup.initial(0).parameters).double()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    x, y = setup.task.train
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(module(x.double()), y).backward()
        optimizer.step()
    assert run.parameters is not None
    expected = torch.cat([p.detach().flatten() for p in module.parameters()]).float()
    torch.testing.assert_close(run.parameters[0], expected, rtol=1e-4, atol=1e-5)
    sys.modules.pop("mine_optimizer", None)


# --- arguments in the wrong order


class Swapped(Algorithm):
    """D-PSGD that mixes with its arguments in another order."""

    call: str = "combine"

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            inbox, weights, own = await node.gather(peers, tag=r), node.mixing_weights(r), node.model
            if self.call == "combine":
                await node.combine(inbox, own, weights)  # type: ignore[arg-type]
            elif self.call == "last":
                await node.combine(own, weights, inbox)  # type: ignore[arg-type]
            else:
                await node.mix(weights, inbox)  # type: ignore[arg-type]


class SwappedCohort(Swapped):
    runs_as_cohort: ClassVar[bool] = True


@pytest.mark.parametrize("name", ["Swapped", "SwappedCohort"])
@pytest.mark.parametrize(
    ("call", "given", "accepted"),
    [
        (
            "combine",
            "node.combine: got Inbox of Model, Model, dict of float",
            "own (a vector or a Model), inbox (rank",
        ),
        (
            "last",
            "node.combine: got Model, dict of float, Inbox of Model",
            "own (a vector or a Model), inbox (rank",
        ),
        (
            "mix",
            "node.mix: got dict of float, Inbox of Model",
            "inbox (rank -> vector), weights (rank -> number)",
        ),
    ],
)
def test_arguments_in_another_order_are_named(
    tmp_path: Path, name: str, call: str, given: str, accepted: str
) -> None:
    algorithm = {"name": f"{__name__}:{name}", "call": call}
    with pytest.raises(RunFailed) as caught:
        gossamer.run(described(algorithm=algorithm), tmp_path)
    line = str(caught.value)
    assert f"TypeError: {given}; accepted: {accepted}" in line
    assert "(test_cases_optimizers.py, line " in line
