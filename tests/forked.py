"""Gossamer processes that start instantly, as forks of one process that has imported everything.

The imports of a fresh interpreter take two core-seconds, most of the cost of a small run of real processes. A process forked
here has imported no test and no user module, and gets the environment, the working directory and the import path of a fresh
one. Tests of the start itself use the fixture ``fresh_interpreters``.
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
"""Prefixes of the variables that an interpreter or a library reads when it starts."""
LARGEST_ORDER = 1 << 18


# --- the forking process


def serve(descriptor: int) -> None:
    """Import everything, then fork a process for each order until the sender of orders is gone.

    An order is one message with descriptors: a socket for reports, stdout, stderr, and those that the process inherits.
    """
    _die_with_parent()
    gc.disable()  # imports leave no garbage
    import torch

    import gossamer.algorithms
    import gossamer.cli
    import gossamer.runtime.processes.launcher
    import gossamer.runtime.processes.worker.worker
    import gossamer.tasks  # noqa: F401

    gc.enable()
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # a run calls it a dozen times
    torch.set_num_threads(1)  # as workers do at their start
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
                for handle in (orders, ended, wakeup, selector, *reports.values()):
                    handle.close()
                os.close(descriptors[0])
                _become(json.loads(text), descriptors[1:])
            reports[pid] = socket.socket(fileno=descriptors[0])
            for inherited in descriptors[1:]:
                os.close(inherited)
            reports[pid].sendall(b"%d\n" % pid)


def _reap(reports: dict[int, socket.socket]) -> None:
    """Report the processes that have ended."""
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with reports.pop(pid) as report, suppress(OSError):  # the receiver may be gone
            report.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(order: dict[str, Any], descriptors: list[int]) -> None:
    """In the child: carry out the order, and exit without the clean-up of the parent."""
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
    """Set working directory, environment and import path as a fresh interpreter would have them."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    path = os.environ.pop("GOSSAMER_PATH", None)  # of a fork server
    given = environment.get("PYTHONPATH", "") if path is None else path
    sys.path[:] = dict.fromkeys([*([folder] if path is None else []), *given.split(os.pathsep), *sys.path])


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
    )  # PR_SET_PDEATHSIG: no process outlives the tests, however they end


def fork_servers() -> None:
    """Let runs of this process, which has imported everything and has one thread, fork their own fork servers."""

    def start(command: object, *, pass_fds: tuple[int], env: dict[str, str], **_: object) -> _OwnChild:
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            close_all_but(set(pass_fds))
            _serve(pass_fds, env, str(Path.cwd()))
        return _OwnChild(pid)

    use(start)


class _OwnChild:
    """The part of ``subprocess.Popen`` that a fork server needs, for a process forked by this one."""

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
    """The part of ``subprocess.Popen`` that tests need, for a process forked by an order."""

    def __init__(self, report: socket.socket) -> None:
        self._reports = report.makefile("rb")
        self._socket, self.returncode = report, None
        self.pid = int(self._reports.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self.returncode = int(self._reports.readline())
            self._reports.close()
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process if it runs, and wait for its end."""
        self.kill()
        self.wait()


class Forker:
    """Orders forks from a process that starts with the first order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the forking process, if it does not run yet."""
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
        """End the forking process and all its forks."""
        if self._process is not None:
            self._orders.close()
            self._process.wait()

    def program(self, *arguments: str, output: Path, space: str = "") -> Child:
        """Run gossamer, in network namespace ``space`` if given; appends stdout and stderr to ``output``."""
        with output.open("ab") as file:
            descriptor = file.fileno()
            return self._order((descriptor, descriptor), arguments=arguments, space=space)

    def popen(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **more: Any
    ) -> Any:
        """Start a fork server: by a fork, or by ``subprocess.Popen`` if variables in :data:`IMPORTED` have changed."""
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
    """Start fork servers of this process with this function instead of ``subprocess.Popen``."""
    from gossamer.runtime.processes import fork_server

    fork_server.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[assignment]


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _compared(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a fork can't change any more. (The child sets the import path.)"""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(IMPORTED) and name != "PYTHONPATH"
    }


if __name__ == "__main__":
    serve(int(sys.argv[1]))
