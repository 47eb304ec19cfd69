"""The wrappers of what is on the wire (:class:`~gossamer.NodeWrapper`)."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.messages import freeze
from gossamer.messages.tags import Message, Payload, Sending
from gossamer.node import Node, NodeWrapper
from gossamer.node.expectations import Form
from gossamer.node.middleware import Layer
from gossamer.randomness import draws_of


class WireNode(Layer):
    """A node whose encoded messages pass the experiment's wrappers: outgoing ones in order, incoming ones in reverse."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        wrappers: Sequence[NodeWrapper] = self._setup.experiment.wrappers
        self._wrappers = [(f"wrappers.{k}", wrapper) for k, wrapper in enumerate(wrappers)]

    async def begin_round(self, r: int) -> None:
        for place, wrapper in self._wrappers:
            with draws_of(place):
                await wrapper.before_round(self._runtime.node, r)

    def _send(
        self,
        ranks: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
        form: Form | None,
    ) -> list[Sending]:
        payload = freeze(payload, self._host.is_stored)
        sendings: list[Sending] = []
        for rank in ranks:
            changed = payload
            for place, wrapper in self._wrappers:
                with draws_of(place):
                    changed = wrapper.outgoing(self._runtime.node, rank, changed, tag)
            # This layer is the innermost one. A payload that is returned unchanged stays one object for all receivers.
            if changed is payload:
                sendings += self._host.send((rank,), payload, tag, form)
            else:
                sendings += self._host.send((rank,), freeze(changed, self._host.is_stored), tag)
        return sendings

    def arrived(self, message: Message) -> Message | None:
        for place, wrapper in reversed(self._wrappers):
            with draws_of(place):
                changed = wrapper.incoming(self._runtime.node, message)
            if changed is None:
                self._host.counters.messages_refused += 1
                return None
            message = changed
        return message
