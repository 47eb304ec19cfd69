"""What every fault has: the spells of time in which something is wrong, and what it does to computing and to links."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, NonNegativeInt

from gossamer.config.registry import Component
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.network import Path
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator

StartFrom = Literal["checkpoint", "initial", "neighbor"]
"""What a node begins with that comes (back): its newest checkpoint (its initial model where there is none), its initial
model, or the model of a node that is there."""

Nodes = Annotated[
    tuple[NonNegativeInt, ...]
    | Annotated[int, Field(ge=1, strict=True)]
    | Annotated[float, Field(gt=0, le=1, strict=True)]
    | Literal["all"],
    accepting("a list of ranks from 0, a number of nodes from 1, a fraction of them up to 1.0, or 'all'"),
]
"""Which nodes are meant: a list of ranks, a number or a fraction of them (drawn by the experiment's seed), or all."""


@dataclass(frozen=True, slots=True)
class Spell:
    """A time in which something is wrong.

    Args:
        from_s: when it begins, seconds of the engine's clock.
        to_s: when it is over; ``math.inf`` is never.
        kind: "crash", "leave" and "join" (a node is away), "freeze", or what else the record calls it.
        node: whose; None where it is not about one node.
        start_from: what a node that was away begins with.
        detail: what there is to say, for the record.
    """

    from_s: float
    to_s: float
    kind: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RoundCrash:
    """A crash of a node as soon as it has completed so many rounds."""

    node: int
    round: int
    after_s: float
    start_from: StartFrom


@dataclass(frozen=True, slots=True)
class Slowness:
    """A time in which a node's computations take ``factor`` times as long; with ``math.inf`` they stand still."""

    node: int
    from_s: float
    to_s: float
    factor: float


class Disturbance:
    """A time in which links do something else. A subclass says what, in one or both of its methods.

    Args:
        from_s: when it begins, seconds of the engine's clock.
        to_s: when it is over.
    """

    loses: ClassVar[bool] = True
    """Whether messages may be lost."""

    def __init__(self, from_s: float, to_s: float) -> None:
        self.from_s, self.to_s = from_s, to_s

    def path(self, source: int, to: int, path: Path) -> Path | None:
        """What becomes of the path from one node to another; None where there is none now."""
        return path

    def rates(self, rates: Float[np.ndarray, " links"]) -> Float[np.ndarray, " links"]:
        """What becomes of the links' rates; the argument must not be written."""
        return rates


class Fault(Component):
    """Something that goes wrong in a run, the same under every engine.

    A fault is a description; what it says, for so many nodes, is asked for with the methods below. Each takes the number
    of nodes, the experiment's seed, and the field of the experiment in which the fault stands, for errors and as the key
    of what is drawn.

    Attributes:
        freezes: whether its spells are those of nodes that stand still.
    """

    freezes: ClassVar[bool] = False

    @property
    def endless(self) -> bool:
        """Whether its spells never end to come; one that has endless :meth:`spells` says so."""
        return False

    @abstractmethod
    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        """When something is wrong, by ``from_s``; may be endless.

        Raises:
            BadInput: for a description that doesn't fit so many nodes; names the field.
        """

    def at_rounds(self, nodes: int, seed: int, field: str) -> Sequence[RoundCrash]:
        """Crashes whose time is not known, but their round."""
        return ()

    def slowness(self, nodes: int, seed: int, field: str) -> Sequence[Slowness]:
        """What becomes of the time that computing takes."""
        return ()

    def disturbances(self, nodes: int, seed: int, field: str) -> Sequence[Disturbance]:
        """What becomes of the links."""
        return ()

    def hit(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        """The nodes that may be away because of it, ascending."""
        return ()


def chosen(which: Nodes, nodes: int, seed: int, field: str) -> tuple[int, ...]:
    """The ranks that are meant, ascending.

    Args:
        which: what the experiment says.
        nodes: number of nodes.
        seed: the experiment's seed.
        field: the fault's field; its ``nodes`` are named in errors, and key the draw.

    Raises:
        BadInput: for more nodes than there are, or a rank that isn't there.
    """
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


def until(seconds: float | None) -> float:
    """The end of a window, where null is never."""
    return math.inf if seconds is None else seconds


def check_window(from_s: float, to_s: float | None) -> None:
    """Refuse a window that ends before it begins.

    Raises:
        ValueError: saying what is accepted.
    """
    if to_s is not None and to_s <= from_s:
        raise ValueError(f"to_s after from_s, {from_s:g}")
