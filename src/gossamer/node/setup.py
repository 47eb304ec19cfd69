"""The parts of a node: the run's setup, a node's side of an engine, and the wrappers of its messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from gossamer.codecs.codec import Codec
from gossamer.config import Experiment
from gossamer.config.registry import Component
from gossamer.learning import Mean
from gossamer.learning.aggregators import Aggregator
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout, initial_model
from gossamer.messages.tags import Message, Model, Payload, Sending, Traffic
from gossamer.network import ComputeProfile, Network
from gossamer.randomness import SHARED, torch_seed
from gossamer.tasks import Task
from gossamer.topology import TopologySchedule

if TYPE_CHECKING:
    from gossamer.faults import FaultSchedule
    from gossamer.learning.computation import Computation
    from gossamer.learning.mixing import Step
    from gossamer.node.node import Node


@dataclass(frozen=True, eq=False)
class Setting:
    """The rest of an experiment, as an algorithm's ``check`` sees it."""

    nodes: int  # their number
    topology: TopologySchedule  # which nodes may talk to each other
    optimizer: Optimizer  # takes local steps
    codec: Codec | None  # encodes models; None sends them as they are
    layout: Layout  # the shapes behind the flat vectors
    evaluation_sets: tuple[str, ...]  # their names, poisons' included


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup that all nodes of a run share."""

    experiment: Experiment
    task: Task
    parts: list[Int[np.ndarray, " _"]]  # indices of each node's training samples
    personal: list[Int[np.ndarray, " _"]]  # of each node's own test samples, which are in task.train too
    labels: Int[np.ndarray, "nodes classes"] | None  # samples of each class at each node, if there are any
    topology: TopologySchedule
    faults: FaultSchedule
    network: Network  # what links do to a message, faults included
    compute: ComputeProfile  # how long local steps take, settled for these nodes, faults included
    layout: Layout  # the shapes behind the flat vectors
    outcome_ranks: frozenset[int]  # ranks whose model is the algorithm's outcome
    evaluated: frozenset[int]  # ranks whose own model is evaluated
    message_limit: int  # the largest message that a node accepts, bytes
    trainer: str  # its name, which is not "auto"
    not_fused: str  # why "auto" is not "fused", if it is not
    poisoned: Sequence[Sequence[int]] = ()  # the ranks that each of the experiment's poisons reaches
    warm_start: Model | None = None  # what all nodes start with, if the experiment names a model

    def initial(self, rank: int) -> Model:
        """The model that a node starts with: the same everywhere, or drawn for each node."""
        if self.warm_start is not None:
            return self.warm_start
        shared = self.experiment.initial == "common"
        seed = torch_seed(self.experiment.seed, "initial", SHARED if shared else rank)
        return initial_model(self.task.model, seed)

    @property
    def aggregator(self) -> Aggregator | None:
        """The aggregator of :meth:`gossamer.node.Node.mix`; None is the weighted mean, which engines may batch."""
        aggregator = self.experiment.aggregator
        return None if type(aggregator) is Mean else aggregator

    def description(self) -> dict[str, Any]:
        """The record of the start: nodes, label counts, the first graph."""
        graph = self.topology.graph(0)
        return {
            "nodes": self.experiment.nodes,
            "directed": graph.directed,
            "parameters": self.layout.size,
            "samples": [len(part) for part in self.parts],
            "labels": None if self.labels is None else self.labels.tolist(),
            "classes": None if self.task.classes is None else list(self.task.classes),
            "outcome_ranks": sorted(self.outcome_ranks),
            "evaluation_sets": list(self.task.tests),
            "poisoned": [list(ranks) for ranks in self.poisoned],
            "graphs": {"0": [list(edge) for edge in graph.edges()]},
        }


@runtime_checkable
class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None: ...


@runtime_checkable
class Waiter(Protocol):
    """Something that waits for messages of some nodes; waking lets it look again whether there is something to wait for."""

    def wake(self) -> None: ...


@runtime_checkable
class Presence(Protocol):
    """The presence of all nodes in a simulation with faults."""

    def first(self, rank: int, peer: int) -> int:
        """The first round in which a node waits for a peer, after one of the two was away. Of itself, it is the first round
        in which the node takes part again."""

    def watch(self, rank: int, waiter: Waiter, peers: Iterable[int]) -> None:
        """A node begins to wait for peers: what waits is woken when one of them is lost or comes back."""

    def unwatch(self, waiter: Waiter, peers: Iterable[int]) -> None:
        """The end of what ``watch`` began."""

    def remember(self, rank: int, peers: Iterable[int]) -> None:
        """A node knows something of peers that is void once they are restarted."""


@runtime_checkable
class Host(Protocol):
    """One node's side of an engine. A node knows its engine only through this.

    Attributes:
        lost: ranks known to be dead.
        presence: looks up and wakes in place of an engine that tells each node; None where the engine does.
        paced: whether computations take as long as the compute profile says."""

    lost: set[int]
    presence: Presence | None
    paced: bool

    @property
    def traffic(self) -> Traffic:
        """A copy of what the node has sent and received by now."""

    @property
    def counters(self) -> Traffic:
        """The same to add to; bytes that are leaving may be missing."""

    def now(self) -> float:
        """Seconds since the run's start: virtual or real."""

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Timer:
        """Call after some seconds, and after every delivery of that instant. The algorithm does not wait for calls in the
        background."""

    def store(self, vector: Tensor) -> Tensor:
        """An immutable vector of these values; the same object if it is one already."""

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is (a view of) an immutable vector of the store."""

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        """Queue a message to each of some ranks, in this order. The payload is frozen
        (:func:`gossamer.messages.freeze`) and will not change."""

    def compute(self, computation: Computation) -> Awaitable[Any]:
        """Run a computation; gives what its ``commit`` returned. Cancelling the await cancels the
        computation."""

    def mix(self, step: Step, *, read: bool) -> Awaitable[Any]:
        """When all else of this instant is done, prepare a mixing step, run it, and commit the result; gives what
        its ``commit`` returned. Unless ``read``, the result may be written as late as :meth:`settle`."""

    def settle(self, vector: Tensor) -> None:
        """Write a vector that is about to be read, if it is not written yet."""

    def event(self, kind: str, text: str) -> None:
        """Record something that has happened to the node; "diverged" ends the run, if ``stop.diverged`` says so."""

    def finished(self, rounds: int) -> bool:
        """Whether a node that has completed this many rounds is at its end."""

    def end_round(self) -> Awaitable[None]:
        """Record, evaluate and checkpoint as the experiment says, after a round was counted."""

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: keyed when simulated, from the operating system when real."""

    def sign(self, data: bytes) -> bytes:
        """This rank's signature; empty where nodes have no keys of their own."""

    def verify(self, rank: int, data: bytes, signature: bytes) -> bool:
        """Whether this is the signature of a rank."""


class NodeWrapper(Component):
    """Base of wrappers, which change what a node sends or receives: attacks, privacy noise, research on messages.

    An experiment lists them under ``wrappers``; messages pass out through them in order, and in through them in reversed
    order. They see messages as they are on the wire, encoded by the experiment's codec. A wrapper is frozen like an
    algorithm; what must outlive a call belongs in ``node.state``."""

    _state_goes_to: ClassVar[str] = "node.state, which checkpoints keep"

    async def before_round(self, node: Node, r: int) -> None:
        """Awaited before each round of ``node.rounds()``; it may send and receive messages, e.g. to agree on keys."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        """Gives the payload that is sent instead, once for each message. The receivers of a broadcast share a payload
        that is returned as it is; a changed one has to be a new object."""
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Gives the message that is put into the mailbox instead; None drops it."""
        return message
