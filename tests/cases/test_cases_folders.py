"""Folders of network file systems, homes that can't be written, and systems without fork or fcntl."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from command_line import SMALL, Cli
from gossamer import BadInput, Experiment, Observer, RunFailed, digests
from gossamer.files import cache_folder
from gossamer.learning.compiled import compiled
from gossamer.results import folder
from gossamer.results.verify import problems_of
from gossamer.startup import environment, program

CHECKPOINTS = {"checkpoint": {"every_rounds": 1}}


class Says(Observer):
    """Collects what is said, and ends the run in its second round."""

    def __init__(self, *, stops: bool = False) -> None:
        self.said, self._stops = list[str](), stops

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, rounds: int, time_s: float) -> None:
        self.stopping = self._stops and rounds >= 8


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *, files: bool = False) -> None:
    """Let flushes of folders, or of all files, fail with an error number."""

    def fsync(descriptor: int) -> None:
        if files or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folder, "_said", set())


@pytest.mark.parametrize(
    ("number", "files"),
    [(errno.EINVAL, False), (errno.ENOTSUP, True), (errno.ENOSYS, False), (errno.EBADF, False)],
)
def test_file_system_that_can_t_flush_costs_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    files: bool,
) -> None:
    refuse(monkeypatch, number, files=files)
    done = gossamer.run(Experiment.parse(SMALL).override(**CHECKPOINTS), tmp_path)
    assert (done.status, problems_of(done.path)) == ("done", [])
    kinds = ["files", "folders"] if files else ["folders"]
    # Each once in a process; a slow machine has other lines to say.
    said = [line for line in caplog.messages if "can't be flushed to disk here" in line]
    assert sorted(line.split(": ")[1].split()[0] for line in said) == kinds
    assert all(os.strerror(number) in line for line in said)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_flush_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Network file systems say only then that the disk is full."""
    refuse(monkeypatch, number, files=True)
    with pytest.raises((BadInput, RunFailed), match=os.strerror(number).lower()):
        gossamer.run(Experiment.parse(SMALL), tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.ENOTSUP])
def test_folder_without_locks_costs_a_line_when_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Linux answers EBADF to a lock on a folder of NFS."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    observer = Says(stops=True)
    done = gossamer.run(Experiment.parse(SMALL).override(**CHECKPOINTS), tmp_path, observer=observer)
    assert done.status == "stopped"
    assert not [text for text in observer.said if "lock" in text]
    resumed = Says()
    assert gossamer.resume(done.path, observer=resumed).status == "done"
    assert [text for text in resumed.said if "lock" in text] == [
        f"{done.path}: folders can't be locked here; no other process may run it now"
    ]


def test_unwritable_or_missing_home_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (large := tmp_path / "large.csv").write_bytes(bytes(digests.SMALL))
    for name in ("GOSSAMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for home in ("a file", "nowhere"):
        monkeypatch.setattr(digests, "_known", {})
        os.utime(large, ns=(0, 0))
        if home == "nowhere":
            monkeypatch.setattr(Path, "home", no_home)
        else:
            monkeypatch.setenv("HOME", str(large))
        monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
        assert (
            digests.digest(large) == "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58"
        )  # sha256sum
        assert not cache_folder().exists()
        [line] = caplog.messages
        assert "set GOSSAMER_CACHE to a writable folder" in line
        caplog.clear()


def test_compiled_loop_that_can_t_be_kept_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E.g. because the quota of the home is used up: numba only tries whether a file can be created."""
    from numba.core.caching import IndexDataCacheFile

    def save(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "kernels.nbi")

    monkeypatch.setattr(IndexDataCacheFile, "save", save)
    twice = compiled(lambda number: 2 * number)
    assert (twice(3), twice(0.5)) == (6, 1.0)
    assert [line for line in caplog.messages if "NUMBA_CACHE_DIR" in line]


def test_real_processes_are_refused_where_they_can_t_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    refused = "error: engine: processes, which needs fork and record locks"
    for arguments in (
        ("run", "small.yaml", "--engine", "processes"),
        ("run", "small.yaml", "--engine", "processes", "--listen", "127.0.0.1:0"),
        ("worker", "127.0.0.1:9", "--join", "x" * 16),
    ):
        code, _, errors = cli(*arguments)
        assert (code, errors.splitlines()[-1][: len(refused)]) == (2, refused)
    assert cli("run", "small.yaml", "--profile")[0] == 0


@pytest.mark.slow
def test_system_without_fork_simulates(tmp_path: Path) -> None:
    """Of Windows, only what is missing there is known here."""
    code = """
import os, sys
for name in ("fcntl", "resource", "termios", "tty", "pty", "grp", "pwd", "syslog"):
    sys.modules[name] = None
for name in ("fork", "sched_getaffinity", "getuid", "geteuid", "sysconf", "set_blocking", "O_NONBLOCK"):
    delattr(os, name)
import signal
del signal.SIGKILL, signal.SIGCHLD
import gossamer
for name in gossamer.__all__:
    getattr(gossamer, name)
import gossamer.cli
import mmap  # the libraries above ask for the system's name, not for what it has
for name in [name for name in vars(mmap) if name.startswith(("MAP_", "MADV_"))]:
    delattr(mmap, name)
from concurrent.futures import ThreadPoolExecutor
from gossamer import Experiment, Sweep, load_run, run, run_sweep
from gossamer.results.report import write_report
experiment = Experiment.parse(open("small.yaml").read())
done = run(experiment, "runs")
write_report([done], done.path / "report.html")
with ThreadPoolExecutor(1) as one:
    outcome = run_sweep(Sweep.of({"name": "two", "base": "small.yaml", "seeds": 2}, out="runs"), one)
assert (done.status, outcome.counts.done) == ("done", 2)
try:
    run(experiment.override(engine={"name": "processes"}), "runs")
except gossamer.BadInput as error:
    print(error)
"""
    (tmp_path / "small.yaml").write_text(SMALL)
    done = subprocess.run(
        program(code), env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "engine: processes, which needs fork and record locks, and linux lacks them; accepted:"
    )
    assert done.stdout.count("\n") == 1
