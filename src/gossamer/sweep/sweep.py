"""Sweep: many experiments that differ in named ways, and the folders of their runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from gossamer.config import Experiment, assign_all
from gossamer.config.mappings import read_mapping
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, suggest
from gossamer.results.run import short_names
from gossamer.sweep.grid import Cell, SweepFile, cells_of, check_not_own, in_order, set_axes

if TYPE_CHECKING:
    import polars as pl

_MOST_NAMES = 3


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
            path: a YAML file (docs/sweeps.md); relative paths in it are relative to it.
            overrides: assignments like ``"stop.rounds=50"`` for all cells, or to ``seeds``.
            out: the folder of all runs.

        Raises:
            BadInput: for anything that can't be used, naming the cell.
        """
        file = Path(path)
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
        """The experiments of the cells ``only``, or of all: a cell's whole name, that of progress lines, or an entry of
        ``cells``, which stands for all its cells. A name that no cell has is bad input."""
        names = {
            each.cell.name: {each.cell.name, each.short, str(each.cell.labels.get("cell", each.cell.name))}
            for each in self.planned
        }
        known = sorted(set().union(*names.values()))
        for name in only:
            if name not in known:
                accepted = "; ".join(known)
                raise BadInput(f"--only {name}: no such cell{suggest(name, known)}; accepted: {accepted}")
        return tuple(each for each in self.planned if not only or names[each.cell.name] & set(only))

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
    problems: dict[str, list[str]] = {}
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
            for problem in error.problems:
                problems.setdefault(problem, []).append(cell.name)
            continue
        for seed in [first.seed] if seeds is None else seeds:
            experiment = first.model_copy(update={"seed": seed})
            key = _key(experiment, digests)
            run = runs.setdefault(key, f"{slug[:60]}-seed{seed}-{key[:10]}")
            found.append(Planned(cell, experiment, run, short))
    if problems:
        raise BadInput(*(f"{_named(names)}: {problem}" for problem, names in problems.items()))
    return found


def _named(names: Sequence[str]) -> str:
    """The cells that have a problem."""
    more = len(names) - _MOST_NAMES
    said = "; ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f"cell{'s' * (len(names) > 1)} {said}"


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
