"""Unwritable files: a run fails with one line, its record has the cause and all rows, and it can be resumed."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import Cli
from forked import FORKER, Child
from gossamer import Run, load_run
from gossamer.results.checkpoints import newest
from gossamer.results.folder import RunFolder
from gossamer.results.verify import problems_of

Disk = Callable[[str], Path]
"""The fixture ``disk`` of conftest.py."""

DEADLINE_S = 100.0
ENGINES = pytest.mark.parametrize("engine", ["simulate", "processes"])
TIMELINE = "evaluation.timeline={from_s: 0, to_s: 100, nodes: 4}"
EXPERIMENT = """
name: small
nodes: 4
task: {name: least-squares, samples: 64, features: 5}
topology: {name: random-regular, degree: 2, every_rounds: 1}
algorithm: {name: d-psgd}
optimizer: {name: sgd, lr: 0.1}
batch_size: full
evaluation: {every_rounds: 1}
checkpoint: {every_rounds: 5}
stop: {rounds: 30}
engine: {name: simulate, trainer: sequential}
"""

pytestmark = pytest.mark.usefixtures("no_process_is_left")


@dataclass
class Ended:
    """A program that has ended."""

    code: int
    output: str

    @property
    def error(self) -> str:
        """The only error line."""
        [line] = [line for line in self.output.splitlines() if line.startswith("error:")]
        assert "Traceback" not in self.output
        return line


def start(folder: Path, *arguments: str, output: Path | None = None) -> Child:
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    return FORKER.program(*arguments, output=output or folder / "output")


def gossamer(folder: Path, *arguments: str) -> Ended:
    output = folder / "output"
    output.unlink(missing_ok=True)
    code = start(folder, *arguments).wait(DEADLINE_S)
    return Ended(code, output.read_text())


def begin(folder: Path, out: Path, engine: str, *settings: str) -> Ended:
    options = [option for setting in settings for option in ("--set", setting)]
    file = str(folder / "experiment.yaml")
    return gossamer(folder, "run", file, "--out", str(out), "--engine", engine, "--no-report", *options)


def only(out: Path) -> Path:
    [folder] = out.glob("small/*")
    return folder


def check_failed(out: Path, ended: Ended, why: str) -> Run:
    """Assert that the run failed with this cause, that its record is intact, and that no temporary file is left."""
    assert ended.code == 1, ended.output
    assert why in ended.error
    run = load_run(only(out))
    assert run.status == "failed"
    assert run.error is not None
    assert why in run.error
    for rank in range(4):
        rounds = run.metrics.filter(node=rank)["round"].to_list()
        assert rounds == list(range(len(rounds)))
    assert problems_of(run.path) == []
    assert [path for path in run.path.rglob(".*") if path.is_file()] == []
    return run


def rounds_of(run: Run) -> list[list[int]]:
    return [run.metrics.filter(node=rank)["round"].to_list() for rank in range(4)]


# --- a full disk


@ENGINES
def test_run_without_space_for_first_files_does_not_start(disk: Disk, tmp_path: Path, engine: str) -> None:
    out = disk("size=4k")
    for size in (8, 16, 20, 24):  # enough for none of the first files, or for some
        disk(f"size={size}k")
        ended = begin(tmp_path, out, engine)
        assert ended.code == 2
        assert ended.error.startswith(f"error: --out {out}: ")
        assert "no space left on device" in ended.error.lower()
        assert list(out.glob("small/*")) == []


@ENGINES
@pytest.mark.parametrize("size", [32, 44, 116])
def test_full_disk_fails_run_with_one_line(disk: Disk, tmp_path: Path, engine: str, size: int) -> None:
    out = disk(f"size={size}k")
    ended = begin(tmp_path, out, engine, TIMELINE)
    run = check_failed(out, ended, "can't be written: No space left on device")
    saved = newest(run.path / "checkpoints", verified=True)
    if size < 100:
        return
    assert saved is not None
    for more in (0, 8):  # not enough: the run fails again, and loses nothing
        disk(f"size={size + more}k")
        ended = gossamer(tmp_path, "resume", str(run.path), "--no-report")
        check_failed(out, ended, "No space left on device")
        newer = newest(run.path / "checkpoints", verified=True)
        assert newer is not None
        assert newer.number >= saved.number
    disk("size=4m")
    ended = gossamer(tmp_path, "resume", str(run.path), "--no-report")
    assert ended.code == 0, ended.output
    assert rounds_of(load_run(run.path)) == [list(range(31))] * 4
    assert problems_of(run.path) == []


@ENGINES
def test_exhausted_inodes_fail_run_with_one_line(disk: Disk, tmp_path: Path, engine: str) -> None:
    out = disk("nr_inodes=10")  # for the first files and two segments
    check_failed(out, begin(tmp_path, out, engine), "can't be written: No space left on device")


def test_status_fits_into_reserved_space(disk: Disk) -> None:
    out = disk("size=64k")
    folder = RunFolder.create(out, "small", experiment=EXPERIMENT, environment={})
    with pytest.raises(OSError, match="No space"), (out / "rest").open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(1024))
    words = "all of them, " * 2000  # more than the reserved space
    folder.write_status("failed", error=words, profile={"train": 1.0})
    run = load_run(folder.path)
    assert run.status == "failed"
    assert run.error is not None
    assert words.startswith(run.error)
    assert len(run.error) == 2000


@pytest.mark.slow
def test_sweep_on_full_disk_fails_and_can_be_retried(disk: Disk, tmp_path: Path) -> None:
    out = disk("size=48k")
    file = tmp_path / "sweep.yaml"
    file.write_text("{name: sweep, base: experiment.yaml, seeds: 2}")
    command = ("sweep", str(file), "--out", str(out), "--jobs", "1")
    ended = gossamer(tmp_path, *command)
    assert ended.code == 1
    assert "No space left on device" in ended.output
    assert "Traceback" not in ended.output
    assert {load_run(path.parent).status for path in out.rglob("experiment.yaml")} == {"failed"}
    disk("size=4m")
    ended = gossamer(tmp_path, *command, "--retry-failed")
    assert ended.code == 0, ended.output


# --- limits and other errors, without root


@contextmanager
def largest_files(size: int) -> Iterator[None]:
    """Limit the file size of programs started in this context."""
    FORKER.start()
    assert FORKER._process is not None
    before = resource.prlimit(FORKER._process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(FORKER._process.pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(FORKER._process.pid, resource.RLIMIT_FSIZE, before)


@ENGINES
def test_file_size_limit_fails_run_with_one_line(tmp_path: Path, engine: str) -> None:
    with largest_files(30_000):
        ended = begin(tmp_path, tmp_path / "runs", engine)
    run = check_failed(tmp_path / "runs", ended, "can't be written: File too large")
    assert len(rounds_of(run)[0]) > 10
    assert newest(run.path / "checkpoints", verified=True) is not None
    ended = gossamer(tmp_path, "resume", str(run.path), "--no-report")
    assert ended.code == 0, ended.output
    assert rounds_of(load_run(run.path)) == [list(range(31))] * 4


def test_open_file_limit_fails_run_with_one_line(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tasks(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("gossamer.runtime.simulate.simulation.NodeTasks", no_tasks)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    code, _, output = cli("run", "experiment.yaml")
    check_failed(tmp_path / "runs", Ended(code, output), "Too many open files")


@ENGINES
def test_removed_run_folder_fails_run_with_one_line(tmp_path: Path, engine: str) -> None:
    options = ("--engine", engine, "--set", "stop.rounds=200", "--set", "checkpoint.every_rounds=null")
    file, out = str(tmp_path / "experiment.yaml"), tmp_path / "runs"
    child = start(tmp_path, "run", file, "--out", str(out), *options)
    deadline = time.monotonic() + DEADLINE_S
    while not any(path.stat().st_size for path in out.glob("*/*/segments/metrics-0.jsonl")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.005)
    shutil.rmtree(out)
    ended = Ended(child.wait(DEADLINE_S), (tmp_path / "output").read_text())
    assert ended.code == 1, ended.output
    assert "can't be written: No such file or directory" in ended.error


@ENGINES
def test_run_is_recorded_as_done_when_output_fails(tmp_path: Path, engine: str) -> None:
    options = ("--engine", engine, "--no-report", "--out", str(tmp_path / "runs"))
    child = start(tmp_path, "run", str(tmp_path / "experiment.yaml"), *options, output=Path("/dev/full"))
    assert child.wait(DEADLINE_S) == 1  # the summary could not be printed
    assert load_run(only(tmp_path / "runs")).status == "done"
