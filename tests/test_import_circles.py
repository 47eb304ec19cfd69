"""Files do not import each other in circles, counting imports for annotations and imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import gossamer

ALLOWED = {
    "gossamer.node": "a node, its runtime and its parts",
    "gossamer.runtime.processes.transport": "a transport and its connections",
}
"""The packages in which there is one circle, and its files."""


def modules(root: Path) -> dict[str, Path]:
    """The files of the package in a folder, by the names of their modules."""
    named = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imported(path: Path, package: str) -> Iterator[tuple[str, ...]]:
    """The imports of a file, wherever they stand: for each, the names of modules that may be meant, the likeliest first."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def circles(root: Path) -> list[set[str]]:
    """The sets of modules that import each other, over any number of steps."""
    named = modules(root)
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in named.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for candidates in imported(path, package):
            target = next((module for module in candidates if module in named), name)
            if target != name:
                graph.add_edge(name, target)
    return [set(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_files_import_each_other_only_where_it_is_known() -> None:
    [root] = gossamer.__path__
    found = circles(Path(root))
    packages = [{module.rpartition(".")[0] for module in circle} for circle in found]
    assert all(len(package) == 1 and package <= ALLOWED.keys() for package in packages), found
    assert len(found) <= len(ALLOWED), found


@pytest.mark.parametrize(
    "text",
    [
        "from p import b",
        "import p.b",
        "from .b import x",
        "def f():\n    from p.b import x",
        "if TYPE_CHECKING:\n    from . import b",
    ],
)
def test_circles_are_found_by_every_form_of_import(tmp_path: Path, text: str) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for name, content in {"__init__": "", "a": text, "b": "from p.a import y", "c": "import p.a"}.items():
        (package / f"{name}.py").write_text(content)
    assert circles(package) == [{"p.a", "p.b"}]
    (package / "b.py").write_text("")
    assert circles(package) == []
