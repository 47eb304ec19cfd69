"""Processes and the system: ending together, limits on open files, and CPU slots.

It imports nothing large: the process that starts the others has imported nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
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
"""Seconds after which a process that waits for a CPU slot checks for itself whether one is free."""
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent, of this process id, dies or is dead already (Linux; elsewhere the
    closed channel tells)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(code: int) -> str:
    """An exit code, or the negative number of a signal, in words: "killed by SIGKILL", "exit code 1"."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor from 3 up that is not to be kept (in a child, what its parent had open)."""
    for before, after in pairwise([2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(before + 1, after)


def raise_descriptor_limit(nodes: int) -> None:
    """Let this process and its children open as many files as the system allows; BadInput if that is fewer than a connection
    each way between a node and all others."""
    needed = 2 * nodes + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInput(
            f"nodes: {nodes} processes may need {needed} open files each; accepted: what fits into the hard limit,"
            f" {hard} (ulimit -Hn), or a higher limit"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wakeup() -> tuple[int, int]:
    """Descriptors by which processes that share slots tell each other that one is free: to listen to, and to tell."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    seconds, microseconds = divmod(round(WAIT_S * 1e6), 10**6)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, microseconds))
    ends[1].setblocking(False)
    return ends[0].detach(), ends[1].detach()


class CpuSlots:
    """CPU slots of which a limited number of processes may hold one at a time, as seen by one of these processes.

    A slot is a record lock on one byte of a file, as many as it has, which the system frees when its holder dies. A stopped
    process keeps its slot, so nobody waits for a certain one. Freeing a slot wakes one process that waits; if that one dies
    or is stopped just then, the others look for themselves after :data:`WAIT_S`.
    """

    def __init__(self, descriptor: int, ends: tuple[int, int]) -> None:
        self._descriptor, self._ends = descriptor, ends

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one of the slots; waits until one is free."""
        while (slot := self._lock_one()) is None:
            self._wait()
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, slot)
            with suppress(OSError):  # a full buffer wakes the waiting processes anyway
                os.write(self._ends[1], b"!")

    def _lock_one(self) -> int | None:
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
