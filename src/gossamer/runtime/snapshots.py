"""Consistent checkpoints that stop no node: one node's part of them, under every engine.

A node takes a snapshot at the end of one of its rounds. Snapshots of one number, one a node, are a checkpoint of the run.
Messages complete them (Chandy and Lamport, 1985): one that was sent before its sender's snapshot and not taken before its
receiver's is saved with the receiver. Messages of a pair are numbered and arrive in order, so two numbers a pair say this:
how many had arrived at the receiver's snapshot, and how many were sent before the sender's.

A resumed run sends again what was sent after its sender's snapshot, which its receiver may have received already. An
algorithm that waits for its messages (``Algorithm.gathers``) sends the same again, which the node ignores; of any other
algorithm, and under secure aggregation, whose keys are new, what is sent again differs, and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gossamer.config import Checkpoints, Experiment
from gossamer.messages.tags import Message
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import Cut
from gossamer.secure.protocol import TAG


def repeats_messages(experiment: Experiment) -> bool:
    """Whether nodes send the same again when their rounds are run again."""
    return bool(experiment.algorithm.gathers) and experiment.secure_aggregation is None


@dataclass(eq=False)
class _Boundary:
    """A node at the end of a round, how many messages of each source had come in, and what has come in since."""

    saved: Checkpoint
    received: Mapping[int, int]
    since: list[Message] = field(default_factory=list)


class NodeSnapshots:
    """One node's snapshots: between its engine, which delivers messages, and the node.

    Args:
        deliver: puts a message into the node's mailbox.
        repeats: whether the algorithm sends the same again when its rounds are run again.
        ignored: called instead for a message that had been received before the node was restored."""

    def __init__(
        self,
        deliver: Callable[[Message], None],
        repeats: bool = False,
        ignored: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._deliver, self._repeats, self._ignored = deliver, repeats, ignored
        self._received: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._newest: _Boundary | None = None
        self._open: dict[int, _Boundary] = {}
        self._watching: list[_Boundary] = []  # the newest one and those of open snapshots, each once
        self._over = False

    def restore(self, saved: Checkpoint) -> None:
        self._received = _counts(saved, "received")
        self._known = dict(self._received) if self._repeats else {}

    def deliver(self, message: Message) -> None:
        source, number = message.source, message.number
        if number < self._known.get(source, 0):
            self._ignored(message)
            return
        self._received[source] = max(number + 1, self._received.get(source, 0))
        for boundary in self._watching:
            boundary.since.append(message)
        self._deliver(message)

    def round_ended(self, saved: Checkpoint) -> None:
        """The node is at the end of a round, or at its start."""
        self._newest = _Boundary(saved, dict(self._received))
        self._watch()

    def cut(self, number: int) -> Checkpoint:
        """Take a snapshot where the last round ended; gives the node as it was then."""
        assert self._newest is not None, "a node's start is the end of a round"
        self._open[number] = self._newest
        return self._newest.saved

    def over(self) -> None:
        """The node's rounds are over: it reads no message that still comes (perhaps without end), nor after a resume."""
        self._over = True
        self._watch()

    def drop(self, number: int) -> None:
        self._open.pop(number, None)
        self._watch()

    def finish(self, number: int, sent: Mapping[int, int]) -> Checkpoint:
        """The node's part of a checkpoint, with the messages that belong to it. ``sent`` says how many messages each source
        had sent here before its snapshot; all of these are here."""
        boundary = self._open.pop(number)
        self._watch()
        unread, received = boundary.saved.unread, dict(boundary.received)

        def belongs(message: Message) -> bool:
            # Secrets are not saved. Nodes that go on from the ends of the same round agree on new ones.
            return message.number < sent.get(message.source, 0) and message.tag[:1] != (TAG,)

        if not self._repeats:
            unread = list(filter(belongs, unread))
            received = {source: min(count, sent.get(source, 0)) for source, count in received.items()}
        return replace(
            boundary.saved,
            unread=unread,
            arriving=list(filter(belongs, boundary.since)),
            engine={**boundary.saved.engine, "received": received, "sent": dict(sent)},
        )

    def _watch(self) -> None:
        newest = None if self._over and not self._repeats else self._newest
        watched = {id(each): each for each in (newest, *self._open.values()) if each is not None}
        self._watching = list(watched.values())


def snapshots_taken(asked: Checkpoints, cut: Cut) -> int:
    """How many snapshots a run that goes on from a checkpoint need not take any more: some node has taken them."""
    return max(asked.due(cut.rounds[rank], cut.times_s[rank]) for rank in cut.rounds)


def sent_here(saved: Checkpoint) -> dict[int, int]:
    """How many messages each source had sent to a node before its snapshot: the next one's number, after a resume."""
    return _counts(saved, "sent")


def _counts(saved: Checkpoint, name: str) -> dict[int, int]:
    return {int(source): int(count) for source, count in saved.engine.get(name, {}).items()}
