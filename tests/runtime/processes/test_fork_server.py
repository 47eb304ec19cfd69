"""The fork server: it can be started first, and is never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from command_line import SMALL
from gossamer import Experiment, run
from gossamer.runtime.processes.fork_server import ForkServer

DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("fresh_interpreters")


def test_starting_a_fork_server_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gossamer.runtime.processes.fork_server import ForkServer;"
        " sys.exit(bool({'torch', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


@pytest.mark.usefixtures("no_process_is_left")
def test_unused_fork_server_ends_at_once() -> None:
    before = set(psutil.Process().children())
    with ForkServer() as server:
        [process] = set(psutil.Process().children()) - before
    assert not process.is_running()
    server.close()  # a second close, as after a run on it


@pytest.mark.usefixtures("no_process_is_left")
def test_fork_server_started_earlier_serves_a_run(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with ForkServer() as server:
        [early] = set(psutil.Process().children()) - before
        done = run(Experiment.parse(SMALL, engine="processes"), tmp_path, server=server)
        assert not early.is_running()
    assert done.status == "done"
    assert done.metrics.filter(node=0)["round"].to_list() == [0, 2, 4]


def test_fork_server_dies_with_its_parent() -> None:
    code = (
        "import time; from gossamer.runtime.processes.fork_server import ForkServer;"
        " server = ForkServer(); print(flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        [server] = psutil.Process(launcher.pid).children()
        launcher.send_signal(signal.SIGKILL)
    server.wait(DEADLINE_S)
