"""The start of a node that joins late with a neighbour's model.

The newcomer requests the model with an ordinary message, under every engine. The message bypasses the wrappers, and the
algorithm does not see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from gossamer.learning.parameters import is_finite
from gossamer.messages import freeze
from gossamer.messages.tags import Message, Model, Payload, Sending
from gossamer.node import Node, NodeRuntime, PeerLost
from gossamer.node.middleware import Layer

_TAG = "~newcomer"


class WelcomingNode(Layer):
    """A node that gives its model to newcomers that request it, and that sends its own requests when it is a newcomer."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._runtime.services[_TAG] = self._handle
        self._asked: tuple[int, int] | None = None  # the peer that was asked, and the request's number
        self._given: dict[int, Sending] = {}  # the last model sent to each rank

    def _handle(self, message: Message) -> None:
        source = message.source
        match message.tag[1:]:
            case "ask", int(number):
                # Replace a model that has not left yet: a peer that asks repeatedly must not fill this node's
                # memory.
                if (previous := self._given.get(source)) is not None:
                    previous.cancel()
                self._given[source] = self._tell(source, self.model, "give", number)
                self._host.counters.messages_taken += 1
            case "give", int(number) if self._asked == (source, number):
                self._mailbox.deliver(message)
            case "give", _:
                self._host.counters.messages_late += 1
            case _:
                self._host.counters.messages_refused += 1

    async def model_of(self, peer: int, number: int, timeout_s: float) -> Any:
        """Request a peer's model. None if nothing arrived in time, or the peer is dead."""
        self._asked = peer, number
        self._tell(peer, None, "ask", number)
        try:
            given = await self._mailbox.take((_TAG, "give", number), peer, timeout_s)
            self._host.counters.messages_taken += 1
            return given.payload
        except (TimeoutError, PeerLost):
            return None
        finally:
            self._asked = None

    def _tell(self, to: int, payload: Payload, *subject: str | int) -> Sending:
        return self._host.send((to,), freeze(payload, self._host.is_stored), (_TAG, *subject))[0]


async def run_newcomer(
    run: Callable[[Node], Coroutine[Any, Any, None]], node: NodeRuntime, timeout_s: float | None
) -> None:
    """The protocol of a node that joins late. It takes the model of the first neighbour that sends a valid
    one before a timeout; otherwise it keeps its own."""
    if timeout_s is not None:
        newcomer = node.layer(WelcomingNode)
        peers = await node.node.neighbors(direction="in" if node.node.view is None else "out")
        for number, peer in enumerate(peers, 1):
            model = await newcomer.model_of(peer, number, timeout_s)
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
