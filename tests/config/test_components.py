"""User-defined components, with the usual mistakes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr, create_model

from gossamer import Algorithm, BadInput, Node, NodeWrapper
from gossamer.config.registry import Component, FunctionComponent, build

STATE = "local variables of run(), or node.state, which checkpoints keep"


def test_field_called_name_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"^Mine.name: the name of the component; accepted: another field name$"
    ):

        class Mine(Component):
            name: str = "x"


def test_task_parameter_may_shadow_pydantic_attribute() -> None:
    with pytest.warns(UserWarning, match="shadows"):
        made = create_model("task", __base__=FunctionComponent, validate=(bool, True))
    assert made.model_fields["validate"].default is True


class Counts(Algorithm):
    """A component with attributes of every kind."""

    limit: ClassVar[int] = 3
    steps: int = 1
    _count = 0
    _typed: int = 0
    _private: int = PrivateAttr(default=0)

    async def run(self, node: Node) -> None:
        """Nothing."""

    @cached_property
    def double(self) -> int:
        """Twice the steps."""
        return 2 * self.steps


@pytest.mark.parametrize("name", ["steps", "limit", "new", "_new", "_count", "_typed", "_private"])
def test_assignment_to_component_is_refused_with_advice(name: str) -> None:
    counts = Counts()
    with pytest.raises(AttributeError) as caught:
        setattr(counts, name, 1)
    assert str(caught.value) == (
        f"Counts.{name} can't be set: the object holds settings only, and all nodes of a simulation share it; accepted:"
        f" {STATE}"
    )
    assert (counts, counts.double) == (Counts(), 2)


class Counted(NodeWrapper):
    """Sets an attribute while it is created."""

    steps: int = 1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.count = 0


def test_error_in_init_names_its_line() -> None:
    with pytest.raises(BadInput) as caught:
        build("wrapper", f"{__name__}:Counted")
    line = Counted.__init__.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"wrapper '{__name__}:Counted': AttributeError: Counted.count can't be set: the object holds settings only, and all"
        " nodes of a simulation share it; accepted: node.state, which checkpoints keep"
        f" (test_components.py, line {line})"
    )


class Runs(Algorithm):
    """Lacks run()."""

    async def runs(self, node: Node) -> None:
        """Should be called run."""


def test_missing_method_is_named() -> None:
    with pytest.raises(BadInput) as caught:
        build("algorithm", f"{__name__}:Runs")
    assert (
        str(caught.value)
        == f"algorithm '{__name__}:Runs': Runs has no run(); accepted: a class that defines run()"
    )


def several(*sizes: int) -> None:
    """Has a variadic parameter."""


def test_variadic_function_parameter_is_refused() -> None:
    with pytest.raises(BadInput, match=r"parameter \*sizes: .*int.*; accepted: parameters by name$"):
        build("task", f"{__name__}:several")


def test_failed_import_names_module_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "untyped_module.py").write_text(
        "from gossamer import Algorithm\n\n\nclass Mine(Algorithm):\n    rate = 0.1\n"
    )
    (tmp_path / "unknown_module.py").write_text("import math\n\nx = math.pie\n")
    (tmp_path / "torn_module.py").write_text("x = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, message in {
        "untyped_module": r"A non-annotated attribute was detected: `rate = 0.1` \(untyped_module.py, line 4\); accepted: a type",
        "unknown_module": r"importing 'unknown_module' raised AttributeError: .* \(unknown_module.py, line 3\)$",
        "torn_module": r"importing 'torn_module' raised SyntaxError: '\(' was never closed \(torn_module.py, line 1\)$",
    }.items():
        with pytest.raises(BadInput, match=f"^algorithm '{module}:Mine': {message}") as caught:
            build("algorithm", f"{module}:Mine")
        assert "\n" not in str(caught.value)


def test_non_algorithm_is_refused_with_its_field() -> None:
    error = "algorithm 'json:loads': not a component class; accepted: a subclass of gossamer's Algorithm"
    with pytest.raises(BadInput, match=f"^{error}$"):
        build("algorithm", "json:loads")
