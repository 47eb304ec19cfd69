"""What a node is made of: its data, its side of an engine, and the wrappers of its messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from gossamer.codecs.codec import Codec
from gossamer.config import Experiment
from gossamer.config.registry import Component
from gossamer.learning.aggregators import Aggregator
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout
from gossamer.messages.tags import Message, Model, Payload, Sending, Traffic
from gossamer.topology import TopologySchedule

if TYPE_CHECKING:
    from gossamer.learning.computation import Computation
    from gossamer.learning.mixing import Mix
    from gossamer.node.node import Node


@dataclass(frozen=True, eq=False)
class Setting:
    """The rest of an experiment, as an algorithm's ``check`` sees it.

    Args:
        nodes: number of nodes.
        topology: which nodes may talk to each other.
        optimizer: takes local steps.
        codec: encodes models; None sends them as they are.
    """

    nodes: int
    topology: TopologySchedule
    optimizer: Optimizer
    codec: Codec | None = None


@dataclass(frozen=True, eq=False)
class NodeSetup:
    """Everything that a node is made of, except its engine.

    Args:
        rank: which node, from 0.
        experiment: what is run.
        topology: which nodes may talk to each other.
        layout: the shapes behind the flat vectors.
        initial: the model it starts with.
        samples: indices of the node's training samples [n].
        label_counts: samples of each class [classes], or None where there are no classes.
        test_samples: samples that a recorded or asked-for evaluation uses, by evaluation set.
        aggregator: what :meth:`gossamer.node.Node.mix` does with models; None is the weighted mean.
        hospitable: whether nodes that join may ask it for its model.
    """

    rank: int
    experiment: Experiment
    topology: TopologySchedule
    layout: Layout
    initial: Model
    samples: Int[np.ndarray, " n"]
    label_counts: Int[np.ndarray, " classes"] | None
    test_samples: Mapping[str, int]
    aggregator: Aggregator | None = None
    hospitable: bool = False


@runtime_checkable
class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Don't make the call."""


@runtime_checkable
class Host(Protocol):
    """One node's side of an engine. A node knows its engine only through this."""

    lost: set[int]
    """Ranks known to be dead."""

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

    def fresh(self, length: int) -> Tensor:
        """A new, writable vector float32 [length], aligned to 64 bytes."""

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        """Queue a message to each of some ranks, in this order. The payload is frozen
        (:func:`gossamer.messages.freeze`) and will not change."""

    def compute(self, computation: Computation) -> Awaitable[Any]:
        """Run a computation; gives what its ``commit`` returned. Cancelling the await cancels the
        computation."""

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        """When all else of this instant is done, prepare a mixing step, run it, and commit the result; gives what
        ``commit`` returned. Unless ``read``, the result may be written as late as :meth:`settle`."""

    def settle(self, vector: Tensor) -> None:
        """Write a vector that is about to be read, if it is not written yet."""

    def finished(self, rounds: int) -> bool:
        """Whether a node that has completed this many rounds is at its end."""

    def end_round(self) -> Awaitable[None]:
        """Record, evaluate and checkpoint as the experiment says, after a round was counted."""

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: keyed when simulated, from the operating system when real."""


class NodeWrapper(Component):
    """Base of wrappers, which change what a node sends or receives: attacks, privacy noise, research on messages.

    An experiment lists them under ``wrappers``; messages pass out through them in order, and in through them in reversed
    order. They see messages as they are on the wire, encoded by the experiment's codec. A wrapper is frozen like an
    algorithm; what must outlive a call belongs in ``node.state``.
    """

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
