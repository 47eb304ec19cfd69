"""The parts of an experiment that are not pluggable: evaluation, stop rule, waiting, checkpoints, engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, at least 1. Strict: ``yes`` is not a number."""


class Section(BaseModel):
    """A frozen group of fields; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Timeline(Section):
    """The window of the engine's time, in seconds, in which computations and messages are recorded one by one.

    Args:
        nodes: a list of ranks, or the number of nodes, counted from rank 0.
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
        """The recorded ranks in a run of ``nodes`` nodes, ascending."""
        return sorted(set(self.nodes)) if isinstance(self.nodes, list) else [*range(min(self.nodes, nodes))]


class Evaluation(Section):
    """When and on what models are evaluated for the record. It takes no time on the nodes' clocks.

    Args:
        every_rounds: evaluate each node after this many of its rounds, and before its first and after its last one.
        every_s: evaluate all nodes at common instants, this many seconds apart (for asynchronous algorithms).
        nodes: the models to evaluate: "all", "average" (the average model), a number of nodes that are drawn, or a list
            of ranks.
        samples: the number of test samples, drawn once; null is all.
        timeline: the window in which computations and messages are recorded; null is none.
    """

    every_rounds: Count | None = 10
    every_s: float | None = Field(default=None, gt=0)
    nodes: Literal["all", "average"] | Count | list[int] = "all"
    samples: int | None = Field(default=1000, ge=1)
    timeline: Timeline | None = None


class Target(Section):
    """The level ``value`` of a recorded column (e.g. test_accuracy) at which a run stops. It applies to the mean over
    evaluated nodes; of losses, errors and distances, lower is better.
    """

    metric: str
    value: float


class Stop(Section):
    """When a run ends: after a number of rounds of every node, a time of the engine's clock, or at a target."""

    rounds: Count | None = None
    time_s: float | None = Field(default=None, gt=0)
    target: Target | None = None

    @model_validator(mode="after")
    def _ends(self) -> Stop:
        if self.rounds is None and self.time_s is None:
            raise ValueError("stop.rounds or stop.time_s, so that the run ends")
        return self


class Gather(Section):
    """How a node waits for slow and dead peers.

    Args:
        timeout_s: after this many seconds, go on without the missing peers; null waits without a limit.
        lost_peer: "fail" ends the run when a peer is dead; "skip" goes on without the peer; "wait" waits for it to come
            back, at most ``timeout_s``.
        missing: which weight replaces that of a missing model, or of a coordinate that a sparse codec did not send, where an
            algorithm mixes with given weights: "own" adds it to the node's own model, "renormalize" divides by the weight
            that is present.
    """

    timeout_s: float | None = Field(default=None, gt=0)
    lost_peer: Literal["fail", "skip", "wait"] = "fail"
    missing: Literal["own", "renormalize"] = "own"

    @model_validator(mode="after")
    def _waits_for_a_time(self) -> Gather:
        if self.lost_peer == "wait" and self.timeout_s is None:
            raise ValueError("with lost_peer: wait, a timeout_s: a dead peer may not come back")
        return self


class Failures(Section):
    """When peers consider a node dead.

    Args:
        heartbeat_s: seconds of silence on a connection after which a heartbeat is sent. Null sends none on one machine, where
            the parent process sees which node ends or stops, elsewhere every fifth of detection_s.
        detection_s: seconds without a sign of life, or of failed connection attempts, after which a peer is lost. With
            heartbeats, a peer that hangs is noticed within detection_s + heartbeat_s / 2 seconds.
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
        every_rounds: save after this many rounds of each node; null is off.
        every_s: save after the first round that ends after this many seconds of the node's clock; null is off.
        keep: the number of complete checkpoints to keep; older ones are deleted.
    """

    every_rounds: Count | None = None
    every_s: float | None = Field(default=None, gt=0)
    keep: Count = 2

    @property
    def on(self) -> bool:
        """Whether there are checkpoints; if so, there is one at the end too."""
        return self.every_rounds is not None or self.every_s is not None

    def due(self, rounds: int, time_s: float) -> int:
        """The number of checkpoints that are due within a number of rounds and a time; a node is saved when it grows."""
        by_rounds = 0 if self.every_rounds is None else rounds // self.every_rounds
        return by_rounds + (0 if self.every_s is None else int(time_s / self.every_s))


class Simulate(Section):
    """The engine ``simulate``: virtual time on one machine.

    Args:
        trainer: "sequential" (one node at a time), "batched" (vmap over nodes), "auto" (measures both on the first
            batches), or "compiled" (one node at a time by torch.compile, which needs a C++ compiler and time to compile).
        workers: the number of threads that share the computation; null is one per core. Results don't depend on it.
        threads: torch's threads in each worker. With "sequential" and one thread, the bits are those of the engine
            processes.
        device: the device of models and data.
    """

    name: Literal["simulate"] = "simulate"
    trainer: Literal["auto", "sequential", "batched", "compiled"] = "auto"
    workers: Count | None = None
    threads: Count = 1
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")


class Processes(Section):
    """The engine ``processes``: one operating-system process for each node, TCP between them.

    Args:
        trainer: a process has one node and can't batch: "auto" is "sequential".
        start_timeout_s: the seconds within which all nodes must have started.
        train_at_once: the number of nodes that compute at the same time; null is the number of cores.
        memory: "keep" keeps the memory that a computation has freed for the next one (fast), "trim" returns it to the
            system (small), "auto" keeps it if that of all nodes fits into half of the machine's free memory.
        pace: a computation that ends sooner than the compute profile says is delayed until then, so that real seconds
            compare with virtual ones.
        restart: "always" starts a node that dies unplanned again from its newest checkpoint, "never" does not.
        restart_limit: the number of restarts of each node.
    """

    name: Literal["processes"] = "processes"
    trainer: Literal["auto", "sequential"] = "auto"
    threads: Literal[1] = 1
    start_timeout_s: float = Field(default=120.0, gt=0)
    train_at_once: Count | None = None
    memory: Literal["auto", "keep", "trim"] = "auto"
    pace: bool = Field(default=False, strict=True)
    restart: Literal["never", "always"] = "never"
    restart_limit: Count = 3
