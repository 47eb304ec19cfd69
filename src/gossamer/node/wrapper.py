"""Wrappers change what a node sends or receives: attacks, privacy noise, secure aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gossamer.config.registry import Component
from gossamer.messages.tags import Message, Payload

if TYPE_CHECKING:
    from gossamer.node import Node


class NodeWrapper(Component):
    """Base of wrappers. An experiment lists them under ``wrappers``; messages pass out through them in order,
    and in reversed.

    A wrapper is frozen like an algorithm; what must outlive a call belongs in ``node.state``.
    """

    _state_goes_to: ClassVar[str] = "node.state, which checkpoints keep"

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        """What is sent instead of ``payload``."""
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        """What is put into the mailbox instead of ``message``; None drops it."""
        return message
