"""Experiment: one complete description of what is run."""

from __future__ import annotations

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

from gossamer.config.assign import assign_all
from gossamer.config.engines import Processes, Simulate, other_engine, read_engine, same_engine
from gossamer.config.mappings import parse_mapping, read_mapping
from gossamer.config.registry import Component, FilePath, build, component
from gossamer.config.sections import Checkpoints, Count, Evaluation, Failures, Gather, Stop
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput

_FIELDS = "a mapping of fields such as 'task' and 'nodes'"


def _wrappers(value: Any, info: Any) -> Any:
    return (
        [build("wrapper", item, info.context, f"wrappers[{number}]") for number, item in enumerate(value)]
        if isinstance(value, list | tuple)
        else value
    )


def _codec(value: Any, info: Any) -> Any:
    if isinstance(value, list | tuple):
        value = {"name": "chain", "codecs": list(value)}
    return None if value is None else build("codec", value, info.context)


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
    codec: Annotated[Any, BeforeValidator(_codec)] = None
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
    engine: Annotated[Simulate | Processes, BeforeValidator(read_engine)] = Simulate()

    @field_serializer(
        "task", "partition", "topology", "algorithm", "optimizer", "compute", "network", when_used="always"
    )
    def _component(self, value: Component) -> dict[str, Any]:
        return value.spec()

    @field_serializer("codec", when_used="always")
    def _codec_spec(self, value: Component | None) -> Any:
        return None if value is None else value.spec()

    @field_serializer("wrappers", "faults", when_used="always")
    def _components(self, value: tuple[Component, ...]) -> list[dict[str, Any]]:
        return [item.spec() for item in value]

    @field_serializer("data_root", when_used="always")
    def _path(self, value: Path | None) -> str | None:
        return None if value is None else str(value)

    @property
    def has_faults(self) -> bool:
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
            engine: another engine's name, in place of the file's; the overrides may not name one besides.

        Raises:
            BadInput: for a missing file, broken YAML, or anything in it that can't be used.
        """
        return cls.of(cls.read(path, overrides, engine), Path(path).resolve().parent)

    @classmethod
    def read(
        cls, path: str | Path, overrides: Iterable[str] = (), engine: str | None = None
    ) -> dict[str, Any]:
        """What an experiment file says, as :meth:`of` takes it. Nothing of it is used yet: its components bring torch, which
        takes seconds. Arguments as for :meth:`load`.

        Raises:
            BadInput: for a missing file, broken YAML, or assignments that are none.
        """
        raw = read_mapping(path, "a YAML experiment file", _FIELDS)
        if "base" in raw and "task" not in raw:
            raise BadInput(f"{path}: a sweep; accepted: an experiment (gossamer sweep runs a sweep)")
        return cls._described(raw, overrides, engine)

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
        return cls.of(cls._described(parse_mapping(text, source, _FIELDS), overrides, engine), folder)

    @classmethod
    def _described(cls, raw: dict[str, Any], overrides: Iterable[str], engine: str | None) -> dict[str, Any]:
        if engine is not None:  # instead of the file's; what the overrides say of it is kept, or refused
            raw["engine"] = other_engine(raw.get("engine"), engine)
        assign_all(raw, overrides, cls)
        if engine is not None:
            raw["engine"] = same_engine(raw["engine"], engine)
        return raw

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
