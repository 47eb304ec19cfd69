"""Real processes that die, stop or cannot write, unplanned: survivors finish, and the cause is one line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

import gossamer
from forked import FORKER, Child
from gossamer import Experiment, Run, RunFailed, load_run

DEADLINE_S = 100.0


def described(nodes: int, rounds: int, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": nodes,
        "task": {"name": "least-squares", "features": 3, "samples": 4 * nodes},
        "topology": {"name": "random-regular", "degree": 3} if nodes > 4 else "complete",
        "algorithm": "d-psgd",
        "batch_size": "full",
        "compute": {"name": "constant", "seconds_per_step": 0.05},
        "gather": {"lost_peer": "skip"},
        "evaluation": {"every_rounds": 5},
        "stop": {"rounds": rounds},
        "engine": {"name": "processes", "trainer": "sequential", "pace": True},
    }
    return Experiment.of({**settings, **changes})


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {DEADLINE_S} s: {what}"
        time.sleep(0.02)
    return value


def node_processes(launcher: int, nodes: int) -> list[psutil.Process]:
    """The processes of the nodes in rank order, which is the order of their forks."""
    try:
        [server] = psutil.Process(launcher).children()
        children = sorted(server.children(), key=lambda process: process.pid)
    except (ValueError, psutil.NoSuchProcess):
        return []
    return children if len(children) == nodes else []


def rows_are_there(out: Path, nodes: int) -> bool:
    """Whether every node has recorded rows of two rounds."""
    text = b"".join(path.read_bytes() for path in out.glob("*/*/segments/metrics-*.jsonl"))
    return all(text.count(b'"node":%d,' % rank) >= 2 for rank in range(nodes))


def launch(experiment: Experiment, folder: Path) -> Child:
    """Start a run as a program, with its output in the file "output"."""
    path = folder / "experiment.yaml"
    path.write_text(experiment.to_yaml())
    return FORKER.program("run", str(path), "--out", str(folder / "runs"), output=folder / "output")


def ended(launcher: Child, folder: Path) -> str:
    """Wait until a program has ended. Returns its output."""
    launcher.wait(DEADLINE_S)
    return (folder / "output").read_text()


def with_victims(
    experiment: Experiment, tmp_path: Path, act: Callable[[list[psutil.Process]], None]
) -> tuple[Run, str]:
    """Run as a program, act on the processes of the nodes, and wait for its end; gives the run and its output."""
    launcher = launch(experiment, tmp_path)
    try:
        nodes = wait_until(lambda: node_processes(launcher.pid, experiment.nodes), "all nodes live")
        wait_until(lambda: rows_are_there(tmp_path / "runs", experiment.nodes), "rows are there")
        act(nodes)
        output = ended(launcher, tmp_path)
    finally:
        launcher.end()
    wait_until(lambda: not any(map(_runs, nodes)), "no process is left")
    return load_run(tmp_path / "runs"), output


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(victims: Sequence[int]) -> Callable[[list[psutil.Process]], None]:
    def act(nodes: list[psutil.Process]) -> None:
        for rank in victims:
            nodes[rank].kill()
            time.sleep(random.Random(rank).random() * 0.05)

    return act


def check_rows(run: Run, ranks: Sequence[int], rounds: int) -> None:
    for rank in ranks:
        recorded = run.metrics.filter(node=rank)["round"].to_list()
        assert recorded == list(range(0, rounds + 1, 5)), rank


def test_killed_node_is_named_and_others_finish(tmp_path: Path) -> None:
    run, _ = with_victims(described(4, 40), tmp_path, kill([2]))
    assert run.status == "done"
    check_rows(run, [0, 1, 3], 40)
    assert run.lost == [2]
    assert "killed by SIGKILL" in run.events.filter(event="lost")["detail"].item()


def test_killed_node_is_restarted_on_request(tmp_path: Path) -> None:
    engine = {"name": "processes", "trainer": "sequential", "pace": True, "restart": "always"}
    run, _ = with_victims(
        described(4, 60, engine=engine, checkpoint={"every_rounds": 2}), tmp_path, kill([2])
    )
    assert run.status == "done"
    check_rows(run, [0, 1, 3], 60)
    kinds = run.events.filter(node=2)["event"].to_list()
    assert kinds[:1] == ["lost"]
    assert "returned" in kinds
    assert run.metrics.filter(node=2)["round"].max() == 60


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("restart", ["never", "always"])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_others_finish_when_many_nodes_are_killed(tmp_path: Path, count: int, restart: str) -> None:
    victims = random.Random(count).sample(range(32), count)
    engine = {"name": "processes", "trainer": "sequential", "pace": True, "restart": restart}
    run, output = with_victims(
        described(32, 100, engine=engine, topology={"name": "random-regular", "degree": 5}),
        tmp_path,
        kill(victims),
    )
    assert run.status == "done", output
    check_rows(run, sorted(set(range(32)) - set(victims)), 100)
    assert run.lost == ([] if restart == "always" else sorted(victims))
    returned = set(run.events.filter(event="returned")["node"].to_list())
    assert returned == (set(victims) if restart == "always" else set())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_suspended_node_continues_when_resumed(tmp_path: Path) -> None:
    """For longer than its peers take to notice."""

    def act(nodes: list[psutil.Process]) -> None:
        nodes[1].suspend()
        time.sleep(20.0)
        nodes[1].resume()

    failures = {"heartbeat_s": 0.5, "detection_s": 2.0}
    run, output = with_victims(described(4, 600, failures=failures), tmp_path, act)
    assert run.status == "done", output
    check_rows(run, [0, 2, 3], 600)
    assert run.metrics.filter(node=1)["round"].max() == 600


def test_stopped_run_keeps_its_results(tmp_path: Path) -> None:
    experiment = described(4, 100_000)
    launcher = launch(experiment, tmp_path)
    try:
        wait_until(lambda: rows_are_there(tmp_path / "runs", 4), "rows are there")
        launcher.send_signal(signal.SIGTERM)
        output = ended(launcher, tmp_path)
    finally:
        launcher.end()
    run = load_run(tmp_path / "runs")
    assert run.status == "stopped", output
    assert run.parameters is not None
    assert bool(run.parameters.isfinite().all())
    assert (run.path / "metrics.parquet").exists()


@pytest.mark.slow
def test_concurrent_runs_do_not_interfere(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    launchers = [launch(described(4, 20), folder) for folder in folders]
    try:
        for launcher, folder in zip(launchers, folders, strict=True):
            output = ended(launcher, folder)
            assert launcher.returncode == 0, output
    finally:
        for launcher in launchers:
            launcher.end()
    for folder in folders:
        run = load_run(folder / "runs")
        assert run.status == "done"
        check_rows(run, range(4), 20)
        assert run.events.filter(event="refused").is_empty()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes: a read-only folder")
def test_read_only_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o500)
    launcher = launch(described(4, 5), tmp_path)
    output = ended(launcher, tmp_path)
    assert launcher.returncode != 0
    assert "ermission denied" in output
    assert "Traceback" not in output


def test_read_only_file_system_is_a_one_line_error(small_disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "--options", "remount,ro", str(small_disk)], check=True)
    (tmp_path / "runs").symlink_to(small_disk)
    launcher = launch(described(4, 5), tmp_path)
    output = ended(launcher, tmp_path)
    assert launcher.returncode == 2
    [line] = [line for line in output.splitlines() if "ead-only file system" in line]
    assert line.startswith("error: --out")
    assert "Traceback" not in output


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_full_disk_is_a_one_line_error(small_disk: Path, engine: str) -> None:
    experiment = described(4, 100_000, evaluation={"every_rounds": 1}, engine={"name": engine})
    with pytest.raises((RunFailed, OSError), match="No space left on device") as caught:
        gossamer.run(experiment, small_disk)
    assert len(str(caught.value).splitlines()) == 1
    recorded = load_run(small_disk).metrics.filter(pl.col("node") >= 0)
    for rank in range(4):  # up to the point where the disk was full
        rounds = recorded.filter(node=rank)["round"].to_list()
        assert rounds == list(range(len(rounds)))
        assert len(rounds) > 10
    assert recorded["test_loss"].null_count() == 0


def test_others_finish_without_a_node_suspended_for_good(tmp_path: Path) -> None:
    failures = {"heartbeat_s": 0.3, "detection_s": 1.5}
    run, output = with_victims(
        described(4, 60, failures=failures), tmp_path, lambda nodes: nodes[1].suspend()
    )
    assert run.status == "done", output
    assert run.lost == [1]
    assert run.events.filter(node=1)["event"].to_list() == ["lost"]
    assert "node 1: silent for 1.5 s" in run.events.filter(event="unreachable")["detail"][0]
    assert "node 1 did not end with the others, and was killed" in " ".join(output.split())
    check_rows(run, [0, 2, 3], 60)
    assert run.parameters is not None
    assert run.parameters.isfinite().all(dim=1).tolist() == [True, False, True, True]
