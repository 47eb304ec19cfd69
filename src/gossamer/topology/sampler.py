"""Peer samplers: every node finds its neighbours itself, and no node knows the whole graph."""

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
"""The first part of the tags of samplers' messages, and the key of the view in ``node.state``."""


@runtime_checkable
class SamplerHost(Protocol):
    """What a sampler needs of its node's engine: a part of :class:`~gossamer.node.host.Host`."""

    lost: set[int]

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> Any:
        """Queue a message."""

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Any:
        """Call after some seconds; returns an object with ``cancel``."""


@runtime_checkable
class SamplerNode(Protocol):
    """What a sampler needs of its node."""

    rank: int
    size: int
    state: dict[str, Payload]


class SampledTopology(Topology):
    """A topology whose nodes each keep a view: some other nodes, which change with time.

    ``await node.neighbors(r, "out")`` is the node's current view, or ``degree`` nodes drawn from it. A node does not know
    in whose views it is, so there are no in-neighbours, no mixing weights and no ``node.topology()``. Samplers exchange
    messages to update their views; these count, take time and can be lost like all others.

    A subclass creates the :class:`Sampler` of each node.

    Args:
        view: maximum number of entries of a view.
        every_s: seconds of the engine's clock between two exchanges that a node starts; the phase of the first is random.
        every_rounds: in place of ``every_s``: a node starts an exchange after this number of rounds; 1 if
            neither is given.
        degree: number of nodes drawn from the view for each round; null is all of it.
        bootstrap: the topology whose (out-)neighbours a node knows at first, at most ``view`` of them.

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
    def sampler(self, seed: int, contacts: Sequence[int], node: SamplerNode, host: SamplerHost) -> Sampler:
        """The sampler of a node; arguments as for :class:`Sampler`."""

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
    def _build_bootstrap(cls, value: Any, info: Any) -> Any:  # info is a ValidationInfo
        return build("topology", value, info.context, "topology.bootstrap")

    @field_serializer("bootstrap")
    def _bootstrap_spec(self, bootstrap: Topology) -> dict[str, Any]:
        return bootstrap.spec()

    @model_validator(mode="after")
    def _check_view(self) -> SampledTopology:
        if (self.degree or 0) > self.view:
            raise BadInput(
                f"topology.degree: {self.degree} of a view of {self.view}; accepted: 1 to {self.view}"
            )
        if self.weights is not None:
            raise BadInput(
                f"topology.weights: {self.weights.name_of()} for {self.name_of()}, which has no graph; accepted: null"
            )
        if self.bootstrap.sampled or self.bootstrap.every_rounds is not None:
            raise BadInput(
                f"topology.bootstrap: {self.bootstrap.name_of()}, which changes; accepted: one fixed graph"
            )
        return self

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The first views: an edge (i, j) if j is in the view of i.

        Raises:
            BadInput: for a view of more entries than there are other nodes, or a bootstrap that can't be drawn.
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
        return 0


class Sampler(ABC):
    """The sampler of one node. Its view, {rank: age}, is in the node's state.

    Messages and exchanges that are due wait in a queue until :meth:`run` handles them, one after the other.

    Args:
        settings: the topology's parameters.
        seed: the experiment's seed.
        contacts: the ranks that the node knows at first.
        node: the node.
        host: the node's engine.
    """

    def __init__(
        self,
        settings: SampledTopology,
        seed: int,
        contacts: Sequence[int],
        node: SamplerNode,
        host: SamplerHost,
    ) -> None:
        self._settings, self._seed, self._contacts = settings, seed, contacts
        self._node, self._host = node, host
        self._due: asyncio.Queue[Message | None] = asyncio.Queue()  # None: start an exchange

    @property
    def state(self) -> dict[str, Any]:
        """ "view": {rank: age}, and "exchanges": the number that this node has started."""
        # Looked up each time, because a resumed node gets another state.
        if TAG not in self._node.state:
            self._node.state[TAG] = {"view": dict.fromkeys(self._contacts, 0), "exchanges": 0}
        state: dict[str, Any] = self._node.state[TAG]
        return state

    @property
    def view(self) -> tuple[int, ...]:
        """The ranks in the view that are not known to be dead, ascending."""
        return tuple(sorted(self.state["view"].keys() - self._host.lost))

    def neighbors(self, r: int, direction: Direction) -> tuple[int, ...]:
        """The view, or the nodes drawn from it for round ``r``, ascending.

        Raises:
            ValueError: for any direction but "out".
        """
        if direction != "out":
            raise ValueError(
                f"direction {direction!r} on the topology {self._settings.name_of()}, where a node does not know its"
                ' in-neighbours; accepted: "out"'
            )
        view, degree = self.view, self._settings.degree
        if degree is None or degree >= len(view):
            return view
        return tuple(sorted(self.draw(view, degree, "neighbors", r)))

    def draw(self, ranks: Sequence[int], count: int, purpose: str, *counters: int) -> list[int]:
        """At most ``count`` of these ranks, in random order; the same key draws the same ranks."""
        rng = generator(self._seed, f"sampler/{purpose}", self._node.rank, *counters)
        drawn: list[int] = rng.permutation(np.asarray(ranks, dtype=np.int64))[:count].tolist()
        return drawn

    def send(self, to: int, payload: Payload, *tag: str | int) -> None:
        """Send a message to the sampler of another node."""
        self._host.send((to,), payload, (TAG, *tag))

    def deliver(self, message: Message) -> None:
        """Queue a message from the sampler of another node."""
        self._due.put_nowait(message)

    def round_ended(self, rounds: int) -> None:
        """The node has completed this number of rounds."""
        every = self._settings.every_rounds
        if every is not None and rounds % every == 0:
            self._due.put_nowait(None)

    async def run(self) -> None:
        """Handle messages and start exchanges until cancelled."""
        every_s, timer = self._settings.every_s, None

        def wait(seconds: float) -> None:
            nonlocal timer
            timer = self._host.timer(seconds, tick, background=True)

        def tick() -> None:
            assert every_s is not None
            self._due.put_nowait(None)
            wait(every_s)

        if every_s is not None:
            wait(every_s * generator(self._seed, "sampler/phase", self._node.rank).random())
        try:
            while True:
                message = await self._due.get()
                if message is None:
                    self.begin()
                else:
                    self.receive(message)
        finally:
            if timer is not None:
                timer.cancel()

    @abstractmethod
    def begin(self) -> None:
        """Start an exchange."""

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Handle a message; nothing in it can be trusted."""
