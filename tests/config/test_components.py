"""Classes of components as users write them, with the usual mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PrivateAttr, create_model

from gossamer import Algorithm, BadInput, Node, NodeWrapper
from gossamer.algorithms import DPSGD
from gossamer.config.registry import Component, FunctionComponent, build
from gossamer.network import Network
from gossamer.topology import Topology

STATE = "local variables of run(), or node.state, which checkpoints keep"
KEPT = "local variables, or functools.cached_property for what follows from the settings"


def number() -> type:
    class Mine(Algorithm):
        rate = 0.1

    return Mine


def nothing() -> type:
    class Mine(Topology):
        rate = None

    return Mine


def inherited() -> type:
    class Mine(DPSGD):
        """In the base it has a type; it needs one here too."""

        local_steps = 10

    return Mine


def tensor() -> type:
    class Mine(Network):
        table = torch.zeros(2)

    return Mine


def long() -> type:
    class Mine(NodeWrapper):
        ranks = [*range(100)]  # noqa: RUF012

    return Mine


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (
            number,
            f"rate: got 0.1 without a type; accepted: rate: float = 0.1, a setting (for what changes: {STATE})",
        ),
        (
            nothing,
            "rate: got None without a type; accepted: rate: float | None = None, a setting (for what"
            f" changes: {KEPT})",
        ),
        (
            inherited,
            f"local_steps: got 10 without a type; accepted: local_steps: int = 10, a setting (for what changes: {STATE})",
        ),
        (
            tensor,
            "table: got a Tensor without a type; accepted: table: ClassVar = ..., which is no setting (for what changes:"
            f" {KEPT})",
        ),
        (
            long,
            "ranks: got a list without a type; accepted: ranks: list = ..., a setting (for what changes: node.state, which"
            " checkpoints keep)",
        ),
    ],
)
def test_an_attribute_without_a_type_is_said_with_its_line(define: Callable[[], type], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        define()
    name = said.partition(":")[0]
    first = define.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    line = next(k for k in range(first, len(lines)) if lines[k - 1].strip().startswith(f"{name} ="))
    place = f" ({Path(__file__).name}, line {line}):"
    assert str(caught.value) == f"Mine.{said.replace(':', place, 1)}"


def test_a_field_takes_no_name_that_stands_for_something_else() -> None:
    with pytest.raises(
        BadInput, match=r"^Mine.name: a field of this name, by which .*; accepted: another name$"
    ):

        class Mine(Component):
            name: str = "x"

    with (
        pytest.raises(BadInput, match=r"^Other.spec: a field of this name, a method of its base; accepted: "),
        pytest.warns(UserWarning, match="shadows"),
    ):

        class Other(Algorithm):
            spec: int = 3  # type: ignore[assignment]


def test_a_task_s_function_may_have_a_parameter_that_pydantic_knows_too() -> None:
    with pytest.warns(UserWarning, match="shadows"):
        made = create_model("task", __base__=FunctionComponent, validate=(bool, True))
    assert made.model_fields["validate"].default is True


class Counts(Algorithm):
    """What can be set, and what can't."""

    limit: ClassVar[int] = 3
    steps: int = 1
    _count = 0
    _typed: int = 0
    _kept: int = PrivateAttr(default=0)

    async def run(self, node: Node) -> None:
        """Nothing."""

    @cached_property
    def double(self) -> int:
        """Twice the steps."""
        return 2 * self.steps


@pytest.mark.parametrize("name", ["steps", "limit", "new", "_new", "_count", "_typed"])
def test_an_object_takes_no_assignment_and_says_what_to_do(name: str) -> None:
    counts = Counts()
    with pytest.raises(AttributeError) as caught:
        setattr(counts, name, 1)
    assert str(caught.value) == (
        f"Counts.{name} can't be set: the object holds settings only, and all nodes of a simulation share it; accepted:"
        f" {STATE}"
    )
    assert counts == Counts()


def test_what_is_declared_to_be_set_can_be() -> None:
    counts = Counts()
    counts._kept = 2
    assert (counts._kept, counts._count, counts.double) == (2, 0, 2)
    assert counts.model_copy().steps == 1


class Declares(Counts):
    """Declares what its base does not, and has a name of its own for constants."""

    _constants: ClassVar[dict[str, float]] = {"pi": 3.14}
    _count: int = PrivateAttr(default=5)


def test_a_subclass_can_declare_what_its_base_does_not() -> None:
    declares = Declares()
    declares._count += 1
    assert (declares._count, declares._constants) == (6, {"pi": 3.14})
    with pytest.raises(AttributeError, match=r"^Declares._typed can't be set: "):
        declares._typed = 1


class Counted(NodeWrapper):
    """Sets something before it is done."""

    steps: int = 1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.count = 0


def test_what_init_raises_is_said_with_its_line() -> None:
    with pytest.raises(BadInput) as caught:
        build("wrapper", f"{__name__}:Counted")
    line = Counted.__init__.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"wrapper '{__name__}:Counted': AttributeError: Counted.count can't be set: the object holds settings only, and all"
        " nodes of a simulation share it; accepted: node.state, which checkpoints keep"
        f" (test_definition.py, line {line})"
    )


class Runs(Algorithm):
    """Its method has another name."""

    async def runs(self, node: Node) -> None:
        """What it should have been."""


def test_a_method_that_is_missing_is_named() -> None:
    with pytest.raises(BadInput) as caught:
        build("algorithm", f"{__name__}:Runs")
    assert (
        str(caught.value)
        == f"algorithm '{__name__}:Runs': Runs has no run() (it has runs()); accepted: a class with run()"
    )


def several(*sizes: int) -> None:
    """Of parameters without names."""


def test_a_function_has_its_parameters_by_name() -> None:
    with pytest.raises(BadInput, match=r"parameter \*sizes: .*int.*; accepted: parameters by name$"):
        build("task", f"{__name__}:several")


def test_a_file_that_can_not_be_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "untyped_module.py").write_text(
        "from gossamer import Algorithm\n\n\nclass Mine(Algorithm):\n    rate = 0.1\n"
    )
    (tmp_path / "unknown_module.py").write_text("import math\n\nx = math.pie\n")
    (tmp_path / "torn_module.py").write_text("x = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, said in {
        "untyped_module": r"Mine.rate \(untyped_module.py, line 5\): got 0.1 without a type; accepted: rate: float = 0.1, ",
        "unknown_module": r"importing 'unknown_module' raised AttributeError: .* \(unknown_module.py, line 3\)$",
        "torn_module": r"importing 'torn_module' raised SyntaxError: '\(' was never closed \(torn_module.py, line 1\)$",
    }.items():
        with pytest.raises(BadInput, match=f"^algorithm '{module}:Mine': {said}") as caught:
            build("algorithm", f"{module}:Mine")
        assert "\n" not in str(caught.value)
