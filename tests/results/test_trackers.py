"""Trackers: their events under both engines, isolation of their failures, and the supported services."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import polars as pl
import pytest
from pydantic import PrivateAttr

from gossamer import (
    Algorithm,
    BadInput,
    Experiment,
    RunFailed,
    Sweep,
    Tracker,
    load_runs,
    resume,
    run,
    run_sweep,
)
from gossamer.results.trackers import TensorBoard, WandB

heard: list[tuple[str, Any]] = []


class Fake(Tracker):
    """Appends its events to ``heard``."""

    label: str = "one"
    _begun: bool = PrivateAttr(False)

    def begin(self, experiment, folder):
        assert not self._begun  # every run has its own copy
        self._begun = True
        heard.append((f"{self.label} begin", folder))

    def row(self, row):
        heard.append((f"{self.label} row", dict(row)))

    def end(self, run):
        heard.append((f"{self.label} end", run.status))

    def failure(self, error):
        heard.append((f"{self.label} failure", str(error)))


class Broken(Fake):
    """Fails at its first row."""

    def row(self, row):
        raise OSError("no route to the server")


@pytest.fixture(autouse=True)
def _nothing_heard():
    heard.clear()


ENGINES = ({"name": "simulate", "trainer": "sequential"}, {"name": "processes", "trainer": "sequential"})


def experiment(*trackers, **changes) -> Experiment:
    defaults = {
        "nodes": 3,
        "task": {"name": "least-squares", "samples": 30},
        "algorithm": "d-psgd",
        "trackers": list(trackers),
        "evaluation": {"every_rounds": 1, "samples": 10},
        "stop": {"rounds": 2},
        "engine": ENGINES[0],
    }
    return Experiment.of({**defaults, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_trackers_receive_every_recorded_row(tmp_path, engine):
    described = experiment(f"{__name__}:Fake", {"name": f"{__name__}:Fake", "label": "two"}, engine=engine)
    for _ in range(2):
        heard.clear()
        done = run(described, tmp_path)
        for label in ("one", "two"):
            events = [
                (kind.removeprefix(f"{label} "), value) for kind, value in heard if kind.startswith(label)
            ]
            assert events[0] == ("begin", done.path)
            assert events[-1] == ("end", "done")
            rows = [value for kind, value in events if kind == "row"]
            assert len(rows) == len(events) - 2 == len(done.metrics)
            key = ["node", "round", "time_s"]
            received = pl.DataFrame(rows, infer_schema_length=None).sort(key)
            assert received["test_loss"].to_list() == done.metrics.sort(key)["test_loss"].to_list()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_broken_tracker_is_reported_once_and_dropped(tmp_path, engine, caplog):
    done = run(experiment(f"{__name__}:Broken", f"{__name__}:Fake", engine=engine), tmp_path)
    assert done.status == "done"
    warnings = [text for text in caplog.messages if "tracker" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"tracker '{__name__}:Broken' failed and is dropped: OSError: no route to the server (test_trackers.py"
    )
    ends = [(kind, value) for kind, value in heard if kind != "one row"]
    assert [kind for kind, _ in ends] == ["one begin", "one begin", "one failure", "one end"]
    assert ends[2][1] == "no route to the server"  # so that it can clean up
    assert [kind for kind, _ in heard].count("one end") == 1


class Failing(Algorithm):
    """Fails in its first round."""

    async def run(self, node):
        async for _ in node.rounds():
            raise ValueError("on purpose")


class Fails(Tracker):
    """Its package is missing."""

    def check(self):
        raise BadInput("trackers: no package")


def test_tracker_is_told_of_failure_and_resume(tmp_path):
    with pytest.raises(RunFailed):
        run(experiment(f"{__name__}:Fake", algorithm=f"{__name__}:Failing"), tmp_path)
    assert [kind for kind, _ in heard if kind != "one row"] == ["one begin", "one failure"]
    assert "on purpose" in heard[-1][1]
    heard.clear()
    done = run(experiment(f"{__name__}:Fake", checkpoint={"every_rounds": 1}), tmp_path)
    resume(done.path, ["stop.rounds=3"])
    assert [value for kind, value in heard if kind == "one begin"] == [done.path, done.path]
    assert {value["round"] for kind, value in heard[-5:] if kind == "one row"} == {3}


def test_unusable_tracker_is_refused_before_the_run(tmp_path):
    with pytest.raises(BadInput, match="trackers: no package"):
        run(experiment(f"{__name__}:Fails"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(BadInput, match=r"trackers.0: unknown name 'tensorbord' \(did you mean 'tensorboard'"):
        experiment("tensorbord")


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_package_is_named():
    with pytest.raises(
        BadInput, match=r"'wandb' needs the package 'wandb'; accepted: after pip install 'gossamer\[wandb\]'"
    ):
        WandB().check()


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_receives_means_of_every_evaluation(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoard().check()
    done = run(experiment("tensorboard"), tmp_path)
    events = EventAccumulator(str(done.path / "tensorboard"))
    events.Reload()
    expected = (
        done.metrics.filter(pl.col("node") >= 0)
        .group_by("round")
        .agg(pl.col("test_loss", "bytes_sent").mean())
        .sort("round")
    )
    for name in ("test_loss", "bytes_sent"):
        points = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(name)]
        assert points == [
            (step, pytest.approx(value)) for step, value in expected.select("round", name).iter_rows()
        ]
    assert "consensus_distance" in events.Tags()["tensors"]


def means(done, name):
    """The means of a column over the nodes, by round."""
    nodes = done.metrics.filter(pl.col("node") >= 0)
    return dict(nodes.group_by("round").agg(pl.col(name).mean()).sort("round").iter_rows())


def swept(tmp_path, *trackers):
    """The runs of a sweep of two cells with these trackers."""
    base = experiment(*trackers).model_dump(mode="json", exclude={"name", "seed"})
    sweep = Sweep.of(
        {"name": "rates", "base": base, "cells": {"slow": {"optimizer.lr": 0.01}, "fast": {}}}, out=tmp_path
    )
    with ThreadPoolExecutor(1) as thread:
        assert run_sweep(sweep, thread).counts.done == 2
    return load_runs(sweep.folder)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # warnings of MLflow itself
def test_mlflow_stores_sweep_as_experiment_with_means(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    runs = swept(tmp_path / "runs", {"name": "mlflow", "uri": uri})
    client = MlflowClient(tracking_uri=uri)
    project = client.get_experiment_by_name("rates")
    tracked_runs = {stored.info.run_name: stored for stored in client.search_runs([project.experiment_id])}
    assert tracked_runs.keys() == {done.id for done in runs}
    for done in runs:
        tracked = tracked_runs[done.id]
        assert tracked.info.status == "FINISHED"
        assert (tracked.data.tags["sweep"], tracked.data.tags["cell"]) == ("rates", done.cell)
        assert tracked.data.params["optimizer.lr"] == str(done.experiment["optimizer"]["lr"])
        history = client.get_metric_history(tracked.info.run_id, "test_loss")
        assert {point.step: point.value for point in history} == pytest.approx(means(done, "test_loss"))
    diverging = experiment({"name": "mlflow", "uri": uri}, optimizer={"name": "sgd", "lr": 1e30})
    done = run(diverging, tmp_path / "runs")
    assert done.status == "diverged"
    project = client.get_experiment_by_name(diverging.name)
    [stored] = client.search_runs([project.experiment_id])
    assert stored.info.status == "FAILED"


def leveldb_log(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, after the seven bytes of the header of Weights & Biases."""
    offset, block, record = 7, 32768, b""
    while offset + 7 <= len(log):
        if block - offset % block < 7:  # too short for a header
            offset += block - offset % block
            continue
        _, length, part = struct.unpack_from(
            "<IHB", log, offset
        )  # 1: whole; 2, 3, 4: first, middle and last part
        record += log[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):
            yield record
            record = b""


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("default")  # warnings of Weights & Biases itself
def test_wandb_stores_sweep_as_group_with_means(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    runs = swept(tmp_path, {"name": "wandb", "mode": "offline"}, f"{__name__}:Broken", "tensorboard")
    for done in runs:
        [file] = done.path.glob("wandb/offline-run-*/*.wandb")
        records = [Record.FromString(data) for data in leveldb_log(file.read_bytes())]
        [described] = [record.run for record in records if record.WhichOneof("record_type") == "run"][-1:]
        names = described.project, described.run_group, list(described.tags)
        assert names == ("rates", "rates", [done.cell])
        rows = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        assert {row["round"]: row["test_loss"] for row in rows} == pytest.approx(means(done, "test_loss"))
        assert (done.path / "tensorboard").is_dir()  # a broken tracker does not stop the others


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_stores_sweep_in_one_folder(tmp_path):
    runs = swept(tmp_path / "runs", {"name": "tensorboard", "folder": str(tmp_path / "board")})
    for done in runs:
        assert list((tmp_path / "board/rates" / done.path.parent.name / done.id).glob("events.*"))
