"""Wrappers change what a node sends or receives: attacks, privacy noise, research on messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gossamer.config.registry import Component
from gossamer.messages.tags import Message, Payload

if TYPE_CHECKING:
    from gossamer.node.node import Node


class NodeWrapper(Component):
    """Base of wrappers. An experiment lists them under ``wrappers``; messages pass out through them in order,
    and in through them in reversed order. They see messages as they are on the wire, encoded by the experiment's codec.

    A wrapper is frozen like an algorithm; what must outlive a call belongs in ``node.state``.
    """

    _state_goes_to: ClassVar[str] = "node.state, which checkpoints keep"

    async def before_round(self, node: Node, r: int) -> None:
        """Awaited before each round of ``node.rounds()``; it may send and receive messages, e.g. to agree on keys."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        """Gives the payload that is sent instead, once for each message. The receivers of a broadcast share a payload
        that is returned as it is; a changed one has to be a new object."""
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Gives the message that is put into the mailbox instead; None drops it."""
        return message
