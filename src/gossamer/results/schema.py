"""The fields that readers rely on in the files of a run's folder. Other fields are kept, but not read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Nodes = Annotated[int, Meta(ge=1, le=10**7)]
Edges = list[Annotated[list[Rank], Meta(min_length=2, max_length=2)]]
Resumed = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Status = Literal["done", "diverged", "failed", "stopped"]


class TimelineField(TypedDict):
    """``evaluation.timeline``."""

    from_s: float
    to_s: float
    nodes: Nodes | list[Rank]


class EvaluationField(TypedDict, total=False):
    """``evaluation``."""

    every_s: Annotated[float, Meta(gt=0)] | None
    timeline: TimelineField | None


class RecordedExperiment(TypedDict, total=False):
    """``experiment.yaml``, and ``experiment`` in a manifest. Components are not checked, since their code may
    not be available here."""

    name: str
    seed: Count
    nodes: Nodes
    evaluation: EvaluationField | None
    engine: str | dict[str, Any]


class Environment(TypedDict, total=False):
    """``environment.json``: ``run`` identifies the run independently of its folder's name; ``resumed`` lists
    where it continued."""

    run: str
    numerics: dict[str, Any]
    resumed: Resumed


class SetupFile(TypedDict, total=False):
    """``setup.json``, from :meth:`gossamer.node.Setup.description`: ``samples`` is [nodes], ``labels`` is [nodes][classes],
    ``evaluation_samples`` has the numbers of used and of all samples of each evaluation set, ``poisoned`` the ranks of each
    poison, and ``graphs`` the edges from a round on."""

    nodes: Nodes
    directed: bool
    parameters: Count | None
    samples: list[Count]
    labels: list[list[Count]] | None
    classes: list[str] | None
    evaluation_samples: dict[str, Annotated[list[Count], Meta(min_length=2, max_length=2)]]
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
    status: Status
    error: str | None
    wall_s: float | None


class ManifestFile(TypedDict):
    """``manifest.json`` of a checkpoint; rounds and times by rank."""

    run: str
    number: Count
    rounds: dict[Rank, Count]
    times_s: dict[Rank, float]
    time_s: float | None
    wall_s: float
    experiment: dict[str, Any]


class SweepEntry(TypedDict):
    """A run in ``sweep.json``."""

    cell: str
    status: str
    folder: str | None
    labels: NotRequired[dict[str, Any] | None]


class SweepRecord(TypedDict):
    """``sweep.json``."""

    runs: list[SweepEntry]
