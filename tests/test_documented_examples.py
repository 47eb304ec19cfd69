"""The examples of docs/extending.md run as printed there, and what they teach learns."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import Cli
from gossamer import load_run

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = [
    textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", TEXT, re.MULTILINE | re.DOTALL)
]


def example(name: str) -> str:
    (found,) = (code for code in EXAMPLES if name in code)
    return found


MODULES = ("mine", "mine_codec", "asking", "shapes")


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[None]:
    """The files that the text asks for, in the test's folder; other tests have modules of these names too."""
    for name in MODULES:
        sys.modules.pop(name, None)
    (tmp_path / "mine.py").write_text(example("class PushGossip") + "\n\n" + example("def circles"))
    (tmp_path / "mine_codec.py").write_text(example("class Signs"))
    (tmp_path / "shapes.py").write_text(example("class Shapes"))
    (tmp_path / "asking.py").write_text(example("class Ask"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("change", "rounds", "least"),
    [
        ("algorithm.name=mine:PushGossip", 40, 0.3),
        ("task.name=mine:circles", 20, 0.7),
        ("task.name=shapes:Shapes", 40, 0.7),
        ("codec=mine_codec:Signs", 60, 0.6),
        ("algorithm=asking:Ask", 60, 0.3),
    ],
)
@pytest.mark.usefixtures("examples")
def test_examples_learn(cli: Cli, tmp_path: Path, change: str, rounds: int, least: float) -> None:
    file = str(ROOT / "experiments" / "quickstart.yaml")
    code, _, errors = cli("run", file, "--set", change, "--set", f"stop.rounds={rounds}", "--out", "runs")
    assert code == 0, errors
    (folder,) = (tmp_path / "runs" / "quickstart").iterdir()
    metrics = load_run(folder).metrics
    last = metrics.filter(metrics["round"] == rounds, metrics["node"] >= 0)
    assert float(last["test_accuracy"].mean()) > least  # type: ignore[arg-type]


def test_every_base_class_has_the_documented_path() -> None:
    table = TEXT[TEXT.index("| base class |") : TEXT.index("### A codec of your own")]
    paths = re.findall(r"`(gossamer\.[\w.]+)`", table)
    assert len(paths) > 10
    for path in paths:
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)
