"""Resumes a simulation: its events are replayed from the start, without computing results that are known.

Coroutines can't be saved, and they hold much of a node's state: pending requests, tasks, messages that may
still be cancelled. But the experiment determines everything that happens in a simulation. So all events are
replayed, without training and evaluation, which take most of a run's time. Until a node reaches the end of
the round at which it was saved, its vectors hold meaningless values. There they get the saved values, and
from there on the node computes. A message that was sent before its sender was saved, and arrives after its
receiver was saved, gets its saved payload. Rows that are on record are not recorded again.

This fails if model values decide what happens, as they do if a node sends only large changes, or if the user's code
has been changed. Then a node's state differs from the saved one (:class:`ReplayDiffers`), and the whole run is computed
again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gossamer.errors import GossamerError
from gossamer.learning.computation import ComputationKind
from gossamer.learning.trainer import TrainResult
from gossamer.messages import overwrite, protect
from gossamer.messages.tags import Message, Model, Payload
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Place
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.runtime.simulate.core import to_ns


class ReplayDiffers(GossamerError):
    """The replay diverged from the record, because model values decide what happens, or because code has changed."""


class Replay:
    """The replay of a run up to a checkpoint.

    Args:
        checkpoint: where the replay ends; also an attribute.
        to_device: moves a loaded tensor to the nodes' device.
        extended: whether the run now ends later, so that nodes that had ended continue.

    Attributes:
        restored: the ranks whose vectors have the right values.
        until_s: the instant of the checkpoint.
        over: whether that instant has passed."""

    def __init__(self, checkpoint: RunCheckpoint, to_device: Place, *, extended: bool) -> None:
        assert checkpoint.time_s is not None
        self.checkpoint, self._extended = checkpoint, extended
        self.until_s, self.until_ns, self.over = checkpoint.time_s, to_ns(checkpoint.time_s), False
        self._saved = {rank: checkpoint.read(rank, to_device) for rank in checkpoint.rounds}
        # By receiver and source: the messages that the source had sent when it was saved.
        self._sent = {
            rank: {int(source): count for source, count in saved.engine["sent"].items()}
            for rank, saved in self._saved.items()
        }
        self._arriving = {
            (message.source, rank, message.number): message
            for rank, saved in self._saved.items()
            for message in saved.arriving
        }
        self.restored = set[int]()
        self._evaluated: dict[str, Any] = {}  # the result of the first evaluation on each set

    @property
    def complete(self) -> bool:
        """Whether all nodes are restored."""
        return not self._saved

    def is_skipped(self, rank: int) -> bool:
        """Whether a node's computations can be skipped."""
        return rank not in self.restored

    def placeholder_results(
        self,
        execute: Callable[[ComputationKind, Sequence[Any]], list[Any]],
        kind: ComputationKind,
        jobs: Sequence[Any],
    ) -> list[Any]:
        """Placeholders for the results of skipped jobs. Their vectors are new, like those of real results,
        because they are overwritten when their node is restored. The first evaluation on a set is computed,
        since it gives the names of the metrics."""
        match kind:
            case ComputationKind.TRAIN | ComputationKind.APPLY:
                return [TrainResult(Model(*map(torch.clone, job.start)), job.state, 0.0) for job in jobs]
            case ComputationKind.GRADIENT:
                return [job.at.parameters.clone() for job in jobs]
            case ComputationKind.EVALUATE:
                for job in jobs:
                    if job.on not in self._evaluated:
                        [self._evaluated[job.on]] = execute(kind, [job])
                return [dict(self._evaluated[job.on]) for job in jobs]
        return execute(kind, jobs)

    def saved_message(self, message: Message, to: int) -> Message:
        """A message in flight, with its payload from before the run was resumed."""
        return self._arriving.get((message.source, to, message.number), message)

    def delivered(self, message: Message, to: int) -> Message:
        """As :meth:`saved_message`, for a message that arrives. A restored node's messages are correct already, and must not
        be overwritten when their receiver is restored."""
        correct = message.source in self.restored and message.number >= self._sent[to].get(message.source, 0)
        if correct and to not in self.restored:
            for tensor, _ in message.versions:
                protect(tensor)
        return self._arriving.pop((message.source, to, message.number), message)

    def restores(
        self,
        node: NodeRuntime,
        traffic: Mapping[str, int],
        unrecorded: Payload,
        settle: Callable[[], None],
    ) -> bool:
        """Restore a node if its round, time and traffic are those of the checkpoint. Returns whether its
        values are correct. ``unrecorded`` is overwritten with the checkpoint's models. ``settle`` first
        writes the pending vectors, which would otherwise overwrite the restored values."""
        rank = node.rank
        if rank in self.restored:
            return True
        saved = self._saved[rank]
        saved_traffic: Any = saved.engine["traffic"]
        if (node.round, node.node.now()) != (saved.round, saved.time_s):
            return False
        if traffic["messages_received"] < saved_traffic["messages_received"]:
            return False  # the node was saved at a later message, after its rounds were over
        # In an extended run, it may have received messages from nodes that had ended.
        compared = ("bytes_sent", "messages_sent") if self._extended else saved_traffic.keys()
        if any(traffic[name] != saved_traffic[name] for name in compared):
            raise self._differs(rank)
        settle()
        try:
            node.overwrite(saved, self._sent[rank])
            overwrite(unrecorded, saved.engine["unrecorded"])
        except (ValueError, LookupError, TypeError, RuntimeError):
            raise self._differs(rank) from None
        self.restored.add(rank)
        del self._saved[rank]
        return True

    def need(self, rank: int) -> None:
        """Raise ReplayDiffers unless the node whose model an unrecorded row needs has been restored."""
        if rank not in self.restored:
            raise ReplayDiffers(f"a row that depends on node {rank} is missing from the record")

    def end(self) -> None:
        """The instant of the checkpoint has passed."""
        if self._saved:
            raise self._differs(min(self._saved))
        self.over = True

    def _differs(self, rank: int) -> ReplayDiffers:
        return ReplayDiffers(
            f"node {rank} does other things than before: model values decide them, or its code has changed"
        )
