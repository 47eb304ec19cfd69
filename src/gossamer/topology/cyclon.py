"""Cyclon, a peer sampler: every node keeps a small view of the other nodes, and exchanges parts of it with
them.

Voulgaris, Gavidia and van Steen, "CYCLON: Inexpensive Membership Management for Unstructured P2P Overlays", Journal of
Network and Systems Management 2005, enhanced shuffling. A view has at most c entries (rank, age). In each period of a node P,

1. P increases the age of all its entries by one, removes the oldest, Q, and draws l - 1 others;
2. P sends Q these entries and (P, 0);
3. Q draws l of its own entries, sends them back, and merges P's entries; P merges Q's entries when they arrive.

Merging ignores the node's own entry and entries already in the view. The others fill free slots first, then
the slots of the entries that were sent. P removes Q before it contacts Q, so a dead peer needs no timeout. In
addition to the paper, a peer known to be dead (``host.lost``) is removed at once and not merged
again. An empty view restarts from the initial contacts, and so do nodes that join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from gossamer.config.ranges import PositiveSeconds
from gossamer.config.registry import ComponentField, register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Payload
from gossamer.randomness import generator
from gossamer.topology.graph import Direction, Graph
from gossamer.topology.sampler import PeerSampler
from gossamer.topology.topology import Topology, located

TAG = "~sampler"  # the first part of the tags of samplers' messages, and the key of the view in node.state
_MAX_AGE = 2**31  # above the age of any valid entry


@register("topology", "cyclon")
class Cyclon(Topology):
    """A decentralized peer sampler (Cyclon): each node has a changing view of some other nodes.

    ``await node.neighbors(r, "out")`` is the node's current view, or ``degree`` nodes drawn from it. A node
    does not know which views contain it, so there are no in-neighbours, no mixing weights and no
    ``node.topology()``. The samplers' messages are counted, take time and can be lost like any other message.

    With ``every_rounds`` instead of ``every_s``, a node starts an exchange after every ``every_rounds``
    rounds (default 1)."""

    sampled: ClassVar[bool] = True
    view: int = Field(default=8, ge=1)  # c, maximum number of entries in a view
    # Seconds of the engine's clock between two exchanges that a node starts; the phase of the first is random.
    every_s: PositiveSeconds | None = None
    # Number of nodes drawn from the view for each round; null is all of it.
    degree: int | None = Field(default=None, ge=1)
    # The topology whose (out-)neighbours are a node's initial contacts, at most ``view`` of them.
    bootstrap: Annotated[Topology, ComponentField("topology", "topology.bootstrap")] = Field(
        default="ring", validate_default=True
    )
    shuffle: int = Field(default=4, ge=1)  # l, number of entries in a message, including the sender's own

    @model_validator(mode="before")
    @classmethod
    def _one_period(cls, data: Any) -> Any:
        if data.get("every_s") is None:
            return {**data, "every_rounds": data.get("every_rounds") or 1}
        if data.get("every_rounds") is not None:
            problem = f"{data['every_s']} with topology.every_rounds: {data['every_rounds']}"
            raise BadInput(f"topology.every_s: {problem}; accepted: one of them")
        return data

    @model_validator(mode="after")
    def _fits(self) -> Cyclon:
        for field, count in (("shuffle", self.shuffle), ("degree", self.degree or 0)):
            if count > self.view:
                raise BadInput(f"topology.{field}: {count} for view {self.view}; accepted: 1 to {self.view}")
        if self.weights is not None:
            raise BadInput(f"topology.weights: {self.weights.name_of()} for cyclon; accepted: null")
        bootstrap = self.bootstrap
        if bootstrap.sampled or bootstrap.every_rounds is not None:
            raise BadInput(f"topology.bootstrap: {bootstrap.name_of()}; accepted: one that does not change")
        return self

    @property
    def random(self) -> bool:
        return True

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The first views: an edge (i, j) if j is in the view of i."""
        if self.view >= nodes:
            if nodes < 2:
                raise BadInput(f"nodes: {nodes} for the topology cyclon; accepted: at least 2")
            raise BadInput(
                f"topology.view: {self.view} for {nodes} nodes; accepted: 1 to {nodes - 1}, or more nodes"
            )
        with located("topology.bootstrap"):
            contacts = self.bootstrap.draw(nodes, rng, 0)
        edges = []
        for rank in range(nodes):
            others = contacts.neighbors(rank, "out")
            if len(others) > self.view:
                others = tuple(rng.choice(others, self.view, replace=False).tolist())
            edges += [(rank, other) for other in others]
        return Graph(nodes, edges, directed=True)

    def drawn_at(self, nodes: int, round: int) -> int:
        return 0

    def sampler(self, seed: int, contacts: Sequence[int], node: Any, host: Any) -> CyclonSampler:
        return CyclonSampler(self, seed, contacts, node, host)


class CyclonSampler(PeerSampler):
    """Cyclon at one node, with its initial contacts. The view, {rank: age}, is in the node's state. Messages
    and due exchanges wait in a queue for :meth:`run`."""

    def __init__(self, settings: Cyclon, seed: int, contacts: Sequence[int], node: Any, host: Any) -> None:
        self._settings, self._seed, self._contacts = settings, seed, contacts
        self._node, self._host = node, host
        self._due: deque[Message | None] = deque()  # None: start an exchange
        self._woken: Any = None  # the slot for which :meth:`run` waits
        self._timer: Any = None
        self._sent: dict[int, list[int]] = {}  # exchange without a reply -> the ranks of the entries sent

    @property
    def state(self) -> dict[str, Any]:
        """``view``, {rank: age}, and ``exchanges``, the number of exchanges that this node has started."""
        # Looked up each time, because a resumed node gets a new state.
        state: dict[str, Any] = self._node.state.setdefault(
            TAG, {"view": dict.fromkeys(self._contacts, 0), "exchanges": 0}
        )
        return state

    @property
    def view(self) -> tuple[int, ...]:
        """The ranks in the view that are not known to be dead, ascending."""
        return tuple(sorted(self.state["view"].keys() - self._host.lost))

    def neighbors(self, r: int, direction: Direction) -> tuple[int, ...]:
        """The view, or the nodes drawn from it for round ``r``, ascending; ValueError for any direction but "out"."""
        if direction != "out":
            problem = f"direction {direction!r} on the topology {self._settings.name_of()}"
            raise ValueError(f'{problem}, where a node does not know its in-neighbours; accepted: "out"')
        view, degree = self.view, self._settings.degree
        if degree is None or degree >= len(view):
            return view
        return tuple(sorted(self._draw(view, degree, "neighbors", r)))

    def deliver(self, message: Message) -> None:
        """Queue a message from the sampler of another node."""
        self._note(message)

    def round_ended(self, rounds: int) -> None:
        """Note that the node has completed this number of rounds."""
        every = self._settings.every_rounds
        if every is not None and rounds % every == 0:
            self._note(None)

    def _note(self, due: Message | None) -> None:
        self._due.append(due)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def run(self) -> None:
        """Handle messages and start exchanges until cancelled."""
        every_s = self._settings.every_s
        if every_s is not None:
            self._wait(every_s * generator(self._seed, "sampler/phase", self._node.rank).random())
        try:
            while True:
                while self._due:
                    message = self._due.popleft()
                    if message is None:
                        self.begin()
                    else:
                        self.receive(message)
                self._woken = self._host.slot()
                await self._woken
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = self._host.timer(seconds, self._tick, background=True)

    def _tick(self) -> None:
        self._note(None)
        self._wait(self._settings.every_s or 0.0)

    def begin(self) -> None:
        """Start an exchange."""
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
        drawn = self._draw(sorted(view), self._settings.shuffle - 1, "ask", number)
        self._sent[number] = drawn
        if len(self._sent) > self._settings.view:  # the oldest one will no longer be answered
            del self._sent[min(self._sent)]
        self._send(oldest, [[self._node.rank, 0], *([rank, view[rank]] for rank in drawn)], "ask", number)

    def receive(self, message: Message) -> None:
        """Handle a message. Its content is untrusted."""
        self._host.counters.messages_taken += 1
        match message.tag[1:]:
            case ("answer", int(number)):
                self._merge(message.payload, self._sent.pop(number, []))
            case ("ask", int(number)):
                view = self.state["view"]
                drawn = self._draw(sorted(view), self._settings.shuffle, "answer", message.source, number)
                self._send(message.source, [[rank, view[rank]] for rank in drawn], "answer", number)
                self._merge(message.payload, drawn)

    def _merge(self, payload: Payload, sent: Iterable[int]) -> None:
        """Put entries into free slots first, then into the slots of the entries that were sent."""
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
        entries = []
        for item in payload[: self._settings.shuffle] if isinstance(payload, list) else ():
            match item:
                case [int(rank), int(age)] if 0 <= rank < self._node.size and 0 <= age < _MAX_AGE:
                    entries.append((int(rank), int(age)))
        return entries

    def _draw(self, ranks: Sequence[int], count: int, purpose: str, *counters: int) -> list[int]:
        """At most ``count`` of these ranks, in random order. The same key always draws the same ranks."""
        rng = generator(self._seed, f"sampler/{purpose}", self._node.rank, *counters)
        drawn: list[int] = rng.permutation(np.asarray(ranks, dtype=np.int64))[:count].tolist()
        return drawn

    def _send(self, to: int, payload: Payload, *tag: str | int) -> None:
        self._host.send((to,), payload, (TAG, *tag))
