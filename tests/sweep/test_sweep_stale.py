"""Finished runs whose own code or data has changed since, and those of older versions."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from sweeps import HERE, TINY, make_sweep, run_here

import gossamer
from command_line import Cli
from gossamer import BadInput, Sweep, digests
from gossamer.results.folder import read_environment, write_json
from gossamer.sweep.execute import Counts, SweepObserver, SweepOutcome
from gossamer.sweep.plan import plan
from gossamer.sweep.table import states

ALGORITHM = "from gossamer.algorithms import DPSGD\nclass Mine(DPSGD):\n    mine: int = 1\n"
FEMNIST: dict[str, Any] = {
    "nodes": 2,
    "task": {"name": "femnist", "model": "logistic"},
    "data_root": "root",
    "batch_size": "full",
}
TABLE = {"name": "hub", "inputs": "a", "targets": "b", "loss": "regression", "model": "linear"}


class Heard(SweepObserver):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def edit(module: str, text: str) -> None:
    """Edit a module between two programs."""
    Path(f"{module}.py").write_text(text)
    sys.modules.pop(module, None)


def touched(path: Path, change: Callable[[Path], object]) -> None:
    """Change a file, but neither its size nor its time."""
    before = path.stat()
    change(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def again(sweep: Sweep, **options: Any) -> tuple[SweepOutcome, list[str]]:
    heard = Heard()
    return run_here(sweep, observer=heard, **options), heard.texts


def write_femnist(path: Path, labels: list[int]) -> None:
    """A data set like FEMNIST on the hub, of grey pictures; all of its labels have one digit, so its size is constant."""
    from PIL import Image

    Image.new("L", (28, 28), 7).save(picture := io.BytesIO(), format="PNG")
    images = [{"bytes": picture.getvalue(), "path": None} for _ in labels]
    columns = {"image": images, "character": labels, "writer_id": ["a", "b"] * (len(labels) // 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(columns).write_parquet(path, compression="uncompressed", statistics=False)


# --- the table of stale results: what was edited after the sweep was done


def mine(here: Path) -> Sweep:
    return make_sweep(here, cells={"mine": {"algorithm": "mine:Mine"}, "plain": {}})


def test_body_of_an_own_algorithm(here: Path) -> None:
    edit("mine", "import helper\n" + ALGORITHM)
    edit("helper", "x = 1\n")
    assert run_here(mine(here)).counts == Counts(2, done=2)
    assert again(mine(here)) == (SweepOutcome(Counts(2, skipped=2), (), stopped=False), [])
    edit("mine", "import helper\n" + ALGORITHM + "    # another body\n")
    edit("helper", "x = 2\n")
    with pytest.raises(
        BadInput,
        match=r"stale, since this has changed: module helper \(mine, seed 1\); module mine \(mine, seed 1\); accepted:"
        r" --again .*--only.* or --keep",
    ):
        run_here(mine(here))
    assert again(mine(here), only=["plain"])[1] == [
        "stale, since this has changed: module helper (mine, seed 1); module mine (mine, seed 1)",
    ]
    kept, said = again(mine(here), keep=True)
    assert kept.counts == Counts(2, skipped=2)
    assert said == [
        "stale, since this has changed: module helper (mine, seed 1); module mine (mine, seed 1)",
    ]
    assert kept.notes == tuple(said)
    assert again(mine(here), only=["mine"], again=True) == (
        SweepOutcome(Counts(1, done=1), (), stopped=False),
        [],
    )
    assert again(mine(here)) == (SweepOutcome(Counts(2, skipped=2), (), stopped=False), [])


def test_cells_of_different_code_are_not_compared_in_silence(cli: Cli, here: Path) -> None:
    """One of two cells runs again after an edit: the calls and the report say that the other is of other code."""
    os.chdir(here)
    edit("mine", ALGORITHM)
    described = {
        "name": "s",
        "base": {**TINY, "algorithm": "mine:Mine"},
        "grid": {"optimizer.lr": [0.1, 0.05]},
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(described))
    assert cli("sweep", "sweep.yaml", *HERE)[0] == 0
    edit("mine", ALGORITHM + "# edited\n")
    only = ("sweep", "sweep.yaml", "--only", "optimizer.lr=0.05", *HERE)
    for call in ((*only, "--again"), only):
        code, out, err = cli(*call)
        assert code == 0, err
        assert "stale, since this has changed: module mine (optimizer.lr=0.1, seed 1)" in err
        assert "Not the same in all groups: module mine (optimizer.lr=0.1; optimizer.lr=0.05)" in out
    assert (
        "Not the same in all groups: module mine (optimizer.lr=0.1; optimizer.lr=0.05)"
        in cli("report", "runs/s")[1]
    )
    assert cli("sweep", "sweep.yaml", *HERE)[0] == 2


def test_default_of_a_field_of_an_own_algorithm(here: Path) -> None:
    edit("mine", ALGORITHM)
    run_here(mine(here))
    edit("mine", ALGORITHM.replace("= 1", "= 2"))
    assert again(mine(here)) == (SweepOutcome(Counts(2, skipped=1, done=1), (), stopped=False), [])


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ({**TABLE, "path": "d.csv"}, "d.csv"),
        ({**TABLE, "path": "d"}, "d/train.csv"),
        ({"name": "leaf-synthetic", "path": "leaf"}, "leaf/train/a.json"),
        ({"name": "mine:load", "folder": "d"}, "d/train.csv"),
    ],
)
def test_named_files_run_again(here: Path, task: dict[str, Any], path: str) -> None:
    """A table, a folder, LEAF's folder, and a path of an own task; of equal size and time."""
    edit(
        "mine",
        "import numpy as np, torch\nfrom pathlib import Path\nfrom gossamer.tasks import Task\n"
        "def load(folder: Path):\n"
        "    x = torch.from_numpy(np.loadtxt(folder / 'train.csv', delimiter=',', skiprows=1, dtype=np.float32))\n"
        "    return Task(lambda: torch.nn.Linear(2, 2), (x, x), (x, x), torch.nn.functional.mse_loss)\n",
    )
    user = {"x": [[1.0, 2.0, 3.0, 4.0]] * 4, "y": [0, 1, 0, 1]}
    for split in ("train", "test"):
        (here / "leaf" / split).mkdir(parents=True)
        (here / "leaf" / split / "a.json").write_text(json.dumps({"user_data": {"u": user}}))
        (here / "d").mkdir(exist_ok=True)
        (here / "d" / f"{split}.csv").write_text("a,b\n" + "1,2\n" * 20)
    (here / "d.csv").write_text("a,b\n" + "1,2\n" * 20)

    def sweep() -> Sweep:
        return Sweep.of({"name": "s", "base": {**TINY, "nodes": 2, "task": task}}, out=here / "runs")

    assert run_here(sweep()).counts == Counts(1, done=1)
    assert again(sweep()) == (SweepOutcome(Counts(1, skipped=1), (), stopped=False), [])
    touched(Path(path), lambda file: file.write_text(file.read_text().replace("2", "3")))
    assert again(sweep()) == (SweepOutcome(Counts(1, done=1), (), stopped=False), [])


@pytest.mark.parametrize("same_time", [False, True])
def test_data_set_below_the_data_root(here: Path, same_time: bool) -> None:
    """It stops the sweep, and a plain run reads the new data."""
    file = here / "root" / "hub" / "flwrlabs" / "femnist" / "train.parquet"
    write_femnist(file, [1] * 20)

    def sweep() -> Sweep:
        return make_sweep(here, base=FEMNIST)

    assert run_here(sweep()).failed == ()
    assert run_here(sweep()).counts == Counts(1, skipped=1)

    def change(path: Path) -> None:
        write_femnist(path, [2] * 20)

    touched(file, change) if same_time else change(file)
    with pytest.raises(
        BadInput, match=r"has changed: data_root/hub/flwrlabs/femnist/train.parquet \(small, seed 1\)"
    ):
        run_here(sweep())
    made = plan(sweep(), sweep().planned)
    assert made.rows[0]["changed"] == ["data_root/hub/flwrlabs/femnist/train.parquet"]
    labels = gossamer.run(sweep().planned[0].experiment, here / "plain").setup["labels"]
    assert [sum(column) for column in zip(*labels, strict=True)][:4] == [0, 0, 18, 0]


# --- older records


def age(sweep: Sweep, **evaluation: Any) -> None:
    """Make the records of a sweep those of a version without fingerprints and ``evaluation.of``."""
    for state in states(sweep).values():
        assert state.folder is not None
        recorded = read_environment(state.folder)
        del recorded["fingerprint"]
        write_json(state.folder / "environment.json", recorded)
        described = yaml.safe_load((state.folder / "experiment.yaml").read_text())
        del described["evaluation"]["of"]
        (state.folder / "experiment.yaml").write_text(yaml.safe_dump(described))


def test_record_without_a_fingerprint_counts_with_a_line(here: Path) -> None:
    run_here(make_sweep(here, seeds=3))
    age(make_sweep(here, seeds=3))
    outcome, said = again(make_sweep(here, seeds=4))
    assert outcome.counts == Counts(4, skipped=3, done=1)
    assert said == [
        "without a fingerprint: 3 runs: small, seed 1, small, seed 2 and small, seed 3; they count, though their code"
        " and data may have changed"
    ]


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({}, False),
        ({"evaluation": {"every_s": 0.5}}, True),
        ({"stop": {"time_s": 1.5}, "compute": {"name": "constant", "seconds_per_step": 0.4}}, True),
        ({"stop": {"rounds": 2, "bytes": 50}}, True),
    ],
)
def test_old_rows_of_a_grid_or_an_end_were_measured_at_instants(
    here: Path, changes: dict[str, Any], stops: bool
) -> None:
    run_here(make_sweep(here, base=changes))
    age(make_sweep(here, base=changes))
    if not stops:
        assert run_here(make_sweep(here, base=changes)).counts == Counts(1, skipped=1)
        return
    with pytest.raises(BadInput, match="has changed: measured at instants, not at the ends of rounds"):
        run_here(make_sweep(here, base=changes))
    assert run_here(make_sweep(here, base=changes), keep=True).counts == Counts(1, skipped=1)
    assert run_here(make_sweep(here, base=changes), again=True).counts == Counts(1, done=1)
    assert run_here(make_sweep(here, base=changes)).counts == Counts(1, skipped=1)


def test_damaged_old_record_is_logged_and_counts(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_here(make_sweep(here))
    age(make_sweep(here))
    [state] = states(make_sweep(here)).values()
    assert state.folder is not None
    (state.folder / "metrics.parquet").write_bytes(b"PAR1")
    outcome, said = again(make_sweep(here))
    assert outcome.counts == Counts(1, skipped=1)
    assert [text[:21] for text in said] == ["without a fingerprint"]
    assert "metrics.parquet" in caplog.text


# --- versions, machines, cost


def test_other_versions_are_said_and_do_not_stop(here: Path) -> None:
    run_here(make_sweep(here, seeds=2))
    first, _ = states(make_sweep(here, seeds=2)).values()
    assert first.folder is not None
    recorded = read_environment(first.folder)
    now, recorded["packages"]["torch"] = recorded["packages"]["torch"], "1.0"
    write_json(first.folder / "environment.json", recorded)
    outcome, said = again(make_sweep(here, seeds=2))
    assert outcome.counts == Counts(2, skipped=2)
    assert said == [f"finished with torch 1.0 (now {now}): small, seed 1"]


def test_planner_without_the_data_compares_code_and_says_so(here: Path) -> None:
    write_femnist(here / "root" / "hub" / "flwrlabs" / "femnist" / "train.parquet", [1] * 20)
    edit("mine", ALGORITHM)
    base = {**FEMNIST, "algorithm": "mine:Mine"}
    run_here(make_sweep(here, base=base))
    (here / "root").rename("elsewhere")
    outcome, said = again(make_sweep(here, base=base))
    assert outcome.counts == Counts(1, skipped=1)
    assert said == [
        "not at hand here: data_root/hub/flwrlabs/femnist; of small, seed 1 only the code was compared with the present"
    ]
    edit("mine", ALGORITHM + "# edited\n")
    with pytest.raises(BadInput, match=r"has changed: module mine \(small, seed 1\); accepted"):
        run_here(make_sweep(here, base=base))


def test_files_are_hashed_once_for_all_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    hashed: list[Path] = []
    sha256 = digests._sha256
    monkeypatch.setattr(digests, "_sha256", lambda path: hashed.append(path) or sha256(path))
    file = here / "root" / "hub" / "flwrlabs" / "femnist" / "train.parquet"
    write_femnist(file, [1] * 20)
    run_here(make_sweep(here, base=FEMNIST, seeds=12))
    run_here(make_sweep(here, base=FEMNIST, seeds=12))
    assert hashed == [file]


# --- the command line


def test_command_line_stops_keeps_and_repeats(cli: Cli, here: Path) -> None:
    os.chdir(here)
    edit("mine", ALGORITHM)
    (here / "sweep.yaml").write_text(
        yaml.safe_dump({"name": "s", "base": {**TINY, "algorithm": "mine:Mine"}})
    )
    assert cli("sweep", "sweep.yaml", *HERE)[0] == 0
    edit("mine", ALGORITHM + "# edited\n")
    code, _, err = cli("sweep", "sweep.yaml", *HERE)
    assert code == 2
    assert "module mine (s, seed 1)" in err
    shown = cli("sweep", "sweep.yaml", "--dry-run")[1]
    assert "done, stale" in shown
    assert shown.splitlines()[-1] == "stale, since this has changed: module mine (s, seed 1)"
    made = json.loads(cli("sweep", "sweep.yaml", "--dry-run", "--json")[1])
    assert made["plan"][0]["changed"] == ["module mine"]
    assert made["notes"] == ["stale, since this has changed: module mine (s, seed 1)"]
    code, out, _ = cli("sweep", "sweep.yaml", "--keep", "--json", *HERE)
    assert code == 0
    assert json.loads(out)["notes"][0] == "stale, since this has changed: module mine (s, seed 1)"
    code, _, err = cli("sweep", "sweep.yaml", "--keep", "--again", *HERE)
    assert code == 2
    assert "--keep: with --again" in err
    assert cli("sweep", "sweep.yaml", "--again", *HERE)[0] == 0
    code, _, err = cli("sweep", "sweep.yaml", *HERE)
    assert (code, err) == (0, "")


def test_reproduction_stops_and_keeps_like_its_sweep(cli: Cli, here: Path) -> None:
    os.chdir(here)
    edit("mine", ALGORITHM)
    check = {"cell": "plain", "measure": "time_s", "number": "mean", "at_least": 0}
    section = {
        "title": "t",
        "paper": "p",
        "published": "q",
        "departures": ["None."],
        "figure": {"metric": "test_loss"},
        "small": {},
        "full": {},
        "claims": [{"text": "Time passes.", "checks": [check]}],
    }
    cells = {"plain": {}, "mine": {"algorithm": "mine:Mine"}}
    described = {"name": "s", "base": TINY, "cells": cells, "reproduction": section}
    (here / "s.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    code, _, err = cli("reproduce", "s.yaml", *HERE)
    assert code == 0, err
    edit("mine", ALGORITHM + "# edited\n")
    code, _, err = cli("reproduce", "s.yaml", *HERE)
    assert code == 2
    assert "module mine (mine, seed 1)" in err
    code, _, err = cli("reproduce", "s.yaml", "--keep", *HERE)
    assert code == 0
    assert "stale, since this has changed: module mine (mine, seed 1)" in err
