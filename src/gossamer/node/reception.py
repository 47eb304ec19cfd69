"""How a node takes messages out of its mailbox, waits for messages that can still come, and asks questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gossamer.codecs.codec import Coder
from gossamer.errors import GossamerError
from gossamer.messages.mailbox import Ages, Inbox, Mailbox, Prefix, Waiter
from gossamer.messages.tags import Message, Payload
from gossamer.node.host import Host
from gossamer.node.setup import NodeSetup

if TYPE_CHECKING:
    from gossamer.node.node import Node


class PeerLost(GossamerError):
    """A node waits for a peer that is dead, and the experiment says that this ends the run."""


class Reception:
    """Takes messages out of one node's mailbox.

    Attributes:
        mailbox: the messages that no task has taken.
        ages: how old messages were when they were taken.
        first: the first round in which a node that was away takes part again, by rank; this node may be among them.
        coder: decodes the models in messages, if the experiment has a codec.
    """

    def __init__(self, setup: NodeSetup, host: Host, round: Callable[[], int]) -> None:
        self._rank, self._lost_peer = setup.rank, setup.experiment.gather.lost_peer
        self._host, self._round = host, round
        self.mailbox = Mailbox(lambda message: self.late(1))
        self.ages = Ages()
        self.first: dict[int, int] = {}
        self.coder: Coder | None = None

    # --- taking messages

    async def receive(
        self,
        prefix: Prefix,
        source: int | None,
        timeout: float | None,
        keep_as: Prefix | None = None,
        *,
        exact: bool = False,
    ) -> Message:
        """Take the oldest message that fits, waiting for one if need be; see :meth:`Node.receive`. With ``exact``, its tag is
        the prefix and nothing more."""
        sources = None if source is None else {source}
        waiter = Waiter(prefix, sources, exact=exact)
        self.mailbox.watch(waiter)
        timer = self._host.timer(timeout, waiter.expire) if timeout is not None else None
        try:
            while (message := self.mailbox.take_first(prefix, sources, exact=exact)) is None:
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
        self,
        prefix: Prefix,
        source: int | None,
        *,
        newest: bool,
        only: Callable[[Message], bool] | None = None,
    ) -> list[Message]:
        """Take every message that fits (and is one of ``only`` these); see :meth:`Node.drain`."""
        taken = self.mailbox.take_all(prefix, None if source is None else {source}, only)
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

    def late(self, count: int) -> None:
        """Count messages that came too late, and that no task takes."""
        self._host.counters.messages_late += count

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


OPEN = "~questions"
"""The key under which a node's state has the open questions: [peer, tag of the answer, until when it is wanted]."""
EXPIRED = "~expired-questions"
"""The same, by peer, of how many questions are over and have no answer yet."""
_ANSWER = "answer"


class Questions:
    """The questions that a node has asked and those that it answers; see :meth:`Node.ask`."""

    def __init__(self, node: Node, reception: Reception) -> None:
        self._node, self._reception = node, reception
        self._awaited: set[tuple[int, Prefix]] = set()

    @property
    def _open(self) -> list[list[Any]]:
        questions: list[list[Any]] = self._node.state.get(OPEN, [])
        return questions

    async def ask(
        self,
        peer: int,
        payload: Payload,
        tag: Prefix,
        timeout: float | None,
        keep_s: float | None,
        exact: bool,
    ) -> Payload:
        """Ask, and wait for the answer."""
        node, answer = self._node, (_ANSWER, *tag[1:])
        if (peer, answer) in self._awaited or any(each[:2] == [peer, list(answer)] for each in self._open):
            raise ValueError(
                f"node {node.rank}: a question to node {peer} whose answer has the tag {answer} is open; accepted: tags"
                " that differ after their first part, e.g. by the round"
            )
        # The answer to an earlier question of this tag is not the answer to this one.
        self._drop(lambda each: (each.source, each.tag) == (peer, answer) or not self._belongs(each))
        node.send(peer, payload, tag, exact=exact)
        if keep_s is not None:
            node.state.setdefault(OPEN, []).append([peer, list(answer), node.now() + keep_s])
        self._awaited.add((peer, answer))
        try:
            message = await self._reception.receive(answer, peer, timeout, exact=True)
        finally:
            self._awaited.discard((peer, answer))
        self._close(peer, answer)
        return message.payload

    async def serve(self, tag: Prefix, handler: Callable[[Message], Payload], exact: bool) -> None:
        """Answer questions until the node ends."""
        while True:
            question = await self._reception.receive(tag, None, None)
            # Nothing waits between the question and its answer: what the handler does is one step.
            self._node.send(question.source, handler(question), (_ANSWER, *question.tag[1:]), exact=exact)

    def drain(self) -> list[Payload]:
        """The answers that came after their :meth:`ask` had ended, as far as they are here."""
        here = self._reception.drain((_ANSWER,), None, newest=False, only=self._claim)
        self._drop(lambda each: (each.source, each.tag) not in self._awaited)
        now = self._node.now()
        for peer, answer, until in list(self._open):
            if until <= now:
                self._close(peer, tuple(answer))
                counts = self._node.state.setdefault(EXPIRED, {})
                counts[peer] = counts.get(peer, 0) + 1
        return [message.payload for message in here]

    async def next(self) -> Payload | None:
        """Wait for the answer to the oldest open question, or to the next one if it does not come in its time."""
        while self._open:
            peer, answer, until = self._open[0]
            timeout = max(until - self._node.now(), 0.0)
            try:
                message = await self._reception.receive(tuple(answer), peer, timeout, exact=True)
            except (TimeoutError, PeerLost):
                self._close(peer, tuple(answer))
                continue
            self._close(peer, tuple(answer))
            return message.payload
        return None

    def _belongs(self, answer: Message) -> bool:
        """Whether an answer is to a question of this node."""
        return (
            (answer.source, answer.tag) in self._awaited
            or any(each[:2] == [answer.source, list(answer.tag)] for each in self._open)
            or self._node.state.get(EXPIRED, {}).get(answer.source, 0) > 0
        )

    def _claim(self, answer: Message) -> bool:
        """Close the question that an answer belongs to, which nobody waits for; says whether there is one."""
        if (answer.source, answer.tag) in self._awaited or not self._belongs(answer):
            return False
        if not self._close(answer.source, answer.tag):
            self._node.state[EXPIRED][answer.source] -= 1
        return True

    def _close(self, peer: int, answer: Prefix) -> bool:
        """A question is not open any more; says whether it was."""
        left = [each for each in self._open if each[:2] != [peer, list(answer)]]
        was_open = len(left) < len(self._open)
        self._open[:] = left
        return was_open

    def _drop(self, unwanted: Callable[[Message], bool]) -> None:
        """Drop some of the answers that are here."""
        self._reception.late(len(self._reception.mailbox.take_all((_ANSWER,), None, unwanted)))
