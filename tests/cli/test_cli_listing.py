"""gossamer list and gossamer topology."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import Cli


def test_list_shows_kinds_names_and_parameters(cli: Cli) -> None:
    text = cli("list")[1]
    assert re.search(r"^wrapper +\(none\) *$", text, re.MULTILINE)
    assert re.search(r"^experiment +.*quickstart", text, re.MULTILINE | re.DOTALL)
    assert "one-peer-exponential" in text
    of_kind = cli("list", "algorithm")[1]
    [line] = [line for line in of_kind.splitlines() if line.startswith("all-reduce")]
    assert line.split(maxsplit=1)[1].startswith("Synchronous data parallelism: local steps, then")
    assert "`" not in of_kind
    one = cli("list", "topology", "random-links")[1]
    assert re.search(r"^probability +number ≥ 0, ≤ 1 or path; required *$", one, re.MULTILINE)
    assert re.search(r"^base +topology; default complete *$", one, re.MULTILINE)
    described = " ".join(cli("list", "algorithm", "d-psgd")[1].split())
    assert "local_steps integer ≥ 1, ≤ 1000000; default 1: mini-batch steps a round." in described
    for wide in (text, of_kind, one, cli("list", "experiment")[1]):
        assert "…" not in wide  # output to a pipe, as here, is never truncated
    listed = [line.split()[0] for line in cli("list", "experiment")[1].splitlines()]
    assert {"divshare/cifar10", "cifar10/processes-1024"} <= set(listed)  # a name is never truncated
    code, _, err = cli("list", "topology", "rign")
    assert (code, err[:55]) == (2, "error: topology: unknown name 'rign' (did you mean 'rin")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm=d-psgd", ""),
        (
            "topology={name: random-regular, degree: 2, every_rounds: 3}",
            "the graph changes during the run: the figures describe round 0 only",
        ),
        ("topology=one-peer-exponential", "the graph changes during the run"),
        ("topology={name: ring, weights: random}", "the weights change during the run"),
    ],
)
def test_topology_figures_note_changes_during_run(cli: Cli, override: str, expected: str) -> None:
    code, out, _ = cli("topology", "small.yaml", "--set", override)
    assert code == 0
    notes = [line for line in out.splitlines() if line.startswith("note")]
    notes = [note for note in notes if "consensus" not in note]
    assert [expected in note for note in notes] == ([True] if expected else [])


def test_weights_that_bias_consensus_are_noted(cli: Cli) -> None:
    note = "the weights move the consensus away from the mean"
    assert note not in cli("topology", "small.yaml")[1]
    # A star of four with uniform weights: the closed neighbourhoods have 4, 2, 2 and 2 nodes.
    star = ("topology", "small.yaml", "--set", "topology={name: star, centre: 2, weights: uniform}")
    text = cli(*star)[1]
    assert note in text
    assert re.search(
        r"^influence +highest 0.4 \(node 2\), 0.2 \(node 0\), .*; lowest 0.2 \(node 3\)$", text, re.MULTILINE
    )
    measures = json.loads(cli(*star, "--json")[1])
    assert measures["influence"] == pytest.approx([0.2, 0.2, 0.4, 0.2])
    assert measures["effective_nodes"] == pytest.approx(1 / 0.28)
    # Weights by data sizes come from the partition.
    ring = ("topology", "small.yaml", "--set", "topology={name: complete, weights: data-size}", "--json")
    sizes = json.loads(
        cli(*ring, "--set", "partition={name: sizes, fractions: [0.5, 0.25, 0.125, 0.125]}")[1]
    )
    assert sizes["influence"] == pytest.approx([0.5, 0.25, 0.125, 0.125])


@pytest.mark.parametrize(
    "algorithm",
    ["epidemic-local", "fedavg", "all-reduce", "local", "centralized", "divshare", "swift-artifact"],
)
def test_a_topology_that_is_not_used_is_not_measured(cli: Cli, algorithm: str) -> None:
    changes = ("--set", f"algorithm={algorithm}", "--set", "algorithm.degree=2")
    code, text, _ = cli("topology", "small.yaml", *changes[: 4 if algorithm == "epidemic-local" else 2])
    assert code == 0
    assert f"{algorithm} does not use the topology, so the figures of ring say nothing about the run" in text
    assert not re.search("^(spectral gap|diameter|degree|effective)", text, re.MULTILINE)


def test_other_weights_than_those_of_the_topology_are_measured(cli: Cli) -> None:
    def gap(*changes: str) -> str:
        text = cli("topology", "small.yaml", *(word for change in changes for word in ("--set", change)))[1]
        return re.findall(r"^spectral gap +(\S+)$", text, re.MULTILINE)[0]

    # A star of five. Metropolis-Hastings: 1/5 for each edge, so the eigenvalues are 1, 4/5 (three times) and 0. Clients of
    # SWIFT: the same. Exact diffusion: (W + I) / 2.
    star = ("nodes=5", "topology=star")
    assert gap(*star) == "0.2"
    assert gap(*star, "algorithm=swift") == "0.2"
    assert gap(*star, "algorithm={name: d2, exact_diffusion: true}") == "0.1"
    # Uniform weights of a star: the centre has 1/5, an end 1/2, so the eigenvalues are 1, 1/2 (three times) and -0.3.
    assert gap(*star, "topology.weights=uniform") == "0.5"
    assert gap(*star, "topology.weights=uniform", "algorithm=swift") == "0.2"
    assert gap(*star, "algorithm=gossip-learning") == "–"
    assert gap(*star, "aggregator=median") == "–"


def test_push_sum_has_no_note_about_a_weighted_mean(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "arcs.txt").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n1 0\n1 3\n")
    arcs = f"topology={{name: edge-list, path: {tmp_path / 'arcs.txt'}, directed: true}}"
    note = "the weights move the consensus away from the mean"
    assert note in cli("topology", "small.yaml", "--set", arcs)[1]
    text = cli("topology", "small.yaml", "--set", arcs, "--set", "algorithm=sgp")[1]
    assert note not in text
    assert "push-sum corrects the bias of these weights: repeated exchanges converge to the mean" in text
    assert re.search(r"^in-degree max +2$", text, re.MULTILINE)
    assert re.search(r"^out-degree max +3$", text, re.MULTILINE)


def test_an_algorithm_that_declares_nothing_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine_undeclared.py").write_text(
        "from gossamer import Algorithm, Node\n\n"
        "class Silent(Algorithm):\n"
        "    async def run(self, node: Node) -> None:\n"
        "        async for r in node.rounds():\n"
        "            await node.train(1)\n"
    )
    code, text, _ = cli("topology", "small.yaml", "--set", "algorithm=mine_undeclared:Silent")
    assert code == 0
    assert (
        "does not declare what it mixes with (Algorithm.mixing): the figures describe the topology's weights"
        in text
    )
    assert "spectral gap" in text


def test_list_and_topology_print_json(cli: Cli) -> None:
    listed = json.loads(cli("list", "--json")[1])
    assert set(listed["algorithm"]) >= {"d-psgd", "fedavg", "all-reduce", "local", "centralized"}
    assert listed["algorithm"]["d-psgd"]["local_steps"] == "1"
    assert listed["model"]["mlp"]["hidden"] == "[100]"
    assert listed["topology"]["ring"]["allow_disconnected"] == "false"
    assert listed["topology"]["ring"]["every_rounds"] == "null"
    assert listed["topology"]["random-links"]["probability"] == "(number ≥ 0, ≤ 1 or path)"
    assert json.loads(cli("list", "model", "mlp", "--json")[1]) == {"model": {"mlp": listed["model"]["mlp"]}}
    assert cli("list", "algoritm")[0] == 2
    code, out, _ = cli("topology", "small.yaml", "--json")
    measures = json.loads(out)
    assert code == 0
    # A ring of four under Metropolis-Hastings: eigenvalues 1, 1/3, 1/3, -1/3.
    assert measures["spectral_gap"] == pytest.approx(2 / 3)
    assert measures["diameter"] == 2
