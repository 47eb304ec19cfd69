"""The executors of this machine, with functions that need no torch."""

from __future__ import annotations

import operator
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor

import psutil
import pytest

from gossamer.errors import GossamerError
from gossamer.sweep.executors import Processes, Serial, WorkerDied


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes(1) as executor:
        yield executor


def test_serial_is_done_when_it_returns() -> None:
    with Serial() as executor:
        assert isinstance(executor, Executor)
        assert executor.submit(pow, 2, 10).result(0) == 1024
        assert isinstance(executor.submit(operator.truediv, 1, 0).exception(0), ZeroDivisionError)


def test_a_worker_does_one_thing_after_another(processes: Processes) -> None:
    pids = [processes.submit(os.getpid) for _ in range(3)]
    assert len({pid.result(60) for pid in pids}) == 1
    assert pids[0].result() != os.getpid()
    assert processes.submit(operator.concat, [1, "zwölf"], [None]).result(60) == [1, "zwölf", None]


def test_an_exception_is_told_with_its_cause(processes: Processes) -> None:
    with pytest.raises(GossamerError, match=r"^ZeroDivisionError: division by zero"):
        processes.submit(operator.truediv, 1, 0).result(60)
    assert processes.submit(pow, 2, 3).result(60) == 8


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (signal.raise_signal, 9, "killed by SIGKILL, as the system does when memory runs out"),
        (signal.raise_signal, 6, "killed by SIGABRT"),
        (os._exit, 3, "exit code 3"),
    ],
)
def test_a_worker_that_dies_says_how_and_another_takes_its_place(
    processes: Processes, function: object, argument: int, said: str
) -> None:
    assert callable(function)
    first = processes.submit(os.getpid).result(60)
    with pytest.raises(WorkerDied, match=said):
        processes.submit(function, argument).result(60)
    second = processes.submit(os.getpid).result(60)
    assert second != first
    assert not psutil.pid_exists(first)


def test_no_worker_is_left() -> None:
    with Processes(2) as executor:
        pids = [executor.submit(os.getpid).result(60), executor.submit(os.getppid).result(60)]
        assert psutil.pid_exists(pids[0])
    assert pids[1] == os.getpid()
    assert not psutil.pid_exists(pids[0])


@pytest.mark.parametrize("how", [Processes.stop, Processes.kill])
def test_what_is_stopped_ends_and_nothing_new_begins(how: object) -> None:
    assert callable(how)
    with Processes(1) as executor:
        pid = executor.submit(os.getpid).result(60)
        endless = executor.submit(time.sleep, 1e6)
        how(executor)
        assert isinstance(endless.exception(60), WorkerDied)
        assert isinstance(executor.submit(os.getpid).exception(60), WorkerDied)
    assert not psutil.pid_exists(pid)


def test_a_worker_whose_sweep_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    code = "from gossamer.sweep.executors import work; work()"
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    with ours, ours.makefile("rw") as channel:
        channel.write('{"call": "os:getpid", "arguments": []}\n')
        channel.flush()
        assert channel.readline() == f'{{"value": {worker.pid}}}\n'
        channel.write('{"call": "time:sleep", "arguments": [1e6]}\n')
        channel.flush()
    assert worker.wait(60) == -signal.SIGTERM
