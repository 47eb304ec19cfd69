"""Experiment: one complete description of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from gossamer.config.mappings import assign_all, parse_mapping, read_mapping
from gossamer.config.registry import ComponentField, FilePath
from gossamer.config.sections import (
    Checkpoints,
    Count,
    Evaluation,
    Failures,
    Gather,
    Processes,
    Section,
    Simulate,
    Stop,
)
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, shown, suggest

_ENGINES: dict[str, type[Simulate] | type[Processes]] = {"simulate": Simulate, "processes": Processes}
_FIELDS = "a mapping of fields such as 'task' and 'nodes'"


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


class Experiment(Section):
    """One complete description of a run.

    Every pluggable field takes a registered name or "package.module:Class", with parameters. An experiment is frozen;
    :meth:`override` gives a changed copy.
    """

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(default=1, ge=0, strict=True)
    nodes: Count
    task: Annotated[Any, ComponentField("task")]
    partition: Annotated[Any, ComponentField("partition")] = Field(default="iid", validate_default=True)
    topology: Annotated[Any, ComponentField("topology")] = Field(default="ring", validate_default=True)
    poison: Annotated[tuple[Any, ...], ComponentField("poison", "poison", many=True)] = ()
    algorithm: Annotated[Any, ComponentField("algorithm")]
    codec: Annotated[Any, ComponentField("codec", optional=True), BeforeValidator(_chain)] = None
    wrappers: Annotated[tuple[Any, ...], ComponentField("wrapper", "wrappers", many=True)] = ()
    aggregator: Annotated[Any, ComponentField("aggregator")] = Field(default="mean", validate_default=True)
    optimizer: Annotated[Any, ComponentField("optimizer")] = Field(
        default={"name": "sgd", "lr": 0.1}, validate_default=True
    )
    batch_size: Count | Literal["full"] = 16
    initial: Literal["common", "independent"] = "common"
    compute: Annotated[Any, ComponentField("compute")] = Field(default="constant", validate_default=True)
    network: Annotated[Any, ComponentField("network")] = Field(default="uniform", validate_default=True)
    faults: Annotated[tuple[Any, ...], ComponentField("fault", "faults", many=True)] = ()
    gather: Gather = Gather()
    failures: Failures = Failures()
    evaluation: Evaluation = Evaluation()
    stop: Stop
    checkpoint: Checkpoints = Checkpoints()
    trackers: Annotated[tuple[Any, ...], ComponentField("tracker", "trackers", many=True)] = ()
    data_root: FilePath | None = None
    engine: Annotated[Simulate | Processes, BeforeValidator(_engine)] = Simulate()

    @property
    def has_faults(self) -> bool:
        """Whether nodes may leave and come back. Such a run can't be resumed, because its nodes are saved independently."""
        restarts = isinstance(self.engine, Processes) and self.engine.restart == "always"
        return bool(self.faults) or restarts

    @model_validator(mode="after")
    def _known_ranks(self) -> Experiment:
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
            path: a YAML file; relative paths in it are relative to its folder.
            overrides: assignments like ``"optimizer.lr=0.05"``, whose values are YAML; relative paths in them
                are relative to the working directory.
            engine: the name of an engine that replaces the file's; the overrides may not name a different one.

        Raises:
            BadInput: for a missing file, broken YAML, or anything in it that can't be used.
        """
        return cls.of(cls.read(path, overrides, engine), Path(path).resolve().parent)

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
        source: str = "experiment",
    ) -> Experiment:
        """The experiment in a YAML text; arguments and errors as for :meth:`load`."""
        return cls.of(cls._assigned(parse_mapping(text, source, _FIELDS), overrides, engine), folder)

    @classmethod
    def _assigned(cls, raw: dict[str, Any], overrides: Iterable[str], engine: str | None) -> dict[str, Any]:
        if engine is not None and engine_name(raw.get("engine")) != engine:
            raw["engine"] = {"name": engine}
        assign_all(raw, overrides, cls)
        if engine is not None:  # the overrides may leave it unnamed, or name another one
            said = raw["engine"] if isinstance(raw["engine"], Mapping) else {"name": raw["engine"]}
            raw["engine"] = {"name": engine, **said}
            if (other := raw["engine"]["name"]) != engine:
                raise BadInput(
                    f"engine.name: got {shown(other)} by --set, and {engine!r} by --engine or by the command;"
                    " accepted: one of them"
                )
        return raw

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path | None = None) -> Experiment:
        """The experiment in a mapping; relative paths are relative to ``folder``. Raises BadInput for unusable values."""
        try:
            return cls.model_validate(dict(raw), context={"folder": folder})
        except ValidationError as error:
            raise bad_input(error, cls) from None

    def override(self, **changes: Any) -> Experiment:
        """A validated copy with other values for some fields; raises BadInput for unusable ones."""
        return Experiment.of({**self.model_dump(mode="json"), **changes})

    def to_yaml(self) -> str:
        """The resolved experiment: a YAML text with every field, which gives the same experiment again."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    def save(self, path: str | Path) -> None:
        """Write the resolved experiment as a YAML file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")
