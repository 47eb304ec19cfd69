"""Secure aggregation: models leave masked, and a node learns only their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.learning.mixing import Missing, check_arguments
from gossamer.messages.tags import Message, Payload, Sending
from gossamer.node import Node
from gossamer.node.expectations import Form
from gossamer.node.middleware import Layer
from gossamer.secure.protocol import MaskingProtocol


class MaskedNode(Layer):
    """A node that takes part in the protocol of secure aggregation."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._protocol = MaskingProtocol(self._setup, node, self._host)

    async def begin_round(self, r: int) -> None:
        await self._protocol.begin_round(r)

    def _send(
        self,
        ranks: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
        form: Form | None,
    ) -> list[Sending]:
        masked = self._protocol.mask(ranks, payload)
        return [
            sending
            for rank, words in masked.items()
            for sending in self.node._send((rank,), words, tag, exact, None)
        ]

    def arrived(self, message: Message) -> Message | None:
        if not self._protocol.handle(message):
            return message
        self._host.counters.messages_taken += 1
        return None

    async def mix(
        self,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
    ) -> None:
        self._own.check()
        check_arguments("mix", inbox, weights)
        inbox, weights = await self._protocol.unmask(inbox, weights)
        await self.node.mix(inbox, weights, self_weight=self_weight, missing=missing)

    async def combine(
        self,
        own: Any,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
        aggregate: bool = False,
        differences: bool = False,
    ) -> Any:
        if aggregate:
            self._own.check()
            check_arguments("combine", inbox, weights, own)
            inbox, weights = await self._protocol.unmask(inbox, weights)
        return await self.node.combine(
            own,
            inbox,
            weights,
            self_weight=self_weight,
            missing=missing,
            aggregate=aggregate,
            differences=differences,
        )
