"""The cells of a sweep, and its runs: every cell with every seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gossamer.config import Experiment, assign
from gossamer.config.registry import placed
from gossamer.errors import BadInput, suggest


@dataclass(frozen=True)
class Cell:
    """One combination of overrides. ``name`` is unique, e.g. ``"divshare, topology.degree=3"``; ``labels``
    are its parts, which become columns; ``overrides`` are in the order in which they are applied."""

    name: str
    labels: Mapping[str, Any]
    overrides: Sequence[tuple[str, Any]]

    def apply(self, raw: dict[str, Any], folder: Path | None, given: Iterable[str] = ()) -> None:
        """Apply the overrides to an experiment file's mapping, in place. Relative paths in them are relative
        to ``folder``. BadInput if they would undo an assignment from the command line, to one of the paths
        ``given``."""
        described = {path: deepcopy(value_at(raw, path)) for path in given}
        for path, value in self.overrides:
            assign(raw, path, placed(value, folder), "override", Experiment)
        undone = [path for path, value in described.items() if not _kept(value, value_at(raw, path))]
        if undone:
            raise BadInput(
                f"--set {', '.join(undone)}: set by the sweep itself; accepted: fields that no cell overrides, and"
                " those to which the grid gives one value"
            )

    def tags(self, short: str) -> dict[str, str]:
        """The words that select the cell on the command line (``axis=value`` and names), with their axes."""
        points = {f"{axis}={value}": axis for axis, value in self.labels.items() if axis != "cell"}
        return points | dict.fromkeys((self.name, short, str(self.labels.get("cell", self.name))), "cell")


def value_at(raw: Mapping[str, Any], path: str) -> Any:
    """The value of ``"a"`` or ``"a.b"`` in a file's mapping; None if it is missing."""
    value: Any = raw
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _kept(before: Any, after: Any) -> bool:
    """Whether a value is still present. Other fields may have been added to it."""
    if isinstance(before, Mapping):
        return isinstance(after, Mapping) and all(_kept(item, after.get(key)) for key, item in before.items())
    if isinstance(before, str) and isinstance(after, Mapping):
        after = after.get("name")  # a bare name becomes a mapping when it gets parameters
    return bool(before == after)


@dataclass(frozen=True)
class Planned:
    """One experiment of a sweep, with its seed. ``run`` is the folder of its attempts within the sweep's
    folder, which equal experiments in different cells share. ``short`` is the cell's name without the parts
    that all cells have in common."""

    cell: Cell
    experiment: Experiment
    run: str
    short: str

    @property
    def title(self) -> str:
        """Cell and seed, as text."""
        return f"{self.short}, seed {self.experiment.seed}"


@dataclass(frozen=True)
class SweepRuns:
    """The runs of a sweep. ``folder`` is ``<out>/<name>``, where :func:`gossamer.run_sweep` records them; ``planned`` has
    every experiment, cell by cell."""

    name: str
    folder: Path
    planned: tuple[Planned, ...]

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds with which every cell is run."""
        return tuple(dict.fromkeys(planned.experiment.seed for planned in self.planned))

    def chosen(self, only: Sequence[str] = (), array: tuple[int, int] | None = None) -> tuple[Planned, ...]:
        """The experiments of the cells selected by ``only``, or of all cells. Names are a cell's full name,
        its name in progress lines, or an entry of ``cells``, which selects all its cells. An ``axis=value``
        of the grid restricts the selection to cells with this value. With ``array``, (k, n), only every n-th run of the
        selection counts, from the k-th on. BadInput for a name that no cell has, and unless 0 <= k <= n (the n-th share is
        that with k = 0)."""
        tags = {planned.cell.name: planned.cell.tags(planned.short) for planned in self.planned}
        axes = {text: axis for texts in tags.values() for text, axis in texts.items()}
        wanted: dict[str, set[str]] = {}
        for name in only:
            if name not in axes:
                raise BadInput(
                    f"--only {name}: no such cell{suggest(name, axes)}; accepted: {'; '.join(sorted(axes))}"
                )
            wanted.setdefault(axes[name], set()).add(name)
        chosen = [
            planned
            for planned in self.planned
            if all(texts & tags[planned.cell.name].keys() for texts in wanted.values())
        ]
        if array is None:
            return tuple(chosen)
        share, shares = array
        if not 0 <= share <= max(shares, 1) or shares < 1:
            raise BadInput(
                f"--array {share}/{shares}: accepted: K/N, with K from 0 to N - 1, or from 1 to N, such as 3/10"
            )
        runs = list(dict.fromkeys(planned.run for planned in chosen))
        own = set(runs[share % shares :: shares])
        return tuple(planned for planned in chosen if planned.run in own)
