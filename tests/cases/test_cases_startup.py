"""Processes that are started without streams, on a terminal that is not UTF-8, by a parent that ignores SIGCHLD, or beside
modules with the names of Python's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossamer.startup import environment, program

LINE = """
import sys
from gossamer.startup import begin
begin()
print("0.93 ± 0.01, ≥ 2 µs: ж")
print("progress ·", file=sys.stderr)
opened = open("opened", "w")
print(opened.fileno() > 2, file=opened)
sys.exit(3)
"""
"""A program that prints to both streams, and opens a file."""


def shell(
    command: str, folder: Path, code: str = LINE, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run Python code as ``$PROGRAM`` of a shell's command."""
    (folder / "program.py").write_text(code)
    given = {
        "PROGRAM": f"{sys.executable} -P program.py",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **given, **variables},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_take_what_is_written(tmp_path: Path, closed: str) -> None:
    """Python prints to standard output what is meant for a closed standard error, and the next file gets its number."""
    done = shell(f"exec $PROGRAM {closed}", tmp_path)
    assert done.returncode == 3
    assert done.stdout.decode() == ("0.93 ± 0.01, ≥ 2 µs: ж\n" if closed == "2>&-" else "")
    assert done.stderr.decode() == ("progress ·\n" if closed == ">&-" else "")
    assert (tmp_path / "opened").read_text() == "True\n"


def test_reader_that_has_gone_changes_no_exit_code(tmp_path: Path) -> None:
    done = shell("$PROGRAM | true; echo ${PIPESTATUS[0]}", tmp_path, LINE.replace('"opened"', '"/dev/null"'))
    assert (done.stdout, done.stderr.decode()) == (b"3\n", "progress ·\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_without_a_character_shows_it_in_plain(tmp_path: Path, encoding: str) -> None:
    done = shell("exec $PROGRAM", tmp_path, LANG="C", PYTHONIOENCODING=encoding)
    plain = {
        "ascii": (b"0.93 +/- 0.01, >= 2 us: \\u0436\n", b"progress -\n"),
        "latin-1": (b"0.93 \xb1 0.01, >= 2 \xb5s: \\u0436\n", b"progress \xb7\n"),
    }[encoding]
    assert (done.returncode, done.stdout, done.stderr) == (3, *plain)


def test_exit_code_of_a_child_is_kept_below_a_parent_that_ignores_it(tmp_path: Path) -> None:
    code = "import os, sys; from gossamer.startup import begin; begin(); pid = os.fork() or os._exit(7); print(os.waitpid(pid, 0)[1])"
    ignored = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    done = subprocess.run(
        program(code), env=environment(), preexec_fn=ignored, capture_output=True, check=True, text=True
    )
    assert done.stdout == f"{7 << 8}\n"


def test_standard_library_precedes_modules_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "queue", "statistics", "mine", "polars"):
        (tmp_path / f"{name}.py").write_text("whose = 'the user'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "import random, queue, statistics, mine, polars; print([hasattr(m, 'whose') for m in (random, queue, statistics, mine, polars)])"
    done = subprocess.run(program(code), env=environment(), capture_output=True, check=True, text=True)
    assert (
        done.stdout == "[False, False, False, True, True]\n"
    )  # an own module may replace a package, as in this process
    code = "import gossamer.startup as s, sys; s.make_importable('.'); import statistics, mine; print(hasattr(statistics, 'whose'), mine.whose)"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    done = subprocess.run(program(code), env=environment(), capture_output=True, check=True, text=True)
    assert done.stdout == "False the user\n"


# --- whole commands

EXPERIMENT = """
name: small
nodes: 4
task: {name: least-squares, samples: 64, features: 5}
topology: {name: ring}
algorithm: {name: "mine:Mine"}
optimizer: {name: sgd, lr: 0.1}
batch_size: full
evaluation: {every_rounds: 2}
stop: {rounds: 2}
engine: {name: simulate, trainer: sequential}
"""
SWEEP = "{name: three, base: small.yaml, seeds: 3, cells: {a: {}, b: {optimizer.lr: 0.05}}}"
MINE = "from gossamer.algorithms import DPSGD\nclass Mine(DPSGD):\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment beside modules with the names of Python's own."""
    for name, text in {"small.yaml": EXPERIMENT, "three.yaml": SWEEP, "mine.py": MINE}.items():
        (tmp_path / name).write_text(text)
    for name in ("random", "queue", "statistics", "calendar"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the standard library')\n")
    return tmp_path


RUN = ("run", "small.yaml")
REAL = (*RUN, "--engine", "processes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirected", "shown"),
    [
        (REAL, "2>&-", "private memory"),
        (REAL, ">&- 2>&-", ""),
        (("sweep", "three.yaml"), ">&-", ""),
        (("sweep", "three.yaml"), "2>&-", "±"),
    ],
)
def test_commands_with_closed_streams(
    folder: Path, command: Sequence[str], redirected: str, shown: str
) -> None:
    code = "import sys; sys.argv[0] = 'gossamer'; from gossamer.cli import main; main()"
    (folder / "sub").mkdir()
    done = shell(
        f"cd ..; exec {sys.executable} -P sub/program.py {' '.join(command)} {redirected}",
        folder / "sub",
        code,
    )
    assert (done.returncode, done.stderr if "2>&-" in redirected else b"") == (0, b"")
    assert shown in done.stdout.decode()
    assert (shown == "") == (done.stdout == b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        REAL,
        ("sweep", "three.yaml"),
        ("sweep", "three.yaml", "--dry-run"),
        ("topology", "small.yaml"),
        ("report", "RUN"),
    ],
)
def test_commands_on_an_ascii_terminal(folder: Path, command: Sequence[str]) -> None:
    code = "import sys; sys.argv[0] = 'gossamer'; from gossamer.cli import main; main()"
    (folder / "sub").mkdir()
    variables = {"LANG": "C", "PYTHONIOENCODING": "ascii"}
    if command[-1] == "RUN":
        shell(f"cd ..; exec {sys.executable} -P sub/program.py {' '.join(RUN)}", folder / "sub", code)
        command = ("report", *(str(path) for path in folder.glob("runs/small/*")))
    done = shell(
        f"cd ..; exec {sys.executable} -P sub/program.py {' '.join(command)}",
        folder / "sub",
        code,
        **variables,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize("command", [REAL, ("sweep", "three.yaml", "--jobs", "1")])
def test_modules_beside_the_experiment(folder: Path, command: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gossamer", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
