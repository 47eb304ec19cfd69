"""The questions that a node asks its peers, and those that it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.messages.tags import Message, Payload
from gossamer.node.expectations import Prefix
from gossamer.node.mailbox import Mailbox, PeerLost

if TYPE_CHECKING:
    from gossamer.node.node import Node

OPEN = "~questions"
"""The key under which a node's state has the open questions: [peer, tag of the answer, until when it is wanted]."""
EXPIRED = "~expired-questions"
"""The same, by peer, of how many questions are over and have no answer yet."""
_ANSWER = "answer"


class Questions:
    """The questions of one node; see :meth:`Node.ask`."""

    def __init__(self, node: Node, mailbox: Mailbox) -> None:
        self._node, self._mailbox = node, mailbox
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
        if (peer, answer) in self._awaited or self._is_open(peer, answer):
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
            message = await self._mailbox.receive(answer, peer, timeout, exact=True)
        finally:
            self._awaited.discard((peer, answer))
        self._close(peer, answer)
        return message.payload

    async def serve(self, tag: Prefix, handler: Callable[[Message], Payload], exact: bool) -> None:
        """Answer questions until the node ends."""
        while True:
            question = await self._mailbox.receive(tag, None, None)
            # Nothing waits between the question and its answer: what the handler does is one step.
            self._node.send(question.source, handler(question), (_ANSWER, *question.tag[1:]), exact=exact)

    def drain(self) -> list[Payload]:
        """The answers that came after their :meth:`ask` had ended, as far as they are here."""
        here = self._mailbox.drain((_ANSWER,), None, newest=False, only=self._claim)
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
            peer, answer, until = self._open[0][0], tuple(self._open[0][1]), self._open[0][2]
            timeout = max(until - self._node.now(), 0.0)
            try:
                message = await self._mailbox.receive(answer, peer, timeout, exact=True)
            except (TimeoutError, PeerLost):
                self._close(peer, answer)
                continue
            self._close(peer, answer)
            return message.payload
        return None

    def _is_open(self, peer: int, answer: Prefix) -> bool:
        return any(each[:2] == [peer, list(answer)] for each in self._open)

    def _belongs(self, answer: Message) -> bool:
        """Whether an answer is to a question of this node."""
        return (
            (answer.source, answer.tag) in self._awaited
            or self._is_open(answer.source, answer.tag)
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
        self._mailbox.late(len(self._mailbox.take_all((_ANSWER,), None, unwanted)))
