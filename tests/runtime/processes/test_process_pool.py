"""The process pool of a worker: processes that are stopped, that die, and that cannot be started."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from gossamer import Experiment
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.node_process.host import ComputeResources
from gossamer.runtime.processes.protocol import Command, Exited, NodeReport
from gossamer.runtime.processes.system import CpuSlots, wakeup
from gossamer.runtime.processes.worker.pool import ProcessPool
from gossamer.runtime.setup import prepare

DETECTION_S = 4.0


def experiment(lost_peer: str = "skip", algorithm: str = "d-psgd") -> Experiment:
    return Experiment.of(
        {
            "nodes": 2,
            "task": {"name": "least-squares", "samples": 16},
            "algorithm": algorithm,
            "topology": "complete",
            "gather": {"lost_peer": lost_peer, "timeout_s": 5.0},
            "failures": {"detection_s": DETECTION_S},
            "stop": {"rounds": 1},
            "engine": {"name": "processes", "train_at_once": 1},
        }
    )


class Pool:
    """A worker's pool with one process, adopted by the test, and the reports of the pool."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.events: list[NodeReport] = []
        setup = prepare(experiment())
        run_folder = RunFolder.create(folder, "run", experiment="", environment={})
        job = protocol.Job("", "", None, {}, None, 1, "", bytes(16), [], 1.0)
        self.pool = ProcessPool(
            setup, run_folder, ComputeResources(setup), job, self.selector, self.events.append, "127.0.0.1"
        )
        self.theirs: Channel[Any]

    def adopt(self, *, inside: bool, incarnation: int = 0) -> int:
        """Fork a process that stops itself, in a CPU slot or outside, and never ends."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                if inside:
                    with CpuSlots(self.pool._slots, wakeup()).one():
                        os.kill(os.getpid(), signal.SIGSTOP)
                        signal.pause()
                os.kill(os.getpid(), signal.SIGSTOP)
                signal.pause()
            finally:
                os._exit(0)
        self.theirs = Channel(theirs, protocol.ToNode)
        self.pool._adopt(0, incarnation, pid, ours)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        return pid

    def serve(self, timeout_s: float = 0.0) -> None:
        for key, events in self.selector.select(timeout_s):
            key.data(events)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path)
    yield pool
    pool.pool.close()
    pool.theirs.close()
    pool.selector.close()


@pytest.mark.parametrize("inside", [True, False])
def test_stopped_process_adds_a_cpu_slot(pool: Pool, inside: bool) -> None:
    pool.adopt(inside=inside)
    for _ in range(2):
        pool.pool.do(protocol.Signal(0, signal.SIGSTOP))
    assert os.fstat(pool.pool._slots).st_size == 2
    pool.pool.do(protocol.Signal(0, signal.SIGCONT))
    assert os.fstat(pool.pool._slots).st_size == 1


def test_dead_process_no_longer_counts_as_stopped(pool: Pool) -> None:
    pid = pool.adopt(inside=True)
    pool.pool.do(protocol.Signal(0, signal.SIGSTOP))
    os.kill(pid, signal.SIGKILL)
    pool.theirs.close()
    pool.serve(10.0)
    assert pool.events == [NodeReport(0, 0, Exited("killed by SIGKILL"))]
    assert not pool.pool._stopped


def test_node_that_sends_what_no_node_sends_is_killed(pool: Pool) -> None:
    """It would not end by itself: it is stopped."""
    pid = pool.adopt(inside=False)
    pool.theirs.send(protocol.Done(-1))
    pool.serve(10.0)
    [report] = pool.events
    assert report == NodeReport(
        0, 0, Exited("it sent a message that can't be read: Expected `int` >= 0 - at `$[1]`")
    )
    assert not psutil.pid_exists(pid)


def test_process_that_is_killed_to_start_another_one_ends_alone(pool: Pool) -> None:
    """The commands to kill it and to start the other one may arrive together."""
    first = pool.adopt(inside=True)
    pool.pool.do(protocol.Signal(0, signal.SIGSTOP))
    pool.pool.do(protocol.Signal(0, signal.SIGKILL))
    pool.theirs.close()
    second = pool.adopt(inside=False, incarnation=1)
    pool.serve(10.0)
    assert pool.events == [NodeReport(0, 0, Exited("killed by SIGKILL"))]
    assert not psutil.pid_exists(first)
    assert pool.pool._children[0].pid == second
    assert psutil.pid_exists(second)


def test_ends_of_two_processes_of_a_node_are_seen_in_any_order(pool: Pool) -> None:
    pids = []
    for incarnation in range(2):
        pids.append(pool.adopt(inside=False, incarnation=incarnation))
        pool.pool.do(protocol.Signal(0, signal.SIGKILL))
        pool.theirs.close()
        os.waitid(os.P_PID, pids[-1], os.WEXITED | os.WNOWAIT)
    for key, events in reversed(pool.selector.select(10.0)):
        key.data(events)
    assert sorted(report.incarnation for report in pool.events) == [0, 1]
    assert not any(map(psutil.pid_exists, pids))
    assert not pool.pool._children


def test_unread_messages_do_not_block_and_arrive_later(pool: Pool) -> None:
    pool.adopt(inside=False)
    channel = pool.pool._children[0].channel
    sent = 0
    while not channel.waiting:
        pool.pool.do(protocol.Tell(0, Command("settled", sent)))
        sent += 1
    for number in range(sent):
        assert pool.theirs.receive() == Command("settled", number)
        pool.serve()
    assert not channel.waiting


def test_node_that_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, why = Pool(tmp_path), os.strerror(errno.EAGAIN)
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=OSError(errno.EAGAIN, why)))
    open_before = psutil.Process().num_fds()
    pool.pool.do(protocol.Fork(1, 3, []))
    assert pool.events == [NodeReport(1, 3, Exited(f"it can't be started: {why}"))]
    assert psutil.Process().num_fds() <= open_before  # (garbage of other tests may be collected in between)
    pool.pool.close()
    pool.selector.close()
