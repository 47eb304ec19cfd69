"""The mode of the matrix kernels is set before torch uses them, in every process, and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from command_line import Cli
from gossamer import Experiment, load_run, numerics, run

SMALL = {
    "name": "small",
    "nodes": 3,
    "task": {"name": "digits", "model": "logistic"},
    "topology": {"name": "ring"},
    "algorithm": {"name": "d-psgd"},
    "stop": {"rounds": 4},
}


SET = {numerics.VARIABLE, "CUBLAS_WORKSPACE_CONFIG"}


def printed(code: str, **environment: str) -> str:
    """The output of code in a process whose mode only ``environment`` sets."""
    variables = {name: value for name, value in os.environ.items() if name not in SET}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


MODE = f"import os; print(os.environ.get({numerics.VARIABLE!r}))"


def test_import_sets_mode_without_importing_torch() -> None:
    assert printed(f"import gossamer, sys; assert 'torch' not in sys.modules; {MODE}") == "AUTO"


def test_import_sets_cublas_workspace_unless_set() -> None:
    code = "import gossamer, os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert printed(code) == ":4096:8"
    assert printed(code, CUBLAS_WORKSPACE_CONFIG=":16:8") == ":16:8"


def test_mode_set_by_user_is_kept() -> None:
    assert printed(f"import gossamer; {MODE}", MKL_CBWR="COMPATIBLE") == "COMPATIBLE"


def test_child_processes_inherit_mode() -> None:
    code = f"import gossamer, subprocess, sys; subprocess.run([sys.executable, '-c', {MODE!r}], check=True)"
    assert printed(code) == "AUTO"


def test_torch_uses_the_mode() -> None:
    """According to MKL itself, if this torch has MKL."""
    products = "torch.ones(64, 64) @ torch.ones(64, 64)"
    lines = printed(f"import gossamer, torch; {products}", MKL_VERBOSE="1")
    if "CNR:" not in lines:
        pytest.skip("this torch has no MKL")
    assert "CNR:AUTO" in lines
    assert "CNR:OFF" in printed(f"import torch; {products}", MKL_VERBOSE="1")


@pytest.mark.parametrize(
    ("first", "environment", "mode"),
    [
        ("import gossamer", {}, "AUTO"),
        ("import torch", {}, "AUTO"),
        ("import torch; torch.ones(64, 64) @ torch.ones(64, 64)", {}, "off"),
        ("import torch; torch.ones(64, 64) @ torch.ones(64, 64)", {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),
        ("import gossamer", {"MKL_CBWR": ""}, "off"),
    ],
)
def test_run_records_mode_and_warns_when_off(
    first: str, environment: dict[str, str], mode: str, tmp_path: os.PathLike[str]
) -> None:
    code = f"""
{first}
import json, logging, sys
from gossamer import Experiment, run
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
done = run(Experiment.model_validate({SMALL!r}), {os.fspath(tmp_path)!r})
print(json.dumps(done.environment["numerics"]))
"""
    *lines, record = printed(code, **environment).splitlines()
    if json.loads(record)["mkl"] is None:
        pytest.skip("this torch has no MKL")
    assert json.loads(record)["mkl"] == mode
    assert any("bits may depend on memory alignment" in line for line in lines) is (mode == "off")


def test_tests_run_with_mode_set() -> None:
    assert numerics.mode() != "off"


def test_resume_records_numerics_and_warns_of_differences(
    cli: Cli, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(Experiment.model_validate({**SMALL, "checkpoint": {"every_rounds": 2}}), tmp_path)
    real = numerics.describe()
    monkeypatch.setattr(numerics, "describe", lambda **_: {**real, "processor": "Another One"})
    code, _, err = cli("resume", str(done.path), "--set", "stop.rounds=6")
    assert code == 0
    assert "bits may differ from those of an uninterrupted run: now Another One" in err
    [resumed] = load_run(done.path).environment["resumed"]
    assert resumed["numerics"]["processor"] == "Another One"
    assert "Another One" in (done.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_report_header_names_processor_and_mode(engine: str, cli: Cli, tmp_path: os.PathLike[str]) -> None:
    experiment = Experiment.model_validate({**SMALL, "engine": {"name": engine, "trainer": "sequential"}})
    done = run(experiment, tmp_path)
    code, _, _ = cli("report", str(done.path))
    assert code == 0
    page = (done.path / "report.html").read_text(encoding="utf-8")
    kicker = page.split('<p class="kicker">')[1].split("</p>")[0]
    described = done.environment["numerics"]
    assert described["processor"] in kicker
    assert f"{numerics.VARIABLE}={described['mkl']}" in kicker
