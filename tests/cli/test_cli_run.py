"""gossamer run: output and exit codes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path

import polars as pl
import pytest
import yaml

from command_line import SMALL, Cli
from gossamer import Experiment, load_run
from gossamer.results.formatting import numerals


def test_run_writes_record_and_names_report(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", "small.yaml")
    assert code == 0
    [folder] = (tmp_path / "runs" / "small").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "experiment.yaml",
        "environment.json",
        "setup.json",
        "metrics.parquet",
        "events.parquet",
        "models.safetensors",
        "status.json",
        "report.html",
    }
    assert not list((folder / "segments").iterdir()) if (folder / "segments").exists() else True
    assert str(folder / "report.html").removeprefix(f"{tmp_path}/") in out.splitlines()[-1]
    assert "round 4  virtual time " in err
    assert "consensus distance" in err
    rounds = pl.read_parquet(folder / "metrics.parquet").filter(pl.col("node") == 0)["round"].to_list()
    assert rounds == [0, 2, 4]


def test_json_prints_one_object_and_quiet_prints_nothing(cli: Cli) -> None:
    code, out, err = cli("run", "small.yaml", "--json", "--no-report")
    summary = json.loads(out)
    assert (code, summary["status"], summary["nodes"], summary["rounds"], summary["report"], err) == (
        0,
        "done",
        4,
        4,
        None,
        "",
    )
    assert Path(summary["run"]).is_dir()
    assert cli("run", "small.yaml", "--quiet", "--no-report") == (0, "", "")


def test_profile_shows_where_time_went(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("run", "small.yaml", "--profile")
    assert code == 0
    parts = {"train", "mix", "evaluate", "record", "events"}
    assert parts <= {line.split()[0] for line in out.splitlines() if line.strip().endswith("%)")}
    assert re.search(r"^peak memory +\d+\.\d\d GiB$", out, re.MULTILINE)
    [folder] = (tmp_path / "runs" / "small").iterdir()
    done = load_run(folder)
    assert set(done.figures["profile"]) == parts - {"events"}
    assert 0 < sum(done.figures["profile"].values()) <= (done.wall_s or 0)


def test_recorded_experiment_reproduces_bits(cli: Cli) -> None:
    first = json.loads(cli("run", "small.yaml", "--json", "--no-report", "--set", "engine.trainer=auto")[1])
    recorded = Path(first["run"]) / "experiment.yaml"
    assert yaml.safe_load(recorded.read_text())["engine"]["trainer"] != "auto"
    second = json.loads(cli("run", str(recorded), "--json", "--no-report")[1])
    a, b = load_run(Path(first["run"])).parameters, load_run(Path(second["run"])).parameters
    assert a is not None
    assert b is not None
    assert a.equal(b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "nodse=3"], "nodse: unknown field (did you mean 'nodes'?); accepted: "),
        (
            ["--set", "algorithm.local_stpes=3"],
            "algorithm.local_stpes: unknown field (did you mean 'local_steps'?)",
        ),
        (["--set", "algorithm.name=d-pgsd"], "algorithm: unknown name 'd-pgsd' (did you mean 'd-psgd'?)"),
        (
            ["--set", "topology={name: random-regular, degree: 9}"],
            "topology.degree: 9 for 4 nodes; accepted: ",
        ),
        (
            ["--set", "task.name=mnist", "--set", "data_root=nowhere"],
            "is not a folder; accepted: a folder with hub/",
        ),
        (["--set", "stop.rounds=many"], "stop.rounds: got 'many'; accepted: an integer"),
        (["--set", "stop={}"], "stop.rounds, stop.time_s, stop.bytes"),
        (["--set", "rounds"], "--set rounds: accepted: a.b=value"),
        (["--set", "batch_size=0"], "batch_size: got 0; accepted: greater than or equal to 1 or 'full'"),
        (["--engine", "cluster"], "'cluster' is not one of 'simulate', 'processes'"),
        (["--set", "evaluation.nodes=[7]"], "evaluation.nodes: got [7]; accepted: ranks 0 to 3"),
        (
            ["--set", "stop.target={metric: test_acuracy, value: 1}"],
            "stop.target.metric: got 'test_acuracy'; accepted: ",
        ),
        (["--set", "partition={name: dirichlet, alpha: 1}"], "partition"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, out, err = cli("run", "small.yaml", *arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize(
    "wrong",
    ["stop.rounds=many", "task={name: digits, samples: 100000}"],  # found here and by the fork server
)
def test_bad_input_ends_the_fork_server(cli: Cli, wrong: str) -> None:
    code, out, err = cli("run", "small.yaml", "--engine", "processes", "--set", wrong)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


@pytest.mark.usefixtures("no_process_is_left")
def test_run_of_real_processes_is_resumed(cli: Cli, tmp_path: Path) -> None:
    started = ("run", "small.yaml", "--engine", "processes", "--set", "checkpoint.every_rounds=1", "--quiet")
    assert cli(*started)[0] == 0
    [folder] = (tmp_path / "runs").glob("*/*")
    code, out, err = cli("resume", str(folder), "--set", "stop.rounds=1")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert cli("resume", str(folder), "--set", "stop.rounds=5", "--quiet") == (0, "", "")
    assert load_run(folder).metrics["round"].max() == 5


def test_experiment_is_read_from_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """A pipe can be read only once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(SMALL,))
    writer.start()
    code, _, err = cli("run", str(pipe), "--quiet")
    writer.join()
    assert (code, err) == (0, "")


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_raising_task_function_is_one_line_and_exit_code_2(cli: Cli, tmp_path: Path, engine: str) -> None:
    (tmp_path / "shelf.py").write_text("def books():\n    raise LookupError('the shelf is empty')\n")
    code, out, err = cli("run", "small.yaml", "--set", "task.name=shelf:books", "--engine", engine)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: task: 'shelf:books' raised LookupError: the shelf is empty (shelf.py, line 2)"
    ]
    assert not (tmp_path / "runs").exists()


def test_untyped_setting_is_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "untyped_setting.py").write_text(
        "import gossamer\n\n\nclass Mine(gossamer.Algorithm):\n    rate = 0.1\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    code, out, err = cli("run", "small.yaml", "--set", "algorithm.name=untyped_setting:Mine")
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: algorithm 'untyped_setting:Mine': A non-annotated attribute")
    assert "`rate = 0.1` (untyped_setting.py, line 4); accepted: a type" in line


def test_a_failed_run_keeps_its_record(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(
        "from gossamer import Algorithm\n"
        "class Breaks(Algorithm):\n"
        "    async def run(self, node):\n"
        "        async for r in node.rounds():\n"
        "            await node.train()\n"
        "            if r == 3 and node.rank == 2:\n"
        "                raise RuntimeError('out of cheese')\n"
    )
    code, out, err = cli("run", "small.yaml", "--set", "algorithm.name=breaks:Breaks")
    assert (code, out) == (1, "")
    assert (
        "error: node 2 failed in round 3: RuntimeError: out of cheese (breaks.py, line 7)" in err.splitlines()
    )
    hint = "The record so far was kept. To view it: gossamer report "
    done = load_run(err.splitlines()[-1].removeprefix(hint))
    assert done.status == "failed"
    assert done.metrics.filter(pl.col("round") == 2).height > 0


def test_interrupted_run_is_reported_as_stopped(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(
        "import signal\n"
        "from gossamer import Algorithm\n"
        "class Stops(Algorithm):\n"
        "    async def run(self, node):\n"
        "        async for r in node.rounds():\n"
        "            await node.train()\n"
        "            if r == 5 and node.rank == 2:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "                await node.sleep(1000)\n"
    )
    stopping = ("run", "small.yaml", "--no-report", "--set", "stop.rounds=9", "--set")
    code, out, _ = cli(*stopping, "algorithm.name=stops:Stops")
    assert code == 130
    assert re.match(r"STOPPED {14}at round [56] of 9; ", out)  # nodes 0 and 1 were a round ahead
    assert "To continue" not in out
    code, out, _ = cli(*stopping, "algorithm.name=stops:Stops", "--set", "checkpoint.every_rounds=2")
    folder = re.search(r"^run +(\S+)$", out, re.MULTILINE)[1]
    assert out.splitlines()[-1].split(maxsplit=2) == ["to", "continue", f"gossamer resume {folder}"]
    code, out, _ = cli(*stopping, "algorithm.name=stops:Stops", "--json")
    assert (code, json.loads(out)["status"]) == (130, "stopped")


def test_diverging_run_is_reported_as_diverged(cli: Cli, tmp_path: Path) -> None:
    wild = ("run", "small.yaml", "--set", "optimizer.lr=1e30", "--set", "algorithm.local_steps=9")
    code, out, _ = cli(*wild)
    assert code == 3
    assert re.match(r"status {15}diverged: the model of node \d is not finite after \d rounds", out)
    [folder] = (tmp_path / "runs" / "small").iterdir()
    page = (folder / "report.html").read_text()
    assert re.search(r"diverged</strong>, and was ended: the model of node \d is not finite", page)
    code, out, _ = cli(*wild, "--json", "--no-report")
    assert (code, json.loads(out)["status"]) == (3, "diverged")


def test_keyboard_interrupt_exits_with_code_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gossamer.api.run", run)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background process of a shell ignores the signal
    try:
        code, out, err = cli("run", "small.yaml")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err) == (130, "", "error: interrupted\n")


def test_quiet_silences_the_log(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    automatic = ("run", "small.yaml", "--no-report", "--set", "engine.trainer=auto")
    assert cli(*automatic, "--quiet")[0] == 0
    assert caplog.messages == []
    assert cli(*automatic, "--json")[0] == 0
    assert "trainer: " in caplog.text
    assert logging.getLogger("gossamer").level == logging.INFO


def test_terminal_bar_labels_its_times(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    code, _, err = cli("run", "small.yaml", "--no-report")
    assert code == 0
    for text in ("round 4/4", "left", "virtual time", "test loss"):
        assert text in err


def test_command_line_data_root_is_relative_to_working_directory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "e.yaml").write_text(SMALL + "data_root: data\n")
    in_file = Experiment.load("deep/e.yaml")
    on_line = Experiment.load("deep/e.yaml", ["data_root=data"])
    assert in_file.data_root == tmp_path / "deep" / "data"
    assert on_line.data_root == tmp_path / "data"


def test_small_numbers_keep_their_digits(cli: Cli) -> None:
    out = cli("run", "small.yaml", "--no-report", "--set", "optimizer.lr=0.0001")[1]
    summary = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert re.fullmatch(r"\d\.\d{3}e-\d\d", summary["consensus distance"])
    assert "idle share" not in summary
    assert numerals(0.5, 1e-9) == ["0.5000", "0.0000"]
    assert numerals(2e-4, 1e-6) == ["2.000e-04", "1.000e-06"]
    assert numerals(0.0) == ["0.0000"]
