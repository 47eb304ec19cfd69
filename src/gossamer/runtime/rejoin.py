"""How a node begins that comes later: with a neighbour's model, and among others that wait for each other.

The engine tells nodes in which round they meet (:func:`meeting`). The newcomer asks a neighbour for its model by a message on
the links that the nodes have: the same under every engine. It passes beneath the wrappers, and the algorithm does not see
it. An answer repeats the number of its question, so that a late answer is not taken for that to another question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from statistics import median_high
from typing import Any

from torch import Tensor

from gossamer.messages import freeze
from gossamer.messages.tags import Message, Model, Payload, Sending
from gossamer.node import Node, NodeRuntime
from gossamer.node.host import Host

_TAG = "gossamer/newcomer"


class Question:
    """What a node has asked another one.

    Args:
        rank: the other one.
        expects: the tag of the answer.

    Attributes:
        open: whether an answer is still awaited.
        answer: what it was; None where none came.
    """

    def __init__(self, rank: int, expects: tuple[str | int, ...]) -> None:
        self.rank, self.expects = rank, expects
        self.open = True
        self.answer: Any = None
        self.woken: asyncio.Future[None] | None = None

    def close(self, answer: Any = None) -> None:
        """Nothing more is awaited."""
        self.open, self.answer = False, answer
        self.wake()

    def wake(self) -> None:
        """Let who waits look again."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class Hospitality:
    """A node's readiness to give its model to a newcomer that asks for it, and to wait for it from some round on; and
    what it asks others itself.

    Args:
        node: whose it is.
        host: the node's side of the engine.

    Attributes:
        asks: whom the node asks for the model that it is to begin with, and since when; None where it doesn't.
    """

    def __init__(self, node: NodeRuntime, host: Host) -> None:
        self._node, self._host = node, host
        self.asks: tuple[int, float] | None = None
        self._asked = 0
        self._questions: dict[int, Question] = {}  # the last one to each rank
        self._answers: dict[tuple[int, str], Sending] = {}  # the last one of each kind to each rank

    # --- answering

    def takes(self, message: Message) -> bool:
        """Take in a message, unless it is the algorithm's."""
        if message.tag[:1] != (_TAG,):
            return False
        self._hear(message.source, message.tag, message.payload)
        return True

    def _hear(self, source: int, tag: tuple[str | int, ...], said: Any) -> None:
        node = self._node
        match tag[1:]:
            case "ask", int(number):
                self._answer(source, node.model, "give", number)
            case "give", int():
                question = self._questions.get(source)
                if question is not None and question.open and question.expects == tag:
                    question.close(said)
                else:
                    self._host.counters.messages_late += 1
            case _:  # it makes no sense, and is nobody's
                pass

    def _answer(self, to: int, payload: Payload, what: str, number: int) -> None:
        """Answer, in place of what has not left yet: who asks all the time must not fill this node's memory."""
        before = self._answers.get((to, what))
        if before is not None:
            before.cancel()
        self._answers[to, what] = self.say(to, payload, what, number)

    # --- asking

    def say(self, to: int, payload: Payload, *what: str | int) -> Sending:
        """Send a message to another node's hospitality."""
        return self._host.send((to,), freeze(payload, self._host.is_stored), (_TAG, *what))[0]

    def question(self, rank: int, answer: str) -> Question:
        """A new question to another node, in place of the last one: nothing else is awaited of it any more."""
        if (before := self._questions.get(rank)) is not None and before.open:
            before.close()
        self._asked += 1
        question = self._questions[rank] = Question(rank, (_TAG, answer, self._asked))
        return question

    async def ask(self, question: Question, what: str, payload: Payload, timeout_s: float) -> None:
        """Ask, perhaps again, and wait as :meth:`wait` does."""
        self.say(question.rank, payload, what, question.expects[-1])
        await self.wait(question, timeout_s)

    async def wait(self, question: Question, timeout_s: float) -> None:
        """Wait until a question that was asked is answered, or it's clear that it won't be, or for so many seconds."""
        if question.rank in self._host.lost:
            question.close(question.answer)
        if not question.open:
            return
        question.woken = asyncio.get_running_loop().create_future()
        timer = self._host.timer(timeout_s, question.wake)
        try:
            await question.woken
        finally:
            timer.cancel()

    def peer_lost(self) -> None:
        """The node has lost a peer, which answers nothing."""
        for rank in self._host.lost & self._questions.keys():
            self._questions[rank].close(self._questions[rank].answer)


def _hospitality(node: NodeRuntime) -> Hospitality:
    assert isinstance(node.companion, Hospitality), "the setup is not hospitable"
    return node.companion


def meeting(rounds: Mapping[int, int], least: int) -> tuple[int, dict[int, int]]:
    """Where a node goes on that comes, or comes back, among others that wait for each other: in the round that most
    of them are in; and from when on it and each of them wait for each other, which is a round that neither has begun.

    Args:
        rounds: which round each of the others is in.
        least: no earlier round than this one.
    """
    first = max(median_high(rounds.values()), least) if rounds else least
    return first, {rank: max(first, round + 1) for rank, round in sorted(rounds.items())}


async def newcomer(
    run: Callable[[Node], Coroutine[Any, Any, None]],
    node: NodeRuntime,
    timeout_s: float | None,
) -> None:
    """The protocol of a node that comes later.

    Args:
        run: what it does from then on.
        node: the newcomer.
        timeout_s: seconds that a neighbour has to give its model, before the next one is asked; None asks nobody.
    """
    if timeout_s is not None:
        await _begin_as_neighbor(node, timeout_s)
    await run(node.node)


async def _begin_as_neighbor(node: NodeRuntime, timeout_s: float) -> None:
    """Take over the model of the first neighbour that gives one that fits; without one the node keeps its own."""
    hospitality = _hospitality(node)
    for peer in await node.node.neighbors(direction="in" if node.node.view is None else "out"):
        question = hospitality.question(peer, "give")
        hospitality.asks = peer, node.node.now()
        await hospitality.ask(question, "ask", None, timeout_s)
        hospitality.asks = None
        given = question.answer
        question.close()
        if _fits(given, node.model):
            node.node.model = given
            return


def _fits(given: Any, own: Model) -> bool:
    """Whether this may replace a node's own model, as far as shapes say."""
    return isinstance(given, Model) and all(
        isinstance(one, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
        for one, other in zip(given, own, strict=True)
    )
