"""gossamer sweep."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from sweeps import HERE, TINY

from command_line import Cli
from gossamer import load_run
from gossamer.sweep.plan import elapsed

SWEEP = {
    "name": "tiny",
    "base": "base.yaml",
    "seeds": 2,
    "cells": {"slow": {"optimizer.lr": 0.01}, "fast": None},
}


def dump(value: object) -> str:
    return str(yaml.safe_dump(value, sort_keys=False))


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Write base.yaml and sweep.yaml into the working directory."""
    (tmp_path / "base.yaml").write_text(dump(TINY))
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP))


def test_sweep_prints_a_line_per_run_and_a_row_per_cell(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("sweep", "sweep.yaml", *HERE)
    assert code == 0
    ended = [
        line for line in err.splitlines() if " runs to do; " not in line
    ]  # said if the first takes a while
    assert [line.split("  ")[:2] for line in ended] == [
        ["1/4", "slow, seed 1: done"],
        ["2/4", "slow, seed 2: done"],
        ["3/4", "fast, seed 1: done"],
        ["4/4", "fast, seed 2: done"],
    ]
    title, head, slow, fast, *rest = out.splitlines()
    assert title.strip() == "at the end, against slow"
    columns = ["group", "runs", "seeds", "pairs", "test", "loss", "difference", "time", "sent"]
    assert head.split() == columns
    assert slow.split()[:4] == ["slow", "2/2", "2", "–"]  # not compared with itself
    # Two seeds have no interval.
    assert re.match(r"fast +2/2 +2 +2 +[\d.]+, [\d.]+ +-[\d.]+, -[\d.]+ ", fast)
    by_fast = cli("sweep", "sweep.yaml", "--baseline", "fast")[1].splitlines()
    assert by_fast[0].strip() == "at the end, against fast"
    assert rest[-2:] == ["results  runs/tiny/results.csv", "page     gossamer report runs/tiny"]
    # The report prints the same table, and its page has the name of the sweep.
    assert cli("report", "runs/tiny")[1].splitlines()[:4] == [title, head, slow, fast]
    assert "<h1>tiny</h1>" in (tmp_path / "report.html").read_text()
    command = json.loads(next(tmp_path.glob("runs/tiny/*/*/environment.json")).read_text())["command"]
    assert command == ["gossamer", "sweep", "sweep.yaml", *HERE]

    code, out, err = cli("sweep", "sweep.yaml")
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == head
    code, out, err = cli("sweep", "sweep.yaml", "--quiet")
    assert (code, out, err) == (0, "", "")
    summary = json.loads(cli("sweep", "sweep.yaml", *HERE, "--only", "slow", "--again", "--json")[1])
    assert (summary["total"], summary["done"]) == (2, 2)
    assert len(list(tmp_path.glob("runs/tiny/*/*/status.json"))) == 6


def test_report_compares_cells_at_their_own_grid_point(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"seeds": 1, "grid": {"batch_size": [2, 4]}}))
    assert cli("sweep", "sweep.yaml", *HERE, "--quiet")[0] == 0
    command = ("report", "runs/tiny", "--time-to", "test_loss=1000000", "--baseline")
    code, out, err = cli(*command, "slow", "--json")
    assert (code, err) == (0, "")
    rows = [row for row in json.loads(out)["table"] if row["measure"] == "test_loss"]
    assert [(row["group"], row["baseline"], row["pairs"]) for row in rows] == [
        ("slow, batch_size=2", "slow at the same batch_size", 0),
        ("slow, batch_size=4", "slow at the same batch_size", 0),
        ("fast, batch_size=2", "slow at the same batch_size", 1),
        ("fast, batch_size=4", "slow at the same batch_size", 1),
    ]
    assert ", against slow at the same batch_size" in cli(*command, "slow")[1]
    code, _, err = cli(*command, "slo")
    assert code == 2
    assert err.startswith(
        "error: --baseline slo: no group is called that (did you mean 'slow'?); accepted: slow"
    )


def test_lines_name_only_axes_with_several_values(cli: Cli, tmp_path: Path) -> None:
    grid = {"optimizer.lr": [0.1], "batch_size": [2, 4], "topology": ["ring"]}
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"cells": None, "seeds": 1, "grid": grid}))
    _, _, err = cli("sweep", "sweep.yaml", *HERE, "--quiet", "--only", "batch_size=4")
    assert err == ""
    _, _, err = cli("sweep", "sweep.yaml", *HERE)
    assert re.search(r"^2/2  batch_size=2, seed 1: done  test loss \d\.\d{4}\n\Z", err, re.MULTILINE)
    # The plan and the record have full names.
    plan = json.loads(cli("sweep", "sweep.yaml", "--dry-run", "--json")[1])["plan"]
    assert plan[0]["cell"] == "optimizer.lr=0.1, batch_size=2, topology=ring"
    assert json.loads((tmp_path / "runs/tiny/sweep.json").read_text())["runs"][0]["cell"] == plan[0]["cell"]


def test_piped_report_is_not_wrapped(cli: Cli, tmp_path: Path) -> None:
    """A cell is one line, although a terminal would have no room for its name and the values."""
    long = "fast, under a name that takes up almost all of the eighty columns of a terminal"
    cells = {"slow": {"optimizer.lr": 0.01}, long: None}
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"seeds": 1, "cells": cells}))
    assert cli("sweep", "sweep.yaml", *HERE, "--quiet")[0] == 0
    out = cli("report", "runs/tiny", "--time-to", "test_loss=1000000")[1]
    assert re.search(rf"^{long} +1/1 +", out, re.MULTILINE), out


def test_json_is_one_object(cli: Cli) -> None:
    code, out, err = cli("sweep", "sweep.yaml", *HERE, "--only", "fast", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert (summary["total"], summary["done"], summary["failed"], summary["failures"]) == (2, 2, 0, [])
    assert [(row["cell"], row["status"]) for row in summary["results"]] == [
        ("slow", "pending"),
        ("slow", "pending"),
        ("fast", "done"),
        ("fast", "done"),
    ]
    assert [row["runs"] for row in summary["summary"]["test_loss"]] == [0, 2]


def test_dry_run_prints_plan_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("sweep", "sweep.yaml", "--dry-run")
    assert (code, err) == (0, "each cell without a finished run is tried for some seconds\n")
    head, *rows, left = out.splitlines()
    assert head.split() == ["cell", "overrides", "seed", "status", "time", "memory", "measured", "on"]
    assert [row.split()[:4] for row in rows] == [
        ["slow", "optimizer.lr=0.01", "1", "pending"],
        ["slow", "optimizer.lr=0.01", "2", "pending"],
        ["fast", "none", "1", "pending"],
        ["fast", "none", "2", "pending"],
    ]
    assert all(row.endswith("a whole run") for row in rows)  # they take less than two seconds
    assert left.startswith("left: 4 of 4 runs, ")
    plan = json.loads(cli("sweep", "sweep.yaml", "--dry-run", "--json", "--set", "seeds=[5]")[1])["plan"]
    assert [(row["cell"], row["seed"]) for row in plan] == [("slow", 5), ("fast", 5)]
    assert plan[0]["overrides"] == {"optimizer.lr": 0.01}
    assert all(row["wall_s"] > 0 and row["memory_bytes"] > 0 for row in plan)
    assert not (tmp_path / "runs").exists()


def test_dry_run_estimates_remaining_time(cli: Cli, tmp_path: Path) -> None:
    assert cli("sweep", "sweep.yaml", *HERE, "--only", "fast", "--quiet")[0] == 0
    plan = json.loads(cli("sweep", "sweep.yaml", "--dry-run", "--json")[1])["plan"]
    walls = [load_run(run).wall_s or 0 for run in (tmp_path / "runs/tiny").glob("fast-seed*")]
    assert [row["by"] for row in plan] == ["a whole run", "a whole run", "2 done", "2 done"]
    assert plan[2]["wall_s"] == pytest.approx(sum(walls) / 2)
    assert cli("sweep", "sweep.yaml", "--dry-run")[1].splitlines()[-1].startswith("left: 2 of 4 runs, ")


def test_dry_run_says_how_long_one_waits(cli: Cli) -> None:
    """Runs of unequal length: the estimate is that of the real order, not the sum."""
    sets = ("--set", "seeds=3", "--dry-run")
    made = json.loads(cli("sweep", "sweep.yaml", *sets, "--jobs", "2", "--json")[1])
    walls = [row["wall_s"] for row in made["plan"]]
    a, b = walls[0], walls[3]
    # Two workers and six runs, a a a b b b. The first a to end is followed by the third, the second by the first b.
    first, second = 2 * a, a + b
    for _ in range(2):
        first, second = sorted((first, second))
        first += b
    assert made["left"] == {
        "runs": 6,
        "unknown": 0,
        "jobs": 2,
        "total_s": pytest.approx(3 * a + 3 * b),
        "wall_s": pytest.approx(max(first, second)),
    }
    line = cli("sweep", "sweep.yaml", *sets, "--jobs", "2")[1].splitlines()[-1]
    assert re.fullmatch(r"left: 6 of 6 runs, \S+ s with 2 at a time \(\S+ s one after another\)", line)
    alone = cli("sweep", "sweep.yaml", *sets, "--jobs", "1")[1].splitlines()[-1]
    assert re.fullmatch(r"left: 6 of 6 runs, \S+ s one after another", alone)


def test_time_of_unequal_runs_by_hand() -> None:
    assert elapsed([5, 1, 1, 1], 2) == 5  # 5 beside 1 + 1 + 1
    assert elapsed([1, 1, 1, 5], 2) == 6  # the long one begins after the first second
    assert elapsed([1, 1, 1, 5], 1) == 8
    assert elapsed([], 3) == 0


def test_dry_run_leaves_out_what_is_not_done_again(cli: Cli, tmp_path: Path) -> None:
    diverges = {"optimizer.lr": 1e30, "stop.rounds": 50}
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"cells": {"diverges": diverges}}))
    assert cli("sweep", "sweep.yaml", *HERE, "--quiet")[0] == 1
    plan = ("sweep", "sweep.yaml", "--dry-run")
    assert cli(*plan)[1].splitlines()[-1].startswith("left: 0 of 2 runs, ")
    assert cli(*plan, "--retry-failed")[1].splitlines()[-1].startswith("left: 2 of 2 runs, ")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"cells": {"x": {"optimizer.lr": -1}}}, [], "error: cell x: optimizer.lr: got -1; accepted: "),
        ({}, ["--only", "fsat"], "error: --only fsat: no such cell (did you mean 'fast'?); accepted: "),
        ({}, ["--set", "nodes=none"], "error: cell slow: nodes: got 'none'; accepted: "),
        ({"cells": {"x": {"topology": {"name": "random-regular", "degree": 9}}}}, [], "error: cell x: "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    cli: Cli, tmp_path: Path, change: dict[str, object], arguments: list[str], message: str
) -> None:
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | change))
    code, out, err = cli("sweep", "sweep.yaml", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert not (tmp_path / "runs").exists()


def test_sweep_and_experiment_files_are_told_apart(cli: Cli) -> None:
    message = "error: sweep.yaml: a sweep; accepted: an experiment (gossamer sweep runs a sweep)\n"
    assert cli("run", "sweep.yaml") == (2, "", message)
    message = (
        "error: base.yaml: an experiment; accepted: a sweep, with 'base' (gossamer run runs an experiment)\n"
    )
    assert cli("sweep", "base.yaml") == (2, "", message)


def test_failures_are_listed_and_exit_with_code_1(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    fails = {"algorithm": {"name": "sweeps:Fails", "while_there": str(tmp_path / "bad")}}
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"cells": {"x": fails, "y": None}, "seeds": 1}))
    code, out, err = cli("sweep", "sweep.yaml", *HERE)
    assert code == 1
    line = "1/2  x, seed 1: failed: node 1 failed in round 0: ValueError: the second node has had enough"
    assert any(said.startswith(line) for said in err.splitlines())
    [named] = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert named.startswith(
        "FAILED  x, seed 1: node 1 failed in round 0: ValueError: the second node has had enough"
    )
    (tmp_path / "bad").unlink()
    assert cli("sweep", "sweep.yaml", "--quiet")[0] == 1
    assert cli("sweep", "sweep.yaml", *HERE, "--quiet", "--retry-failed")[0] == 0


def test_set_changes_the_base_and_hence_the_runs(cli: Cli, tmp_path: Path) -> None:
    assert cli("sweep", "sweep.yaml", *HERE, "--only", "fast", "--quiet", "--set", "stop.rounds=1")[0] == 0
    [one, two] = tmp_path.glob("runs/tiny/*/*/experiment.yaml")
    assert {yaml.safe_load(file.read_text())["stop"]["rounds"] for file in (one, two)} == {1}
    code, out, _ = cli("sweep", "sweep.yaml", *HERE, "--only", "fast", "--json")
    assert (code, json.loads(out)["skipped"]) == (0, 0)


def test_stopped_sweep_exits_with_code_130(cli: Cli, tmp_path: Path) -> None:
    asks = {
        "algorithm": {"name": "sweeps:AsksForTheEnd", "asked": str(tmp_path / "asked"), "pid": os.getpid()}
    }
    (tmp_path / "sweep.yaml").write_text(dump(SWEEP | {"cells": {"x": asks}}))
    code, out, _ = cli("sweep", "sweep.yaml", "--jobs", "1")
    assert code == 130
    assert "STOPPED  2 runs are left; the same command continues with them" in out.splitlines()
    assert cli("sweep", "sweep.yaml", *HERE, "--quiet")[0] == 0


def test_unknown_baseline_is_refused_before_any_run(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("sweep", "sweep.yaml", "--baseline", "slwo", "--quiet", *HERE)
    assert code == 2
    assert "--baseline slwo: no group is called that (did you mean 'slow'?)" in err
    assert not list(tmp_path.rglob("metrics.parquet"))


def test_verify_reports_missing_run_and_experiment(cli: Cli, tmp_path: Path) -> None:
    cli("sweep", "sweep.yaml", "--quiet", *HERE)
    first, second, *_ = sorted(file.parent for file in tmp_path.rglob("experiment.yaml"))
    (first / "experiment.yaml").unlink()
    shutil.rmtree(second)
    code, out, err = cli("verify", "runs")
    assert code != 0
    assert f"{first.name}/experiment.yaml: missing" in out + err
    assert f"{second.name}: missing" in out + err
