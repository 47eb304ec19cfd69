from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

from gossamer.algorithms.d_psgd import DPSGD
from gossamer.config import registry
from gossamer.config.registry import (
    KINDS,
    Component,
    FilePath,
    FunctionComponent,
    build,
    find,
    names,
    placed,
    register,
)
from gossamer.errors import BadInput
from gossamer.topology import Ring


class Mine(Component):
    """A user's component."""

    size: int = Field(default=3, ge=1)
    path: FilePath | None = None


def double(size: int, factor: float = 2.0) -> float:
    return size * factor


MINE = f"{__name__}:Mine"
NUMBER = 7


def test_built_in_names_resolve_for_every_kind() -> None:
    for kind in KINDS:
        for name, cls in names(kind).items():
            assert find(kind, name) is cls
            assert cls.name_of() == name
    assert find("algorithm", "d-psgd") is DPSGD
    expected = {"ring", "star", "complete", "random-regular", "erdos-renyi", "watts-strogatz", "torus"}
    assert expected | {"hypercube", "exponential", "edge-list", "adjacency"} <= set(names("topology"))


def test_unknown_name_lists_accepted_and_suggests_nearest() -> None:
    with pytest.raises(BadInput) as failure:
        find("optimizer", "adm")
    assert str(failure.value) == (
        "optimizer: unknown name 'adm' (did you mean 'adam'?); accepted: "
        + ", ".join(sorted(names("optimizer")))
        + ' or "package.module:Class"'
    )
    with pytest.raises(BadInput, match="topology: unknown name 'xyzzy'; accepted: ") as failure:
        find("topology", "xyzzy")
    assert "did you mean" not in str(failure.value)


def test_class_is_found_by_path() -> None:
    assert find("task", MINE) is Mine
    assert Mine.name_of() == MINE
    built = build("task", {"name": MINE, "size": 5})
    assert isinstance(built, Mine)
    assert built.size == 5
    assert build("task", built.spec()) == built


def test_function_found_by_path_has_parameters_as_fields() -> None:
    path = f"{__name__}:double"
    built = build("task", {"name": path, "size": "4"})
    assert isinstance(built, FunctionComponent)
    assert built.call() == 8.0
    assert built.spec() == {"name": path, "size": 4, "factor": 2.0}
    assert build("task", built.spec()) == built
    assert find("task", path) is type(built)
    with pytest.raises(BadInput, match=r"task\.size: missing"):
        build("task", path)
    with pytest.raises(BadInput, match=r"task\.facto: unknown field \(did you mean 'factor'\?\)"):
        build("task", {"name": path, "size": 1, "facto": 3})


def test_the_working_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_a_user.py").write_text("def make(a: int = 1) -> int:\n    return a + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    built = build("task", "module_of_a_user:make")
    assert isinstance(built, FunctionComponent)
    assert built.call() == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:X", r"no module named 'no_such_module' \(the working directory is searched too\)"),
        (f"{__name__}:Mien", r"has no 'Mien' \(did you mean 'Mine'\?\)"),
        (f"{__name__}:NUMBER", "is int; accepted: a Component class or a function"),
    ],
)
def test_unresolvable_path_is_refused(path: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as failure:
        find("task", path)
    assert "\n" not in str(failure.value)


class Point:
    """An entry point."""

    def __init__(self, name: str, value: str, target: Any) -> None:
        self.name, self.value, self._target = name, value, target

    def load(self) -> Any:
        return self._target


def test_built_in_names_precede_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Component):
        registered_name: ClassVar[str] = ""

    def entry_points(group: str) -> list[Point]:
        assert group == "gossamer.topology"
        return [Point("theirs", "their.module:Theirs", Theirs), Point("ring", "their.module:Ring", Theirs)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert find("topology", "theirs") is Theirs
    assert build("topology", "theirs").spec() == {"name": "theirs"}
    assert find("topology", "ring") is Ring
    assert "theirs" in names("topology")


def test_duplicate_registration_is_refused() -> None:
    class Again(Component):
        pass

    with pytest.raises(ValueError, match="topology 'ring' is registered twice"):
        register("topology", "ring")(Again)


def test_component_is_frozen_and_refuses_unknown_fields() -> None:
    component = Mine()
    with pytest.raises(AttributeError, match="Mine.size can't be set: the object holds settings only"):
        component.size = 4
    with pytest.raises(BadInput, match=r"task\.siez: unknown field .*'size'\?\); accepted: path, size"):
        build("task", {"name": MINE, "siez": 4})


@pytest.mark.parametrize("value", [3, None, [], {"size": 3}, {"name": 3}])
def test_non_component_value_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match=r"^place: got .*; accepted: a name, or a mapping with 'name'"):
        build("task", value, field="place")


def test_bad_parameter_error_names_field_value_and_bounds() -> None:
    with pytest.raises(BadInput, match=r"^optimizer\.lr: got -1; accepted: greater than 0$"):
        build("optimizer", {"name": "sgd", "lr": -1})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("home", ["experiments", "elsewhere"])
def test_relative_path_is_resolved_against_its_folder(tmp_path: Path, elsewhere: Path, home: str) -> None:
    path = placed("data.txt", Path() if home == elsewhere.name else None)
    built = build("task", {"name": MINE, "path": path}, {"folder": tmp_path / "experiments"})
    assert isinstance(built, Mine)
    assert built.path == tmp_path / home / "data.txt"
    assert build("task", built.spec(), {"folder": Path("/other")}) == built
