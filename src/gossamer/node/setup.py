"""The data from which an engine creates a node, and which an algorithm may check before the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Int

from gossamer.codecs.codec import Codec
from gossamer.config import Experiment
from gossamer.learning.aggregators import Aggregator
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout
from gossamer.messages.tags import Message, Model
from gossamer.node.host import Host
from gossamer.topology import TopologySchedule

if TYPE_CHECKING:
    from gossamer.node.runtime import NodeRuntime


class Companion(Protocol):
    """An engine's part of a node. Companions exchange messages that wrappers and the algorithm don't see."""

    def takes(self, message: Message) -> bool:
        """Take a message, unless it is the algorithm's; says whether it did."""

    def peer_lost(self) -> None:
        """``host.lost`` has grown."""


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
        companion: creates the engine's part of the node, if it has one.
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
    companion: Callable[[NodeRuntime, Host], Companion] | None = None
