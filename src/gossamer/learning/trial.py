"""A trial of a task's evaluation before a run: whether model, loss and metrics take the batches of each set, whether metrics
that are taken for means over samples are means, and what the others return.

Each is computed for some samples as a whole, and for unequal parts of them, once in their order and once sorted by target.
It is a mean over samples if the mean of its values for the parts, weighted by their sizes, is its value for the whole. This
is tried with the outputs of a fresh model, with these shuffled within each sample, and for the targets of every set with
normal draws, half of which are right: a fresh model may predict one class only, and a set may lack one, for which e.g. the
recall of another one is 0 on every part."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gossamer.errors import BadInput, GossamerError, cause, is_own
from gossamer.learning.evaluate import BATCH, CURE, chosen_from, drawn_sample, telling
from gossamer.learning.evaluation_metrics import (
    EvaluationMetrics,
    MetricValues,
    columns_of,
    field_of,
    fresh_streams,
    measured,
)
from gossamer.learning.guard import fitting, kind, refusing
from gossamer.learning.parameters import drawing_from, generators_restored, scores, seed_generators
from gossamer.randomness import SHARED, torch_seed
from gossamer.tasks.metrics import OverSet
from gossamer.tasks.task import Metric, Pair, RootMean, Task

TOLERANCE = 1e-4
"""The largest difference, relative to the largest value, that is taken for rounding."""

MODEL_SAMPLES = 24  # samples whose outputs a fresh model computes
_STREAMED_SAMPLES = 1000
_MAX_SAMPLES, _MAX_NUMBERS = 10_000, 2_000_000  # of drawn outputs
_SURELY = 10.0  # far beyond normal draws


def tried_metrics(
    task: Task,
    seed: int,
    samples: int | None,
    fits: Callable[[str, int], None] = lambda on, size: None,
    personal: Sequence[Int[np.ndarray, " _"]] = (),
) -> tuple[EvaluationMetrics, list[str]]:
    """The metrics of a task, after a trial, and sentences about them for the user. ``samples`` of each evaluation set are
    evaluated (None: all), and ``personal`` ones of each node (indices in the training data). If outputs of a whole set are
    kept, ``fits`` is called first, with each set and the bytes of a sample's outputs. BadInput for a metric that is no mean,
    though taken for one, and for a part of the task that fails."""
    sets = {name: drawn_sample(task, name, seed, samples) for name in task.tests}
    key, notes = torch_seed(seed, "try-measures", SHARED), list[str]()
    own = [indices for indices in personal if len(indices)]
    with generators_restored(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # parts without some class have no recall, of which libraries warn
        with drawing_from(torch_seed(seed, "initial", SHARED)), refusing("task.model"):
            module = task.model().eval()
        metrics = EvaluationMetrics.of(task)
        for name, pair in sets.items():
            every = torch.arange(len(pair[1]))
            _evaluate_few(module, metrics, pair, every, [len(every)], f"the evaluation set {name!r}", key)
        drawn_for = [targets for _, targets in sets.values()]
        if own:
            every = torch.from_numpy(np.concatenate(own))
            _evaluate_few(
                module, metrics, task.train, every, [*map(len, own)], "the nodes' own test samples", key
            )
            drawn_for.append(task.train[1][every])
        x, y = _few(sets["test"], MODEL_SAMPLES)
        outputs = scores(module, x)
        whole = isinstance(outputs, Tensor)
        if (shape := _not_by_sample(outputs, len(y))) is not None or (
            not whole and (metrics.streamed or metrics.over_set)
        ):
            problem = f"task.model: returns {shape or kind(outputs)} for {len(y)} samples"
            if metrics.streamed or metrics.over_set:
                raise BadInput(
                    f"{problem}; accepted with metrics over a set: a tensor whose first axis is the sample"
                )
            return metrics, [
                f"{problem}, so that loss and metrics, taken for means over samples, can't be tried"
            ]
        problems = no_means(metrics, outputs, y, drawn_for, key)
        if problem := problems.pop("loss", ""):
            text = f"task.loss is no mean over samples ({problem})"
            if whole:
                metrics = EvaluationMetrics.of(task, loss_is_mean=False)
                text += ", as with class weights or ignored targets: recorded losses of an evaluation set are of all its"
                notes.append(f"{text} samples at once")
            else:
                notes.append(
                    f"{text}, and task.model returns {kind(outputs)}: recorded losses of an evaluation set are the means of"
                    f" its batches of {BATCH} samples"
                )
        if problems:
            cure = CURE if whole else "a model that returns one tensor, for a metric over a set"
            raise BadInput(
                *(
                    f"{field_of(name)} is no mean over samples: {text}; accepted: a mean over samples, or {cure}"
                    for name, text in problems.items()
                )
            )
        if whole:
            metrics = replace(metrics, sample_bytes=outputs[0].numel() * outputs.element_size())
        if metrics.over_set:
            for name in sets:
                fits(name, metrics.sample_bytes or 0)
        tried = {
            name: _tried(metrics, outputs, targets, f"{name!r}", key) for name, (_, targets) in sets.items()
        }
        alone = replace(metrics, streamed={})  # these seldom refuse a set, and take longer
        for rank, indices in enumerate(personal if metrics.over_set else ()):
            if len(indices):
                on = f"'personal' of node {rank}"
                _tried(alone, outputs, task.train[1][torch.from_numpy(indices)], on, key)
    columns = {
        name: {column: isinstance(value, list) for column, value in values.items()}
        for name, values in tried["test"].items()
    }
    metrics = replace(metrics, columns=columns)
    _check_columns(metrics, list(sets))
    notes += [
        f"{field_of(name)}: {note}"
        for name, metric in metrics.over_set.items()
        if isinstance(metric, OverSet) and (note := metric.note()) is not None
    ]
    return metrics, notes


def _evaluate_few(
    module: nn.Module,
    metrics: EvaluationMetrics,
    pair: Pair,
    samples: Int[Tensor, " samples"],
    sizes: Sequence[int],
    where: str,
    seed: int,
) -> None:
    """Compute outputs and means for the smallest batch in which sets of these sizes are evaluated, and for one of usual size:
    some of the ``samples``, with the highest and the lowest target, since more of them show no more. ``seed`` sets the global
    generators before each metric."""
    targets = pair[1][samples]
    few = min(MODEL_SAMPLES, len(samples))
    while few in targets.shape[1:] and few > 1:  # by chance, what is meant for another axis would fit
        few -= 1
    smallest = min(size % BATCH or BATCH for size in sizes)
    for count in sorted({min(smallest, few), few}):
        chosen = torch.linspace(0, len(samples) - 1, count).round().long()
        first = telling(chosen_from(pair, samples), count)
        chosen[: len(first)] = torch.tensor(first)
        x, y = chosen_from(pair, samples[chosen])
        with refusing("task.model", inputs=x):
            outputs = scores(module, x)
        for name, metric in metrics.means.items():
            field, accepted = field_of(name), partial(_fitting, name, outputs, y, where)
            _seed_all(seed)
            with refusing(field, accepted, outputs=outputs, targets=y):
                value = measured(name, metric, outputs, y)
            if isinstance(metric, RootMean) and value < 0:
                raise BadInput(
                    f"{field}: a mean of {float(value):.4g}, which has no root; accepted: a metric that is not negative"
                )


def _fitting(name: str, outputs: Any, targets: Tensor, where: str) -> str:
    return fitting(outputs, targets, where) + ("" if name == "loss" else f", or {CURE}")


def _not_by_sample(outputs: Any, samples: int) -> str | None:
    """The shape or kind of a model's output that is not by sample. None for a tensor whose first axis is the sample, and for
    a tuple, list or dict of such tensors and None."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            if leaf.shape[:1] != (samples,):
                return f"{tuple(leaf.shape)}"
        elif leaf is not None:
            return kind(leaf)
    return None


def _each(function: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Apply a function to each tensor of the outputs."""
    return tree_map(lambda leaf: leaf if leaf is None else function(leaf), outputs)


def no_means(
    metrics: EvaluationMetrics, outputs: Any, targets: Tensor, drawn_for: Sequence[Tensor], seed: int
) -> dict[str, str]:
    """The metrics that are taken for means over samples and are none, and how they differ. ``outputs`` are those of a model
    for the samples with ``targets``: a tensor, or several in a tuple, list or dict. ``drawn_for`` are the targets of each
    set, for which outputs are drawn."""
    cases = list(_cases(outputs, targets, drawn_for, seed))
    return {
        name: problem
        for name, metric in metrics.means.items()
        if (problem := next(filter(None, (_no_mean(name, metric, *case, seed) for case in cases)), None))
    }


def _few(pair: Pair, count: int) -> Pair:
    """Some samples, evenly spaced."""
    most = len(pair[1])
    return chosen_from(pair, torch.linspace(0, most - 1, min(count, most)).round().long())


def _cases(
    outputs: Any, targets: Tensor, drawn_for: Sequence[Tensor], seed: int
) -> Iterator[tuple[Any, Tensor, bool]]:
    """Outputs and targets for the trial, and whether each metric must take these outputs."""
    rng = torch.Generator().manual_seed(seed)
    yield outputs, targets, True
    yield _each(partial(_shuffled, rng=rng), outputs), targets, False
    leaves = [leaf for leaf in tree_leaves(outputs) if leaf is not None]
    if all(leaf.is_floating_point() for leaf in leaves):
        numbers = sum(leaf[0].numel() for leaf in leaves)
        most = max(min(_MAX_SAMPLES, _MAX_NUMBERS // max(numbers, 1)), len(targets))
        for every in drawn_for:
            some = _with_each_class(every, most)
            yield _each(partial(_drawn, targets=some, rng=rng), outputs), some, False


def _shuffled(outputs: Tensor, rng: torch.Generator) -> Tensor:
    """Outputs with the scores of each sample in another order or, if there is only one, those of other samples."""
    if outputs.dim() > 1 and outputs.shape[-1] > 1:
        return outputs.gather(-1, torch.rand(outputs.shape, generator=rng).argsort(-1))
    return outputs[torch.randperm(len(outputs), generator=rng)]


def _with_each_class(targets: Tensor, most: int) -> Tensor:
    """Some targets, evenly spaced, and the first sample of each class, which may be the only one."""
    chosen = torch.linspace(0, len(targets) - 1, min(most, len(targets))).round().long()
    if len(chosen) < len(targets) and targets.dim() == 1 and not targets.is_floating_point():
        firsts, _ = _firsts_and_lasts(targets)
        chosen = torch.from_numpy(np.union1d(chosen.numpy(), firsts[:most].numpy()))
    return targets[chosen]


def _drawn(outputs: Tensor, targets: Tensor, rng: torch.Generator) -> Tensor:
    """Normal draws in the form of these outputs, half of which are right. By chance alone, all or none of a class with few
    samples may be right, and then e.g. its recall is the same on every part that has some; so its last is wrong, and its
    first is right."""
    drawn = torch.randn((len(targets), *outputs.shape[1:]), generator=rng)
    if (towards := _towards(drawn, targets)) is not None:
        right = 5.0 * (torch.rand(targets.shape, generator=rng) < 0.5)
        firsts, lasts = _firsts_and_lasts(targets)
        right.view(-1)[lasts], right.view(-1)[firsts] = -_SURELY, _SURELY
        drawn += towards * (
            right.reshape(drawn.shape) if right.numel() == drawn.numel() else right.unsqueeze(-1)
        )
    return drawn.to(outputs.dtype)


def _towards(drawn: Tensor, targets: Tensor) -> Tensor | None:
    """What makes outputs right if added to them; None if targets are no classes. A class has a score of its own, along the
    last axis, or one of two classes has a high score, and the other one a low score."""
    if drawn.shape[:-1] == targets.shape and drawn.shape[-1] > 1 and not targets.is_floating_point():
        classes = targets.long().clamp(0, drawn.shape[-1] - 1).unsqueeze(-1)
        return torch.zeros_like(drawn).scatter_(-1, classes, 1.0)
    if drawn.numel() == targets.numel() and len(_firsts_and_lasts(targets)[0]) == 2:
        return torch.where(targets == targets.max(), 1.0, -1.0).reshape(drawn.shape)
    return None


def _firsts_and_lasts(targets: Tensor) -> tuple[Int[Tensor, " classes"], Int[Tensor, " classes"]]:
    """Where the first and the last target of each class are, among all targets."""
    order = targets.reshape(-1).argsort(stable=True)
    ordered, edge = targets.reshape(-1)[order], torch.ones(1, dtype=torch.bool)
    changes = ordered[1:] != ordered[:-1]
    return order[torch.cat((edge, changes))], order[torch.cat((changes, edge))]


def _no_mean(
    name: str, metric: Metric, outputs: Any, targets: Tensor, accepted: bool, seed: int
) -> str | None:
    """How a metric differs from a mean over these samples; None if it does not, or if it does not take these outputs, which
    no model need have computed."""

    def value(chosen: Int[Tensor, " n"] | slice = slice(None)) -> Tensor:
        _seed_all(seed)
        given = _each(lambda leaf: leaf[chosen].clone(), outputs)
        return measured(name, metric, given, targets[chosen].clone())

    count = len(targets)
    try:
        whole = value()
    except Exception as error:  # noqa: BLE001 - any error of the user's code
        if not accepted:
            return None
        return f"it fails for {count} samples ({cause(error)})"
    first = max(count // 10, min(2, count // 3), 1)
    bounds = sorted({0, first, min(first + max(count // 4, 1), count), count})
    weights = torch.tensor([stop - start for start, stop in pairwise(bounds)]) / count
    for order in (torch.arange(count), _by_target(targets)):
        try:
            values = torch.stack([value(order[start:stop]).double() for start, stop in pairwise(bounds)])
        except Exception as error:  # noqa: BLE001 - a mean over samples has a value for any of them
            return f"{float(whole):.4g} for {count} samples, but it fails for some of them ({cause(error)})"
        mean, largest = float((weights * values).sum()), max(abs(float(whole)), float(values.abs().max()))
        rounding = 8 * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
        both_infinite = not np.isfinite(mean) and not np.isfinite(float(whole))
        if not both_infinite and not abs(mean - float(whole)) <= max(TOLERANCE, rounding) * largest:
            return f"{float(whole):.4g} for {count} samples, but {mean:.4g} as the mean over parts of them"
    return None


def _by_target(targets: Tensor) -> Int[Tensor, " samples"]:
    return targets.reshape(len(targets), -1).double().mean(1).argsort(stable=True)


def _tried(
    metrics: EvaluationMetrics, outputs: Any, targets: Tensor, on: str, seed: int
) -> dict[str, MetricValues]:
    """The values of the metrics of a whole set for its targets. The outputs are those of a few samples, repeated."""
    values: dict[str, MetricValues] = {}
    streams = fresh_streams(metrics, "cpu")
    for name, function in metrics.over_set.items():
        with _failing(name, on):
            _seed_all(seed)
            repeated = outputs[torch.arange(len(targets)) % len(outputs)]
            values[name] = columns_of(name, function(repeated, targets.clone()))
    _, some = _few((targets, targets), _STREAMED_SAMPLES)
    for name, metric in streams.items():
        with _failing(name, on):
            _seed_all(seed)
            metric.update(outputs[torch.arange(len(some)) % len(outputs)], some.clone())
            values[name] = columns_of(name, metric.compute())
    return values


def _check_columns(metrics: EvaluationMetrics, sets: list[str]) -> None:
    """Refuse columns that several metrics or sets make."""
    made: dict[str, str] = {}
    for name in metrics.names:
        for column in metrics.columns.get(name, {name: False}):
            for on in sets:
                if (other := made.setdefault(f"{on}_{column}", f"{on} {name}")) != f"{on} {name}":
                    raise BadInput(
                        f"{field_of(name)}: the column {on}_{column} is also of {other}; accepted: other names"
                    )


@contextmanager
def _failing(name: str, on: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _failed(name, error, f", on the evaluation set {on}") from error


def _failed(name: str, error: Exception, where: str = "") -> BadInput:
    text = cause(error) if is_own(error) or not isinstance(error, GossamerError) else str(error)
    text = text if text.startswith(field_of(name)) else f"{field_of(name)}: {text}"
    return BadInput(f"{text}{where}; accepted: parts that fit together")


def _seed_all(seed: int) -> None:
    """Set all global generators, since a metric may draw from any."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_generators(seed, "cpu")
