"""Experiment: the complete description of a run. docs/experiments.md explains every field and its default."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from gossamer import files
from gossamer.config import examples
from gossamer.config.ranges import LONGEST_ACCEPTED_S, PositiveSeconds, Seconds
from gossamer.config.registry import Component, ComponentField, FilePath, Section, placed
from gossamer.config.validation import accepting, bad_input
from gossamer.errors import BadInput, shown, suggest

MAX_NODES = 1_000_000
_MAX_EXACT = 2**53  # the columns of a record hold whole numbers exactly up to this one
Count = Annotated[int, Field(ge=1, le=_MAX_EXACT, strict=True)]
"""A whole number, at least 1."""
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Threads = Annotated[int, Field(ge=1, le=1024, strict=True)]
"""A number of threads, or of processes that compute at the same time."""


# --- sections that are not pluggable


class Timeline(Section):
    """The time window (engine's clock) in which individual computations and messages of some ``nodes``
    (ranks, or a number of nodes from rank 0) are recorded."""

    from_s: Seconds = 0.0
    to_s: PositiveSeconds
    nodes: Count | list[int] = 16

    @model_validator(mode="after")
    def _check_order(self) -> Timeline:
        if self.to_s <= self.from_s:
            raise ValueError(f"to_s: got {self.to_s}; accepted: more than from_s, {self.from_s}")
        return self

    def ranks(self, nodes: int) -> list[int]:
        """The recorded ranks in a run of ``nodes`` nodes, ascending."""
        return sorted(set(self.nodes)) if isinstance(self.nodes, list) else [*range(min(self.nodes, nodes))]


class Evaluation(Section):
    """When models are evaluated for the record, and on which samples. Evaluation takes no time on the nodes'
    clocks. With ``every_s``, the default of ``every_rounds`` is None. ``of`` says which model of a node is shown:
    that of its last complete "round", of its last mixing ("mixed"), or the model as it is at the "instant"."""

    of: Literal["round", "mixed", "instant"] = "round"
    every_rounds: Count | None = 10
    every_s: float | None = Field(default=None, ge=1e-6, le=LONGEST_ACCEPTED_S)
    nodes: Literal["all", "average"] | Count | list[int] = "all"
    samples: int | None = Field(default=1000, ge=1)
    timeline: Timeline | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_by_time(cls, given: Any) -> Any:
        by_time = isinstance(given, Mapping) and given.get("every_s") is not None
        return {"every_rounds": None, **given} if by_time else given


class Target(Section):
    """The ``value`` of a recorded column (e.g. test_accuracy) at which a run stops. It applies to the mean
    over evaluated nodes. Lower is better for losses, errors and distances.
    """

    metric: str
    value: float


class Stop(Section):
    """When a run ends: after a number of rounds of every node, at a time of the engine's clock, after a
    number of bytes sent (in total, or per node on average), or at a target. Unless ``diverged`` is
    "continue", it also ends when a model is not finite. Bytes are counted when nodes complete rounds."""

    rounds: Count | None = None
    time_s: PositiveSeconds | None = None
    bytes: float | None = Field(default=None, gt=0)
    bytes_per_node: float | None = Field(default=None, gt=0)
    target: Target | None = None
    diverged: Literal["end", "continue"] = "end"

    @model_validator(mode="after")
    def _check_end(self) -> Stop:
        if {self.rounds, self.time_s, self.bytes, self.bytes_per_node} == {None}:
            raise ValueError(
                "stop.rounds, stop.time_s, stop.bytes or stop.bytes_per_node, so that the run ends"
            )
        return self

    @property
    def bytes_alone(self) -> bool:
        """Whether nothing but the bytes sent (or a target that may never be met) ends the run."""
        return self.rounds is None and self.time_s is None

    @property
    def ends_without_time(self) -> bool:
        """Whether the run can end although time stands still."""
        limits = (self.rounds, self.bytes, self.bytes_per_node, self.target)
        return any(limit is not None for limit in limits)

    def most_bytes(self, nodes: int) -> float:
        """The bytes that all nodes together may send; infinite without a limit."""
        per_node = math.inf if self.bytes_per_node is None else self.bytes_per_node * nodes
        return min(math.inf if self.bytes is None else self.bytes, per_node)


class WarmStart(Section):
    """All nodes start with the model of a run (the mean over its nodes, or the model of one ``rank``), or
    with the model in a file of named tensors. The record names the file and its checksum.

    Attributes:
        path: the folder of the run, or a safetensors file; "from" in an experiment file.
        rank: the node of the run whose model is used; None is the mean.
        crc32: the required checksum of the file; None accepts any.
    """

    path: FilePath = Field(alias="from")
    rank: Annotated[int, Field(ge=0, strict=True)] | None = None
    crc32: str | None = Field(default=None, pattern=r"^[0-9a-f]{8}$")

    @model_serializer
    def _fields(self) -> dict[str, Any]:
        return {"from": str(self.path), "rank": self.rank, "crc32": self.crc32}


class Gather(Section):
    """How a node waits for slow and dead peers, and handles malformed messages; see docs/faults.md."""

    timeout_s: PositiveSeconds | None = None
    lost_peer: Literal["fail", "skip", "wait"] = "fail"
    malformed: Literal["lose_peer", "drop", "fail"] = "lose_peer"
    missing: Literal["own", "renormalize"] = "own"

    @property
    def drops_malformed(self) -> bool:
        """Whether a run continues without a message that its receiver does not expect."""
        return self.malformed == "drop" or (self.malformed == "lose_peer" and self.lost_peer != "fail")

    @model_validator(mode="after")
    def _check_timeout(self) -> Gather:
        if self.lost_peer == "wait" and self.timeout_s is None:
            raise ValueError("a timeout_s with lost_peer: wait, since a dead peer may not come back")
        return self


class SecureAggregation(Section):
    """Nodes learn the weighted sum of their neighbours' models, but no individual model; see
    docs/security.md.

    Attributes:
        ring_bits: width in bits of the integers that are sent.
        fraction_bits: number of fractional bits. Values have to be below 2^(ring_bits - 1 - fraction_bits) -
            1.
        drop_outs: when a sender is lost, "skip" the round's mixing, or "recover" the sum of the others.
        masked: false sends the same integers without masks, to measure the cost of masking.
    """

    ring_bits: Literal[32, 64] = 32
    fraction_bits: int = Field(default=20, ge=8)
    drop_outs: Literal["skip", "recover"] = "skip"
    masked: bool = Field(default=True, strict=True)

    @model_validator(mode="after")
    def _check_whole_bits(self) -> SecureAggregation:
        if self.fraction_bits > self.ring_bits - 4:
            raise ValueError(f"fraction_bits of at most {self.ring_bits - 4}")
        return self


class Failures(Section):
    """When peers consider a node dead. If ``heartbeat_s`` is null, nodes on one machine send no heartbeats,
    since the parent process sees when a node ends; otherwise the interval is a fifth of ``detection_s``. With
    heartbeats, a peer that hangs or is stopped is detected within detection_s + heartbeat_s / 2 seconds."""

    heartbeat_s: PositiveSeconds | None = None
    detection_s: PositiveSeconds = 10.0

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Failures:
        if self.heartbeat_s is not None and 2 * self.heartbeat_s > self.detection_s:
            raise ValueError("heartbeat_s of at most half of detection_s")
        return self


class Checkpoints(Section):
    """When a run is saved so that it can be resumed. A node is saved at the end of one of its rounds."""

    every_rounds: Count | None = None
    every_s: float | None = Field(default=None, ge=1e-6, le=LONGEST_ACCEPTED_S)
    keep: Count = 2

    @property
    def on(self) -> bool:
        """Whether checkpoints are written. If so, one is also written at the end."""
        return self.every_rounds is not None or self.every_s is not None

    def due(self, rounds: int, time_s: float) -> int:
        """The number of checkpoints due after a number of rounds and a time. A node is saved when this number
        grows."""
        by_rounds = 0 if self.every_rounds is None else rounds // self.every_rounds
        return by_rounds + (0 if self.every_s is None else int(time_s / self.every_s))


class Simulate(Section):
    """The engine ``simulate``: virtual time on one machine."""

    name: Literal["simulate"] = "simulate"
    trainer: Literal["auto", "sequential", "batched", "fused"] = "auto"
    workers: Threads | None = None
    threads: Threads = 1
    device: Annotated[
        str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), accepting("cpu, cuda, or cuda:N for device N")
    ] = "cpu"
    cuda_graphs: bool = Field(default=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_cohort(cls, data: Any) -> Any:
        """Files of older versions may have ``cohort``, which said how nodes are computed and changed no result."""
        return (
            {name: value for name, value in data.items() if name != "cohort"}
            if isinstance(data, dict)
            else data
        )

    @model_validator(mode="after")
    def _check_workers(self) -> Simulate:
        if self.device != "cpu" and (self.workers or 1) > 1:
            raise BadInput(f"engine.workers: {self.workers} for device {self.device!r}; accepted: 1")
        return self


class Processes(Section):
    """The engine ``processes``: one operating-system process per node, connected by TCP. A process has only
    one node and can't batch, so the trainer "auto" is "fused" if "simulate" would also choose it, and
    "sequential" otherwise."""

    name: Literal["processes"] = "processes"
    trainer: Literal["auto", "sequential", "fused"] = "auto"
    threads: Literal[1] = 1
    start_timeout_s: PositiveSeconds = 120.0
    train_at_once: Threads | None = None
    pace: bool = Field(default=False, strict=True)
    restart: Literal["never", "always"] = "never"
    restart_limit: Count = 3


# --- the experiment


_ENGINES: dict[str, type[Simulate] | type[Processes]] = {"simulate": Simulate, "processes": Processes}
_Engine = Simulate | Processes | Literal["simulate", "processes"]
_Codecs = (
    Annotated[Any, ComponentField("codec", optional=True)]
    | Annotated[list[Any], ComponentField("codec", many=True)]
)
"""Accepted forms of the fields ``engine`` and ``codec`` in a file."""
_FIELDS = "a mapping of fields such as 'task' and 'nodes'"


def as_name(text: str) -> str:
    """The name of an experiment or a sweep, made from a text such as a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:100] or "study"


def engine_name(value: Any) -> Any:
    """The name in a file's ``engine`` field, which is not validated yet."""
    return value.get("name", "simulate") if isinstance(value, Mapping) else value


def _chain(value: Any) -> Any:
    """A list of codecs is a chain."""
    return {"name": "chain", "codecs": list(value)} if isinstance(value, list | tuple) else value


def _engine(value: Any) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    name = engine_name(value)
    if not isinstance(name, str) or name not in _ENGINES:
        raise BadInput(
            f"engine.name: got {shown(name)}{suggest(str(name), _ENGINES)}; accepted: {', '.join(_ENGINES)}"
        )
    try:
        return _ENGINES[name].model_validate(dict(value))
    except ValidationError as error:
        raise bad_input(error, _ENGINES[name], "engine") from None


def _later(default: Any) -> Any:
    """A field that experiments did not have at first: at its default it stays out of saved files, so that the finished runs
    of a sweep are not done again, and runs of before group with those of now."""

    def is_default(value: Any) -> bool:
        return bool((value.name_of() if isinstance(value, Component) else value) == default)

    return Field(default=default, validate_default=True, exclude_if=is_default)


class Experiment(Section):
    """The complete description of a run.

    Every pluggable field takes a registered name or "package.module:Class", with parameters. An experiment is
    frozen; :meth:`override` returns a changed copy.
    """

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: Seed = 1
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES, strict=True)]
    task: Annotated[Any, ComponentField("task")]
    partition: Annotated[Any, ComponentField("partition")] = Field(default="iid", validate_default=True)
    topology: Annotated[Any, ComponentField("topology")] = Field(default="ring", validate_default=True)
    poison: Annotated[tuple[Any, ...], ComponentField("poison", "poison", many=True)] = ()
    algorithm: Annotated[Any, ComponentField("algorithm")]
    middleware: Annotated[tuple[Any, ...], ComponentField("middleware", "middleware", many=True)] = _later(())
    codec: Annotated[Any, ComponentField("codec", optional=True), BeforeValidator(_chain, _Codecs)] = None
    wrappers: Annotated[tuple[Any, ...], ComponentField("wrapper", "wrappers", many=True)] = ()
    aggregator: Annotated[Any, ComponentField("aggregator")] = Field(default="mean", validate_default=True)
    optimizer: Annotated[Any, ComponentField("optimizer")] = Field(
        default={"name": "sgd", "lr": 0.1}, validate_default=True
    )
    gradient: Annotated[Any, ComponentField("gradient")] = _later("mean")
    batch_size: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] | Literal["full"] = 16
    initial: Literal["common", "independent"] | WarmStart = "common"
    compute: Annotated[Any, ComponentField("compute")] = Field(default="constant", validate_default=True)
    network: Annotated[Any, ComponentField("network")] = Field(default="uniform", validate_default=True)
    faults: Annotated[tuple[Any, ...], ComponentField("fault", "faults", many=True)] = ()
    gather: Gather = Gather()
    secure_aggregation: SecureAggregation | None = None
    failures: Failures = Failures()
    evaluation: Evaluation = Evaluation()
    measures: Annotated[tuple[Any, ...], ComponentField("measure", "measures", many=True)] = _later(())
    stop: Stop
    checkpoint: Checkpoints = Checkpoints()
    trackers: Annotated[tuple[Any, ...], ComponentField("tracker", "trackers", many=True)] = ()
    data_root: FilePath | None = None
    engine: Annotated[Simulate | Processes, BeforeValidator(_engine, _Engine)] = Simulate()

    @property
    def has_faults(self) -> bool:
        """Whether nodes may leave and come back. Such a run can't be resumed, because its nodes are saved independently."""
        restarts = isinstance(self.engine, Processes) and self.engine.restart == "always"
        return bool(self.faults) or restarts

    @model_validator(mode="wrap")
    @classmethod
    def _convert_errors(cls, value: Any, handler: Callable[[Any], Experiment]) -> Experiment:
        try:
            return handler(value)
        except ValidationError as error:
            raise bad_input(error, cls) from None

    @model_validator(mode="after")
    def _check_ranks(self) -> Experiment:
        chosen, timeline = self.evaluation.nodes, self.evaluation.timeline
        if isinstance(chosen, int) and chosen > self.nodes:
            raise BadInput(f"evaluation.nodes: got {chosen}; accepted: at most {self.nodes}")
        listed = chosen if isinstance(chosen, list) else []
        recorded = timeline.ranks(self.nodes) if timeline else []
        for field, ranks in (("evaluation.nodes", listed), ("evaluation.timeline.nodes", recorded)):
            if any(not 0 <= rank < self.nodes for rank in ranks):
                raise BadInput(f"{field}: got {ranks}; accepted: ranks 0 to {self.nodes - 1}")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), engine: str | None = None) -> Experiment:
        """Read an experiment file.

        Args:
            path: a YAML file, in which relative paths are relative to its folder, or the name of an
                experiment included in gossamer, such as "quickstart".
            overrides: assignments like ``"optimizer.lr=0.05"``, whose values are YAML; relative paths in them
                are relative to the working directory.
            engine: the name of an engine that replaces the file's.

        Raises:
            BadInput: for a missing file, invalid YAML, or invalid content.
        """
        file = examples.located(path)
        return cls.of(cls.read(file, overrides, engine), file.resolve().parent)

    @classmethod
    def read(
        cls, path: str | Path, overrides: Iterable[str] = (), engine: str | None = None
    ) -> dict[str, Any]:
        """The mapping in an experiment file, for :meth:`of`; arguments as for :meth:`load`. It is not validated yet, since
        components import torch, which takes seconds."""
        raw = read_mapping(path, "a YAML experiment file", _FIELDS)
        if "base" in raw and "task" not in raw:
            raise BadInput(f"{path}: a sweep; accepted: an experiment (gossamer sweep runs a sweep)")
        return cls._assigned(raw, overrides, engine)

    @classmethod
    def parse(
        cls,
        text: str,
        overrides: Iterable[str] = (),
        engine: str | None = None,
        *,
        folder: Path | None = None,
    ) -> Experiment:
        """The experiment in a YAML text; arguments and errors as for :meth:`load`."""
        return cls.of(cls._assigned(parse_mapping(text, "experiment", _FIELDS), overrides, engine), folder)

    @classmethod
    def _assigned(cls, raw: dict[str, Any], overrides: Iterable[str], engine: str | None) -> dict[str, Any]:
        assignments = list(overrides)
        if isinstance(raw.get("engine"), Mapping):
            raw["engine"] = {"name": "simulate", **raw["engine"]}
        if engine is not None:
            # This counts as the last assignment. A different engine drops the options of the old one, except a
            # trainer that both have, so that the bits stay the same.
            assignments = [text for text in assignments if not text.startswith("engine.name=")]
            assignments.append(f"engine.name={engine}")
            trainer = raw["engine"].get("trainer") if isinstance(raw.get("engine"), Mapping) else None
            fields = _ENGINES[engine].model_fields if engine in _ENGINES else {}
            known = get_args(fields["trainer"].annotation) if fields else ()
            if trainer in known and not any(
                text.startswith(("engine=", "engine.trainer=")) for text in assignments
            ):
                assignments.append(f"engine.trainer={trainer}")
        assign_all(raw, assignments, cls)
        return raw

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path | None = None) -> Experiment:
        """The experiment in a mapping; relative paths are relative to ``folder``. Raises BadInput for invalid
        values."""
        return cls.model_validate(dict(raw), context={"folder": folder})

    def override(self, **changes: Any) -> Experiment:
        """A validated copy with other values for some fields. Raises BadInput for invalid values."""
        return Experiment.of({**self.model_dump(mode="json"), **changes})

    def to_yaml(self) -> str:
        """The resolved experiment as YAML text with every field. Parsing it returns the same experiment."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    def save(self, path: str | Path) -> None:
        """Write the resolved experiment as a YAML file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


# --- the mapping in a YAML file, before it is validated


def read_mapping(path: str | Path, accepted: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """The mapping in a YAML file. BadInput for a missing file, invalid YAML, or anything but a mapping.
    ``accepted`` and ``fields`` describe the expected file and fields in messages."""
    text = files.read_text(Path(path), files.MAX_YAML_BYTES, None, accepted)
    return parse_mapping(text, str(path), fields)


def parse_mapping(text: str, source: str, fields: str = "a mapping of fields") -> dict[str, Any]:
    """The mapping in a YAML text from ``source``. ``fields`` and errors are as in :func:`read_mapping`."""
    raw = files.parse_yaml(text, source)
    if not isinstance(raw, dict):
        raise BadInput(f"{source}: got {shown(raw)[:100]}; accepted: {fields}")
    return raw


T = TypeVar("T")
_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def assign_all(raw: dict[str, Any], overrides: Iterable[str], model: type[BaseModel]) -> None:
    """Apply assignments from the command line, ``"a.b=value"`` with a YAML value, in place; their order does
    not matter. BadInput for an invalid assignment, or a second one to the same field."""
    values: dict[str, tuple[Any, str]] = {}
    for override in overrides:
        path, separator, text = override.partition("=")
        source = f"--set {override}"
        if not separator or not _PATH.fullmatch(path):
            raise BadInput(f"{source}: accepted: a.b=value, e.g. optimizer.lr=0.05")
        if path in values:
            raise BadInput(f"{source}: {path} is already set; accepted: each field once")
        try:
            values[path] = placed(files.parse_yaml(text, source), Path()), source
        except BadInput:
            raise BadInput(
                f"{source}: {text!r} is not YAML; accepted: a YAML value, e.g. 0.05 or '{{name: ring}}'"
            ) from None
    for path, (value, source) in ordered(values):
        assign(raw, path, value, source, model)


def ordered(assignments: Mapping[str, T]) -> list[tuple[str, T]]:
    """Assignments by path, so that a component is replaced or named before its parameters are set."""
    return sorted(assignments.items(), key=lambda item: (item[0].count("."), not item[0].endswith(".name")))


def assign(raw: dict[str, Any], path: str, value: Any, source: str, model: type[BaseModel]) -> None:
    """Set one field of a file's mapping in place: ``"a"`` replaces it, ``"a.b"`` sets one parameter,
    ``"a.name"`` chooses another component, and a number selects an entry of a list, ``"a.0.b"``. ``source`` is
    the origin of the assignment, for messages. The defaults of ``model`` are used for components that the
    file leaves out. BadInput for a path through a value without fields."""
    if not _PATH.fullmatch(path):
        raise BadInput(f"{source}: got {path!r}; accepted: names joined by dots, e.g. optimizer.lr")
    *parents, last = path.split(".")
    fields: Any = raw
    for depth, name in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(fields, list):
            if not name.isdecimal() or int(name) >= len(fields):
                raise BadInput(f"{source}: {where}; accepted: an entry from 0 to {len(fields) - 1}")
            key: Any = int(name)
        else:
            default = model.model_fields[name].default if depth == 0 and name in model.model_fields else None
            inner = fields.get(name, default if isinstance(default, dict | str) else {})
            if isinstance(inner, str) and depth == 0:
                # A bare name stands for a component with default parameters; "initial" is not a component.
                inner = {} if name == "initial" else {"name": inner}
            key, fields[name] = name, inner
        fields[key] = copy(fields[key])  # a YAML alias is the same object
        fields = fields[key]
        if not isinstance(fields, dict) and not (isinstance(fields, list) and depth + 1 < len(parents)):
            raise BadInput(f"{source}: {where} is {shown(fields)}, which has no fields")
    if parents and last == "name" and fields.get("name", value) != value:
        fields.clear()  # the parameters of the old component do not apply to the new one
    fields[last] = value
