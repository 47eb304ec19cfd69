"""What carries out the computations of a simulation: its trainer, chosen by measurement if none is named, and evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gossamer.config import Simulate
from gossamer.errors import cause
from gossamer.learning.batched import BatchedTrainer
from gossamer.learning.batched_evaluate import BatchedEvaluator
from gossamer.learning.batches import BatchStream
from gossamer.learning.choice import MEASURED_NODES, choose
from gossamer.learning.computation import Kind, execute
from gossamer.learning.evaluate import Evaluator, Found, columns_each
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import CompiledTrainer, SequentialTrainer, Trainer, TrainJob
from gossamer.learning.workers import Workers
from gossamer.messages.tags import Model
from gossamer.runtime.profile import Profile
from gossamer.runtime.setup import Setup

_TRAINERS: dict[str, type[Trainer]] = {
    trainer.name: trainer for trainer in (SequentialTrainer, BatchedTrainer, CompiledTrainer)
}


class Execution:
    """Computes what nodes ask for.

    Args:
        setup: what is run.
        options: the engine's.
        rows: where vectors are kept.
        workers: share the work.
        profile: told how long it takes.
        model: gives a node's model as it is, to measure with.
        say: told which trainer was chosen, and why.

    Attributes:
        trainer: the one that computes; another one may be chosen before the first step or evaluation.
    """

    def __init__(
        self,
        setup: Setup,
        options: Simulate,
        rows: Rows,
        workers: Workers,
        profile: Profile,
        model: Callable[[int], Model],
        say: Callable[[str], None],
    ) -> None:
        self._setup, self._device, self._rows = setup, options.device, rows
        self._workers, self._profile, self._model, self._say = workers, profile, model, say
        self.trainer = self._make(_TRAINERS.get(options.trainer, SequentialTrainer))
        samples = setup.experiment.evaluation.samples
        self._evaluator = Evaluator(setup.task, setup.experiment.seed, samples, options.device, workers)
        self._batched_evaluator = BatchedEvaluator(self._evaluator, rows, say)
        self._to_choose = options.trainer == "auto"

    @property
    def chosen(self) -> str | None:
        """The trainer's name; None as long as it is open."""
        return None if self._to_choose else self.trainer.name

    def forms(self) -> dict[str, dict[str, int]]:
        """How steps and evaluations were computed: recorded, or eagerly and why."""
        return {"train": self.trainer.forms(), "evaluate": self._current_evaluator.forms()}

    def execute(self, kind: Kind, jobs: Sequence[Any]) -> list[Any]:
        """Run jobs of one kind; results in the jobs' order."""
        if self._to_choose and kind is not Kind.APPLY:
            self._choose()
        with self._profile.part("evaluate" if kind is Kind.EVALUATE else "train"):
            return execute(kind, jobs, self.trainer, self._current_evaluator)

    def evaluate(self, models: Sequence[Model]) -> list[Found | Exception]:
        """The recorded columns of models, in order; or what the user's model, loss or metric raised for one."""
        if self._to_choose:
            self._choose()
        with self._profile.part("evaluate"):
            return columns_each(self._current_evaluator, models)

    @property
    def _current_evaluator(self) -> Evaluator | BatchedEvaluator:
        """Who trains many nodes at once evaluates many at once: which it was is on record, so that it can be repeated."""
        return self._batched_evaluator if self.trainer.nodes else self._evaluator

    def _make(self, kind: type[Trainer]) -> Trainer:
        return kind(
            self._setup.task, self._setup.experiment.optimizer, self._rows, self._device, self._workers
        )

    def _choose(self) -> None:
        """Measure both trainers on the first batches of some nodes, before anything is trained or evaluated."""
        self._to_choose = False
        with self._profile.part("train"):
            try:
                self.trainer, said = choose(self._make, self._first_steps())
            except Exception as error:  # noqa: BLE001 - a user's model or loss may raise anything; when it trains, its node reports it
                said = f"trainer: sequential (no comparison: {cause(error)})"
        if said:
            self._say(said)

    def _first_steps(self) -> list[TrainJob]:
        experiment, parts = self._setup.experiment, self._setup.parts
        jobs = []
        for rank in [rank for rank, part in enumerate(parts) if part.size][:MEASURED_NODES]:
            batches = BatchStream(experiment.seed, rank, parts[rank], experiment.batch_size)
            start = self._model(rank)
            state = experiment.optimizer.init(start.parameters)
            jobs.append(TrainJob(start, [batches.batch(0)], experiment.optimizer.lr, state, 0))
        return jobs
