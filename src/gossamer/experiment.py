"""Experiment: one complete description of what is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from gossamer.errors import BadInput, suggest
from gossamer.registry import Component, FilePath, FromCommandLine, build, component
from gossamer.validation import bad_input

Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, at least 1. Strict: ``yes`` is not a number."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Timeline(_Section):
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


class Evaluation(_Section):
    """When and on what models are judged for the record; it costs no time on the nodes' clocks.

    Args:
        every_rounds: a row a node every so many of its rounds, and before the first and after the last.
        every_s: rows of all nodes at common instants, every so many seconds (for asynchronous algorithms).
        nodes: whose models are judged: "all", "average" (the average model), a number (that many, drawn), or
            a list of ranks.
        samples: how many test samples, drawn once; null is all.
        timeline: when nodes compute and send, for a window of time; null is off.
    """

    every_rounds: Count | None = 10
    every_s: float | None = Field(default=None, gt=0)
    nodes: Literal["all", "average"] | Count | list[int] = "all"
    samples: int | None = Field(default=1000, ge=1)
    timeline: Timeline | None = None


class Target(_Section):
    """A level of a metric, at which a run may stop: mean over judged nodes; losses, errors and distances count
    downwards.

    Args:
        metric: a column of the recorded rows, e.g. test_accuracy.
        value: the level.
    """

    metric: str
    value: float


class Stop(_Section):
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


class Gather(_Section):
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


class Failures(_Section):
    """When a node is taken for dead by its peers.

    Args:
        heartbeat_s: seconds of silence on a connection after which a sign of life is sent on it; null sends none where a
            supervisor sees deaths (the engine processes on one machine), and else a fifth of detection_s.
        detection_s: seconds without a sign of life, or in which it can't be reached, after which a peer is lost. With
            heartbeats, one that stands still is noticed within detection_s + heartbeat_s / 2 seconds.
    """

    heartbeat_s: float | None = Field(default=None, gt=0)
    detection_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _beats_in_time(self) -> Failures:
        if self.heartbeat_s is not None and 2 * self.heartbeat_s > self.detection_s:
            raise ValueError(f"heartbeat_s: got {self.heartbeat_s}; accepted: at most half of detection_s")
        return self


class Checkpoints(_Section):
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


class Simulate(_Section):
    """Virtual time on this machine.

    Args:
        trainer: "sequential" (one node at a time), "batched" (vmap over nodes), or "auto" (measures both on
            the first batches).
        workers: threads of this process that share the computation; null is one a core. Results don't depend on
            it.
        threads: torch's threads in each worker; the bits of "sequential" with one thread are those of the engine
            processes.
        device: where models and data live.
    """

    name: Literal["simulate"] = "simulate"
    trainer: Literal["auto", "sequential", "batched"] = "auto"
    workers: Count | None = None
    threads: Count = 1
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")


class Processes(_Section):
    """One operating-system process a node, over TCP on loopback.

    Args:
        trainer: one node has nothing to batch with: "auto" is "sequential".
        threads: torch's threads in each node.
        start_timeout_s: seconds within which all nodes must be up.
        train_at_once: how many nodes compute at the same time; null is the number of cores.
        memory: what becomes of the memory that a node's computation has freed: "keep" has it ready for the next one (fast),
            "trim" hands it back (small), "auto" keeps it if all nodes' fits into half of what the machine has left.
        pace: what was computed sooner than the compute profile says is waited for until then, so that real seconds
            compare with virtual ones.
        restart: what becomes of a node that dies though no fault of the experiment says so: "never", or "always" a new
            start, from its newest checkpoint.
        restart_limit: how often, for each node.
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


ENGINES: dict[str, type[Simulate] | type[Processes]] = {"simulate": Simulate, "processes": Processes}


_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def _engine(value: Any) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", "simulate")
    if not isinstance(name, str) or name not in ENGINES:
        raise BadInput(
            f"engine.name: got {name!r}{suggest(str(name), ENGINES)}; accepted: {', '.join(ENGINES)}"
        )
    try:
        return ENGINES[name].model_validate(dict(value))
    except ValidationError as error:
        raise bad_input(error, ENGINES[name], "engine") from None


def _wrappers(value: Any) -> Any:
    return (
        [build("wrapper", item, None, "wrappers") for item in value]
        if isinstance(value, list | tuple)
        else value
    )


def _faults(value: Any, info: Any) -> Any:
    return (
        [build("fault", item, info.context, f"faults.{number}") for number, item in enumerate(value)]
        if isinstance(value, list | tuple)
        else value
    )


class Experiment(BaseModel):
    """One complete description: task, partition, topology, algorithm, network, compute, faults, evaluation, stop
    rule, seed.

    Every pluggable field takes a registered name or "package.module:Class", and its parameters. Frozen;
    :meth:`override` gives a changed copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(default=1, ge=0, strict=True)
    nodes: Count
    task: component("task")  # type: ignore[valid-type]
    partition: component("partition") = Field(default="iid", validate_default=True)  # type: ignore[valid-type]
    topology: component("topology") = Field(default="ring", validate_default=True)  # type: ignore[valid-type]
    algorithm: component("algorithm")  # type: ignore[valid-type]
    wrappers: Annotated[tuple[Any, ...], BeforeValidator(_wrappers)] = ()
    optimizer: component("optimizer") = Field(default={"name": "sgd", "lr": 0.1}, validate_default=True)  # type: ignore[valid-type]
    batch_size: Count | Literal["full"] = 16
    initial: Literal["common", "independent"] = "common"
    compute: component("compute") = Field(default="constant", validate_default=True)  # type: ignore[valid-type]
    network: component("network") = Field(default="uniform", validate_default=True)  # type: ignore[valid-type]
    faults: Annotated[tuple[Any, ...], BeforeValidator(_faults)] = ()
    gather: Gather = Gather()
    failures: Failures = Failures()
    evaluation: Evaluation = Evaluation()
    stop: Stop
    checkpoint: Checkpoints = Checkpoints()
    data_root: FilePath | None = None
    engine: Annotated[Simulate | Processes, BeforeValidator(_engine)] = Simulate()

    @field_serializer(
        "task", "partition", "topology", "algorithm", "optimizer", "compute", "network", when_used="always"
    )
    def _component(self, value: Component) -> dict[str, Any]:
        return value.spec()

    @field_serializer("wrappers", "faults", when_used="always")
    def _components(self, value: tuple[Component, ...]) -> list[dict[str, Any]]:
        return [item.spec() for item in value]

    @field_serializer("data_root", when_used="always")
    def _path(self, value: Path | None) -> str | None:
        return None if value is None else str(value)

    @property
    def mortal(self) -> bool:
        """Whether nodes may be away and come back. Such a run can't be resumed: its nodes are saved each for itself."""
        restarts = isinstance(self.engine, Processes) and self.engine.restart == "always"
        return bool(self.faults) or restarts

    @model_validator(mode="after")
    def _known_ranks(self) -> Experiment:
        chosen = self.evaluation.nodes
        if isinstance(chosen, int) and chosen > self.nodes:
            raise BadInput(
                f"evaluation.nodes: {chosen} of {self.nodes} nodes; accepted: at most {self.nodes}"
            )
        if isinstance(chosen, list) and any(not 0 <= rank < self.nodes for rank in chosen):
            raise BadInput(f"evaluation.nodes: got {chosen}; accepted: ranks 0 to {self.nodes - 1}")
        shown = [] if self.evaluation.timeline is None else self.evaluation.timeline.ranks(self.nodes)
        if any(not 0 <= rank < self.nodes for rank in shown):
            raise BadInput(f"evaluation.timeline.nodes: got {shown}; accepted: ranks 0 to {self.nodes - 1}")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), engine: str | None = None) -> Experiment:
        """Read an experiment file.

        Args:
            path: a YAML file; relative paths in it are relative to it.
            overrides: assignments like ``"optimizer.lr=0.05"``, whose values are YAML; relative paths in them
                are relative to the working directory.
            engine: another engine's name, in place of the file's.

        Raises:
            BadInput: for a missing file, broken YAML, or anything in it that can't be used.
        """
        raw = read_mapping(path, "a YAML experiment file")
        return cls._of_file(raw, overrides, engine, Path(path).resolve().parent)

    @classmethod
    def parse(
        cls,
        text: str,
        overrides: Iterable[str] = (),
        engine: str | None = None,
        *,
        folder: Path | None = None,
        source: str = "experiment",
    ) -> Experiment:
        """The experiment that a YAML text describes; arguments and errors as for :meth:`load`."""
        return cls._of_file(_mapping(text, source), overrides, engine, folder)

    @classmethod
    def _of_file(
        cls, raw: dict[str, Any], overrides: Iterable[str], engine: str | None, folder: Path | None
    ) -> Experiment:
        assign_all(raw, overrides)
        if engine is not None:
            raw["engine"] = _with_engine(raw.get("engine"), engine)
        return cls.of(raw, folder)

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path | None = None) -> Experiment:
        """The experiment that a mapping describes; relative paths are relative to ``folder``.

        Raises:
            BadInput: for anything in it that can't be used.
        """
        try:
            return cls.model_validate(dict(raw), context={"folder": folder})
        except ValidationError as error:
            raise bad_input(error, cls) from None

    def override(self, **changes: Any) -> Experiment:
        """A copy with other values for some fields, validated anew.

        Raises:
            BadInput: for a value that can't be used.
        """
        return Experiment.of({**self.model_dump(mode="json"), **changes})

    def to_yaml(self) -> str:
        """The resolved experiment: every field, as a YAML text that gives the same experiment again."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    def save(self, path: str | Path) -> None:
        """Write the resolved experiment as a YAML file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


def _with_engine(old: Any, name: str) -> dict[str, Any]:
    """Another engine with those of the old one's fields that it has too."""
    fields = ENGINES[name].model_fields if name in ENGINES else {}
    kept = {key: value for key, value in old.items() if key in fields} if isinstance(old, Mapping) else {}
    if name == "processes":
        # One node a process has one way to train.
        kept.pop("trainer", None)
        kept.pop("threads", None)
    return {**kept, "name": name}


def read_mapping(path: str | Path, accepted: str) -> dict[str, Any]:
    """What a YAML file says, which must be a mapping.

    Args:
        path: the file.
        accepted: what it should be, for messages.

    Raises:
        BadInput: for a missing file, broken YAML, or anything but a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{path}: {reason}; accepted: {accepted}") from None
    return _mapping(text, str(path))


def _mapping(text: str, source: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise BadInput(
            f"{source}: a {type(raw).__name__}; accepted: a mapping of fields such as 'task' and 'nodes'"
        )
    return raw


def assign_all(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Carry out assignments of the command line, ``"a.b=value"``, in what a file says."""
    # Another component is named before its parameters are given, whatever the order of the arguments.
    for override in sorted(overrides, key=lambda item: not item.partition("=")[0].endswith(".name")):
        path, separator, text = override.partition("=")
        if not separator or not _PATH.fullmatch(path):
            raise BadInput(f"--set {override}: accepted: a.b=value, e.g. optimizer.lr=0.05")
        try:
            value = _from_command_line(yaml.safe_load(text))
        except yaml.YAMLError:
            raise BadInput(f"--set {override}: {text!r} is not a YAML value") from None
        assign(raw, path, value, f"--set {override}")


def assign(raw: dict[str, Any], path: str, value: Any, said: str) -> None:
    """Set one field in what a file says: ``"a"`` replaces all of it, ``"a.b"`` one parameter.

    Args:
        raw: the file's mapping; changed in place.
        path: names, joined by dots.
        value: the new value.
        said: who asks for it, for messages.

    Raises:
        BadInput: for a path through something that has no fields.
    """
    if not _PATH.fullmatch(path):
        raise BadInput(f"{said}: got {path!r}; accepted: names joined by dots, e.g. optimizer.lr")
    *parents, last = path.split(".")
    place = raw
    for depth, name in enumerate(parents):
        inner = place.get(name, _default_spec(name) if depth == 0 else {})
        if isinstance(inner, str) and depth == 0:
            inner = {"name": inner}  # a bare name stands for a component with default parameters
        if not isinstance(inner, dict):
            raise BadInput(f"{said}: {'.'.join(parents[: depth + 1])} is {inner!r}, which has no fields")
        place[name] = inner
        place = inner
    if parents and last == "name" and "name" in place and place["name"] != value:
        place.clear()  # another component: the old one's parameters are not its own
    place[last] = value


def _default_spec(name: str) -> Any:
    """The component that a field stands for when the file leaves it out, as a file would say it."""
    field = Experiment.model_fields.get(name)
    spec = None if field is None else field.default
    return dict(spec) if isinstance(spec, dict) else spec if isinstance(spec, str) else {}


def _from_command_line(value: Any) -> Any:
    if isinstance(value, str):
        return FromCommandLine(value)
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    if isinstance(value, dict):
        return {key: _from_command_line(item) for key, item in value.items()}
    return value
