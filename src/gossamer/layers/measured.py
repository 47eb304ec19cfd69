"""The messages that a node takes, kept for the measures of a round."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from gossamer.messages.tags import Message, Tag
from gossamer.node import Inbox, Node
from gossamer.node.middleware import Layer


class MeasuredNode(Layer):
    """A node whose messages of the last completed round are kept.

    Attributes:
        taken: those messages."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.taken: list[Message] = []
        self._of_this_round: list[Message] = []

    async def begin_round(self, r: int) -> None:
        self._of_this_round = []

    def round_counted(self, rounds: int) -> None:
        self.taken, self._of_this_round = self._of_this_round, []

    async def gather(
        self, peers: Iterable[int], tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> Inbox:
        inbox = await super().gather(peers, tag, at_least=at_least, timeout=timeout)
        self._keep(sorted(inbox.messages, key=attrgetter("source")))  # in the order of the inbox
        return inbox

    async def receive(
        self,
        tag: Tag | None = None,
        source: int | None = None,
        timeout: float | None = None,
        *,
        keep_as: Tag | None = None,
    ) -> Message:
        message = await super().receive(tag, source, timeout, keep_as=keep_as)
        if keep_as is None:
            self._keep((message,))
        return message

    def drain(
        self, tag: Tag | None = None, source: int | None = None, *, newest: bool = False
    ) -> list[Message]:
        messages = super().drain(tag, source, newest=newest)
        self._keep(messages)
        return messages

    def _keep(self, messages: Iterable[Message]) -> None:
        if self._runtime.counts_rounds:  # otherwise they would be kept for ever
            self._of_this_round += messages
