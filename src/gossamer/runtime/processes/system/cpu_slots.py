"""CpuSlots of which so many processes may hold one at a time; they end with their holder."""

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
"""Seconds after which one that waits looks for itself whether a place is free."""
_FLOCK = struct.Struct("hhqqi4x")
"""A record lock as Linux has it, on machines of 64 bits: type, whence, start, length, holder."""


def wakeup() -> tuple[int, int]:
    """Where processes that share some places tell each other that one is free: descriptors to listen to, and to tell."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    seconds, microseconds = divmod(round(WAIT_S * 1e6), 10**6)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, microseconds))
    ends[1].setblocking(False)
    return ends[0].detach(), ends[1].detach()


class CpuSlots:
    """Some places, as one of the processes that share them sees them.

    A place is a record lock on one byte of a file. The system frees it when its holder dies, however it dies. One that is
    stopped keeps it; so nobody waits for a certain place. Who frees a place says so, which wakes one that waits; if that
    one dies or is stopped just then, the others look for themselves after :data:`WAIT_S`.

    Args:
        descriptor: the shared file.
        count: how many processes may hold one at once; may be changed at any time.
        ends: what :func:`wakeup` gave, the same for all; None where no other process shares them.
    """

    def __init__(self, descriptor: int, count: int, ends: tuple[int, int] | None) -> None:
        self.count = count
        self._descriptor, self._ends = descriptor, ends

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one of the places; waits until one is free."""
        while (place := self._free()) is None:
            self._wait()
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)
            self._wake()

    def _free(self) -> int | None:
        for place in range(self.count):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except BlockingIOError:
                continue
            return place
        return None

    def _wait(self) -> None:
        assert self._ends is not None, "another process has taken a place that it does not share"
        try:
            os.read(self._ends[0], 1)
        except BlockingIOError:
            return  # nothing was said for so long

    def _wake(self) -> None:
        if self._ends is None:
            return
        try:
            os.write(self._ends[1], b"!")
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                raise
            # It has been said so often that whoever waits looks anyway.


def holds(descriptor: int, count: int, pid: int) -> bool:
    """Whether another process holds one of so many places; False where the system doesn't say."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return False
    for place in range(count):
        asked = _FLOCK.pack(fcntl.F_WRLCK, 0, place, 1, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK and holder == pid:
            return True
    return False
