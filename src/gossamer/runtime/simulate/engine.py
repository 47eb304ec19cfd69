"""The engine ``simulate``: every node on one machine, in virtual time."""

from __future__ import annotations

from contextlib import closing, nullcontext

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


class SimulateEngine:
    """The engine of an experiment; making it finds bad input, :meth:`run` does the work."""

    def __init__(self, experiment: Experiment) -> None:
        device = experiment.engine.device if isinstance(experiment.engine, Simulate) else "cpu"
        if device != "cpu" and not torch.cuda.is_available():
            raise BadInput(f"engine.device: {device!r}, but torch finds no GPU; accepted: cpu")
        self._setup = prepare(experiment)
        self.description = self._setup.description()

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end. Failures of nodes are in the outcome, with what was recorded until then kept."""
        timeline = timeline_log(self._setup.experiment, folder)
        with (
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
