"""A compute profile whose nodes slow down for a while, and recover."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from heapq import merge
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from gossamer.config.registry import Component, register
from gossamer.network.compute import ComputeProfile, Modified
from gossamer.network.nodes import check_ranks
from gossamer.randomness import generator

SECONDS_PER_HOUR = 3600.0


class Window(Component):
    """A slowdown at a given time.

    Args:
        from_s: when it begins, seconds of the engine's clock.
        to_s: when it ends.
        factor: how many times as long a step takes in it.
        ranks: the nodes that it slows; null is all.
    """

    from_s: NonNegativeFloat
    to_s: PositiveFloat
    factor: PositiveFloat
    ranks: tuple[NonNegativeInt, ...] | None = None

    @model_validator(mode="after")
    def _ends_later(self) -> Window:
        if self.to_s <= self.from_s:
            raise ValueError("to_s after from_s")
        return self


class RandomSlowdowns(Component):
    """Slowdowns that each node has for itself: never two at once, time until the next and duration exponential.

    Args:
        per_hour: how many begin in an hour without any, on average.
        mean_s: their mean duration, seconds.
        factor: how many times as long a step takes in one.
    """

    per_hour: PositiveFloat
    mean_s: PositiveFloat
    factor: PositiveFloat


class _Slow(NamedTuple):
    from_s: float
    to_s: float
    factor: float


@register("compute", "slowdowns")
class Slowdowns(Modified):
    """A node does less in a second while it's slowed down; a step may begin before a slowdown and end in or after it.

    Slowdowns at the same time multiply. What ``base`` says is how long things take at full speed.

    Args:
        base: another compute profile.
        windows: slowdowns at given times.
        random: slowdowns that are drawn; null for none.
    """

    windows: tuple[Window, ...] = ()
    random: RandomSlowdowns | None = None

    depends_on_time: ClassVar[bool] = True

    @model_validator(mode="after")
    def _any(self) -> Slowdowns:
        if not self.windows and self.random is None:
            raise ValueError("windows, random, or both")
        return self

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        for number, window in enumerate(self.windows):
            check_ranks(window.ranks or (), nodes, f"compute.windows.{number}.ranks")
        return super().settled(nodes, seed)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """At full speed."""
        return self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        left = self.base.seconds(seed, rank, first_step, work, start_s)  # at full speed
        elapsed = 0.0
        for duration, factor in self._pieces(seed, rank, start_s):
            if left * factor <= duration:
                break
            left -= duration / factor
            elapsed += duration
        return elapsed + left * factor

    def _pieces(self, seed: int, rank: int, start_s: float) -> Iterator[tuple[float, float]]:
        """How long each factor holds, from some moment on; the last one holds for ever."""
        coming = merge(self._given(rank, start_s), self._drawn(seed, rank, start_s))
        following = next(coming, None)
        now, active = start_s, list[_Slow]()
        while active or following is not None:
            while following is not None and following.from_s <= now:
                active.append(following)
                following = next(coming, None)
            active = [slow for slow in active if slow.to_s > now]
            until = min(slow.to_s for slow in active) if active else math.inf
            if following is not None:
                until = min(until, following.from_s)
            yield until - now, math.prod(slow.factor for slow in active)
            now = until
        yield math.inf, 1.0

    def _given(self, rank: int, start_s: float) -> list[_Slow]:
        return sorted(
            _Slow(window.from_s, window.to_s, window.factor)
            for window in self.windows
            if window.to_s > start_s and (window.ranks is None or rank in window.ranks)
        )

    def _drawn(self, seed: int, rank: int, start_s: float) -> Iterator[_Slow]:
        if self.random is None:
            return
        known = self._known.setdefault((seed, rank), [])
        number = bisect_right(known, start_s, key=lambda slow: slow.to_s)
        while True:
            if number == len(known):
                begun_s = known[-1].to_s if known else 0.0
                known.append(
                    self._draw(self.random, generator(seed, "compute.slowdown", rank, number), begun_s)
                )
            if known[number].to_s > start_s:
                yield known[number]
            number += 1

    @staticmethod
    def _draw(random: RandomSlowdowns, rng: np.random.Generator, after_s: float) -> _Slow:
        from_s = after_s + rng.exponential(SECONDS_PER_HOUR / random.per_hour)
        return _Slow(from_s, from_s + rng.exponential(random.mean_s), random.factor)

    @cached_property
    def _known(self) -> dict[tuple[int, int], list[_Slow]]:
        """The slowdowns of a node that were asked for, by seed and rank; each one begins after the one before."""
        return {}
