"""Nodes that die without a word, and perhaps come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gossamer.config.registry import register
from gossamer.faults.fault import Fault, Nodes, RoundCrash, Spell, chosen, until


@register("fault", "crash")
class Crash(Fault):
    """Nodes die: all that they did not send is gone, and nobody is told.

    Args:
        nodes: whose crash it is: ranks, a number or a fraction of the nodes (drawn), or "all".
        at_s: when, seconds of the engine's clock; or
        at_round: as soon as a node has completed so many rounds, which it does once.
        restart_after_s: how long they are dead; null is for good.
        restart_from: what they begin with then: their newest checkpoint (without one: the initial model), or the initial
            model.
    """

    nodes: Nodes
    at_s: NonNegativeFloat | None = None
    at_round: PositiveInt | None = None
    restart_after_s: PositiveFloat | None = None
    restart_from: Literal["checkpoint", "initial"] = "checkpoint"

    @model_validator(mode="after")
    def _one_moment(self) -> Crash:
        if (self.at_s is None) == (self.at_round is None):
            raise ValueError("exactly one of at_s and at_round")
        return self

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        ranks = self.hit(nodes, seed, field)
        if self.at_s is None:
            return iter(())
        to_s = self.at_s + until(self.restart_after_s)
        return iter([Spell(self.at_s, to_s, "crash", rank, self.restart_from) for rank in ranks])

    def at_rounds(self, nodes: int, seed: int, field: str) -> Sequence[RoundCrash]:
        if self.at_round is None:
            return ()
        after_s = until(self.restart_after_s)
        ranks = self.hit(nodes, seed, field)
        return [RoundCrash(rank, self.at_round, after_s, self.restart_from) for rank in ranks]

    def hit(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        return chosen(self.nodes, nodes, seed, field)
