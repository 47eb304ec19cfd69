"""The cells of a sweep: named overrides times a grid of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from gossamer.config import Experiment, assign
from gossamer.config.registry import FromCommandLine, FromFolder
from gossamer.errors import BadInput
from gossamer.results.run import part

_OWN = {"name": "a run is named after its cell", "seed": "seeds are listed under seeds"}
"""Fields of an experiment that belong to the sweep, and why."""


def _text_keys(value: Any) -> Any:
    """Text keys, where YAML reads a bare ``7:`` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value


def _counted(value: Any) -> Any:
    """A number of seeds stands for 1, 2, ..."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return list(range(1, value + 1))
    if value is not None and not isinstance(value, list):
        raise ValueError("a number of at least 1, or a list")
    return value


_Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][^\n]*$")]
_Seed = Annotated[int, Field(ge=0, strict=True)]
_Overrides = Annotated[dict[str, Any], BeforeValidator(_text_keys)]


class SweepFile(BaseModel):
    """The contents of a sweep file; docs/sweeps.md describes the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    base: str | dict[str, Any]
    overrides: _Overrides | None = None
    seeds: Annotated[list[_Seed] | None, BeforeValidator(_counted)] = None
    cells: Annotated[dict[_Name, _Overrides | None] | None, BeforeValidator(_text_keys)] = None
    grid: Annotated[dict[str, list[Any] | _Overrides] | None, BeforeValidator(_text_keys)] = None

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
        ordered = in_order(overrides or {}) + in_order({key: value for key, _, value in point})
        found.append(Cell(", ".join(starmap(part, labels.items())), labels, ordered))
    return found


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
