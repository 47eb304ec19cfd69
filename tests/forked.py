"""Processes of gossamer that start at once: forks of one process that has imported everything.

A fresh interpreter takes two seconds of a core for its imports, which is most of what a small run of real processes costs. What
is forked here has imported no test and no user's module, and gets the environment, the working directory and the import path
that a fresh one would have. Tests of the start itself use the fixture ``fresh_interpreters``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gossamer.runtime.processes.system import close_all_but

IMPORTED = ("ATEN_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "TORCH")
"""How variables begin that an interpreter or a library reads when it starts."""
LARGEST_ORDER = 1 << 18


# --- the process from which all are forked


def serve(descriptor: int) -> None:
    """Import everything, then fork a process for each order until whoever gives them is gone.

    An order is one message with its descriptors: where to report, stdout, stderr, and what the process is to inherit.
    """
    _die_with_parent()
    gc.disable()  # nothing that is imported is garbage
    import torch

    import gossamer.algorithms
    import gossamer.cli
    import gossamer.runtime.processes.launcher
    import gossamer.runtime.processes.worker.worker
    import gossamer.tasks  # noqa: F401

    gc.enable()
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # a run waits for the disk a dozen times
    torch.set_num_threads(1)  # as workers do first of all
    orders = socket.socket(fileno=descriptor)
    ended, wakeup = socket.socketpair()
    ended.setblocking(False)
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    reports: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is ended:
                ended.recv(4096)
                _reap(reports)
                continue
            text, descriptors, *_ = socket.recv_fds(orders, LARGEST_ORDER, 8)
            if not text:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for mine in (orders, ended, wakeup, selector, *reports.values()):
                    mine.close()
                os.close(descriptors[0])
                _become(json.loads(text), descriptors[1:])
            reports[pid] = socket.socket(fileno=descriptors[0])
            for theirs in descriptors[1:]:
                os.close(theirs)
            reports[pid].sendall(b"%d\n" % pid)


def _reap(reports: dict[int, socket.socket]) -> None:
    """Report the processes that have ended."""
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with reports.pop(pid) as report, suppress(OSError):  # perhaps nobody waits for it
            report.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(order: dict[str, Any], descriptors: list[int]) -> None:
    """In the child: be what was ordered, and leave without the parent's clean-up."""
    _die_with_parent()
    if order.get("space"):
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", order["space"]).open("rb") as space:
            assert libc.setns(space.fileno(), 0x40000000) == 0, "CLONE_NEWNET"
    output, errors, *inherited = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["serves"]:
        _serve(inherited, order["environment"], order["folder"])
    else:
        _settle(order["environment"], order["folder"])
        fork_servers()
        sys.argv = ["gossamer", *order["arguments"]]
        from gossamer.cli import main

        _leave_after(main)


def _serve(inherited: Sequence[int], environment: dict[str, str], folder: str) -> None:
    from gossamer.runtime.processes.worker.worker import serve as work

    os.setsid()
    _settle(environment, folder)
    [end] = inherited
    _leave_after(lambda: work(end))


def _settle(environment: dict[str, str], folder: str) -> None:
    """Where a fresh interpreter would begin."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = dict.fromkeys([folder, *environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path])


def _leave_after(run: Callable[[], object]) -> None:
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: nothing outlives the tests, however they end


def fork_servers() -> None:
    """Have runs of this process, which has imported everything and has one thread, fork their fork servers themselves."""

    def start(command: object, *, pass_fds: tuple[int], env: dict[str, str], **_: object) -> _OwnChild:
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            close_all_but(set(pass_fds))
            _serve(pass_fds, env, str(Path.cwd()))
        return _OwnChild(pid)

    use(start)


class _OwnChild:
    """As much of ``subprocess.Popen`` as a fork server needs, for a process that this one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            with os.fdopen(os.pidfd_open(self.pid), closefd=True) as ended:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


# --- the process that gives orders


class Child:
    """As much of ``subprocess.Popen`` as tests need, for a process that was forked by order."""

    def __init__(self, report: socket.socket) -> None:
        self._reports = report.makefile("rb")
        self._socket, self.returncode = report, None
        self.pid = int(self._reports.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; gives its exit code."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self.returncode = int(self._reports.readline())
            self._reports.close()
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it if it runs, and wait until it is gone."""
        self.kill()
        self.wait()


class Forker:
    """Has processes forked. The process that does so starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process from which all are forked, if it has not been started."""
        if self._process is None:
            self._environment = _compared(os.environ)
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": _path()},
            )
            theirs.close()

    def close(self) -> None:
        """End it, and all that it has forked."""
        if self._process is not None:
            self._orders.close()
            self._process.wait()

    def program(self, *arguments: str, output: Path, space: str = "") -> Child:
        """Run gossamer with arguments, in a network namespace if one is named; what it says is added to a file."""
        with output.open("ab") as file:
            said = file.fileno()
            return self._order((said, said), arguments=arguments, space=space)

    def popen(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **more: Any
    ) -> Any:
        """Start a fork server in place of ``subprocess.Popen``, which does it where variables were changed."""
        self.start()
        if _compared(env) != self._environment:
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, **more)
        return self._order((1, 2, *pass_fds), env)

    def _order(
        self, descriptors: Sequence[int], environment: dict[str, str] | None = None, **order: Any
    ) -> Child:
        self.start()
        ours, theirs = socket.socketpair()
        order |= {
            "serves": environment is not None,
            "environment": environment or {**os.environ, "PYTHONPATH": _path()},
            "folder": str(Path.cwd()),
        }
        socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs.fileno(), *descriptors])
        theirs.close()
        return Child(ours)


FORKER = Forker()


def use(start: Callable[..., Any]) -> None:
    """Have fork servers of this process be started by this function, in place of ``subprocess.Popen``."""
    from gossamer.runtime.processes import fork_server

    fork_server.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[assignment]


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _compared(environment: Mapping[str, str]) -> dict[str, str]:
    """What a fork can't change any more. (The import path is set in the child.)"""
    found = {name: value for name, value in environment.items() if name.startswith(IMPORTED)}
    return {name: value for name, value in found.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    serve(int(sys.argv[1]))
