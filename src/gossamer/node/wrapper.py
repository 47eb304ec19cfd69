"""Wrappers, which change a node's messages as they are on the wire."""

from __future__ import annotations

from typing import ClassVar

from gossamer.config.registry import Component
from gossamer.messages.tags import Message, Payload
from gossamer.node.node import Node


class NodeWrapper(Component):
    """Base class of wrappers, which change the messages that a node sends or receives, for research on what is on the wire.
    (What acts on models, such as an attack or screening, is a :class:`~gossamer.Middleware`, which sees them decoded.)

    An experiment lists them under ``wrappers``. Outgoing messages pass through them in order, incoming ones
    in reverse order. They see messages as sent on the wire, encoded by the experiment's codec. A wrapper is
    frozen like an algorithm; keep what must outlive a call in ``node.state``."""

    _state_goes_to: ClassVar[str] = "node.state, which checkpoints keep"

    async def before_round(self, node: Node, r: int) -> None:
        """Awaited before each round of ``node.rounds()``. It may send and receive messages, e.g. to agree on
        keys."""

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        """Return the payload to send instead. Called once for each message. The receivers of a broadcast
        share a payload that is returned unchanged; a changed payload has to be a new object."""
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        """Return the message to put into the mailbox instead; None drops it."""
        return message
