"""The fused trainer against autograd and torch.optim in float64, layer by layer, loss by loss, optimizer by optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from learning_tasks import images
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.learning.fused.plan import Unknown, plan_of
from gossamer.learning.fused.trainer import FusedTrainer
from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer, RMSprop
from gossamer.learning.parameters import initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.learning.trainer import GradientJob, TrainJob, TrainResult, choose_trainer
from gossamer.tasks import model_factory
from gossamer.tasks.task import Task

CLASSES, SAMPLES = 5, 60


def task_of(
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    targets: Tensor | None = None,
) -> Task:
    rng = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, *shape, generator=rng)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=rng) if targets is None else targets
    return Task(make, (inputs, labels), (inputs[:4], labels[:4]), loss)


def sequential(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def gradient_in_double(task: Task, at: Tensor, batch: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient by autograd, in float64."""
    module = task.model().double()
    leaves, start = {}, 0
    for name, parameter in module.named_parameters():
        values = at[start : start + parameter.numel()].double().view_as(parameter)
        leaves[name] = values.requires_grad_()
        start += parameter.numel()
    inputs, targets = task.train
    outputs = functional_call(module, leaves, (inputs[batch].double(),))
    y = targets[batch]
    loss = task.loss(outputs, y.double() if y.is_floating_point() else y)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return float(loss.detach()), torch.cat([gradient.flatten() for gradient in gradients])


def trainer(
    task: Task, optimizer: Optimizer | None = None, workers: ThreadPool | None = None
) -> FusedTrainer:
    size = len(initial_model(task.model, 0).parameters)
    return FusedTrainer(task, optimizer or SGD(lr=0.1), Rows(size), workers)


def check_gradient(task: Task, batch_sizes: Sequence[int] = (1, 7, 16, 37)) -> None:
    """Gradients agree with float64 within the error of float32, also for batches that don't fill a SIMD vector."""
    fused = trainer(task)
    rng = torch.Generator().manual_seed(8)
    start = initial_model(task.model, 4)
    for size in batch_sizes:
        batch = torch.randint(SAMPLES, (size,), generator=rng)
        loss, expected = gradient_in_double(task, start.parameters, batch)
        [gradient] = fused.gradient([GradientJob(start, batch, 0)])
        assert expected.abs().max() > 1e-3
        error = (gradient.double() - expected).abs().max() / expected.abs().max()
        assert error < 3e-6, (size, float(error))
        job = TrainJob(start, [batch], 0.5, {}, 0)
        [result] = fused.train([job])
        assert result.loss == pytest.approx(loss, rel=2e-6)
        stepped = start.parameters.double() - 0.5 * expected
        torch.testing.assert_close(result.model.parameters.double(), stepped, rtol=1e-5, atol=2e-6)


FLAT = nn.Flatten
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (partial(nn.Linear, 7, CLASSES), (7,)),
    "linear without bias": (partial(nn.Linear, 37, CLASSES, bias=False), (37,)),
    "wide linear": (sequential(partial(nn.Linear, 33, 21), partial(nn.Linear, 21, CLASSES)), (33,)),
    "relu": (sequential(partial(nn.Linear, 9, 18), nn.ReLU, partial(nn.Linear, 18, CLASSES)), (9,)),
    "tanh": (sequential(partial(nn.Linear, 9, 18), nn.Tanh, partial(nn.Linear, 18, CLASSES)), (9,)),
    "activations of activations": (
        sequential(
            partial(nn.Linear, 9, 18),
            nn.Tanh,
            nn.ReLU,
            nn.Tanh,
            nn.Tanh,
            partial(nn.Linear, 18, 18),
            nn.ReLU,
            nn.Tanh,
            nn.ReLU,
            partial(nn.Linear, 18, CLASSES),
        ),
        (9,),
    ),
    "an activation of the inputs": (sequential(nn.Tanh, partial(nn.Linear, 9, CLASSES)), (9,)),
    "convolution": (
        sequential(partial(nn.Conv2d, 2, 3, 3), FLAT, partial(nn.Linear, 60, CLASSES)),
        (2, 6, 7),
    ),
    "convolution without bias": (
        sequential(partial(nn.Conv2d, 1, 9, (1, 2), bias=False), FLAT, partial(nn.Linear, 90, CLASSES)),
        (1, 2, 6),
    ),
    "stride and padding": (
        sequential(partial(nn.Conv2d, 2, 3, 3, (2, 3), (1, 2)), FLAT, partial(nn.Linear, 48, CLASSES)),
        (2, 7, 8),
    ),
    "two convolutions": (
        sequential(
            partial(nn.Conv2d, 2, 11, 3, padding=1),
            nn.Tanh,
            partial(nn.Conv2d, 11, 10, (3, 2), stride=2, padding=1),
            nn.ReLU,
            FLAT,
            partial(nn.Linear, 90, CLASSES),
        ),
        (2, 5, 5),
    ),
    "max pooling": (
        sequential(
            partial(nn.Conv2d, 1, 3, 2),
            partial(nn.MaxPool2d, 2),
            nn.Tanh,
            FLAT,
            partial(nn.Linear, 12, CLASSES),
        ),
        (1, 6, 5),
    ),
    "overlapping max pooling": (
        sequential(
            partial(nn.Conv2d, 1, 3, 2),
            partial(nn.MaxPool2d, 3, 2),
            nn.ReLU,
            FLAT,
            partial(nn.Linear, 27, CLASSES),
        ),
        (1, 8, 8),
    ),
    "average pooling": (
        sequential(
            partial(nn.Conv2d, 1, 3, 2),
            partial(nn.AvgPool2d, (3, 2), 1),
            FLAT,
            partial(nn.Linear, 24, CLASSES),
        ),
        (1, 5, 6),
    ),
    "pooling of the inputs": (
        sequential(partial(nn.MaxPool2d, 2), FLAT, partial(nn.Linear, 6, CLASSES)),
        (1, 4, 6),
    ),
    "group normalisation": (
        sequential(
            partial(nn.Conv2d, 1, 6, 3),
            partial(nn.GroupNorm, 3, 6),
            nn.ReLU,
            FLAT,
            partial(nn.Linear, 54, CLASSES),
        ),
        (1, 5, 5),
    ),
    "group normalisation of the inputs": (
        sequential(partial(nn.GroupNorm, 2, 4), FLAT, partial(nn.Linear, 24, CLASSES)),
        (4, 2, 3),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_match_autograd(name: str) -> None:
    check_gradient(task_of(*LAYERS[name]))


@pytest.mark.parametrize("name", ["logistic", "mlp", "lenet5", "gn-lenet"])
def test_gradients_of_whole_models_match_autograd(name: str) -> None:
    shape = (1, 28, 28) if name == "lenet5" else (2, 9, 8)
    given = {"name": "mlp", "hidden": [30, 17]} if name == "mlp" else name
    make = model_factory(build("model", given), shape=shape, classes=CLASSES)
    check_gradient(task_of(make, shape), (16, 21))


def test_first_of_equal_values_gets_the_gradient_of_the_maximum() -> None:
    task = task_of(
        sequential(
            partial(nn.GroupNorm, 1, 1), partial(nn.MaxPool2d, 2), FLAT, partial(nn.Linear, 4, CLASSES)
        ),
        (1, 4, 4),
    )
    inputs = task.train[0].round().clamp(-1, 1)
    check_gradient(Task(task.model, (inputs, task.train[1]), task.test, task.loss), (16,))


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, lambda outputs, targets: 0.5 * F.mse_loss(outputs, targets), nn.MSELoss()],
    ids=["plain", "half", "module"],
)
def test_gradients_of_squared_errors_match_autograd(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    targets = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(5))
    check_gradient(
        task_of(sequential(partial(nn.Linear, 4, 9), nn.Tanh, partial(nn.Linear, 9, 3)), (4,), loss, targets)
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: F.cross_entropy(outputs, targets) / 4,
        lambda outputs, targets: 3.5 * F.cross_entropy(outputs, targets),
    ],
    ids=["divided", "multiplied"],
)
def test_gradients_of_scaled_cross_entropy_match_autograd(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    check_gradient(task_of(*LAYERS["relu"], loss))


def test_large_outputs_neither_overflow_nor_vanish() -> None:
    task = task_of(*LAYERS["linear"])
    start = initial_model(task.model, 4)
    start.parameters.mul_(300)
    batch = torch.arange(16)
    loss, expected = gradient_in_double(task, start.parameters, batch)
    [gradient] = trainer(task).gradient([GradientJob(start, batch, 0)])
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)
    [result] = trainer(task).train([TrainJob(start, [batch], 0.0, {}, 0)])
    assert result.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["relu", "tanh", "max pooling", "group normalisation"])
def test_non_finite_parameters_stay_non_finite(name: str, value: float) -> None:
    task = task_of(*LAYERS[name])
    start = initial_model(task.model, 4)
    start.parameters[0] = value
    [result] = trainer(task).train([TrainJob(start, [torch.arange(5)], 0.1, {}, 0)])
    assert not result.model.parameters.isfinite().all()


def test_non_finite_sample_makes_the_loss_nan() -> None:
    task = task_of(*LAYERS["pooling of the inputs"])
    task.train[0][3, 0, 0, 0] = float("nan")
    [result] = trainer(task).train([TrainJob(initial_model(task.model, 4), [torch.arange(5)], 0.1, {}, 0)])
    assert result.loss != result.loss


OPTIMIZERS: dict[str, tuple[Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "weight decay": (SGD(lr=0.1, weight_decay=0.1), partial(torch.optim.SGD, weight_decay=0.1)),
    "momentum": (SGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
    "dampening": (
        SGD(lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.02),
        partial(torch.optim.SGD, momentum=0.8, dampening=0.3, weight_decay=0.02),
    ),
    "nesterov": (
        SGD(lr=0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
    "adam": (Adam(lr=0.1), torch.optim.Adam),
    "adam with weight decay": (
        Adam(lr=0.1, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-4),
        partial(torch.optim.Adam, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4),
    ),
    "adamw": (AdamW(lr=0.1, weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
    "amsgrad": (Adam(lr=0.1, amsgrad=True), partial(torch.optim.Adam, amsgrad=True)),
    "rmsprop": (RMSprop(lr=0.1), torch.optim.RMSprop),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_match_torch(name: str) -> None:
    """Against float64, in calls of three steps and two, the second from the state of the first."""
    optimizer, reference = OPTIMIZERS[name]
    task = task_of(*LAYERS["tanh"])
    fused, start = trainer(task, optimizer), initial_model(task.model, 4)
    batches = [torch.arange(k, k + 9) for k in range(5)]
    [result] = fused.train([TrainJob(start, batches[:3], 0.01, optimizer.init(start.parameters), 0)])
    [result] = fused.train([TrainJob(result.model, batches[3:], 0.01, result.state, 0)])
    leaf = start.parameters.double().requires_grad_()
    theirs = reference([leaf], lr=0.01)
    for batch in batches:
        _, leaf.grad = gradient_in_double(task, leaf.detach(), batch)
        theirs.step()
    torch.testing.assert_close(result.model.parameters.double(), leaf.detach(), rtol=1e-4, atol=2e-6)


def test_gradients_are_clipped() -> None:
    task = task_of(*LAYERS["linear"])
    start, batch = initial_model(task.model, 4), torch.arange(16)
    _, gradient = gradient_in_double(task, start.parameters, batch)
    for options in ({"clip_value": 0.01}, {"clip_norm": 0.1}):
        [result] = trainer(task, SGD(lr=1.0, **options)).train([TrainJob(start, [batch], 1.0, {}, 0)])
        shrunk = (
            gradient.clamp(-0.01, 0.01) if "clip_value" in options else gradient * (0.1 / gradient.norm())
        )
        torch.testing.assert_close(
            result.model.parameters.double(), start.parameters - shrunk, rtol=1e-4, atol=1e-6
        )


def some_jobs(task: Task, optimizer: Optimizer, count: int) -> list[TrainJob]:
    rng = torch.Generator().manual_seed(2)
    jobs = []
    for node in range(count):
        start = initial_model(task.model, node)
        batches = [torch.randint(SAMPLES, (5 + node,), generator=rng) for _ in range(1 + node % 3)]
        jobs.append(TrainJob(start, batches, 0.1 / (1 + node), optimizer.init(start.parameters), node))
    return jobs


def assert_same_bits(one: TrainResult, other: TrainResult) -> None:
    assert torch.equal(one.model.parameters, other.model.parameters)
    assert one.loss == other.loss
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1), RMSprop(lr=0.1)], ids=lambda o: type(o).__name__
)
def test_bits_do_not_depend_on_other_nodes_or_workers(optimizer: Optimizer) -> None:
    task = task_of(*LAYERS["two convolutions"])
    jobs = some_jobs(task, optimizer, 23)
    before = [[tensor.clone() for tensor in (job.start.parameters, *job.state.values())] for job in jobs]
    alone = [trainer(task, optimizer).train([job])[0] for job in jobs]
    workers = ThreadPool(3)
    together = trainer(task, optimizer, workers).train(jobs)
    workers.close()
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(one, other)
    for job, kept in zip(jobs, before, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip((job.start.parameters, *job.state.values()), kept, strict=True)
        )


def test_several_steps_in_one_call_equal_single_steps() -> None:
    task, optimizer = task_of(*LAYERS["max pooling"]), Adam(lr=0.1)
    [*_, job] = some_jobs(task, optimizer, 3)
    fused = trainer(task, optimizer)
    [whole] = fused.train([job])
    model, state = job.start, job.state
    for batch in job.batches:
        [step] = fused.train([TrainJob(model, [batch], job.lr, state, 0)])
        model, state = step.model, step.state
    assert torch.equal(whole.model.parameters, model.parameters)
    assert all(torch.equal(whole.state[name], state[name]) for name in state)


def test_job_without_steps_changes_nothing() -> None:
    task, optimizer = task_of(*LAYERS["linear"]), Adam(lr=0.1)
    one, two = some_jobs(task, optimizer, 2)
    idle, stepped = trainer(task, optimizer).train([one._replace(batches=[]), two])
    assert torch.equal(idle.model.parameters, one.start.parameters)
    assert idle.loss == 0
    assert_same_bits(stepped, trainer(task, optimizer).train([two])[0])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.layer(self.layer(x)))
        return scores


class Shortcut(Twice):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x + self.layer(x))
        return scores


class Idle(Twice):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x)
        return scores


class ByValue(Twice):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.layer(x) if x.sum() > 0 else x)
        return scores


def hooked() -> nn.Module:
    module = nn.Linear(6, CLASSES)
    module.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    return module


def hooked_backward() -> nn.Module:
    module = nn.Linear(6, CLASSES)
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    return module


def hooked_parameter() -> nn.Module:
    module = nn.Linear(6, CLASSES)
    module.weight.register_hook(lambda gradient: gradient * 0)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES))
    module[0].requires_grad_(False)
    return module


def test_unsupported_models_and_losses_are_not_recognised() -> None:
    linear = partial(nn.Linear, 6, CLASSES)
    last = partial(nn.Linear, 16, CLASSES)
    image = (4, 4, 4)
    for make, shape, reason in (
        (Twice, (6,), "used twice"),
        (Shortcut, (6,), "not a chain"),
        (Idle, (6,), "no layer uses"),
        (ByValue, (6,), "the operation sum"),
        (hooked, (6,), "hooks"),
        (hooked_backward, (6,), "hooks"),
        (hooked_parameter, (6,), "hooks"),
        (frozen, (6,), "frozen"),
        (sequential(partial(nn.Dropout, 0.5), linear), (6,), "the operation dropout"),
        (sequential(partial(nn.BatchNorm1d, 6), linear), (6,), "buffers"),
        (sequential(linear), (3, 6), "2 dimensions"),
        (
            sequential(partial(nn.Conv2d, 4, 4, 2, groups=2), FLAT, partial(nn.Linear, 36, CLASSES)),
            image,
            "groups",
        ),
        (
            sequential(partial(nn.MaxPool2d, 2, padding=1), FLAT, partial(nn.Linear, 36, CLASSES)),
            image,
            "padding",
        ),
        (sequential(partial(nn.AvgPool2d, 2, divisor_override=3), FLAT, last), image, "divisor_override"),
        (
            sequential(partial(nn.GroupNorm, 2, 4, affine=False), partial(nn.MaxPool2d, 2), FLAT, last),
            image,
            "weights",
        ),
    ):
        with pytest.raises(Unknown, match=reason):
            plan_of(task_of(make, shape), make())
    plain = task_of(linear, (6,))
    for task, reason in (
        (replace(plain, augment=lambda inputs, rng: inputs), "augmented"),
        (replace(plain, train=({"x": plain.train[0]}, plain.train[1])), "several tensors"),
    ):
        with pytest.raises(Unknown, match=reason):
            plan_of(task, linear())
    for loss, targets, reason in (
        (partial(F.cross_entropy, label_smoothing=0.1), None, "other settings"),
        (lambda outputs, targets: F.cross_entropy(outputs, targets) ** 2, None, "the operation pow"),
        (lambda outputs, targets: F.cross_entropy(2 * outputs, targets), None, "mul"),
        (F.cross_entropy, torch.full((SAMPLES,), -100), "targets"),
        (F.mse_loss, torch.zeros(SAMPLES, CLASSES, dtype=torch.float64), "targets"),
    ):
        with pytest.raises(Unknown, match=reason):
            plan_of(task_of(linear, (6,), loss, targets), linear())


def test_unsupported_task_is_refused_by_name_and_avoided_by_auto() -> None:
    message = r"^engine\.trainer: 'fused' does not support buffers.*; accepted: auto, sequential$"
    with pytest.raises(BadInput, match=message):
        choose_trainer("fused", images("batch norm"), "cpu", 16, 32, True)
    with pytest.raises(BadInput, match="does not support the device cuda;"):
        choose_trainer("fused", images("mlp"), "cuda", 16, 32, True)
    name, reason = choose_trainer("auto", images("batch norm"), "cpu", 16, 32, True)
    assert name == "sequential"
    assert reason.startswith("not fused: it does not support buffers")
    for model in ("logistic", "mlp"):
        assert (
            choose_trainer("auto", images(model), "cpu", 16, 32, True)
            == choose_trainer("fused", images(model), "cpu", 16, 32, True)
            == ("fused", "")
        )
    assert choose_trainer("sequential", images("mlp"), "cpu", 16, 32, True) == ("sequential", "")
    assert choose_trainer("auto", images("mlp"), "cpu", 16, 2, False) == ("fused", "")


def curved() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, CLASSES))


def test_auto_trainer_batches_small_models_of_many_nodes() -> None:
    task = replace(images("mlp"), model=curved)
    assert choose_trainer("auto", task, "cpu", 16, 32, True)[0] == "batched"
    assert choose_trainer("auto", task, "cpu", 16, 31, True)[0] == "sequential"
    assert choose_trainer("auto", task, "cpu", 16, 32, False)[0] == "sequential"
    normalized = replace(
        task, model=lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, CLASSES))
    )
    assert choose_trainer("auto", normalized, "cpu", 16, 32, True)[0] == "batched"


def test_model_with_a_plain_forward_method_is_recognised() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 4, 3, padding="valid"), nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(F.max_pool2d(self.conv(x), kernel_size=2))
            x = x.view(x.size(0), -1)
            scores: Tensor = self.last(x)
            return scores

    check_gradient(task_of(Written, (1, 6, 6), nn.CrossEntropyLoss()), (16,))


def test_sample_index_out_of_range_is_refused() -> None:
    task = task_of(*LAYERS["linear"])
    for wrong in (-1, SAMPLES):
        with pytest.raises(IndexError, match="out of bounds"):
            trainer(task).gradient([GradientJob(initial_model(task.model, 4), torch.tensor([0, wrong]), 0)])
