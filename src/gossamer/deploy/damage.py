"""Records that are damaged in part: what can be read of them is used, and the rest is named and kept aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gossamer.config.mappings import parse_mapping
from gossamer.config.validation import bad_input
from gossamer.deploy.record import NodeRecord
from gossamer.errors import BadInput
from gossamer.results.recorder import EVENTS, METRICS, TIMELINE, TRAFFIC, frames_of, segments
from gossamer.results.segment import read_segment

_TABLES: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "metrics": (METRICS | TRAFFIC, ("node", "round")),
    "events": (EVENTS, ("event",)),
    "timeline": (TIMELINE, ("node", "kind", "start_s", "end_s")),
}
"""The types of columns, and what every row has, by the kind of a table and its segments."""
_OF_ONE_NODE = ("metrics", "timeline")


class _Setup(BaseModel):
    """What is read of a node's ``setup.json``."""

    model_config = ConfigDict(strict=True)

    nodes: int | None = Field(None, ge=1)
    directed: bool | None = None
    parameters: int | None = Field(None, ge=0)
    samples: list[int] | None = None
    labels: list[list[int]] | None = None
    classes: list[str] | None = None
    outcome_ranks: list[int] = []
    graphs: dict[int, list[tuple[int, int]]] = {}


class _Status(BaseModel):
    """What is read of a node's ``status.json``."""

    model_config = ConfigDict(strict=True)

    status: Literal["done", "failed", "stopped"]
    error: str | None = None
    wall_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    profile: dict[str, float] | None = None
    peak_vectors: int | None = None
    private_bytes: dict[str, float] | None = None


class _Environment(BaseModel):
    """A node's ``environment.json``, which is only passed on."""


_JSON: dict[str, type[BaseModel]] = {
    "setup.json": _Setup,
    "environment.json": _Environment,
    "status.json": _Status,
}


@dataclass(frozen=True)
class Damage:
    """What is wrong with the files of a record.

    Args:
        unusable: files that can't be used at all, and why.
        mixed: files some rows of which are not the node's own, and how many.
    """

    unusable: dict[Path, str] = field(default_factory=dict)
    mixed: dict[Path, str] = field(default_factory=dict)


def damage_of(folder: Path, node: NodeRecord) -> Damage:
    """The files of a record (of its models apart) that can't be used, and why.

    Args:
        folder: the record of one node.
        node: whose it is.
    """
    damage = Damage()
    for kind, (schema, needed) in _TABLES.items():
        for path in _there(folder / f"{kind}.parquet", *segments(folder, kind)):
            try:
                others = _others(path, schema, needed, node.rank if kind in _OF_ONE_NODE else None)
            except (pl.exceptions.PolarsError, BadInput, OSError, ValueError) as error:
                damage.unusable[path] = _line(error)
            else:
                if others:
                    damage.mixed[path] = f"{others} rows of other nodes; accepted: those of node {node.rank}"
    checks = dict.fromkeys(segments(folder, "graphs"), _check_graphs)
    checks |= dict.fromkeys(_there(*(folder / name for name in _JSON)), _check_json)
    checks[folder / "experiment.yaml"] = _check_experiment
    for path, check in checks.items():
        try:
            check(path, node)
        except (BadInput, OSError, ValueError) as error:
            damage.unusable[path] = _line(error)
    return damage


def without(folder: Path, damaged: Iterable[Path], place: Path) -> Path:
    """The same record without some files, elsewhere, as links; gives where.

    Args:
        folder: the record.
        damaged: what is left out.
        place: a folder to make it in.
    """
    sound, left_out = place / folder.name, set(damaged)
    sound.mkdir(parents=True)
    for path in folder.rglob("*"):
        if path.is_file() and left_out.isdisjoint((path, *path.parents)):
            link = sound / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return sound


def keep_aside(files: Iterable[Path], place: Path) -> None:
    """Copy damaged files of several records, each into a folder of its record's name; what can't be copied is left."""
    for file in files:
        within = file.parent.parent if file.parent.name == "segments" else file.parent
        aside = place / within.name / file.relative_to(within)
        if file.is_file():
            aside.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(file, aside)
            except OSError:
                aside.unlink(missing_ok=True)


def _there(*paths: Path) -> Iterator[Path]:
    """Those that there are; a link to nowhere is there, and can't be read."""
    return (path for path in paths if path.exists() or path.is_symlink())


def _others(path: Path, schema: Mapping[str, Any], needed: tuple[str, ...], rank: int | None) -> int:
    """How many rows of a table or segment are not of a rank, none where None is given.

    Raises:
        BadInput: if it does not hold what it should.
    """
    tables = [pl.read_parquet(path)] if path.suffix == ".parquet" else frames_of(path, schema, needed)
    others = 0
    for table in tables:
        for name in needed:
            if name not in table.columns or table[name].null_count():
                raise BadInput(f"rows without {name!r}; accepted: rows with {', '.join(needed)}")
        for name, dtype in table.schema.items():
            wanted = schema.get(name)
            if not _fits(dtype, wanted, name):
                raise BadInput(f"{name} is {dtype}; accepted: {wanted or 'numbers, truth values or text'}")
        others += 0 if rank is None else int((table["node"] != rank).sum())
    return others


def _fits(dtype: Any, wanted: Any, name: str) -> bool:
    """Whether a column can be put together with those of other records."""
    if dtype == pl.Null:
        return True
    if wanted == pl.String:
        return bool(dtype == pl.String)
    if wanted is not None and wanted.is_integer():
        return dtype in (pl.Int32, pl.Int64)
    number = dtype.is_integer() or dtype.is_float()
    return bool(
        number or (wanted is None and not name.startswith("test_") and dtype in (pl.Boolean, pl.String))
    )


def _check_graphs(path: Path, node: NodeRecord) -> None:
    for row in read_segment(path):
        try:
            graph = _Setup.model_validate_json(json.dumps({"graphs": {row["round"]: row["edges"]}}))
        except KeyError as error:
            raise BadInput(f"a row without {error}; accepted: rows with round, edges") from None
        except ValidationError as error:
            raise bad_input(error, _Setup) from None
        _check_ranks(graph, node)


def _check_json(path: Path, node: NodeRecord) -> None:
    schema = _JSON[path.name]
    try:
        read = schema.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise bad_input(error, schema, path.name) from None
    if isinstance(read, _Setup):
        if read.nodes not in (None, node.nodes):
            raise BadInput(f"nodes: got {read.nodes}; accepted: {node.nodes}, as in its node.json")
        _check_ranks(read, node)


def _check_ranks(setup: _Setup, node: NodeRecord) -> None:
    ranks = {
        *setup.outcome_ranks,
        *(rank for edges in setup.graphs.values() for edge in edges for rank in edge),
    }
    for rank in sorted(ranks - set(range(node.nodes)))[:1]:
        raise BadInput(f"evaluated, graphs: got node {rank}; accepted: 0 to {node.nodes - 1}")


def _check_experiment(path: Path, node: NodeRecord) -> None:
    parse_mapping(path.read_text(encoding="utf-8"), path.name)


def _line(error: Exception) -> str:
    """An error in one line."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"
