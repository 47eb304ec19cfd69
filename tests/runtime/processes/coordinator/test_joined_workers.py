"""Joined workers: lost ones, returns with a wrong message count, and files that cannot be written."""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gossamer.errors import RunFailed
from gossamer.results import folder as results_folder
from gossamer.runtime.processes.channel import Session, Violation
from gossamer.runtime.processes.coordinator import workers as module
from gossamer.runtime.processes.coordinator.coordinator import Coordinator
from gossamer.runtime.processes.coordinator.workers import JoinedWorkers, _Worker
from gossamer.runtime.processes.protocol import (
    Event,
    FromWorker,
    JoinRequest,
    NodeReport,
    Prepared,
    Preparing,
    Saved,
)


class Scene:
    """A worker that runs nodes 1 and 2, and the reports that reach the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[NodeReport] = []
        self.notices: list[str] = []
        self.ours, self.theirs = socket.socketpair()
        self.session = Session[FromWorker](
            FromWorker, selectors.DefaultSelector(), lambda message: None, lambda why: None
        )
        self.worker = _Worker("worker 1", 2, self.session)
        workers: Any = JoinedWorkers.__new__(JoinedWorkers)
        workers._workers, workers._at = {"a": self.worker}, {1: self.worker, 2: self.worker}
        workers._incarnations, workers._closing, workers._model_bytes = {}, False, 0
        workers._emit, workers._silent_s, workers._looked_at = self.heard.append, 10.0, 0.0
        workers._record = lambda kind, text: self.notices.append(f"{kind}: {text}")
        workers._known, workers._gone, workers._told, workers._refused = [self.worker], {}, [], {}
        workers._say = self.notices.append
        workers._replaceable, workers._began, workers._start_s, workers._changed_at = True, False, 20.0, 0.0
        workers._nodes, workers._min_workers = 4, 1
        workers._folder = SimpleNamespace(path=folder)
        workers._listener = SimpleNamespace(proof=lambda *parts: b"", drop_silent=lambda: None)
        self.workers: JoinedWorkers = workers


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for end in (scene.ours, scene.theirs):
        end.close()


@pytest.mark.parametrize(
    ("saved", "reported"),
    [
        (Saved(3, 5, 1.0), Saved(3, 5, 1.0, "the disk is full")),
        (Saved(None, 5, 1.0), Event("checkpoint", "its checkpoint could not be written: the disk is full")),
    ],
)
def test_failed_checkpoint_write_costs_only_the_checkpoint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, saved: Saved, reported: Saved | Event
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(results_folder, "sync", full)
    folder = "restart" if saved.number is None else "checkpoints/3"
    message = scene.workers.keep(NodeReport(1, 0, saved, {f"{folder}/node-1.safetensors": b"x"}))
    assert type(message) is type(reported)
    assert "No space left on device" in str(message)


def test_worker_lost_early_takes_only_its_joined_nodes(scene: Scene) -> None:
    deaths: list[int] = []
    coordinator: Any = Coordinator.__new__(Coordinator)
    coordinator._lifecycle = SimpleNamespace(
        nodes={1: SimpleNamespace(incarnation=0)},
        alive={1},
        take=lambda rank, message, now: deaths.append(rank) or [],
        check=lambda rank, message: None,
    )
    coordinator._checks = coordinator._checkpoints = SimpleNamespace(check=lambda rank, message: None)
    coordinator._workers = scene.workers
    coordinator._note = lambda rank, message: None
    coordinator._rows = SimpleNamespace(target_met=lambda: False)
    coordinator._reports, coordinator._most_bytes = SimpleNamespace(bytes_sent=0), math.inf
    scene.workers._emit = coordinator._take
    scene.workers._lose("a", "is lost: it was out of reach for 10 s")
    assert deaths == [1]  # node 2 has not joined yet, and will on another worker


def test_worker_that_returns_with_a_wrong_count_stays_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gossamer.runtime.processes.coordinator.workers.keep_alive", lambda end, silent_s: None
    )
    scene.worker.away = time.monotonic() - 60
    with pytest.raises(Violation, match="acknowledged 7 messages of 0"):
        scene.workers._admit(JoinRequest("v", "a", 2, 7, b"n", b"p"), "host", lambda: scene.ours)
    assert scene.ours.fileno() == -1
    scene.workers.look_after()
    assert [report.rank for report in scene.heard] == [1, 2]
    returns = JoinRequest("v", "a", 2, 7, b"n", b"p")
    assert (
        scene.workers._admit(returns, "host", lambda: scene.ours)
        == "it is lost: it was out of reach for 10 s"
    )


def test_silence_within_the_limit_is_recorded_once_it_is_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the coordinator itself was stopped, nor for a worker that loads its data."""
    clock, session = [100.0], SimpleNamespace(heard=0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(scene.worker, "session", session)

    def passes(seconds: float, *, heard: bool) -> None:
        clock[0] += seconds
        session.heard += heard
        scene.workers.look_after()

    for ready in (False, True):
        scene.worker.ready = ready
        passes(0.5, heard=True)
        for _ in range(10):
            passes(0.5, heard=False)
        passes(0.5, heard=True)
    assert scene.notices == [
        "worker 1 has not been heard from for 3 s",
        "worker-silent: worker 1 was not heard from for 5 s",
    ]
    passes(60.0, heard=False)  # the coordinator was stopped
    passes(0.5, heard=True)
    assert len(scene.notices) == 2


def test_start_says_who_is_waited_for_and_ends_after_its_limit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that loads for too long is refused, and others may come. Without any, the run fails."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scene.worker.joined_at, reminder = 1.0, module.Reminder()
    scene.workers._take(scene.worker, Preparing("compiles kernels"))
    for at in (9.0, 10.5, 12.0, 21.5):
        clock[0] = at
        scene.workers._check_start(reminder)
        scene.workers.look_after()
    late = "was not ready within engine.start_timeout_s = 20 s after it had joined"
    assert scene.notices == [
        "worker 1 compiles kernels, which may take a minute",
        "waiting for worker 1, which compiles kernels (since 10 s) and further workers (since 10 s)",
        f"refused: worker 1 is refused: it {late}",
    ]
    scene.workers._take(scene.worker, Prepared())  # too late
    assert not scene.worker.ready
    sent: Any = scene.session._kept[-1]
    assert msgspec.msgpack.decode(sent[4:]) == ["Dismissed", f"it {late}"]
    clock[0] = 41.4
    scene.workers._check_start(reminder)
    assert scene.notices[-1] == "waiting for further workers (since 20 s)"
    assert scene.workers.where([2, 1]) == "nodes 1-2 at worker 1"
    clock[0] = 41.6
    with pytest.raises(RunFailed, match="no further worker has joined within engine.start_timeout_s = 20 s"):
        scene.workers._check_start(reminder)


def test_worker_that_comes_back_after_each_refusal_does_not_prolong_the_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service starts it again every five seconds."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    worker, reminder = scene.worker, module.Reminder()
    for again in range(4):
        clock[0] = 1.0 + 5.0 * again
        scene.workers._refuse(worker, "has other code: mine.py")
        scene.workers._check_start(reminder)
        worker = scene.workers._workers[str(again)] = _Worker(f"worker {again + 2}", 4, scene.session)
    scene.workers._refuse(worker, "has other code: mine.py")
    clock[0] = 21.5
    with pytest.raises(RunFailed, match="no further worker has joined .*; refused:  has other code: mine.py"):
        scene.workers._check_start(reminder)
