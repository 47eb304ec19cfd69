"""Cyclon: every node keeps a small view of the others, and exchanges parts of it with them.

Voulgaris, Gavidia and van Steen, "CYCLON: Inexpensive Membership Management for Unstructured P2P Overlays", Journal of
Network and Systems Management 2005, enhanced shuffling. A view has at most c entries (rank, age). Every period a node P

1. increases the age of all its entries by one, removes the oldest, Q, and draws l - 1 others;
2. sends Q these entries and (P, 0).
3. Q draws l of its own entries, sends them back, and merges P's entries; P merges Q's entries when they arrive.

Merging ignores entries that are in the view already and the node's own; the others fill free slots first, then those of
the entries that were sent away. The views become like those of a random graph, but in-degrees vary less.

A dead peer needs no timeout: the node that is asked has left the view, and returns with an entry from some other node. An
empty view starts again from the first contacts.

In addition to the paper, a peer that a node considers dead (``host.lost``; under ``simulate`` all nodes notice at once,
after ``failures.detection_s``) is removed from its view and not merged again, so views recover sooner than by exchanges
alone. Nodes that join start from their bootstrap contacts, not by random walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field, model_validator

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Payload
from gossamer.topology.sampler import SampledTopology, Sampler, SamplerHost, SamplerNode

_MAX_AGE = 2**31
"""No entry gets this old."""


@register("topology", "cyclon")
class Cyclon(SampledTopology):
    """A decentralized peer sampler (Cyclon): each node has a view of some others.

    Args:
        shuffle: l, number of entries sent at a time, including the sender's own.
        view: c; as the rest, see :class:`SampledTopology`.

    Raises:
        BadInput: for a shuffle above the view; and as for any :class:`SampledTopology`.
    """

    shuffle: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _check_shuffle(self) -> Cyclon:
        if self.shuffle > self.view:
            raise BadInput(
                f"topology.shuffle: {self.shuffle} of a view of {self.view}; accepted: 1 to {self.view}"
            )
        return self

    def sampler(self, seed: int, contacts: Sequence[int], node: SamplerNode, host: SamplerHost) -> Sampler:
        return _CyclonSampler(self, seed, contacts, node, host)


class _CyclonSampler(Sampler):
    """Cyclon at one node."""

    _settings: Cyclon

    def __init__(
        self, settings: Cyclon, seed: int, contacts: Sequence[int], node: SamplerNode, host: SamplerHost
    ) -> None:
        super().__init__(settings, seed, contacts, node, host)
        self._sent: dict[int, list[int]] = {}  # exchange without an answer -> the ranks of the entries sent

    def begin(self) -> None:
        state, lost = self.state, self._host.lost
        view = {rank: age + 1 for rank, age in state["view"].items() if rank not in lost}
        view = view or {rank: 0 for rank in self._contacts if rank not in lost}
        state["view"] = view
        if not view:
            return
        number = state["exchanges"]
        state["exchanges"] += 1
        oldest = max(view, key=lambda rank: (view[rank], -rank))
        del view[oldest]
        drawn = self.draw(sorted(view), self._settings.shuffle - 1, "ask", number)
        self._sent[number] = drawn
        if len(self._sent) > self._settings.view:  # the first of them will not be answered any more
            del self._sent[min(self._sent)]
        self.send(oldest, [[self._node.rank, 0], *([rank, view[rank]] for rank in drawn)], "ask", number)

    def receive(self, message: Message) -> None:
        match message.tag[1:]:
            case ("answer", int(number)):
                self._merge(message.payload, self._sent.pop(number, []))
            case ("ask", int(number)):
                view = self.state["view"]
                drawn = self.draw(sorted(view), self._settings.shuffle, "answer", message.source, number)
                self.send(message.source, [[rank, view[rank]] for rank in drawn], "answer", number)
                self._merge(message.payload, drawn)

    def _merge(self, payload: Payload, sent: Iterable[int]) -> None:
        """Put entries into free slots, then into those of the entries that were sent away."""
        view = self.state["view"]
        leaving = [rank for rank in sent if rank in view]
        for rank, age in self._entries(payload):
            if rank in view or rank == self._node.rank or rank in self._host.lost:
                continue
            if len(view) >= self._settings.view:
                if not leaving:
                    return
                del view[leaving.pop(0)]
            view[rank] = age

    def _entries(self, payload: Payload) -> list[tuple[int, int]]:
        """The valid entries in a peer's message."""
        found = []
        for item in payload[: self._settings.shuffle] if isinstance(payload, list) else ():
            match item:
                case [int(rank), int(age)] if 0 <= rank < self._node.size and 0 <= age < _MAX_AGE:
                    found.append((int(rank), int(age)))
        return found
