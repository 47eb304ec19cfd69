"""CPU slots: a limited number of processes may hold one at a time. A slot is free again when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 1.0
"""Seconds after which a waiting process checks for itself whether a slot is free."""
_FLOCK = struct.Struct("hhqqi4x")
"""A record lock under Linux on machines of 64 bits: type, whence, start, length, holder."""


def wakeup() -> tuple[int, int]:
    """Descriptors by which processes that share slots tell each other that one is free: to listen to, and to tell."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    seconds, microseconds = divmod(round(WAIT_S * 1e6), 10**6)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, microseconds))
    ends[1].setblocking(False)
    return ends[0].detach(), ends[1].detach()


class CpuSlots:
    """Some slots, as seen by one of the processes that share them.

    A slot is a record lock on one byte of a file. The system frees it when its holder dies, however it dies. A stopped
    process keeps its slot, so nobody waits for a certain one. A process that frees a slot says so, which wakes one that
    waits; if that one dies or is stopped just then, the others look for themselves after :data:`WAIT_S`.

    Args:
        descriptor: the shared file.
        count: how many processes may hold one at once; may be changed at any time.
        ends: the result of :func:`wakeup`, the same for all; None where no other process shares them.
    """

    def __init__(self, descriptor: int, count: int, ends: tuple[int, int] | None) -> None:
        self.count = count
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
            self._wake()

    def _lock_one(self) -> int | None:
        for slot in range(self.count):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except BlockingIOError:
                continue
            return slot
        return None

    def _wait(self) -> None:
        assert self._ends is not None, "another process has taken a slot that it does not share"
        try:
            os.read(self._ends[0], 1)
        except BlockingIOError:
            return  # the time is up

    def _wake(self) -> None:
        if self._ends is None:
            return
        try:
            os.write(self._ends[1], b"!")
        except OSError as error:  # a full buffer wakes the waiting processes anyway
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                raise


def holds(descriptor: int, count: int, pid: int) -> bool:
    """Whether another process holds one of the first ``count`` slots; False where the system doesn't say."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return False
    for slot in range(count):
        asked = _FLOCK.pack(fcntl.F_WRLCK, 0, slot, 1, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK and holder == pid:
            return True
    return False
