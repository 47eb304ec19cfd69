"""How a node begins that comes later: with a neighbour's model, if the experiment says so.

It is a message there and one back, on the links that the nodes have: the same under every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from statistics import median_high
from typing import Any

from gossamer.messages import Message, Model
from gossamer.node import Node, PeerLost
from gossamer.wrapper import NodeWrapper

ASK = ("gossamer/newcomer", "ask")
GIVE = ("gossamer/newcomer", "give")


class Hospitality(NodeWrapper):
    """A node's readiness to give its model to a newcomer that asks for it."""

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Answer a newcomer; anything else is the algorithm's."""
        if message.tag != ASK:
            return message
        node.send(message.source, node.model if len(node.buffers) else node.parameters, tag=GIVE)
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
    run: Callable[[Node], Coroutine[Any, Any, None]], node: Node, timeout_s: float | None
) -> None:
    """The protocol of a node that comes later.

    Args:
        run: what it does from then on.
        node: the newcomer.
        timeout_s: seconds that a neighbour has to give its model, before the next one is asked; None asks nobody.
    """
    if timeout_s is not None:
        await _begin_as_neighbor(node, timeout_s)
    await run(node)


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
