"""The engines as an experiment names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from gossamer.config.sections import Count, Section
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, shown, suggest


class Simulate(Section):
    """Virtual time on this machine.

    Args:
        trainer: "sequential" (one node at a time), "batched" (vmap over nodes), "auto" (measures both on the first
            batches), or "compiled" (one node at a time, by torch.compile, which takes a C++ compiler and its time).
        workers: threads of this process that share the computation; null is one a core. Results don't depend on
            it.
        threads: torch's threads in each worker; the bits of "sequential" with one thread are those of the engine
            processes.
        device: where models and data live.
    """

    name: Literal["simulate"] = "simulate"
    trainer: Literal["auto", "sequential", "batched", "compiled"] = "auto"
    workers: Count | None = None
    threads: Count = 1
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")


class Processes(Section):
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


def read_engine(value: Any) -> Any:
    """An engine from what a file says: its name, or a mapping with its name and its options.

    Raises:
        BadInput: for an unknown name, or options that it refuses.
    """
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", "simulate")
    if not isinstance(name, str) or name not in ENGINES:
        raise BadInput(
            f"engine.name: got {shown(name)}{suggest(str(name), ENGINES)}; accepted: {', '.join(ENGINES)}"
        )
    try:
        return ENGINES[name].model_validate(dict(value))
    except ValidationError as error:
        raise bad_input(error, ENGINES[name], "engine") from None


def engine_name(value: Any) -> Any:
    """The name in what a file says of its engine, whatever else is wrong with it."""
    return value.get("name", Simulate().name) if isinstance(value, Mapping) else value


def other_engine(old: Any, name: str) -> dict[str, Any]:
    """Another engine with those of the old one's fields that it has too."""
    fields = ENGINES[name].model_fields if name in ENGINES else {}
    kept = {key: value for key, value in old.items() if key in fields} if isinstance(old, Mapping) else {}
    if name == "processes":
        # One node a process has one way to train.
        kept.pop("trainer", None)
        kept.pop("threads", None)
    return {**kept, "name": name}


def same_engine(value: Any, name: str) -> dict[str, Any]:
    """What overrides have made of the engine that is asked for by name, which they may leave unnamed.

    Raises:
        BadInput: if they name another one.
    """
    fields = dict(value) if isinstance(value, Mapping) else {"name": value}
    other = fields.setdefault("name", name)
    if other != name:
        raise BadInput(
            f"engine.name: got {shown(other)} by --set, and {name!r} by --engine or by the command; accepted: one of them"
        )
    return fields
