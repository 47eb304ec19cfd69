"""Evaluation: loss and metrics of models on a keyed sample of each evaluation set, or on a node's training samples.

Models are evaluated one at a time. Models of linear layers are evaluated many at once, by ``vmap`` over
stacked parameters, in chunks that fit into a core's cache. In both cases, one worker evaluates a model or a
chunk, so that results do not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import vmap

from gossamer.errors import BadInput, GossamerError, cause, is_own
from gossamer.learning.many import ManyModels, call_with, is_dense, named_buffers
from gossamer.learning.parameters import (
    FlatModule,
    bare_module,
    channels_last,
    drawing_from,
    generator_states,
    is_finite,
    named_parameters,
    one_value,
    packed,
    scores,
    unpacked,
)
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool, chunk_size, chunks
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, generator, torch_seed
from gossamer.tasks.task import FunctionOfMean, Metric, Pair, Task, for_each

BATCH = 100  # samples in a forward pass, few enough for activations to stay in the cache
MIN_CHUNK = 4
"""Minimum number of models in a chunk. If fewer fit, models are evaluated one at a time."""

_GENERATORS = Lock()  # torch has one generator a device for all threads

MetricValues = dict[str, float]  # name -> value of the loss and of each metric


class Evaluator:
    """Evaluates models. The samples of the evaluation sets are drawn and laid out once.

    It uses ``samples`` samples of each set; None is all. Several workers may call it concurrently. With
    ``rows``, the store of parameters, many models of linear layers are evaluated at once; if that fails,
    ``say`` is called with a message.

    Attributes:
        sets: evaluation set -> (inputs, targets) of its sample."""

    def __init__(
        self,
        task: Task,
        seed: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        workers: ThreadPool | None = None,
        say: Callable[[str], None] = print,
        rows: Rows | None = None,
    ) -> None:
        self.task, self.device = task, device
        self.workers, self._say = workers or ThreadPool(1), say
        self._measures: dict[str, Metric] = {"loss": task.loss, **task.metrics}
        self.sets = {name: self._placed(_sample(task, name, seed, samples)) for name in task.tests}
        self._seed = torch_seed(seed, "evaluate")
        self._draws = self._draws_numbers()
        self._rows, self._chunk = rows, 1 if rows is None or self._draws else self._size(rows)

    def test(self, model: Model, on: str = "test") -> MetricValues:
        """``loss`` and every metric of the task on an evaluation set: means over its sample, and functions of such means."""
        return self._evaluate(model, self.sets[on])

    def test_each(self, models: Sequence[Model], on: str = "test") -> list[MetricValues | Exception]:
        """The result of :meth:`test` for each model, or the exception that the user's code raised. The
        workers share the models."""
        problem = None
        if self._chunk >= MIN_CHUNK:
            try:
                parts = self.workers.map(lambda part: self._together(part, on), chunks(models, self._chunk))
                return [values for part in parts for values in part]
            except Exception as error:  # noqa: BLE001 - any error of the user's code, or something that vmap can't run
                problem = error
        results = self.workers.map(lambda model: _attempt(self.test, model, on), models)
        if problem is not None and not any(isinstance(result, Exception) for result in results):
            self._chunk = 1
            self._say(f"evaluation: one model at a time (many can't be evaluated at once: {cause(problem)})")
        return results

    def columns(self, model: Model, personal: Sequence[int] | Int[np.ndarray, " n"] = ()) -> MetricValues:
        """The recorded columns ``<set>_<name>``: :meth:`test` on every evaluation set, and as ``personal_<name>`` on the
        node's own test samples, if it has any (indices [n] in the training data)."""
        [columns] = self.columns_each([model], [np.asarray(personal, dtype=np.int64)])
        if isinstance(columns, Exception):
            raise columns
        return columns

    def columns_each(
        self, models: Sequence[Model], personal: Sequence[Int[np.ndarray, " _"]] = ()
    ) -> list[MetricValues | Exception]:
        """The result of :meth:`columns` for each model, or the exception that the user's code raised. All values of a model
        that is not finite are NaN: the class with the largest output is the first one there, whose accuracy means nothing."""
        parts = {on: self.test_each(models, on) for on in self.sets}
        if any(map(len, personal)):
            parts["personal"] = self.workers.map(
                lambda pair: _attempt(self.train, *pair) if len(pair[1]) else {},
                zip(models, personal, strict=True),
            )
        columns = [_joined(dict(zip(parts, row, strict=True))) for row in zip(*parts.values(), strict=True)]
        return [
            known
            if isinstance(known, Exception) or all(map(is_finite, model))
            else dict.fromkeys(known, math.nan)
            for known, model in zip(columns, models, strict=True)
        ]

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> MetricValues:
        """Loss and metrics over training samples with indices [n]."""
        return self._evaluate(model, self._placed(_chosen(self.task.train, torch.from_numpy(samples))))

    def _placed(self, pair: Pair) -> Pair:
        inputs, targets = pair
        return for_each(lambda x: channels_last(x.to(self.device)), inputs), targets.to(self.device)

    def _make_flat(self) -> FlatModule:
        with _GENERATORS:  # a new module draws from the generator, whose state is restored afterwards
            return FlatModule(bare_module(self.task.model, self.device).eval())

    def _evaluate(self, model: Model, pair: Pair) -> MetricValues:
        flat = self.workers.own(self._make_flat)
        flat.load(model)
        with self._drawing() if self._draws else nullcontext():
            [values] = self._results(partial(self._means, flat.module), pair)
        return values

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let one evaluating thread at a time draw from torch's generators. Every model gets the same numbers."""
        with _GENERATORS, drawing_from(self._seed, self.device):
            yield

    def _draws_numbers(self) -> bool:
        """Whether the model draws from torch's generators in evaluation, as one with latent variables may."""
        module, (inputs, _) = self._make_flat().module, _chosen(self.sets["test"], slice(2))
        with self._drawing(), torch.no_grad(), suppress(Exception):  # evaluation will raise it again
            before = generator_states(self.device)
            scores(module, for_each(torch.clone, inputs))
            return not all(map(torch.equal, before, generator_states(self.device)))
        return False

    def _together(self, models: Sequence[Model], on: str) -> list[MetricValues]:
        assert self._rows is not None
        flat = self.workers.own(self._make_flat)
        parameters, buffers = self._rows.stack_models(models)
        named = named_parameters(parameters, flat.layout.parameters)
        named |= named_buffers(buffers, flat.layout, flat.module)

        def means(tensors: dict[str, Tensor], x: Any, y: Tensor) -> Float[Tensor, " measures"]:
            with ManyModels():
                return self._means(partial(call_with, flat.module, tensors), x, y)

        of_each = vmap(means, in_dims=(0, None, None))
        return self._results(partial(of_each, named), self.sets[on], len(models))

    def _results(
        self, means: Callable[[Any, Tensor], Tensor], pair: Pair, models: int = 1
    ) -> list[MetricValues]:
        """The results of some models on some samples. ``means`` returns the means of all measures over a
        batch, [..., measures]."""
        totals = torch.zeros(models, len(self._measures), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for start in range(0, len(pair[1]), BATCH):
                # Copies, since a user's model or metric may write into them.
                x, y = (for_each(torch.clone, part) for part in _chosen(pair, slice(start, start + BATCH)))
                totals += means(x, y).double() * len(y)
        results = [dict(zip(self._measures, row, strict=True)) for row in totals.tolist()]
        for name, measure in self._measures.items():
            for values in results:
                values[name] /= max(len(pair[1]), 1)
                if isinstance(measure, FunctionOfMean):
                    mean = torch.tensor(values[name], dtype=torch.float64)
                    values[name] = float(type(measure).function(mean))
        return results

    def _means(self, module: Callable[..., Any], x: Any, y: Tensor) -> Float[Tensor, " measures"]:
        """The mean of each measure."""
        with _naming("task.model", x):
            outputs = scores(module, x)
        return torch.stack([_measured(*measure, outputs, y) for measure in self._measures.items()])

    def _size(self, rows: Rows) -> int:
        """The number of models in a chunk."""
        module = self._make_flat().module
        if not is_dense(module):
            return 1
        widths = [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)]
        return chunk_size(4 * (rows.length + BATCH * max(widths, default=1)), rows.device.type)


def _joined(parts: dict[str, MetricValues | Exception]) -> MetricValues | Exception:
    """The columns ``<part>_<name>``, or the first error."""
    columns: MetricValues = {}
    for part, values in parts.items():
        if isinstance(values, Exception):
            return values
        columns |= {f"{part}_{name}": value for name, value in values.items()}
    return columns


def _attempt(run: Callable[..., MetricValues], *args: Any) -> MetricValues | Exception:
    try:
        return run(*args)
    except Exception as error:  # noqa: BLE001 - any error of the user's code; the caller knows the model's node
        return error


def try_out(task: Task, module: nn.Module, seed: int) -> None:
    """Let a fresh module of a task compute the outputs of two augmented training samples, and all measures of
    two samples of each evaluation set. BadInput with the part of the task that raised an error."""
    module.eval()
    part, measures = "task", {"loss": task.loss, **task.metrics}
    try:
        with torch.no_grad():
            for inputs, targets in (task.train, *task.tests.values()):
                values = targets.to(torch.uint8) if targets.dtype is torch.bool else targets
                highest = int(values.flatten(1).amax(1).argmax() if values.dim() > 1 else values.argmax())
                x, y = _chosen((inputs, targets), torch.tensor([0, highest]))  # a label may be too high
                training = inputs is task.train[0]
                if training and task.augment is not None:
                    part = "task.augment"
                    with _naming(part, x):
                        x = unpacked(packed(task.augment(x, generator(seed, "try-out", SHARED))), inputs)
                part = "task.model"
                with _naming(part, x):
                    outputs = scores(module, x)
                if training:
                    continue  # the loss may refuse a single bad sample; the node that has it fails later
                for name, measure in measures.items():
                    part = _part(name)
                    _measured(name, measure, outputs, y)
    except Exception as error:
        problem = f"{part}: {cause(error)}" if is_own(error) else str(error)
        raise BadInput(f"{problem}; accepted: parts that fit together") from error


def _sample(task: Task, name: str, seed: int, samples: int | None) -> Pair:
    count = len(task.tests[name][1])
    if samples is None or samples >= count:
        return task.tests[name]
    purpose = "evaluation" if name == "test" else f"evaluation-{name}"
    chosen = torch.from_numpy(np.sort(generator(seed, purpose).choice(count, samples, replace=False)))
    return _chosen(task.tests[name], chosen)


def _chosen(pair: Pair, indices: Tensor | slice) -> Pair:
    return for_each(lambda tensor: tensor[indices], pair[0]), pair[1][indices]


def _measured(name: str, measure: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean returned by a measure. A user's metric may also return a plain number."""
    if isinstance(measure, FunctionOfMean):
        measure = measure.mean
    field = _part(name)
    with _naming(field, outputs=outputs, targets=targets):
        value: object = measure(outputs, targets)
    if isinstance(value, int | float | np.generic | np.ndarray):
        value = torch.as_tensor(value, device=outputs.device)
    return one_value(field, value, "one value")


def _part(measure: str) -> str:
    return "task.loss" if measure == "loss" else f"task.metrics.{measure}"


@contextmanager
def _naming(field: str, inputs: Any = None, **tensors: Any) -> Iterator[None]:
    """Add the part of the task and its tensor arguments to an error raised by torch."""
    tensors |= inputs if isinstance(inputs, dict) else {"inputs": inputs}
    try:
        yield
    except Exception as error:
        if is_own(error) or isinstance(error, GossamerError):
            raise
        kinds = " and ".join(f"{name} {_kind(value)}" for name, value in tensors.items() if value is not None)
        message = " ".join(str(error).split())
        raise RuntimeError(f"{field}, given {kinds}: {type(error).__name__}: {message}") from error


def _kind(value: object) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
