"""What every node would make for itself is made once, before the nodes are forked: they share its memory, and start at
once.

Steps and evaluations are recorded when they are first carried out (:mod:`gossamer.learning.capture`), which takes as long
as ten of them and leaves a node's heap twice as large. So they are rehearsed here, on the data of one node; what comes of
it is thrown away.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from gossamer.config import Processes
from gossamer.cores import cores
from gossamer.learning.batches import BatchStream
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.malloc import trim
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import SequentialTrainer, TrainJob
from gossamer.messages.tags import Model
from gossamer.runtime.processes.system.memory import available_bytes, for_forks, private_bytes
from gossamer.runtime.setup import Setup

log = logging.getLogger("gossamer")

PAGE_TABLES_BYTES = 256 * 2**20
"""All forks' page tables of the data may take this much before the data is laid out in shared files."""
_ENTRY_BYTES, _PAGE_BYTES = 8, 4096


def with_data_for_forks(setup: Setup) -> Setup:
    """The same, with data that is cheap to fork, where there are so many nodes that it matters."""
    task, nodes = setup.task, setup.experiment.nodes
    tensors = [tensor for pair in (task.train, *task.tests.values()) for tensor in pair]
    tables = sum(tensor.nbytes for tensor in tensors) * nodes // _PAGE_BYTES * _ENTRY_BYTES
    if tables < PAGE_TABLES_BYTES or any(tensor.device.type != "cpu" for tensor in tensors):
        return setup
    train, *sets = ((for_forks(x), for_forks(y)) for x, y in (task.train, *task.tests.values()))
    return replace(setup, task=replace(task, train=train, tests=dict(zip(task.tests, sets, strict=True))))


class Stage:
    """What nodes compute with.

    Args:
        setup: what is run.

    Attributes:
        rows: where vectors are kept; forked, each node has its own.
        trainer: takes local steps.
        evaluator: evaluates models.
    """

    def __init__(self, setup: Setup) -> None:
        experiment = setup.experiment
        self._setup = setup
        self.rows = Rows(setup.layout.size)
        self.trainer = SequentialTrainer(setup.task, experiment.optimizer, self.rows)
        self.evaluator = Evaluator(setup.task, experiment.seed, experiment.evaluation.samples)
        self._freed_bytes: int | None = None  # what a step took and gave back
        self._common: Model | None = None
        if experiment.initial == "common":
            parameters, buffers = setup.initial(0)
            self._common = Model(self.rows.store(parameters), buffers)

    def initial(self, rank: int) -> Model:
        """The model that a node starts with."""
        return self._common or self._setup.initial(rank)

    def trims(self) -> bool:
        """Whether nodes hand freed memory back after computing; see ``engine.memory``."""
        engine, nodes = self._setup.experiment.engine, self._setup.experiment.nodes
        assert isinstance(engine, Processes)
        if engine.memory != "auto":
            return engine.memory == "trim"
        available = available_bytes()
        if available is None or self._freed_bytes is None:
            return nodes > cores()
        return nodes * self._freed_bytes > available / 2

    def warm_up(self) -> None:
        """Take two steps and evaluate the outcome, so that every node has the recordings.

        What fails here will fail in a node, which is the one to say so.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # autograd then starts threads, which a fork would not survive
            return
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nodes compute on the CPU, and autograd asks for devices
        try:
            self._rehearse()
        except Exception as error:  # noqa: BLE001 - the user's model or loss may raise anything
            log.debug("the warmup failed: %s", error)
        trim()

    def _rehearse(self) -> None:
        setup, experiment = self._setup, self._setup.experiment
        rank = max(range(experiment.nodes), key=lambda rank: len(setup.parts[rank]))
        if not len(setup.parts[rank]):
            return
        batches = BatchStream(experiment.seed, rank, setup.parts[rank], experiment.batch_size)
        model = initial = self.initial(rank)
        trim()
        before = private_bytes()
        for number in range(2):
            state = experiment.optimizer.init(model.parameters)
            job = TrainJob(model, [batches.batch(number)], experiment.optimizer.lr, state, seed=0)
            [result] = self.trainer.train([job])
            model = result.model
        after = private_bytes()
        if before is not None and after is not None:
            self._freed_bytes = max(after - before, 0)
        if setup.evaluated:
            self.evaluator.warm_up(initial, model)
