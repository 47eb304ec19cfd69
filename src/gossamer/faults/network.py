"""A network with disturbances: what faults make of another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter

import numpy as np
from jaxtyping import Float

from gossamer.faults.fault import Disturbance
from gossamer.network import Conditions, Network, Path
from gossamer.network.network import Changing


class Disturbed(Changing):
    """Another network, whose links do something else at times. Made by :func:`disturbed`; no experiment names it.

    Args:
        base: the other network; transfers share links as it says.
        disturbances: when, and what.
    """

    base: Network
    disturbances: tuple[Disturbance, ...]

    def loses(self, nodes: int, seed: int) -> bool:
        return self.base.loses(nodes, seed) or any(each.loses for each in self.disturbances)

    def _course(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        base = self.base.conditions(nodes, seed)
        edges = {edge for each in self.disturbances for edge in (each.from_s, each.to_s) if np.isfinite(edge)}
        start: list[tuple[float, Conditions | None]] = [(0.0, base)]
        own: list[tuple[float, Conditions | None]] = [(edge, None) for edge in sorted(edges)]
        events = merge(start, self.base.changes(nodes, seed), own, key=itemgetter(0))
        for time_s, together in groupby(events, key=itemgetter(0)):
            for _, changed in together:
                base = changed or base
            acting = [each for each in self.disturbances if each.from_s <= time_s < each.to_s]
            yield time_s, _Disturbed(base, acting) if acting else base


class _Disturbed(Conditions):
    def __init__(self, base: Conditions, acting: Sequence[Disturbance]) -> None:
        self._base, self._acting = base, acting
        rates: Float[np.ndarray, " links"] = base.rates
        for disturbance in acting:
            rates = disturbance.rates(rates)
        self.rates = rates

    def path(self, source: int, to: int) -> Path | None:
        path = self._base.path(source, to)
        for disturbance in self._acting:
            if path is None:
                return None
            path = disturbance.path(source, to, path)
        return path


def disturbed(base: Network, disturbances: Sequence[Disturbance]) -> Network:
    """A network with disturbances; itself where there are none."""
    if not disturbances:
        return base
    return Disturbed(base=base, disturbances=tuple(disturbances), sharing=base.sharing)
