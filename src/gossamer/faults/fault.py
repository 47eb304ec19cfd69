"""The base of faults: intervals of time, and what happens in them to nodes, computations and links."""

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
    """An interval of time in which something is wrong.

    Args:
        from_s: its start, seconds of the engine's clock.
        to_s: its end; ``math.inf`` is never.
        kind: "crash", "leave" and "join" (a node is away), "freeze", or another name for the record.
        node: the node that it affects; None if it is not about one node.
        start_from: the model with which a node that was away starts.
        detail: a description, for the record.
    """

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


class LinkFault:
    """An interval in which links behave differently. A subclass overrides one or both methods.

    Args:
        from_s: its start, seconds of the engine's clock.
        to_s: its end.
    """

    loses: ClassVar[bool] = True
    """Whether messages may be lost."""

    def __init__(self, from_s: float, to_s: float) -> None:
        self.from_s, self.to_s = from_s, to_s

    def path(self, source: int, to: int, path: Path) -> Path | None:
        """The path from one node to another under this fault; None if there is none."""
        return path

    def rates(self, rates: Float[np.ndarray, " links"]) -> Float[np.ndarray, " links"]:
        """The rates of the links under this fault; must not write to its argument."""
        return rates


class Fault(Component):
    """Something that goes wrong in a run, the same under both engines.

    A fault is a description; the methods below apply it to a number of nodes. Each takes the number of nodes, the
    experiment's seed, and the fault's field in the experiment, which is named in errors and keys the draws.

    Attributes:
        freezes: whether its intervals are those of frozen nodes.
    """

    freezes: ClassVar[bool] = False

    @property
    def endless(self) -> bool:
        """Whether :meth:`intervals` is infinite."""
        return False

    @abstractmethod
    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        """The intervals in which something is wrong, by ``from_s``; may be infinite.

        Raises:
            BadInput: for a description that does not fit the number of nodes; names the field.
        """

    def at_rounds(self, nodes: int, seed: int, field: str) -> Sequence[RoundCrash]:
        """Crashes that are given by a round instead of a time."""
        return ()

    def slowdowns(self, nodes: int, seed: int, field: str) -> Sequence[SlowdownWindow]:
        """When computations are slower."""
        return ()

    def link_faults(self, nodes: int, seed: int, field: str) -> Sequence[LinkFault]:
        """When links behave differently."""
        return ()

    def affected(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        """The nodes that may be away because of this fault, ascending."""
        return ()


def select_ranks(which: Nodes, nodes: int, seed: int, field: str) -> tuple[int, ...]:
    """The ranks of the nodes that a fault affects, ascending.

    Args:
        which: the fault's ``nodes``.
        nodes: number of nodes.
        seed: the experiment's seed.
        field: the fault's field in the experiment.

    Raises:
        BadInput: for more nodes than there are, or a rank out of range.
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


def end_of(to_s: float | None) -> float:
    """The end of an interval: null is never."""
    return math.inf if to_s is None else to_s


def check_order(from_s: float, to_s: float | None) -> None:
    """Check that an interval does not end before it starts.

    Raises:
        ValueError: with what is accepted.
    """
    if to_s is not None and to_s <= from_s:
        raise ValueError(f"to_s after from_s, {from_s:g}")
