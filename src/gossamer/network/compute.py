"""Compute profiles: the duration of a local step on each node."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict
from functools import cached_property
from typing import Annotated, ClassVar, Literal, final

import polars as pl
from pydantic import Field, NonNegativeInt, field_validator, model_validator

from gossamer.config.ranges import Factor, LogDeviation, PositiveSeconds, Seconds
from gossamer.config.registry import Component, ComponentField, FilePath, register
from gossamer.errors import BadInput
from gossamer.network.inputs import SomeNodes, check_rows, for_each, nested, read_csv
from gossamer.randomness import generator
from gossamer.selector import check_ranks

SECONDS_PER_HOUR = 3600.0


class ComputeProfile(Component):
    """The durations of local steps. A gradient takes as long as a step; applying one takes no time. A profile
    whose durations depend on the start time sets ``depends_on_time`` and overrides :meth:`seconds`."""

    depends_on_time: ClassVar[bool] = False

    # Time to encode one model, in local steps.
    steps_per_encoding: Annotated[float, Field(ge=0, le=1e9)] = 0.0

    @abstractmethod
    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        """Seconds of a node's local step number ``step``. Random durations are drawn from keyed randomness."""

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        """Seconds of a node's computation that starts at ``start_s`` (engine's clock) with local step number
        ``first_step``. ``work`` is its amount in local steps (a fraction for an evaluation)."""
        whole = int(work)
        total = math.fsum(self.step_seconds(seed, rank, first_step + k) for k in range(whole))
        if work > whole:
            total += (work - whole) * self.step_seconds(seed, rank, first_step + whole)
        return total

    @final
    def duration(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        """What :meth:`seconds` returns. BadInput unless it is a finite number, at least 0."""
        seconds = float(self.seconds(seed, rank, first_step, work, start_s))
        if not 0 <= seconds < math.inf:
            steps = f"{work:g} steps of node {rank} from its step {first_step} on"
            raise BadInput(f"compute: {seconds} seconds for {steps}; accepted: a finite number, at least 0")
        return seconds

    def for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        """This profile for a number of nodes, with the values that are drawn once per run. BadInput for a
        field that does not fit the number of nodes."""
        return self


@register("compute", "constant")
class Constant(ComputeProfile):
    """Every step takes the same time on every node."""

    seconds_per_step: Seconds = 0.01

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.seconds_per_step

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        return work * self.seconds_per_step


@register("compute", "log-normal")
class LogNormal(ComputeProfile):
    """The time of every step is drawn: the median times e^(sigma z), with z standard normal."""

    median_seconds: Seconds = 0.01  # the median time of a step
    sigma: LogDeviation = 0.5  # standard deviation of the logarithm

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.median_seconds * float(generator(seed, "compute", rank, step).lognormal(0.0, self.sigma))


@register("compute", "trace")
class StepTrace(ComputeProfile):
    """Measured times from a CSV file with the columns ``node`` and ``seconds_per_step``.

    Each name in the column ``node`` is a measured device. Its rows are the times of its successive steps, and
    repeat after the last one."""

    path: FilePath  # the file; .csv or .csv.gz
    # "in-order": node k uses device k modulo the number of devices, in the order of the file. "drawn": a random device.
    assign: Literal["in-order", "drawn"] = "in-order"
    _device: ClassVar[tuple[int, ...]] = ()  # the device of each node; set by for_nodes()

    def for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        devices = len(self._devices)
        device = [rank % devices for rank in range(nodes)]
        if self.assign == "drawn":
            device = [int(generator(seed, "compute.trace", rank).integers(devices)) for rank in range(nodes)]
        return self.model_copy(update={"_device": tuple(device)})

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        times = self._devices[self._device[rank]]
        return times[step % len(times)]

    @cached_property
    def _devices(self) -> list[list[float]]:
        """The times of each device."""
        columns = {"node": pl.String, "seconds_per_step": pl.Float64}
        table = read_csv(self.path, "compute.path", columns)
        whole = pl.all_horizontal(pl.all().is_not_null())
        check_rows(table, whole, f"compute.path: {self.path}", "both values in each line")
        by_device = table.group_by("node", maintain_order=True).agg("seconds_per_step")
        return by_device["seconds_per_step"].to_list()


class ModifiedProfile(ComputeProfile):
    """A profile that changes the durations of another one, ``base``."""

    # Its durations must not depend on the time; a profile whose durations do must be the outermost one.
    base: Annotated[ComputeProfile, ComponentField("compute", "compute.base")] = Constant()

    @field_validator("base")
    @classmethod
    def _check_base(cls, base: ComputeProfile) -> ComputeProfile:
        if base.depends_on_time:
            raise ValueError("a profile that does not depend on the time (slowdowns have to be outermost)")
        if base.steps_per_encoding:
            raise ValueError("a profile without steps_per_encoding, which the outermost one has")
        return base

    def base_for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        """The base for a number of nodes."""
        with nested("compute"):
            return self.base.for_nodes(nodes, seed)

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.base.step_seconds(seed, rank, step)


class _ScaledProfile(ModifiedProfile):
    """The durations of the base times a factor for each node."""

    by_rank: tuple[float, ...]

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return self.by_rank[rank] * self.base.step_seconds(seed, rank, step)

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        return self.by_rank[rank] * self.base.seconds(seed, rank, first_step, work, start_s)


@register("compute", "per-node")
class PerNodeProfile(ModifiedProfile):
    """Every node has its own speed for the whole run, given by exactly one of the following parameters.
    Factors multiply the durations of the base."""

    seconds_per_step: tuple[Seconds, ...] | None = None  # a number for each node; without a base
    factors: tuple[Factor, ...] | None = None  # a number for each node
    # Factors e^(sigma z), with z standard normal, drawn once for the run.
    sigma: LogDeviation | None = None

    @model_validator(mode="after")
    def _one_of_three(self) -> PerNodeProfile:
        if [self.seconds_per_step, self.factors, self.sigma].count(None) != 2:
            raise ValueError("exactly one of seconds_per_step, factors and sigma")
        if self.seconds_per_step is not None and self.base != Constant():
            raise ValueError("seconds_per_step without a base, or a base with factors or sigma")
        return self

    def for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        for field in ("seconds_per_step", "factors"):
            for_each(getattr(self, field), nodes, f"compute.{field}")
        if self.seconds_per_step is not None:
            return _ScaledProfile(base=Constant(seconds_per_step=1.0), by_rank=self.seconds_per_step)
        factors = self.factors or ()
        if self.sigma is not None:
            rngs = (generator(seed, "compute.factor", rank) for rank in range(nodes))
            factors = tuple(float(rng.lognormal(0.0, self.sigma)) for rng in rngs)
        return _ScaledProfile(base=self.base_for_nodes(nodes, seed), by_rank=factors)


@register("compute", "stragglers")
class SlowNodes(ModifiedProfile, SomeNodes):
    """Some nodes, given by exactly one of ``count``, ``fraction`` and ``ranks``, take ``factor`` times as
    long as the base."""

    factor: Factor = 5.0  # multiplier of a slow node's durations

    def for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        slow = set(self.chosen(nodes, seed, "compute"))
        factors = tuple(self.factor if rank in slow else 1.0 for rank in range(nodes))
        return _ScaledProfile(base=self.base_for_nodes(nodes, seed), by_rank=factors)


class SlowdownWindow(Component):
    """A slowdown at a given time."""

    from_s: Seconds  # start, seconds of the engine's clock
    to_s: PositiveSeconds  # end, seconds of the engine's clock
    factor: Factor  # multiplier of the duration of a step
    ranks: tuple[NonNegativeInt, ...] | None = None  # the affected nodes; null is all

    @model_validator(mode="after")
    def _check_order(self) -> SlowdownWindow:
        if self.to_s <= self.from_s:
            raise ValueError("to_s after from_s")
        return self

    @classmethod
    def unchecked(cls, from_s: float, to_s: float, factor: float, ranks: tuple[int, ...]) -> SlowdownWindow:
        """A window for a fault, whose end and factor may be infinite."""
        return cls.model_construct(from_s=from_s, to_s=to_s, factor=factor, ranks=ranks)


class RandomSlowdowns(Component):
    """Random slowdowns of each node, one at a time; the times between them and their durations are exponential."""

    per_hour: Annotated[
        float, Field(gt=0, le=1e6)
    ]  # rate at which slowdowns start while there is none, per hour
    mean_s: PositiveSeconds  # mean duration, seconds
    factor: Factor  # multiplier of the duration of a step


@register("compute", "slowdowns")
class Slowdowns(ModifiedProfile):
    """Nodes slow down for a while and recover. A step may begin before a slowdown and end during or after it.

    Simultaneous slowdowns multiply. The durations of ``base`` are those at full speed."""

    windows: tuple[SlowdownWindow, ...] = ()  # slowdowns at given times
    random: RandomSlowdowns | None = None  # randomly drawn slowdowns; null for none
    depends_on_time: ClassVar[bool] = True

    @model_validator(mode="after")
    def _not_empty(self) -> Slowdowns:
        if not self.windows and self.random is None:
            raise ValueError("windows, random, or both")
        return self

    def for_nodes(self, nodes: int, seed: int) -> ComputeProfile:
        for number, window in enumerate(self.windows):
            check_ranks(window.ranks or (), nodes, f"compute.windows.{number}.ranks")
        return self.model_copy(update={"base": self.base_for_nodes(nodes, seed)})

    def seconds(self, seed: int, rank: int, first_step: int, work: float, start_s: float) -> float:
        remaining = self.base.seconds(seed, rank, first_step, work, start_s)  # at full speed
        fixed = [window for window in self.windows if window.ranks is None or rank in window.ranks]
        now, elapsed = start_s, 0.0
        while True:
            windows = [*fixed, *self._drawn(seed, rank, now)]
            factor = math.prod(window.factor for window in windows if window.from_s <= now < window.to_s)
            edges = (edge for window in windows for edge in (window.from_s, window.to_s) if edge > now)
            until = min(edges, default=math.inf)
            if remaining * factor <= until - now:
                return elapsed + remaining * factor
            remaining -= (until - now) / factor
            elapsed += until - now
            now = until

    def _drawn(self, seed: int, rank: int, now_s: float) -> list[SlowdownWindow]:
        """The first random slowdown of a node that ends after ``now_s``. Each one starts after the previous one."""
        if self.random is None:
            return []
        known = self._known[seed, rank]
        while not known or known[-1].to_s <= now_s:
            rng = generator(seed, "compute.slowdown", rank, len(known))
            from_s = known[-1].to_s if known else 0.0
            from_s += rng.exponential(SECONDS_PER_HOUR / self.random.per_hour)
            to_s = from_s + rng.exponential(self.random.mean_s)
            known.append(SlowdownWindow.unchecked(from_s, to_s, self.random.factor, (rank,)))
        return [known[bisect_right(known, now_s, key=lambda window: window.to_s)]]

    @cached_property
    def _known(self) -> defaultdict[tuple[int, int], list[SlowdownWindow]]:
        """The random slowdowns drawn so far, by seed and rank."""
        return defaultdict(list)
