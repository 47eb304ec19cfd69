"""The setup of a run, which all of its nodes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from gossamer.config import Experiment
from gossamer.config.registry import Component
from gossamer.errors import listed
from gossamer.fingerprint import Fingerprint, unknown
from gossamer.learning import Mean
from gossamer.learning.aggregators import Aggregator
from gossamer.learning.evaluation_metrics import EvaluationMetrics
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import FlatModule, Layout, bare_module, initial_model
from gossamer.messages.tags import Model
from gossamer.network import ComputeProfile, Network
from gossamer.randomness import SHARED, torch_seed
from gossamer.tasks import Task
from gossamer.tasks.metrics import ClassAccuracy, class_tags
from gossamer.topology import Graph, Mixing, TopologySchedule

if TYPE_CHECKING:
    from gossamer.faults import FaultSchedule


@dataclass(frozen=True, eq=False)
class CheckContext:
    """The parts of an experiment that ``check`` of an algorithm or a middleware sees."""

    nodes: int  # number of nodes
    topology: TopologySchedule  # which nodes may talk to each other
    optimizer: Optimizer  # takes local steps
    codec: Component | None  # encodes models; None sends them as they are
    layout: Layout  # the shapes behind the flat vectors
    evaluation_sets: tuple[str, ...]  # names of the evaluation sets, including those of poisons


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup that all nodes of a run share."""

    experiment: Experiment
    task: Task
    parts: list[Int[np.ndarray, " _"]]  # indices of each node's training samples
    # Indices of each node's own test samples, which are part of task.train.
    personal: list[Int[np.ndarray, " _"]]
    labels: Int[np.ndarray, "nodes classes"] | None  # samples of each class at each node, if there are any
    topology: TopologySchedule
    faults: FaultSchedule
    network: Network  # the behaviour of links, including faults
    compute: ComputeProfile  # durations of these nodes' local steps, including faults
    layout: Layout  # the shapes behind the flat vectors
    outcome_ranks: frozenset[int]  # ranks whose model is the algorithm's outcome
    evaluated: frozenset[int]  # ranks whose own model is evaluated
    message_limit: int  # the largest message that a node accepts, bytes
    trainer: str  # name of the trainer, never "auto"
    trainer_note: str  # why "auto" did not take another one, if so
    data: dict[str, Any]  # what the task's data are, before poisons; see gossamer.tasks.summary
    metrics: EvaluationMetrics  # the loss and the metrics, as they are computed
    remarks: Sequence[
        str
    ] = ()  # sentences for the user about how files were read and how measures are computed
    poisoned: Sequence[Sequence[int]] = ()  # the ranks affected by each of the experiment's poisons
    chosen: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by the field of a selector, the ranks
    warm_start: Model | None = None  # the model that all nodes start with, if the experiment names one
    fingerprint: Fingerprint = field(default_factory=unknown)  # of own code and shared data
    # What acts around each node, from the algorithm to the engine: functions of the node inside (:class:`gossamer.Node`).
    layers: Sequence[Callable[[Any], Any]] = ()
    encoded: bool = False  # whether one of them encodes models, so that a part of a vector may arrive in place of all of it

    def initial(self, rank: int) -> Model:
        """The initial model of a node: the same for all nodes, or drawn for each."""
        if self.warm_start is not None:
            return self.warm_start
        shared = self.experiment.initial == "common"
        seed = torch_seed(self.experiment.seed, "initial", SHARED if shared else rank)
        return initial_model(self.task.model, seed)

    def takes_part(self, rank: int, rounds: int) -> bool:
        """Whether the algorithm uses a node that has completed this many rounds: a node without data, whose
        model is not evaluated, may have nothing to do."""
        return rank in self.outcome_ranks or rounds > 0 or len(self.parts[rank]) > 0

    @property
    def aggregator(self) -> Aggregator | None:
        """The aggregator used by :meth:`gossamer.node.Node.mix`. None is the weighted mean, which engines may
        batch."""
        aggregator = self.experiment.aggregator
        return None if type(aggregator) is Mean else aggregator

    def graph(self, round: int) -> Graph:
        """The graph that is recorded for a round: the one along which the algorithm mixes, if it uses the topology, or else
        that of the topology."""
        mixing = mixing_of(self.experiment)
        links = None if mixing is None else mixing.links
        return self.topology.graph(round) if links is None else links(self.topology, round)

    def notes(self) -> list[str]:
        """Sentences for the user about the choices that were made."""
        experiment, notes = self.experiment, [self.data["line"], *self.remarks]
        if experiment.engine.trainer == "auto":
            notes.append(
                f"trainer: {self.trainer}" + (f" ({self.trainer_note})" if self.trainer_note else "")
            )
        if experiment.codec is not None and (what := experiment.algorithm.unencoded(self.topology)):
            notes.append(f"{experiment.algorithm.name_of()} sends {what} without the codec")
        if alone := self._without_neighbours():
            named = listed(map(str, alone)) if len(alone) < 10 else f"{len(alone)} of {experiment.nodes}"
            notes.append(f"topology: nodes without neighbours: {named} (ranks count from 0)")
        if experiment.evaluation.of == "round" and experiment.algorithm.ends_with_steps():
            notes.append(
                f"a round of {experiment.algorithm.name_of()} ends with local steps that are not mixed yet, and models"
                " are shown after them (evaluation.of: mixed shows the last mixing)"
            )
        if not_known := self.fingerprint["unknown"]:
            notes.append(f"not fingerprinted: {listed(not_known)}; gossamer does not notice if it changes")
        return notes

    @cached_property
    def measuring(self) -> FlatModule:
        """The module with which measures compute outputs."""
        return FlatModule(bare_module(self.task.model).eval())

    @cached_property
    def set_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the columns of evaluation sets."""
        return tuple(f"{name}_" for name in self._evaluated_on())

    def _evaluated_on(self) -> list[str]:
        """The evaluation sets, and "personal" if nodes have test samples of their own."""
        return [*self.task.tests, *(["personal"] if any(map(len, self.personal)) else [])]

    def _without_neighbours(self) -> list[int]:
        """The nodes that have no link, in a fixed graph that may have such nodes."""
        mixing, topology = mixing_of(self.experiment), self.topology
        own_graph = mixing is not None and mixing.links is not TopologySchedule.graph
        if own_graph or topology.sampled or not topology.static:
            return []
        return topology.graph(0).alone

    def description(self) -> dict[str, Any]:
        """The values recorded at the start: nodes, label counts and the first graph."""
        graph, mixing = self.graph(0), mixing_of(self.experiment)
        return {
            "nodes": self.experiment.nodes,
            "directed": graph.directed,
            "parameters": self.layout.size,
            "trainer": self.trainer,
            "trainer_note": self.trainer_note,
            "data": self.data,
            "samples": [len(part) for part in self.parts],
            "labels": None if self.labels is None else self.labels.tolist(),
            "classes": None if self.task.classes is None else list(self.task.classes),
            "class_columns": self.class_columns,
            "outcome_ranks": sorted(self.outcome_ranks),
            "evaluated": sorted(self.evaluated),
            "evaluation_sets": list(self.task.tests),
            "ends_with_steps": self.experiment.algorithm.ends_with_steps(),
            "evaluation_samples": {
                name: [min(self.experiment.evaluation.samples or len(targets), len(targets)), len(targets)]
                for name, (_, targets) in self.task.tests.items()
            },
            "poisoned": [list(ranks) for ranks in self.poisoned],
            "chosen": {field: list(ranks) for field, ranks in self.chosen.items()},
            "mixing": None if mixing is None else mixing.description(),
            "graphs": {"0": [list(edge) for edge in graph.edges()]},
        }

    @cached_property
    def class_columns(self) -> dict[str, str]:
        """The columns with the accuracies of single classes, and the names of these classes."""
        tags = {
            f"accuracy_{tag}": name
            for metric in self.metrics.streamed.values()
            if isinstance(metric, ClassAccuracy)
            for tag, name in zip(class_tags(metric.classes), metric.classes, strict=True)
        }
        return {f"{on}_{column}": name for on in self._evaluated_on() for column, name in tags.items()}


def mixing_of(experiment: Experiment) -> Mixing | None:
    """What an experiment mixes with: what its algorithm declares, under its aggregator; None if the algorithm declares
    nothing."""
    declared: Mixing | None = experiment.algorithm.mixing()
    if declared is None or type(experiment.aggregator) is Mean:
        return declared
    rule = f"the aggregator {experiment.aggregator.name_of()}, in place of a weighted mean"
    return replace(declared, weights=rule, row=None, note="")
