"""The claims of processes, on one machine or on many, on the runs of a sweep that they share.

A process *claims* a run by creating a file in its folder exclusively, which also shared file systems let only one do. (Locks
may be missing there, or not reach other machines.) As long as it has the run, it changes a counter in the file, its
*heartbeat*. Another process that waits for the run looks at the file from time to time, and measures by its own clock for
how long the counter has stayed the same; clocks of two machines are never compared. After :data:`DEAD_S` the owner counts as
dead. Then the waiting processes may create the claim with the next number, exclusively again, so one of them gets the run.
The claim with the highest number counts. Its owner removes all of them at the end.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from gossamer.errors import RecordError

BEAT_S = 5.0
"""Seconds between two heartbeats."""
DEAD_S = 60.0
"""Seconds without a heartbeat after which the owner of a claim counts as dead."""
LOOK_S = 2.0
"""Seconds between two looks at a claim."""

_PREFIX = ".claim-"


class RunClaim:
    """A run that this process has claimed, from :meth:`take`; a context manager that releases it. A thread sends the
    heartbeat meanwhile."""

    def __init__(self, path: Path, descriptor: int, owner: str) -> None:
        self._path, self._descriptor, self._beats = path, descriptor, 0
        self._text = f" {secrets.token_hex(8)} {owner} {process()}\n".encode()
        self._over = threading.Event()
        self.lost = False

    @classmethod
    def take(cls, folder: Path, owner: str, after: int = 0) -> RunClaim | None:
        """Claim the run in a folder for the sweep of the process ``owner`` (see :func:`process`); None if another process
        has it. ``after`` is the number of a dead claim, from :class:`Watch`. RecordError if no file can be created."""
        path = folder / f"{_PREFIX}{after + 1}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _highest(folder) != after:
                return None
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except OSError as error:
            taken = isinstance(error, FileExistsError) and folder.is_dir()
            just_removed = isinstance(error, FileNotFoundError | FileExistsError) and not folder.exists()
            if taken or just_removed:
                return None
            raise RecordError(path, error) from error
        claim = cls(path, descriptor, owner)
        try:
            claim._write()
        except OSError as error:  # e.g. a full disk
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise RecordError(path, error) from error
        if after and not _claim(folder, after).exists():  # its owner lived, and has released it meanwhile
            claim.release()
            return None
        return claim

    def beat(self) -> None:
        """Change the counter, or find that the claim is ``lost``: its owner was suspended or cut off, so another process has
        the run by now."""
        with suppress(OSError):  # the next beat may succeed
            self._write()
        self.lost = self.lost or self._is_lost()

    def _write(self) -> None:
        self._beats += 1
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, b"%012d%s" % (self._beats, self._text))
        with suppress(OSError):  # not every file system has it; NFS keeps writes until then
            os.fsync(self._descriptor)

    def _is_lost(self) -> bool:
        try:
            ours = self._path.read_bytes().endswith(self._text)
            return not ours or _claim(self._path.parent, _highest(self._path.parent)) != self._path
        except FileNotFoundError:
            return True
        except OSError:  # it can't be read at the moment
            return False

    def release(self) -> None:
        """Remove the claim, and the dead ones before it, unless it is lost."""
        lost = self.lost or self._is_lost()
        os.close(self._descriptor)
        if not lost:
            remove(self._path.parent)

    def _keep(self) -> None:
        while not self._over.wait(BEAT_S):
            self.beat()

    def __enter__(self) -> RunClaim:
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.release()


class Watch:
    """The claims of other processes, as this one sees them. ``clock`` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[
            Path, tuple[bytes, float, float]
        ] = {}  # content, seconds without a change, last look

    def dead(self, folder: Path) -> int | None:
        """The number of the claim after which this process may claim a run: 0 if nobody has it, that of a dead claim, or
        None as long as its owner may be alive. Call it every :data:`LOOK_S` seconds: longer gaps, in which this process or
        the file system may have stood still, do not count as silence."""
        try:
            number, now = _highest(folder), self._clock()
        except OSError:  # it can't be seen at the moment
            return None
        if number == 0:
            self._seen.pop(folder, None)
            return 0
        text = _current(folder) or b""  # unreadable is silent too
        before, silent_s, looked_s = self._seen.get(folder, (b"", 0.0, now))
        silent_s = silent_s + min(now - looked_s, 2 * LOOK_S) if text == before else 0.0
        self._seen[folder] = text, silent_s, now
        return number if silent_s >= DEAD_S or _has_ended(text) else None


def held(folder: Path) -> bool:
    """Whether a run is claimed, as far as one look shows."""
    text = _current(folder)
    return text is not None and not _has_ended(text)


def held_for(folder: Path, owner: str) -> bool:
    """Whether a run is claimed for the sweep of the process ``owner``."""
    text = _current(folder)
    return text is not None and owner.encode() in text.split()


def remove(folder: Path) -> None:
    """Remove all claims on a run: the highest last, as it counts until then."""
    with suppress(OSError):  # what is left is silent, and dies
        for number in range(1, _highest(folder) + 1):
            _claim(folder, number).unlink(missing_ok=True)
        if next(folder.iterdir(), None) is None:  # a run that began nothing
            folder.rmdir()


def _claim(folder: Path, number: int) -> Path:
    return folder / f"{_PREFIX}{number}"


def _highest(folder: Path) -> int:
    """The highest number of a run's claims; 0 without any."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - opening the folder makes NFS ask its server
    except (FileNotFoundError, NotADirectoryError):
        return 0
    numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _current(folder: Path) -> bytes | None:
    """The text of the claim on a run that counts; None without one that can be read."""
    try:
        return _claim(folder, number).read_bytes() if (number := _highest(folder)) else None
    except OSError:
        return None


# --- processes of this machine, whose end is seen at once


def process() -> str:
    """The name of this process, in one word without spaces."""
    return f"{_space()}:{os.getpid()}"


@cache
def _space() -> str:
    """The name of the system in which this process has its number, and all see each other; empty if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return ""


def _has_ended(text: bytes) -> bool:
    """Whether the owner of a claim and its sweep were processes of this system that are gone."""
    names = [name.decode(errors="replace").rpartition(":") for name in text.split()[2:]]
    return bool(names) and all(space == _space() != "" and not _exists(number) for space, _, number in names)


def _exists(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True
