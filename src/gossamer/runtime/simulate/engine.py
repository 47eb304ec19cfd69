"""The engine ``simulate``: every node on one machine, in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import torch

from gossamer.config import Experiment, Simulate
from gossamer.errors import BadInput
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.recording import Observer
from gossamer.runtime.setup import prepare
from gossamer.runtime.simulate.simulation import Simulation
from gossamer.runtime.timeline import timeline_log

OBJECTS_PER_NODE = 200
"""More than the new objects that a node holds at any time: messages, tasks, futures and what they refer to."""


class SimulateEngine:
    """The engine of an experiment. Its construction finds bad input, :meth:`run` does the work."""

    def __init__(self, experiment: Experiment) -> None:
        options = experiment.engine
        assert isinstance(options, Simulate)
        if options.device != "cpu" and not torch.cuda.is_available():
            raise BadInput(f"engine.device: {options.device!r}, but torch finds no GPU; accepted: cpu")
        self._threads = options.threads
        self._setup = prepare(experiment)
        self.description = self._setup.description()

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end. The failure of a node is part of the outcome; what was recorded before it is kept."""
        experiment = self._setup.experiment
        timeline = timeline_log(experiment, folder)
        with (
            _torch_settings(self._threads),
            _rare_collections(experiment.nodes),
            folder.segment("metrics") as metrics,
            folder.segment("graphs") as graphs,
            folder.segment("events") as events,
            nullcontext() if timeline is None else closing(timeline),
        ):
            return Simulation(self._setup, metrics, graphs, observer, timeline, folder, cut, events).run()

    def __enter__(self) -> SimulateEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end."""


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """Set torch's threads for a run, and restore them and torch's random generator afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _rare_collections(nodes: int) -> Iterator[None]:
    """Let Python's cyclic garbage collector look at new objects only, and rarely. Nodes exist as long as the run, and walking
    over them again and again can take longer than all events."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000 + OBJECTS_PER_NODE * nodes, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
