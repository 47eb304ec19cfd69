"""Node, an algorithm's interface to the system, and NodeRuntime, the engine's interface to the same node."""

from gossamer.node.mailbox import Inbox, PeerLost
from gossamer.node.measure import Measure, Measurement
from gossamer.node.middleware import Middleware, NodeProxy
from gossamer.node.node import Node
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import CheckContext, Setup
from gossamer.node.wrapper import NodeWrapper

__all__ = ["Inbox", "Measure", "Measurement", "Middleware", "Node", "NodeProxy", "NodeRuntime", "NodeWrapper"]
__all__ += ["CheckContext", "PeerLost", "Setup"]
