"""The executor for this machine: processes that each handle one call at a time.

A ``ProcessPoolExecutor`` would lose all its runs if one of its processes is killed, and could not tell which
run was the cause.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from gossamer.errors import GossamerError
from gossamer.runtime.processes.system import describe_exit, die_with
from gossamer.startup import begin, environment, program

_KILL_S = 10.0
"""Seconds that an idle worker has to end after its channel is closed."""


class WorkerDied(GossamerError):
    """A worker's process ended during a call. The message says how."""


class LocalPool(ThreadPoolExecutor):
    """Threads with one worker process each, which receives and answers calls as lines of JSON. A worker that
    dies is replaced. The workers' output is copied line by line to this process's standard error, where a
    live display makes room for it.

    Workers have their own sessions, so Ctrl-C at the terminal reaches only this process. They end when it
    ends.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._local = threading.local()
        self._workers: set[subprocess.Popen[str]] = set()
        printed, stderr = os.pipe()
        self._stderr = os.fdopen(stderr, "w")
        self._printer = threading.Thread(target=_print, args=(printed,), daemon=True)
        self._printer.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call a function of a module. Arguments and result must be representable in JSON.

        The future raises :class:`WorkerDied` if the worker's process ends during the call.
        """
        return super().submit(self._ask, json.dumps([fn.__module__, fn.__qualname__, args, kwargs]))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers after the submitted calls, or at once with ``cancel_futures``."""
        if cancel_futures:
            super().shutdown(wait=False, cancel_futures=True)
            for worker in list(self._workers):
                worker.kill()
        super().shutdown(wait)
        if wait:
            for worker in list(self._workers):
                _end(worker)
            self._stderr.close()
            self._printer.join(_KILL_S)  # a process left behind by a run would keep it open

    def _ask(self, call: str) -> Any:
        worker: subprocess.Popen[str] | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _start(self._stderr)
            self._workers.add(worker)
        assert worker.stdin is not None
        assert worker.stdout is not None
        with suppress(BrokenPipeError):  # the worker is dead, and will not answer
            print(call, file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
        if not answer.endswith("\n"):
            self._local.worker = None
            self._workers.discard(worker)
            raise WorkerDied(f"its worker process ended early: {_end(worker)}")
        return json.loads(answer)


def _print(printed: int) -> None:
    """Print the workers' output until all have closed it."""
    with open(printed, errors="replace") as lines:
        for line in lines:
            with suppress(OSError):  # a closed terminal
                print(line, end="", file=sys.stderr, flush=True)


def _start(stderr: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        program(f"from {__name__} import work; work({os.getpid()})"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        env=environment(),
    )


def _end(worker: subprocess.Popen[str]) -> str:
    """Close a worker's channel, which ends it. Returns a description of how it ended."""
    try:
        worker.communicate(timeout=_KILL_S)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        worker.kill()
        worker.communicate()
    code = worker.returncode
    text = describe_exit(code)
    return f"{text}, as the system does when memory runs out" if text.endswith("SIGKILL") else text


def work(parent: int) -> None:
    """The main function of a worker process: answer calls until the parent closes the channel or ends."""
    die_with(parent)
    begin()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a run's output must not be taken for an answer
    for line in sys.stdin:
        module, name, args, kwargs = json.loads(line)
        value = getattr(importlib.import_module(module), name)(*args, **kwargs)
        sys.stdout.flush()  # the system kills this process once the thread that started it has ended
        print(json.dumps(value), file=answers, flush=True)
