"""A node's part of the run's checkpoints: what is saved of it at the end of a round, and how it goes on from there.

What nodes and coordinator say about a checkpoint is in :mod:`gossamer.runtime.processes.node_process.cutting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gossamer.config import Experiment
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Message, Traffic
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder, highest
from gossamer.runtime.processes.node_process.context import NodeContext
from gossamer.runtime.processes.node_process.cutting import Cutting
from gossamer.runtime.processes.protocol import FromNode
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.snapshots import NodeSnapshots, made, sent_here


class NodeCheckpoints:
    """One node's.

    Args:
        node: who is saved; restored, if it was saved before.
        experiment: what is run.
        context: says where files go, and from which checkpoint the run goes on.
        now: the node's clock in seconds.
        state: gives what its engine saves of it.
        tell: sends a message to the coordinator.
        saved: the node's part of the checkpoint from which the run goes on; None is its start.

    Attributes:
        cutting: makes its cuts.
    """

    def __init__(
        self,
        node: NodeRuntime,
        experiment: Experiment,
        context: NodeContext,
        now: Callable[[], float],
        state: Callable[[], dict[str, Any]],
        tell: Callable[[FromNode], None],
        saved: Checkpoint | None,
    ) -> None:
        self._node, self._state, self._saved = node, state, saved
        self._transport: Transport
        self._cuts = NodeSnapshots(node.deliver, now, experiment.algorithm.gathers, self._ignore)
        path, cut = context.folder.checkpoints, context.cut
        digest, first = context.checkpoints or (None, highest(path) + 1)
        self.cutting = Cutting(
            experiment.checkpoint,
            self._cuts,
            CheckpointFolder(path, experiment, digest),
            tell,
            0 if cut is None else made(experiment.checkpoint, cut),
            first,
        )
        self._sent_before: dict[int, int] = {}  # by each source, when the run was resumed
        if saved is not None:
            node.restore(saved)
            self._cuts.restore(saved)
            self._sent_before = sent_here(saved)

    def begin(self, transport: Transport) -> None:
        """The node is at its start, or where it was saved; a transport's counters go on from there."""
        self._transport = transport
        self.cutting.use(transport, self._sent_before)
        if self._saved is None:
            self.round_ended()
            return
        transport.traffic = Traffic(**self._saved.engine["traffic"])
        self.cutting.round_ended(self._saved)
        for arrival in self._saved.arriving:  # whatever was on its way has had the time since
            self._count(arrival.message, 1)
            self._cuts.deliver(arrival.message)

    def round_ended(self) -> None:
        """The node is at the end of a round, or at its start."""
        self.cutting.round_ended(self._node.checkpoint(**self._state()))

    def over(self) -> None:
        """The node's rounds are over."""
        self._cuts.over()

    def deliver(self, message: Message) -> None:
        """A message has come in: its number goes on where those of its sender were when the run was resumed."""
        before = self._sent_before.get(message.source, 0)
        self._cuts.deliver(replace(message, number=message.number + before) if before else message)

    def _ignore(self, message: Message) -> None:
        """A message is one that the node had before the run was resumed: it does not count again."""
        self._count(message, -1)

    def _count(self, message: Message, times: int) -> None:
        self._transport.traffic.messages_received += times
        self._transport.traffic.bytes_received += times * wire_bytes(message.tag, message.payload)
