"""Records of nodes, as they are found on several machines, become one run."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
import torch
from fleet import SETTINGS

from gossamer import Experiment
from gossamer.cli import main
from gossamer.deploy import node as node_module
from gossamer.deploy.collect import collect
from gossamer.deploy.node import reopen, unfinished
from gossamer.deploy.record import NodeRecord
from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import compact
from gossamer.results.report import write_report
from gossamer.results.run import load_run

TEXT = Experiment.of({**SETTINGS, "nodes": 3}).to_yaml()
SETUP: dict[str, Any] = {
    "nodes": 3,
    "directed": False,
    "parameters": 2,
    "samples": [1, 1, 1],
    "labels": None,
    "classes": None,
    "outcome_ranks": [0, 1, 2],
    "graphs": {"0": [[0, 1], [1, 2], [0, 2]]},
}


def row(rank: int, round: int, time_s: float, loss: float = 1.0) -> dict[str, Any]:
    return {
        "node": rank,
        "round": round,
        "step": round,
        "time_s": time_s,
        "wall_s": time_s,
        "moment": "round",
        "train_loss": loss,
        "test_loss": loss,
        "bytes_sent": 10 * round,
    }


def record(
    place: Path,
    rank: int,
    rounds: int,
    *,
    first: int = 0,
    incarnation: int = 1,
    start: float | None = 100.0,
    digest: str = "ab",
    run: str = "",
    status: str | None = "done",
    model: float | None = None,
    events: tuple[dict[str, Any], ...] = (),
    loss: float = 1.0,
) -> Path:
    """What a node leaves: its rows, one a round and second; status and model if it got to its end."""
    folder = RunFolder.create(
        place, "run", experiment=TEXT, environment={"machine": {"host": str(rank)}}, of=f"node-{rank}"
    )
    node = NodeRecord(rank=rank, nodes=3, incarnation=incarnation, digest=digest, start_unix_s=start, run=run)
    node.write(folder)
    folder.write_setup(SETUP)
    with folder.segment("metrics", rank) as metrics:
        for round in range(first, rounds + 1):
            metrics.append(row(rank, round, float(round - first), loss))
    with folder.segment("events", rank) as segment:
        for event in events:
            segment.append(event)
    if status is not None:
        if model is not None:
            folder.write_models(torch.tensor([[model, -model]]))
        compact(folder)
        folder.write_status(status, wall_s=float(rounds), error="broke" if status == "failed" else None)  # type: ignore[arg-type]
    return folder.path


def lost(rank: int, time_s: float, by: int) -> dict[str, Any]:
    return {"time_s": time_s, "wall_s": time_s, "node": rank, "event": "lost", "detail": f"seen by {by}"}


def test_whole_records_become_a_whole_run(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path / f"machine-{rank}", rank, 4, model=float(rank))
    put_together = collect([tmp_path / f"machine-{rank}" for rank in range(3)], tmp_path / "out")
    run = put_together.run
    assert (put_together.missing, put_together.incomplete, run.outcome) == ([], {}, "done")
    assert len(run.metrics) == 3 * 5 + 1
    network = run.metrics.filter(run.metrics["node"] == -1)
    assert network["round"].to_list() == [4]
    assert network["consensus_distance"][0] == pytest.approx(math.sqrt(2 * 2 / 3))
    assert run.parameters is not None
    assert run.parameters.tolist() == [[0.0, 0.0], [1.0, -1.0], [2.0, -2.0]]
    assert run.environment["nodes"]["2"]["machine"] == {"host": "2"}
    assert write_report([run], tmp_path / "report.html").exists()


def test_a_killed_node_and_a_missing_one_are_named_and_have_no_model(tmp_path: Path) -> None:
    seen = (lost(1, 3.0, by=0), lost(1, 3.5, by=2))
    record(tmp_path / "a", 0, 4, model=1.0, events=seen)
    killed = record(tmp_path / "b", 1, 2, status=None)
    with next((killed / "segments").glob("metrics-*")).open("ab") as torn:
        torn.write(b'{"node": 1, "rou')
    put_together = collect([tmp_path / "a", killed], tmp_path / "out")
    run = put_together.run
    assert put_together.missing == [2]
    assert put_together.incomplete == {1: "was killed, or still runs"}
    assert run.lost == [1, 2]
    assert run.outcome == "done, 2 nodes lost"
    events = {event["node"]: event for event in run.events.to_dicts()}
    assert (events[1]["time_s"], events[1]["detail"]) == (3.0, "seen by 0")
    assert (events[2]["time_s"], events[2]["detail"]) == (None, "node 2 has left no record")
    assert len(run.events) == 2
    assert run.metrics.filter(run.metrics["node"] == 1)["round"].to_list() == [0, 1, 2]
    assert run.parameters is not None
    assert run.parameters.isnan().all(dim=1).tolist() == [False, True, True]
    assert write_report([run], tmp_path / "report.html").exists()


def test_of_two_records_of_a_rank_the_newer_one_wins(tmp_path: Path) -> None:
    record(tmp_path, 0, 4, model=1.0)
    record(tmp_path, 1, 5, status=None, incarnation=1, start=100.0, loss=1.0)
    record(tmp_path, 1, 6, first=3, incarnation=2, start=110.0, loss=2.0, model=7.0)
    record(tmp_path, 2, 4, model=1.0)
    run = collect([tmp_path], tmp_path / "out").run
    rows = run.metrics.filter(run.metrics["node"] == 1)
    assert rows["round"].to_list() == [0, 1, 2, 3, 4, 5, 6]
    assert rows["train_loss"].to_list() == [1.0] * 3 + [2.0] * 4
    assert rows["time_s"].to_list() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0]
    assert run.parameters is not None
    assert run.parameters[1].tolist() == [7.0, -7.0]


def test_who_was_out_of_reach_but_got_to_its_end_is_not_lost(tmp_path: Path) -> None:
    record(tmp_path, 0, 4, model=1.0, events=(lost(1, 3.0, by=0),))
    record(tmp_path, 1, 4, model=1.0)
    record(tmp_path, 2, 4, model=1.0)
    run = collect([tmp_path], tmp_path / "out").run
    assert (run.lost, run.events["event"].to_list()) == ([], ["unreachable"])


def test_a_failure_of_all_is_a_failed_run(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path, rank, 2, status="failed")
    run = collect([tmp_path], tmp_path / "out").run
    assert run.status == "failed"
    assert run.error == "node 0 failed: broke; node 1 failed: broke; node 2 failed: broke"
    assert run.parameters is None


def command(monkeypatch: pytest.MonkeyPatch, place: Path, *more: str) -> None:
    """What ``gossamer collect`` does with records; ends the process."""
    words = ["gossamer", "collect", str(place / "records"), "-o", str(place / "out"), *more]
    monkeypatch.setattr(sys, "argv", words)
    main()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.parquet", b"PAR1 and nothing that follows"),
        ("metrics.parquet", b""),
        ("events.parquet", b"\0" * 100),
        ("segments/metrics-1.jsonl", b"not a row\n{}\n"),
        ("segments/metrics-1.jsonl", b'{"round": 7}\n'),
        ("setup.json", b"[]"),
        ("status.json", b"{"),
        ("node.json", b"{}"),
        ("setup.json", b'{"parameters": "abc"}'),
        ("setup.json", b'{"graphs": 5}'),
        ("setup.json", b'{"outcome_ranks": 3}'),
        ("setup.json", b'{"outcome_ranks": [99]}'),
        ("setup.json", b'{"nodes": 5}'),
        ("status.json", b'{"status": 5}'),
        ("status.json", b'{"status": "done", "wall_s": "long"}'),
        ("environment.json", b"[]"),
        ("experiment.yaml", b""),
        ("experiment.yaml", b"\xff\xfe\0"),
        ("segments/graphs-1.jsonl", b'{"round": 1, "edges": [[0, 7]]}\n'),
        ("segments/graphs-1.jsonl", b'{"round": 1}\n'),
        ("segments/metrics-1.jsonl", b'{"node": 1, "round": "last"}\n'),
        ("segments/timeline-1.jsonl", b'{"node": 1, "kind": "train", "start_s": "a", "end_s": 1}\n'),
        ("segments/events-1.jsonl", b"\0\0\0\n"),
    ],
)
def test_a_damaged_file_is_named_and_kept_aside_and_the_rest_is_collected(
    name: str,
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in range(3):
        place = record(tmp_path / "records", rank, 4, model=float(rank))
        if rank == 0:  # the first record, whose experiment and setup are the run's
            damaged = place / name
            damaged.parent.mkdir(exist_ok=True)
            damaged.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, tmp_path)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f"left out: {damaged}: " in said
    run = load_run(tmp_path / "out")
    rounds = {rank: list(range(5)) for rank in range(3)}
    if name == "metrics.parquet" or name == "node.json":
        del rounds[0]
    found = {rank: run.metrics.filter(run.metrics["node"] == rank)["round"].to_list() for rank in rounds}
    assert found == rounds
    assert run.parameters is not None
    kept = 2 if name == "node.json" else 3
    assert int((~run.parameters.isnan().any(dim=1)).sum()) == kept
    aside = (
        tmp_path
        / "out"
        / "damaged"
        / damaged.relative_to(damaged.parents[0 if "/" not in name else 1].parent)
    )
    assert aside.read_bytes() == content
    if name != "node.json":
        assert [
            str(damaged) in text for text in run.events.filter(run.events["event"] == "damaged")["detail"]
        ] == [True]


@pytest.mark.parametrize(("more", "code"), [((), 1), (("--allow-missing",), 0)])
def test_missing_records_are_an_error_unless_they_are_allowed(
    more: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "records", 0, 4, model=1.0)
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, tmp_path, *more)
    assert (ended.value.code or 0) == code
    assert load_run(tmp_path / "out").lost == [1, 2]  # in any case it is collected


def test_a_damaged_model_keeps_no_other_results_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "records", 0, 4, model=1.0)
    torn = record(tmp_path / "records", 1, 4, model=2.0) / "models.safetensors"
    torn.write_bytes(torn.read_bytes()[:20])
    narrow = RunFolder.open(record(tmp_path / "records", 2, 4))
    narrow.write_models(torch.tensor([[3.0]]))
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, tmp_path)
    assert ended.value.code == 1
    run = load_run(tmp_path / "out")
    assert run.parameters is not None
    assert run.parameters.isnan().all(dim=1).tolist() == [False, True, True]
    assert sorted(run.metrics.filter(run.metrics["node"] >= 0)["node"].unique()) == [0, 1, 2]
    assert (run.outcome, run.events["event"].to_list()) == ("done", ["damaged", "damaged"])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in said] == [
        ["model of node 1 left out", str(torn)],
        ["model of node 2 left out", str(narrow.models)],
    ]
    assert said[1].endswith("parameters of shape (1, 1); accepted: (1, 2)")
    assert said == run.events["detail"].to_list()


def test_a_failure_leaves_no_half_made_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "records", 0, 4, model=1.0)
    with monkeypatch.context() as full:
        full.setattr(RunFolder, "write_status", mock.Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            collect([tmp_path / "records"], tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["records"]
    assert collect([tmp_path / "records"], tmp_path / "out").run.status == "done"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "records"]


def test_what_can_not_be_put_together_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a", 0, 1)
    record(tmp_path / "b", 1, 1, digest="cd")
    with pytest.raises(BadInput, match=r"records of 2 runs .*; accepted: those of one$"):
        collect([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        BadInput, match="empty: no record of a node in it; accepted: what gossamer node has written"
    ):
        collect([tmp_path / "empty"], tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(BadInput, match="taken: there already; accepted: a new folder"):
        collect([tmp_path / "a"], tmp_path / "taken")
    damaged = record(tmp_path / "c", 2, 1)
    (damaged / "node.json").write_text('{"rank": "2", "nodes": 3, "incarnation": 1, "digest": "ab"}')
    with pytest.raises(BadInput, match=r"node.json.rank: got '2'; accepted: a valid integer"):
        collect([damaged], tmp_path / "out")


def test_runs_of_one_experiment_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        record(tmp_path / "records", rank, 4, model=100.0 + rank, run="monday")
    for rank in range(2):  # of the third there is no record
        record(
            tmp_path / "records", rank, 4, model=200.0 + rank, run="tuesday", incarnation=50, start=90_000.0
        )
    with pytest.raises(BadInput) as refused:
        collect([tmp_path / "records"], tmp_path / "out")
    said = str(refused.value)
    assert said.startswith("records of 2 runs (")
    assert "is of run 'monday'" in said
    assert "is of run 'tuesday'" in said
    assert said.endswith("accepted: those of one, which --run ID picks")
    with pytest.raises(BadInput, match="--run: got 'sunday'; accepted: 'monday', 'tuesday'"):
        collect([tmp_path / "records"], tmp_path / "out", run="sunday")
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, tmp_path, "--run", "tuesday")
    assert ended.value.code == 1  # as a record is missing
    run = load_run(tmp_path / "out")
    assert run.lost == [2]
    assert run.parameters is not None
    assert run.parameters[:2, 0].tolist() == [200.0, 201.0]


def test_a_node_that_was_done_has_no_second_record_of_the_run(tmp_path: Path) -> None:
    older = record(tmp_path, 1, 4, model=1.0)
    record(tmp_path, 0, 4, model=1.0)
    newer = record(tmp_path, 1, 4, model=2.0, incarnation=2, start=105.0)
    with pytest.raises(BadInput) as refused:
        collect([tmp_path], tmp_path / "out")
    said = str(refused.value)
    assert said.startswith("records of several runs (")
    assert str(older) in said
    assert str(newer) in said
    assert said.endswith("accepted: folders with the records of one run")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("begun_s", "one"), [(105.0, True), (163.0, True), (165.0, False)])
def test_what_began_when_another_was_done_is_of_another_run(
    begun_s: float, one: bool, tmp_path: Path
) -> None:
    done = record(tmp_path, 0, 4, model=1.0)  # from 100 s to 104 s; clocks may be 60 s apart
    begun = record(tmp_path, 1, 4, model=1.0, start=begun_s)
    if one:
        assert collect([tmp_path], tmp_path / "out").missing == [2]
        return
    with pytest.raises(BadInput) as refused:
        collect([tmp_path], tmp_path / "out")
    assert str(done) in str(refused.value)
    assert str(begun) in str(refused.value)


def test_a_copy_of_a_record_is_not_another_run(tmp_path: Path) -> None:
    folders = [record(tmp_path / "records", rank, 4, model=float(rank)) for rank in range(3)]
    shutil.copytree(folders[1], tmp_path / "backup" / folders[1].name)
    found = collect([tmp_path / "records", tmp_path / "backup"], tmp_path / "out")
    assert found.whole
    assert len(found.run.metrics) == 3 * 5 + 1


def replaced(path: Path, how: str, tmp_path: Path) -> None:
    """Make a file one that is not there, leads nowhere, or is a folder."""
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("metrics.parquet", "folder"),
        ("metrics.parquet", "link"),
        ("models.safetensors", "folder"),
        ("models.safetensors", "link"),
        ("setup.json", "folder"),
        ("status.json", "link"),
        ("node.json", "folder"),
        ("experiment.yaml", "gone"),
        ("experiment.yaml", "folder"),
    ],
)
def test_what_can_not_even_be_copied_is_named(name: str, how: str, tmp_path: Path) -> None:
    folders = [record(tmp_path / "records", rank, 4, model=float(rank)) for rank in range(3)]
    replaced(folders[0] / name, how, tmp_path)
    found = collect([tmp_path / "records"], tmp_path / "out")
    assert list(found.files) == [folders[0] / name]
    assert not found.whole
    assert found.missing == ([0] if name == "node.json" else [])
    assert found.run.experiment["nodes"] == 3
    for rank in (1, 2):
        assert found.run.metrics.filter(node=rank)["round"].to_list() == list(range(5))
    assert write_report([found.run], tmp_path / "report.html").exists()


def test_an_experiment_that_no_record_has_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    folders = [record(tmp_path / "records", rank, 4) for rank in range(3)]
    for folder in folders:
        (folder / "experiment.yaml").write_bytes(b"")
    with pytest.raises(BadInput) as refused:
        collect([tmp_path / "records"], tmp_path / "out")
    assert [str(folder / "experiment.yaml") in str(refused.value) for folder in folders] == [True] * 3


WRONG_TABLES: dict[str, tuple[str, pl.DataFrame]] = {
    "a round of null": ("metrics", pl.DataFrame({"node": [0], "round": [None]})),
    "a round of text": ("metrics", pl.DataFrame({"node": [0], "round": ["1"]})),
    "a round of parts": ("metrics", pl.DataFrame({"node": [0], "round": [1.5]})),
    "a loss of text": ("metrics", pl.DataFrame({"node": [0], "round": [1], "test_loss": ["low"]})),
    "a list": ("metrics", pl.DataFrame({"node": [0], "round": [1], "more": [[1]]})),
    "no round": ("metrics", pl.DataFrame({"node": [0]})),
    "events that are numbers": ("events", pl.DataFrame({"event": [3], "node": ["x"], "time_s": ["y"]})),
    "a timeline without times": ("timeline", pl.DataFrame({"node": [0], "kind": ["train"]})),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_tables_that_do_not_hold_what_they_should_are_left_out(name: str, tmp_path: Path) -> None:
    kind, table = WRONG_TABLES[name]
    folders = [record(tmp_path / "records", rank, 4, model=float(rank)) for rank in range(3)]
    table.write_parquet(folders[0] / f"{kind}.parquet")
    found = collect([tmp_path / "records"], tmp_path / "out")
    assert list(found.files) == [folders[0] / f"{kind}.parquet"]
    assert found.run.metrics.filter(node=0).is_empty() == (kind == "metrics")
    assert len(found.run.metrics.filter(pl.col("node") > 0)) == 2 * 5
    assert write_report([found.run], tmp_path / "report.html").exists()


def test_tables_with_fewer_columns_count(tmp_path: Path) -> None:
    folders = [record(tmp_path / "records", rank, 4, model=float(rank)) for rank in range(3)]
    times = {"node": [1], "kind": ["train"], "start_s": [0.0], "end_s": [1.0]}
    pl.DataFrame(times).write_parquet(folders[1] / "timeline.parquet")
    pl.DataFrame({"event": ["fault"]}).write_parquet(folders[1] / "events.parquet")
    found = collect([tmp_path / "records"], tmp_path / "out")
    assert found.whole
    assert len(found.run.timeline) == 1
    assert found.run.events["event"].to_list() == ["fault"]


@pytest.mark.parametrize("compacted", [True, False])
def test_rows_of_other_nodes_do_not_count(compacted: bool, tmp_path: Path) -> None:
    for rank in range(3):
        folder = RunFolder.open(record(tmp_path / "records", rank, 4, model=float(rank)))
    # The last one's record (of rank 2) has rows of rank 1, which are newer than its own.
    with folder.segment("metrics", 2) as metrics:
        metrics.append(row(1, 4, 9.0, loss=-7.0))
        metrics.append(row(2, 5, 9.0, loss=3.0))
    with folder.segment("timeline", 2) as timeline:
        timeline.append({"node": 1, "kind": "train", "start_s": 0.0, "end_s": 1.0})
        timeline.append({"node": 2, "kind": "train", "start_s": 0.0, "end_s": 2.0})
    files = [folder.path / "segments" / f"{kind}-2.jsonl" for kind in ("metrics", "timeline")]
    if compacted:
        compact(folder)
        files = [folder.path / f"{kind}.parquet" for kind in ("metrics", "timeline")]
    found = collect([tmp_path / "records"], tmp_path / "out")
    assert found.files == dict.fromkeys(files, "1 rows of other nodes; accepted: those of node 2")
    metrics_of = {rank: found.run.metrics.filter(node=rank)["test_loss"].to_list() for rank in (1, 2)}
    assert metrics_of == {1: [1.0] * 5, 2: [1.0] * 5 + [3.0]}
    assert found.run.timeline.select("node", "end_s").rows() == [(2, 2.0)]


def test_a_node_goes_on_though_a_newer_record_can_not_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer, wrong = (record(tmp_path, 1, 4, status=None) for _ in range(3))
    for folder in (older, wrong):
        (folder / "restart").mkdir()
        (folder / "restart" / "node-1.safetensors").touch()
    (newer / "node.json").write_text("")
    (wrong / "status.json").write_text("{")
    found = unfinished(NodeRecord(rank=1, nodes=3, incarnation=9, digest="ab"), tmp_path / "run")
    assert found is not None
    assert found.path == older
    lines = [entry.getMessage() for entry in caplog.records]
    assert [str(folder) in line for folder, line in zip((wrong, newer), lines, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("down_since", "spent_s", "why"),
    [
        (None, 230.0, "the others may have lived: the clock went on"),
        (110.0, 10.0, "ten seconds are the run's, the rest the queue's, or taken to start"),
        (102.0, 4.0, "its last row is of second 4"),
        (90.0, 4.0, "by another machine's clock"),
        (250.0, 100.0, "by another machine's clock"),
    ],
)
def test_time_in_which_no_node_lived_is_none_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down_since: float | None, spent_s: float, why: str
) -> None:
    """Nor is the time until all nodes are up: they go on at the same second, whoever was first to read its record."""
    now = mock.Mock(return_value=200.0)
    monkeypatch.setattr("time.time", now)
    monkeypatch.setattr(node_module.checkpoint, "read", lambda path: None)
    folder = RunFolder(record(tmp_path, 1, 4, status="stopped"))
    own = NodeRecord(rank=1, nodes=3, incarnation=9, digest="ab")
    reopened, past = reopen(folder, own, down_since)
    assert reopened.start_unix_s == (100.0 if down_since is None else 200.0 - spent_s), why
    now.return_value = 330.0
    assert past.spent_s() == spent_s, why
    assert reopened.started(past.time_s).start_unix_s == 330.0 - spent_s
    assert past.traffic["bytes_sent"] == 40
