"""Whether a run fits the memory that is available."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gossamer.config import Experiment, Simulate
from gossamer.config.registry import Component
from gossamer.cores import cores
from gossamer.errors import BadInput, shown
from gossamer.learning.optimizer import checked_state
from gossamer.learning.parameters import Layout, generators_restored
from gossamer.learning.proof import vectors_needed
from gossamer.process_memory import available_bytes
from gossamer.results.reading import METRICS, TRAFFIC
from gossamer.tasks import Task

_MIN_ADDRESS_SPACE = 2 * 2**30  # with less, torch and polars abort or spin when they can't start a thread


def check_address_space() -> None:
    """Refuse to start with too little address space (``ulimit -v``) for the libraries that a run needs."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _MIN_ADDRESS_SPACE:
        raise BadInput(
            f"ulimit -v: {limit / 2**30:.3g} GiB of address space; accepted: at least"
            f" {_MIN_ADDRESS_SPACE >> 30} GiB"
        )


def check_model_size(experiment: Experiment, task: Task) -> None:
    """Refuse a model of the package that does not fit the free memory, before it is made: on torch's device "meta", tensors
    have shapes and no values. (A model of one's own may do anything while it is made, so it is made once only.)"""
    sized, available = _size_of_model(experiment), available_bytes()
    if not sized or available is None or not _is_builtin(experiment.task.model):
        return
    try:
        with generators_restored(), torch.device("meta"):
            layout = Layout.of(task.model())
    except Exception as error:  # noqa: BLE001 - what is wrong with it, the model itself says
        if "overflow" not in str(error).lower():
            return
        raise BadInput(f"{sized}: no tensor has so many values; accepted: a smaller one") from None
    if (needed := 4 * (layout.size + layout.buffer_size)) > available:
        raise BadInput(
            f"{sized}: the {layout.size:,} parameters of one model take {needed / 2**30:.3g} GiB of memory; accepted: at"
            f" most the {available / 2**30:.3g} GiB available"
        )


def _is_builtin(model: Component) -> bool:
    return type(model).module_of().startswith(f"{__package__.partition('.')[0]}.")


def _size_of_model(experiment: Experiment) -> str:
    """The field of the model with the largest number, and its value; empty if it has none."""
    model = getattr(experiment.task, "model", None)
    fields = model.spec() if isinstance(model, Component) else {}
    sizes = {
        name: max(_numbers(value)) for name, value in fields.items() if name != "name" and [*_numbers(value)]
    }
    name = max(sizes, key=sizes.__getitem__, default=None)
    return "" if name is None else f"task.model.{name}: got {shown(fields[name])}"


def _numbers(value: object) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


def check_memory(experiment: Experiment, layout: Layout) -> None:
    """Refuse an optimizer without a valid state, and a simulation whose models and optimizer states alone exceed the free
    memory: a node's own model and, for the record, the model with which its last round ended; or, with few nodes, those of
    the steps that prove the trainer. This is a lower bound: data, messages and computations need more."""
    engine, optimizer = experiment.engine, experiment.optimizer
    state = checked_state(optimizer, torch.zeros(layout.size))
    available = available_bytes()
    if available is None or not isinstance(engine, Simulate) or engine.device != "cpu":
        return
    of_state = sum(value.shape == (layout.size,) for value in state.values())
    models = 1 if experiment.evaluation.of == "instant" else 2
    vectors = models + (0 if optimizer.reset_every_round else of_state)
    needed = 4 * experiment.nodes * (vectors * layout.size + models * layout.buffer_size)
    proof = 4 * layout.size * vectors_needed(engine.trainer, of_state)
    if max(needed, proof) > available:
        sized = _size_of_model(experiment).replace("got ", "")
        nodes = (
            f"nodes: {experiment.nodes} with {layout.size} parameters each{f' ({sized})' if sized else ''}"
        )
        what = (
            nodes
            if needed >= proof
            else f"{sized or 'task.model'}: the first steps of {layout.size} parameters"
        )
        raise BadInput(
            f"{what} take at least {max(needed, proof) / 2**30:.3g} GiB of memory; accepted: at most the"
            f" {available / 2**30:.3g} GiB available"
        )


def check_record(experiment: Experiment, evaluated: int, columns: int) -> None:
    """Refuse a run whose table of metrics would exceed the free memory, in which it is put together at the end and read
    later. Columns that the algorithm records come on top. ``evaluated`` nodes have a row with ``columns`` of its own."""
    evaluation, stop = experiment.evaluation, experiment.stop
    available = available_bytes()
    for every, end, field in (
        (evaluation.every_rounds, stop.rounds, "every_rounds"),
        (evaluation.every_s, stop.time_s, "every_s"),
    ):
        if every is None or end is None or available is None:
            continue
        rows = (int(end / every) + 1) * (evaluated + 1)
        needed = 8 * rows * (len(METRICS) + len(TRAFFIC) + columns)
        if needed > available:
            raise BadInput(
                f"evaluation.{field}: got {every:g}, which makes a table of {rows:,} rows that takes {needed / 2**30:.3g} GiB"
                f" of memory; accepted: what fits the {available / 2**30:.3g} GiB available, as with fewer rows or"
                " evaluation.nodes"
            )


def check_outputs(experiment: Experiment, on: str, samples: int, sample_bytes: int, models: int) -> None:
    """Refuse metrics that take all outputs of an evaluation set at once, if these exceed the available memory. ``models``
    are evaluated, as many at once as there are workers, or nodes that compute at once; for each of these, all outputs are
    kept, and a metric gets a copy."""
    engine = experiment.engine
    if isinstance(engine, Simulate):
        device, limit, field = engine.device, engine.workers, "workers"
    else:
        device, limit, field = "cpu", engine.train_at_once, "train_at_once"
    at_once = 1 if device != "cpu" else min(limit or cores(), max(models, 1))
    available = available_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    needed = 2 * samples * sample_bytes * at_once
    if available is not None and needed > available:
        raise BadInput(
            f"task.metrics: the outputs for the {samples:,} samples of {on!r}, which metrics over a set and a loss that is no"
            f" mean take at once, need {needed / 2**30:.3g} GiB of memory for {at_once} model{'s' * (at_once > 1)} at a"
            f" time, and {available / 2**30:.3g} GiB are available; accepted: metrics of torchmetrics that take one batch"
            " after the other, a loss that is a mean over samples, or fewer evaluation.samples, evaluation.nodes or"
            f" engine.{field}"
        )
