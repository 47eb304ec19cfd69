"""Measures: what a user computes whenever a row of a node is made, off the node's clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.config.registry import Component
from gossamer.learning.parameters import FlatModule, scores
from gossamer.messages.tags import Message, Model
from gossamer.randomness import draws_of, node_generator
from gossamer.tasks.task import for_each

if TYPE_CHECKING:
    from gossamer.node.runtime import NodeRuntime
    from gossamer.node.shown import CompleteModel


class Measurement:
    """What a measure sees of a node when one of its rows is made.

    Attributes:
        rank: the node's number.
        round: the number of completed rounds of the model that the row shows.
        model: this model.
        taken: the messages that the algorithm took by ``gather``, ``receive`` and ``drain`` in the last completed round,
            decoded, in the order in which it took them. Empty in protocols without rounds, and for masked sums.
        sets: the inputs and targets of the task's evaluation sets, by name."""

    def __init__(self, node: NodeRuntime, shown: CompleteModel, taken: Sequence[Message], place: str) -> None:
        self._node, self._place = node, place
        self.rank, self.round, self.model, self.taken = node.rank, shown.round, shown.model, taken
        self.sets: Mapping[str, tuple[Any, Tensor]] = node.setup.task.tests

    @cached_property
    def samples(self) -> tuple[Any, Tensor]:
        """The inputs and targets of the node's training samples; a copy, made when it is first asked for."""
        (inputs, targets), own = (
            self._node.setup.task.train,
            torch.from_numpy(self._node.setup.parts[self.rank]),
        )
        return for_each(lambda tensor: tensor[own], inputs), targets[own]

    def outputs(self, model: Model, inputs: Any) -> Any:
        """What the task's module returns for some inputs with a model, in evaluation mode and without gradients."""
        flat: FlatModule = self._node.setup.measuring
        whole = model.over(self.model)
        flat.load(Model(whole.parameters, whole.buffers if len(whole.buffers) else self.model.buffers))
        with torch.no_grad():
            return scores(flat.module, for_each(flat.laid_out, inputs))

    def rng(self, purpose: str, *counters: int) -> np.random.Generator:
        """A new generator for the key (experiment seed, this measure, purpose, this rank, counters)."""
        with draws_of(self._place):
            return node_generator(self._node.setup.experiment.seed, purpose, self.rank, *counters)


class Measure(Component):
    """Base class of measures, which an experiment lists under ``measures``.

    A measure is frozen, and all nodes share it. It takes no time on the node's clock, and must modify nothing that it is
    given."""

    @abstractmethod
    def measure(self, at: Measurement) -> Mapping[str, Any]:
        """Return the values of a row's columns, by name, as :meth:`gossamer.Node.record` takes them."""
