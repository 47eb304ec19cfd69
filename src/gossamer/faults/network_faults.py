"""Faults of the network: links that lose messages, partitions, and what they make of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int
from pydantic import Field, NonNegativeInt, model_validator

from gossamer.config.registry import register
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.faults.fault import FaultInterval, FaultPlan, LinkFault, Nodes, TemporaryFault, select_ranks
from gossamer.network import Conditions, Network, Path
from gossamer.network.network import Changing, states_of
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator


@register("fault", "loss")
class Loss(TemporaryFault):
    """Messages are lost at random, in addition to those that the network loses.

    Args:
        probability: probability that a message is lost.
        nodes: on all links from and to these nodes: ranks, a number or a fraction of the nodes (drawn), or "all".
        links: on these links only, a list of [from, to]; in place of ``nodes``.
        from_s: when it starts, seconds of the engine's clock.
        to_s: when it ends; null is never.
    """

    probability: float = Field(gt=0, le=1)
    nodes: Nodes = "all"
    links: Annotated[
        tuple[tuple[NonNegativeInt, NonNegativeInt], ...] | None,
        accepting("a list of pairs of ranks from 0, [from, to] each"),
    ] = None

    @model_validator(mode="after")
    def _nodes_or_links(self) -> Loss:
        if self.links is not None and self.nodes != "all":
            raise ValueError("nodes or links")
        return self

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        for link in self.links or ():
            check_ranks(link, nodes, f"{field}.links")
        ranks = frozenset(select_ranks(self.nodes, nodes, seed, field))
        links = None if self.links is None else frozenset(self.links)
        survival = 1 - self.probability

        def lossy(source: int, to: int, path: Path) -> Path | None:
            hit = source in ranks or to in ranks if links is None else (source, to) in links
            return replace(path, loss=1 - (1 - path.loss) * survival) if hit else path

        detail = f"messages are lost with probability {self.probability:g}"
        interval = FaultInterval(self.from_s, self.end_s, "loss", detail=detail)
        return FaultPlan([interval], link_faults=[LinkFault(self.from_s, self.end_s, lossy)])


@register("fault", "partition")
class Partition(TemporaryFault):
    """Messages between groups of nodes are lost, including those that leave when it starts. No node is considered dead.

    Args:
        groups: lists of ranks, where all other nodes form one more group; or "halves", drawn by the experiment's seed.
        from_s: when it starts, seconds of the engine's clock.
        to_s: when it ends; null is never.
    """

    groups: Annotated[
        tuple[tuple[NonNegativeInt, ...], ...] | Literal["halves"],
        accepting("a list of lists of ranks from 0, or 'halves'"),
    ] = "halves"

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        numbers = self._group_of_each(nodes, seed, field)
        groups: list[int] = numbers.tolist()

        def within(source: int, to: int, path: Path) -> Path | None:
            return path if groups[source] == groups[to] else None

        detail = "groups of " + ", ".join(str(size) for size in np.bincount(numbers) if size)
        interval = FaultInterval(self.from_s, self.end_s, "partition", detail=detail)
        return FaultPlan([interval], link_faults=[LinkFault(self.from_s, self.end_s, within)])

    def _group_of_each(self, nodes: int, seed: int, field: str) -> Int[np.ndarray, " nodes"]:
        """The group number of each node; 0 for the nodes in no list."""
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


class FaultyNetwork(Changing):
    """A network under link faults. A :class:`~gossamer.faults.FaultSchedule` creates it; no experiment names it.

    Args:
        base: the network without faults; transfers share links as it says.
        link_faults: the faults.
    """

    base: Network
    link_faults: tuple[LinkFault, ...]

    def loses(self, nodes: int, seed: int) -> bool:
        return self.base.loses(nodes, seed) or any(fault.loses for fault in self.link_faults)

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        ends = {end for fault in self.link_faults for end in (fault.from_s, fault.to_s) if np.isfinite(end)}
        for time_s, base in states_of(self.base, nodes, seed, ends):
            active = [fault for fault in self.link_faults if fault.from_s <= time_s < fault.to_s]
            yield time_s, _FaultyConditions(base, active) if active else base


class _FaultyConditions(Conditions):
    def __init__(self, base: Conditions, active: Sequence[LinkFault]) -> None:
        self._base, self._active = base, active
        self.rates = base.rates.copy()
        self.rates[[link for fault in active for link in fault.stopped]] = 0.0

    def path(self, source: int, to: int) -> Path | None:
        path = self._base.path(source, to)
        for fault in self._active:
            path = path and fault.path(source, to, path)
        return path
