"""The parts of an experiment that are the same for all components: when it is evaluated, when it ends, how it waits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, at least 1. Strict: ``yes`` is not a number."""


class Section(BaseModel):
    """Fields that belong together: frozen, and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Timeline(Section):
    """A window of the engine's time in which it is recorded when nodes compute and send.

    Args:
        from_s: its start, seconds.
        to_s: its end.
        nodes: a number (the first so many ranks), or a list of ranks.
    """

    from_s: float = Field(default=0.0, ge=0)
    to_s: float = Field(gt=0)
    nodes: Count | list[int] = 16

    @model_validator(mode="after")
    def _lasts(self) -> Timeline:
        if self.to_s <= self.from_s:
            raise ValueError(f"to_s: got {self.to_s}; accepted: more than from_s, {self.from_s}")
        return self

    def ranks(self, nodes: int) -> list[int]:
        """The ranks that are recorded, of so many nodes, ascending."""
        return (
            sorted(set(self.nodes)) if isinstance(self.nodes, list) else list(range(min(self.nodes, nodes)))
        )


class Evaluation(Section):
    """When and on what models are evaluated for the record; it costs no time on the nodes' clocks.

    Args:
        every_rounds: a row a node every so many of its rounds, and before the first and after the last.
        every_s: rows of all nodes at common instants, every so many seconds (for asynchronous algorithms).
        nodes: whose models are evaluated: "all", "average" (the average model), a number (that many, drawn), or
            a list of ranks.
        samples: how many test samples, drawn once; null is all.
        timeline: when nodes compute and send, for a window of time; null is off.
    """

    every_rounds: Count | None = 10
    every_s: float | None = Field(default=None, gt=0)
    nodes: Literal["all", "average"] | Count | list[int] = "all"
    samples: int | None = Field(default=1000, ge=1)
    timeline: Timeline | None = None


class Target(Section):
    """A level of a metric, at which a run may stop: mean over evaluated nodes; losses, errors and distances count
    downwards.

    Args:
        metric: a column of the recorded rows, e.g. test_accuracy.
        value: the level.
    """

    metric: str
    value: float


class Stop(Section):
    """When a run ends: at the first of these.

    Args:
        rounds: rounds of every node.
        time_s: seconds of the engine's clock.
        target: a level of a metric.
    """

    rounds: Count | None = None
    time_s: float | None = Field(default=None, gt=0)
    target: Target | None = None

    @model_validator(mode="after")
    def _ends(self) -> Stop:
        if self.rounds is None and self.time_s is None:
            raise ValueError("stop.rounds or stop.time_s, so that the run ends")
        return self


class Gather(Section):
    """What a node that waits for its peers does about slow and dead ones.

    Args:
        timeout_s: go on without the missing ones after so many seconds; null waits for ever.
        lost_peer: "fail" ends the run when a peer is dead; "skip" goes on without it; "wait" waits for it to come back, at
            most ``timeout_s``.
        missing: what becomes of the weight of a model that is not there, where an algorithm mixes with given weights:
            the node's "own" model gets it, or "renormalize" divides by the weight of what is there.
    """

    timeout_s: float | None = Field(default=None, gt=0)
    lost_peer: Literal["fail", "skip", "wait"] = "fail"
    missing: Literal["own", "renormalize"] = "own"

    @model_validator(mode="after")
    def _waits_for_a_time(self) -> Gather:
        if self.lost_peer == "wait" and self.timeout_s is None:
            raise ValueError("with lost_peer: wait, a timeout_s: who is dead may not come back")
        return self


class Failures(Section):
    """When a node is taken for dead by its peers.

    Args:
        heartbeat_s: seconds of silence on a connection after which a sign of life is sent on it; null sends none on
            one machine, where the parent sees which process dies or is stopped, and else every fifth of detection_s.
        detection_s: seconds without a sign of life, or in which it can't be reached, after which a peer is lost. With
            heartbeats, one that stands still is noticed within detection_s + heartbeat_s / 2 seconds.
    """

    heartbeat_s: float | None = Field(default=None, gt=0)
    detection_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _beats_in_time(self) -> Failures:
        if self.heartbeat_s is not None and 2 * self.heartbeat_s > self.detection_s:
            raise ValueError("heartbeat_s of at most half of detection_s")
        return self


class Checkpoints(Section):
    """When a run is saved, so that it can be resumed. A node is saved at the end of one of its rounds.

    Args:
        every_rounds: after every so many rounds of each node; null is off.
        every_s: after the first round that ends after every so many seconds of the node's clock; null is off.
        keep: the newest so many complete checkpoints are kept.
    """

    every_rounds: Count | None = None
    every_s: float | None = Field(default=None, gt=0)
    keep: Count = 2

    @property
    def on(self) -> bool:
        """Whether there are checkpoints; then there is one at the end too."""
        return self.every_rounds is not None or self.every_s is not None

    def due(self, rounds: int, time_s: float) -> int:
        """How many checkpoints a node has made that has completed some rounds by a time, if it makes one now where one is
        due."""
        by_rounds = 0 if self.every_rounds is None else rounds // self.every_rounds
        return by_rounds + (0 if self.every_s is None else int(time_s / self.every_s))
