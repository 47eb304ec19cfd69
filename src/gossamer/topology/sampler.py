"""Peer samplers: topologies that nobody knows as a whole, since every node finds its neighbours itself."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Payload
from gossamer.randomness import generator
from gossamer.topology.graph import Direction, Graph
from gossamer.topology.topology import Topology, located

TAG = "~sampler"
"""The first part of the tags of what samplers say to each other, and the key of a view in ``node.state``."""


@runtime_checkable
class Place(Protocol):
    """What a sampler needs of its node's engine; a :class:`~gossamer.node.host.Host` has it."""

    lost: set[int]

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> Any:
        """Queue a message."""

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        """Call after some seconds; gives something with ``cancel``."""


@runtime_checkable
class Member(Protocol):
    """What a sampler needs of its node."""

    rank: int
    size: int
    state: dict[str, Payload]


class SampledTopology(Topology):
    """A topology without a graph that anybody knows: at each node, a view of some others that changes with time.

    ``await node.neighbors(r, "out")`` is the node's view at that moment, or ``degree`` of it. In whose views a node is,
    it does not know: there are no in-neighbours, no mixing weights and no ``node.topology()``. Nodes keep their views up
    by messages of their own, which count, take time and can be lost as all others.

    A subclass gives each node its :class:`Sampler`.

    Args:
        view: entries of a view at most.
        every_s: seconds of the engine's clock between two exchanges that a node begins; the first falls anywhere in them.
        every_rounds: in place of ``every_s``: a node begins an exchange whenever it has completed so many rounds; 1 if
            neither is given.
        degree: so many of the view are drawn for each round; null is all of it.
        bootstrap: whom a node knows at first: its (out-)neighbours in this topology, at most ``view`` of them.

    Raises:
        BadInput: for both periods, a degree above the view, weights, or a bootstrap that changes.
    """

    random: ClassVar[bool] = True
    sampled: ClassVar[bool] = True

    view: int = Field(default=8, ge=1)
    every_s: float | None = Field(default=None, gt=0)
    degree: int | None = Field(default=None, ge=1)
    bootstrap: Topology = Field(default="ring", validate_default=True)

    @abstractmethod
    def sampler(self, seed: int, contacts: Sequence[int], member: Member, place: Place) -> Sampler:
        """A node's own part; arguments as of :class:`Sampler`."""

    @model_validator(mode="before")
    @classmethod
    def _one_period(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("every_s") is None:
            return {**data, "every_rounds": data.get("every_rounds") or 1}
        if data.get("every_rounds") is not None:
            raise BadInput(
                f"topology.every_s: {data['every_s']} with topology.every_rounds: {data['every_rounds']}; accepted: one"
                " of them"
            )
        return data

    @field_validator("bootstrap", mode="before")
    @classmethod
    def _build_bootstrap(cls, value: Any, info: Any) -> Any:  # a ValidationInfo: no run-time checks
        return build("topology", value, info.context, "topology.bootstrap")

    @field_serializer("bootstrap")
    def _bootstrap_spec(self, bootstrap: Topology) -> dict[str, Any]:
        return bootstrap.spec()

    @model_validator(mode="after")
    def _fits_a_view(self) -> SampledTopology:
        if (self.degree or 0) > self.view:
            raise BadInput(
                f"topology.degree: {self.degree} of a view of {self.view}; accepted: 1 to {self.view}"
            )
        if self.weights is not None:
            raise BadInput(
                f"topology.weights: {self.weights.name_of()} for {self.name_of()}, of which no node knows the graph;"
                " accepted: null"
            )
        if self.bootstrap.sampled or self.bootstrap.every_rounds is not None:
            raise BadInput(
                f"topology.bootstrap: {self.bootstrap.name_of()}, which changes; accepted: a graph that stays"
            )
        return self

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The views that nodes start with: an edge (i, j) where j is in the view of i.

        Raises:
            BadInput: for a view of more entries than there are others, or a bootstrap that can't be drawn.
        """
        if self.view >= nodes:
            raise BadInput(f"topology.view: {self.view} for {nodes} nodes; accepted: 1 to {nodes - 1}")
        with located("topology.bootstrap"):
            known = self.bootstrap.draw(nodes, rng, 0)
        edges = []
        for rank in range(nodes):
            others = known.neighbors(rank, "out")
            if len(others) > self.view:
                others = tuple(rng.choice(others, self.view, replace=False).tolist())
            edges += [(rank, other) for other in others]
        return Graph(nodes, edges, directed=True)

    def drawn_at(self, nodes: int, round: int) -> int:
        """Once: what comes after the start, nodes make up among themselves."""
        return 0


class Sampler(ABC):
    """One node's part: a view in the node's state, {rank: age}, and what keeps it up.

    What comes in waits until :meth:`run` takes it, one message after the other.

    Args:
        settings: the topology's parameters.
        seed: the experiment's seed.
        contacts: the ranks that the node knows at first.
        member: the node.
        place: the node's side of the engine.
    """

    def __init__(
        self, settings: SampledTopology, seed: int, contacts: Sequence[int], member: Member, place: Place
    ) -> None:
        self._settings, self._seed, self._contacts = settings, seed, contacts
        self._member, self._place = member, place
        self._due: asyncio.Queue[Message | None] = asyncio.Queue()  # None: an exchange is to begin

    @property
    def state(self) -> dict[str, Any]:
        """ "view": {rank: age}, and "exchanges": how many this node has begun."""
        # Looked up each time: a node that is resumed is given another.
        if TAG not in self._member.state:
            self._member.state[TAG] = {"view": dict.fromkeys(self._contacts, 0), "exchanges": 0}
        state: dict[str, Any] = self._member.state[TAG]
        return state

    @property
    def view(self) -> tuple[int, ...]:
        """The ranks that the node knows and that are not known to be dead, ascending."""
        return tuple(sorted(self.state["view"].keys() - self._place.lost))

    def neighbors(self, r: int, direction: Direction) -> tuple[int, ...]:
        """The view, or what is drawn from it for round ``r``, ascending.

        Raises:
            ValueError: for any direction but "out".
        """
        if direction != "out":
            raise ValueError(
                f"direction {direction!r} on the topology {self._settings.name_of()}, where a node knows whom it may send"
                ' to and no more; accepted: "out"'
            )
        view, degree = self.view, self._settings.degree
        if degree is None or degree >= len(view):
            return view
        return tuple(sorted(self.draw(view, degree, "neighbors", r)))

    def draw(self, ranks: Sequence[int], count: int, purpose: str, *counters: int) -> list[int]:
        """Some of these ranks (all, where they are fewer), in random order; the same key draws the same again."""
        rng = generator(self._seed, f"sampler/{purpose}", self._member.rank, *counters)
        drawn: list[int] = rng.permutation(np.asarray(ranks, dtype=np.int64))[:count].tolist()
        return drawn

    def send(self, to: int, payload: Payload, *tag: str | int) -> None:
        """Say something to another node's sampler."""
        self._place.send((to,), payload, (TAG, *tag))

    def deliver(self, message: Message) -> None:
        """Another node's sampler has said something."""
        self._due.put_nowait(message)

    def round_ended(self, rounds: int) -> None:
        """The node has completed so many rounds."""
        every = self._settings.every_rounds
        if every is not None and rounds % every == 0:
            self._due.put_nowait(None)

    async def run(self) -> None:
        """Keep the view up, for as long as the node lives."""
        every_s, timer = self._settings.every_s, None

        def wait(seconds: float) -> None:
            nonlocal timer
            timer = self._place.timer(seconds, tick, background=True)

        def tick() -> None:
            assert every_s is not None
            self._due.put_nowait(None)
            wait(every_s)

        if every_s is not None:
            wait(every_s * generator(self._seed, "sampler/phase", self._member.rank).random())
        try:
            while True:
                message = await self._due.get()
                if message is None:
                    self.begin()
                else:
                    self.hear(message)
        finally:
            if timer is not None:
                timer.cancel()

    @abstractmethod
    def begin(self) -> None:
        """Begin an exchange."""

    @abstractmethod
    def hear(self, message: Message) -> None:
        """Make of a message what it is worth: nothing in it can be relied on."""
