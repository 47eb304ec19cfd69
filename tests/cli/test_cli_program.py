"""The version, the help, the imports, and errors of the option parser."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gossamer
from command_line import Cli


def test_missing_experiment_or_run_is_one_line(cli: Cli) -> None:
    assert cli("run", "none.yaml") == (
        2,
        "",
        "error: none.yaml: No such file or directory; accepted: a YAML experiment file\n",
    )
    code, _, err = cli("report", "nothing")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "nothing" in err


def test_version_is_printed(cli: Cli) -> None:
    assert cli("--version") == (0, f"gossamer {gossamer.__version__}\n", "")


def test_cli_import_does_not_load_torch() -> None:
    code = "import sys, gossamer.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_run_imports_do_not_load_scipy() -> None:
    code = (
        "import sys, gossamer.algorithms, gossamer.results.report, gossamer.runtime.simulate.simulation,"
        " gossamer.runtime.processes.launcher, gossamer.runtime.processes.worker.worker; sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_missing_command_prints_help(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, err.strip()) == (2, "")
    assert "Usage: gossamer" in out
    assert cli("--help")[1].split() == out.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("worker", "host:9000"), "Missing option '--join'"),
        (("worker", "host", "--join", "0123456789abcdef"), "HOST:PORT: got 'host'; accepted: HOST:PORT"),
        (("worker", "127.0.0.1:9", "--join", "short"), "token: 5 characters; accepted: at least 16"),
        (
            ("worker", "host:1", "--join", "x", "--slots", "0"),
            "Invalid value for '--slots': ",
        ),
        (
            ("run", "small.yaml", "--listen", "127.0.0.1:0", "--token", "short"),
            "token: 5 characters; accepted: at least 16, hard to guess",
        ),
        (("topology", "small.yaml", "--round", "1.5"), "Invalid value for '--round': "),
        (("run",), "Missing argument 'FILE'."),
        (("report",), "Missing argument 'RUN...'."),
        (
            ("run", "small.yaml", "--overide", "a=b"),
            "No such option: --overide",
        ),
        (("sweep", "small.yaml", "--job", "2"), "No such option: --job (Possible options: --jobs"),
        (("run", "small.yaml", "another.yaml"), "Got unexpected extra argument"),
        (("run", "small.yaml", "--set"), "Option '--set' requires an argument"),
        (("rnu", "small.yaml"), "No such command 'rnu'. Did you mean 'run'?"),
        (("--verbose",), "No such option: --verbose (Possible options: --version)"),
    ],
)
def test_parser_error_is_one_line(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith(f"error: {message}")
