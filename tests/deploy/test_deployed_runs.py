"""Nodes without a supervisor, from the command line: whole runs, and what becomes of them when nodes die, stop or differ."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import Fleet, nodes, prepare

import gossamer
from gossamer.deploy.collect import collect
from gossamer.deploy.node import token_of
from gossamer.node import checkpoint
from gossamer.results.report import write_report
from gossamer.runtime.processes.security.peers import Peer, Peers
from gossamer.runtime.processes.transport.transport import listen

PACED = {
    "compute": {"name": "constant", "seconds_per_step": 0.02},
    "engine": {"name": "processes", "pace": True},
}


def test_a_run_over_tls_ends_with_the_bits_of_the_engine_processes(made: Fleet, tmp_path: Path) -> None:
    experiment = prepare(tmp_path)
    nodes(made, range(4), "--keys", "keys")
    assert [made.wait(f"node-{rank}") for rank in range(4)] == [0] * 4, made.said("node-0")
    put_together = collect([tmp_path / "runs"], tmp_path / "whole")
    assert (put_together.missing, put_together.incomplete) == ([], {})
    whole, engine = put_together.run, gossamer.run(experiment, tmp_path / "engine")
    assert whole.parameters is not None
    assert engine.parameters is not None
    assert torch.equal(whole.parameters, engine.parameters)
    columns = ["round", "node", "step", "train_loss", "test_loss", "test_accuracy"]
    rows = [run.metrics.filter(run.metrics["node"] >= 0).select(columns) for run in (whole, engine)]
    assert rows[0].equals(rows[1])
    last = [
        run.metrics.filter(run.metrics["node"] == -1)["consensus_distance"][-1] for run in (whole, engine)
    ]
    assert last[0] == last[1]
    assert whole.status == "done"
    assert whole.events.is_empty()
    assert write_report([whole], tmp_path / "report.html").stat().st_size > 0


def test_survivors_of_kills_go_on_and_the_record_names_the_lost(made: Fleet, tmp_path: Path) -> None:
    prepare(tmp_path, nodes=5, topology="complete", gather={"lost_peer": "skip"}, stop={"rounds": 400})
    nodes(made, range(5), "--keys", "keys")
    made.until(lambda: all("round 2 " in made.said(f"node-{rank}") for rank in (1, 3)))
    for rank in (1, 3):
        made.signal(f"node-{rank}", signal.SIGKILL)
    assert [made.wait(f"node-{rank}") for rank in range(5)] == [0, -9, 0, -9, 0], made.said("node-0")
    put_together = collect([tmp_path / "runs"], tmp_path / "whole")
    run = put_together.run
    assert put_together.incomplete == dict.fromkeys((1, 3), "was killed, or still runs")
    assert run.outcome == "done, 2 nodes lost"
    lost = run.events.filter(run.events["event"] == "lost")
    assert sorted(lost["node"]) == [1, 3]  # once each, though three nodes have seen it
    assert lost["time_s"].min() > 0
    assert run.parameters is not None
    assert run.parameters.isnan().all(dim=1).tolist() == [False, True, False, True, False]
    killed = run.metrics.filter(run.metrics["node"] == 1)
    assert 2 in killed["round"].to_list()
    assert run.metrics.filter(run.metrics["node"] == 0)["round"].max() == 400
    assert "2 nodes lost" in write_report([run], tmp_path / "report.html").read_text()


def test_a_node_that_is_told_to_stop_leaves_a_whole_record(made: Fleet, tmp_path: Path) -> None:
    never = {"every_rounds": 10**6}
    prepare(tmp_path, nodes=3, gather={"lost_peer": "skip"}, stop={"rounds": 400}, checkpoint=never)
    nodes(made, range(3), "--keys", "keys")
    made.until(lambda: "round 2 " in made.said("node-1"))
    made.signal("node-1", signal.SIGTERM)
    assert [made.wait(f"node-{rank}") for rank in range(3)] == [0] * 3
    [file] = (tmp_path / "runs").rglob("restart/*")
    assert file.name == "node-1.safetensors"  # the others were not stopped
    assert 2 <= checkpoint.read(file).round < 400
    assert "stopped: runs/" in made.said("node-1")
    assert "node 1 has left" in made.said("node-0")
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    assert run.parameters is not None
    assert not run.parameters.isnan().any()
    assert (run.status, run.lost) == ("stopped", [])
    assert run.events["event"].to_list() == ["leave"]


def test_where_no_loss_is_borne_a_stop_is_one_for_all(made: Fleet, tmp_path: Path) -> None:
    prepare(tmp_path, nodes=3, stop={"rounds": 10**6})
    nodes(made, range(3), "--keys", "keys")
    made.until(lambda: "round 2 " in made.said("node-1"))
    made.signal("node-1", signal.SIGINT)
    assert [made.wait(f"node-{rank}") for rank in range(3)] == [0] * 3
    assert all("stopped: runs/" in made.said(f"node-{rank}") for rank in range(3))


@pytest.mark.parametrize(
    ("experiment", "more"),
    [("other.yaml", ()), ("experiment.yaml", ("--run", "2"))],
    ids=["experiment", "run"],
)
def test_nodes_of_different_runs_refuse_each_other(
    experiment: str, more: tuple[str, ...], made: Fleet, tmp_path: Path
) -> None:
    prepared = prepare(tmp_path, nodes=2, engine={"name": "processes", "start_timeout_s": 2.0})
    prepared.override(seed=4).save(tmp_path / "other.yaml")
    nodes(made, [0], "--keys", "keys", "--run", "1")
    nodes(made, [1], "--keys", "keys", *(more or ("--run", "1")), experiment=experiment)
    assert [made.wait(f"node-{rank}") for rank in range(2)] == [1, 1]
    for rank in range(2):
        said = made.said(f"node-{rank}")
        late = f"error: nodes [{1 - rank}] were not up within engine.start_timeout_s = 2.0 (node {1 - rank}: "
        assert "token of another run" in said.partition(late)[0], said
        assert late in said


def test_a_token_is_of_one_experiment_its_peers_and_the_run(tmp_path: Path) -> None:
    prepare(tmp_path, nodes=3)
    peers = Peers.load(tmp_path / "keys" / "peers.yaml")
    rows = peers.rows
    moved = Peer.of(0, "10.0.0.9:9000", rows[0].der)
    swapped = [Peer.of(rank, rows[rank].address, rows[(rank + 1) % 3].der) for rank in range(3)]
    others = [
        token_of(peers, b"another digest..", "1"),
        token_of(peers, b"the same digest.", "2"),
        token_of(peers, b"the same digest.", ""),
        token_of(Peers([moved, *rows[1:]]), b"the same digest.", "1"),
        token_of(Peers(rows[:2]), b"the same digest.", "1"),
        token_of(Peers(swapped), b"the same digest.", "1"),
    ]
    token = token_of(peers, b"the same digest.", "1")
    assert len({token, *others}) == 7
    assert len(token) == 16
    Peers(reversed(rows)).save(tmp_path / "again.yaml")
    assert token_of(Peers.load(tmp_path / "again.yaml"), b"the same digest.", "1") == token


def test_who_is_not_up_in_time_is_named(made: Fleet, tmp_path: Path) -> None:
    prepare(tmp_path, nodes=3, engine={"name": "processes", "start_timeout_s": 2.0})
    nodes(made, [0, 1], "--insecure")
    assert [made.wait(f"node-{rank}") for rank in range(2)] == [1, 1]
    lines = made.said("node-1").splitlines()
    late = "error: nodes [2] were not up within engine.start_timeout_s = 2.0 (node 2: "
    [error] = [at for at, line in enumerate(lines) if line.startswith(late)]
    assert any(re.match(r"waiting for nodes \[(0, )?2\] \(.*node 2: ", line) for line in lines[:error])


def test_a_port_that_is_taken_is_one_line(made: Fleet, tmp_path: Path) -> None:
    prepare(tmp_path)
    host, port = Peers.load(tmp_path / "keys" / "peers.yaml").addresses[0]
    with listen(host, port):
        nodes(made, [0], "--keys", "keys")
        assert made.wait("node-0") == 2
    [line] = made.said("node-0").splitlines()
    assert line.startswith(f"error: node 0: {host}:{port}: Address already in use; accepted: ")
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_the_end_of_one_node_whose_rows_stay(
    made: Fleet, tmp_path: Path, small_disk: Path
) -> None:
    rounds = 200
    prepare(
        tmp_path,
        gather={"lost_peer": "skip"},
        evaluation={"every_rounds": 1, "samples": 50},
        stop={"rounds": rounds},
        **PACED,
    )
    nodes(made, [1], "--keys", "keys", "--out", small_disk)
    nodes(made, [0, 2, 3], "--keys", "keys")
    made.until(lambda: any(path.stat().st_size for path in small_disk.glob("*/*/segments/metrics-*")))
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    assert made.wait("node-1") == 1
    assert re.search(r"error: node 1 failed in round \d+: RecordError: .*No space left", made.said("node-1"))
    assert [made.wait(f"node-{rank}") for rank in (0, 2, 3)] == [0] * 3, made.said("node-0")
    run = collect([tmp_path / "runs", small_disk], tmp_path / "whole").run
    assert (run.status, run.lost) == ("done", [1])
    for rank in (0, 2, 3):
        assert run.metrics.filter(node=rank)["round"].to_list() == list(range(rounds + 1))
    recorded = run.metrics.filter(node=1)
    assert recorded["round"].to_list() == list(range(len(recorded)))
    assert recorded["test_loss"].null_count() == 0
    assert 0 < len(recorded) < rounds


def test_time_ends_all_nodes_at_once(made: Fleet, tmp_path: Path) -> None:
    prepare(
        tmp_path,
        nodes=3,
        stop={"time_s": 1.0},
        evaluation={"every_rounds": None, "every_s": 0.5, "samples": 50},
    )
    nodes(made, range(3), "--insecure")
    assert [made.wait(f"node-{rank}") for rank in range(3)] == [0] * 3, made.said("node-0")
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    assert run.status == "done"
    ends = run.metrics.filter(run.metrics["moment"].str.contains("end"))
    assert sorted(ends["node"]) == [-1, 0, 1, 2]


def again(made: Fleet, name: str, rank: int, *more: str) -> None:
    """Start a node anew, as it was started before."""
    command = ("node", "experiment.yaml", "--rank", rank, "--peers", "keys/peers.yaml", "--keys", "keys")
    made.start(name, *command, *more)


WAIT = {"lost_peer": "wait", "timeout_s": 60.0}
"""The others wait where they are, however long it takes to start a node anew."""


@pytest.mark.parametrize(
    ("gather", "pace"),
    [(WAIT, {}), pytest.param({"lost_peer": "skip"}, PACED, marks=pytest.mark.slow)],
    ids=["wait", "skip"],
)
def test_a_killed_node_goes_on_from_its_checkpoint(
    gather: dict[str, Any], pace: dict[str, Any], made: Fleet, tmp_path: Path
) -> None:
    saved = {"every_rounds": 3}
    prepare(tmp_path, topology="complete", gather=gather, checkpoint=saved, stop={"rounds": 100}, **pace)
    nodes(made, range(4), "--keys", "keys", "--resume")
    made.until(lambda: "round 10 " in made.said("node-1"))
    made.signal("node-1", signal.SIGKILL)
    assert made.wait("node-1") == -9
    again(made, "again", 1, "--resume")
    assert [made.wait(name) for name in ("node-0", "again", "node-2", "node-3")] == [0] * 4, made.said(
        "again"
    )
    assert len(list((tmp_path / "runs" / "deployed").iterdir())) == 4  # it went on in its own folder
    put_together = collect([tmp_path / "runs"], tmp_path / "whole")
    assert (put_together.missing, put_together.incomplete) == ([], {})
    run = put_together.run
    assert run.outcome == "done"
    for rank in range(4):
        rows = run.metrics.filter(run.metrics["node"] == rank)
        rounds = rows["round"].to_list()
        assert rounds == sorted(set(rounds)), "no row is there twice"
        assert rounds[-1] == 100
        assert rows["time_s"].is_sorted()
        assert rows["bytes_sent"].is_sorted()
    own = run.events.filter(run.events["node"] == 1)
    said = " ".join(own["detail"])
    from_round = re.search(r"node 1 begins with its checkpoint of round (\d+)", said)
    joined = re.search(r"node 1 takes part from round (\d+) on", said)
    assert from_round is not None
    assert joined is not None
    assert int(from_round[1]) >= 9
    assert int(from_round[1]) % 3 == 0
    assert int(from_round[1]) <= int(joined[1]) <= (99 if gather is WAIT else 100)
    assert run.parameters is not None
    assert not run.parameters.isnan().any()


def test_a_node_without_a_checkpoint_begins_with_a_neighbours_model_and_round(
    made: Fleet, tmp_path: Path
) -> None:
    prepare(tmp_path, topology="complete", gather=WAIT, stop={"rounds": 60})
    nodes(made, range(4), "--keys", "keys")
    made.until(lambda: "round 10 " in made.said("node-1"))
    made.signal("node-1", signal.SIGKILL)
    made.until(lambda: "node 1 can't be reached" in made.said("node-0"))
    assert made.wait("node-1") == -9
    again(made, "again", 1)
    assert [made.wait(name) for name in ("node-0", "again", "node-2", "node-3")] == [0] * 4, made.said(
        "again"
    )
    assert "node 1 is back" in made.said("node-0")
    assert "node 1 begins with a neighbour's model" in made.said("again")
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    rows = run.metrics.filter(run.metrics["node"] == 1)
    rounds = rows["round"].to_list()
    assert rounds == sorted(set(rounds))
    assert rounds[:2] == [0, 2]
    assert rounds[-1] == 60
    assert rows["time_s"].is_sorted()
    assert run.outcome == "done"
    # It was about as good as the others from its first round on, not as at the start.
    first = rows.row(int(rows["time_s"].diff().arg_max()), named=True)  # type: ignore[arg-type]
    others = run.metrics.filter(run.metrics["node"] == 0, run.metrics["round"] == first["round"])
    assert first["test_loss"] == pytest.approx(others["test_loss"][0], rel=0.1)
    assert run.parameters is not None
    assert not run.parameters.isnan().any()


def test_where_all_were_killed_they_go_on_together(made: Fleet, tmp_path: Path) -> None:
    saved = {"every_rounds": 3}
    prepare(tmp_path, topology="complete", gather=WAIT, checkpoint=saved, stop={"rounds": 40}, **PACED)
    nodes(made, range(4), "--keys", "keys", "--resume")
    made.until(lambda: all("round 10 " in made.said(f"node-{rank}") for rank in range(4)))
    for rank in range(4):
        made.signal(f"node-{rank}", signal.SIGKILL)
    assert [made.wait(f"node-{rank}") for rank in range(4)] == [-9] * 4
    for rank in range(4):
        again(made, f"again-{rank}", rank, "--resume")
    assert [made.wait(f"again-{rank}") for rank in range(4)] == [0] * 4, made.said("again-0")
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    assert run.outcome == "done"
    for rank in range(4):
        rows = run.metrics.filter(run.metrics["node"] == rank)
        assert rows["round"].to_list() == [*range(0, 42, 2)]
        assert rows["time_s"].is_sorted()


@pytest.mark.slow
def test_a_node_that_stood_still_finds_the_others_again(made: Fleet, tmp_path: Path) -> None:
    """Messages were lost in both directions, and nobody has a timeout."""
    prepare(tmp_path, topology="complete", gather={"lost_peer": "skip"}, stop={"rounds": 200}, **PACED)
    nodes(made, range(4), "--keys", "keys")
    made.until(lambda: "round 10 " in made.said("node-1"))
    made.signal("node-1", signal.SIGSTOP)
    made.until(lambda: all("node 1" in made.said(f"node-{rank}") for rank in (0, 2, 3)))
    made.signal("node-1", signal.SIGCONT)
    assert [made.wait(f"node-{rank}") for rank in range(4)] == [0] * 4, made.said("node-1")
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    assert run.outcome == "done"
    for rank in range(4):
        rounds = run.metrics.filter(run.metrics["node"] == rank)["round"].to_list()
        assert rounds == list(range(0, 202, 2))


@pytest.mark.slow
def test_a_node_that_nobody_waits_for_runs_the_rounds_since_its_checkpoint_again(
    made: Fleet, tmp_path: Path
) -> None:
    prepare(
        tmp_path,
        **PACED,
        topology="complete",
        algorithm="gossip-learning",
        gather={"lost_peer": "skip"},
        checkpoint={"every_rounds": 20},
        stop={"rounds": 300},
    )
    nodes(made, range(4), "--keys", "keys", "--resume")
    made.until(lambda: "round 30 " in made.said("node-1"))
    made.signal("node-1", signal.SIGKILL)
    assert made.wait("node-1") == -9
    again(made, "again", 1, "--resume")
    assert [made.wait(name) for name in ("node-0", "again", "node-2", "node-3")] == [0] * 4, made.said(
        "again"
    )
    assert re.search(r"node 1 begins with its checkpoint of round [2468]0\n", made.said("again"))
    run = collect([tmp_path / "runs"], tmp_path / "whole").run
    rows = run.metrics.filter(run.metrics["node"] == 1)
    assert rows["round"].to_list() == list(range(0, 302, 2))
    assert rows["time_s"].is_sorted()
