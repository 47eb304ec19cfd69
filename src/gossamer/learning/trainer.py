"""Trainers: local steps of one node after the other or of many nodes at once, and the choice between them.

A trainer is a pure function of its jobs: it reads snapshots and writes fresh vectors. All trainers compute the same
mathematics, but their bits differ, because matrix kernels round differently when they are batched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from math import isfinite
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.errors import BadInput
from gossamer.learning.cuda_graph import Recorded, Tensors
from gossamer.learning.gradient import BatchLoss, Gradient, MeanGradient, computed
from gossamer.learning.many import batching_obstacle, gradients_of_many, is_dense
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import (
    FlatModule,
    Layout,
    bare_module,
    generator_states,
    loss_of,
    note_finite,
    packed,
    scores,
    seed_generators,
    unpacked,
)
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool, chunk_size, chunks
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, generator
from gossamer.tasks.task import Task, for_each

MANY_NODES = 32
"""With fewer nodes, "auto" does not batch."""
MAX_BATCHED = 80_000
"""Largest number of parameters for which "auto" batches nodes on a CPU (benchmarks/trainers.py)."""


class TrainJob(NamedTuple):
    """Some local steps of one node, each with a batch of sample indices. Model and state are those before the
    first step and are never modified. The seed is for random layers (dropout) and optimizers that draw."""

    start: Model
    batches: Sequence[Int[Tensor, " batch"]]
    lr: float
    state: State
    seed: int


class TrainResult(NamedTuple):
    """The model and optimizer state after the last step, and the mean of the steps' losses."""

    model: Model
    state: State
    loss: float


class GradientJob(NamedTuple):
    """The mean gradient of the loss over one batch [batch] at a model."""

    at: Model
    batch: Int[Tensor, " batch"]
    seed: int


class ApplyJob(NamedTuple):
    """One optimizer step with a given gradient [P]. The seed is for optimizers that draw random numbers."""

    start: Model
    gradient: Float[Tensor, " params"]
    lr: float
    state: State
    seed: int


J = TypeVar("J", TrainJob, GradientJob, ApplyJob)
R = TypeVar("R")
StepsResult = tuple[Model, State, Float[Tensor, "2"]]
"""The model and optimizer state after a job's last step, and, on the trainer's device, the sum of the steps' losses and the
sum of the parameters."""

_Module = tuple[FlatModule, Callable[..., Tensors]]
"""A module, and a function from a batch and its augmented inputs, if any, to its loss and gradient [P]."""


class Trainer(ABC):
    """Computes local steps and gradients on the device of the rows, which hold models and results. Threads
    share the jobs; results do not depend on the number of threads. On a GPU, steps are recorded as CUDA graphs
    if ``cuda_graphs`` is set. ``rule`` computes gradients; None is the mean, and trainers of many nodes know no other."""

    name = ""
    evaluates_many = False  # whether many models are also evaluated at once
    compiles_first = False  # whether the first step waits for compilation
    draws = False  # whether a step has drawn random numbers

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        rows: Rows,
        threads: ThreadPool | None = None,
        *,
        rule: Gradient | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.task, self.optimizer, self.rows = task, optimizer, rows
        self._gradient_rule = None if type(rule) is MeanGradient else rule
        self._records = cuda_graphs and rows.device.type == "cuda" and self._gradient_rule is None
        inputs, targets = task.train
        self._data = for_each(lambda tensor: tensor.to(rows.device), inputs), targets.to(rows.device)
        self.device_type = rows.device.type
        self._threads = threads or ThreadPool(1)
        self.module = self._make_module()
        self.layout = Layout.of(self.module)
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027 - some kinds need no setup
        """Set up what this kind of trainer needs, at the end of the constructor."""

    def _make_module(self) -> nn.Module:
        return bare_module(self.task.model, self.rows.device).train()

    def _recorded(self, function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return Recorded(function) if self._records else function

    def _augmented(self, batch: Tensor, seed: int, number: int) -> tuple[Tensor, ...]:
        """The inputs of a batch, if the task augments them. ``number`` counts the batches of a job with this
        seed."""
        if self.task.augment is None:
            return ()
        inputs = for_each(lambda tensor: tensor[batch], self.task.train[0])
        return packed(self.task.augment(inputs, generator(seed, "augment", SHARED, number)))

    @abstractmethod
    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]: ...

    @abstractmethod
    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]: ...

    def apply(self, jobs: Sequence[ApplyJob]) -> list[TrainResult]:
        """Take one optimizer step in each job. The results have no loss."""
        return self._seeded(self._apply, jobs)

    def _apply(self, job: ApplyJob) -> TrainResult:
        parameters = self.rows.fresh().copy_(job.start.parameters)
        state = {name: value.clone() for name, value in job.state.items()}
        self._optimize(parameters, job.gradient.clone(), state, job.lr, job.seed, 0)
        return TrainResult(Model(parameters, job.start.buffers), state, float("nan"))

    def _optimize(
        self, parameters: Tensor, gradient: Tensor, state: State, lr: float, seed: int, number: int
    ) -> None:
        """Take one step of the optimizer at a node: step ``number`` of a job with this seed."""
        self.optimizer.step(
            parameters, gradient, state, lr, self.layout, lambda: generator(seed, "optimizer", SHARED, number)
        )

    def _seeded(self, run: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
        """Run jobs on all threads or, if they draw random numbers, one at a time and from their seeds (again, when this
        is noticed), since torch has one generator for all threads."""
        if not self.draws:
            before = generator_states(self.rows.device)
            results = self._threads.map(run, jobs)
            if all(map(torch.equal, before, generator_states(self.rows.device))):
                return results
            self.draws = True
        results = []
        for job in jobs:
            seed_generators(job.seed, self.rows.device)
            results.append(run(job))
            self._threads.between()
        return results


def _results(jobs: Sequence[TrainJob], stepped: Sequence[StepsResult]) -> list[TrainResult]:
    """The results of jobs. Their sums are fetched together from a GPU, since fetching one waits for all earlier
    work."""
    sums = torch.stack([totals for _, _, totals in stepped]).tolist() if stepped else []
    note_finite([model.parameters for model, _, _ in stepped], [isfinite(total) for _, total in sums])
    return [
        TrainResult(model, state, loss / max(len(job.batches), 1))
        for job, (model, state, _), (loss, _) in zip(jobs, stepped, sums, strict=True)
    ]


class SequentialTrainer(Trainer):
    """Trains one node at a time on each thread."""

    name = "sequential"

    def _prepare(self) -> None:
        self._modules: list[_Module] = []  # those that no thread uses now

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        return _results(jobs, self._share(self._train, jobs))

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs)

    def _share(self, run: Callable[[_Module, J], R], jobs: Sequence[J]) -> list[R]:
        """Run jobs with a module each."""
        # Made here and not by the threads, since a new module draws from the generator, whose state is then restored.
        count = 1 if self.draws else self._threads.count
        while len(self._modules) < min(count, len(jobs)):
            self._modules.append(self._make_flat())

        def with_module(job: J) -> R:
            module = self._modules.pop()
            try:
                return run(module, job)
            finally:
                self._modules.append(module)

        return self._seeded(with_module, jobs)

    def _make_flat(self) -> _Module:
        flat, (inputs, targets) = FlatModule(self._make_module()), self._data

        def step(batch: Tensor, *augmented: Tensor) -> Tensors:
            x = unpacked(augmented, inputs) if augmented else for_each(lambda tensor: tensor[batch], inputs)
            with torch.enable_grad():
                loss = loss_of(self.task, scores(flat.module, for_each(flat.laid_out, x)), targets[batch])
            return loss.detach(), flat.gradient(loss)

        # A forward pass may replace buffers by other tensors, which a recording would not notice.
        return flat, step if self.layout.buffers else self._recorded(step)

    def _inputs(self, batch: Tensor, seed: int, number: int) -> Tensors:
        return tuple(x.to(self.rows.device) for x in (batch, *self._augmented(batch, seed, number)))

    def _step(self, module: _Module, batch: Tensor, seed: int, number: int) -> Tensors:
        """The loss and the gradient of batch ``number`` of a job with this seed."""
        flat, step = module
        indices, *augmented = self._inputs(batch, seed, number)
        if self._gradient_rule is None:
            return step(indices, *augmented)
        inputs, targets = self._data
        x = unpacked(augmented, inputs) if augmented else for_each(lambda tensor: tensor[indices], inputs)
        rng = generator(seed, "gradient", SHARED, number)
        return computed(self._gradient_rule, BatchLoss(self.task, flat), flat, (x, targets[indices]), rng)

    def _gradient(self, module: _Module, job: GradientJob) -> Float[Tensor, " params"]:
        module[0].load(job.at)
        return self.rows.fresh().copy_(self._step(module, job.batch, job.seed, 0)[1])

    def _train(self, module: _Module, job: TrainJob) -> StepsResult:
        def copied(value: Tensor) -> Tensor:  # a counter stays on the CPU
            return self.rows.fresh().copy_(value) if len(value) == self.rows.length else value.clone()

        flat, _ = module
        flat.load(job.start)
        state = {name: copied(value) for name, value in job.state.items()}
        losses = torch.zeros((), dtype=torch.float64, device=self.rows.device)
        for number, batch in enumerate(job.batches):
            loss, gradient = self._step(module, batch, job.seed, number)
            losses += loss  # now, since it may be a view of memory that the step overwrites
            self._optimize(flat.parameters, gradient, state, job.lr, job.seed, number)
        buffers = flat.buffers() if self.layout.buffers else job.start.buffers
        model = Model(self.rows.fresh().copy_(flat.parameters), buffers)
        return model, state, torch.stack([losses, flat.parameters.sum()])


class BatchedTrainer(Trainer):
    """Many nodes at once, in chunks of jobs that have the same number of steps, batch size and learning rate.
    BadInput for models with dropout, whose draws would depend on the nodes that share a batch, and for models
    with torch's recurrent layers, backward hooks or an embedding's ``padding_idx``."""

    name = "batched"
    evaluates_many = True

    def _prepare(self) -> None:
        if problem := batching_obstacle(self.module):
            raise BadInput(f"engine.trainer: 'batched' can't {problem}; accepted: sequential, auto")
        self._chunk = chunk_size(4 * self.layout.size, self.device_type)

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        keys = [(len(job.batches), *map(len, job.batches), job.lr, *job.state) for job in jobs]
        return _results(jobs, self._share(self._train, jobs, keys))

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs, [(len(job.batch),) for job in jobs])

    def _share(
        self, run: Callable[[Sequence[J]], list[R]], jobs: Sequence[J], keys: Sequence[Hashable]
    ) -> list[R]:
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            groups[key].append(index)
        split = [chunk for group in groups.values() for chunk in chunks(group, self._chunk)]
        parts = self._threads.map(lambda chunk: run([jobs[index] for index in chunk]), split)
        results = dict(zip(chain(*split), chain(*parts), strict=True))
        return [results[index] for index in range(len(jobs))]

    def _make_gradients(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._recorded(gradients_of_many(self.task, self._make_module(), self._data))

    def _inputs(self, batches: Sequence[Tensor], seeds: Sequence[int], number: int) -> tuple[Tensor, ...]:
        """Batch ``number`` of some nodes, and its augmented inputs, if any: [nodes, ...]."""
        pairs = zip(batches, seeds, strict=True)
        by_node = [(batch, *self._augmented(batch, seed, number)) for batch, seed in pairs]
        return tuple(torch.stack(tensors).to(self.rows.device) for tensors in zip(*by_node, strict=True))

    def _gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        parameters, buffers = self.rows.stack_models([job.at for job in jobs])
        inputs = self._inputs([job.batch for job in jobs], [job.seed for job in jobs], 0)
        _, _, gradients = self._threads.own(self._make_gradients)(parameters, buffers, *inputs)
        return self._apart(gradients)

    def _train(self, jobs: Sequence[TrainJob]) -> list[StepsResult]:
        parameters, buffers = self.rows.stack_models([job.start for job in jobs])
        state = {name: self.rows.stack([job.state[name] for job in jobs]) for name in jobs[0].state}
        gradients_of, seeds = self._threads.own(self._make_gradients), [job.seed for job in jobs]
        losses = torch.zeros(len(jobs), device=parameters.device)
        for number, batches in enumerate(zip(*(job.batches for job in jobs), strict=True)):
            inputs = self._inputs(batches, seeds, number)
            loss, buffers, gradients = gradients_of(parameters, buffers, *inputs)
            losses += loss
            self.optimizer.step(parameters, gradients, state, jobs[0].lr, self.layout)
        models = self._apart(parameters)
        # Without buffers, all nodes share the empty vector.
        by_node = self._apart(buffers) if buffers.shape[1] else [job.start.buffers for job in jobs]
        values = zip(*map(self._apart, state.values()), strict=True) if state else [()] * len(jobs)
        states = [dict(zip(state, vectors, strict=True)) for vectors in values]
        sums = torch.stack([losses, parameters.sum(dim=1)], dim=1).unbind()
        return list(zip(map(Model, models, by_node), states, sums, strict=True))

    def _apart(self, matrix: Float[Tensor, "nodes n"]) -> list[Float[Tensor, " n"]]:
        """Copies of a matrix's rows, each with its own memory."""
        rows, fits = list(matrix.unbind()), matrix.shape[1] == self.rows.length
        vectors = [self.rows.fresh() if fits else torch.empty_like(row) for row in rows]
        torch._foreach_copy_(vectors, rows)
        return vectors


def choose_trainer(
    name: str, task: Task, device: str, batch: int, nodes: int, batches: bool
) -> tuple[str, str]:
    """The trainer that "auto" tries first, based on the sizes and kinds of layers, and why it is not "fused", if so:
    "not fused: ...". ``batches`` tells whether the engine can batch nodes. BadInput if "fused" is requested
    for a task that the kernels do not support."""
    if name not in ("auto", "fused"):
        return name, ""
    from gossamer.learning.fused.plan import Unknown, plan_of  # loads numba

    try:
        if device != "cpu":
            raise Unknown(f"the device {device}")
        plan = plan_of(task, bare_module(task.model).train())
        if name == "fused" or plan.worthwhile(batch):
            return "fused", ""
        reason = "not fused: torch is faster for layers of this size"
    except Unknown as unknown:
        reason = f"not fused: it does not support {unknown}"
        if name == "fused":
            problem = f"'fused' does not support {unknown}; accepted: auto, sequential"
            raise BadInput(f"engine.trainer: {problem}") from None
    pays = batches and nodes >= MANY_NODES and _batching_pays(task, device)
    return ("batched" if pays else "sequential"), reason


def _batching_pays(task: Task, device: str) -> bool:
    """Whether batching nodes is faster: on a GPU, and for small models of linear layers."""
    module = bare_module(task.model).train()
    small = is_dense(module) and Layout.of(module).size <= MAX_BATCHED
    return device != "cpu" or small
