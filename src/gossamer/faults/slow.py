"""Nodes that compute more slowly for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from gossamer.config.registry import register
from gossamer.faults.fault import Fault, Nodes, Slowness, Spell, check_window, chosen, until


@register("fault", "slow")
class Slow(Fault):
    """Computing takes longer.

    Args:
        nodes: who: ranks, a number or a fraction of the nodes (drawn), or "all".
        factor: how many times as long a computation takes.
        from_s: when it begins, seconds of the engine's clock.
        to_s: when it is over; null is never.
    """

    nodes: Nodes
    factor: PositiveFloat
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _lasts(self) -> Slow:
        check_window(self.from_s, self.to_s)
        return self

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        detail = f"computing takes {self.factor:g} times as long"
        ranks = chosen(self.nodes, nodes, seed, field)
        return iter([Spell(self.from_s, until(self.to_s), "slowed", rank, detail=detail) for rank in ranks])

    def slowness(self, nodes: int, seed: int, field: str) -> Sequence[Slowness]:
        ranks = chosen(self.nodes, nodes, seed, field)
        return [Slowness(rank, self.from_s, until(self.to_s), self.factor) for rank in ranks]
