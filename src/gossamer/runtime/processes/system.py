"""Processes and the system: ending together, limits on open files, and CPU slots.

This module imports nothing large, so that the process that starts the others starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

from gossamer.errors import BadInput

SPARE_DESCRIPTORS = 64
"""Open files that are neither channels nor connections."""
WAIT_S = 1.0
"""Seconds after which a process that waits for a CPU slot checks by itself whether one is free."""
_PR_SET_PDEATHSIG = 1


def check_supported() -> None:
    """Refuse real processes where they can't be forked or share CPU slots."""
    try:
        import fcntl
        import resource

        os.fork, fcntl.lockf, resource.setrlimit  # noqa: B018
    except (ImportError, AttributeError):
        raise BadInput(
            f"engine: processes, which needs fork and record locks, and {sys.platform} lacks them; accepted: simulate,"
            " or Linux, macOS, or WSL on Windows"
        ) from None


def die_with(parent: int) -> None:
    """Make the system kill this process when its parent, with this process id, dies or is already dead (on
    Linux; elsewhere the closed channel ends it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # On Windows, the python of a virtual environment starts another one, which is not the caller's child.
    if os.name == "posix" and os.getppid() != parent:
        os._exit(1)


def describe_exit(code: int) -> str:
    """An exit code, or the negative number of a signal, in words: "killed by SIGKILL", "exit code 1"."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor from 3 up except ``keep`` (a child inherits its parent's)."""
    for before, after in pairwise([2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(before + 1, after)


def raise_descriptor_limit(nodes: int) -> None:
    """Let this process and its children open as many files as the system allows. Raises BadInput if that is too
    few for connections in both directions between a node and all others."""
    import resource

    needed = 2 * nodes + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInput(
            f"nodes: {nodes} processes may need {needed} open files each; accepted: as many as fit into"
            f" the hard limit, {hard} (ulimit -Hn), or a higher limit"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wakeup() -> tuple[int, int]:
    """Descriptors that signal a free CPU slot between processes: one to read, one to write."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    seconds, microseconds = divmod(round(WAIT_S * 1e6), 10**6)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, microseconds))
    ends[1].setblocking(False)
    return ends[0].detach(), ends[1].detach()


class CpuSlots:
    """CPU slots that processes share, as seen by one of them. A slot has at most one holder at a time.

    A slot is a record lock on one byte of a file, which has as many bytes as there are slots. The system
    frees the lock when its holder dies. A stopped process keeps its slot, so no process waits for a
    particular slot. Freeing a slot wakes one waiting process. If that process dies or is stopped at that
    moment, the others check by themselves after :data:`WAIT_S`."""

    def __init__(self, descriptor: int, ends: tuple[int, int]) -> None:
        self._descriptor, self._ends = descriptor, ends

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one of the slots; waits until one is free."""
        import fcntl

        while (slot := self._lock_one()) is None:
            self._wait()
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, slot)
            with suppress(OSError):  # if the buffer is full, the waiting processes wake anyway
                os.write(self._ends[1], b"!")

    def _lock_one(self) -> int | None:
        import fcntl

        for slot in range(os.fstat(self._descriptor).st_size):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except BlockingIOError:
                continue
            return slot
        return None

    def _wait(self) -> None:
        with suppress(BlockingIOError):  # the time is up
            os.read(self._ends[0], 1)
