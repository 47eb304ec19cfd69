"""How a node takes messages out of its mailbox, and waits for those that can still come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from gossamer.codecs.codec import Coder
from gossamer.errors import GossamerError
from gossamer.messages.mailbox import Ages, Inbox, Mailbox, Prefix, Waiter
from gossamer.messages.tags import Message
from gossamer.node.host import Host


class PeerLost(GossamerError):
    """A node waits for a peer that is dead, and the experiment says that this ends the run."""


class Reception:
    """Takes messages out of one node's mailbox.

    Args:
        rank: the node.
        host: knows the time and the dead peers.
        round: gives the round that the node is in.
        lost_peer: see :class:`~gossamer.node.setup.NodeSetup`.

    Attributes:
        mailbox: the messages that no task has taken.
        ages: how old messages were when they were taken.
        first: the first round in which a node that was away takes part again, by rank; this node may be among them.
        coder: decodes the models in messages, if the experiment has a codec.
    """

    def __init__(
        self,
        rank: int,
        host: Host,
        round: Callable[[], int],
        lost_peer: Literal["fail", "skip", "wait"],
    ) -> None:
        self._rank, self._host, self._round, self._lost_peer = rank, host, round, lost_peer
        self.mailbox = Mailbox(self._drop)
        self.ages = Ages()
        self.first: dict[int, int] = {}
        self.coder: Coder | None = None

    # --- taking messages

    async def receive(
        self, prefix: Prefix, source: int | None, timeout: float | None, keep_as: Prefix | None = None
    ) -> Message:
        """Take the oldest message that fits, waiting for one if need be; see :meth:`Node.receive`."""
        sources = None if source is None else {source}
        waiter = Waiter(prefix, sources)
        self.mailbox.watch(waiter)
        timer = self._host.timer(timeout, waiter.expire) if timeout is not None else None
        try:
            while (message := self.mailbox.take_first(prefix, sources)) is None:
                if waiter.expired:
                    raise TimeoutError(f"node {self._rank}: {waiter} did not come within {timeout} s")
                if source in self._host.lost:
                    raise PeerLost(f"node {self._rank} waits for {waiter}, which is dead")
                await waiter.wait()
            opened = self._opened(message)
            if keep_as is None:
                self._took((message,))
            else:
                self.mailbox.deliver(replace(opened, tag=keep_as))
            return opened
        finally:
            self.mailbox.unwatch(waiter)
            if timer is not None:
                timer.cancel()

    def drain(
        self, prefix: Prefix, source: int | None, *, newest: bool, but: Container[tuple[int, Prefix]] = ()
    ) -> list[Message]:
        """Take every message that fits, except those of some (source, tag); see :meth:`Node.drain`."""
        taken = self.mailbox.take_all(prefix, None if source is None else {source}, but)
        if self.coder is not None:  # superseded ones too: a codec may need to see each message of a sender
            taken = [self._opened(message) for message in taken]
        if newest:
            last = {(message.source, message.tag): message for message in taken}
            self._host.counters.messages_superseded += len(taken) - len(last)
            taken = [message for message in taken if last[message.source, message.tag] is message]
        self._took(taken)
        return taken if self.coder is not None else [self._opened(message) for message in taken]

    async def gather(
        self, wanted: set[int], prefix: Prefix, at_least: int | None, timeout: float | None
    ) -> Inbox:
        """Take one message of each of some ranks; see :meth:`Node.gather`."""
        enough = len(wanted) if at_least is None else min(at_least, len(wanted))
        waiter = Waiter(prefix, wanted, enough)
        self.mailbox.watch(waiter)
        taken_before = self.mailbox.taken
        timer = self._host.timer(timeout, waiter.expire) if timeout is not None else None
        away: set[int] = set()  # ranks not to wait for, though they may come back meanwhile
        try:
            while not waiter.expired:
                if self._host.lost or self.first:
                    away |= self._away(wanted - waiter.seen, waiter)
                    enough = waiter.wanted = min(enough, len(wanted) - len(away))
                if len(waiter.seen - away if away else waiter.seen) >= enough:
                    break
                await waiter.wait()
                if self.mailbox.taken != taken_before:
                    taken_before = self.mailbox.taken
                    self.mailbox.recount(waiter)
            taken = self.mailbox.take_one_each(prefix, wanted)
        finally:
            self.mailbox.unwatch(waiter)
            if timer is not None:
                timer.cancel()
        missing: Iterable[int] = ()
        if len(taken) < len(wanted):
            missing = wanted - taken.keys()
            self.mailbox.close(prefix, missing)
        self._took(taken.values())
        for rank, message in taken.items():
            if self.coder is not None or not message.unchanged():
                taken[rank] = self._opened(message)
        return Inbox({rank: message.payload for rank, message in taken.items()}, missing)

    def _opened(self, message: Message) -> Message:
        """A message whose models are decoded.

        Raises:
            RuntimeError: if a vector in it was modified in place.
        """
        if not message.unchanged():
            raise RuntimeError(
                f"message {message.tag} from node {message.source} was modified in place by another of its"
                " receivers or its sender; what is in a message is immutable: compute a new vector"
            )
        return message if self.coder is None else self.coder.decode(message)

    def _took(self, messages: Collection[Message]) -> None:
        self._host.counters.messages_taken += len(messages)
        self.ages.add(self._host.now(), messages)

    def _away(self, awaited: set[int], waiter: Waiter) -> set[int]:
        """Those of ``awaited`` that send nothing in this round."""
        lost = awaited & self._host.lost
        if lost and self._lost_peer == "fail":
            raise PeerLost(f"node {self._rank} waits for {waiter}, of which {sorted(lost)} are dead")
        round = self._round()
        if self.first.get(self._rank, 0) > round:
            return awaited
        away = {rank for rank in awaited if self.first.get(rank, 0) > round}
        return away if self._lost_peer == "wait" else away | lost

    def _drop(self, message: Message) -> None:
        self._host.counters.messages_late += 1

    # --- nodes that are away

    def found(self, rank: int, first: int, *, anew: bool) -> None:
        """A peer that was away is back; see :meth:`NodeRuntime.peer_found`."""
        self.first[rank] = first
        if anew:
            self.mailbox.forget_late(rank)
        self.mailbox.wake_all()

    def rejoin(self, first: int) -> None:
        """The node itself was away; see :meth:`NodeRuntime.rejoin`."""
        self.first[self._rank] = first
        self.mailbox.wake_all()

    # --- checkpoints

    def saved(self) -> dict[str, Any]:
        """The values that :meth:`restore` takes, in addition to the unread messages."""
        late = [[source, list(prefix), count] for source, prefix, count in self.mailbox.late()]
        return {"late": late, "ages": self.ages.saved()}

    def restore(self, unread: Iterable[Message], saved: Mapping[str, Any]) -> None:
        """Continue with saved values; for a node that has received nothing yet."""
        late = [(source, tuple(prefix), count) for source, prefix, count in saved["late"]]
        self.mailbox.restore(unread, late)
        self.ages.restore(saved["ages"])
