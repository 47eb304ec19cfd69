"""What an engine makes a node of, and what an algorithm may check beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from jaxtyping import Int

from gossamer.codecs.codec import Codec
from gossamer.learning.aggregators import Aggregator
from gossamer.learning.mixing import Missing
from gossamer.learning.optimizer import Optimizer
from gossamer.learning.parameters import Layout
from gossamer.messages.tags import Message, Model
from gossamer.node.host import Host
from gossamer.node.wrapper import NodeWrapper
from gossamer.topology import TopologySchedule

if TYPE_CHECKING:
    from gossamer.node.runtime import NodeRuntime


class Companion(Protocol):
    """An engine's own part of a node. Companions exchange messages that wrappers and the algorithm don't see."""

    def takes(self, message: Message) -> bool:
        """Take a message, unless it is the algorithm's; says whether it did."""

    def peer_lost(self) -> None:
        """``host.lost`` has grown."""


@dataclass(frozen=True, eq=False)
class Setting:
    """The rest of an experiment, as an algorithm's ``check`` sees it.

    Args:
        nodes: number of nodes.
        topology: who may talk to whom.
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
        missing: the default of ``missing`` in :meth:`gossamer.node.Node.combine`, for absent ranks.
        aggregator: what :meth:`gossamer.node.Node.mix` does with models; None is the weighted mean.
        wrappers: change what the node sends or receives, outermost last.
        codec: encodes the models that the node sends; None sends them as they are.
        companion: makes the engine's own part of the node, if it has one.
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
    codec: Codec | None = None
    companion: Callable[[NodeRuntime, Host], Companion] | None = None
