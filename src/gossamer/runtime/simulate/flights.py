"""The messages in flight, as checkpoints of a simulation need them."""

from __future__ import annotations

from msgspec import structs

from gossamer.messages.tags import Message


class Flights:
    """Numbers the messages of each pair of nodes, and knows which of them are in flight.

    Attributes:
        counts: by sender, the number of messages sent to each receiver.
        messages: by sender, the messages in flight by receiver and number."""

    def __init__(self, nodes: int) -> None:
        self.counts: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.messages: list[dict[tuple[int, int], Message]] = [{} for _ in range(nodes)]

    def sent(self, message: Message, to: int) -> Message:
        """Register a message in flight. Returns it with its number."""
        counts = self.counts[message.source]
        number = counts.get(to, 0)
        counts[to] = number + 1
        self.messages[message.source][to, number] = message = structs.replace(message, number=number)
        return message

    def landed(self, message: Message, to: int) -> None:
        """A message is no longer in flight: it has arrived, is lost or was cancelled."""
        self.messages[message.source].pop((to, message.number), None)
