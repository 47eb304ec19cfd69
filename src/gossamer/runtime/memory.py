"""Whether a run fits the memory that is available."""

from __future__ import annotations

import torch

from gossamer.config import Experiment, Simulate
from gossamer.cores import cores
from gossamer.errors import BadInput
from gossamer.learning.optimizer import checked_state
from gossamer.learning.parameters import Layout
from gossamer.learning.proof import vectors_needed
from gossamer.process_memory import available_bytes

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
        nodes = f"nodes: {experiment.nodes} with {layout.size} parameters each"
        what = nodes if needed >= proof else f"task.model: the first steps of {layout.size} parameters"
        raise BadInput(
            f"{what} take at least {max(needed, proof) / 2**30:.3g} GiB of memory; accepted: at most the"
            f" {available / 2**30:.3g} GiB available"
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
