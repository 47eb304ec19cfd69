"""Max-min fair shares of links that several flows cross.

An allocation is max-min fair if every flow crosses a full link on which no other flow has a larger share, each in proportion
to its weight (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2). It is kept as the level of every link: the
largest share that a flow of weight 1 can have there. The levels are the fixed point of

    sum_{f on l} w_f min(level_l, bound_f) = rate_l        (level_l is infinite if the link cannot be filled)

with bound_f the least level of the flow's other links, or its own limit if that is less. A flow's share is w_f times the
least level of its links. When a flow comes or goes, only those links are computed again on which some flow's bound has
changed below the level, the lowest ones first, because a level depends on lower ones alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

CLOSE = 1e-12
"""A relative change of a level up to this is rounding, and is not passed on."""

_Levels = list[float]
_Bound = Callable[[_Levels], float]


@dataclass(eq=False, slots=True)
class Flow:
    """A flow that takes a share of some links: their numbers, its weight, its highest and its present rate (bytes a second),
    and what picks the levels of its links from those of all links."""

    links: tuple[int, ...] = ()
    weight: float = 1.0
    limit: float = math.inf
    rate: float = 0.0
    shares: Callable[[_Levels], tuple[float, ...]] = tuple


F = TypeVar("F", bound=Flow)


class MaxMin(Generic[F]):
    """The shares of all flows over some links.

    Args:
        rates: rates of the links, bytes a second.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._levels: _Levels = [math.inf] * len(self._rates)
        self._flows: list[dict[F, _Bound]] = [{} for _ in self._rates]
        self._moved: dict[int, None] = {}  # links whose level may have changed
        self._new: dict[F, None] = {}
        self._weighted = False  # whether any flow has had a weight other than 1; filling is faster without

    def add(self, flow: F) -> None:
        """Give a flow its share from the next :meth:`settle` on."""
        first = flow.links[0]  # twice, so that itemgetter gives a tuple even for one link
        flow.shares = itemgetter(first, *flow.links)
        for link in flow.links:
            self._flows[link][flow] = _bound(flow, link)
            self._moved[link] = None
        self._new[flow] = None
        self._weighted = self._weighted or flow.weight != 1

    def remove(self, flow: F) -> None:
        """Leave a flow's share to others; its rate is 0."""
        for link in flow.links:
            del self._flows[link][flow]
            self._moved[link] = None
        self._new.pop(flow, None)
        flow.rate = 0.0

    def change(self, rates: Sequence[float]) -> None:
        """Change the rates of the links."""
        for link, (before, rate) in enumerate(zip(self._rates, rates, strict=True)):
            if before != rate:
                self._rates[link] = rate
                self._moved[link] = None

    def settle(self) -> list[tuple[F, float]]:
        """The flows whose rates have changed, with their new rates; the caller sets ``flow.rate``."""
        changed, self._new = self._new, {}
        levels, moved = self._levels, self._moved
        queue = [(levels[link], link) for link in moved]
        heapq.heapify(queue)
        while queue:
            _, link = heapq.heappop(queue)
            if link not in moved:
                continue
            del moved[link]
            before, level = levels[link], self._level(link)
            if level == before or before * (1 - CLOSE) <= level <= before * (1 + CLOSE) < math.inf:
                continue
            levels[link] = level
            least = min(before, level)
            for flow, bound in self._flows[link].items():
                if bound(levels) > least:  # otherwise another link decides, before and after
                    changed[flow] = None
                    for other in flow.links:
                        if other not in moved and levels[other] > least and other != link:
                            moved[other] = None
                            heapq.heappush(queue, (levels[other], other))
        rates = [(flow, min(flow.weight * min(flow.shares(levels)), flow.limit)) for flow in changed]
        return [(flow, rate) for flow, rate in rates if rate != flow.rate]

    def _level(self, link: int) -> float:
        """Fill a link: flows that are bound below its level get their bound, the others equal shares for their weights."""
        flows, levels, room = self._flows[link], self._levels, self._rates[link]
        if math.isinf(room) or not flows:
            return math.inf
        if not self._weighted:
            shares = sorted([bound(levels) for bound in flows.values()])
            for sharing, share in zip(range(len(shares), 0, -1), shares, strict=True):
                if share * sharing >= room:
                    return max(room, 0.0) / sharing
                room -= share
            return math.inf
        bounds = sorted([(bound(levels), flow.weight) for flow, bound in flows.items()])
        weights = sum([weight for _, weight in bounds])
        for bound, weight in bounds:
            if bound * weights >= room:
                return max(room, 0.0) / weights
            room -= bound * weight
            weights -= weight
        return math.inf


def _bound(flow: Flow, link: int) -> _Bound:
    """What bounds a flow apart from one of its links."""
    others = [other for other in flow.links if other != link]
    limit = flow.limit / flow.weight
    if len(others) == 1 and math.isinf(limit):
        return itemgetter(others[0])
    return lambda levels: min([limit, *[levels[other] for other in others]])
