"""Settings of all tests, and fixtures that several folders use."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import settings
from jaxtyping import config as checks
from jaxtyping import install_import_hook

import forked
import gossamer  # noqa: F401 - before torch, so that the matrix kernels have the mode that bits are promised for
from command_line import Cli
from gossamer import digests

# Check shapes at every call of the modules that handle arrays; nothing has imported them yet. (Checking all of gossamer took
# half as long again and found only what mypy finds.)
install_import_hook(
    [
        *("gossamer.algorithms", "gossamer.codecs", "gossamer.faults", "gossamer.learning"),
        *("gossamer.network", "gossamer.node", "gossamer.results", "gossamer.tasks", "gossamer.topology"),
        *("gossamer.runtime.outcome", "gossamer.runtime.setup"),
    ],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# The duration of an example depends more on the load of the machine than on the code.
settings.register_profile("gossamer", deadline=None)
settings.load_profile("gossamer")


@pytest.fixture(scope="session", autouse=True)
def _files_are_not_flushed_to_disk() -> Iterator[None]:
    """Skip fsync: a run calls it a dozen times."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _processes_start_at_once() -> Iterator[None]:
    """Fork all fork servers from one process that has imported everything."""
    forked.use(forked.FORKER.popen)
    yield
    forked.FORKER.close()


@pytest.fixture
def fresh_interpreters() -> Iterator[None]:
    """Start fork servers as programs, as outside the tests."""
    forked.use(subprocess.Popen)
    yield
    forked.use(forked.FORKER.popen)


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Assert that no process started by the test, directly or indirectly, outlives it."""
    forked.FORKER.start()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Disable type and shape checks, which would dominate the time of thousands of small runs.

    Use it only where other tests cover the same checks.
    """
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run gossamer in the folder of the test; returns exit code, stdout and stderr."""
    from gossamer.cli import main

    monkeypatch.chdir(tmp_path)
    log = logging.getLogger("gossamer")
    level = log.level

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gossamer", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        printed = capfd.readouterr()
        return ended.value.code, printed.out, printed.err

    yield call
    log.setLevel(level)  # --quiet sets the level for the whole process, which tests share


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with options such as ``size=256k``; later calls remount it with other options."""
    if os.geteuid() != 0:
        pytest.skip("not root: a full disk")
    disk = tmp_path / "disk"

    def mount(options: str) -> Path:
        again = "remount," if disk.exists() else ""
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            disk.rmdir()
            pytest.skip("file systems can't be mounted here: a full disk")
        return disk

    yield mount
    if disk.exists():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def small_disk(disk: Callable[[str], Path]) -> Path:
    """A file system of 256 KiB."""
    return disk("size=256k")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory whose modules can be imported and are forgotten afterwards, and a cache."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_known", {})
    _forget_modules(tmp_path.parent)  # a test that ran before may have left one of the same name
    yield home
    _forget_modules(tmp_path.parent)


def _forget_modules(folder: Path) -> None:
    """Forget the modules that were imported from files below a folder."""
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
