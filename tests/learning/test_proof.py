"""The proof of trainers: what each leaves out is found on the user's own model, loss and optimizer, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from learning_tasks import CLASSES, MODELS, images
from torch import Tensor, nn

import gossamer
from gossamer import BadInput, Experiment, Run, Task
from gossamer.config.registry import build, names
from gossamer.learning.optimizer import SGD, Adam, Optimizer, State
from gossamer.learning.parameters import Layout, ModuleMaker
from gossamer.learning.proof import failure_of
from gossamer.runtime.setup import prepare


def failure(
    name: str, model: Callable[[], nn.Module], optimizer: Optimizer | None = None, *, task: Task | None = None
) -> str | None:
    given = replace(task or images("mlp"), model=model)
    layout = Layout.of(model())
    return failure_of(name, given, optimizer or SGD(lr=0.1), layout, "cpu", 6, seed=1)


class Two(nn.Module):
    """Two linear layers, as a chain that the kernels know."""

    def __init__(self, shape: Any = None, classes: int = CLASSES) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, classes)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.b(self.hidden(x))
        return outputs


class Curved(Two):
    """Two linear layers that only torch can train."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.a(x.flatten(1)))


class Reversed(torch.autograd.Function):
    """A linear layer that reverses the gradient of its inputs (Ganin and Lempitsky, 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return -g @ weight, g.T @ x, g.sum(0)


class OwnGradient(Two):
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = Reversed.apply(self.hidden(x), self.b.weight, self.b.bias)
        return outputs


class HookOfTensor(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: -g)
        outputs: Tensor = self.b(hidden)
        return outputs


class CurvedHookOfTensor(HookOfTensor):
    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.a(x.flatten(1)))


class WithoutGradient(Two):
    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().hidden(x)


class HookOfModule(Curved):
    def __init__(self, shape: Any = None, classes: int = CLASSES) -> None:
        super().__init__(shape, classes)
        self.b.register_full_backward_hook(
            lambda m, before, after: tuple(g if g is None else -g for g in before)
        )


class HookOfParameter(Curved):
    def __init__(self, shape: Any = None, classes: int = CLASSES) -> None:
        super().__init__(shape, classes)
        self.a.weight.register_hook(lambda g: -g)


def words() -> Task:
    """Sentences of five words, some of which are the word 0, for which the embedding has no gradient."""
    rng = torch.Generator().manual_seed(2)
    x, y = torch.randint(0, 4, (60, 5), generator=rng), torch.randint(CLASSES, (60,), generator=rng)
    return Task(Sentences, (x, y), (x, y), F.cross_entropy)


class Sentences(nn.Module):
    def __init__(self, padding: int | None = 0) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(4, 6, padding_idx=padding), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.words(x).mean(1))
        return outputs


class FunctionalPadding(Sentences):
    """The same, where no layer says so."""

    def __init__(self) -> None:
        super().__init__(padding=None)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(F.embedding(x, self.words.weight, padding_idx=0).mean(1))
        return outputs


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OwnGradient, r"functions with a gradient of their own \(Reversed"),
        (HookOfTensor, "the operation register_hook"),
        (WithoutGradient, "not a chain"),
    ],
)
def test_kernels_refuse_models_whose_backward_pass_is_not_that_of_their_layers(
    model: type[nn.Module], reason: str
) -> None:
    from gossamer.learning.fused.plan import Unknown, plan_of

    with pytest.raises(Unknown, match=reason):
        plan_of(replace(images("mlp"), model=model), model())


def test_proof_finds_a_gradient_that_the_kernels_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the plan does not see it."""
    monkeypatch.setattr("gossamer.learning.fused.plan._check_backward", lambda *_: None)
    assert failure("fused", Two) is None
    assert (found := failure("fused", OwnGradient)) is not None
    assert found.startswith("computes other gradients than autograd (apart by ")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (HookOfModule, "can't call backward hooks, as Linear has"),
        (HookOfParameter, "can't call the hooks of parameters"),
        (CurvedHookOfTensor, "computes other gradients than autograd (apart by "),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, CLASSES)),
            "separate dropout's draws",
        ),
    ],
)
def test_batching_is_refused_for_what_vmap_leaves_out(model: Any, reason: str) -> None:
    assert failure("sequential", model) is None
    assert (found := failure("batched", model)) is not None
    assert reason in found


def test_proof_finds_a_gradient_that_vmap_leaves_out() -> None:
    assert failure("batched", lambda: Sentences(padding=None), task=words()) is None
    assert (found := failure("batched", Sentences, task=words())) is not None
    assert found.startswith("can't leave out the gradient of an embedding's padding_idx")
    assert (found := failure("batched", FunctionalPadding, task=words())) is not None
    assert found.startswith("computes other gradients than autograd (apart by ")


def test_models_that_vmap_cannot_call_are_named_before_the_run() -> None:
    class ByValue(Curved):
        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x)
            return outputs * 2 if outputs.sum() > 0 else outputs

    class Sampling(Curved):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            return hidden + torch.randn_like(hidden)

    for model in (ByValue, Sampling):
        assert failure("sequential", model) is None
        assert (found := failure("batched", model)) is not None
        assert found.startswith("can't take the steps of this task, for it raises RuntimeError: ")


def test_hooks_that_no_trainer_calls_are_refused() -> None:
    def make() -> nn.Module:
        module = Curved()
        module.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return module

    with pytest.raises(
        BadInput, match=r"^task.model: 'a.weight' has a hook on its accumulated gradient, which no trainer"
    ):
        failure("sequential", make)


# --- optimizers


class Plain(Optimizer):
    """A base of optimizers without state."""

    def init(self, parameters: Tensor) -> State:
        return {}


class Normalized(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.sub_(gradient / gradient.norm(), alpha=lr)


class Clipped(Plain):
    """It clips the gradient to a norm that the first gradients of three nodes do not have together."""

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.sub_(gradient * torch.clamp(100 / gradient.norm(), max=1), alpha=lr)


class NormalizedByNode(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.sub_(gradient / gradient.norm(dim=-1, keepdim=True), alpha=lr)


class Noisy(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.add_(gradient + 0.1 * torch.randn_like(gradient), alpha=-lr)


class NoisyByNumPy(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        noise = np.random.standard_normal(gradient.shape).astype(np.float32)
        parameters.add_(gradient + torch.from_numpy(noise), alpha=-lr)


class Returning(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> Any:
        return parameters - lr * gradient


class Rebinding(Plain):
    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters = parameters - lr * gradient


class Remembering(Plain):
    """It keeps its last gradient for all nodes."""

    last: ClassVar[dict[str, Tensor]] = {}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.sub_(gradient + self.last.get("gradient", 0), alpha=lr)
        self.last["gradient"] = gradient.clone()


class CommonCounter(SGD):
    """Its rate depends on the counter of the first node of a stack."""

    def init(self, parameters: Tensor) -> State:
        return {"steps": torch.zeros((*parameters.shape[:-1], 1))}

    def update(self, parameters: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        parameters.sub_(gradient, alpha=lr / (1 + float(state["steps"].flatten()[0])))
        state["steps"].add_(1)


@pytest.mark.parametrize("optimizer", [Normalized, Clipped, Noisy, CommonCounter])
def test_optimizers_that_mix_the_nodes_of_a_stack_are_not_batched(optimizer: type[Optimizer]) -> None:
    assert failure("sequential", Curved, optimizer(lr=0.1)) is None
    assert failure("fused", Two, optimizer(lr=0.1)) is None
    assert failure("batched", Curved, optimizer(lr=0.1)) == (
        f"can't be used, for the optimizer {optimizer.name_of()} steps a stack of nodes [nodes, P] in another way than each of"
        " them"
    )
    assert failure("batched", Curved, NormalizedByNode(lr=0.1)) is None


@pytest.mark.parametrize("name", sorted(names("optimizer")))
def test_every_optimizer_passes(name: str) -> None:
    optimizer: Any = build("optimizer", {"name": name, "lr": 1e-6})
    assert failure("batched", Curved, optimizer) is None
    assert failure("fused", Two, optimizer) is None


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Returning, r"Returning.update returns Tensor; accepted: None, from an update that writes"),
        (Rebinding, r"Rebinding.update changes neither the parameters nor the state; accepted: .*sub_"),
        (Remembering, r"Remembering keeps state of its own; accepted: all state in the mapping that init"),
        (NoisyByNumPy, r"NoisyByNumPy.update draws from NumPy's global generator"),
    ],
)
def test_updates_that_train_nothing_or_something_else_are_refused(
    optimizer: type[Optimizer], message: str
) -> None:
    Remembering.last.clear()
    with pytest.raises(BadInput, match=rf"^optimizer: .*{message}"):
        failure("sequential", Curved, optimizer(lr=0.1))


def test_steps_too_small_for_the_parameters_are_accepted() -> None:
    assert failure("batched", Curved, SGD(lr=1e-30)) is None
    assert failure("sequential", Curved, Adam(lr=1e-30)) is None


# --- state of nodes


class Average(Two):
    """It subtracts a moving average of its outputs, which it keeps as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Any = torch.zeros(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * outputs.detach().mean(0)
        return outputs - self.average * outputs


class Cached(Two):
    """It computes a mask at its first call, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0, 1, 16)
        self.calls += 1
        outputs: Tensor = self.b(self.hidden(x) * self.mask)
        return outputs


class Drawing(Two):
    """It draws from the global generators of torch and NumPy."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x) * np.random.uniform(), 0.5, self.training)


@pytest.mark.parametrize("name", ["sequential", "batched", "fused"])
def test_module_that_keeps_state_for_all_nodes_is_refused_and_named(name: str) -> None:
    message = r"^task.model: a step of a node has another result when .* so Average \(average\) keeps state outside of param"
    with pytest.raises(BadInput, match=message):
        failure(name, Average)


def test_loss_that_keeps_state_is_refused() -> None:
    seen: list[float] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(1.0)
        return F.cross_entropy(outputs, targets) * len(seen)

    with pytest.raises(
        BadInput, match=r"^task.loss: .* so it keeps state of its own, .*; accepted: no state"
    ):
        failure("sequential", Two, task=replace(images("mlp"), loss=loss))


def test_augmentation_that_keeps_state_is_refused() -> None:
    own = np.random.default_rng(0)

    def augment(inputs: Tensor, rng: np.random.Generator) -> Tensor:
        return inputs * float(own.uniform())

    with pytest.raises(BadInput, match=r"^task.augment: .*; accepted: numbers drawn from the generator"):
        failure("sequential", Two, task=replace(images("mlp"), augment=augment))


class OwnGenerator(Two):
    """It draws from a generator of its own, whose state can't be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x) * torch.rand(1, generator=self.generator)
        return outputs


def test_module_with_hidden_state_is_named() -> None:
    with pytest.raises(BadInput, match=r"^task.model: .* so OwnGenerator keeps state outside of parameters"):
        failure("sequential", OwnGenerator)


@pytest.mark.parametrize("model", [Cached, Drawing, *(make for name, make in MODELS.items())])
def test_caches_buffers_draws_and_frozen_parameters_are_not_blamed(model: Any) -> None:
    assert failure("sequential", model, Adam(lr=0.1)) is None


def test_global_generators_are_left_as_they_were() -> None:
    task, layout = replace(images("mlp"), model=Drawing), Layout.of(Drawing())
    before: list[Any] = [np.random.get_state(), torch.get_rng_state()]
    assert failure_of("sequential", task, Noisy(lr=0.1), layout, "cpu", 6, seed=1) is None
    after: list[Any] = [np.random.get_state(), torch.get_rng_state()]
    np.testing.assert_array_equal(before[0][1], after[0][1])
    assert before[0][2] == after[0][2]
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("model", ["batch norm", "frozen", "mlp"])
def test_buffers_and_frozen_parameters_are_batched(model: str) -> None:
    assert failure("batched", MODELS[model]) is None


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_samples_suffice(samples: int) -> None:
    task = images("mlp", samples=samples)
    for name in ("sequential", "batched", "fused"):
        assert failure(name, MODELS["mlp"], task=task) is None


def test_losses_that_are_no_means_are_proved_as_they_are() -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=1)

    assert failure("batched", Curved, task=replace(images("mlp"), loss=total)) is None


@pytest.mark.parametrize("name", ["sequential", "batched"])
def test_losses_that_raise_are_refused(name: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise OverflowError("too much")

    message = r"^task.loss, given outputs .* and targets .*: OverflowError: too much \(test_proof.py, line \d+\); accepted: "
    with pytest.raises(BadInput, match=message):
        failure(name, Two, task=replace(images("mlp"), loss=loss))


class Teacher(Two):
    """It moves its frozen parameters in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(64, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.weight.mul_(0.9)
        outputs: Tensor = super().forward(x) - self.teacher(x.flatten(1))
        return outputs


def both_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets.unique()) == 1:
        raise ValueError("only one class")
    return F.cross_entropy(outputs, targets)


def pairs() -> Task:
    """Sixty samples, in two halves of one class each."""
    inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    pair = inputs, (torch.arange(60) >= 30).long()
    return Task(model=lambda: nn.Linear(5, 2), train=pair, test=pair, loss=both_classes)


def test_a_batch_of_one_class_is_tried_if_a_node_begins_with_one() -> None:
    """Shards leave each node one class; halves of them do not."""
    fields: dict[str, Any] = {
        "nodes": 2,
        "task": pairs,
        "algorithm": "local",
        "batch_size": 8,
        "engine": {"name": "simulate", "trainer": "sequential"},
        "stop": {"rounds": 1},
    }
    with pytest.raises(BadInput) as refused:
        prepare(Experiment(**fields, partition={"name": "shards", "per_node": 1}))
    line = str(refused.value)
    assert line.startswith(
        "task.loss, given outputs (8, 2) of torch.float32 and targets (8,) of torch.int64: ValueError: only"
    )
    assert (
        "with a batch of one class, as the first one of node 0; accepted: a model and a loss that take it, a larger"
        in line
    )
    prepare(Experiment(**fields, partition="iid"))


def test_constants_that_a_forward_pass_changes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"so Teacher \(teacher.weight\) keeps state outside of parameters"):
        failure("sequential", ModuleMaker(Teacher, 3))


# --- runs


def play(out: Path, model: str, trainer: str = "auto", **changes: Any) -> Run:
    values: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "digits", "model": f"{__name__}:{model}", "samples": 200},
        "topology": "ring",
        "algorithm": "d-psgd",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 8,
        "evaluation": {"every_rounds": 2, "samples": 50},
        "stop": {"rounds": 2},
        "engine": {"name": "simulate", "trainer": trainer},
        **changes,
    }
    return gossamer.run(Experiment.of(values), out)


def parameters(run: Run) -> Tensor:
    assert run.parameters is not None
    return run.parameters


@pytest.mark.parametrize("model", ["OwnGradient", "HookOfTensor"])
def test_auto_trains_with_the_users_gradient(tmp_path: Path, model: str) -> None:
    plain = play(tmp_path, model, "sequential")
    run = play(tmp_path, model)
    assert run.experiment["engine"]["trainer"] == run.setup["trainer"] == "sequential"
    assert run.setup["trainer_note"].startswith("not fused: it does not support ")
    assert torch.equal(parameters(run), parameters(plain))
    with pytest.raises(BadInput, match=r"^engine.trainer: 'fused' .*; accepted: auto, sequential$"):
        play(tmp_path, model, "fused")


@pytest.mark.parametrize("nodes", [8, 32])
def test_nodes_in_any_number_train_with_the_users_hooks(tmp_path: Path, nodes: int) -> None:
    changes: dict[str, Any] = {"nodes": nodes, "algorithm": "local"}
    run = play(tmp_path, "HookOfModule", **changes)
    assert torch.equal(parameters(run), parameters(play(tmp_path, "HookOfModule", "sequential", **changes)))
    assert ("not batched: it can't call backward hooks" in run.setup["trainer_note"]) == (nodes == 32)
    with pytest.raises(BadInput, match=r"^engine.trainer: 'batched' can't call backward hooks"):
        play(tmp_path, "HookOfModule", "batched", **changes)


def test_auto_trains_with_the_users_optimizer(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"nodes": 40, "optimizer": {"name": f"{__name__}:Normalized", "lr": 0.1}}
    run, plain = play(tmp_path, "Curved", **changes), play(tmp_path, "Curved", "sequential", **changes)
    assert torch.equal(parameters(run), parameters(plain))
    assert "not batched: it can't be used, for the optimizer" in run.setup["trainer_note"]
    with pytest.raises(
        BadInput, match=r"^engine.trainer: 'batched' can't be used, for the optimizer .*Normalized"
    ):
        play(tmp_path, "Curved", "batched", **changes)


def test_random_numbers_of_an_update_are_keyed(tmp_path: Path) -> None:
    """By seed, node and step: equal for each repetition, number of workers, trainer and engine."""
    changes: dict[str, Any] = {"optimizer": {"name": f"{__name__}:Noisy", "lr": 0.1}}
    engine = {"name": "simulate", "trainer": "fused"}
    runs = [play(tmp_path, "Two", **changes, engine={**engine, "workers": count}) for count in (1, 1, 2)]
    runs.append(play(tmp_path, "Two", **changes, engine={"name": "processes"}))
    assert {run.setup["trainer"] for run in runs} == {"fused"}
    for run in runs[1:]:
        assert torch.equal(parameters(run), parameters(runs[0]))
    plain = parameters(play(tmp_path, "Two", "sequential", **changes))
    torch.testing.assert_close(parameters(runs[0]), plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(parameters(play(tmp_path, "Two", "fused")), parameters(runs[0]))


class Applying(gossamer.Algorithm):
    """Two steps a round with a gradient of zero: a noisy optimizer leaves the sum of its noise."""

    async def run(self, node: gossamer.Node) -> None:
        async for _ in node.rounds():
            for _ in range(2):
                before = node.parameters
                await node.apply(torch.zeros(node.layout[-1].stop))
                node.record(moved=float((node.parameters - before)[0]))
                node.state[f"noise {len(node.state)}"] = node.parameters - before


def test_random_numbers_of_applied_steps_are_keyed_and_differ(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": f"{__name__}:Applying",
        "optimizer": {"name": f"{__name__}:Noisy", "lr": 0.1},
        "evaluation": {"every_rounds": 1, "samples": 50},
    }
    runs = [play(tmp_path, "Two", "sequential", **changes) for _ in range(2)]
    runs.append(play(tmp_path, "Two", engine={"name": "processes"}, **changes))
    assert torch.equal(parameters(runs[0]), parameters(runs[1]))
    assert torch.equal(parameters(runs[0]), parameters(runs[2]))
    moved = runs[0].metrics["moved"].drop_nulls().to_list()
    assert len(set(moved)) == len(moved) >= 8


def test_coordinator_decides_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.runtime.setup.failure_of", lambda *_, **__: "is a test")
        run = play(tmp_path, "Two", engine={"name": "processes"})  # workers would choose "fused"
    assert run.experiment["engine"]["trainer"] == run.setup["trainer"] == "sequential"
    assert run.setup["trainer_note"] == "not fused: it is a test"
    assert torch.equal(parameters(run), parameters(play(tmp_path, "Two", "sequential")))


def test_shared_constants_are_not_blamed() -> None:
    def adapted() -> nn.Module:
        module = Curved()
        module.a.requires_grad_(False)
        return module

    for name in ("sequential", "batched"):
        assert failure(name, ModuleMaker(adapted, 3)) is None
