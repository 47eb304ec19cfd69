"""Sweep: many experiments that differ in named ways, the cells; and the folders of their runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator

from gossamer.config import Experiment, Section, assign, assign_all, examples
from gossamer.config.experiment import Seed, read_mapping
from gossamer.config.registry import FromCommandLine, FromFolder
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, suggest
from gossamer.results.run import part, short_names

if TYPE_CHECKING:
    import polars as pl

_MOST_SEEDS = 100_000
_OWN = {"name": "a run is named after its cell", "seed": "seeds are listed under seeds"}
"""Fields of an experiment that belong to the sweep, and why."""


def text_keys(value: Any) -> Any:
    """Text keys, where YAML reads a bare ``7:`` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value


def _counted(value: Any) -> Any:
    """A number of seeds stands for 1, 2, ..."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_SEEDS:
        return list(range(1, value + 1))
    if value is not None and not isinstance(value, list):
        raise ValueError(f"a number from 1 to {_MOST_SEEDS}, or a list")
    return value


_Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][^\n]*$")]
_Overrides = Annotated[dict[str, Any], BeforeValidator(text_keys)]


class SweepFile(Section):
    """The contents of a sweep file; docs/sweeps.md describes the fields."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    base: str | dict[str, Any]
    overrides: _Overrides | None = None
    seeds: Annotated[list[Seed] | None, BeforeValidator(_counted)] = None
    cells: Annotated[dict[_Name, _Overrides | None] | None, BeforeValidator(text_keys)] = None
    grid: Annotated[dict[str, list[Any] | _Overrides] | None, BeforeValidator(text_keys)] = None
    reproduction: dict[str, Any] | None = None  # which gossamer reproduce reads

    @field_validator("cells", "grid", "seeds")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value is not None and not value:
            raise ValueError("at least one, or to leave it out")
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("every seed once")
        return value


@dataclass(frozen=True)
class Cell:
    """One combination of overrides. ``name`` tells it from every other, e.g. ``"divshare, topology.degree=3"``; ``labels``
    are the same in parts, which become columns; ``overrides`` are in the order in which they are applied."""

    name: str
    labels: Mapping[str, Any]
    overrides: Sequence[tuple[str, Any]]

    def apply(self, raw: dict[str, Any], folder: Path | None, given: Iterable[str] = ()) -> None:
        """Apply the overrides to an experiment file's mapping, in place. Relative paths in them are relative to ``folder``.
        To undo an assignment of the command line, to one of the paths ``given``, is bad input."""
        said = {path: deepcopy(value_at(raw, path)) for path in given}
        for path, value in self.overrides:
            assign(raw, path, _placed(value, folder), "override", Experiment)
        undone = [path for path, value in said.items() if not _kept(value, value_at(raw, path))]
        if undone:
            raise BadInput(
                f"--set {', '.join(undone)}: overridden by the sweep; accepted: fields that no cell overrides, and"
                " those to which the grid gives one value"
            )


def cells_of(file: SweepFile, base_name: str) -> list[Cell]:
    """The cells of a sweep, in the file's order, the last key of the grid changing fastest; ``base_name`` is the only one of
    a file without cells and grid. A field that belongs to the sweep, and two values of an axis of one label, are refused."""
    named = file.cells or ({base_name: None} if file.grid is None else {"": None})
    check_not_own("grid", file.grid or {})
    for name, overrides in named.items():
        check_not_own(f"cells.{name}", overrides or {})
    axes = [[(key, *each) for each in _axis(key, values)] for key, values in (file.grid or {}).items()]
    found = []
    for (name, overrides), point in product(named.items(), product(*axes)):
        labels = ({"cell": name} if name else {}) | {key: label for key, label, _ in point}
        merged = dict(overrides or {})
        for key, _, value in point:
            merged |= value if _is_group(key, value) else {key: value}
        found.append(Cell(", ".join(starmap(part, labels.items())), labels, in_order(merged)))
    return found


def _is_group(key: str, value: Any) -> bool:
    """Whether a key of the grid is no field but the name of an axis, whose values are overrides."""
    if key.partition(".")[0] in Experiment.model_fields or not isinstance(value, Mapping):
        return False
    check_not_own(f"grid.{key}", value)
    return True


def set_axes(file: SweepFile, base: Mapping[str, Any], given: Iterable[str]) -> SweepFile:
    """Let an assignment of the command line, which ``base`` has already, replace the only value of a field in the grid."""
    grid = dict(file.grid or {})
    for key in set(given) & grid.keys():
        if isinstance(values := grid[key], list) and len(values) == 1:
            grid[key] = [value_at(base, key)]
    return file.model_copy(update={"grid": grid or None})


def check_not_own(where: str, keys: Iterable[str]) -> None:
    """Refuse fields that belong to the sweep."""
    for key in _OWN.keys() & set(keys):
        raise BadInput(f"{where}: got {key!r}; accepted: other fields ({_OWN[key]})")


def value_at(raw: Mapping[str, Any], path: str) -> Any:
    """The value of ``"a"`` or ``"a.b"`` in a file's mapping; None if it is not there."""
    found: Any = raw
    for name in path.split("."):
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _kept(before: Any, after: Any) -> bool:
    """Whether a value is still there; more may have been added to it."""
    if isinstance(before, Mapping):
        return isinstance(after, Mapping) and all(
            _kept(value, after.get(key)) for key, value in before.items()
        )
    if isinstance(before, str) and isinstance(after, Mapping):
        after = after.get("name")  # a bare name becomes a mapping when it gets parameters
    # Equal text may be another path: its type tells the folder.
    return type(before) is type(after) and bool(before == after)


def in_order(overrides: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Overrides with the replacement of a field and the name of a component before parameters."""
    return sorted(
        overrides.items(), key=lambda pair: 0 if "." not in pair[0] else 2 - pair[0].endswith(".name")
    )


def _axis(key: str, values: list[Any] | Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The values of one key of the grid: label, value. A component's name stands for it, if there is one of that name."""
    if not values:
        raise BadInput(f"grid.{key}: no value; accepted: at least one")
    if isinstance(values, Mapping):
        return list(values.items())
    names = [value.get("name") for value in values if isinstance(value, Mapping)]
    unique = len(set(map(str, names))) == len(names)
    labels = [
        value["name"] if unique and isinstance(value, Mapping) and "name" in value else _label(value)
        for value in values
    ]
    for label in labels:
        if [str(each) for each in labels].count(str(label)) > 1:
            raise BadInput(
                f"grid.{key}: {label} is listed twice; accepted: every value once, or under its own name"
            )
    return list(zip(labels, values, strict=True))


def _label(value: Any) -> Any:
    """A label that fits into a table: a plain value unchanged, everything else as text."""
    if isinstance(value, Mapping):
        return " ".join(
            str(item) if key == "name" else f"{key}={_label(item)}" for key, item in value.items()
        )
    return value if isinstance(value, bool | int | float | str) else "null" if value is None else str(value)


def _placed(value: Any, folder: Path | None) -> Any:
    """A copy whose texts, which may be paths, are marked as relative to the sweep's file, wherever the base is."""
    if isinstance(value, list):
        return [_placed(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {key: _placed(item, folder) for key, item in value.items()}
    if folder is None or not isinstance(value, str) or isinstance(value, FromCommandLine):
        return value
    placed = FromFolder(value)
    placed.folder = folder
    return placed


@dataclass(frozen=True)
class Planned:
    """One experiment of a sweep, with its seed. ``run`` is the folder of its attempts within the sweep's, which equal
    experiments of two cells share; ``short`` is the cell's name without what all cells have in common."""

    cell: Cell
    experiment: Experiment
    run: str
    short: str

    @property
    def title(self) -> str:
        """Cell and seed, as text."""
        return f"{self.short}, seed {self.experiment.seed}"


@dataclass(frozen=True)
class Sweep:
    """Cells times seeds over one base experiment, from :meth:`load` or :meth:`of`. ``folder`` is ``<out>/<name>``, where
    :func:`gossamer.run_sweep` records it; ``planned`` is every experiment, cell by cell."""

    name: str
    folder: Path
    planned: tuple[Planned, ...]

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), out: str | Path = "runs") -> Sweep:
        """Read a sweep file and check every experiment in it.

        Args:
            path: a YAML file (docs/sweeps.md); relative paths in it are relative to it. Or the name of a sweep that comes
                with gossamer, such as "sweeps/quickstart".
            overrides: assignments like ``"stop.rounds=50"`` for all cells, or to ``seeds``.
            out: the folder of all runs.

        Raises:
            BadInput: for anything that can't be used, naming the cell.
        """
        file = examples.located(path, sweeps=True)
        raw = read_mapping(file, "a YAML sweep file", "a mapping with 'base'")
        if "task" in raw and "base" not in raw:
            raise BadInput(
                f"{path}: an experiment; accepted: a sweep, with 'base' (gossamer run runs an experiment)"
            )
        raw = {"name": re.sub(r"[^\w.-]", "-", file.stem), **raw}
        return cls.of(raw, file.resolve().parent, overrides, out)

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        folder: Path | None = None,
        overrides: Iterable[str] = (),
        out: str | Path = "runs",
    ) -> Sweep:
        """The sweep that a mapping describes; relative paths are relative to ``folder``, else as for
        :meth:`load`."""
        given, own = list(overrides), dict(raw)
        seeds = [each for each in given if each.startswith("seeds=")]
        given = [each for each in given if each not in seeds]
        assign_all(own, seeds, SweepFile)
        try:
            file = SweepFile.model_validate(own)
        except ValidationError as error:
            raise bad_input(error, SweepFile) from None
        base, home = deepcopy(file.base), folder
        if isinstance(base, str):
            path = base if folder is None else folder / base
            base, home = read_mapping(path, "base: an experiment file"), Path(path).resolve().parent
            if "base" in base and "task" not in base:
                raise BadInput(f"base: {path}, a sweep; accepted: an experiment file")
        check_not_own("overrides", file.overrides or {})
        Cell("overrides", {}, in_order(file.overrides or {})).apply(base, folder)
        paths = [override.partition("=")[0] for override in given]
        check_not_own("--set", paths)
        assign_all(base, given, Experiment)
        cells = cells_of(set_axes(file, base, paths), str(base.get("name", file.name)))
        planned = _planned(base, home, cells, folder, file.seeds, paths)
        return cls(file.name, Path(out) / file.name, tuple(planned))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, in the file's order."""
        return tuple({each.cell.name: each.cell for each in self.planned}.values())

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that every cell is run with."""
        return tuple(dict.fromkeys(each.experiment.seed for each in self.planned))

    def chosen(self, only: Sequence[str] = ()) -> tuple[Planned, ...]:
        """The experiments of the cells ``only``, or of all: a cell's whole name, that of progress lines, an entry of
        ``cells``, which stands for all its cells, or ``axis=value`` of the grid, which keeps those cells of the others that
        have the value. A name that no cell has is bad input."""
        names, points = {}, {}
        for each in self.planned:
            cell, labels = each.cell, each.cell.labels
            names[cell.name] = {cell.name, each.short, str(labels.get("cell", cell.name))}
            points[cell.name] = {f"{axis}={value}": axis for axis, value in labels.items() if axis != "cell"}
        known = set().union(*names.values())
        axes = {point: axis for each in points.values() for point, axis in each.items()}
        wanted: dict[str | None, set[str]] = {}  # by axis; None is the name
        for name in only:
            if name not in known and name not in axes:
                every = sorted(known | axes.keys())
                raise BadInput(
                    f"--only {name}: no such cell{suggest(name, every)}; accepted: {'; '.join(every)}"
                )
            wanted.setdefault(None if name in known else axes[name], set()).add(name)

        def fits(name: str) -> bool:
            return all(each & (names[name] | points[name].keys()) for each in wanted.values())

        return tuple(each for each in self.planned if fits(each.cell.name))

    def to_yaml(self) -> str:
        """A sweep file of the same experiments with every cell written out: the base has what all share, and paths are
        absolute."""
        dumps = {each.cell.name: each.experiment.model_dump(mode="json") for each in self.planned}
        first, *others = dumps.values()
        own = {"name", "seed"}
        shared = {key for key in first if all(other[key] == first[key] for other in others)} - own
        said = {
            "name": self.name,
            "base": {key: value for key, value in first.items() if key in shared},
            "seeds": list(self.seeds),
            "cells": {
                name: {key: value for key, value in dump.items() if key not in shared | own}
                for name, dump in dumps.items()
            },
        }
        return str(yaml.safe_dump(said, sort_keys=False, allow_unicode=True))

    def results(self) -> pl.DataFrame:
        """One row per experiment; see :func:`gossamer.sweep.table.results`."""
        from gossamer.sweep.table import results

        return results(self)

    def summary(self, metric: str) -> pl.DataFrame:
        """Mean and 95 % confidence interval of a metric over each cell's seeds; see
        :func:`gossamer.sweep.table.summary`."""
        from gossamer.sweep.table import summary

        return summary(self.results(), metric)


def _planned(
    base: dict[str, Any],
    home: Path | None,
    cells: Sequence[Cell],
    folder: Path | None,
    seeds: Sequence[int] | None,
    given: Sequence[str],
) -> list[Planned]:
    found: list[Planned] = []
    runs: dict[str, str] = {}
    digests: dict[Path, str | None] = {}
    shorts = short_names([(cell.name, cell.labels) for cell in cells])
    for cell, short in zip(cells, shorts, strict=True):
        raw = deepcopy(base)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", cell.name).strip("-")[:100]
        try:
            cell.apply(raw, folder, given)
            first = Experiment.of({**raw, "name": slug}, home)
        except BadInput as error:
            raise BadInput(*(f"cell {cell.name}: {problem}" for problem in error.problems)) from None
        for seed in [first.seed] if seeds is None else seeds:
            experiment = first.model_copy(update={"seed": seed})
            key = _key(experiment, digests)
            run = runs.setdefault(key, f"{slug[:60]}-seed{seed}-{key[:10]}")
            found.append(Planned(cell, experiment, run, short))
    return found


def _key(experiment: Experiment, digests: dict[Path, str | None]) -> str:
    """Tells the runs of a sweep apart: a hash of the whole experiment and of the files that it names. What does not change
    its results (name, threads, trackers) is left out; data in the data root is identified by its name. ``digests`` are of
    files, each of which is read once, so that a sweep sees one state of it."""
    left_out: Any = {"name": True, "checkpoint": True, "trackers": True, "engine": {"workers"}}
    said = experiment.model_dump(mode="json", exclude=left_out)
    paths = set(_paths({name: value for name, value in experiment if name not in ("data_root", "trackers")}))
    for path in paths - digests.keys():
        try:
            digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:  # the run will report it
            digests[path] = None
    if paths:
        said["files"] = {str(path): digests[path] for path in paths}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _paths(value: Any) -> Iterator[Path]:
    """Every path in a component's parameters, also in those of nested components."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, BaseModel | Mapping):
        yield from _paths(list(dict(value).values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)
