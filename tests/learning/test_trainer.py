from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning_tasks import images, start
from torch import nn

from gossamer.errors import BadInput
from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool
from gossamer.learning.trainer import (
    BatchedTrainer,
    GradientJob,
    SequentialTrainer,
    Trainer,
    TrainJob,
    TrainResult,
)
from gossamer.messages.tags import Model
from gossamer.tasks.task import Task

MOMENTUM = SGD(lr=0.1, momentum=0.9)
SMOOTH = ["logistic", "mlp", "gn-lenet", "batch norm"]


def trainer(kind: type[Trainer], task: Task, optimizer: Optimizer = MOMENTUM) -> Trainer:
    size = start(task, 0).parameters.numel()
    return kind(task, optimizer, Rows(size))


def jobs(task: Task, optimizer: Optimizer, shapes: Sequence[tuple[int, int, float]]) -> list[TrainJob]:
    """One job per node, from (steps, batch size, learning rate)."""
    rng = torch.Generator().manual_seed(5)
    made = []
    for node, (steps, batch, lr) in enumerate(shapes):
        model = start(task, node)
        batches = [torch.randint(60, (batch,), generator=rng) for _ in range(steps)]
        made.append(TrainJob(model, batches, lr, optimizer.init(model.parameters), node))
    return made


def assert_close(one: TrainResult, other: TrainResult) -> None:
    torch.testing.assert_close(one.model.parameters, other.model.parameters, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.model.buffers, other.model.buffers, rtol=1e-5, atol=1e-5)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.state.keys() == other.state.keys()
    for name in one.state:
        torch.testing.assert_close(one.state[name], other.state[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", SMOOTH)
def test_trainers_agree(model: str) -> None:
    """One call has several numbers of steps, batch sizes and learning rates."""
    task = images(model)
    work = jobs(task, MOMENTUM, [(2, 6, 0.1), (2, 6, 0.1), (2, 4, 0.1), (1, 6, 0.1), (2, 6, 0.02)])
    one, other = (trainer(kind, task).train(work) for kind in (SequentialTrainer, BatchedTrainer))
    for first, second in zip(one, other, strict=True):
        assert_close(first, second)


def test_trainers_agree_with_adam() -> None:
    task, optimizer = images("mlp"), Adam(lr=0.01)
    work = jobs(task, optimizer, [(3, 6, 0.01)] * 3)
    one, other = (trainer(kind, task, optimizer).train(work) for kind in (SequentialTrainer, BatchedTrainer))
    for first, second in zip(one, other, strict=True):
        assert_close(first, second)


@pytest.mark.parametrize("model", SMOOTH)
def test_trainers_agree_on_gradients(model: str) -> None:
    task = images(model)
    work = [
        GradientJob(start(task, node), torch.arange(node, node + size), node)
        for node, size in enumerate((6, 6, 4, 6))
    ]
    one, other = (trainer(kind, task).gradient(work) for kind in (SequentialTrainer, BatchedTrainer))
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
        assert first.abs().max() > 1e-3


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize("model", ["mlp", "batch norm"])
def test_steps_match_torch(kind: type[Trainer], model: str) -> None:
    task = images(model)
    (job,) = work = jobs(task, MOMENTUM, [(3, 6, 0.1)])
    (result,) = trainer(kind, task).train(work)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = task.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in job.batches:
        optimizer.zero_grad()
        loss = task.loss(module(task.train[0][batch]), task.train[1][batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(result.model.parameters, expected, rtol=1e-5, atol=1e-5)
    assert result.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
    buffers = [buffer.detach().flatten().float() for buffer in module.buffers()]
    if buffers:
        torch.testing.assert_close(result.model.buffers, torch.cat(buffers), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
def test_trainer_does_not_change_its_jobs(kind: type[Trainer]) -> None:
    task = images("batch norm")
    work = jobs(task, MOMENTUM, [(2, 6, 0.1)] * 2)
    before = [[tensor.clone() for tensor in (*job.start, *job.state.values(), *job.batches)] for job in work]
    trainer(kind, task).train(work)
    after = [[*job.start, *job.state.values(), *job.batches] for job in work]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("model", [*SMOOTH, "dropout"])
def test_sequential_trainer_is_reproducible_after_other_work(model: str) -> None:
    task = images(model)
    work = jobs(task, MOMENTUM, [(2, 6, 0.1)] * 3)
    first = trainer(SequentialTrainer, task).train(work)
    used = trainer(SequentialTrainer, task)
    used.gradient([GradientJob(start(task, 9), torch.arange(3), 9)])
    again = [used.train([job])[0] for job in reversed(work)][::-1]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.model.parameters, other.model.parameters)
        assert torch.equal(one.model.buffers, other.model.buffers)
        assert one.loss == other.loss


def test_worker_threads_make_no_modules() -> None:
    """Making one moves torch's generator, which looks like a step that draws and would leave one worker."""
    task, makers = images("mlp"), set()

    def make() -> nn.Module:
        makers.add(threading.get_ident())
        return task.model()

    workers, optimizer = ThreadPool(4), SGD(lr=0.1)
    rows = Rows(start(task, 0).parameters.numel())
    shared = SequentialTrainer(replace(task, model=make), optimizer, rows, workers)
    given = jobs(task, optimizer, [(1, 4, 0.1)] * 12)
    shared.train(given)
    shared.gradient([GradientJob(job.start, job.batches[0], 1) for job in given])
    workers.close()
    assert makers == {threading.get_ident()}
    assert not shared.draws


def test_dropout_is_drawn_from_the_seed_of_the_job() -> None:
    task = images("dropout")
    (job,) = jobs(task, SGD(lr=0.1), [(1, 6, 0.1)])
    sequential = trainer(SequentialTrainer, task, SGD(lr=0.1))
    results = [
        sequential.train([TrainJob(job.start, job.batches, job.lr, job.state, seed)])[0] for seed in (1, 1, 2)
    ]
    assert torch.equal(results[0].model.parameters, results[1].model.parameters)
    assert not torch.equal(results[0].model.parameters, results[2].model.parameters)


def test_jobs_without_steps_do_not_hide_dropout() -> None:
    task = images("dropout")
    work = jobs(task, SGD(lr=0.1), [(0, 6, 0.1), (0, 6, 0.1), (2, 6, 0.1), (0, 6, 0.1), (2, 6, 0.1)])
    rows = Rows(start(task, 0).parameters.numel())
    workers = ThreadPool(2)
    results = SequentialTrainer(task, SGD(lr=0.1), rows, workers).train(work)
    workers.close()
    for job, result in zip(work, results, strict=True):
        [alone] = trainer(SequentialTrainer, task, SGD(lr=0.1)).train([job])
        assert torch.equal(result.model.parameters, alone.model.parameters)


def test_model_starting_with_a_group_norm_is_trained() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.GroupNorm(3, 3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 4))

    rng = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(60, 3, 8, 8, generator=rng), torch.randint(4, (60,), generator=rng)
    task = Task(model, (inputs, targets), (inputs, targets), nn.CrossEntropyLoss())
    # torch crashes if the inputs have the layout channels_last.
    [result] = trainer(SequentialTrainer, task).train(jobs(task, MOMENTUM, [(2, 6, 0.1)])[:1])
    assert result.model.parameters.isfinite().all()


@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_between_is_called_after_each_job(model: str) -> None:
    task, optimizer = images(model), SGD(lr=0.1)
    calls: list[None] = []
    workers = ThreadPool(1, between=lambda: calls.append(None))
    rows = Rows(start(task, 0).parameters.numel())
    SequentialTrainer(task, optimizer, rows, threads=workers).train(jobs(task, optimizer, [(1, 6, 0.1)] * 5))
    assert len(calls) == {"mlp": 5, "dropout": 10}[model]  # jobs that draw run twice at first


def test_batched_trainer_refuses_dropout() -> None:
    task = images("dropout")
    with pytest.raises(BadInput, match=r"engine\.trainer: 'batched' can't .*dropout.*; accepted: sequential"):
        trainer(BatchedTrainer, task)


def test_dropout_of_rate_zero_is_batched() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 4))

    task = replace(images("logistic"), model=model)
    work = jobs(task, MOMENTUM, [(2, 6, 0.1)] * 3)
    one, other = (trainer(kind, task).train(work) for kind in (SequentialTrainer, BatchedTrainer))
    for first, second in zip(one, other, strict=True):
        assert_close(first, second)


def test_results_keep_the_order_of_the_jobs() -> None:
    task = images("logistic")
    work = jobs(task, SGD(lr=0.1), [(1, size, 0.0) for size in (3, 4, 3, 5, 4)])
    for kind in (SequentialTrainer, BatchedTrainer):
        results: list[Any] = trainer(kind, task, SGD(lr=0.1)).train(work)
        for job, result in zip(work, results, strict=True):
            assert torch.equal(result.model.parameters, job.start.parameters)  # a learning rate of zero


FROZEN_OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.2),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
    Adam(lr=0.01, weight_decay=0.2),
    AdamW(lr=0.01, weight_decay=0.2),
]


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize("optimizer", FROZEN_OPTIMIZERS, ids=str)
def test_training_with_frozen_parameters_matches_torch(optimizer: Optimizer, kind: type[Trainer]) -> None:
    task = images("frozen")
    work = jobs(task, optimizer, [(3, 6, 0.1)] * 2)
    names = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    known = inspect.signature(names[type(optimizer).__name__]).parameters
    options = {name: value for name, value in optimizer if name in known and name != "lr"}
    built = trainer(kind, task, optimizer)
    assert [field.name for field in built.layout.parameters] == ["3.weight"]
    for job, result in zip(work, built.train(work), strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            module = task.model()
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        reference = names[type(optimizer).__name__](module.parameters(), lr=0.1, **options)
        for batch in job.batches:
            reference.zero_grad()
            task.loss(module(task.train[0][batch]), task.train[1][batch]).backward()  # type: ignore[no-untyped-call]
            reference.step()
        expected = module[3].weight.detach().flatten()  # type: ignore[index,union-attr,operator]
        torch.testing.assert_close(result.model.parameters, expected, rtol=1e-5, atol=1e-5)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name]) == (name != "3.weight")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread in this thread, as in the engine and its workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize("model", [*SMOOTH, "dropout"])
def test_bits_do_not_depend_on_the_number_of_workers(kind: type[Trainer], model: str) -> None:
    if kind is BatchedTrainer and model == "dropout":
        pytest.skip("the batched trainer refuses dropout")
    task = images(model)
    work = jobs(task, MOMENTUM, [(2, 6, 0.1)] * 9)
    alone = trainer(kind, task).train(work)
    workers = ThreadPool(3)
    together = kind(task, MOMENTUM, Rows(start(task, 0).parameters.numel()), threads=workers).train(work)
    workers.close()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.model.parameters, other.model.parameters)
        assert torch.equal(one.model.buffers, other.model.buffers)


def test_unused_parameter_does_not_change() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 4), nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.used(inputs.flatten(1))
            return outputs

    task = replace(images("logistic"), model=Idle)
    work = jobs(task, MOMENTUM, [(2, 6, 0.1)] * 3)
    one, other = (trainer(kind, task).train(work) for kind in (SequentialTrainer, BatchedTrainer))
    for job, first, second in zip(work, one, other, strict=True):
        assert_close(first, second)
        assert torch.equal(second.model.parameters[-8:], job.start.parameters[-8:])


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
def test_parameters_sharing_a_gradient_are_stepped_separately(kind: type[Trainer]) -> None:
    """Autograd hands the gradient of a sum to both of its terms; weight decay is added to each in place."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(2 * torch.ones(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.flatten(1)[:, :3] * 0 + (self.a + self.b)

    def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean(0).sum() + 0.0 * targets.sum()

    task = replace(images("logistic"), model=Summed, loss=total)
    optimizer = SGD(lr=0.1, weight_decay=0.5)
    work = jobs(task, optimizer, [(1, 6, 0.1)] * 2)
    for result in trainer(kind, task, optimizer).train(work):
        # x - lr (1 + 0.5 x) for x = 1 and x = 2
        expected = torch.tensor([0.85] * 3 + [1.8] * 3)
        torch.testing.assert_close(result.model.parameters, expected)


class Overlapping(nn.Module):
    """The gradients of a and b are slices of the gradient of c."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(4))
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(2 * torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1)[:, :4] * 0 + torch.cat([self.a, self.b]) + self.c


class Averaging(nn.Module):
    """Its buffer is assigned, not written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


class Shrinking(nn.Module):
    """Its forward pass writes its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.detach().mul_(0.9)
        outputs: torch.Tensor = self.layer(inputs.flatten(1))
        return outputs


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize("model", [Overlapping, Averaging, Shrinking])
def test_unusual_modules_are_stepped_as_in_torch(kind: type[Trainer], model: type[nn.Module]) -> None:
    optimizer = SGD(lr=0.1, weight_decay=0.5)
    task = replace(images("logistic"), model=model)
    work = jobs(task, optimizer, [(3, 6, 0.1)] * 2)
    rows = Rows(start(task, 0).parameters.numel())
    for node, job in enumerate(work):  # starts are rows of the store, as in a run
        work[node] = job._replace(start=Model(rows.store(job.start.parameters), job.start.buffers))
    before = [job.start.parameters.clone() for job in work]
    trainer = kind(task, optimizer, rows)
    for result, job in zip(trainer.train(work), work, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            module = model()
        reference = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
        for batch in job.batches:
            reference.zero_grad()
            task.loss(module(task.train[0][batch]), task.train[1][batch]).backward()  # type: ignore[no-untyped-call]
            reference.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        torch.testing.assert_close(result.model.parameters, expected, rtol=1e-5, atol=1e-5)
        buffers = [buffer.flatten() for buffer in module.buffers()]
        if buffers:
            torch.testing.assert_close(result.model.buffers, torch.cat(buffers), rtol=1e-5, atol=1e-5)
    trainer.gradient([GradientJob(job.start, job.batches[0], 0) for job in work])
    assert all(torch.equal(job.start.parameters, kept) for job, kept in zip(work, before, strict=True))


class Attached(Averaging):
    """It assigns a buffer with the graph of the step, and its loss reads the buffer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * outputs.mean(0)
        return outputs - self.mean


def test_backward_does_not_reach_through_an_assigned_buffer() -> None:
    task = replace(images("logistic"), model=Attached)
    work = jobs(task, MOMENTUM, [(3, 6, 0.1)] * 2)
    alone, together = (trainer(kind, task).train(work) for kind in (SequentialTrainer, BatchedTrainer))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=1e-5, atol=1e-5)
        assert not one.model.buffers.requires_grad


def test_negative_class_is_refused_by_both_trainers() -> None:
    task = images("logistic")
    inputs, targets = task.train
    wrong = replace(task, train=(inputs, torch.full_like(targets, -1)))
    for kind in (SequentialTrainer, BatchedTrainer):
        with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of bounds"):
            trainer(kind, wrong).train(jobs(wrong, MOMENTUM, [(1, 6, 0.1)] * 2))


@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
@pytest.mark.parametrize(
    ("wrong", "returned"),
    [
        (lambda outputs, targets: outputs.mean(1), r"a tensor of shape \(4,\)"),
        (lambda outputs, targets: 0.5, "float"),
    ],
)
def test_loss_that_is_not_a_single_tensor_value_is_named(
    kind: type[Trainer], wrong: Any, returned: str
) -> None:
    task = replace(images("mlp"), loss=wrong)
    message = rf"^task.loss: returns {returned}; accepted: the mean over the samples, a tensor of one value$"
    with pytest.raises(TypeError, match=message):
        trainer(kind, task).train(jobs(task, MOMENTUM, [(1, 4, 0.1)]))
