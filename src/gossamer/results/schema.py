"""The contents of the files in a run's folder, as far as readers rely on them: fields beyond these are kept unread."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

LONGEST_S = 1e15
"""No clock of a run is as far from its start. (Clocks of several machines agree to milliseconds: some begin before it.)"""

Count = Annotated[int, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Nodes = Annotated[int, Meta(ge=1, le=10**7)]
Seconds = Annotated[float, Meta(ge=-LONGEST_S, le=LONGEST_S)]
Edges = list[Annotated[list[Rank], Meta(min_length=2, max_length=2)]]


class TimelineField(TypedDict):
    """``evaluation.timeline``."""

    from_s: Seconds
    to_s: Seconds
    nodes: Nodes | list[Rank]


class EvaluationField(TypedDict, total=False):
    """``evaluation``."""

    every_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] | None
    timeline: TimelineField | None


class RecordedExperiment(TypedDict, total=False):
    """``experiment.yaml``, and ``experiment`` in a manifest. Components are not checked: their code may be elsewhere."""

    name: str
    seed: Count
    nodes: Nodes
    evaluation: EvaluationField | None
    engine: str | dict[str, Any]


class Numerics(TypedDict):
    """``numerics`` in ``environment.json``; see :func:`gossamer.numerics.describe`."""

    processor: str
    kernels: str
    mkl: str | None
    settings: dict[str, str]


class Origin(TypedDict, total=False):
    """Where a run began, or went on: ``environment.json``, and each entry of its ``resumed``."""

    run: str
    numerics: Numerics


class Environment(Origin, total=False):
    """``environment.json``: ``run`` identifies the run, however its folder is called now."""

    resumed: Annotated[list[Origin], Meta(min_length=1)]


class SetupFile(TypedDict, total=False):
    """``setup.json``, from :meth:`gossamer.node.Setup.description`: ``samples`` is [nodes], ``labels`` is [nodes][classes],
    ``poisoned`` has the ranks of each poison, and ``graphs`` the edges from a round on."""

    nodes: Nodes
    directed: bool
    parameters: Count | None
    samples: list[Count]
    labels: list[list[Count]] | None
    classes: list[str] | None
    outcome_ranks: list[Rank]
    evaluation_sets: list[str]
    poisoned: list[list[Rank]]
    graphs: dict[Count, Edges]


class GraphRow(TypedDict):
    """A row of the segment ``graphs``: the graph from a round on."""

    round: Count
    edges: Edges


class StatusFile(TypedDict, total=False):
    """``status.json``; ``files`` has the checksum of every other file of the record."""

    run: str
    files: dict[str, str]
    status: Literal["done", "diverged", "failed", "stopped", "interrupted"]
    error: str | None
    wall_s: Seconds | None
    profile: dict[str, float] | None
    peak_vectors: Count | None
    private_bytes: dict[str, float] | None
    link_shares: dict[str, float] | None


class ManifestFile(TypedDict):
    """``manifest.json`` of a checkpoint; rounds and times by rank."""

    run: str
    number: Count
    rounds: dict[Rank, Count]
    times_s: dict[Rank, Seconds]
    time_s: Seconds | None
    wall_s: Seconds
    experiment: dict[str, Any]
    trainer: str | None


class SweepEntry(TypedDict):
    """A run of a sweep."""

    cell: str
    status: str
    folder: str | None
    run: NotRequired[str]
    labels: NotRequired[dict[str, Any] | None]


class SweepFile(TypedDict):
    """``sweep.json``."""

    runs: list[SweepEntry]
