"""Cyclon: every node keeps a small view of the others, and exchanges parts of it with them.

Voulgaris, Gavidia and van Steen, "CYCLON: Inexpensive Membership Management for Unstructured P2P Overlays", Journal of
Network and Systems Management 2005, enhanced shuffling. A view has at most c entries (rank, age). Every period a node P

1. makes all its entries one older, takes the oldest, Q, out of its view, and draws l - 1 others;
2. sends Q these entries, and (P, 0);
3. Q draws l of its own entries, sends them back, and takes P's in; when they arrive, P takes Q's in.

Taking in: who is in the view already, and oneself, is passed over; the others fill free places first, then those of the
entries that were sent away. The views so become like those of a random graph, but in-degrees vary less.

A dead peer needs no timeout: who is asked has left the view, and comes back by an entry that somebody has of it. A view
that has run empty starts again from those that were known at first.

Beyond the paper, whoever a node takes for dead (``host.lost``; under ``simulate`` all nodes do so at once, after
``failures.detection_s``) is struck from its view, and not taken in; so views heal sooner than by exchanges alone. Nodes that
come join by their bootstrap, not by random walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field, model_validator

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Payload
from gossamer.topology.sampler import Member, Place, SampledTopology, Sampler

_OLDEST = 2**31
"""No entry grows as old as this."""


@register("topology", "cyclon")
class Cyclon(SampledTopology):
    """A decentralized peer sampler (Cyclon): no graph that anybody knows, but a view of some others at each node.

    Args:
        view: c, entries of a view at most.
        shuffle: l, entries that are sent at a time, that of the sender included.
        every_s: seconds of the engine's clock between two exchanges that a node begins; the first falls anywhere in them.
        every_rounds: in place of ``every_s``: a node begins an exchange whenever it has completed so many rounds; 1 if
            neither is given.
        degree: so many of the view are drawn for each round; null is all of it.
        bootstrap: whom a node knows at first: its (out-)neighbours in this topology, at most ``view`` of them.

    Raises:
        BadInput: for more entries to be sent than a view has; and as for any :class:`SampledTopology`.
    """

    shuffle: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _fits_a_shuffle(self) -> Cyclon:
        if self.shuffle > self.view:
            raise BadInput(
                f"topology.shuffle: {self.shuffle} of a view of {self.view}; accepted: 1 to {self.view}"
            )
        return self

    def sampler(self, seed: int, contacts: Sequence[int], member: Member, place: Place) -> Sampler:
        return _Shuffler(self, seed, contacts, member, place)


class _Shuffler(Sampler):
    """One node's part of Cyclon."""

    _settings: Cyclon

    def __init__(
        self, settings: Cyclon, seed: int, contacts: Sequence[int], member: Member, place: Place
    ) -> None:
        super().__init__(settings, seed, contacts, member, place)
        self._sent: dict[int, list[int]] = {}  # exchange -> whose entries were sent, while no answer is here

    def begin(self) -> None:
        """Ask the oldest entry of the view."""
        state, lost = self.state, self._place.lost
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
        if len(self._sent) > self._settings.view:  # no answer comes any more to the first of them
            del self._sent[min(self._sent)]
        self.send(oldest, [[self._member.rank, 0], *([rank, view[rank]] for rank in drawn)], "ask", number)

    def hear(self, message: Message) -> None:
        """Take entries in; a question is answered with others."""
        match message.tag[1:]:
            case ("answer", int(number)):
                self._take(message.payload, self._sent.pop(number, []))
            case ("ask", int(number)):
                view = self.state["view"]
                drawn = self.draw(sorted(view), self._settings.shuffle, "answer", message.source, number)
                self.send(message.source, [[rank, view[rank]] for rank in drawn], "answer", number)
                self._take(message.payload, drawn)

    def _take(self, payload: Payload, sent: Iterable[int]) -> None:
        """Put entries into free places, then into those of the entries that were sent away."""
        view = self.state["view"]
        leaving = [rank for rank in sent if rank in view]
        for rank, age in self._entries(payload):
            if rank in view or rank == self._member.rank or rank in self._place.lost:
                continue
            if len(view) >= self._settings.view:
                if not leaving:
                    return
                del view[leaving.pop(0)]
            view[rank] = age

    def _entries(self, payload: Payload) -> list[tuple[int, int]]:
        """What a peer sent, as far as it is entries."""
        found = []
        for item in payload[: self._settings.shuffle] if isinstance(payload, list) else ():
            match item:
                case [int(rank), int(age)] if 0 <= rank < self._member.size and 0 <= age < _OLDEST:
                    found.append((int(rank), int(age)))
        return found
