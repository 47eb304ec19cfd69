"""A simulation that is resumed: its events happen again from the start, and what is known is not computed.

Coroutines can't be saved, and much of what a node is in the middle of lies in them: an open question, a task, a message that
may still be taken back. But everything that happens in a simulation follows from the experiment. So all of it happens again,
without training and evaluation, which take most of a run's time. Until a node has come to the end of the round at which it
was saved, its vectors have values without a meaning. There they get the saved ones, and from there on the node computes. A
message that was sent before its sender was saved, and comes after its receiver was, gets the payload that it had. Rows that
are on record are not recorded again.

Values must not decide what happens, as they do where a node sends only what has changed much. If they do, a node is not where
it was saved (:class:`ReplayDiffers`), and the whole run is computed again."""

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
from gossamer.results.checkpoints import Cut
from gossamer.runtime.simulate.clock import to_ns


class ReplayDiffers(GossamerError):
    """The replay took another course than the record, because model values decided it."""


class Replay:
    """A run that goes on from a checkpoint.

    Args:
        cut: the checkpoint, which stays as an attribute.
        place: moves a tensor that was read to the nodes' device.
        extended: whether the run now ends later, so that nodes that had ended do not.

    Attributes:
        restored: the ranks whose vectors have the right values.
        until_s: the instant of the checkpoint.
        over: whether that instant has passed."""

    def __init__(self, cut: Cut, place: Place, *, extended: bool) -> None:
        assert cut.time_s is not None
        self.cut, self._extended = cut, extended
        self.until_s, self.until_ns, self.over = cut.time_s, to_ns(cut.time_s), False
        self._saved = {rank: cut.read(rank, place) for rank in cut.rounds}
        # How many messages each node had been sent by each source when that was saved.
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
        self._evaluated: dict[str, Any] = {}  # what the first evaluation on each set has found

    @property
    def complete(self) -> bool:
        """Whether all nodes are restored."""
        return not self._saved

    def skips(self, rank: int) -> bool:
        """Whether it does not matter what a node computes."""
        return rank not in self.restored

    def stand_ins(
        self,
        execute: Callable[[ComputationKind, Sequence[Any]], list[Any]],
        kind: ComputationKind,
        jobs: Sequence[Any],
    ) -> list[Any]:
        """Stand-ins for the results of skipped jobs. Vectors are new ones, as the results are, because they are
        written over when their node is restored. The first evaluation on a set is computed, since its figures have names."""
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

    def as_it_was(self, message: Message, to: int) -> Message:
        """A message on its way, with the payload that it had before the run was resumed."""
        return self._arriving.get((message.source, to, message.number), message)

    def delivered(self, message: Message, to: int) -> Message:
        """The same of a message that arrives. The messages of a restored node are right already, and must not be written over
        when its receiver is restored."""
        right = message.source in self.restored and message.number >= self._sent[to].get(message.source, 0)
        if right and to not in self.restored:
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
        """Whether a node's values are right: restores it if it is where it was saved, by its round, the time, and what it has
        sent and received. ``unrecorded`` is written over with what the checkpoint has there; ``settle`` writes the vectors
        that are not written yet, which would else be written over what is restored."""
        rank = node.rank
        if rank in self.restored:
            return True
        saved = self._saved[rank]
        known: Any = saved.engine["traffic"]
        if (node.round, node.node.now()) != (saved.round, saved.time_s):
            return False
        if traffic["messages_received"] < known["messages_received"]:
            return False  # it was saved at a later message, after its rounds were over
        # In a run that ends later, it may have heard from nodes that had ended.
        compared = ("bytes_sent", "messages_sent") if self._extended else traffic.keys()
        if any(traffic[name] != known[name] for name in compared):
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
        """A row that depends on a node's model is not on record, although it should be unless the node is restored."""
        if rank not in self.restored:
            raise ReplayDiffers(f"a row that depends on node {rank} is missing in the record")

    def end(self) -> None:
        """The instant of the checkpoint is over."""
        if self._saved:
            raise self._differs(min(self._saved))
        self.over = True

    def _differs(self, rank: int) -> ReplayDiffers:
        return ReplayDiffers(f"values seem to decide what node {rank} does")
