"""Node, all that an algorithm may do, and NodeRuntime, the same node as its engine sees it."""

from gossamer.node.node import Node
from gossamer.node.reception import PeerLost
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import NodeSetup, Setting

__all__ = ["Node", "NodeRuntime", "NodeSetup", "PeerLost", "Setting"]
