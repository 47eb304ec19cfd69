"""Node, an algorithm's interface to the system, and NodeRuntime, the engine's interface to the same node."""

from gossamer.node.mailbox import Inbox, PeerLost
from gossamer.node.middleware import Middleware, NodeProxy
from gossamer.node.node import Node
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import NodeWrapper, Setting, Setup

__all__ = [
    "Inbox",
    "Middleware",
    "Node",
    "NodeProxy",
    "NodeRuntime",
    "NodeWrapper",
    "PeerLost",
    "Setting",
    "Setup",
]
