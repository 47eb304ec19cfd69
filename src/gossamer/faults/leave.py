"""Nodes that go, in good order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import NonNegativeFloat

from gossamer.config.registry import register
from gossamer.faults.fault import Fault, Nodes, Spell, chosen


@register("fault", "leave")
class Leave(Fault):
    """Nodes finish the round that they are in, say goodbye, and are gone for good; their rows and models are complete.

    Args:
        nodes: who: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when they are told to go, seconds of the engine's clock.
    """

    nodes: Nodes
    at_s: NonNegativeFloat

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        return iter([Spell(self.at_s, math.inf, "leave", rank) for rank in self.hit(nodes, seed, field)])

    def hit(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        return chosen(self.nodes, nodes, seed, field)
