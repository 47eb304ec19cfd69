"""The executors of this machine: one run at a time in this process, or several in worker processes.

Any other ``concurrent.futures.Executor`` can take their place. A ``ProcessPoolExecutor`` would lose all its runs when one of
its processes is killed, and could not tell which run it was.

A worker process is given one JSON line per call, ``{"call": "module:function", "arguments": [...]}``, and answers with
``{"value": ...}`` or ``{"error": "..."}``. Nothing is unpickled.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

from gossamer.errors import GossamerError, cause

_KILL_S = 10.0
"""Seconds that an idle worker has to end after its channel is closed."""


class WorkerDied(GossamerError):
    """A run's process is gone; the message says how it ended."""


class Serial(Executor):
    """Does everything at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function; the future is already done."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future's reader raises it again
            future.set_exception(error)
        return future


class Processes(Executor):
    """Worker processes, each of which does one thing at a time and dies alone.

    They have their own sessions, so that Ctrl-C at the terminal reaches this process only. It takes functions of modules,
    with arguments and results that JSON can represent.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "sweep")
        self._own = threading.local()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call a function; the future raises :class:`WorkerDied` when its process is gone."""
        if kwargs:
            raise TypeError("arguments are given by position")
        return self._threads.submit(self._call, f"{fn.__module__}:{fn.__qualname__}", args)

    def stop(self) -> None:
        """Ask every run to end in order (SIGTERM); nothing new begins."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every worker at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.process.send_signal(number)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers after what was submitted."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        for worker in list(self._workers):
            worker.close()

    def _call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        # Every thread has its own worker.
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._lock:
                if self._stopped:
                    raise WorkerDied("the executor was stopped")
                worker = self._own.worker = _Worker()
                self._workers.add(worker)
        try:
            return worker.call(function, arguments)
        except WorkerDied:
            self._own.worker = None
            with self._lock:
                self._workers.discard(worker)
            raise


class _Worker:
    """This side of one worker process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from gossamer.sweep.executors import work; work()",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for results
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        with ours:
            self._calls = ours.makefile("w", encoding="utf-8")
            self._answers = ours.makefile("r", encoding="utf-8")

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._calls.write(json.dumps({"call": function, "arguments": arguments}) + "\n")
            self._calls.flush()
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise WorkerDied(f"its worker process ended early: {self._end()}")
        answer = json.loads(line)
        if "error" in answer:
            raise GossamerError(answer["error"])
        return answer["value"]

    def _end(self) -> str:
        self.close()
        code = self.process.returncode
        said = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{said}, as the system does when memory runs out" if code == -signal.SIGKILL else said

    def close(self) -> None:
        """Close the channel, which ends the process."""
        with suppress(OSError):  # the rest of its buffer has no reader
            self._calls.close()
        self._answers.close()
        try:
            self.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def work() -> None:
    """The worker process: answer calls until the process at the other end closes the channel, or is gone."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    told, answers = channel.makefile("r", encoding="utf-8"), channel.makefile("w", encoding="utf-8")
    calls: SimpleQueue[str | None] = SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(told, calls, busy), daemon=True).start()
    while (line := calls.get()) is not None:
        answer = _answer(json.loads(line))
        busy.clear()
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except OSError:  # the reader is gone
            break


def _listen(told: TextIO, calls: SimpleQueue[str | None], busy: threading.Event) -> None:
    for line in told:
        busy.set()
        calls.put(line)
    calls.put(None)
    if busy.is_set():
        # The sweep is gone: its run ends in order, as if it were stopped.
        os.kill(os.getpid(), signal.SIGTERM)


def _answer(said: dict[str, Any]) -> dict[str, Any]:
    module, _, name = said["call"].partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(*said["arguments"])}
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return {"error": cause(error)}
