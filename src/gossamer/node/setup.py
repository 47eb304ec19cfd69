"""What a node is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from jaxtyping import Int

from gossamer.learning.aggregators import Aggregator
from gossamer.learning.mixing import Missing
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout
from gossamer.messages.tags import Message, Model
from gossamer.node.host import Host
from gossamer.node.wrapper import NodeWrapper
from gossamer.topology import TopologySchedule

if TYPE_CHECKING:
    from gossamer.node.node import Node


class Companion(Protocol):
    """What an engine adds to a node to talk with its like at others, beneath wrappers and beside the algorithm."""

    def takes(self, message: Message) -> bool:
        """Take in a message, unless it is the algorithm's."""

    def peer_lost(self) -> None:
        """``host.lost`` has grown."""


@dataclass(frozen=True, eq=False)
class NodeSetup:
    """What a node is made of, apart from its engine.

    Args:
        rank: which node, from 0.
        size: number of nodes.
        seed: the experiment's seed.
        topology: who may talk to whom.
        layout: the shapes behind the flat vectors.
        initial: the model it starts with.
        optimizer: takes local steps; its ``lr`` and schedule are the node's.
        samples: indices of the node's training samples [n].
        label_counts: samples of each class [classes], or None where there are no classes.
        batch_size: samples a local step, or "full".
        test_samples: samples that a recorded or asked-for evaluation uses, by evaluation set.
        gather_timeout_s: default timeout of ``gather``, seconds; None waits for ever.
        lost_peer: what ``gather`` does about a dead peer: "fail" ends the run, "skip" goes on without it, "wait" waits
            for it to come back.
        missing: what stands for a model that is not there, where the algorithm does not say; as for
            :meth:`gossamer.node.Node.combine`.
        aggregator: what :meth:`gossamer.node.Node.mix` does with models; None is the weighted mean.
        wrappers: change what the node sends or receives, outermost last.
        companion: makes what takes in messages that are neither the algorithm's nor for its wrappers, if something does.
    """

    rank: int
    size: int
    seed: int
    topology: TopologySchedule
    layout: Layout
    initial: Model
    optimizer: Optimizer
    samples: Int[np.ndarray, " n"]
    label_counts: Int[np.ndarray, " classes"] | None
    batch_size: int | Literal["full"]
    test_samples: Mapping[str, int]
    gather_timeout_s: float | None = None
    lost_peer: Literal["fail", "skip", "wait"] = "fail"
    missing: Missing = "own"
    aggregator: Aggregator | None = None
    wrappers: Sequence[NodeWrapper] = ()
    companion: Callable[[Node, Host], Companion] | None = None
