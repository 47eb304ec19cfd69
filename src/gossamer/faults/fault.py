"""The base of faults, and what they do to nodes, computations and links. docs/faults.md describes all of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import Component
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.network import Path, SlowdownWindow
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator

StartFrom = Literal["checkpoint", "initial", "neighbor"]
"""The model with which a node starts when it joins or returns: its newest checkpoint (without one, its initial model), its
initial model, or the model of a neighbour."""

Nodes = Annotated[
    tuple[NonNegativeInt, ...]
    | Annotated[int, Field(ge=1, strict=True)]
    | Annotated[float, Field(gt=0, le=1, strict=True)]
    | Literal["all"],
    accepting("a list of ranks from 0, a number of nodes from 1, a fraction of them up to 1.0, or 'all'"),
]
"""Which nodes a fault affects: a list of ranks, a number or a fraction of them (drawn by the experiment's seed), or all."""


@dataclass(frozen=True, slots=True)
class FaultInterval:
    """An interval of the engine's clock in which something is wrong; an end of ``math.inf`` is never. ``kind`` is "crash",
    "leave" or "join" (a node is away), "freeze", or another name for the record; ``node`` is None if it is not about one
    node; ``start_from`` is the model with which a node that was away starts; ``detail`` is for the record."""

    from_s: float
    to_s: float
    kind: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RoundCrash:
    """A crash of a node as soon as it has completed a number of rounds; it restarts ``after_s`` seconds later."""

    node: int
    round: int
    after_s: float
    start_from: StartFrom


@dataclass(frozen=True, slots=True)
class LinkFault:
    """An interval in which links behave differently: ``path`` gives the path from one node to another in place of the usual
    one (None if there is none), ``stopped`` are numbers of links that carry nothing, and ``loses`` says whether messages
    may be lost."""

    from_s: float
    to_s: float
    path: Callable[[int, int, Path], Path | None] = lambda source, to, path: path
    stopped: tuple[int, ...] = ()
    loses: bool = True


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a fault does: its intervals by ``from_s`` (infinitely many if ``endless``), the nodes that may be away, crashes
    that are given by a round instead of a time, and when computations are slower and links behave differently."""

    intervals: Iterable[FaultInterval]
    affected: tuple[int, ...] = ()
    at_rounds: Sequence[RoundCrash] = ()
    slowdowns: Sequence[SlowdownWindow] = ()
    link_faults: Sequence[LinkFault] = ()
    endless: bool = False


class Fault(Component):
    """Something that goes wrong in a run, the same under both engines."""

    @abstractmethod
    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        """What it does to ``nodes`` nodes. The fault's ``field`` in the experiment is named in errors, and keys the draws
        with the seed; a description that does not fit the number of nodes is bad input."""


class TemporaryFault(Fault):
    """A fault with a start and an end (null is never), seconds of the engine's clock."""

    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_order(self) -> TemporaryFault:
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"to_s after from_s, {self.from_s:g}")
        return self

    @property
    def end_s(self) -> float:
        """When it ends; ``math.inf`` is never."""
        return math.inf if self.to_s is None else self.to_s


def select_ranks(which: Nodes, nodes: int, seed: int, field: str) -> tuple[int, ...]:
    """The ranks of the nodes that a fault affects, ascending; arguments and errors as for :meth:`Fault.plan`."""
    if which == "all":
        return tuple(range(nodes))
    if isinstance(which, tuple):
        check_ranks(which, nodes, f"{field}.nodes")
        return tuple(sorted(set(which)))
    assert not isinstance(which, str)
    count = which if isinstance(which, int) else int(which * nodes + 0.5)
    if count > nodes:
        raise BadInput(f"{field}.nodes: {count} of {nodes} nodes; accepted: 1 to {nodes}")
    drawn = generator(seed, f"{field}.nodes").choice(nodes, count, replace=False)
    return tuple(sorted(int(rank) for rank in drawn))
