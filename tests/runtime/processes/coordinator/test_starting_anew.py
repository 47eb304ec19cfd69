"""A node that can't be started anew: tried again for a while, and then what was in the way is said."""

from __future__ import annotations

import errno
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from gossamer import Experiment
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.coordinator import fault_runner
from gossamer.runtime.processes.coordinator.fault_runner import REBIND_S, FaultRunner
from gossamer.runtime.processes.coordinator.node_state import Child
from gossamer.runtime.processes.coordinator.process_pool import ProcessPool
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.system.shared_file import shared_file
from gossamer.runtime.processes.transport.transport import listen
from gossamer.runtime.setup import Setup, prepare


@pytest.fixture
def setup() -> Setup:
    settings = {
        "nodes": 2,
        "task": {"name": "least-squares", "samples": 16},
        "algorithm": "d-psgd",
        "topology": "complete",
        "gather": {"lost_peer": "skip"},
        "stop": {"rounds": 1},
        "engine": {"name": "processes", "restart": "always"},
    }
    return prepare(Experiment.of(settings))


@pytest.fixture
def process_pool(setup: Setup, tmp_path: Path) -> Iterator[ProcessPool]:
    memory = shared_file()
    folder = RunFolder.create(tmp_path, "run", experiment="", environment={})
    with selectors.DefaultSelector() as selector:
        yield ProcessPool(setup, folder, memory, Stage(setup), None, selector, lambda rank: ())
    os.close(memory)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (errno.EADDRINUSE, "its port {port}: {why}"),
        (errno.EAGAIN, "no process for it: {why}; see ulimit -u"),
        (errno.ENOMEM, "no process for it: {why}"),
    ],
)
def test_what_was_in_the_way_is_said_in_one_line(
    setup: Setup, process_pool: ProcessPool, monkeypatch: pytest.MonkeyPatch, failure: int, said: str
) -> None:
    why = os.strerror(failure)
    fork = mock.Mock(side_effect=OSError(failure, why))
    monkeypatch.setattr(os, "fork", fork)
    hands = mock.Mock(children={rank: Child(rank, -1, mock.Mock()) for rank in range(2)}, alive={0})
    hands.fork = process_pool.fork
    taken = listen()
    port = taken.getsockname()[1]
    process_pool._addresses = [("127.0.0.1", port if failure == errno.EADDRINUSE else 0)] * 2
    open_before = psutil.Process().num_fds()
    with mock.patch.object(fault_runner, "time") as time:
        time.monotonic.return_value = 100.0
        made = FaultRunner(setup, hands)
        made.begin(100.0)
        made.bring_back(1, "initial")
        made.look()
        assert made.expects()
        hands.say.assert_not_called()
        time.monotonic.return_value += REBIND_S + 0.1
        made.look()
    assert not made.expects()
    text = f"node 1 can't be started anew: {said.format(port=port, why=why)}"
    hands.say.assert_called_once_with(1, "not-restarted", text)
    assert fork.call_count == (0 if failure == errno.EADDRINUSE else 2)
    assert psutil.Process().num_fds() == open_before
    taken.close()
