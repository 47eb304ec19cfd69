"""Small graphs and lonely nodes (case O16): the documented examples run on them, and an algorithm that needs more says so
before the run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer import BadInput, Experiment, RunFailed, run
from gossamer.results.observer import Observer
from gossamer.runtime.setup import prepare

ROOT = Path(__file__).parents[2]
SMALL = {
    "task": {"name": "least-squares", "samples": 48, "features": 3},
    "batch_size": 4,
    "evaluation": {"every_rounds": 2},
    "stop": {"rounds": 2},
    "engine": {"name": "simulate", "trainer": "sequential", "workers": 1},
}
GRAPHS = {
    "one node": (1, "", {}),
    "a hermit": (4, "0 1\n1 2\n", {}),
    "a source and a sink": (4, "0 1\n1 2\n2 1\n2 3\n", {"directed": True}),
}


def example(page: str, name: str) -> str:
    """The block of a page that defines a class."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [(indent, text)] = [block for block in blocks if f"class {name}(" in block[1]]
    return re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


EXAMPLES = {
    "PushGossip": lambda: example("docs/extending.md", "PushGossip"),
    "Ask": lambda: example("docs/extending.md", "Ask"),
    "DPSGD": lambda: example("README.md", "DPSGD"),
    "MyAlgorithm": lambda: (ROOT / "src/gossamer/cli/template/algorithm.py").read_text(),
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a module ``lonely_NAME`` for each example."""
    folder = tmp_path_factory.mktemp("examples")
    for name, text in EXAMPLES.items():
        (folder / f"lonely_{name}.py").write_text(text())
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in EXAMPLES:
        sys.modules.pop(f"lonely_{name}", None)


def on(graph: str, folder: Path, algorithm: Any, **more: Any) -> Experiment:
    nodes, edges, fields = GRAPHS[graph]
    topology: Any = "ring"
    if edges:
        (folder / "edges.txt").write_text(edges)
        topology = {"name": "edge-list", "path": folder / "edges.txt", "allow_disconnected": True, **fields}
    return Experiment(**{**SMALL, "nodes": nodes, "topology": topology, "algorithm": algorithm, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_documented_examples_run_on_any_graph(examples: Path, tmp_path: Path, name: str, graph: str) -> None:
    done = run(on(graph, tmp_path, f"lonely_{name}:{name}"), tmp_path, observer=Observer())
    assert done.status == "done"
    assert done.metrics.filter(round=2)["node"].n_unique() >= done.nodes


@pytest.mark.parametrize(
    ("algorithm", "graph", "problem"),
    [
        ("sgp", "a source and a sink", "topology: edge-list, where node 0 sends to node 1, which can't reach it, for sgp"),
        ("epidemic-local", "one node", "nodes: 1 for epidemic-local; accepted: at least 2"),
        ("epidemic-oracle", "one node", "nodes: 1 for epidemic-oracle; accepted: at least 2"),
        ("ad-psgd", "a source and a sink", "topology: a directed graph for ad-psgd; accepted: an undirected one"),
        ("powergossip", "a source and a sink", "undirected"),
        ({"name": "relay-sum", "tree": "topology"}, "a source and a sink", "tree"),
        ("d2", "a source and a sink", "topology.weights: "),
        ("gradient-tracking", "a source and a sink", "topology.weights: not doubly stochastic"),
    ],
)  # fmt: skip
def test_what_an_algorithm_needs_is_checked_before_the_run(
    tmp_path: Path, algorithm: Any, graph: str, problem: str
) -> None:
    with pytest.raises(BadInput) as raised:
        prepare(on(graph, tmp_path, algorithm))
    assert problem in str(raised.value)


class Observed(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def test_a_line_names_the_nodes_without_neighbours(tmp_path: Path) -> None:
    run(on("a hermit", tmp_path, "d-psgd"), tmp_path, observer=(observed := Observed()))
    assert "topology: nodes without neighbours: 3 (ranks count from 0)" in observed.texts


def test_an_error_in_a_library_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's generators are written in Cython, whose frames have relative names of files."""
    text = "from gossamer import Algorithm\n\nclass Unlucky(Algorithm):\n    async def run(self, node):\n        async for r in node.rounds():\n            node.rng('peer', r).integers(0)\n"
    (tmp_path / "unlucky_draw.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFailed) as raised:
        run(on("one node", tmp_path, "unlucky_draw:Unlucky"), tmp_path, observer=Observer())
    assert str(raised.value).endswith("(unlucky_draw.py, line 6)")
    # The traceback begins at the user's line: the frames of the package that called it are left out.
    first, *_ = re.findall(r'File "([^"]+)", line (\d+)', raised.value.traceback)
    assert first == (str(tmp_path / "unlucky_draw.py"), "6")
    cause = raised.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code.co_filename == str(tmp_path / "unlucky_draw.py")


@pytest.mark.parametrize(
    ("topology", "nodes", "least"),
    [
        ({"name": "barabasi-albert", "m": 1}, 1, 2),
        ({"name": "barabasi-albert", "m": 3}, 3, 4),
        ({"name": "random-regular", "degree": 4}, 3, 5),
        ({"name": "watts-strogatz", "degree": 2, "p": 0.1}, 2, 3),
    ],
)
def test_generators_say_how_many_nodes_they_need(topology: dict[str, Any], nodes: int, least: int) -> None:
    with pytest.raises(BadInput, match=rf"for {nodes} nodes; accepted: .*, or at least {least} nodes$"):
        prepare(Experiment(**{**SMALL, "nodes": nodes, "topology": topology, "algorithm": "d-psgd"}))
    prepare(Experiment(**{**SMALL, "nodes": least, "topology": topology, "algorithm": "d-psgd"}))


KRUM = {"name": "krum", "byzantine": 0}


@pytest.mark.parametrize(
    "algorithm",
    ["gossip-learning", {"name": "swift", "memory": "fresh"}, {"name": "divshare", "fraction": 1.0}],
)
def test_aggregator_of_several_models_needs_an_algorithm_that_waits(algorithm: Any) -> None:
    fields = {**SMALL, "nodes": 5, "topology": "ring", "algorithm": algorithm}
    with pytest.raises(BadInput) as refused:
        prepare(Experiment(**fields, aggregator=KRUM))
    name = algorithm if isinstance(algorithm, str) else algorithm["name"]
    start = (
        "aggregator: krum, for divshare; accepted: mean, or one of "
        if name == "divshare"
        else f"aggregator: krum takes at least 3 models, and {name} mixes those that have arrived, perhaps none; accepted: "
    )
    assert str(refused.value).startswith(start)
    if name != "divshare":
        prepare(Experiment(**fields, aggregator="median"))


def test_memory_of_every_neighbour_is_enough_for_an_aggregator_of_several_models() -> None:
    prepare(Experiment(**SMALL, nodes=5, topology="ring", algorithm="swift", aggregator=KRUM))


def test_later_rounds_that_are_certain_are_looked_at_too() -> None:
    """The first round in which a node of this graph has less than two neighbours is the 26th."""
    links = {"name": "random-links", "probability": 0.8}
    fields = {**SMALL, "nodes": 6, "topology": links, "algorithm": "d-psgd", "aggregator": KRUM}
    with pytest.raises(
        BadInput, match=r"takes at least 3 models, and node \d has [12] in round (\d\d)"
    ) as refused:
        prepare(Experiment(**{**fields, "stop": {"rounds": 60}}))
    found = re.search(r"in round (\d+)", str(refused.value))
    assert found is not None
    assert int(found[1]) > 16
    prepare(Experiment(**{**fields, "stop": {"rounds": 17}}))
