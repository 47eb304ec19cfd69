"""Resuming after a kill, after a failure, or to a later end; and refusals to resume."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml

import gossamer
from command_line import Cli
from forked import FORKER
from gossamer import BadInput, Experiment, Node, Run, RunFailed, load_run
from gossamer.api import unfinished
from gossamer.results.checkpoints import newest
from gossamer.results.folder import locked, write_json
from gossamer.results.observer import Observer
from gossamer.results.verify import problems_of
from scenario import experiment as scripted

SETTINGS: dict[str, Any] = {
    "name": "small",
    "nodes": 3,
    "task": {"name": "least-squares", "samples": 48, "features": 4},
    "topology": "ring",
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.5},
    "batch_size": 4,
    "evaluation": {"every_rounds": 2},
    "checkpoint": {"every_rounds": 3},
    "stop": {"rounds": 10},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


def small(**changes: Any) -> Experiment:
    return Experiment.of({**SETTINGS, **changes})


class Stopper(Observer):
    """Stops a run, as Ctrl-C does, after a number of rows."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def row(self, row: Mapping[str, Any]) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


def assert_same(first: Run, second: Run) -> None:
    assert first.parameters is not None
    assert second.parameters is not None
    assert torch.equal(first.parameters, second.parameters)
    left, right = (run.metrics.drop("wall_s").sort("node", "round") for run in (first, second))
    assert left.equals(right)


def test_run_resumed_twice_equals_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted = gossamer.run(small(), tmp_path / "whole")
    stopped = gossamer.run(small(), tmp_path, observer=Stopper(6))
    resumed = gossamer.resume(stopped.path, observer=Stopper(6))
    assert (stopped.status, resumed.status, resumed.path) == ("stopped", "stopped", stopped.path)
    assert resumed.parameters is not None
    done = gossamer.resume(stopped.path)
    assert_same(done, uninterrupted)
    events = done.events.filter(pl.col("event") == "resumed")
    assert events.height == 2
    assert events["detail"].str.contains(r"^from checkpoint \d+, rounds? \d").all()
    walls = done.metrics.filter(pl.col("node") == 0).sort("round")["wall_s"]
    assert walls.is_sorted()
    assert done.wall_s is not None
    assert done.wall_s >= walls[-1]


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_finished_run_resumes_with_later_end(tmp_path: Path, engine: str) -> None:
    changes = {"engine": {"name": engine, "trainer": "sequential"}}
    done = gossamer.run(small(**changes, stop={"rounds": 5}, evaluation={"every_rounds": 5}), tmp_path)
    with pytest.raises(BadInput, match=r"the run is done; accepted: another end, e.g. --set stop.rounds="):
        gossamer.resume(done.path)
    with pytest.raises(BadInput, match=r"stop.rounds: got 3; accepted: at least 5, that of the checkpoint"):
        gossamer.resume(done.path, ["stop.rounds=3"])
    assert load_run(done.path).status == "done"
    assert load_run(done.path).experiment["stop"]["rounds"] == 5
    longer = gossamer.resume(done.path, ["stop.rounds=10"])
    assert longer.experiment["stop"]["rounds"] == 10
    uninterrupted = gossamer.run(small(evaluation={"every_rounds": 5}), tmp_path / "whole")
    assert longer.parameters is not None
    assert uninterrupted.parameters is not None
    assert torch.equal(longer.parameters, uninterrupted.parameters)
    columns = ["node", "round", "step", "train_loss", "test_loss", "consensus_distance"]
    assert longer.metrics.select(columns).equals(uninterrupted.metrics.select(columns))


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_shortened_run_resumes_from_its_new_end(tmp_path: Path, engine: str) -> None:
    """A run that is resumed from an older checkpoint forgets the newer ones, whose rows it no longer has."""
    described = {
        "algorithm": "gossip-learning",
        "checkpoint": {"every_rounds": 3},
        "evaluation": {"every_rounds": 1},
    }
    changes = {**described, "engine": {"name": engine, "trainer": "sequential"}}
    path = gossamer.run(small(**changes, stop={"rounds": 8}), tmp_path).path
    for rounds in (7, 10):
        run = gossamer.resume(path, [f"stop.rounds={rounds}"])
        rows = run.metrics.filter(pl.col("node") >= 0)
        assert rows["round"].unique().sort().to_list() == list(range(rounds + 1))
        assert rows.height == run.experiment["nodes"] * (rounds + 1)


def test_run_ended_by_time_resumes_to_later_time(tmp_path: Path) -> None:
    evaluation = {"every_rounds": None, "every_s": 0.02}
    compute = {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.7}
    described = {"evaluation": evaluation, "compute": compute, "checkpoint": {"every_s": 0.03}}
    uninterrupted = gossamer.run(small(**described, stop={"time_s": 0.2}), tmp_path / "whole")
    early = gossamer.run(small(**described, stop={"time_s": 0.11}), tmp_path)
    late = gossamer.resume(early.path, ["stop.time_s=0.2"])
    nodes = pl.col("node") >= 0
    left, right = (
        run.metrics.filter(nodes).drop("wall_s", "consensus_distance").sort("node", "time_s")
        for run in (late, uninterrupted)
    )
    assert left.equals(right)
    # The network has no row for times at which some nodes were saved ahead of others.
    kept = late.metrics.filter(~nodes).drop("wall_s")
    assert kept.join(
        uninterrupted.metrics.filter(~nodes).drop("wall_s"), on=kept.columns, how="anti", nulls_equal=True
    ).is_empty()
    assert kept["time_s"].max() == 0.2


def test_failed_run_resumes_from_last_checkpoint(tmp_path: Path) -> None:
    broken = [True]

    async def script(node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            if r == 7 and node.rank == 1 and broken[0]:
                raise ValueError("out of luck")
            node.broadcast(node.peers(), node.parameters, tag=r)
            await node.mix(await node.gather(node.peers(), tag=r), node.mixing_weights(r))

    changes = {"checkpoint": {"every_rounds": 2}, "stop": {"rounds": 9}, "evaluation": {"every_rounds": 1}}
    described = scripted(script, 3, **changes)
    with pytest.raises(RunFailed, match="out of luck") as failed:
        gossamer.run(described, tmp_path)
    assert failed.value.folder is not None
    broken[0] = False
    resumed = gossamer.resume(failed.value.folder)
    assert resumed.status == "done"
    assert resumed.error is None
    assert resumed.events["detail"].to_list() == ["from checkpoint 3, round 6"]
    assert_same(resumed, gossamer.run(described, tmp_path / "whole"))


# --- own code and data that have changed ---


def ratings(here: Path, stars: int) -> None:
    """Write ratings, and an own algorithm, which a new process would import."""
    data = here / "root" / "movielens" / "ml-latest-small"
    data.mkdir(parents=True, exist_ok=True)
    rows = [f"{user},{film},{stars},0" for user in (1, 2, 3, 4) for film in range(1, 9)]
    (data / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))


def algorithm(text: str) -> None:
    Path("mine.py").write_text(f"from gossamer.algorithms import DPSGD\nclass Mine(DPSGD):\n    pass\n{text}")
    sys.modules.pop("mine", None)


class Hearing(Stopper):
    """Keeps what is said."""

    def __init__(self, rows: int = 10**9) -> None:
        super().__init__(rows)
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def of_ratings(**changes: Any) -> Experiment:
    return small(task="movielens", data_root="root", algorithm="mine:Mine", **changes)


def test_edited_data_is_refused(here: Path) -> None:
    ratings(here, 3)
    algorithm("")
    stopped = gossamer.run(of_ratings(), here, observer=Stopper(6))
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}
    ratings(here, 4)
    with pytest.raises(
        BadInput,
        match="its data has changed: data_root/movielens/ml-latest-small/ratings.csv; accepted: the data with which it",
    ):
        gossamer.resume(stopped.path)
    assert {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()} == before
    ratings(here, 3)
    assert gossamer.resume(stopped.path).status == "done"


def test_data_is_compared_in_any_working_directory(here: Path) -> None:
    """By its absolute path. A file that only one of both has read is said."""
    (here / "own").mkdir()
    write = "import numpy as np, torch\nfrom gossamer.tasks import Task\ndef load():\n    x = torch.from_numpy(np.load({}))\n"
    write += "    return Task(lambda: torch.nn.Linear(3, 3), (x, x), (x, x), torch.nn.functional.mse_loss)\n"
    file = here / "own" / "x.npy"
    Path("own_data.py").write_text(write.format(repr(str(file))))
    np.save(file, np.ones((12, 3), np.float32))
    sys.path.insert(0, str(here))
    os.chdir(here / "own")
    stopped = gossamer.run(small(task="own_data:load"), here, observer=Stopper(6))
    os.chdir(here)
    np.save(file, np.zeros((12, 3), np.float32))
    with pytest.raises(BadInput, match="its data has changed: own/x.npy"):
        gossamer.resume(stopped.path)
    file.rename(moved := here / "y.npy")
    Path("own_data.py").write_text(write.format(repr(str(moved))))
    sys.modules.pop("own_data")
    gossamer.resume(stopped.path, observer=(observer := Hearing()))
    assert "read only before or only now, so not compared: y.npy and x.npy" in observer.texts


def test_mended_code_is_said_and_recorded(here: Path) -> None:
    ratings(here, 3)
    algorithm("")
    stopped = gossamer.run(of_ratings(), here, observer=Stopper(6))
    algorithm("# mended\n")
    observer = Hearing(6)
    stopped = gossamer.resume(stopped.path, observer=observer)
    said = "continues with other code than before: module mine"
    assert observer.texts.count(said) == 1
    done = gossamer.resume(stopped.path, observer=(unchanged := Hearing()))
    assert not any("other code" in text for text in unchanged.texts)
    details = done.events.filter(pl.col("event") == "resumed")["detail"].to_list()
    assert [said in detail for detail in details] == [True, False]
    first, *later = (
        environment["fingerprint"]["code"]["mine"]
        for environment in (done.environment, *done.environment["resumed"])
    )
    assert later == [hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()] * 2
    assert first != later[0]
    kept = {
        str(file.relative_to(done.path / "code")): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((done.path / "code").glob("**/*.py"))
    }
    assert kept == {"mine.py": first, "resumed-1/mine.py": later[0]}
    assert problems_of(done.path) == []
    (done.path / "code" / "mine.py").write_text("")
    assert any("mine.py" in problem for problem in problems_of(done.path))


def test_record_without_a_fingerprint_is_resumed_with_a_line(tmp_path: Path) -> None:
    stopped = gossamer.run(small(), tmp_path, observer=Stopper(6))
    recorded = dict(stopped.environment)
    version, recorded["packages"]["torch"] = recorded["packages"]["torch"], "1.0"
    write_json(stopped.path / "environment.json", recorded)
    stopped = gossamer.resume(stopped.path, observer=(observer := Hearing(6)))
    assert f"continues with other versions than before: torch 1.0 (now {version})" in observer.texts
    recorded = dict(load_run(stopped.path).environment)
    for environment in (recorded, *recorded["resumed"]):
        del environment["fingerprint"]
        environment["packages"]["torch"] = "1.0"
    write_json(stopped.path / "environment.json", recorded)
    gossamer.resume(stopped.path, observer=(observer := Hearing()))
    assert (
        "the record has no fingerprint, so it is not known whether own code or data has changed since"
        in observer.texts
    )
    assert f"continues with other versions than before: torch 1.0 (now {version})" in observer.texts


# --- refused ---


def test_resume_without_checkpoint_is_refused(tmp_path: Path) -> None:
    run = gossamer.run(small(checkpoint={}), tmp_path, observer=Stopper(6))
    assert not (run.path / "checkpoints").exists()
    with pytest.raises(
        BadInput, match="it has no checkpoint; accepted: a run with checkpoint.every_rounds or"
    ):
        gossamer.resume(run.path)
    with pytest.raises(BadInput, match="it has no checkpoint"):
        gossamer.resume(gossamer.run(small(checkpoint={}), tmp_path).path)
    with pytest.raises(BadInput, match="not a run folder"):
        gossamer.resume(tmp_path)


def test_an_edited_experiment_is_refused(tmp_path: Path) -> None:
    run = gossamer.run(small(), tmp_path, observer=Stopper(6))
    file = run.path / "experiment.yaml"
    text = file.read_text()
    file.write_text(text.replace("lr: 0.05", "lr: 0.5"))
    with pytest.raises(BadInput, match=r"optimizer.lr: 0.5, but 0.05 when the checkpoint .* was made"):
        gossamer.resume(run.path)
    file.write_text(text)
    with pytest.raises(BadInput, match=r"--set optimizer.lr=1: accepted: stop and checkpoint"):
        gossamer.resume(run.path, ["optimizer.lr=1"])
    assert load_run(run.path).status == "stopped"


def test_damaged_checkpoints_leave_run_unchanged(tmp_path: Path) -> None:
    run = gossamer.run(small(), tmp_path, observer=Stopper(9))
    for path in run.path.glob("checkpoints/*/node-2.safetensors"):
        path.write_bytes(b"torn")
    rows = run.metrics
    with pytest.raises(BadInput, match=r"node-2.safetensors: .*header.*; accepted"):
        gossamer.resume(run.path)
    assert load_run(run.path).status == "stopped"
    assert load_run(run.path).metrics.equals(rows)


def test_running_run_is_not_resumed(tmp_path: Path) -> None:
    run = gossamer.run(small(), tmp_path, observer=Stopper(6))
    with locked(run.path), pytest.raises(BadInput, match="the run is ongoing; accepted"):
        gossamer.resume(run.path)
    assert gossamer.resume(run.path).status == "done"


def test_unfinished_run_of_same_experiment_is_found(tmp_path: Path) -> None:
    assert unfinished(small(), tmp_path) is None
    first = gossamer.run(small(), tmp_path, observer=Stopper(6))
    second = gossamer.run(small(), tmp_path, observer=Stopper(6))
    gossamer.run(small(seed=2), tmp_path, observer=Stopper(6))
    gossamer.run(small(checkpoint={"every_rounds": 4}), tmp_path, observer=Stopper(6))
    gossamer.run(small(), tmp_path)
    assert unfinished(small(), tmp_path) == second.path
    gossamer.resume(second.path)
    assert unfinished(small(), tmp_path) == first.path
    gossamer.resume(first.path)
    assert unfinished(small(), tmp_path) is None


# --- the program ---


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
def test_killed_program_continues_when_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """kill -9 of the launcher after a checkpoint, then the same command line again, as a batch system would run it."""
    rounds = 200
    engines = {"name": engine, "trainer": "sequential"}
    described = {
        **SETTINGS,
        "engine": engines,
        "stop": {"rounds": rounds},
        "evaluation": {"every_rounds": 50},
    }
    described["checkpoint"] = {"every_rounds": 20}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(described))
    monkeypatch.chdir(tmp_path)
    command = ("run", "small.yaml", "--resume", "--quiet", "--no-report")
    started = FORKER.program(*command, output=tmp_path / "log")
    try:
        while not list(tmp_path.glob("runs/small/*/checkpoints/*/manifest.json")):
            assert started.poll() is None
            time.sleep(0.01)
    finally:
        started.end()
    [folder] = (tmp_path / "runs" / "small").iterdir()
    assert load_run(folder).status == "running or killed"
    assert FORKER.program(*command, output=tmp_path / "log").wait(100) == 0, (tmp_path / "log").read_text()
    [same] = (tmp_path / "runs" / "small").iterdir()
    resumed = load_run(same)
    assert resumed.status == "done"
    assert resumed.events["event"].to_list() == ["resumed"]
    uninterrupted = gossamer.run(
        Experiment.of({**described, "engine": SETTINGS["engine"], "checkpoint": {}}), tmp_path
    )
    assert resumed.parameters is not None
    assert uninterrupted.parameters is not None
    assert torch.equal(resumed.parameters, uninterrupted.parameters)
    columns = ["node", "round", "step", "train_loss", "test_loss", "consensus_distance"]
    assert resumed.metrics.select(columns).equals(uninterrupted.metrics.select(columns))


def test_resume_command_prints_where_it_continues(tmp_path: Path, cli: Cli) -> None:
    run = gossamer.run(small(), tmp_path, observer=Stopper(6))
    cut = newest(run.path / "checkpoints")
    assert cut is not None
    code, out, err = cli("resume", str(run.path), "--no-report")
    assert code == 0
    assert str(run.path) in out
    first, _, *lines = err.splitlines()
    evaluations = [line for line in lines if "wall time" in line]  # (a busy machine prints others too)
    begins = (
        f"continues from checkpoint {cut.number}, round 2, time {max(cut.times_s.values()):.4g} s, after "
    )
    assert first == f"{begins}{cut.wall_s:.1f} s of wall time"
    # The wall time includes the time before the stop.
    walls = load_run(run.path).metrics.filter(pl.col("node") == -1, pl.col("round") > 2)["wall_s"]
    assert [re.search(r"wall time (\S+ s)", line)[1] for line in evaluations] == [
        f"{wall:.1f} s" for wall in walls
    ]  # type: ignore[index]
    code, _, err = cli("resume", str(run.path))
    assert code == 2
    assert err.startswith(f"error: {run.path}: the run is done; accepted: another end, ")
    code, out, _ = cli("resume", str(run.path), "--set", "stop.rounds=12", "--no-report")
    assert code == 0
    assert load_run(run.path).metrics["round"].max() == 12


def test_resume_after_final_checkpoint_writes_models(tmp_path: Path) -> None:
    settings = {
        "nodes": 4,
        "task": "least-squares",
        "topology": "ring",
        "algorithm": "d-psgd",
        "checkpoint": {"every_rounds": 2},
        "stop": {"rounds": 5},
    }
    folder = Path(gossamer.run(gossamer.Experiment.of(settings), out=tmp_path).path)
    models = (folder / "models.safetensors").read_bytes()
    for name in ("models.safetensors", "status.json"):
        (folder / name).unlink()
    assert gossamer.resume(folder).status == "done"
    assert (folder / "models.safetensors").read_bytes() == models
