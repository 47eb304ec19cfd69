"""A network that falls apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import register
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.faults.fault import Disturbance, Fault, Spell, check_window, until
from gossamer.network import Path
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator


@register("fault", "partition")
class Partition(Fault):
    """Messages between groups of nodes are lost, also those that are leaving when it begins. Nobody is taken for dead.

    Args:
        groups: lists of ranks, where all other nodes are one group more; or "halves", drawn by the experiment's seed.
        from_s: when it begins, seconds of the engine's clock.
        to_s: when the network is whole again; null is never.
    """

    groups: Annotated[
        tuple[tuple[NonNegativeInt, ...], ...] | Literal["halves"],
        accepting("a list of lists of ranks from 0, or 'halves'"),
    ] = "halves"
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _lasts(self) -> Partition:
        check_window(self.from_s, self.to_s)
        return self

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        sizes = np.bincount(self._numbers(nodes, seed, field))
        detail = "groups of " + ", ".join(str(size) for size in sizes if size)
        return iter([Spell(self.from_s, until(self.to_s), "partition", detail=detail)])

    def disturbances(self, nodes: int, seed: int, field: str) -> Sequence[Disturbance]:
        return [_Apart(self._numbers(nodes, seed, field), self.from_s, until(self.to_s))]

    def _numbers(self, nodes: int, seed: int, field: str) -> Int[np.ndarray, " nodes"]:
        """Each node's group; 0 is that of those that are in no list."""
        numbers = np.zeros(nodes, dtype=np.int64)
        if self.groups == "halves":
            numbers[generator(seed, f"{field}.groups").permutation(nodes)[: nodes // 2]] = 1
            return numbers
        for number, group in enumerate(self.groups):
            assert not isinstance(group, str)
            check_ranks(group, nodes, f"{field}.groups.{number}")
            for rank in group:
                if numbers[rank]:
                    raise BadInput(f"{field}.groups: node {rank} is in two groups; accepted: in one at most")
                numbers[rank] = number + 1
        return numbers


class _Apart(Disturbance):
    def __init__(self, numbers: Int[np.ndarray, " nodes"], from_s: float, to_s: float) -> None:
        super().__init__(from_s, to_s)
        self._numbers = numbers.tolist()

    def path(self, source: int, to: int, path: Path) -> Path | None:
        return path if self._numbers[source] == self._numbers[to] else None
