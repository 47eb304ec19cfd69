"""The executor of this machine: processes that each do one call at a time.

A ``ProcessPoolExecutor`` would lose all its runs when one of its processes is killed, and could not tell which run it was.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from gossamer.errors import GossamerError
from gossamer.runtime.processes.system import describe_exit

_KILL_S = 10.0
"""Seconds that an idle worker has to end after its channel is closed."""


class WorkerDied(GossamerError):
    """A worker's process ended during a call; the message says how."""


class Task(Future[Any]):
    """A call. Cancelling one that runs sends its worker SIGTERM, so that a run ends in order."""

    worker: subprocess.Popen[str] | None = None

    def cancel(self) -> bool:
        """Take the call back (True), or ask for its end (False)."""
        if super().cancel():
            return True
        if self.worker is not None and not self.done():
            self.worker.terminate()
        return False


class LocalPool(Executor):
    """Worker processes, which get and answer calls as lines of JSON. A worker that dies is replaced. What they print goes
    line by line to this process's standard error, so that a live display can make room for it.

    Workers have sessions of their own: Ctrl-C at the terminal reaches this process only. They end when it does.
    """

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Task, str] | None] = SimpleQueue()
        self._workers: dict[int, subprocess.Popen[str]] = {}
        printed, self._stderr = os.pipe()
        self._printer = threading.Thread(target=_print, args=(printed,), daemon=True)
        self._printer.start()
        self._threads = [threading.Thread(target=self._serve, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Task:
        """Have a worker call a function of a module; arguments and result are what JSON can represent.

        The future raises :class:`WorkerDied` if the call ends its process.
        """
        task = Task()
        said = [fn.__module__, fn.__qualname__, args, kwargs]
        self._calls.put((task, json.dumps(said) + "\n"))
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers after the calls that were submitted; at once with ``cancel_futures``."""
        if cancel_futures:
            with suppress(Empty):
                while call := self._calls.get_nowait():
                    call[0].cancel()
            for worker in list(self._workers.values()):
                worker.kill()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()
        if wait:
            os.close(self._stderr)
            self._printer.join(_KILL_S)  # a process that a run has left would keep it open

    def _serve(self, number: int) -> None:
        """The thread of one worker."""
        while call := self._calls.get():
            task, line = call
            if not task.set_running_or_notify_cancel():
                continue
            try:
                worker = self._workers.get(number) or self._workers.setdefault(number, _start(self._stderr))
            except OSError as error:  # such as no memory for another process
                task.set_exception(error)
                continue
            task.worker = worker
            answer = _ask(worker, line)
            if answer.endswith("\n"):
                task.set_result(json.loads(answer))
            else:
                task.set_exception(WorkerDied(f"its worker process ended early: {_end(worker)}"))
                del self._workers[number]
        if number in self._workers:
            _end(self._workers.pop(number))


def _print(printed: int) -> None:
    """Print what workers print, a line at a time, until all have closed it."""
    with open(printed, errors="replace") as lines:
        for line in lines:
            with suppress(OSError):  # a closed terminal
                sys.stderr.write(line)
                sys.stderr.flush()


def _start(stderr: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(each for each in sys.path if each)
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import work; work()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _ask(worker: subprocess.Popen[str], line: str) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(line)
        worker.stdin.flush()
    except OSError:
        return ""
    return worker.stdout.readline()


def _end(worker: subprocess.Popen[str]) -> str:
    """Close a worker's channel, which ends it; says how it ended."""
    try:
        worker.communicate(timeout=_KILL_S)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        worker.kill()
        worker.communicate()
    code = worker.returncode
    said = describe_exit(code)
    return f"{said}, as the system does when memory runs out" if code == -signal.SIGKILL else said


def work() -> None:
    """A worker process: answer calls until the process at the other end closes the channel, or is gone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a run prints is no answer
    calls: SimpleQueue[str | None] = SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(calls, busy), daemon=True).start()
    while line := calls.get():
        module, name, args, kwargs = json.loads(line)
        value = getattr(importlib.import_module(module), name)(*args, **kwargs)
        busy.clear()
        with suppress(BrokenPipeError):  # the reader is gone, and the channel closed
            print(json.dumps(value), file=answers, flush=True)


def _listen(calls: SimpleQueue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        busy.set()
        calls.put(line)
    calls.put(None)
    if (
        busy.is_set()
    ):  # the sweep is gone, and nobody reads what is printed: its run ends in order, as if it were stopped
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.kill(os.getpid(), signal.SIGTERM)
