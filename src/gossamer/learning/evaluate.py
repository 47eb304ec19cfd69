"""Evaluation: loss and metrics of models on a keyed sample of each evaluation set, or on a node's training samples.

One model at a time, or many at once by ``vmap`` over stacked parameters: then models are split into chunks that fit into a
core's cache with their activations. Either way one worker evaluates a model or a chunk, so that results do not depend on the
number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from gossamer.errors import BadInput, GossamerError, cause, is_own
from gossamer.learning.capture import Captured, DispatchMode, Function
from gossamer.learning.parameters import (
    ForMany,
    Layout,
    bare_module,
    channels_last,
    forward,
    named_buffers,
    named_parameters,
    one_value,
    packed,
    unpacked,
)
from gossamer.learning.rows import Rows
from gossamer.learning.workers import Workers, chunk_size, chunks
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, generator
from gossamer.tasks.task import FunctionOfMean, Metric, Pair, Task, for_each

BATCH = 100  # samples in a forward pass: few enough that activations stay in the cache
LEAST = 4
"""Models in a chunk, at least. If fewer fit, as with convolutions on a CPU, models are evaluated one at a time."""

Found = dict[str, float]  # name -> value of the loss and of each metric


class Evaluator:
    """Evaluates models; the samples of the evaluation sets are drawn and laid out once.

    ``samples`` of each set are used; None is all of them. The workers may call it at the same time. ``say`` is called with a
    message if many models can't be evaluated at once.

    Attributes:
        sets: evaluation set -> (inputs, targets) of its sample.
        rows: the store of parameters, for many models at once; None, the default, is one model at a time."""

    def __init__(
        self,
        task: Task,
        seed: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        workers: Workers | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.task, self.device = task, device
        self.workers, self._say = workers or Workers(1), say
        self.rows: Rows | None = None
        self._measures: dict[str, Metric] = {"loss": task.loss, **task.metrics}
        one, many = partial(self._make_means, many=False), partial(self._make_means, many=True)
        self._one = Captured(lambda: self.workers.own(one))
        self._many = Captured(lambda: self.workers.own(many))
        self._chunk: int | None = None  # not known yet
        drawn = {name: _sample(task, name, seed, samples) for name in task.tests}
        self.sets = {
            name: (for_each(lambda tensor: channels_last(tensor.to(device)), x), y.to(device))
            for name, (x, y) in drawn.items()
        }

    def test(self, model: Model, on: str = "test") -> Found:
        """``loss`` and every metric of the task on an evaluation set: means over its sample, and functions of such means."""
        return self._evaluate(model, *self.sets[on])

    def test_each(self, models: Sequence[Model], on: str = "test") -> list[Found | Exception]:
        """:meth:`test` of each model, shared among the workers; or the exception that the user's code raised for it."""
        problem, rows = None, self.rows
        if rows is not None and models:
            try:
                self._chunk = self._chunk or self._size(models[0], rows)
                if self._chunk >= LEAST:
                    split = chunks([list(range(len(models)))], self._chunk)
                    parts = self.workers.map(
                        lambda part: self._together([models[i] for i in part], on, rows), split
                    )
                    return [found for part in parts for found in part]
            except Exception as error:  # noqa: BLE001 - the user's own, of any kind, or something that vmap can't run
                problem = error
        alone = self.workers.map(lambda model: self._attempt(model, on), models)
        if problem is not None and not any(isinstance(each, Exception) for each in alone):
            self._chunk = 1
            self._say(f"evaluation: one model at a time (many can't be evaluated at once: {cause(problem)})")
        return alone

    def columns(self, model: Model, personal: Sequence[int] | Int[np.ndarray, " n"] = ()) -> Found:
        """The recorded columns ``<set>_<name>``: :meth:`test` on every evaluation set, and as ``personal_<name>`` on the
        node's own test samples, if it has any (indices [n] in the training data)."""
        found = {f"{on}_{name}": value for on in self.sets for name, value in self.test(model, on).items()}
        return found | self._personal(model, personal)

    def columns_each(
        self, models: Sequence[Model], personal: Sequence[Int[np.ndarray, " _"]] = ()
    ) -> list[Found | Exception]:
        """:meth:`columns` of each model, or the exception that the user's code raised for it."""
        tested = zip(*(self.test_each(models, on) for on in self.sets), strict=True)
        found: list[Found | Exception] = []
        for each in tested:
            error = next((one for one in each if isinstance(one, Exception)), None)
            named: Any = zip(self.sets, each, strict=True)
            found.append(error or {f"{on}_{name}": value for on, of in named for name, value in of.items()})

        def with_own(number: int) -> Found | Exception:
            columns = found[number]
            try:
                own = self._personal(models[number], personal[number])
                return columns if isinstance(columns, Exception) else columns | own
            except Exception as error:  # noqa: BLE001 - the user's own, of any kind
                return error

        return self.workers.map(with_own, range(len(models))) if any(map(len, personal)) else found

    def _personal(self, model: Model, samples: Sequence[int] | Int[np.ndarray, " n"]) -> Found:
        own = self.train(model, np.asarray(samples)) if len(samples) else {}
        return {f"personal_{name}": value for name, value in own.items()}

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> Found:
        """Loss and metrics over some training samples, given by their indices [n]."""
        chosen = torch.from_numpy(samples)
        inputs, targets = _chosen(self.task.train, chosen)
        on_device = for_each(lambda tensor: tensor.to(self.device), inputs)
        return self._evaluate(model, on_device, targets.to(self.device))

    def warm_up(self, *models: Model) -> None:
        """Have the passes of :meth:`test` recorded on few samples. This takes two models or more."""
        for model in models:
            for inputs, targets in self.sets.values():
                rest = len(targets) % BATCH
                for end in (slice(BATCH), slice(len(targets) - rest, None)):  # (empty without a rest)
                    self._evaluate(model, *_chosen((inputs, targets), end))

    def forms(self) -> dict[str, int]:
        """How measures were computed; see :meth:`~gossamer.learning.capture.Captured.forms`."""
        return dict(Counter(self._many.forms()) + Counter(self._one.forms()))

    def _attempt(self, model: Model, on: str) -> Found | Exception:
        try:
            return self.test(model, on)
        except Exception as error:  # noqa: BLE001 - the user's own, of any kind; the caller knows the model's node
            return error

    def _evaluate(self, model: Model, inputs: Any, targets: Tensor) -> Found:
        totals = [0.0] * len(self._measures)
        given = [vector.to(self.device, copy=True) for vector in model]  # a model may write them
        with torch.no_grad():
            for x, y in _batches(inputs, targets):
                for number, mean in enumerate(self._one(*given, y, *packed(x))):
                    totals[number] += float(mean) * len(y)
        return self._results(totals, len(targets))

    def _together(self, models: Sequence[Model], on: str, rows: Rows) -> list[Found]:
        stacks = rows.stack_models(models)
        totals = torch.zeros(len(self._measures), len(models), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for x, y in _batches(*self.sets[on]):
                reads = self._many.only_reads(*stacks, y, *packed(x))
                given = stacks if reads else [stack.clone() for stack in stacks]
                for total, mean in zip(totals, self._many(*given, y, *packed(x)), strict=True):
                    total += mean.double() * len(y)
        return [self._results(column, len(self.sets[on][1])) for column in totals.T.tolist()]

    def _results(self, totals: Sequence[float], samples: int) -> Found:
        """The results of a model, from each measure's sum over some samples."""
        means = {name: total / max(samples, 1) for name, total in zip(self._measures, totals, strict=True)}
        for name, measure in self._measures.items():
            if isinstance(measure, FunctionOfMean):
                means[name] = float(type(measure).function(torch.tensor(means[name], dtype=torch.float64)))
        return means

    def _size(self, model: Model, rows: Rows) -> int:
        """The number of models like this one in a chunk."""
        largest, means = _Largest(), self._make_means(many=True)  # type: ignore[no-untyped-call]
        with largest, torch.no_grad():
            x, y = next(_batches(*self.sets["test"]))
            means(*rows.stack_models([model]), y, *packed(x))
        return chunk_size(4 * len(model.parameters) + largest.nbytes, rows.device.type)

    def _make_means(self, many: bool) -> Function:
        """``(parameters [P], buffers [B], targets, inputs...) -> the mean of each measure``; for many models, parameters are
        [models, P], buffers [models, B] and means [models]."""
        module = bare_module(self.task.model, self.device).eval()
        layout = Layout.of(module)

        def means_of_one(
            leaves: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, y: Tensor
        ) -> tuple[Tensor, ...]:
            with ForMany() if many else nullcontext():
                with _naming("task.model", x):
                    outputs = forward(module, {**leaves, **buffers}, x)
                return tuple(_measured(name, measure, outputs, y) for name, measure in self._measures.items())

        means_of: Any = vmap(means_of_one, in_dims=(0, 0, None, None)) if many else means_of_one

        def means(parameters: Tensor, buffers: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            named = named_parameters(parameters, layout.parameters)
            # (Convolutions for many models at once are fastest with images as they are.)
            x = unpacked([x.contiguous() if many else channels_last(x) for x in inputs], self.task.train[0])
            return tuple(means_of(named, named_buffers(buffers, layout, module), x, y))

        return means


def try_out(task: Task, module: nn.Module, seed: int) -> None:
    """Have a fresh module of a task compute the outputs of two training samples, as they are augmented, and every measure of
    two samples of each evaluation set; a BadInput names the part of the task that raised an error."""
    module.eval()
    part, measures = "task", {"loss": task.loss, **task.metrics}
    try:
        with torch.no_grad():
            for inputs, targets in (task.train, *task.tests.values()):
                highest = int(targets.flatten(1).amax(1).argmax() if targets.dim() > 1 else targets.argmax())
                x, y = _chosen((inputs, targets), torch.tensor([0, highest]))  # (a class may be too high)
                training = inputs is task.train[0]
                if training and task.augment is not None:
                    part = "task.augment"
                    with _naming(part, x):
                        x = unpacked(packed(task.augment(x, generator(seed, "try-out", SHARED))), inputs)
                part = "task.model"
                with _naming(part, x):
                    outputs = forward(module, {}, x)
                if training:
                    continue  # the loss may refuse a single bad sample, and then the node that has it fails
                for name, measure in measures.items():
                    part = _part(name)
                    _measured(name, measure, outputs, y)
    except Exception as error:
        said = f"{part}: {cause(error)}" if is_own(error) else str(error)
        raise BadInput(f"{said}; accepted: what fits the task's other parts") from error


class _Largest(DispatchMode):  # type: ignore[no-untyped-call]
    nbytes = 0  # of the largest tensor that is created

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in func._schema.returns):  # no view
            made = [value.nbytes for value in tree_leaves(result) if isinstance(value, Tensor)]
            self.nbytes = max([self.nbytes, *made])
        return result


def _sample(task: Task, name: str, seed: int, samples: int | None) -> Pair:
    count = len(task.tests[name][1])
    if samples is None or samples >= count:
        return task.tests[name]
    purpose = "evaluation" if name == "test" else f"evaluation-{name}"
    chosen = torch.from_numpy(np.sort(generator(seed, purpose).choice(count, samples, replace=False)))
    return _chosen(task.tests[name], chosen)


def _chosen(pair: Pair, which: Tensor | slice) -> Pair:
    return for_each(lambda tensor: tensor[which], pair[0]), pair[1][which]


def _measured(name: str, measure: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean that a measure returns; a user's metric may also return a plain number."""
    if isinstance(measure, FunctionOfMean):
        measure = measure.mean
    field = _part(name)
    with _naming(field, outputs=outputs, targets=targets):
        value: object = measure(outputs, targets)
    if isinstance(value, int | float | np.generic | np.ndarray):
        value = torch.as_tensor(value)
    return one_value(field, value, "one value")


def _part(measure: str) -> str:
    return "task.loss" if measure == "loss" else f"task.metrics.{measure}"


@contextmanager
def _naming(field: str, inputs: Any = None, **given: Any) -> Iterator[None]:
    """Add the part of the task, and the tensors that it was given, to an error that torch raises."""
    given |= inputs if isinstance(inputs, dict) else {"inputs": inputs}
    try:
        yield
    except Exception as error:
        if is_own(error) or isinstance(error, GossamerError):
            raise
        said = " and ".join(f"{name} {_kind(value)}" for name, value in given.items() if value is not None)
        message = " ".join(str(error).split())
        raise RuntimeError(f"{field}, given {said}: {type(error).__name__}: {message}") from error


def _kind(value: object) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _batches(inputs: Any, targets: Tensor) -> Iterator[Pair]:
    for start in range(0, len(targets), BATCH):
        yield _chosen((inputs, targets), slice(start, start + BATCH))
