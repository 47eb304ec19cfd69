"""Runs on workers that join: the same as on one machine, even if workers are killed or cut off."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
import torch

import gossamer
from gossamer import BadInput, Experiment, Run, RunFailed
from gossamer.results.observer import Observer
from gossamer.runtime.processes import executors, protocol
from gossamer.runtime.processes.channel import Violation
from gossamer.runtime.processes.executors import executor_of, worker_main
from gossamer.runtime.processes.fork_server import Listen
from gossamer.runtime.processes.protocol import Fork
from gossamer.runtime.processes.worker import worker as worker_module
from gossamer.runtime.processes.worker.worker import (
    JoinedWorker,
    own_folder,
    remove_abandoned_folders,
    run_worker,
)
from rogue_member import Rogue
from worker_fleet import TOKEN, Fleet, free_port

SETTINGS: dict[str, Any] = {
    "name": "workers",
    "nodes": 4,
    "seed": 3,
    "task": {"name": "least-squares", "features": 5, "samples": 80, "test_samples": 20},
    "topology": "ring",
    "algorithm": {"name": "d-psgd", "local_steps": 1},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.8},
    "batch_size": 6,
    "evaluation": {"every_rounds": 2},
    "failures": {"detection_s": 3.0},
    "stop": {"rounds": 6},
    "engine": {"name": "processes", "trainer": "sequential"},
}
SLOW: dict[str, Any] = {
    "compute": {"name": "constant", "seconds_per_step": 0.05},
    "engine": {"name": "processes", "trainer": "sequential", "pace": True},
    "stop": {"rounds": 40},
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.of({**SETTINGS, **changes})


class At(Observer):
    """Acts once, at the first row of a round; keeps messages to the user."""

    def __init__(self, round: int = 10**9, act: Callable[[], object] = lambda: None) -> None:
        self._round, self._act = round, act
        self.texts: list[str] = []

    def row(self, row: Mapping[str, Any]) -> None:
        if row["round"] >= self._round:
            self._round = 10**9
            self._act()

    def say(self, text: str) -> None:
        self.texts.append(text)


def same(left: Run, right: Run) -> bool:
    assert left.parameters is not None
    assert right.parameters is not None
    return torch.equal(left.parameters, right.parameters)


def undisturbed(described: Experiment, folder: Path) -> Run:
    simulated = described.override(engine={"name": "simulate", "trainer": "sequential"})
    return gossamer.run(simulated, folder / "simulated")


def test_run_on_two_workers_matches_one_machine(fleet: Fleet, listen: Listen, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    described = experiment(
        topology={"name": "edge-list", "path": str(tmp_path / "edges.txt")},
        checkpoint={"every_rounds": 2},
        evaluation={"every_rounds": 2, "timeline": {"to_s": 60.0}},
    )
    pids = [fleet.start(listen.address, slots=3) for _ in range(2)]
    run = gossamer.run(described, tmp_path, listen=listen, observer=(observer := At()))
    assert [fleet.wait(pid) for pid in pids] == [0, 0], fleet.said()
    assert run.status == "done"
    assert same(run, undisturbed(described, tmp_path))
    alike = undisturbed(described, tmp_path).metrics
    # Message counts depend on chance until the last round: only those sent by its end are compared.
    rows, expected = (
        metrics.filter(pl.col("node") >= 0).sort("node", "round") for metrics in (run.metrics, alike)
    )
    columns = ["node", "round", "train_loss"]
    assert rows.select(columns).equals(expected.select(columns))
    sent = [table.filter(round=6)["bytes_sent"].to_list() for table in (rows, expected)]
    assert sent[0] == sent[1]
    assert len(list(run.path.glob("checkpoints/*/node-*.safetensors"))) >= 4
    assert set(gossamer.load_run(run.path).timeline["node"]) == {0, 1, 2, 3}
    assert any("has joined with 3 slots" in text for text in observer.texts)
    assert TOKEN not in fleet.said()


def test_awaited_workers_are_reported(fleet: Fleet, listen: Listen, tmp_path: Path) -> None:
    class Second(At):
        """Starts the second worker when the first one has joined."""

        def say(self, text: str) -> None:
            super().say(text)
            if "1 worker with 3 slots has joined; needed: 2 or more, for 4 nodes: 1 slot is missing." in text:
                fleet.start(listen.address, slots=1)

    fleet.start(listen.address, slots=3)
    run = gossamer.run(experiment(), tmp_path, listen=listen, observer=(observer := Second()))
    assert run.status == "done"
    assert any(text.endswith("has joined with 1 slot") for text in observer.texts)


@pytest.mark.timeout(300)  # three starts of two workers
@pytest.mark.usefixtures("fresh_interpreters")
def test_run_resumes_after_worker_and_coordinator_are_killed(
    fleet: Fleet, listen: Listen, tmp_path: Path
) -> None:
    described = experiment(**SLOW, checkpoint={"every_rounds": 1})
    first, second = (fleet.start(listen.address, slots=2) for _ in range(2))
    killer = At(10, lambda: fleet.kill(first))
    with pytest.raises(RunFailed, match=r"can't reach|worker \d .* is lost") as failed:
        gossamer.run(described, tmp_path, listen=listen, observer=killer)
    assert fleet.wait(first) == -signal.SIGKILL
    assert fleet.wait(second) == 0, fleet.said()
    folder = failed.value.folder
    assert folder is not None
    pids = [fleet.start(listen.address, slots=2) for _ in range(2)]
    coordinator = fleet.run(["resume", str(folder), "--listen", listen.address, "--token", TOKEN])
    while not any("round 20" in text for text in fleet.said().splitlines()):
        time.sleep(0.01)
    fleet.kill(coordinator)
    assert "continues from checkpoint" in fleet.said()
    assert [fleet.wait(pid) for pid in pids] == [1, 1]
    assert "the coordinator was out of reach for 3 s: this worker's nodes have ended" in fleet.said()
    for _ in range(2):
        fleet.start(listen.address, slots=2)
    run = gossamer.resume(folder, listen=listen)
    assert same(run, undisturbed(described, tmp_path))
    assert run.metrics.group_by("node", "round").len()["len"].max() == 1
    first, *_, last = (run.environment, *run.environment["resumed"])
    for environment in (first, last):
        assert sorted(rank for worker in environment["workers"] for rank in worker["ranks"]) == [0, 1, 2, 3]


def test_joining_worker_takes_over_nodes_of_a_killed_one(
    fleet: Fleet, listen: Listen, tmp_path: Path
) -> None:
    described = experiment(
        **{**SLOW, "engine": {**SLOW["engine"], "restart": "always"}, "stop": {"rounds": 30}},
        checkpoint={"every_rounds": 1},
        gather={"lost_peer": "wait", "timeout_s": 60.0},
    )
    first, second = (fleet.start(listen.address, slots=2) for _ in range(2))

    def replace() -> None:
        fleet.kill(first)
        fleet.start(listen.address, slots=2)

    run = gossamer.run(described, tmp_path, listen=listen, observer=At(10, replace))
    assert run.status == "done"
    assert fleet.wait(second) == 0
    events = run.events
    lost = set(events.filter(events["event"] == "lost")["node"])
    assert len(lost) == 2
    assert set(events.filter(events["event"] == "returned")["node"]) == lost
    *_, replacement = run.environment["workers"]
    assert set(replacement["ranks"]) == lost
    assert replacement["worker"] == "worker 3 (127.0.0.1)"
    began = events.filter(events["event"] == "begins")["detail"]
    assert all("its checkpoint of round" in text for text in began)
    last = run.metrics.filter(run.metrics["round"] == 30)
    assert set(last["node"]) >= {0, 1, 2, 3}


class Cable:
    """A link between a worker and the coordinator that can be cut for a while."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.connections = 0
        self._cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            if self._cut.is_set():
                near.close()
                far.close()
                continue
            self.connections += 1
            self._ends += [near, far]
            threading.Thread(target=self._pass, args=(near, far), daemon=True).start()

    @staticmethod
    def _pass(near: socket.socket, far: socket.socket) -> None:
        try:
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(1000)  # small pieces, to split messages anywhere
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
        except (OSError, ValueError):
            return
        finally:
            for end in (near, far):
                end.close()

    def cut(self, seconds: float) -> None:
        self._cut.set()
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        threading.Timer(seconds, self._cut.clear).start()

    def close(self) -> None:
        self._listener.close()


def test_unreachable_worker_keeps_its_rows_and_delivers_them(
    fleet: Fleet, listen: Listen, tmp_path: Path
) -> None:
    described = experiment(**SLOW, failures={"detection_s": 10.0}, checkpoint={"every_rounds": 5})
    cable = Cable(int(listen.address.rpartition(":")[2]))
    pids = [fleet.start(f"127.0.0.1:{cable.port}", slots=2) for _ in range(2)]
    observer = At(10, lambda: cable.cut(1.0))
    run = gossamer.run(described, tmp_path, listen=listen, observer=observer)
    cable.close()
    assert [fleet.wait(pid) for pid in pids] == [0, 0]
    assert cable.connections >= 4
    gone, back = (sum(words in text for text in observer.texts) for words in ("is out of reach", "is back"))
    assert gone >= back >= 2  # (a worker that leaves at the end may look out of reach)
    assert run.events.filter(event="worker-back").height == back
    assert same(run, undisturbed(described, tmp_path))
    rows = run.metrics.filter(run.metrics["node"] >= 0)
    assert rows.height == 4 * 21  # at rounds 0, 2, ..., 40, each once
    assert rows.group_by("node", "round").len()["len"].max() == 1
    assert run.events.filter(run.events["event"] == "lost").is_empty()


class Idle(Executor):
    """Starts nothing, and waits for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


def test_refused_worker_of_an_executor_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes its place."""
    monkeypatch.setattr(executors, "_END_S", 0.0)
    listen = Listen(f"127.0.0.1:{free_port()}", TOKEN, 1, "test_remote_workers:Idle")
    Rogue(listen.address, lambda rogue: rogue.say(protocol.Refused(["algorithm: no module"])), nodes=4)
    text = re.escape("worker 1 (127.0.0.1) can't run the experiment: algorithm: no module")
    with pytest.raises(RunFailed, match=f"^{text}$"):
        gossamer.run(experiment(), tmp_path, listen=listen)


def test_taken_address_and_simulation_are_bad_input(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"--listen {address}: .*in use"):
            gossamer.run(experiment(), tmp_path, listen=Listen(address, TOKEN))
    with pytest.raises(BadInput, match="--listen or --workers: with the engine simulate"):
        gossamer.run(experiment(engine="simulate"), tmp_path, listen=Listen("127.0.0.1:0", TOKEN))
    assert not list(tmp_path.iterdir())


def test_executor_starts_the_workers(tmp_path: Path) -> None:
    described = experiment()
    listen = Listen("127.0.0.1:0", TOKEN, 2, "concurrent.futures:ThreadPoolExecutor")
    run = gossamer.run(described, tmp_path, listen=listen)
    assert same(run, undisturbed(described, tmp_path))


def test_worker_gives_up_on_a_coordinator_that_sends_garbage(tmp_path: Path) -> None:
    """It does not connect again to receive the same."""
    worker = JoinedWorker("127.0.0.1:9", TOKEN, 1, tmp_path)
    ours, theirs = socket.socketpair()
    worker.attach(ours)
    with theirs:
        theirs.sendall(b"\x01\0\0\0\xc1")
        with pytest.raises(RunFailed, match="127.0.0.1:9 sent a message that can't be read"):
            worker.run()
    worker.close()


class NoWorkers(ThreadPoolExecutor):
    """Fails to start workers."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(lambda: 1 // 0)


def test_run_fails_if_its_executor_cannot_start_workers(tmp_path: Path) -> None:
    listen = Listen("127.0.0.1:0", TOKEN, 1, "test_remote_workers:NoWorkers")
    message = (
        r"^worker \d of test_remote_workers:NoWorkers ended before the run started: ZeroDivisionError.*$"
    )
    with pytest.raises(RunFailed, match=message):
        gossamer.run(experiment(), tmp_path, listen=listen)


@pytest.mark.slow
def test_executor_worker_does_not_wait_for_an_ended_run() -> None:
    start = time.monotonic()
    assert worker_main(f"127.0.0.1:{free_port()}", TOKEN, 1) == 1
    assert time.monotonic() - start < 45.0  # mostly imports


def test_coordinator_error_ends_executor_workers(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    listen = Listen("127.0.0.1:0", TOKEN, 1, "concurrent.futures:ThreadPoolExecutor")
    with pytest.raises(ZeroDivisionError):
        gossamer.run(
            experiment(**SLOW | {"stop": {"rounds": 10**6}}), tmp_path, observer=At(2, fail), listen=listen
        )


@pytest.mark.parametrize(("name", "message"), [("nothing:there", "No module"), ("math:pi", "not callable")])
def test_invalid_executor_is_bad_input(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"--workers {name}: .*{message}.*; accepted: ray, or module:factory"):
        executor_of(name)


@pytest.mark.slow
@pytest.mark.timeout(600)  # Ray's tasks have the lowest priority
def test_ray_starts_the_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    described = experiment()
    run = gossamer.run(described, tmp_path, listen=Listen("127.0.0.1:0", TOKEN, 2, "ray"))
    assert same(run, undisturbed(described, tmp_path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other options")
def test_worker_notices_a_silent_coordinator_after_detection_s(tmp_path: Path) -> None:
    worker = JoinedWorker("localhost:1", "token", 1, tmp_path)
    job = protocol.Job("", "", None, {}, None, 0, "", b"", [], reconnect_s=4.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(2)]
        welcome = protocol.Welcome(b"", 0, time.monotonic())
        silent = []
        with mock.patch.object(worker_module, "join", side_effect=[(end, welcome) for end in ends]):
            for end in ends:
                worker._join()
                silent.append(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
                worker._folder(job)
                silent.append(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        assert silent == [30_000, 4_000, 4_000, 4_000]
        assert ends[1].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        worker.close()


def test_folder_of_a_killed_worker_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / "gossamer-worker-of-another-version").mkdir()

    def locked() -> set[Path]:
        return {path.parent for path in temporary.glob("*/.lock")}

    def hold() -> int:
        """Start a process that owns a folder, as a worker does."""
        before, pid = locked(), os.fork()
        if pid == 0:
            with own_folder():
                time.sleep(60.0)
            os._exit(1)
        while locked() == before:
            time.sleep(0.01)
        return pid

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    killed = hold()
    [abandoned] = locked()
    running = hold()
    [used] = locked() - {abandoned}
    kill(killed)
    with pytest.raises(RunFailed, match="no coordinator at"):
        run_worker(f"127.0.0.1:{free_port()}", TOKEN, 1, wait_s=0.0)
    assert locked() == {used}
    kill(running)
    remove_abandoned_folders()
    assert list(temporary.iterdir()) == [temporary / "gossamer-worker-of-another-version"]


@pytest.mark.parametrize("path", ["../elsewhere", "files/../../elsewhere", "/elsewhere"])
def test_worker_writes_only_into_its_own_folder(tmp_path: Path, path: str) -> None:
    worker = JoinedWorker("localhost:1", "token", 1, tmp_path / "worker")
    try:
        worker._take(Fork(0, 0, [], files={"files/0-data": b"data"}))
        with pytest.raises(Violation, match="elsewhere"):
            worker._take(Fork(0, 0, [], files={path: b"data"}))
    finally:
        worker.close()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / "worker/files/0-data"]
