"""Trainers: local steps of one node after the other, or of many nodes at once; and the choice between them.

A trainer is a pure function of its jobs: it reads snapshots and writes fresh vectors. All trainers compute the same
mathematics, but their bits differ, because matrix kernels round differently when they are batched.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossamer.errors import BadInput
from gossamer.learning.capture import MOST_SHAPES, Captured, Function
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import Layout, bare_module, gradient_function, packed
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers, chunk_size, chunks
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, generator
from gossamer.tasks.task import Task, for_each

MEASURED_NODES = 64  # the most nodes whose first batch is used to measure,
MEASURED_VALUES = 1_500_000  # and fewer of large models, of which a few take long enough to tell
BOUND_S = 0.0025
"""A step of one node that takes this many seconds on a CPU is bound by its arithmetic or its memory, as those of
convolutional networks are. Then the batched trainer is not measured, which would take half a second and more."""
FEW, MUCH = 4, 1.4  # if a few nodes take this many times as long in the batched trainer, that settles it

MANY_NODES = 32
"""With fewer nodes, "auto" leaves out the fused trainer, whose kernels take seconds to compile once, and time to load."""


class TrainJob(NamedTuple):
    """Some local steps of one node, each with a batch of sample indices. Model and state, those before the first step, are
    never written; the seed is for layers that draw (dropout)."""

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
    """One optimizer step with a given gradient [P]."""

    start: Model
    gradient: Float[Tensor, " params"]
    lr: float
    state: State


J = TypeVar("J", TrainJob, GradientJob)
R = TypeVar("R")


class Trainer(ABC):
    """Computes local steps and gradients on the device of the rows, which hold models and results. Workers share the jobs;
    results do not depend on their number."""

    name = ""
    nodes = False  # whether it computes the gradients of many nodes at once
    evaluates_many = False  # whether evaluation of many models at once goes with it
    compiled = False  # whether it computes them by torch.compile

    def __init__(self, task: Task, optimizer: Optimizer, rows: Rows, workers: Workers | None = None) -> None:
        self.task, self.optimizer, self.rows = task, optimizer, rows
        inputs, targets = task.train
        self._data = for_each(lambda tensor: tensor.to(rows.device), inputs), targets.to(rows.device)
        self.device_type = rows.device.type
        self._workers = workers or Workers(1)
        self.module = self._make_module()
        self.layout = Layout.of(self.module)
        # (Below compiled code there are no operations of torch's to be recorded.)
        most_shapes = 0 if self.compiled else MOST_SHAPES
        self._gradients = Captured(lambda: self._workers.own(self._make_gradients), most_shapes)

    def _make_module(self) -> nn.Module:
        return bare_module(self.task.model, self.rows.device).train()

    def _make_gradients(self) -> Function:
        given = self.task, self._make_module(), self._data
        return gradient_function(*given, nodes=self.nodes, compiled=self.compiled)

    def _given(self, batch: Tensor, seed: int, number: int) -> tuple[Tensor, ...]:
        """A batch and, if the task augments them, its inputs; ``number`` counts the batches of a job with this seed."""
        if self.task.augment is None:
            return (batch,)
        inputs = for_each(lambda tensor: tensor[batch], self.task.train[0])
        augmented = packed(self.task.augment(inputs, generator(seed, "augment", SHARED, number)))
        return (batch, *(tensor.to(self.rows.device) for tensor in augmented))

    def _steps(self, job: TrainJob) -> list[tuple[Tensor, ...]]:
        return [self._given(batch, job.seed, number) for number, batch in enumerate(job.batches)]

    def forms(self) -> dict[str, int]:
        """How gradients were computed; see :meth:`~gossamer.learning.capture.Captured.forms`."""
        return {"given to torch.compile": 1} if self.compiled else self._gradients.forms()

    @abstractmethod
    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]: ...

    @abstractmethod
    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]: ...

    def apply(self, job: ApplyJob) -> TrainResult:
        """Take an optimizer step; without a loss."""
        parameters = self.rows.fresh()
        state = {name: value.clone() for name, value in job.state.items()}
        self.optimizer.step(parameters, job.gradient.clone(), state, job.lr, job.start.parameters)
        return TrainResult(Model(parameters, job.start.buffers), state, float("nan"))


class SequentialTrainer(Trainer):
    """One node at a time, on each worker."""

    name = "sequential"
    _draws: bool | None = None

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        return self._share(self._train, jobs)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs)

    def _share(self, run: Callable[[Function, J], R], jobs: Sequence[J]) -> list[R]:
        if self._draws is None and jobs:
            # The first job shows whether the model draws random numbers.
            self._seed(jobs[0].seed)
            before = self._generator_states()
            first = run(self._gradients, jobs[0])
            self._draws = not all(map(torch.equal, before, self._generator_states()))
            return [first, *self._share(run, jobs[1:])]
        if not self._draws:
            return self._workers.map(lambda job: run(self._gradients, job), jobs)
        function = self._workers.own(self._make_gradients)
        results = []
        for job in jobs:  # torch has one generator for all threads
            self._seed(job.seed)
            results.append(run(function, job))
            self._workers.between()
        return results

    def _seed(self, seed: int) -> None:
        """Seed the generators from which a module on this device may draw, and no others, which would take 0.4 ms."""
        torch.default_generator.manual_seed(seed)
        if self.device_type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def _generator_states(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self.rows.device)] if self.device_type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def _gradient(self, function: Function, job: GradientJob) -> Float[Tensor, " params"]:
        parameters, buffers = job.at
        # (A model may write its parameters and buffers.)
        given = self._given(job.batch, job.seed, 0)
        _, _, gradient = function(parameters.clone(), buffers.clone(), *given)
        return self.rows.fresh().copy_(gradient)

    def _train(self, function: Function, job: TrainJob) -> TrainResult:
        def copied(value: Tensor) -> Tensor:  # a counter stays on the CPU
            return self.rows.fresh().copy_(value) if len(value) == self.rows.length else value.clone()

        parameters, buffers = self.rows.fresh(), job.start.buffers
        state = {name: copied(value) for name, value in job.state.items()}
        steps = self._steps(job)
        first = first_step_at(function, job.start.parameters, parameters, buffers, steps)
        losses = 0.0
        for given in steps:
            loss, buffers, gradient = function(parameters if first is None else first, buffers, *given)
            losses += float(loss)  # now, since it may be a view of memory that the step writes
            self.optimizer.step(parameters, gradient, state, job.lr, first)
            first = None
        return TrainResult(Model(parameters, buffers), state, losses / max(len(steps), 1))


class CompiledTrainer(SequentialTrainer):
    """One node at a time, with the loss through torch.compile, which needs a C++ compiler. Its bits are its own."""

    name = "compiled"
    compiled = True


def first_step_at(
    function: Function,
    start: Tensor,
    parameters: Tensor,
    buffers: Tensor,
    steps: Sequence[tuple[Tensor, ...]],
) -> Tensor | None:
    """The vector from which the first step starts: ``start`` itself if the step is known only to read it. Else its values are
    copied to the parameters and the result is None, as for later steps."""
    if steps and isinstance(function, Captured) and function.only_reads(start, buffers, *steps[0]):
        return start
    parameters.copy_(start)
    return None


class BatchedTrainer(Trainer):
    """Many nodes at once, in chunks of jobs that have the same number of steps, batch size and learning rate.
    A BadInput refuses models with dropout, whose draws would depend on the nodes that share a batch, and with torch's
    recurrent layers."""

    name = "batched"
    nodes = evaluates_many = True

    def __init__(self, task: Task, optimizer: Optimizer, rows: Rows, workers: Workers | None = None) -> None:
        super().__init__(task, optimizer, rows, workers)
        if problem := _hindrance(self.module):
            raise BadInput(f"engine.trainer: 'batched' can't {problem}; accepted: sequential, auto")
        self._chunk = chunk_size(4 * self.layout.size, self.device_type)

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        keys = [(len(job.batches), *map(len, job.batches), job.lr, *job.state) for job in jobs]
        return self._share(self._train, jobs, keys)

    def gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        return self._share(self._gradient, jobs, [(len(job.batch),) for job in jobs])

    def _share(
        self, run: Callable[[Sequence[J]], list[R]], jobs: Sequence[J], keys: Sequence[Hashable]
    ) -> list[R]:
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            groups[key].append(index)
        split = list(chunks(groups.values(), self._chunk))
        done = self._workers.map(lambda chunk: run([jobs[index] for index in chunk]), split)
        found = dict(zip(chain(*split), chain(*done), strict=True))
        return [found[index] for index in range(len(jobs))]

    def _gradient(self, jobs: Sequence[GradientJob]) -> list[Float[Tensor, " params"]]:
        results, flat = self.rows.block(len(jobs))
        parameters, buffers = self.rows.stack_models([job.at for job in jobs])
        given = _stacked([self._given(job.batch, job.seed, 0) for job in jobs])
        if not self._gradients.only_reads(parameters, buffers, *given):
            parameters = parameters.clone()
        _, _, *gradients = self._gradients(parameters, buffers, *given)
        return self.rows.filled(results, self._flatten(gradients, flat))

    def _train(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        results, parameters = self.rows.block(len(jobs))
        start, buffers = self.rows.stack_models([job.start for job in jobs])
        states = {name: self._writable([job.state[name] for job in jobs]) for name in jobs[0].state}
        state = {name: matrix for name, (_, matrix) in states.items()}
        losses = torch.zeros(len(jobs), device=parameters.device)
        steps = [_stacked(step) for step in zip(*map(self._steps, jobs), strict=True)]
        first = first_step_at(self._gradients, start, parameters, buffers, steps)
        for given in steps:
            at = parameters if first is None else first
            loss, buffers, *gradients = self._gradients(at, buffers, *given)
            losses += loss
            self._optimize(parameters, gradients, state, jobs[0].lr, first)
            first = None
        ended = {name: self.rows.filled(rows, matrix) for name, (rows, matrix) in states.items()}
        rows = self.rows.filled(results, parameters)
        # (Without buffers, all nodes share the empty vector.)
        kept = [each.clone() if len(each) else jobs[0].start.buffers for each in buffers]
        means = [loss / max(len(steps), 1) for loss in losses.tolist()]
        return [
            TrainResult(Model(row, kept[number]), {name: of[number] for name, of in ended.items()}, mean)
            for number, (row, mean) in enumerate(zip(rows, means, strict=True))
        ]

    def _optimize(
        self, parameters: Tensor, gradients: Sequence[Tensor], state: State, lr: float, start: Tensor | None
    ) -> None:
        """An optimizer step with the gradients of the fields."""
        if not self.optimizer.by_coordinate:
            gradient = self._flatten(gradients, torch.empty_like(parameters))
            self.optimizer.step(parameters, gradient, state, lr, start)
            return
        # Field by field, which saves copying the gradients into one vector.
        for field, gradient in zip(self.layout.parameters, gradients, strict=True):
            states = {name: field.of(value) for name, value in state.items()}
            at = None if start is None else field.of(start)
            self.optimizer.step(field.of(parameters), gradient, states, lr, at)

    def _flatten(self, gradients: Sequence[Tensor], out: Tensor) -> Tensor:
        for field, gradient in zip(self.layout.parameters, gradients, strict=True):
            field.of(out).copy_(gradient)
        return out

    def _writable(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Float[Tensor, "nodes values"]]:
        """Optimizer state: new rows (or new counters) and a matrix of their values, which steps write."""
        if len(vectors[0]) != self.rows.length:
            return [torch.empty_like(vector) for vector in vectors], torch.stack(list(vectors))
        rows, matrix = self.rows.block(len(vectors))
        return rows, matrix.copy_(self.rows.stack(vectors))


def _stacked(given: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Stack the arguments of the nodes of a step: [nodes, ...]."""
    return tuple(torch.stack(tensors) for tensors in zip(*given, strict=True))


def _hindrance(module: nn.Module) -> str | None:
    """The reason why the batched trainer can't run a module, or None."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            return "keep dropout's draws apart by node"
        if isinstance(layer, nn.RNNBase):  # its kernels take the weights of one model
            return f"take a step of {type(layer).__name__} layers for many nodes at once"
    return None


def settle(name: str, task: Task, device: str, batch: int, nodes: int) -> tuple[str, str | None]:
    """The trainer "auto" is "fused" if there are many nodes, and the kernels know the task and are faster, which depends only
    on the sizes of layers and batches; else it stays, with the reason why. A BadInput refuses "fused" for a task that the
    kernels do not know."""
    if name not in ("auto", "fused"):
        return name, None
    if name == "auto" and nodes < MANY_NODES:
        return name, f"with less than {MANY_NODES} nodes, it may take longer to load than it saves"
    from gossamer.learning.fused.plan import Unknown, plan_of  # which loads numba

    try:
        if device != "cpu":
            raise Unknown(f"the device {device}")
        plan = plan_of(task, bare_module(task.model).train())
    except Unknown as reason:
        if name == "fused":
            problem = f"'fused' does not know {reason}; accepted: auto, sequential"
            raise BadInput(f"engine.trainer: {problem}") from None
        return name, f"it does not know {reason}"
    if name == "auto" and not plan.worthwhile(batch):
        return name, "torch is faster for layers of this size"
    return "fused", None


def trainer_of(name: str) -> type[Trainer]:
    """The class of a trainer."""
    if name == "fused":
        from gossamer.learning.fused.trainer import FusedTrainer

        return FusedTrainer
    return {kind.name: kind for kind in (SequentialTrainer, BatchedTrainer, CompiledTrainer)}[name]


def choose(make: Callable[[type[Trainer]], Trainer], jobs: Sequence[TrainJob]) -> tuple[Trainer, str]:
    """The trainer that takes less time for some jobs, one step of each of some nodes, and what was found, in words."""
    jobs = jobs[: max(8, MEASURED_VALUES // len(jobs[0].start.parameters))]
    sequential = make(SequentialTrainer)
    if len(jobs) < 2 or _hindrance(sequential.module):
        return sequential, ""
    for job in jobs[:FEW]:  # which records, as the first steps of every shape do
        sequential.train([job])
    alone = _seconds(sequential, jobs, 1)
    if sequential.device_type == "cpu" and alone > BOUND_S:
        return sequential, f"trainer: sequential (a step takes {alone * 1e3:.1f} ms; no comparison)"
    batched = make(BatchedTrainer)
    try:
        batched.train(jobs[:FEW])
    except RuntimeError as error:  # vmap can't run every model (one that draws random numbers, say)
        return sequential, f"trainer: sequential (batched can't run this model: {str(error).splitlines()[0]})"
    for count in (min(FEW, len(jobs)), len(jobs)):
        seconds = {trainer: _seconds(trainer, jobs, count) for trainer in (sequential, batched)}
        if seconds[batched] > MUCH * seconds[sequential]:
            break
    best = min(seconds, key=lambda trainer: seconds[trainer])
    said = ", ".join(f"{trainer.name} {taken * 1e3:.1f} ms" for trainer, taken in seconds.items())
    return best, f"trainer: {best.name} (a step of {count} nodes: {said})"


def _seconds(trainer: Trainer, jobs: Sequence[TrainJob], count: int) -> float:
    """Seconds of this many jobs: other ones each time, since the same step again is not recorded."""
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 1.0:
        turn, start = len(taken) + 1, time.perf_counter()
        trainer.train([*jobs[turn:], *jobs[:turn]][:count])
        taken.append(time.perf_counter() - start)
    return min(taken)
