"""Compute profiles: how long a local step takes on each node."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from heapq import merge
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_serializer,
    field_validator,
    model_validator,
)

from gossamer.config.registry import Component, FilePath, build, register
from gossamer.network.nodes import SomeNodes, check_ranks, for_each, nested
from gossamer.network.tables import read_number, read_records
from gossamer.randomness import generator

SECONDS_PER_HOUR = 3600.0


class ComputeProfile(Component):
    """The duration of local steps. A gradient takes as long as a step; applying one takes no time.

    A profile whose durations depend on the time at which they start sets ``depends_on_time`` and overrides
    :meth:`seconds`.
    """

    depends_on_time: ClassVar[bool] = False

    @abstractmethod
    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """Seconds of a node's local step number ``step``; if random, drawn from keyed randomness."""

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        """Seconds of a computation.

        Args:
            seed: the experiment's seed.
            rank: the node.
            first_step: number of its first local step.
            work: its amount in local steps (a fraction for an evaluation).
            start_s: its start, seconds of the engine's clock.
        """
        whole = int(work)
        total = sum(self.step_seconds(seed, rank, first_step + k) for k in range(whole))
        return total + (work - whole) * (
            self.step_seconds(seed, rank, first_step + whole) if work > whole else 0.0
        )

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        """This profile for a number of nodes, with what is drawn once for a run.

        Raises:
            BadInput: for a profile that does not fit the number of nodes; names the field.
        """
        return self


@register("compute", "constant")
class Constant(ComputeProfile):
    """Every step takes the same time on every node.

    Args:
        seconds_per_step: that time.
    """

    seconds_per_step: float = Field(default=0.01, ge=0, allow_inf_nan=False)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.seconds_per_step

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        return work * self.seconds_per_step


@register("compute", "log-normal")
class LogNormal(ComputeProfile):
    """The time of every step is drawn: the median times e^(sigma z), z standard normal.

    Args:
        median_seconds: the median time of a step.
        sigma: standard deviation of the logarithm.
    """

    median_seconds: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    sigma: float = Field(default=0.5, ge=0, allow_inf_nan=False)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.median_seconds * float(generator(seed, "compute", rank, step).lognormal(0.0, self.sigma))


@register("compute", "trace")
class StepTrace(ComputeProfile):
    """Measured times from a CSV file with the columns ``node`` and ``seconds_per_step``.

    A name in the column ``node`` is one measured device. Its rows, one or more, are the times of its successive steps, and
    repeat after the last.

    Args:
        path: the file; .csv or .csv.gz.
        assign: node k is device k mod their number, in the order of the file ("in-order"), or a device "drawn" for it.
    """

    path: FilePath
    assign: Literal["in-order", "drawn"] = "in-order"

    _device: ClassVar[tuple[int, ...]] = ()
    """The device of each node; set by :meth:`settled`."""

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        devices = len(self._devices)
        device = tuple(
            rank % devices
            if self.assign == "in-order"
            else int(generator(seed, "compute.trace", rank).integers(devices))
            for rank in range(nodes)
        )
        return self.model_copy(update={"_device": device})

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        times = self._devices[self._device[rank]]
        return times[step % len(times)]

    @cached_property
    def _devices(self) -> list[list[float]]:
        """The times of each device; raises BadInput for a file that can't be read."""
        devices: dict[str, list[float]] = {}
        for where, record in read_records(self.path, "compute.path", ("node", "seconds_per_step")):
            seconds = read_number(record["seconds_per_step"], f"{where}, seconds_per_step")
            devices.setdefault(record["node"], []).append(seconds)
        return list(devices.values())


class ModifiedProfile(ComputeProfile):
    """A profile that changes the durations of another one.

    Args:
        base: the other profile. Its durations must not depend on the time; a profile whose durations do is outermost.
    """

    base: ComputeProfile = Field(default_factory=Constant)

    @field_validator("base", mode="before")
    @classmethod
    def _build_base(cls, value: Any, info: Any) -> Any:  # info is a ValidationInfo
        with nested("compute"):
            base = build("compute", value, info.context)
        if isinstance(base, ComputeProfile) and base.depends_on_time:
            raise ValueError("a profile that does not depend on the time (slowdowns have to be outermost)")
        return base

    @field_serializer("base")
    def _base_spec(self, base: ComputeProfile) -> dict[str, Any]:
        return base.spec()

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        return self.model_copy(update={"base": self.settled_base(nodes, seed)})

    def settled_base(self, nodes: int, seed: int) -> ComputeProfile:
        """The base, settled for a number of nodes."""
        with nested("compute"):
            return self.base.settled(nodes, seed)


class _ScaledProfile(ModifiedProfile):
    """A profile that multiplies the durations of its base by a factor for each node."""

    @abstractmethod
    def _factor(self, rank: int) -> float:
        """The factor of a node."""

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self._factor(rank) * self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        return self._factor(rank) * self.base.seconds(seed, rank, first_step, work, start_s)


@register("compute", "per-node")
class PerNode(_ScaledProfile):
    """Every node has its own speed for the whole run: exactly one of the last three parameters.

    Args:
        base: another compute profile, whose durations the factors multiply.
        seconds_per_step: seconds of a step, a number for each node; without a base.
        factors: a number for each node.
        sigma: factors are drawn, once for the run: e^(sigma z), z standard normal.
    """

    seconds_per_step: tuple[NonNegativeFloat, ...] | None = None
    factors: tuple[PositiveFloat, ...] | None = None
    sigma: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_of_three(self) -> PerNode:
        if [self.seconds_per_step, self.factors, self.sigma].count(None) != 2:
            raise ValueError("exactly one of seconds_per_step, factors and sigma")
        if self.seconds_per_step is not None and self.base != Constant():
            raise ValueError("seconds_per_step without a base, or a base with factors or sigma")
        return self

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        for field in ("seconds_per_step", "factors"):
            for_each(getattr(self, field), nodes, f"compute.{field}")
        settled = super().settled(nodes, seed)
        if self.seconds_per_step is not None:
            return settled.model_copy(update={"base": Constant(seconds_per_step=1.0)})
        if self.sigma is None:
            return settled
        drawn = (generator(seed, "compute.factor", rank).lognormal(0.0, self.sigma) for rank in range(nodes))
        return settled.model_copy(update={"factors": tuple(map(float, drawn)), "sigma": None})

    def _factor(self, rank: int) -> float:
        factors = self.seconds_per_step or self.factors
        assert factors is not None, "settled() draws them"
        return factors[rank]


@register("compute", "stragglers")
class SlowNodes(_ScaledProfile, SomeNodes):
    """Some nodes take ``factor`` times as long as the base: exactly one of ``count``, ``fraction`` and ``ranks``.

    Args:
        base: another compute profile.
        factor: what the durations of a slow node are multiplied by.
        count: number of slow nodes.
        fraction: fraction of the nodes, rounded to the nearest number.
        ranks: these nodes.
        which: with ``count`` or ``fraction``: "drawn" by the experiment's seed, or the "first" ranks.
    """

    factor: PositiveFloat = 5.0

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        chosen, base = self.chosen(nodes, seed, "compute"), self.settled_base(nodes, seed)
        return self.model_copy(update={"base": base, "ranks": chosen, "count": None, "fraction": None})

    def _factor(self, rank: int) -> float:
        assert self.ranks is not None, "settled() selects them"
        return self.factor if rank in self.ranks else 1.0


class SlowdownWindow(Component):
    """A slowdown at a given time.

    Args:
        from_s: its start, seconds of the engine's clock.
        to_s: its end.
        factor: what the duration of a step is multiplied by.
        ranks: the nodes that it slows down; null is all.
    """

    from_s: NonNegativeFloat
    to_s: PositiveFloat
    factor: PositiveFloat
    ranks: tuple[NonNegativeInt, ...] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> SlowdownWindow:
        if self.to_s <= self.from_s:
            raise ValueError("to_s after from_s")
        return self

    @classmethod
    def unchecked(cls, from_s: float, to_s: float, factor: float, ranks: tuple[int, ...]) -> SlowdownWindow:
        """A window of a fault, whose end and factor may be infinite."""
        return cls.model_construct(from_s=from_s, to_s=to_s, factor=factor, ranks=ranks)


class RandomSlowdowns(Component):
    """Random slowdowns of each node, one at a time; the times between them and their durations are exponential.

    Args:
        per_hour: mean number that start in an hour without any.
        mean_s: mean duration, seconds.
        factor: what the duration of a step is multiplied by.
    """

    per_hour: PositiveFloat
    mean_s: PositiveFloat
    factor: PositiveFloat


class _Slowdown(NamedTuple):
    from_s: float
    to_s: float
    factor: float


@register("compute", "slowdowns")
class Slowdowns(ModifiedProfile):
    """Nodes slow down for a while and recover; a step may begin before a slowdown and end in or after it.

    Simultaneous slowdowns multiply. The durations of ``base`` are those at full speed.

    Args:
        base: another compute profile.
        windows: slowdowns at given times.
        random: slowdowns that are drawn; null for none.
    """

    windows: tuple[SlowdownWindow, ...] = ()
    random: RandomSlowdowns | None = None

    depends_on_time: ClassVar[bool] = True

    @model_validator(mode="after")
    def _not_empty(self) -> Slowdowns:
        if not self.windows and self.random is None:
            raise ValueError("windows, random, or both")
        return self

    def settled(self, nodes: int, seed: int) -> ComputeProfile:
        for number, window in enumerate(self.windows):
            check_ranks(window.ranks or (), nodes, f"compute.windows.{number}.ranks")
        return super().settled(nodes, seed)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """Seconds at full speed."""
        return self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        remaining = self.base.seconds(seed, rank, first_step, work, start_s)  # at full speed
        elapsed = 0.0
        for duration, factor in self._pieces(seed, rank, start_s):
            if remaining * factor <= duration:
                break
            remaining -= duration / factor
            elapsed += duration
        return elapsed + remaining * factor

    def _pieces(self, seed: int, rank: int, start_s: float) -> Iterator[tuple[float, float]]:
        """Successive durations with constant factors, from a start on; the last one is infinite."""
        coming = merge(self._at_given_times(rank, start_s), self._drawn(seed, rank, start_s))
        following = next(coming, None)
        now, active = start_s, list[_Slowdown]()
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

    def _at_given_times(self, rank: int, start_s: float) -> list[_Slowdown]:
        return sorted(
            _Slowdown(window.from_s, window.to_s, window.factor)
            for window in self.windows
            if window.to_s > start_s and (window.ranks is None or rank in window.ranks)
        )

    def _drawn(self, seed: int, rank: int, start_s: float) -> Iterator[_Slowdown]:
        """The random slowdowns of a node that end after ``start_s``; each starts after the end of the one before."""
        if self.random is None:
            return
        known = self._known.setdefault((seed, rank), [])
        number = bisect_right(known, start_s, key=lambda slow: slow.to_s)
        while True:
            if number == len(known):
                rng = generator(seed, "compute.slowdown", rank, number)
                from_s = known[-1].to_s if known else 0.0
                from_s += rng.exponential(SECONDS_PER_HOUR / self.random.per_hour)
                to_s = from_s + rng.exponential(self.random.mean_s)
                known.append(_Slowdown(from_s, to_s, self.random.factor))
            if known[number].to_s > start_s:
                yield known[number]
            number += 1

    @cached_property
    def _known(self) -> dict[tuple[int, int], list[_Slowdown]]:
        """The random slowdowns drawn so far, by seed and rank."""
        return {}
