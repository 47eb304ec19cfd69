"""Nodes that come later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveFloat

from gossamer.config.registry import register
from gossamer.faults.fault import Fault, Nodes, Spell, chosen


@register("fault", "join")
class Join(Fault):
    """Nodes are not there until some time.

    Args:
        nodes: who: ranks, or a number or a fraction of the nodes (drawn).
        at_s: when they come, seconds of the engine's clock.
        start_from: the model that they begin with: "initial", or "neighbor": that of the first of their neighbours that
            answers, which costs a message there and back.
    """

    nodes: Nodes
    at_s: PositiveFloat
    start_from: Literal["initial", "neighbor"] = "initial"

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        ranks = self.hit(nodes, seed, field)
        return iter([Spell(0.0, self.at_s, "join", rank, self.start_from) for rank in ranks])

    def hit(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        return chosen(self.nodes, nodes, seed, field)
