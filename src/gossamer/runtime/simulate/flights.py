"""What is under way between the nodes of a simulation, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gossamer.messages.tags import Message
from gossamer.runtime.simulate.transfer import Transfer


class Flights:
    """What was sent and has neither arrived nor been lost or taken back, for checkpoints; numbers the messages of a pair.

    Args:
        nodes: their number.

    Attributes:
        sent: by sender and receiver, how many messages were sent.
        landed: called with sender, receiver and number of each message whose way is over.
    """

    def __init__(self, nodes: int) -> None:
        self.sent: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.landed: Callable[[int, int, int], None] = lambda source, to, number: None
        self._flying: list[dict[tuple[int, int], tuple[Message, Transfer | int]]] = [{} for _ in range(nodes)]

    def numbered(self, message: Message, to: int) -> Message:
        """The next message of its pair."""
        sent = self.sent[message.source]
        number = sent.get(to, 0)
        sent[to] = number + 1
        return replace(message, number=number)

    def take_off(self, message: Message, to: int, due: Transfer | int) -> None:
        """A message is on its way; it is due at an instant (nanoseconds), or when its transfer is over."""
        self._flying[message.source][to, message.number] = message, due

    def land(self, message: Message, to: int) -> None:
        """It has arrived, or won't."""
        if self._flying[message.source].pop((to, message.number), None) is not None:
            self.landed(message.source, to, message.number)

    def before(self, sent: Mapping[int, Mapping[int, int]]) -> set[tuple[int, int, int]]:
        """Sender, receiver and number of those under way that belong to so many first messages of each pair."""
        return {
            (source, to, number)
            for source, flying in enumerate(self._flying)
            for to, number in flying
            if number < sent[source].get(to, 0)
        }

    def under_way(self) -> Iterator[tuple[Message, int, int | None]]:
        """All that will arrive: message, receiver, and the instant, as far as that is known (nanoseconds)."""
        for flying in self._flying:
            for (to, _), (message, due) in flying.items():
                if isinstance(due, int):
                    yield message, to, due
                elif not due.lost:
                    yield message, to, due.due_ns

    def leaving(self, rank: int) -> tuple[int, int]:
        """How many of a node's messages have not left yet, and their bytes."""
        transfers = [due for _, due in self._flying[rank].values() if isinstance(due, Transfer)]
        sizes = [transfer.size for transfer in transfers if not transfer.counted]
        return len(sizes), sum(sizes)
