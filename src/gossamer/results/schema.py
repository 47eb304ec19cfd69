"""The fields that readers rely on in the files of a run's folder. Other fields are kept, but not read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from gossamer.fingerprint import Fingerprint

Count = Annotated[int, Meta(ge=0)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Nodes = Annotated[int, Meta(ge=1, le=10**7)]
Edges = list[Annotated[list[Rank], Meta(min_length=2, max_length=2)]]
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


class Computer(TypedDict, total=False):
    """A machine that computes a run, and with what."""

    python: str
    machine: dict[str, Any]
    numerics: dict[str, Any]
    packages: dict[str, Any]


class OfWorker(Computer, total=False):
    """A worker that has computed the nodes ``ranks`` of a run. It has joined from ``address``."""

    worker: str
    address: str
    ranks: list[Rank]


class Origin(Computer, total=False):
    """Where a run was computed, and from what: by ``workers``, if there are any, or else by this computer."""

    command: list[str]
    fingerprint: Fingerprint
    workers: list[OfWorker]


class Environment(Origin, total=False):
    """``environment.json``: ``run`` identifies the run independently of its folder's name; ``resumed`` lists
    where it continued."""

    run: str
    resumed: Annotated[list[Origin], Meta(min_length=1)]


class MixingField(TypedDict):
    """``mixing`` in ``setup.json``: the graph and the weights with which the algorithm mixes, in words."""

    graph: str
    weights: str
    uses_topology: bool


class DataField(TypedDict, total=False):
    """``data`` in ``setup.json``: what was read (:mod:`gossamer.tasks.summary`); ``line`` says it in words."""

    line: str


class SetupFile(TypedDict, total=False):
    """``setup.json``, from :meth:`gossamer.runtime.setup.Setup.description`: ``samples`` is [nodes], ``labels`` is
    [nodes][classes], ``class_columns`` has the class of each column that is the accuracy of one, ``evaluation_samples`` has
    the numbers of used and of all samples of each evaluation set, ``poisoned`` the ranks of each poison, ``chosen`` those
    that a field of the experiment has chosen, such as ``faults.0.nodes``, and ``graphs`` the edges from a round on.
    ``mixing`` is null for an algorithm that does not declare it."""

    nodes: Nodes
    directed: bool
    parameters: Count | None
    data: DataField
    samples: list[Count]
    labels: list[list[Count]] | None
    classes: list[str] | None
    class_columns: dict[str, str]
    ends_with_steps: bool
    evaluation_samples: dict[str, Annotated[list[Count], Meta(min_length=2, max_length=2)]]
    poisoned: list[list[Rank]]
    chosen: dict[str, list[Rank]]
    mixing: MixingField | None
    graphs: dict[Count, Edges]


class GraphRow(TypedDict):
    """A row of the segment ``graphs``: the graph from a round on."""

    round: Count
    edges: Edges


class TimelineRow(TypedDict):
    """A row of the segment ``timeline``: an interval in which a node computed, or sent ``bytes`` to a node."""

    node: Rank
    kind: str
    start_s: Annotated[float, Meta(ge=-1e10, le=1e10)]
    end_s: Annotated[float, Meta(ge=-1e10, le=1e10)]
    to: NotRequired[Rank]
    bytes: NotRequired[Count]


class Totals(TypedDict):
    """The engine's counts of a whole run, over all nodes (:class:`~gossamer.messages.tags.Traffic`), those that
    crashed or left included. ``messages_in_flight`` and ``messages_unread`` are those at the end, which is at
    ``time_s`` on the engine's clock. ``rounds_most`` is of all nodes, and ``rounds_least`` of those that were present at
    the end.

    If ``exact`` is false, a process was killed after its last report, so that more may have been sent.
    ``report_age_s`` is the longest time for which the end of a process, or of the run, came after its last
    report, in seconds; under ``simulate`` it is missing."""

    bytes_sent: Count
    bytes_received: Count
    messages_sent: Count
    messages_received: Count
    messages_cancelled: Count
    messages_lost: Count
    messages_unsent: Count
    messages_late: Count
    messages_superseded: Count
    messages_taken: Count
    messages_refused: Count
    messages_in_flight: Count
    messages_unread: Count
    time_s: float
    rounds_most: Count | None
    rounds_least: Count | None
    exact: bool
    report_age_s: NotRequired[float]


class StatusFile(TypedDict, total=False):
    """``status.json``; ``files`` has the checksum of every other file of the record."""

    run: str
    files: dict[str, str]
    status: Status
    error: str | None
    wall_s: float | None
    totals: Totals | None


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
