"""Damaged or hostile files of a record: every command ends soon, with one line that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import yaml
from safetensors.torch import save_file

import gossamer
from command_line import Cli
from gossamer import Experiment, load_run
from gossamer.results.checkpoints import complete_numbers
from test_resume import Stopper

SETTINGS: dict[str, Any] = {
    "name": "small",
    "nodes": 3,
    "task": {"name": "least-squares", "samples": 48, "features": 4},
    "topology": "ring",
    "algorithm": "d-psgd",
    "batch_size": 4,
    "evaluation": {"every_rounds": 1},
    "checkpoint": {"every_rounds": 2},
    "stop": {"rounds": 8},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped run with two checkpoints."""
    run = gossamer.run(Experiment.of(SETTINGS), tmp_path_factory.mktemp("stopped"), observer=Stopper(22))
    assert len(complete_numbers(run.path / "checkpoints")) == 2
    return run.path


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "runs" / "small" / stopped.name))


@pytest.fixture
def killed(folder: Path) -> Path:
    """The run as if it had been killed: its rows are in segments."""
    resumed = gossamer.resume(folder, observer=Stopper(6), overrides=["stop.rounds=20"])
    (resumed.path / "status.json").unlink()
    run = gossamer.results.folder.RunFolder.open(resumed.path)
    for kind in ("metrics", "events", "graphs"):
        rows = getattr(resumed, kind).to_dicts() if kind != "graphs" else [{"round": 5, "edges": [[0, 1]]}]
        (folder / f"{kind}.parquet").unlink(missing_ok=True)
        with run.segment(kind) as segment:  # type: ignore[arg-type]
            for row in rows:
                segment.append({name: value for name, value in row.items() if value is not None})
    return folder


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file and removes its checksum."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        del content["crc32"]
        (folder / name).write_text(json.dumps({**content, **changes}))

    return change


def replaced(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_text(text))


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def linked(name: str, to: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def rewritten(name: str, column: str, value: Any) -> Callable[[Path], None]:
    """Sets all values of a column."""

    def change(folder: Path) -> None:
        table = pl.read_parquet(folder / name)
        table.with_columns(pl.lit(value).alias(column)).write_parquet(folder / name)

    return change


def void(_: object) -> None:
    pass


BOMB = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12))]
)

DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("metrics.parquet", cut_short("metrics.parquet")),
    ("metrics.parquet", replaced("metrics.parquet", "PAR1")),
    ("metrics.parquet", linked("metrics.parquet", "/dev/zero")),
    ("metrics.parquet", linked("metrics.parquet", "/etc/passwd")),
    ("metrics.parquet", rewritten("metrics.parquet", "node", "many")),
    ("metrics.parquet", rewritten("metrics.parquet", "round", None)),
    ("events.parquet", fifo("events.parquet")),
    ("setup.json", replaced("setup.json", "[" * 100_000 + "]" * 100_000)),
    ("setup.json", replaced("setup.json", '{"a": ' * 100_000 + "}" * 100_000)),
    ("setup.json", cut_short("setup.json")),
    ("setup.json", edited("setup.json", nodes="many")),
    ("setup.json", edited("setup.json", nodes=10**12)),
    ("setup.json", edited("setup.json", samples=3)),
    ("setup.json", edited("setup.json", graphs={"first": [[0, 1]]})),
    ("status.json", edited("status.json", run="another")),
    ("status.json", replaced("status.json", "[]")),
    ("environment.json", edited("environment.json", numerics=3)),
    ("environment.json", edited("environment.json", resumed=[])),
    ("environment.json", edited("environment.json", more=json.loads("[" * 500 + "]" * 500))),
    ("experiment.yaml", replaced("experiment.yaml", "a: &a [*a]")),
    ("experiment.yaml", replaced("experiment.yaml", "a: " + "[" * 900 + "]" * 900)),
    ("experiment.yaml", replaced("experiment.yaml", BOMB)),
    ("experiment.yaml", replaced("experiment.yaml", "a: " + "1:" * 10_000 + "1")),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listed", [True, False], ids=["ended", "killed"])
@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_file_is_reported_in_one_line(
    cli: Cli, folder: Path, name: str, damage: Callable[[Path], None], listed: bool
) -> None:
    damage(folder)
    if not listed and name != "status.json":
        (folder / "status.json").unlink()
    for command in (("report",), ("resume", "--no-report")):
        code, out, err = cli(command[0], str(folder), *command[1:])
        assert (code, out) == (2, ""), err
        [line] = err.splitlines()
        assert line.startswith("error: ")
        assert name in line
        assert len(line) < 1000
    code, out, err = cli("verify", str(folder))
    assert (code, err) == (1, "")
    assert any(name in line for line in out.splitlines())


@pytest.mark.parametrize(
    "wrong", ["nodes: 1" + "0" * 300, "nodes: .inf", "seed: x", "evaluation: 7", "engine: [x]"]
)
def test_recorded_experiment_fields_are_type_checked(cli: Cli, folder: Path, wrong: str) -> None:
    name, text = wrong.partition(":")[0], (folder / "experiment.yaml").read_text()
    described = {**yaml.safe_load(text), **yaml.safe_load(wrong)}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(described))
    code, _, err = cli("report", str(folder))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "experiment.yaml: " in err
    assert f"$.{name}" in err


@pytest.mark.timeout(60)
def test_damaged_run_or_index_of_a_sweep_is_reported(
    cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"name": "two", "base": SETTINGS, "seeds": 2}))
    assert cli("sweep", "sweep.yaml", "--jobs", "1")[0] == 0
    _, second = sorted(tmp_path.glob("runs/two/*/*/metrics.parquet"))
    assert cli("verify", "runs/two") == (0, "intact: 2 runs\n", "")
    os.truncate(second, 100)
    code, out, err = cli("sweep", "sweep.yaml")
    assert (code, err) == (0, "")
    assert f"{second.relative_to(tmp_path)}: its checksum does not match: it is damaged" in caplog.text
    code, out, err = cli("report", "runs/two")
    assert (code, len(err.splitlines())) == (2, 1)
    assert str(second.relative_to(tmp_path)) in err
    code, out, _ = cli("verify", "runs", "--json")
    runs = json.loads(out)["runs"]
    assert code == 1
    assert {path for path, problems in runs.items() if problems} == {str(second.parent.relative_to(tmp_path))}
    sweep = tmp_path / "runs" / "two" / "sweep.json"
    for text in (
        '{"runs": 1e300}',
        '{"runs": [{"cell": "a", "status": "done", "folder": "../../.."}]}',
        "[" * 100_000,
    ):
        sweep.write_text(text)
        code, out, err = cli("report", "runs/two")
        assert (code, len(err.splitlines())) == (2, 1)
        assert "runs/two/" in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_resume_falls_back_to_newest_intact_checkpoint(cli: Cli, tmp_path: Path, engine: str) -> None:
    described = Experiment.of({**SETTINGS, "engine": engine, "checkpoint": {"every_rounds": 2, "keep": 9}})
    uninterrupted = gossamer.run(described, tmp_path / "whole")
    folder = gossamer.run(described, tmp_path, observer=Stopper(26)).path
    *_, third, second, first = complete_numbers(folder / "checkpoints")
    os.truncate(folder / "checkpoints" / str(first) / "manifest.json", 200)
    for rank in range(3):
        path = folder / "checkpoints" / str(second) / f"node-{rank}.safetensors"
        path.write_bytes((folder / "checkpoints" / str(third) / path.name).read_bytes())
    code, out, err = cli("verify", str(folder))
    assert code == 1
    assert f"node-1.safetensors: its checkpoint is {third}, not {second}" in out
    code, out, err = cli("resume", str(folder), "--no-report")
    assert code == 0, err
    assert f"checkpoint {first} can't be used: {folder / 'checkpoints' / str(first)}/manifest.json: " in err
    assert f"checkpoint {second} can't be used: " in err
    assert f"continues from checkpoint {third}, " in err
    done = load_run(folder)
    assert torch.equal(done.parameters, uninterrupted.parameters)  # type: ignore[arg-type]


def test_resume_without_intact_checkpoint_changes_nothing(cli: Cli, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for number in complete_numbers(folder / "checkpoints"):
        path = folder / "checkpoints" / str(number) / "node-1.safetensors"
        save_file({"model.0": torch.zeros(3)}, path)
        before[path] = path.read_bytes()
    code, _, err = cli("resume", str(folder))
    assert (code, len(err.splitlines())) == (2, 2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# --- rows


@pytest.mark.parametrize("damage", ["missing", "changed", "swapped", "torn", "of another run"])
def test_damaged_row_inside_segment_is_detected(cli: Cli, killed: Path, damage: str) -> None:
    path = killed / "segments" / "metrics-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    line = 5
    match damage:
        case "missing":
            del lines[4]
        case "changed":
            lines[4] = lines[4].replace(b'"round":', b'"round":1', 1)
        case "swapped":
            lines[4], lines[5] = lines[5], lines[4]
        case "torn":
            lines[4] = lines[4][:40] + b"\n"
        case _:
            edited("environment.json", run="another")(killed)
            line = 1
    path.write_bytes(b"".join(lines))
    for command in ("report", "resume"):
        code, _, err = cli(command, str(killed))
        assert code == 2
        assert f"-0.jsonl, line {line}: its checksum does not match" in err
    assert cli("verify", str(killed))[0] == 1


def test_torn_last_row_of_killed_run_is_ignored(cli: Cli, killed: Path) -> None:
    rows = load_run(killed).metrics
    path = killed / "segments" / "metrics-0.jsonl"
    os.truncate(path, path.stat().st_size - 7)
    assert load_run(killed).metrics.height == rows.height - 1
    report = "intact: 1 run (1 unfinished: running or killed)\n"
    assert cli("verify", str(killed)) == (0, report, "")


@pytest.mark.parametrize("name", ["metrics.parquet", "events.parquet"])
def test_missing_table_of_finished_run_is_reported(cli: Cli, folder: Path, name: str) -> None:
    (folder / name).unlink()
    for command, code in (("report", 2), ("resume", 2), ("verify", 1)):
        ended, out, err = cli(command, str(folder))
        assert ended == code
        assert f"{name}: No such file or directory; accepted: what status.json lists" in out + err


@pytest.mark.timeout(60)
def test_oversized_models_file_is_rejected_quickly(cli: Cli, folder: Path) -> None:
    os.truncate(folder / "models.safetensors", 10**12)
    code, out, _ = cli("verify", str(folder))
    assert code == 1
    assert "models.safetensors" in out
