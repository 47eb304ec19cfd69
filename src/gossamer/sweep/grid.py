"""The cells of a sweep: named overrides times a grid of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

OWN = {"name": "a run is named after its cell", "seed": "seeds are listed under seeds"}
"""Fields of an experiment that belong to the sweep, and why."""
_SETTABLE = "accepted: fields that no cell overrides, and those to which the grid gives one value"


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
    """The contents of a sweep file.

    Args:
        name: names the folder of the sweep.
        base: an experiment file, relative to this file; or the contents of one.
        overrides: differences from the base in all cells, as in ``cells``.
        seeds: a list, or how many: 1, 2, ...; null is the base's seed alone.
        cells: named overrides. ``field: value`` replaces a whole field, ``field.parameter: value`` sets one parameter.
        grid: the values of each field or parameter, as a list or by name; they override the cells, so that a single value
            holds for all cells.
    """

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
    """One combination of overrides.

    Args:
        name: tells it from every other, e.g. ``"divshare, topology.degree=3"``.
        labels: the same in parts, which become columns: ``{"cell": "divshare", "topology.degree": 3}``.
        overrides: field or ``field.parameter`` -> value, in the order in which they are applied.
    """

    name: str
    labels: Mapping[str, Any]
    overrides: tuple[tuple[str, Any], ...]

    def apply(self, raw: dict[str, Any], folder: Path | None, given: Sequence[str] = ()) -> None:
        """Apply the overrides to an experiment file, in place.

        Args:
            raw: the file's mapping.
            folder: the folder of relative paths in the overrides.
            given: assignments of the command line that have been applied; one that an override undoes is bad input.
        """
        said = {each: deepcopy(value_at(raw, each.partition("=")[0])) for each in given}
        undone: dict[str, str] = {}
        for path, value in self.overrides:
            placed = deepcopy(value) if folder is None else _placed(value, folder)
            assign(raw, path, placed, "override", Experiment)
            for each, before in said.items():
                if _kept(before, value_at(raw, each.partition("=")[0])):
                    undone.pop(each, None)
                else:
                    undone.setdefault(each, path)
        if undone:
            raise BadInput(
                *(f"--set {each}: overridden by {path}; {_SETTABLE}" for each, path in undone.items())
            )


def common(file: SweepFile) -> Cell:
    """The overrides of all cells, in the form of a cell."""
    check_not_own("overrides", file.overrides or {})
    return Cell("overrides", {}, _in_order(file.overrides or {}))


def cells_of(file: SweepFile, base_name: str) -> list[Cell]:
    """The cells of a sweep, in the file's order, the last key of the grid changing fastest; ``base_name`` is the only one of
    a file without cells and grid. A field that belongs to the sweep, and two values of an axis of one label, are refused."""
    named = file.cells or ({base_name: None} if file.grid is None else {"": None})
    axes = [list(_axis(key, values)) for key, values in (file.grid or {}).items()]
    check_not_own("grid", file.grid or {})
    for name, overrides in named.items():
        check_not_own(f"cells.{name}", overrides or {})
    found = []
    for (name, overrides), point in product(named.items(), product(*axes)):
        labels = ({"cell": name} if name else {}) | {key: label for key, label, _ in point}
        ordered = _in_order(overrides or {}) + _in_order({key: value for key, _, value in point})
        found.append(Cell(", ".join(starmap(part, labels.items())), labels, ordered))
    return found


def set_axes(file: SweepFile, base: Mapping[str, Any], given: Sequence[str]) -> SweepFile:
    """Let an assignment of the command line, which ``base`` has already, replace the only value of a field in the grid."""
    paths = {each.partition("=")[0] for each in given}
    axes = {
        key: [value_at(base, key)]
        if key in paths and isinstance(values, list) and len(values) == 1
        else values
        for key, values in (file.grid or {}).items()
    }
    return file.model_copy(update={"grid": axes or None})


def check_not_own(where: str, keys: Iterable[str]) -> None:
    """Refuse fields that belong to the sweep."""
    for key in set(OWN) & set(keys):
        raise BadInput(f"{where}: got {key!r}; accepted: other fields ({OWN[key]})")


def value_at(raw: Mapping[str, Any], path: str) -> Any:
    """The value of ``"a"`` or ``"a.b"`` in a file's mapping; None if it is not there."""
    found: Any = raw
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _kept(before: Any, after: Any) -> bool:
    """Whether a value is still there; more may have been added to it."""
    if isinstance(before, Mapping):
        there = after if isinstance(after, Mapping) else {}
        return all(name in there and _kept(value, there[name]) for name, value in before.items())
    if isinstance(before, str) and isinstance(after, Mapping):
        after = after.get("name")  # a bare name becomes a mapping when it gets parameters
    # Equal text may be another path: its type tells the folder.
    return type(before) is type(after) and bool(before == after)


def _in_order(overrides: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(overrides.items(), key=_whole_first))


def _whole_first(pair: tuple[str, Any]) -> int:
    """Sorts the replacement of a field and the name of a component before parameters."""
    path = pair[0]
    return 0 if "." not in path else 1 if path.endswith(".name") else 2


def _axis(key: str, values: list[Any] | Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The values of one key of the grid: key, label, value."""
    if not values:
        raise BadInput(f"grid.{key}: no value; accepted: at least one")
    if isinstance(values, Mapping):
        yield from ((key, label, value) for label, value in values.items())
        return
    names = [value.get("name") for value in values if isinstance(value, Mapping)]
    label: Callable[[Any], Any] = _short if len(set(map(str, names))) == len(names) else _full
    labels = [label(value) for value in values]
    for index, each in enumerate(labels):
        if str(each) in map(str, labels[:index]):
            raise BadInput(
                f"grid.{key}: {each} is listed twice; accepted: every value once, or under its own name"
            )
        yield key, each, values[index]


def _short(value: Any) -> Any:
    """A component's name stands for it."""
    return str(value["name"]) if isinstance(value, Mapping) and "name" in value else _full(value)


def _full(value: Any) -> Any:
    """A label that fits into a table: a plain value unchanged, everything else as text."""
    if isinstance(value, Mapping):
        rest = [f"{key}={_full(item)}" for key, item in value.items() if key != "name"]
        return " ".join([*([str(value["name"])] if "name" in value else []), *rest])
    return value if isinstance(value, bool | int | float | str) else "null" if value is None else str(value)


def _placed(value: Any, folder: Path) -> Any:
    """Mark text, which may be a path, as relative to the sweep's file, wherever the base is."""
    if isinstance(value, FromCommandLine):
        return value
    if isinstance(value, str):
        placed = FromFolder(value)
        placed.folder = folder
        return placed
    if isinstance(value, list):
        return [_placed(item, folder) for item in value]
    if isinstance(value, Mapping):
        return {key: _placed(item, folder) for key, item in value.items()}
    return value
