"""Links that lose messages for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import register
from gossamer.config.validation import accepting
from gossamer.faults.fault import Disturbance, Fault, Nodes, Spell, check_window, chosen, until
from gossamer.network import Path
from gossamer.network.nodes import check_ranks


@register("fault", "loss")
class Loss(Fault):
    """Messages are lost at random, beside what the network loses by itself.

    Args:
        probability: that a message is lost.
        nodes: on all links from and to these: ranks, a number or a fraction of the nodes (drawn), or "all".
        links: on these alone: [from, to] each; in place of ``nodes``.
        from_s: when it begins, seconds of the engine's clock.
        to_s: when it is over; null is never.
    """

    probability: float = Field(gt=0, le=1)
    nodes: Nodes = "all"
    links: Annotated[
        tuple[tuple[NonNegativeInt, NonNegativeInt], ...] | None,
        accepting("a list of pairs of ranks from 0, [from, to] each"),
    ] = None
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _lasts(self) -> Loss:
        check_window(self.from_s, self.to_s)
        if self.links is not None and self.nodes != "all":
            raise ValueError("nodes or links")
        return self

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        detail = f"messages are lost with probability {self.probability:g}"
        return iter([Spell(self.from_s, until(self.to_s), "loss", detail=detail)])

    def disturbances(self, nodes: int, seed: int, field: str) -> Sequence[Disturbance]:
        for link in self.links or ():
            check_ranks(link, nodes, f"{field}.links")
        links = None if self.links is None else frozenset(self.links)
        ranks = frozenset(chosen(self.nodes, nodes, seed, field))
        return [_Lossy(self.probability, ranks, links, self.from_s, until(self.to_s))]


class _Lossy(Disturbance):
    def __init__(
        self,
        probability: float,
        ranks: frozenset[int],
        links: frozenset[tuple[int, int]] | None,
        from_s: float,
        to_s: float,
    ) -> None:
        super().__init__(from_s, to_s)
        self._probability, self._ranks, self._links = probability, ranks, links

    def path(self, source: int, to: int, path: Path) -> Path | None:
        hit = (
            source in self._ranks or to in self._ranks if self._links is None else (source, to) in self._links
        )
        return replace(path, loss=1 - (1 - path.loss) * (1 - self._probability)) if hit else path
