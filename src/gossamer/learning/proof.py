"""The first steps, which are tried before a run: those of plain training, and the proof that a trainer takes the same ones,
on the run's own model, loss, data and optimizer.

Plain training has to take a step with the lowest and the highest target, and one with the smallest batch of the run. A faster
way to train may leave out what it does not know: a hook, a gradient of one's own, an optimizer that reduces over the
vector. Its steps look like any others, so three nodes take the same ones by autograd, one node at a time, before a run
begins. Parameters after a step are not compared, since RMSprop turns a rounding of the gradient into half a learning rate.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer import numerics
from gossamer.errors import BadInput, cause
from gossamer.learning.computation import trainer_of
from gossamer.learning.evaluate import telling
from gossamer.learning.gradient import Gradient
from gossamer.learning.guard import fitting, refusing
from gossamer.learning.many import batching_obstacle
from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.parameters import (
    Layout,
    drawing_from,
    flatten,
    generators_restored,
    loss_of,
    seed_generators,
)
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import one_thread
from gossamer.learning.trainer import (
    BatchedTrainer,
    GradientJob,
    SequentialTrainer,
    TrainJob,
    TrainResult,
)
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, generator, torch_seed
from gossamer.tasks.task import Task, for_each

log = logging.getLogger("gossamer")

NODES = 3
TOLERANCE = 1e-3
"""Largest difference from plain training, as a share of the norm. (Rounding gives 6e-7, what a trainer leaves out 0.1.)"""
ROUNDING = 2.0**-22
"""The same for values that the optimizer writes, as a share of their size: four units in the last place."""
SIZES = (1.0, 1e3, 1e-3)
"""Factors of the gradients with which an optimizer steps a stack."""
FEWEST, MOST = 2, 8
"""Samples in a batch: batch norm needs two, and a trainer with a way of its own is tried with more."""


def vectors_needed(name: str, state_vectors: int) -> int:
    """The number of vectors [P] that exist at once in the proof of a trainer, as measured, given those of an optimizer's
    state. "auto" takes trainers other than ``sequential`` only for small models."""
    own = 1 + state_vectors
    return 3 + 5 * own if name in ("auto", SequentialTrainer.name) else 20 + 18 * own


class SmallestBatch(NamedTuple):
    """The smallest batch of a run."""

    rank: int  # of the node that has it
    samples: Int[np.ndarray, " batch"]  # indices in the training data
    cure: str  # what makes it larger, with {} for the number of samples


class OneClassBatch(NamedTuple):
    """A first batch of a node whose targets are equal."""

    rank: int
    samples: Int[np.ndarray, " batch"]  # indices in the training data


def failure_of(
    name: str,
    task: Task,
    optimizer: Optimizer,
    layout: Layout,
    device: str,
    batch: int,
    seed: int,
    smallest: SmallestBatch | None = None,
    one_class: OneClassBatch | None = None,
    rule: Gradient | None = None,
) -> str | None:
    """What a trainer does wrong, as a predicate; None if it takes the steps of plain training. ``rule`` is the experiment's
    gradient; None is the mean.

    Raises:
        BadInput: if no trainer can take the steps: a part of the task or the optimizer raises an error, or keeps state that
            nodes would share, or the optimizer's steps change nothing.
    """
    count = FEWEST if name == SequentialTrainer.name else max(FEWEST, min(batch, MOST))
    key = torch_seed(seed, "proof", SHARED)
    with (
        one_thread(),
        numerics.repeatable(device),
        generators_restored(device),
        drawing_from(key, device),
    ):
        given = _Given(task, optimizer, rule, layout, device, count, seed, smallest, one_class)
        try:
            proof = _tried_plainly(given)
        except BadInput:
            if smallest is None or len(smallest.samples) <= count:
                raise
            # Such a small batch may be none of the run.
            proof = _tried_plainly(given._replace(batch=len(smallest.samples)))
        return None if name == SequentialTrainer.name else proof.failure_of(name)


class _Given(NamedTuple):
    """What a proof is about."""

    task: Task
    optimizer: Optimizer
    rule: Gradient | None
    layout: Layout
    device: str
    batch: int  # samples in a batch of the three nodes
    seed: int
    smallest: SmallestBatch | None
    one_class: OneClassBatch | None


def _tried_plainly(given: _Given) -> _Proof:
    with refusing("task.model"):
        proof = _Proof(given)
    proof.take_plain_steps()
    return proof


class _Proof:
    """Three nodes with unequal models and batches, and their steps. The first batches have the highest and lowest target."""

    def __init__(self, given: _Given) -> None:
        self._given = given
        task, optimizer, rule, layout, device, batch, seed, smallest, self._one_class = given
        rng = generator(seed, "proof")
        size = min(batch, task.samples)
        chosen = np.concatenate([rng.choice(task.samples, size, replace=False) for _ in range(NODES)])
        first = telling(task.train, NODES * size)
        chosen[: len(first)] = first
        self._smallest = smallest if smallest is not None and len(smallest.samples) < size else None
        if self._smallest is not None:
            chosen = np.concatenate([chosen, self._smallest.samples])
        if self._one_class is not None:
            chosen = np.concatenate([chosen, self._one_class.samples])
        samples = for_each(lambda tensor: tensor[chosen], task.train[0]), task.train[1][chosen]
        self._modules: list[nn.Module] = []
        self._task = replace(task, train=samples, groups=None, model=self._recording(task.model))
        self._batches = torch.arange(NODES * size).view(NODES, size)
        self._optimizer, self._rows = optimizer, Rows(layout.size, device)
        self._plain = SequentialTrainer(
            _guarded(self._task, self._modules), optimizer, self._rows, rule=rule, cuda_graphs=False
        )
        self._plain.draws = True  # so that a step begins with the seed of its job
        # Bits may depend on the place in memory without MKL's mode, and on a GPU some of torch's functions do not repeat.
        self._exact = device == "cpu" and numerics.mode() != "off"
        self._fresh = flatten(self._plain.module)
        self._whole = torch.zeros(layout.buffer_size)
        for field in layout.buffers:
            field.of(self._whole).fill_(field.integer)

    def _recording(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def recorded() -> nn.Module:
            self._modules.append(module := make())
            return module

        return recorded

    def _job(self, node: int) -> TrainJob:
        """A node's first step. Its model is the fresh one, larger by a tenth for each rank."""
        factor, device = 1 + 0.1 * node, self._rows.device
        parameters = self._rows.fresh().copy_(self._fresh.parameters).mul_(factor)
        buffers = torch.where(self._whole > 0, self._fresh.buffers, self._fresh.buffers * factor).to(device)
        state = self._optimizer.init(parameters)
        return TrainJob(Model(parameters, buffers), [self._batches[node]], self._optimizer.lr, state, node)

    def _step(self, node: int) -> TrainResult:
        """A node's first step, by plain training."""
        random.seed(node)  # a model may draw from any global generator
        np.random.seed(node)
        return self._plain.train([self._job(node)])[0]

    def _update(self, node: int, lr: float) -> list[Tensor]:
        """The parameters and the state after a step of the optimizer alone, with a gradient of ones."""
        job = self._job(node)
        parameters, state = job.start.parameters.clone(), _copied(job.state)
        seed_generators(node, self._rows.device)
        layout, seed = self._given.layout, self._given.seed
        self._optimizer.step(
            parameters,
            torch.ones_like(parameters),
            state,
            lr,
            layout,
            lambda: generator(seed, "proof/optimizer"),
        )
        return [parameters, *_values(state)]

    def take_plain_steps(self) -> None:
        """Take steps of two nodes, and that of the first one again, which has to have the same bits; and one with the
        smallest batch. BadInput names the part that is at fault."""
        self._try(self._batches[0])
        if len(self._batches[0]) == 1:
            self._try(self._batches[1])
        field = f"optimizer: {self._optimizer.name_of()}.update"
        with refusing(field, "an update that takes a step with parameters and a gradient [P]"):
            self._update(0, self._optimizer.lr)
        with refusing("optimizer and task.model"):
            first = self._repeated_step()
        if first is None:
            self._refuse_shared_state()
        else:
            self._check_update(first)
        if self._smallest is not None:
            self._try_smallest(self._smallest)
        if self._one_class is not None:
            self._try_one_class(self._one_class)

    def _try(self, batch: Int[Tensor, " batch"]) -> None:
        """Compute a gradient of the first node's model."""
        with refusing("task.model", inputs=for_each(lambda tensor: tensor[batch], self._task.train[0])):
            self._plain.gradient([GradientJob(self._job(0).start, batch, 0)])

    def _try_smallest(self, smallest: SmallestBatch) -> None:
        count, whole = len(smallest.samples), self._batches[0]
        try:
            self._try(torch.arange(whole.numel() * NODES, whole.numel() * NODES + count))
        except BadInput as error:
            needed = next(
                k for k in range(count + 1, len(whole) + 1) if k == len(whole) or self._takes(whole[:k])
            )
            problem, _, _ = str(error).rpartition("; accepted: ")
            samples = f"{count} sample{'s' * (count > 1)}"
            raise BadInput(
                f"{problem}, with a batch of {samples}, as node {smallest.rank} has; accepted:"
                f" {smallest.cure.format(needed)}, or a model and a loss that take {samples}"
            ) from error

    def _try_one_class(self, one_class: OneClassBatch) -> None:
        """Compute a gradient for two samples of a batch whose targets are equal or, if that fails, for all of them."""
        count, end = len(one_class.samples), len(self._task.train[1])
        if self._takes(torch.arange(end - count, end - count + min(count, FEWEST))):
            return
        try:
            self._try(torch.arange(end - count, end))
        except BadInput as error:
            problem, _, _ = str(error).rpartition("; accepted: ")
            raise BadInput(
                f"{problem}, with a batch of one class, as the first one of node {one_class.rank}; accepted: a model and a"
                " loss that take it, a larger batch_size, or a partition with more classes at each node"
            ) from error

    def _takes(self, batch: Int[Tensor, " batch"]) -> bool:
        try:
            self._try(batch)
        except BadInput:
            return False
        return True

    def _repeated_step(self) -> TrainResult | None:
        """The first node's step; None if it has other bits when it is repeated after that of another node."""
        first = self._step(0)
        self._step(1)
        return first if self._same(first, self._step(0)) else None

    def _same(self, one: TrainResult, other: TrainResult) -> bool:
        """Whether two results of one step are the same."""
        losses = torch.tensor([one.loss]), torch.tensor([other.loss])
        if not self._exact:
            return max(_distance(*losses), _distance(one.model.buffers, other.model.buffers)) <= TOLERANCE
        states = zip(_values(one.state), _values(other.state), strict=True)
        return all(_equal(*pair) for pair in [losses, *zip(one.model, other.model, strict=True), *states])

    def _refuse_shared_state(self) -> None:
        repeated = "a step of a node has another result when it is repeated after steps of other nodes"
        lr, name = self._optimizer.lr, self._optimizer.name_of()
        one, _, again = self._update(0, lr), self._update(1, lr), self._update(0, lr)
        if not all(map(_equal, one, again)):
            raise BadInput(
                f"optimizer: {repeated}, so {name} keeps state of its own; accepted: all state in the mapping that init"
                " returns, and random numbers from torch's global generator"
            )
        module = self._modules[-1]
        before = _attributes(module)
        self._step(1)
        after = _attributes(module)
        changed = [name for name, value in after.items() if value != before.get(name)]
        shared = "which simulated nodes would share and real ones would not"
        if not changed:
            for field, without in {"augment": None, "loss": _mean_output}.items():
                if getattr(self._task, field) is not without and self._repeats_with(field, without):
                    what = (
                        "numbers drawn from the generator that it gets" if field == "augment" else "no state"
                    )
                    raise BadInput(
                        f"task.{field}: {repeated}, so it keeps state of its own, {shared}; accepted: {what}"
                    )
        where = type(module).__name__ + (f" ({', '.join(changed)})" if changed else "")
        raise BadInput(
            f"task.model: {repeated}, so {where} keeps state outside of parameters and buffers, {shared}; accepted: state in"
            " buffers (register_buffer)"
        )

    def _repeats_with(self, field: str, value: Any) -> bool:
        """Whether the first step repeats if the task has another augmentation or loss."""
        task = replace(self._given.task, **{field: value})
        return (
            _Proof(self._given._replace(task=task, smallest=None, one_class=None))._repeated_step()
            is not None
        )

    def _check_update(self, first: TrainResult) -> None:
        """Refuse an update that changes nothing, or whose random numbers no run repeats."""
        drawn = _numpys_place()
        found, job = self._update(0, 1.0), self._job(0)
        name, starts = self._optimizer.name_of(), [job.start.parameters, *_values(job.state)]
        if _numpys_place() != drawn:
            raise BadInput(
                f"optimizer: {name}.update draws from NumPy's global generator, so runs would not repeat; accepted: torch's,"
                " which is seeded for each node's steps"
            )
        # The gradient of the first step may be zero, or its learning rate too small for the parameters.
        results = [first.model.parameters, *_values(first.state)]
        if all(map(_equal, starts, found)) and all(map(_equal, starts, results)):
            raise BadInput(
                f"optimizer: {name}.update changes neither the parameters nor the state; accepted: an update that writes into"
                " them (parameters.sub_(step), not parameters = parameters - step)"
            )

    def failure_of(self, name: str) -> str | None:
        """What another trainer does differently."""
        if name == BatchedTrainer.name and (problem := batching_obstacle(self._plain.module)):
            return f"can't {problem}"
        if name == BatchedTrainer.name and "rng" in self._optimizer.asks:
            return f"can't give each node a generator in one update of optimizer {self._optimizer.name_of()}"
        jobs = [self._job(node) for node in range(NODES)]
        probes = [GradientJob(job.start, job.batches[0], job.seed) for job in jobs]
        expected, gradients = self._plain.train(jobs), self._plain.gradient(probes)
        try:
            trainer = trainer_of(name)(self._task, self._optimizer, self._rows, cuda_graphs=False)
            if trainer.compiles_first:
                log.info("compiling the trainer's kernels first: this takes a few seconds, once")
            seed_generators(0, self._rows.device)
            [alone] = trainer.train(jobs[:1])
            found, theirs = trainer.train(jobs), trainer.gradient(probes)
            seed_generators(0, self._rows.device)
            [again] = trainer.train(jobs[:1])
        except Exception as error:  # noqa: BLE001 - what it can't do may raise anything, in torch or in the user's code
            return f"can't take the steps of this task, for it raises {cause(error)}"
        if (apart := max(map(_distance, theirs, gradients))) > TOLERANCE:
            return f"computes other gradients than autograd (apart by {apart:.2g} of their norm)"
        buffers = [
            (one.model.buffers, other.model.buffers) for one, other in zip(found, expected, strict=True)
        ]
        if (apart := max(_distance(*pair) for pair in buffers)) > TOLERANCE:
            return f"computes other buffers than plain training (apart by {apart:.2g} of their norm)"
        if not self._same(alone, again):
            return "has another result when a step is repeated"
        return (
            self._failure_of_stack(jobs, expected, gradients) if isinstance(trainer, BatchedTrainer) else None
        )

    def _failure_of_stack(
        self, jobs: Sequence[TrainJob], after: Sequence[TrainResult], gradients: Sequence[Tensor]
    ) -> str | None:
        """What the optimizer does differently with a stack of nodes, which have taken 0, 1 and 2 steps. Gradients of other
        sizes are tried too: a threshold on the norm may be reached by many nodes together, or late in a run."""
        [last] = self._plain.train([jobs[2]._replace(start=after[2].model, state=after[2].state)])
        starts = [jobs[0].start.parameters, after[1].model.parameters, last.model.parameters]
        states = [jobs[0].state, after[1].state, last.state]
        name = self._optimizer.name_of()
        for factor in SIZES:
            scaled = [gradient * factor for gradient in gradients]
            vectors, own = [vector.clone() for vector in starts], [_copied(state) for state in states]
            differs = "steps a stack of nodes [nodes, P] in another way than each of them"
            try:
                same = self._steps_alike(vectors, own, scaled)
            except Exception as error:  # noqa: BLE001 - the user's code, with shapes that it may not expect
                return f"can't be used, for the optimizer {name} {differs}: it raises {cause(error)}"
            if not same:
                return f"can't be used, for the optimizer {name} {differs}"
        return None

    def _steps_alike(
        self, vectors: Sequence[Tensor], states: Sequence[State], gradients: Sequence[Tensor]
    ) -> bool:
        """Whether two steps of the optimizer change a stack of vectors and states as they change each of them, in place."""
        step, lr = self._optimizer.step, self._optimizer.lr
        stack = self._rows.stack(list(vectors))
        stacked = {name: self._rows.stack([single[name] for single in states]) for name in states[0]}
        for _ in range(2):
            before = [vector.clone() for vector in vectors]
            seed_generators(0, self._rows.device)
            step(stack, self._rows.stack(list(gradients)), stacked, lr)
            for node, (vector, state) in enumerate(zip(vectors, states, strict=True)):
                seed_generators(0, self._rows.device)
                step(vector, gradients[node].clone(), state, lr)
                pairs = [(stack[node], vector, float((vector - before[node]).norm()))]
                pairs += [(stacked[key][node], value, float(value.norm())) for key, value in state.items()]
                if any(
                    _apart(one, other) > TOLERANCE * size + ROUNDING * float(other.norm())
                    for one, other, size in pairs
                ):
                    return False
        return True


def _guarded(task: Task, modules: Sequence[nn.Module]) -> Task:
    """The same task with a loss and an augmentation whose errors are refused in their names, as is a loss without a gradient
    for the trained parameters of the ``modules`` that have been made by then."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        accepted = partial(fitting, outputs, targets, "the training data")
        with refusing("task.loss", accepted, outputs=outputs, targets=targets):
            value = loss_of(task, outputs, targets)
        trained = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
        if not _depends([value], trained):
            if _depends([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)], trained):
                raise BadInput(
                    "task.loss: its value has no gradient, although the outputs of task.model have one; accepted: functions"
                    " of torch that have a gradient, without detach(), item(), argmax() or torch.no_grad()"
                )
            raise BadInput(
                "task.model: no trained parameter takes part in its outputs during training, so the loss has no gradient;"
                " accepted: a forward without torch.no_grad() or detach(), of layers that are registered (as in"
                " nn.ModuleList, and not in a list)"
            )
        return value

    def augment(inputs: Any, rng: np.random.Generator) -> Any:
        with refusing("task.augment", inputs=inputs):
            assert task.augment is not None
            return task.augment(inputs, rng)

    return replace(task, loss=loss, augment=None if task.augment is None else augment)


def _depends(values: Sequence[Tensor], parameters: Set[int]) -> bool:
    """Whether autograd would reach one of the parameters, given by their ids, from some values."""
    pending, seen = [value.grad_fn for value in values], set[Any]()
    while pending:
        function = pending.pop()
        if function is not None and function not in seen:
            seen.add(function)
            if id(getattr(function, "variable", None)) in parameters:
                return True
            pending += [step for step, _ in function.next_functions]
    return False


def _mean_output(outputs: Any, targets: Tensor) -> Tensor:
    """A loss without state: the mean of all outputs that depend on the parameters."""
    depend = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.cat([leaf.float().reshape(-1) for leaf in depend]).mean()


def _numpys_place() -> int:
    """The place in the sequence of NumPy's global generator, which moves with each draw."""
    state: Any = np.random.get_state()
    return int(state[2])


def _values(state: State) -> list[Tensor]:
    return [state[name] for name in sorted(state)]


def _copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _apart(one: Tensor, other: Tensor) -> float:
    """The norm of a difference, infinite if only the first one is not finite; zero if the second one is not, since such a
    run diverges either way."""
    return float((one - other).norm().nan_to_num(nan=math.inf)) if other.isfinite().all() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    """The norm of a difference as a share of the second norm."""
    apart = _apart(one, other)
    return apart / max(float(other.norm()), 1e-30) if apart else 0.0


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What can be seen of the attributes of a module and its parts, by name, except trained parameters and persistent
    buffers."""
    seen, own, saved = dict[str, Any](), vars(nn.Module()).keys(), module.state_dict().keys()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        values = {name: value for name, value in vars(part).items() if name not in own}
        values |= {name: value for name, value in part._buffers.items() if prefix + name not in saved}
        values |= {name: p for name, p in part._parameters.items() if p is not None and not p.requires_grad}
        for name, value in values.items():
            tensor = isinstance(value, Tensor)
            seen[prefix + name] = (
                (value.shape, value.detach().double().sum().item()) if tensor else repr(value)
            )
    return seen
