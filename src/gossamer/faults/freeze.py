"""Nodes that stand still for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveFloat

from gossamer.config.registry import register
from gossamer.faults.fault import Disturbance, Fault, Nodes, Spell, chosen


@register("fault", "freeze")
class Freeze(Fault):
    """Nodes stand still, as a stopped process or a sleeping computer does, and go on where they were.

    One that stands still for longer than ``failures.detection_s`` is taken for dead by its peers, until it goes on.

    Args:
        nodes: who: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when, seconds of the engine's clock.
        for_s: how long.
    """

    freezes: ClassVar[bool] = True

    nodes: Nodes
    at_s: NonNegativeFloat
    for_s: PositiveFloat

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        to_s = self.at_s + self.for_s
        return iter(
            [Spell(self.at_s, to_s, "freeze", rank) for rank in chosen(self.nodes, nodes, seed, field)]
        )


class Standstill(Disturbance):
    """Nothing leaves or reaches some nodes meanwhile; nothing is lost.

    Args:
        ranks: the nodes.
        nodes: number of all nodes.
        from_s: when it begins.
        to_s: when it is over.
    """

    loses = False

    def __init__(self, ranks: Sequence[int], nodes: int, from_s: float, to_s: float) -> None:
        super().__init__(from_s, to_s)
        self._links = [*ranks, *(nodes + rank for rank in ranks)]

    def rates(self, rates: Float[np.ndarray, " links"]) -> Float[np.ndarray, " links"]:
        stopped = rates.copy()
        stopped[self._links] = 0.0
        return stopped
