"""gossamer reproduce: missing runs are executed, and a page states the verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import Cli
from gossamer.config.examples import located
from gossamer.errors import BadInput
from gossamer.reproduce import load, names

FOUR = {"cell": "four steps", "baseline": "one step"}
FILE: dict[str, Any] = {
    "name": "steps",
    "base": {
        "nodes": 4,
        "task": {"name": "least-squares", "features": 4, "samples": 80, "test_samples": 40},
        "topology": "ring",
        "algorithm": {"name": "d-psgd", "local_steps": 1},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 10,
        "evaluation": {"every_rounds": 2},
        "stop": {"rounds": 6},
    },
    "seeds": 3,
    "cells": {"one step": {}, "four steps": {"algorithm.local_steps": 4}},
    "reproduction": {
        "title": "More steps take longer",
        "paper": "Nobody et al., 2026, figure 1",
        "published": "Four nodes.",
        "departures": ["Three seeds."],
        "small": {"stop.rounds": 4},
        "full": {"nodes": 8, "seeds": 4},
        "figure": {"metric": "test_loss"},
        "claims": [
            {
                "text": "Four steps take longer than one, and send twice as much.",
                "checks": [
                    {**FOUR, "measure": "time_s", "number": "ratio", "at_least": 3},
                    {**FOUR, "measure": "bytes", "number": "ratio", "at_least": 2},
                ],
            }
        ],
    },
}


def written(folder: Path, **changes: Any) -> Path:
    """The file with changed fields of its section ``reproduction``."""
    section = {**FILE["reproduction"], **changes}
    (folder / "steps.yaml").write_text(yaml.safe_dump({**FILE, "reproduction": section}, sort_keys=False))
    return folder / "steps.yaml"


def test_page_has_claims_results_and_verdicts(tmp_path: Path, cli: Cli) -> None:
    file = written(tmp_path)
    code, out, _ = cli("reproduce", str(file), "--json")
    assert code == 0
    [entry] = json.loads(out)["verdicts"]
    assert (entry["claim"], entry["verdict"]) == (FILE["reproduction"]["claims"][0]["text"], "holds in part")
    page = (tmp_path / entry["page"]).read_text()
    for text in (
        "# More steps take longer",
        "Nobody et al.",
        "Four nodes.",
        "- Three seeds.",
        "**Verdict:** holds in part.",
    ):
        assert text in page
    assert "bytes of four steps, ratio to one step: 1 ± 0; claimed: ≥ 2: does not hold" in page
    assert "| four steps | 3/3 |" in page
    assert "**Cost:** 6 of 6 runs" in page
    figures = sorted(path.name for path in (tmp_path / "runs" / "steps" / "figures").glob("test-loss*"))
    assert [Path(name).suffix for name in figures] == [".pdf", ".png"]
    assert all(f"figures/{name}" in page for name in figures if name.endswith(".png"))


@pytest.mark.slow
def test_output_names_reproduction_and_full_page_path(tmp_path: Path, cli: Cli) -> None:
    out = f"{'a-long-name-of-a-folder' * 4}/runs"
    code, printed, err = cli("reproduce", str(written(tmp_path)), "--out", out)
    assert code == 0
    assert err.splitlines()[0] == "steps: More steps take longer"
    assert printed.splitlines()[-1] == f"{out}/steps/reproduction.md"


@pytest.mark.slow
def test_finished_runs_are_skipped_and_sizes_have_own_folders(tmp_path: Path, cli: Cli) -> None:
    file = written(tmp_path)
    for _ in range(2):
        assert cli("reproduce", str(file), "--small", "--quiet") == (0, "", "")
    runs = list((tmp_path / "runs" / "steps-small").glob("*/*/experiment.yaml"))
    assert len(runs) == 6
    assert {yaml.safe_load(run.read_text())["stop"]["rounds"] for run in runs} == {4}
    _, full = load(file, "full")
    assert (full.name, full.seeds, full.planned[0].experiment.nodes) == ("steps-full", (1, 2, 3, 4), 8)


@pytest.mark.slow
def test_small_size_states_undecidable_claims(tmp_path: Path, cli: Cli) -> None:
    claims = [{**FILE["reproduction"]["claims"][0], "small": False}]
    code, out, _ = cli("reproduce", str(written(tmp_path, claims=claims)), "--small", "--json")
    [verdict] = json.loads(out)["verdicts"]
    assert (code, verdict["verdict"]) == (0, "not decidable here")
    page = (tmp_path / verdict["page"]).read_text()
    assert "The small size decides nothing about it." in page
    assert (
        "- These are the departures of the file itself; the small size changes stop.rounds as well." in page
    )


def test_sweep_command_accepts_reproduction_file(tmp_path: Path, cli: Cli) -> None:
    assert "6 runs" in cli("sweep", str(written(tmp_path)), "--dry-run")[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": []}, "reproduction.claims"),
        ({"smal": {}}, "reproduction.smal: unknown field"),
        ({"small": {"stop.round": 3}}, "stop.round"),
        ({"figure": {"axis": "rounds"}}, "reproduction.figure.axis"),
    ],
)
def test_invalid_section_is_refused_before_any_run(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(written(tmp_path, **changes), "small", out=tmp_path)
    assert not (tmp_path / "steps-small").exists()


def test_a_file_without_the_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no section 'reproduction'"):
        load(located("sweeps/quickstart"), out=tmp_path)


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("name", names())
def test_shipped_reproductions_are_valid(name: str, size: Any, tmp_path: Path) -> None:
    """All experiments are valid, claims name existing cells, and the small size needs no data."""
    described, sweep = load(name, size, out=tmp_path)
    cells = {planned.short for planned in sweep.planned}
    named = {check.cell for claim in described.claims for check in claim.checks}
    named |= {
        check.baseline for claim in described.claims for check in claim.checks if check.baseline is not None
    }
    assert named <= cells
    assert len(sweep.seeds) >= 3
    if size == "small":
        assert {planned.experiment.task.name_of() for planned in sweep.planned} == {"digits"}
