"""gossamer demo and gossamer new, also from a wheel in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import polars as pl
import pytest
import yaml

from command_line import Cli
from gossamer import Experiment, run
from gossamer.config.registry import names

ROOT = Path(__file__).parents[2]
WRITTEN = {"algorithm.py", "experiment.yaml", "experiment.schema.json", "test_algorithm.py"}


def test_demo_runs_quickstart(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("demo")
    assert (code, err.count("round 100 ")) == (0, 1)
    *_, report, following = out.splitlines()
    assert (
        following
        == "next                 gossamer new my-study  (an algorithm of your own, an experiment and a test)"
    )
    page = Path(report.split()[-1])
    assert page.name == "report.html"
    assert (tmp_path / page).is_file()
    assert Experiment.load(page.parent / "experiment.yaml").name == "quickstart"


def test_new_study_runs_and_is_not_overwritten(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = cli("new", "a study")
    assert code == 0
    assert out.endswith(
        "\nnext:\n  cd 'a study'\n  gossamer run experiment.yaml\n  python -m pytest      (after pip install pytest)\n"
    )
    study = tmp_path / "a study"
    assert {file.name for file in study.iterdir()} == WRITTEN
    first, *_ = (study / "experiment.yaml").read_text().splitlines()
    assert first == "# yaml-language-server: $schema=experiment.schema.json"
    assert json.loads((study / "experiment.schema.json").read_text()) == json.loads(cli("schema")[1])
    monkeypatch.chdir(study)
    monkeypatch.syspath_prepend(study)
    sys.modules.pop("algorithm", None)
    experiment = Experiment.load("experiment.yaml", ["stop.rounds=20"])
    assert (experiment.name, experiment.algorithm.local_steps) == ("a-study", 5)
    done = run(experiment)
    accuracy = done.metrics.filter(pl.col("round") == 20)["test_accuracy"].mean()
    assert isinstance(accuracy, float)
    assert accuracy > 0.5
    code, _, err = cli("new", str(study))
    assert (code, err.partition(": already")[0]) == (2, f"error: {study / 'algorithm.py'}")


def test_new_with_unknown_algorithm_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("new", "study", "--algorithm", "d-pgsd")
    assert (code, err.partition(";")[0]) == (
        2,
        "error: --algorithm: unknown name 'd-pgsd' (did you mean 'd-psgd'?)",
    )
    assert not list(tmp_path.glob("study*"))


@pytest.mark.parametrize("name", sorted(names("algorithm")))
def test_copied_algorithm_gives_same_bits(
    name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.config.schema.json_schema", dict)
    assert cli("new", "study", "--algorithm", name)[0] == 0
    monkeypatch.syspath_prepend(tmp_path / "study")
    sys.modules.pop("algorithm", None)
    file = tmp_path / "study" / "experiment.yaml"
    quick = ["stop.rounds=2", "evaluation.every_rounds=2", "engine.trainer=sequential", "engine.workers=1"]
    copied = Experiment.load(file, quick)
    assert type(copied.algorithm).__module__ == "algorithm"
    builtin = copied.override(algorithm={**copied.algorithm.spec(), "name": name})
    assert copied.algorithm.model_dump() == builtin.algorithm.model_dump()
    first, second = (run(variant, tmp_path / "runs").metrics.drop("wall_s") for variant in (copied, builtin))
    assert first.equals(second)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_wheel_works_in_empty_folder(tmp_path: Path) -> None:
    source, empty = tmp_path / "source", tmp_path / "empty"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, files.split("\0")):  # without leftovers of earlier builds
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            subprocess.run(["cp", "-P", ROOT / name, source / name], check=True)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"  # unpacking installs a pure-Python wheel
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}

    def gossamer(*arguments: str, where: Path = empty) -> str:
        call = [sys.executable, "-m", *arguments]
        done = subprocess.run(call, cwd=where, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    assert "0.92" in gossamer("gossamer", "demo").splitlines()[0]
    gossamer("gossamer", "run", "quickstart", "--set", "stop.rounds=5", "--engine", "processes")
    gossamer(
        "gossamer", "run", "divshare/kollaps", "--set", "task=digits", "--set", "stop={rounds: 1}", "--quiet"
    )
    for options in ((), ("--algorithm", "relay-sum")):
        folder = empty / "-".join(["study", *options[1:]])
        gossamer("gossamer", "new", folder.name, *options)
        assert "2 passed" in gossamer("pytest", "-q", "-p", "no:cacheprovider", where=folder)
        gossamer("gossamer", "run", "experiment.yaml", "--set", "stop.rounds=5", where=folder)
    assert yaml.safe_load((folder / "experiment.yaml").read_text())["topology"] == "star"
