"""Sweep: many experiments that differ in named ways (the cells), and the folders of their runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator

from gossamer.config import Experiment, Section, as_name, assign_all, examples
from gossamer.config.experiment import Seed, ordered, read_mapping
from gossamer.config.validation import bad_input
from gossamer.digests import combined, digest, digests
from gossamer.errors import BadInput
from gossamer.fingerprint import paths as named_paths
from gossamer.results.formatting import part, short_names
from gossamer.sweep.cells import Cell, Planned, SweepRuns, value_at

if TYPE_CHECKING:
    import polars as pl

_MAX_SEEDS = 100_000
_RESERVED = {"name": "a run is named after its cell", "seed": "seeds are listed under seeds"}
"""Fields of an experiment that belong to the sweep, and the reason."""


def text_keys(value: Any) -> Any:
    """Convert keys to text, since YAML reads a bare ``7:`` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value


def _expand_seeds(value: Any) -> Any:
    """Expand a number of seeds to 1, 2, ..."""
    if isinstance(value, int) and 0 < value <= _MAX_SEEDS:
        return list(range(1, value + 1))
    if value is not None and not isinstance(value, list):
        raise ValueError(f"a number from 1 to {_MAX_SEEDS}, or a list")
    return value


COLUMNS = {"run", "status", "cause", "rounds", "time_s", "wall_s", "bytes_sent"}
"""Columns of the results. No axis may have one of these names."""
_Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][^\n]*$")]
Overrides = Annotated[dict[str, Any], BeforeValidator(text_keys)]


class SweepFile(Section):
    """The contents of a sweep file; docs/sweeps.md describes the fields."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    base: str | dict[str, Any]
    overrides: Overrides | None = None
    seeds: Annotated[list[Seed] | None, BeforeValidator(_expand_seeds)] = None
    cells: Annotated[dict[_Name, Overrides | None] | None, BeforeValidator(text_keys)] = None
    grid: Annotated[dict[str, list[Any] | Overrides] | None, BeforeValidator(text_keys)] = None
    reproduction: dict[str, Any] | None = None  # read by gossamer reproduce

    @field_validator("cells", "grid", "seeds")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value is not None and not value:
            raise ValueError("at least one entry, or no such field")
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("each seed once")
        return value


def _cells(file: SweepFile, base_name: str) -> list[Cell]:
    """The cells of a sweep, in the file's order; the last key of the grid changes fastest. A file without
    cells and grid has one cell, ``base_name``."""
    named = file.cells or ({base_name: None} if file.grid is None else {"": None})
    _check_not_reserved("grid", file.grid or {})
    for key in COLUMNS & (file.grid or {}).keys():
        raise BadInput(
            f"grid.{key}: a column of the results has this name; accepted: another name for the axis"
        )
    for name, overrides in named.items():
        _check_not_reserved(f"cells.{name}", overrides or {})
    axes = [[(key, *point) for point in _axis(key, values)] for key, values in (file.grid or {}).items()]
    cells = []
    for (name, overrides), point in product(named.items(), product(*axes)):
        labels = ({"cell": name} if name else {}) | {key: label for key, label, _ in point}
        merged = dict(overrides or {})
        for key, _, value in point:
            if key.partition(".")[0] in Experiment.model_fields or not isinstance(value, Mapping):
                merged[key] = value
            else:  # the key is the name of an axis, whose values are overrides
                _check_not_reserved(f"grid.{key}", value)
                merged |= value
        cells.append(Cell(", ".join(starmap(part, labels.items())), labels, ordered(merged)))
    return cells


def _axis(key: str, values: list[Any] | Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The values of one key of the grid, as (label, value). The label of a component is its name, if unique."""
    if not values:
        raise BadInput(f"grid.{key}: no value; accepted: at least one")
    if isinstance(values, Mapping):
        return list(values.items())
    names = [str(value["name"]) for value in values if isinstance(value, Mapping) and "name" in value]
    by_label = {}
    for value in values:
        named = isinstance(value, Mapping) and names.count(str(value.get("name"))) == 1
        label = value["name"] if named else _label(value)
        if str(label) in by_label:
            raise BadInput(
                f"grid.{key}: {label} is listed twice; accepted: each value once, or under its own name"
            )
        by_label[str(label)] = label, value
    return list(by_label.values())


def _label(value: Any) -> Any:
    """A label for a table: plain values are unchanged, everything else becomes text."""
    if isinstance(value, Mapping):
        return " ".join(
            str(item) if key == "name" else f"{key}={_label(item)}" for key, item in value.items()
        )
    return value if isinstance(value, bool | int | float | str) else "null" if value is None else str(value)


def _check_not_reserved(where: str, keys: Iterable[str]) -> None:
    """Refuse fields that belong to the sweep."""
    for key in _RESERVED.keys() & set(keys):
        raise BadInput(f"{where}: got {key!r}; accepted: other fields ({_RESERVED[key]})")


class Sweep(SweepRuns):
    """Cells times seeds over one base experiment, from :meth:`load` or :meth:`of`."""

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = (), out: str | Path = "runs") -> Sweep:
        """Read a sweep file and check every experiment in it.

        Args:
            path: a YAML file (docs/sweeps.md), in which relative paths are relative to the file, or the name
                of a sweep included in gossamer, such as "sweeps/quickstart".
            overrides: assignments like ``"stop.rounds=50"`` for all cells, or to ``seeds``.
            out: the folder of all runs.

        Raises:
            BadInput: for invalid content, with the name of the cell.
        """
        file = examples.located(path, sweeps=True)
        raw = read_mapping(file, "a YAML sweep file", "a mapping with 'base'")
        if "task" in raw and "base" not in raw:
            raise BadInput(
                f"{path}: an experiment; accepted: a sweep, with 'base' (gossamer run runs an experiment)"
            )
        raw = {"name": as_name(file.stem), **raw}
        return cls.of(raw, file.resolve().parent, overrides, out)

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        folder: Path | None = None,
        overrides: Iterable[str] = (),
        out: str | Path = "runs",
    ) -> Sweep:
        """The sweep described by a mapping. Relative paths are relative to ``folder``; otherwise as in
        :meth:`load`."""
        given, fields = list(overrides), dict(raw)
        seeds = [text for text in given if text.startswith("seeds=")]
        given = [text for text in given if text not in seeds]
        assign_all(fields, seeds, SweepFile)
        try:
            file = SweepFile.model_validate(fields)
        except ValidationError as error:
            raise bad_input(error, SweepFile) from None
        base, home = deepcopy(file.base), folder
        if isinstance(base, str):
            relative = Path(base) if folder is None else folder / base
            path = relative if relative.suffix or relative.is_file() else examples.located(base)
            base, home = read_mapping(path, "base: an experiment file"), path.resolve().parent
            if "base" in base and "task" not in base:
                raise BadInput(f"base: {path}, a sweep; accepted: an experiment file")
        _check_not_reserved("overrides", file.overrides or {})
        Cell("overrides", {}, ordered(file.overrides or {})).apply(base, folder)
        paths = [override.partition("=")[0] for override in given]
        _check_not_reserved("--set", paths)
        assign_all(base, given, Experiment)
        grid = file.grid or {}
        for key in set(paths) & grid.keys():
            if isinstance(values := grid[key], list) and len(values) == 1:
                grid[key] = [value_at(base, key)]  # the command line replaces a field's only value
        cells = _cells(file, str(base.get("name", file.name)))
        planned = _planned(base, home, cells, folder, file.seeds, paths)
        return cls(file.name, Path(out) / file.name, tuple(planned))

    def to_yaml(self) -> str:
        """A sweep file for the same experiments, with absolute paths. Its base is the first cell with every
        field."""
        dumps = {
            planned.cell.name: planned.experiment.model_dump(mode="json", exclude={*_RESERVED})
            for planned in self.planned
        }
        base = dumps[self.planned[0].cell.name]
        cells = {
            name: {key: value for key, value in dump.items() if value != base[key]}
            for name, dump in dumps.items()
        }
        described = {"name": self.name, "base": base, "seeds": list(self.seeds), "cells": cells}
        return str(yaml.safe_dump(described, sort_keys=False, allow_unicode=True))

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
    planned: list[Planned] = []
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
            raise error.within(f"cell {cell.name}") from None
        for seed in [first.seed] if seeds is None else seeds:
            experiment = first.model_copy(update={"seed": seed})
            key = _key(experiment, digests)
            run = runs.setdefault(key, f"{slug[:60]}-seed{seed}-{key[:10]}")
            planned.append(Planned(cell, experiment, run, short))
    return planned


_LATER_FIELDS = (("evaluation", "of"),)
"""Fields that did not exist when the first sweeps ran. At their defaults they stay out of the key, so that the
finished runs of a sweep are not done again."""


def _key(experiment: Experiment, digests: dict[Path, str | None]) -> str:
    """A key that distinguishes the runs of a sweep: a hash of the whole experiment and of the files that it
    names. Fields that do not change its results (name, threads, trackers) are left out; data in the data root
    is identified by its name. ``digests`` caches the hashes of files, so that each file is read once and a
    sweep sees only one state of it."""
    left_out: Any = {
        "name": True,
        "checkpoint": True,
        "trackers": True,
        "engine": {"workers", "cuda_graphs"},
    }
    described = experiment.model_dump(mode="json", exclude=left_out)
    for section, field in _LATER_FIELDS:
        if described[section][field] == type(getattr(experiment, section)).model_fields[field].default:
            del described[section][field]
    paths = {path for _, path in named_paths(experiment, ("data_root", "trackers"))}
    for path in paths - digests.keys():
        try:
            digests[path] = _digest(path)
        except OSError:  # the run will report it
            digests[path] = None
    if paths:
        described["files"] = {str(path): digests[path] for path in paths}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    """A hash of a file, or of the names and contents of the files of a folder."""
    if not path.is_dir():
        return digest(path)
    inner = sorted(file for file in path.rglob("*") if file.is_file())
    return combined([str(file.relative_to(path)) for file in inner], digests(inner))
