"""Questions between nodes, and the answers that come late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gossamer.messages.tags import Message, Payload
from gossamer.node.reception import PeerLost, Reception

if TYPE_CHECKING:
    from gossamer.node.node import Node

KEY = "~questions"
"""Where a node's state has the open questions: [peer, tag of the answer, until when it is wanted]."""
_ANSWER = "answer"


class Questions:
    """The questions that a node has asked and those that it answers; see :meth:`Node.ask`.

    Args:
        node: the node.
        reception: where answers come in.
    """

    def __init__(self, node: Node, reception: Reception) -> None:
        self._node, self._reception = node, reception
        self._awaited: set[tuple[int, tuple[str | int, ...]]] = set()

    async def ask(
        self,
        peer: int,
        payload: Payload,
        tag: tuple[str | int, ...],
        timeout: float | None,
        keep_s: float | None,
        exact: bool,
    ) -> Payload:
        """Ask, and wait for the answer."""
        node, answer = self._node, (_ANSWER, *tag[1:])
        question = [peer, list(answer), 0.0 if keep_s is None else node.now() + keep_s]
        open_ones = node.state.setdefault(KEY, [])
        if (peer, answer) in self._awaited or any(other[:2] == question[:2] for other in open_ones):
            raise ValueError(
                f"node {node.rank}: a question to node {peer} whose answer has the tag {answer} is open; accepted: tags"
                " that differ after their first part, e.g. by the round"
            )
        self._reception.mailbox.reopen(
            answer, peer
        )  # an earlier question of this tag may be lost, and have no answer
        node.send(peer, payload, tag, exact=exact)
        if keep_s is not None:
            open_ones.append(question)
        self._awaited.add((peer, answer))
        try:
            message = await self._reception.receive(answer, peer, timeout)
        except BaseException:
            if keep_s is None:
                self._reception.mailbox.close(answer, [peer])
            raise
        finally:
            self._awaited.discard((peer, answer))
        self._close(message)
        return message.payload

    async def serve(
        self, tag: tuple[str | int, ...], handler: Callable[[Message], Payload], exact: bool
    ) -> None:
        """Answer questions for ever."""
        while True:
            question = await self._reception.receive(tag, None, None)
            # Nothing waits between the question and its answer: what the handler does is one step.
            self._node.send(question.source, handler(question), (_ANSWER, *question.tag[1:]), exact=exact)

    def drain(self) -> list[Payload]:
        """The answers that came after their time, as far as they are here; questions whose time is over are closed."""
        late = self._reception.drain((_ANSWER,), None, newest=False, but=self._awaited)
        for message in late:
            self._close(message)
        open_ones, now = self._node.state.get(KEY, []), self._node.now()
        open_ones[:] = [question for question in open_ones if question[2] > now]
        return [message.payload for message in late]

    async def next(self) -> Payload | None:
        """Wait for the answer to the oldest open question, or to the next one if it does not come in its time."""
        node = self._node
        while open_ones := node.state.get(KEY, []):
            peer, answer, until = open_ones[0]
            with suppress(TimeoutError, PeerLost):
                message = await self._reception.receive(tuple(answer), peer, max(until - node.now(), 0.0))
                self._close(message)
                return message.payload
            open_ones[:] = [question for question in open_ones if question[:2] != [peer, answer]]
        return None

    def _close(self, message: Message) -> None:
        asked = [message.source, list(message.tag)]
        open_ones = self._node.state.get(KEY, [])
        open_ones[:] = [question for question in open_ones if question[:2] != asked]
