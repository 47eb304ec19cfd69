"""Consistent checkpoints, without stopping anybody: what one node's part of them is, under every engine.

A node is saved at the end of one of its rounds: that instant is its cut. Cuts of one number, one a node, are a checkpoint
of the run, though nodes reach them at different instants. What matters is each message's place (Chandy and Lamport, 1985):
one that was sent before its sender's cut and not taken before its receiver's is saved with the receiver, whether it is in
the mailbox then or arrives later. One that was sent after its sender's cut will be sent again by a run that is resumed.
Messages of a pair are numbered, and arrive in order: so two numbers a pair say all this, how many had arrived when the
receiver was cut, and how many were sent before the sender was.

Any ends of rounds make a checkpoint, also such that are rounds apart: what a node had received already of what will be sent
again, it ignores the second time, since an algorithm that waits for its messages (``Algorithm.gathers``) sends the same
again. Of one that doesn't wait, what is sent again is something else, and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gossamer.config import Checkpoints
from gossamer.messages.tags import Message
from gossamer.node.checkpoint import Arrival, Checkpoint
from gossamer.results.checkpoints import Cut


@dataclass(eq=False)
class Boundary:
    """A node at the end of a round, and what has come in since.

    Args:
        saved: the node.
        received: how many messages had come in, by source.
        since: what has come in since then.
    """

    saved: Checkpoint
    received: Mapping[int, int]
    since: list[Arrival] = field(default_factory=list)


class NodeSnapshots:
    """One node's cuts: between its engine, which delivers messages, and the node.

    Args:
        deliver: puts a message into the node's mailbox.
        now: the node's clock, seconds.
        repeats: whether the algorithm sends the same again when its rounds are run again.
        ignored: called instead for a message that had been received before the node was restored.
    """

    def __init__(
        self,
        deliver: Callable[[Message], None],
        now: Callable[[], float],
        repeats: bool,
        ignored: Callable[[Message], None],
    ) -> None:
        self._deliver, self._now, self._repeats, self._ignored = deliver, now, repeats, ignored
        self._received: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._newest: Boundary | None = None
        self._open: dict[int, Boundary] = {}
        self._watching: list[Boundary] = []  # the newest one and those of open cuts, each once
        self._over = False

    def restore(self, saved: Checkpoint) -> None:
        """Go on as the node that was saved."""
        self._received = _counts(saved, "received")
        self._known = dict(self._received) if self._repeats else {}

    def deliver(self, message: Message) -> None:
        """A message has come in."""
        source, number = message.source, message.number
        if number < self._known.get(source, 0):
            self._ignored(message)
            return
        self._received[source] = max(number + 1, self._received.get(source, 0))
        if self._watching:
            arrival = Arrival(message, self._now())
            for boundary in self._watching:
                boundary.since.append(arrival)
        self._deliver(message)

    def round_ended(self, saved: Checkpoint) -> None:
        """The node is at the end of a round, or at its start."""
        self._newest = Boundary(saved, dict(self._received))
        self._watch()

    def cut(self, number: int) -> Checkpoint:
        """Make a cut where the last round ended; gives the node as it was then."""
        assert self._newest is not None, "a node's start is the end of a round"
        self._open[number] = self._newest
        return self._newest.saved

    def over(self) -> None:
        """The node's rounds are over. Messages still come, without end where nobody waits for them; they would be read by
        nobody after a resume either."""
        self._over = True
        self._watch()

    def drop(self, number: int) -> None:
        """The checkpoint of a cut will not be whole any more."""
        self._open.pop(number, None)
        self._watch()

    def finish(self, number: int, sent: Mapping[int, int]) -> Checkpoint:
        """The node's part of a checkpoint, with the messages that belong to it.

        Args:
            number: of the cut.
            sent: how many messages each source had sent here before its cut; all of these are here.
        """
        boundary = self._open.pop(number)
        self._watch()
        saved, received = boundary.saved, dict(boundary.received)
        unread = saved.unread
        if not self._repeats:
            unread = [message for message in unread if message.number < sent.get(message.source, 0)]
            received = {source: min(count, sent.get(source, 0)) for source, count in received.items()}
        arriving = [
            arrival
            for arrival in boundary.since
            if arrival.message.number < sent.get(arrival.message.source, 0)
        ]
        return replace(
            saved,
            unread=unread,
            arriving=arriving,
            engine={**saved.engine, "received": received, "sent": dict(sent)},
        )

    def _watch(self) -> None:
        newest = None if self._over and not self._repeats else self._newest
        watched = {id(each): each for each in (newest, *self._open.values()) if each is not None}
        self._watching = list(watched.values())


def made(asked: Checkpoints, cut: Cut) -> int:
    """How many cuts need not be made any more in a run that goes on from a checkpoint: some node has made them."""
    return max(asked.due(cut.rounds[rank], cut.times_s[rank]) for rank in cut.rounds)


def sent_here(saved: Checkpoint) -> dict[int, int]:
    """How many messages each source had sent to a node before its cut: the next one's number, after a resume."""
    return _counts(saved, "sent")


def _counts(saved: Checkpoint, name: str) -> dict[int, int]:
    return {int(source): int(count) for source, count in saved.engine.get(name, {}).items()}
