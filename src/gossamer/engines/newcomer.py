"""How a node begins that comes later: with a neighbour's model, and among others that wait for each other.

All of it is messages on the links that the nodes have: the same under every engine. Where no supervisor tells nodes in which
round they meet, the newcomer asks::

    newcomer -> other    MEET anew     which round are you in? (from the next one on, what you send arrives)
    other -> newcomer    AT round      that one; I don't wait for you in it, nor in those before
    newcomer -> other    FROM round    I go on with this one: don't wait for me before
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from statistics import median_high
from typing import Any

from gossamer.messages import Message, Model
from gossamer.node import Node, PeerLost
from gossamer.wrapper import NodeWrapper

ASK = ("gossamer/newcomer", "ask")
GIVE = ("gossamer/newcomer", "give")
MEET = ("gossamer/newcomer", "meet")
AT = ("gossamer/newcomer", "at")
FROM = ("gossamer/newcomer", "from")


class Hospitality(NodeWrapper):
    """A node's readiness to give its model to a newcomer that asks for it, and to wait for it from some round on."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Answer a newcomer; anything else is the algorithm's."""
        source, said = message.source, message.payload
        if message.tag == ASK:
            node.send(source, node.model if len(node.buffers) else node.parameters, tag=GIVE)
        elif message.tag == MEET:
            node.peer_found(source, node.round + 1, anew=said is True)
            node.send(source, node.round, tag=AT)
        elif message.tag == FROM:
            if isinstance(said, int):
                node.peer_found(source, max(said, node.first_of(source)), anew=False)
        else:
            return message
        return None


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
    node: Node,
    timeout_s: float | None,
    meet: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """The protocol of a node that comes later.

    Args:
        run: what it does from then on.
        node: the newcomer.
        timeout_s: seconds that a neighbour has to give its model, before the next one is asked; None asks nobody.
        meet: what is to be done right before, where nobody has told it which round to begin with.
    """
    if timeout_s is not None:
        await _begin_as_neighbor(node, timeout_s)
    if meet is not None:
        await meet()
    await run(node)


async def come_back(node: Node, others: Iterable[int], timeout_s: float) -> None:
    """Go on among others in the round that most of them are in, and no earlier than in the node's own; see :func:`meeting`.

    Args:
        node: who comes, or comes back, and is not in a round yet.
        others: those that may wait for it, or it for them.
        timeout_s: seconds that they have to answer; who does not is waited for as ever.
    """
    asked = list(others)
    rounds = await _rounds(node, asked, timeout_s, anew=True)
    first, together = meeting(rounds, node.round)
    _agree(node, asked, first, together)
    node.rejoin(first)
    node.catch_up()


async def meet_again(node: Node, other: int, timeout_s: float) -> None:
    """Messages between two nodes were lost, and are not any more: neither waits for what the other sent meanwhile.

    Args:
        node: one of them, in one of its rounds.
        other: the other one.
        timeout_s: seconds that it has to answer.
    """
    rounds = await _rounds(node, [other], timeout_s, anew=False)
    first = node.round + 1
    _agree(node, [other], first, {rank: max(first, round + 1) for rank, round in rounds.items()})


async def _rounds(node: Node, asked: Sequence[int], timeout_s: float, *, anew: bool) -> dict[int, int]:
    """Which rounds others are in, of those that say so in time."""
    rounds, end_s = {}, node.now() + timeout_s
    for rank in asked:
        node.send(rank, anew, tag=MEET)
    for rank in asked:
        try:
            answer = await node.receive(AT, source=rank, timeout=max(end_s - node.now(), 0.0))
        except (TimeoutError, PeerLost):
            continue
        if isinstance(answer.payload, int):
            rounds[rank] = answer.payload
    return rounds


def _agree(node: Node, asked: Iterable[int], first: int, together: Mapping[int, int]) -> None:
    for rank, since in together.items():
        node.peer_found(rank, max(since, node.first_of(rank)), anew=False)
    for rank in asked:
        node.send(rank, first, tag=FROM)


async def _begin_as_neighbor(node: Node, timeout_s: float) -> None:
    """Take over the model of the first neighbour that gives it; without one the node keeps its own."""
    for peer in await node.neighbors(direction="in" if node.view is None else "out"):
        node.send(peer, None, tag=ASK)
        try:
            given = (await node.receive(GIVE, source=peer, timeout=timeout_s)).payload
        except (TimeoutError, PeerLost):
            continue
        if isinstance(given, Model):
            node.model = given
        else:
            node.parameters = given
        return
