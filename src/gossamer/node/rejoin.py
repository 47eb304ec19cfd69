"""The start of a node that joins late: with a neighbour's model, in a round in which the others can meet it.

The engine determines the round in which nodes meet (:func:`rejoin_round`). The newcomer requests a neighbour's
model with an ordinary message, under every engine. The message bypasses the wrappers, and the algorithm does
not see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.learning.parameters import is_finite
from gossamer.messages import freeze
from gossamer.messages.tags import Message, Model, Payload, Sending
from gossamer.node.mailbox import PeerLost

if TYPE_CHECKING:
    from gossamer.node.node import Node
    from gossamer.node.runtime import NodeRuntime

_TAG = "gossamer/newcomer"


class NewcomerModels:
    """Gives a node's model to newcomers that request it, and sends the node's own requests when it is a
    newcomer."""

    def __init__(self, node: NodeRuntime) -> None:
        self._node, self._host = node, node.host
        self._asked: tuple[int, int] | None = None  # the peer that was asked, and the request's number
        self._given: dict[int, Sending] = {}  # the last model sent to each rank

    def handle(self, message: Message) -> bool:
        """Handle a message unless it is the algorithm's. Returns whether it was handled."""
        if message.tag[:1] != (_TAG,):
            return False
        source = message.source
        match message.tag[1:]:
            case "ask", int(number):
                # Replace a model that has not left yet: a peer that asks repeatedly must not fill this node's
                # memory.
                if (previous := self._given.get(source)) is not None:
                    previous.cancel()
                self._given[source] = self._send(source, self._node.model, "give", number)
                self._host.counters.messages_taken += 1
            case "give", int(number) if self._asked == (source, number):
                self._node.mailbox.deliver(message)
            case "give", _:
                self._host.counters.messages_late += 1
            case _:
                self._host.counters.messages_refused += 1
        return True

    async def ask(self, peer: int, number: int, timeout_s: float) -> Any:
        """Request a peer's model. None if nothing arrived in time, or the peer is dead."""
        self._asked = peer, number
        self._send(peer, None, "ask", number)
        try:
            given = await self._node.mailbox.take((_TAG, "give", number), peer, timeout_s)
            self._host.counters.messages_taken += 1
            return given.payload
        except (TimeoutError, PeerLost):
            return None
        finally:
            self._asked = None

    def _send(self, to: int, payload: Payload, *subject: str | int) -> Sending:
        return self._host.send((to,), freeze(payload, self._host.is_stored), (_TAG, *subject))[0]


def earliest_round(completed: int, last: int | None, *, again: bool) -> int:
    """The earliest round in which a node can take part after it has completed some. If it takes part ``again``, it
    does not repeat the round in which it went away, because others may have its messages of that round. ``last`` is the
    number of rounds of the run, if that is fixed: a node whose rounds are over does not begin another one."""
    earliest = completed + again
    return earliest if last is None else min(earliest, last)


def first_round(in_round: Mapping[int, int], minimum: int) -> int:
    """The higher median of the nodes' rounds, given the number of nodes in each round, but at least
    ``minimum``."""
    nodes, middle = 0, sum(in_round.values()) // 2
    for round, count in sorted(in_round.items()):
        nodes += count
        if nodes > middle:
            return max(round, minimum)
    return minimum


def rejoin_round(rounds: Mapping[int, int], minimum: int) -> tuple[int, dict[int, int]]:
    """The round in which a node that joins or returns continues, among nodes that wait for each other: the
    higher median of their rounds, but at least ``minimum``. Also, for each other node, the round from which the
    two wait for each other; neither has begun it."""
    first = first_round(Counter(rounds.values()), minimum)
    return first, {rank: max(first, round + 1) for rank, round in sorted(rounds.items())}


async def run_newcomer(
    run: Callable[[Node], Coroutine[Any, Any, None]], node: NodeRuntime, timeout_s: float | None
) -> None:
    """The protocol of a node that joins late. It takes the model of the first neighbour that sends a valid
    one before a timeout; otherwise it keeps its own."""
    if timeout_s is not None:
        assert node.newcomer_models is not None, "the setup has no newcomers"
        peers = await node.node.neighbors(direction="in" if node.node.view is None else "out")
        for number, peer in enumerate(peers, 1):
            model = await node.newcomer_models.ask(peer, number, timeout_s)
            if _fits(model, node.model):
                node.node.model = model
                break
    await run(node.node)


def _fits(model: Any, own: Model) -> bool:
    """Whether a model can replace a node's own: it has the same shapes and is finite."""
    return isinstance(model, Model) and all(
        isinstance(x, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype) and is_finite(x)
        for x, y in zip(model, own, strict=True)
    )
