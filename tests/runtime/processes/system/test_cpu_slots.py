"""CPU slots: limited, freed by death, and a stopped holder blocks no waiter while another slot is free."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gossamer.runtime.processes import system as cpu_slots
from gossamer.runtime.processes.system import CpuSlots, wakeup

Fork = Callable[[Callable[[], object]], int]


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile() as temporary:
        yield temporary.fileno()


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    ends = wakeup()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Run a function in a child process that is killed after the test."""
    children = []

    def forked(deed: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            try:
                deed()
            finally:
                os._exit(0)
        children.append(child)
        return child

    yield forked
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Telling(CpuSlots):
    """Reports when it waits."""

    tell = -1

    def _wait(self) -> None:
        os.write(self.tell, b"w")
        super()._wait()


def stop_inside(shared: CpuSlots) -> None:
    with shared.one():
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()


def until_stopped(child: int) -> None:
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)


def test_slots_are_limited_and_freed_by_death(file: int, ends: tuple[int, int], fork: Fork) -> None:
    """A child takes the only slot and is killed: only then is the slot free again."""
    inside, tell = os.pipe()
    os.ftruncate(file, 1)
    shared = Telling(file, ends)
    shared.tell = tell

    def stay() -> None:
        with shared.one():
            os.write(tell, b"!")
            signal.pause()

    child = fork(stay)
    assert os.read(inside, 1) == b"!"
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: _enter(shared))
        assert os.read(inside, 1) == b"w"
        assert not waiting.done()
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert waiting.result()
    os.close(inside)
    os.close(tell)


def _enter(shared: CpuSlots) -> bool:
    with shared.one():
        return True


def test_waiter_takes_a_freed_slot_despite_a_stopped_holder(
    file: int, monkeypatch: pytest.MonkeyPatch, fork: Fork
) -> None:
    """Both slots are taken when a process begins to wait; one holder is stopped for good, the other leaves."""
    monkeypatch.setattr(cpu_slots, "WAIT_S", 1000.0)  # so that only the leaving holder wakes the waiter
    ends, (waits, tell), (go, leave) = wakeup(), os.pipe(), os.pipe()
    os.ftruncate(file, 2)
    shared = Telling(file, ends)
    shared.tell = tell
    until_stopped(fork(lambda: stop_inside(shared)))

    def stay() -> None:
        with shared.one():
            os.write(tell, b"!")
            os.read(go, 1)

    fork(stay)
    assert os.read(waits, 1) == b"!"
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: _enter(shared))
        assert os.read(waits, 1) == b"w"
        os.write(leave, b"!")
        assert waiting.result()
    for descriptor in (*ends, waits, tell, go, leave):
        os.close(descriptor)


def test_waiter_takes_an_added_slot_despite_a_stopped_holder(
    file: int, monkeypatch: pytest.MonkeyPatch, fork: Fork
) -> None:
    monkeypatch.setattr(cpu_slots, "WAIT_S", 0.01)
    ends, (waits, tell) = wakeup(), os.pipe()
    os.ftruncate(file, 1)
    shared = Telling(file, ends)
    shared.tell = tell
    child = fork(lambda: stop_inside(shared))
    until_stopped(child)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: _enter(shared))
        assert os.read(waits, 1) == b"w"
        os.ftruncate(file, 2)
        assert waiting.result()
    for descriptor in (*ends, waits, tell):
        os.close(descriptor)
