"""Faults of the network: links that lose messages, partitions, and what they make of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import register
from gossamer.config.validation import accepting
from gossamer.errors import BadInput
from gossamer.faults.fault import Fault, FaultInterval, LinkFault, Nodes, check_order, end_of, select_ranks
from gossamer.network import Conditions, Network, Path
from gossamer.network.network import Changing
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator


@register("fault", "loss")
class Loss(Fault):
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
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Loss:
        check_order(self.from_s, self.to_s)
        if self.links is not None and self.nodes != "all":
            raise ValueError("nodes or links")
        return self

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        detail = f"messages are lost with probability {self.probability:g}"
        return iter([FaultInterval(self.from_s, end_of(self.to_s), "loss", detail=detail)])

    def link_faults(self, nodes: int, seed: int, field: str) -> Sequence[LinkFault]:
        for link in self.links or ():
            check_ranks(link, nodes, f"{field}.links")
        return [_LossyLinks(self, frozenset(select_ranks(self.nodes, nodes, seed, field)))]


class _LossyLinks(LinkFault):
    def __init__(self, fault: Loss, ranks: frozenset[int]) -> None:
        super().__init__(fault.from_s, end_of(fault.to_s))
        self._survival, self._ranks = 1 - fault.probability, ranks
        self._links = None if fault.links is None else frozenset(fault.links)

    def path(self, source: int, to: int, path: Path) -> Path | None:
        links, ranks = self._links, self._ranks
        lossy = source in ranks or to in ranks if links is None else (source, to) in links
        return replace(path, loss=1 - (1 - path.loss) * self._survival) if lossy else path


@register("fault", "partition")
class Partition(Fault):
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
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Partition:
        check_order(self.from_s, self.to_s)
        return self

    def intervals(self, nodes: int, seed: int, field: str) -> Iterator[FaultInterval]:
        sizes = np.bincount(self._group_of_each(nodes, seed, field))
        detail = "groups of " + ", ".join(str(size) for size in sizes if size)
        return iter([FaultInterval(self.from_s, end_of(self.to_s), "partition", detail=detail)])

    def link_faults(self, nodes: int, seed: int, field: str) -> Sequence[LinkFault]:
        groups = self._group_of_each(nodes, seed, field)
        return [_PartitionedLinks(groups, self.from_s, end_of(self.to_s))]

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


class _PartitionedLinks(LinkFault):
    def __init__(self, groups: Int[np.ndarray, " nodes"], from_s: float, to_s: float) -> None:
        super().__init__(from_s, to_s)
        self._groups = groups.tolist()

    def path(self, source: int, to: int, path: Path) -> Path | None:
        return path if self._groups[source] == self._groups[to] else None


class FrozenLinks(LinkFault):
    """The uplink and the downlink of a frozen node: nothing passes, and nothing is lost.

    Args:
        rank: the node.
        nodes: number of all nodes.
        from_s: start of the interval.
        to_s: its end.
    """

    loses = False

    def __init__(self, rank: int, nodes: int, from_s: float, to_s: float) -> None:
        super().__init__(from_s, to_s)
        self._links = [rank, nodes + rank]

    def rates(self, rates: Float[np.ndarray, " links"]) -> Float[np.ndarray, " links"]:
        stopped = rates.copy()
        stopped[self._links] = 0.0
        return stopped


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
        base = self.base.conditions(nodes, seed)
        ends = {end for fault in self.link_faults for end in (fault.from_s, fault.to_s) if np.isfinite(end)}
        start: list[tuple[float, Conditions | None]] = [(0.0, base)]
        own: list[tuple[float, Conditions | None]] = [(end, None) for end in sorted(ends)]
        changes = merge(start, self.base.changes(nodes, seed), own, key=itemgetter(0))
        for time_s, simultaneous in groupby(changes, key=itemgetter(0)):
            for _, changed in simultaneous:
                base = changed or base
            active = [fault for fault in self.link_faults if fault.from_s <= time_s < fault.to_s]
            yield time_s, _FaultyConditions(base, active) if active else base


class _FaultyConditions(Conditions):
    def __init__(self, base: Conditions, active: Sequence[LinkFault]) -> None:
        self._base, self._active = base, active
        rates: Float[np.ndarray, " links"] = base.rates
        for fault in active:
            rates = fault.rates(rates)
        self.rates = rates

    def path(self, source: int, to: int) -> Path | None:
        path = self._base.path(source, to)
        for fault in self._active:
            if path is None:
                return None
            path = fault.path(source, to, path)
        return path
