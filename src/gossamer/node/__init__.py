"""Node, all that an algorithm may do; beside it what it is made of, one subject a file."""

from gossamer.node.node import Node
from gossamer.node.reception import PeerLost
from gossamer.node.setup import NodeSetup

__all__ = ["Node", "NodeSetup", "PeerLost"]
