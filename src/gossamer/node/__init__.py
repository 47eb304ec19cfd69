"""Node, all that an algorithm may do, and NodeRuntime, the same node as its engine sees it."""

from gossamer.node.mailbox import PeerLost
from gossamer.node.node import Node
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import NodeSetup, NodeWrapper, Setting

__all__ = ["Node", "NodeRuntime", "NodeSetup", "NodeWrapper", "PeerLost", "Setting"]
