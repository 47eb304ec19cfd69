"""Node, all that an algorithm may do, and NodeRuntime, the same node as its engine sees it."""

from gossamer.node.mailbox import PeerLost
from gossamer.node.node import Node
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import NodeWrapper, Setting, Setup

__all__ = ["Node", "NodeRuntime", "NodeWrapper", "PeerLost", "Setting", "Setup"]
