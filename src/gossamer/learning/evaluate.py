"""Evaluation: loss and metrics of models on a keyed sample of each evaluation set, or on a node's training samples.

Models are evaluated one at a time. Models of linear layers are evaluated many at once, by ``vmap`` over
stacked parameters, in chunks that fit into a core's cache. In both cases, one thread evaluates a model or a
chunk, so that results do not depend on the number of threads. Metrics that ``vmap`` can't run, and those that are no means
over samples, take the outputs of one model after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import vmap

from gossamer.errors import cause
from gossamer.learning.evaluation_metrics import (
    EvaluationMetrics,
    MetricValues,
    SetValues,
    fresh_streams,
)
from gossamer.learning.guard import naming
from gossamer.learning.many import ManyModels, call_with, is_dense, named_buffers
from gossamer.learning.parameters import (
    FlatModule,
    bare_module,
    channels_last,
    drawing_from,
    generator_states,
    is_finite,
    named_parameters,
    scores,
)
from gossamer.learning.rows import Rows
from gossamer.learning.thread_pool import ThreadPool, chunk_size, chunks
from gossamer.messages.tags import Model
from gossamer.randomness import generator, torch_seed
from gossamer.tasks.metrics import IGNORED, Streamed
from gossamer.tasks.task import FunctionOfMean, Pair, Task, for_each

BATCH = 100  # samples in a forward pass, few enough for activations to stay in the cache
MIN_CHUNK = 4
"""Minimum number of models in a chunk. If fewer fit, models are evaluated one at a time."""
KEPT = 64 << 20
"""The most bytes of outputs that are kept for a chunk of models, if metrics take those of a whole set."""

CURE = "gossamer.tasks.OverSet(function) or a metric of torchmetrics for one of a whole set"
"""What takes the place of a metric that is no mean over samples."""

_GENERATORS = Lock()  # torch has one generator a device for all threads


class Evaluator:
    """Evaluates models. The samples of the evaluation sets are drawn and laid out once.

    It uses ``samples`` samples of each set; None is all. Several threads may call it concurrently. With
    ``rows``, the store of parameters, many models of linear layers are evaluated at once; if that fails,
    ``say`` is called with a message. ``metrics`` are those of the task, tried or not.

    Attributes:
        sets: evaluation set -> (inputs, targets) of its sample."""

    def __init__(
        self,
        task: Task,
        seed: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        threads: ThreadPool | None = None,
        say: Callable[[str], None] = print,
        rows: Rows | None = None,
        metrics: EvaluationMetrics | None = None,
    ) -> None:
        self.task, self.device = task, device
        self.threads, self._say = threads or ThreadPool(1), say
        self._metrics = metrics or EvaluationMetrics.of(task)
        self._of_set = bool(self._metrics.over_set or self._metrics.streamed)
        self.sets = {name: self._placed(drawn_sample(task, name, seed, samples)) for name in task.tests}
        self._seed = torch_seed(seed, "evaluate")
        self._draws = self._draws_numbers()
        self._rows, self._chunk = rows, 1 if rows is None or self._draws else self._size(rows)
        self._means_together = True  # whether vmap can run all means

    def test(self, model: Model, on: str = "test") -> MetricValues:
        """``loss`` and every metric of the task on an evaluation set."""
        return self._evaluate(model, self.sets[on])

    def test_each(self, models: Sequence[Model], on: str = "test") -> list[MetricValues | Exception]:
        """The result of :meth:`test` for each model, or the exception that the user's code raised. The
        threads share the models."""
        problem = None
        for means_together in (
            dict.fromkeys((self._means_together, False)) if self._chunk >= MIN_CHUNK else ()
        ):
            try:
                run = partial(self._together, on=on, means_together=means_together)
                parts = self.threads.map(run, chunks(models, self._chunk))
            except Exception as error:  # noqa: BLE001 - any error of the user's code, or something that vmap can't run
                problem = problem or error
                continue
            if problem is not None:
                self._means_together = False
                self._say(f"evaluation: metrics of one model at a time ({cause(problem)})")
            return [values for part in parts for values in part]
        results = self.threads.map(lambda model: _attempt(self.test, model, on), models)
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
            parts["personal"] = self.threads.map(
                lambda pair: _attempt(self.train, *pair) if len(pair[1]) else {},
                zip(models, personal, strict=True),
            )
        columns = [_joined(dict(zip(parts, row, strict=True))) for row in zip(*parts.values(), strict=True)]
        return [
            known
            if isinstance(known, Exception) or all(map(is_finite, model))
            else {name: math.nan if isinstance(value, float) else None for name, value in known.items()}
            for known, model in zip(columns, models, strict=True)
        ]

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> MetricValues:
        """Loss and metrics over training samples with indices [n]."""
        return self._evaluate(model, self._placed(chosen_from(self.task.train, torch.from_numpy(samples))))

    def _placed(self, pair: Pair) -> Pair:
        inputs, targets = pair
        return for_each(lambda x: channels_last(x.to(self.device)), inputs), targets.to(self.device)

    def _make_flat(self) -> FlatModule:
        with _GENERATORS:  # a new module draws from the generator, whose state is restored afterwards
            return FlatModule(bare_module(self.task.model, self.device).eval())

    def _evaluate(self, model: Model, pair: Pair) -> MetricValues:
        flat = self.threads.own(self._make_flat)
        flat.load(model)
        with self._drawing() if self._draws else nullcontext():
            [values] = self._results(partial(self._of_one, flat.module), pair)
        return values

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let one evaluating thread at a time draw from torch's generators. Every model gets the same numbers."""
        with _GENERATORS, drawing_from(self._seed, self.device):
            yield

    def _draws_numbers(self) -> bool:
        """Whether the model draws from torch's generators in evaluation, as one with latent variables may."""
        module, (inputs, _) = self._make_flat().module, chosen_from(self.sets["test"], slice(2))
        with self._drawing(), torch.no_grad(), suppress(Exception):  # evaluation will raise it again
            before = generator_states(self.device)
            scores(module, for_each(torch.clone, inputs))
            return not all(map(torch.equal, before, generator_states(self.device)))
        return False

    def _together(self, models: Sequence[Model], on: str, means_together: bool) -> list[MetricValues]:
        assert self._rows is not None
        flat = self.threads.own(self._make_flat)
        parameters, buffers = self._rows.stack_models(models)
        named = named_parameters(parameters, flat.layout.parameters)
        named |= named_buffers(buffers, flat.layout, flat.module)

        def outputs(tensors: dict[str, Tensor], x: Any) -> Any:
            with ManyModels(), naming("task.model", x):
                return scores(partial(call_with, flat.module, tensors), x)

        def measured(tensors: dict[str, Tensor], x: Any, y: Tensor) -> tuple[Tensor, ...]:
            with ManyModels():
                return self._measured(partial(call_with, flat.module, tensors), x, y)

        def one_by_one(x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
            every = vmap(outputs, in_dims=(0, None))(named, x)
            kept = every.clone()
            return torch.stack([self._metrics.means_of(of_one, y.clone()) for of_one in every]), kept

        together = partial(vmap(measured, in_dims=(0, None, None)), named)
        return self._results(together if means_together else one_by_one, self.sets[on], len(models))

    def _of_one(self, module: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        means, *outputs = self._measured(module, x, y)
        return means.unsqueeze(0), outputs

    def _measured(self, module: Callable[..., Any], x: Any, y: Tensor) -> tuple[Tensor, ...]:
        """The means of a batch and, if metrics are of a whole set, its outputs."""
        with naming("task.model", x):
            outputs = scores(module, x)
        kept = outputs.clone() if self._of_set and isinstance(outputs, Tensor) else outputs
        means = self._metrics.means_of(outputs, y)
        return (means, kept) if self._of_set else (means,)

    def _results(
        self, measured: Callable[[Any, Tensor], Sequence[Any]], pair: Pair, models: int = 1
    ) -> list[MetricValues]:
        """The results of some models on some samples. ``measured`` returns the means over a batch, [models, means], and, if
        metrics are of a whole set, the outputs of each model."""
        means, samples = self._metrics.means, len(pair[1])
        totals = torch.zeros(models, len(means), dtype=torch.float64, device=self.device)
        of_sets = [SetValues(self._metrics, streams, samples) for streams in self._streams(models)]
        with torch.no_grad():
            for start in range(0, samples, BATCH):
                batch = chosen_from(pair, slice(start, start + BATCH))
                # Copies, since a user's model or metric may write into them.
                x, y = (for_each(torch.clone, tensors) for tensors in batch)
                of_batch, *outputs = measured(x, y)
                totals += of_batch.double() * len(y)
                if of_sets:
                    for of_set, of_model in zip(of_sets, *outputs, strict=True):
                        of_set.add(of_model, batch[1])
            values_of_sets = [of_set.values(pair[1]) for of_set in of_sets]
        results: list[MetricValues] = [dict(zip(means, row, strict=True)) for row in totals.tolist()]
        for name, metric in means.items():
            for values in results:
                values[name] /= max(samples, 1)
                if isinstance(metric, FunctionOfMean):
                    mean = torch.tensor(values[name], dtype=torch.float64)
                    values[name] = float(type(metric).function(mean))
        return [a | b for a, b in zip(results, values_of_sets, strict=True)] if of_sets else results

    def _streams(self, models: int) -> list[dict[str, Streamed]]:
        """This thread's copies of the streamed metrics, for each of some models; none if no metric is of a whole set."""
        if not self._of_set:
            return []
        streams: list[dict[str, Streamed]] = self.threads.own(self._no_streams)
        streams += [fresh_streams(self._metrics, self.device) for _ in range(models - len(streams))]
        return streams[:models]

    def _no_streams(self) -> list[dict[str, Streamed]]:
        return []

    def _size(self, rows: Rows) -> int:
        """The number of models in a chunk."""
        module = self._make_flat().module
        if not is_dense(module):
            return 1
        widths = [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)]
        width = max(widths, default=1)
        size = chunk_size(4 * (rows.length + BATCH * width), rows.device.type)
        if self._metrics.over_set:
            sample_bytes = self._metrics.sample_bytes or 4 * width
            samples = max(len(targets) for _, targets in self.sets.values())
            size = min(size, max(KEPT // (samples * sample_bytes), 1))
        return size


def _joined(parts: dict[str, MetricValues | Exception]) -> MetricValues | Exception:
    """The columns ``<part>_<name>``, or the first error."""
    columns: MetricValues = {}
    for on, values in parts.items():
        if isinstance(values, Exception):
            return values
        columns |= {f"{on}_{name}": value for name, value in values.items()}
    return columns


def _attempt(run: Callable[..., MetricValues], *args: Any) -> MetricValues | Exception:
    try:
        return run(*args)
    except Exception as error:  # noqa: BLE001 - any error of the user's code; the caller knows the model's node
        return error


def drawn_sample(task: Task, name: str, seed: int, samples: int | None) -> Pair:
    """The samples of an evaluation set on which models are evaluated."""
    count = len(task.tests[name][1])
    if samples is None or samples >= count:
        return task.tests[name]
    purpose = "evaluation" if name == "test" else f"evaluation-{name}"
    chosen = torch.from_numpy(np.sort(generator(seed, purpose).choice(count, samples, replace=False)))
    return chosen_from(task.tests[name], chosen)


def chosen_from(pair: Pair, indices: Tensor | slice) -> Pair:
    """Some of the samples."""
    return for_each(lambda tensor: tensor[indices], pair[0]), pair[1][indices]


def telling(pair: Pair, count: int) -> list[int]:
    """At most ``count`` samples that are likely to be refused: those with the highest and the lowest target, and
    those with the highest and the lowest number in inputs of whole numbers, such as tokens."""
    inputs, targets = pair
    tensors = inputs.values() if isinstance(inputs, dict) else (inputs,)
    whole = [x for x in tensors if x.numel() and not (x.is_floating_point() or x.is_complex())]
    return [*chain.from_iterable(map(extremes, (targets, *whole)))][:count]


def extremes(targets: Tensor) -> tuple[int, int]:
    """The samples with the highest and the lowest target, which are the most likely ones to be refused. Targets that torch's
    losses ignore do not count."""
    if targets.is_complex():
        return 0, 0
    values = targets.to(torch.uint8) if targets.dtype is torch.bool else targets
    values = values.reshape(len(values), -1)
    highest = int(values.amax(1).argmax())
    if not values.is_floating_point():
        values = torch.where(values == IGNORED, values.max(), values)
    return highest, int(values.amin(1).argmin())
