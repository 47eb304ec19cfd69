"""The questions that a node asks its peers, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gossamer.messages.tags import Message, Payload, PrivateTag, is_private
from gossamer.node.expectations import Prefix
from gossamer.node.mailbox import Mailbox, PeerLost
from gossamer.node.waiting import NONE

if TYPE_CHECKING:
    from gossamer.node.node import Node

OPEN = "~questions"
"""Key in a node's state for the questions whose late answers it wants: [peer, tag of the answer, time until
which :meth:`Questions.next` waits]."""
MAX_OPEN = 256
"""Maximum number of unanswered questions that are kept. Beyond it, the oldest are forgotten, since their answers were
lost."""
_ANSWER = "answer"


class Unanswered(Exception):
    """The question gets no answer."""


def _answer_to(tag: Prefix) -> Prefix:
    """The tag of the answer to a question. Answers to private questions are private too."""
    return PrivateTag((tag[0], _ANSWER, *tag[1:])) if is_private(tag) else (_ANSWER, *tag[1:])


class Questions:
    """The questions of one node; see :meth:`Node.ask`."""

    __slots__ = ("_awaited", "_mailbox", "_node")

    def __init__(self, node: Node, mailbox: Mailbox) -> None:
        self._node, self._mailbox = node, mailbox
        self._awaited: frozenset[tuple[int, Prefix]] = NONE

    async def ask(
        self,
        peer: int,
        payload: Payload,
        tag: Prefix,
        timeout: float | None,
        keep_s: float | None,
        *,
        exact: bool,
    ) -> Message:
        """Ask a question, and wait for the answer."""
        node, answer = self._node, _answer_to(tag)
        if (peer, answer) in self._awaited or self._find(peer, answer):
            raise ValueError(
                f"node {node.rank}: a question to node {peer} with the answer tag {answer} is still open; accepted: tags"
                " that differ after their first part, e.g. by the round"
            )
        self._drop_unwanted()
        node.send(peer, payload, tag, exact=exact)
        if keep_s is not None:
            open_questions = node.state.setdefault(OPEN, [])
            open_questions.append([peer, list(answer), node.now() + keep_s])
            del open_questions[:-MAX_OPEN]
        self._awaited |= {(peer, answer)}
        try:
            message = await self._mailbox.receive(answer, peer, timeout, exact=True)
        finally:
            self._awaited -= {(peer, answer)}
        self._close(peer, answer)
        return message

    async def serve(self, tag: Prefix, handler: Callable[[Message], Payload], exact: bool) -> None:
        """Answer questions until the node ends."""
        while True:
            question = await self._mailbox.receive(tag, None, None)
            # There is no await between the question and its answer, so the handler is atomic.
            try:
                answer = handler(question)
            except Unanswered:
                continue
            self._node.send(question.source, answer, _answer_to(question.tag), exact=exact)

    def drain(self) -> list[Message]:
        """The answers that have arrived after their :meth:`ask` ended."""
        late = self._mailbox.drain((_ANSWER,), None, newest=False, only=self._is_kept)
        for message in late:
            self._close(message.source, message.tag)
        self._drop_unwanted()
        return late

    async def next(self) -> Message | None:
        """Wait for the answer to the oldest open question, or to the next one if it does not arrive in
        time."""
        while questions := self._node.state.get(OPEN, []):
            peer, answer, deadline = questions[0]
            timeout = max(deadline - self._node.now(), 0.0)
            message = None
            with suppress(TimeoutError, PeerLost):
                message = await self._mailbox.receive(tuple(answer), peer, timeout, exact=True)
            self._close(peer, tuple(answer))
            if message is not None:
                return message
        return None

    def _find(self, peer: int, answer: Prefix) -> list[list[Any]]:
        key = [peer, list(answer)]
        return [question for question in self._node.state.get(OPEN, []) if question[:2] == key]

    def _close(self, peer: int, answer: Prefix) -> None:
        """Close a question: its answer is not wanted any more."""
        for question in self._find(peer, answer):
            self._node.state[OPEN].remove(question)

    def _is_kept(self, answer: Message) -> bool:
        """Whether an answer is wanted although no task waits for it now."""
        key = answer.source, answer.tag
        return key not in self._awaited and bool(self._find(*key))

    def _drop_unwanted(self) -> None:
        """Drop the answers in the mailbox that belong to no open question."""

        def unwanted(answer: Message) -> bool:
            return (answer.source, answer.tag) not in self._awaited and not self._is_kept(answer)

        self._mailbox.late(self._mailbox.take_all((_ANSWER,), None, unwanted))
