"""gossamer list and gossamer topology."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import Cli


def test_names_by_kind_and_one_kind_with_its_parameters(cli: Cli) -> None:
    text = cli("list")[1]
    assert len(text.splitlines()) < 24  # a screen
    assert re.search(r"^wrapper +\(none\)", text, re.MULTILINE)
    # In a pipe, in one line, whatever the width of a terminal.
    assert re.search(r"^topology .*one-peer-exponential,", text, re.MULTILINE)
    [line] = [line for line in cli("list", "algorithm")[1].splitlines() if "all-reduce" in line]
    assert "`" not in line
    assert line.rstrip().endswith("then the exact average over all nodes (the topology is not used).")
    for plural, kind in (("aggregators", "aggregator"), ("topologies", "topology")):
        assert cli("list", plural) == cli("list", kind)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=d-psgd", ""),
        (
            "topology={name: random-regular, degree: 2, every_rounds: 3}",
            "the graph changes during the run: the figures describe round 0 only",
        ),
        ("topology=one-peer-exponential", "the graph changes during the run"),
    ],
)
def test_figures_of_a_topology_say_what_they_are_of(cli: Cli, override: str, said: str) -> None:
    code, out, _ = cli("topology", "small.yaml", "--set", override)
    assert code == 0
    notes = [line for line in out.splitlines() if line.startswith("note")]
    assert [said in note for note in notes] == ([True] if said else [])


def test_list_and_topology(cli: Cli, tmp_path: Path) -> None:
    listed = json.loads(cli("list", "--json")[1])
    assert set(listed["algorithm"]) >= {"d-psgd", "fedavg", "all-reduce", "local", "centralized"}
    assert listed["algorithm"]["d-psgd"]["local_steps"] == "1"
    assert listed["task"]["digits"]["hidden"] == "[64]"
    assert listed["topology"]["ring"]["allow_disconnected"] == "false"
    assert listed["topology"]["ring"]["every_rounds"] == "null"
    assert "random-regular" in cli("list", "topology")[1]
    assert cli("list", "algoritm")[0] == 2
    code, out, _ = cli("topology", "small.yaml", "--json", "--png", str(tmp_path / "graph.png"))
    measures = json.loads(out)
    assert code == 0
    # A ring of four under Metropolis-Hastings: eigenvalues 1, 1/3, 1/3, -1/3.
    assert measures["spectral_gap"] == pytest.approx(2 / 3)
    assert measures["diameter"] == 2
    assert (tmp_path / "graph.png").read_bytes()[:4] == b"\x89PNG"
