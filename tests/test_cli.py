"""The command line, as a user meets it: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import yaml

import gossamer
from gossamer import Experiment, load_run
from gossamer.cli import main
from gossamer.progress import numerals, spread

Cli = Callable[..., tuple[int, str, str]]

SMALL = """
name: small
nodes: 4
task: {name: least-squares, samples: 64, features: 5}
topology: {name: ring}
algorithm: {name: d-psgd}
optimizer: {name: sgd, lr: 0.1}
batch_size: full
evaluation: {every_rounds: 2}
stop: {rounds: 4}
engine: {name: simulate, trainer: sequential}
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run gossamer with arguments in a folder that has small.yaml; gives exit code, stdout, stderr."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gossamer", *arguments])
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        else:
            code = 0
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return call


def test_run_records_and_names_the_report(cli: Cli, tmp_path: Path) -> None:
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


def test_json_is_one_object_and_quiet_is_quiet(cli: Cli) -> None:
    code, out, err = cli("run", "small.yaml", "--json", "--no-report")
    said = json.loads(out)
    assert (code, said["status"], said["nodes"], said["rounds"], said["report"], err) == (
        0,
        "done",
        4,
        4,
        None,
        "",
    )
    assert Path(said["run"]).is_dir()
    assert cli("run", "small.yaml", "--quiet", "--no-report") == (0, "", "")


def test_a_profile_says_where_the_time_went(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("run", "small.yaml", "--profile")
    assert code == 0
    parts = {"train", "mix", "evaluate", "record", "events"}
    assert parts <= {line.split()[0] for line in out.splitlines() if line.strip().endswith("%)")}
    assert re.search(r"^peak memory +\d+\.\d\d GiB$", out, re.MULTILINE)
    [folder] = (tmp_path / "runs" / "small").iterdir()
    done = load_run(folder)
    assert set(done.profile) == parts - {"events"}
    assert 0 < sum(done.profile.values()) <= (done.wall_s or 0)


def test_the_record_runs_again_to_the_same_bits(cli: Cli) -> None:
    first = json.loads(cli("run", "small.yaml", "--json", "--no-report", "--set", "engine.trainer=auto")[1])
    recorded = Path(first["run"]) / "experiment.yaml"
    assert yaml.safe_load(recorded.read_text())["engine"]["trainer"] in ("sequential", "batched")
    second = json.loads(cli("run", str(recorded), "--json", "--no-report")[1])
    a, b = load_run(Path(first["run"])).parameters, load_run(Path(second["run"])).parameters
    assert a is not None
    assert b is not None
    assert a.equal(b)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "nodse=3"], "nodse: unknown field (did you mean 'nodes'?); accepted: "),
        (
            ["--set", "algorithm.local_stpes=3"],
            "algorithm.local_stpes: unknown field (did you mean 'local_steps'?)",
        ),
        (["--set", "algorithm.name=d-pgsd"], "algorithm: unknown name 'd-pgsd' (did you mean 'd-psgd'?)"),
        (
            ["--set", "topology={name: random-regular, degree: 9}"],
            "topology.degree: 9 with 4 nodes; accepted: ",
        ),
        (["--set", "task.name=mnist", "--set", "data_root=nowhere"], "nowhere does not exist"),
        (["--set", "stop.rounds=many"], "stop.rounds: got 'many'; accepted: a valid integer"),
        (["--set", "stop={}"], "stop.rounds or stop.time_s"),
        (["--set", "rounds"], "--set rounds: accepted: a.b=value"),
        (["--set", "batch_size=0"], "batch_size: got 0; accepted: greater than or equal to 1 or 'full'"),
        (["--engine", "cluster"], "engine.name: got 'cluster'; accepted: simulate, processes"),
        (["--set", "evaluation.nodes=[7]"], "evaluation.nodes: got [7]; accepted: ranks 0 to 3"),
        (
            ["--set", "stop.target={metric: test_acuracy, value: 1}"],
            "stop.target.metric: got 'test_acuracy'; accepted: ",
        ),
        (["--set", "partition={name: dirichlet, alpha: 1}"], "partition"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, out, err = cli("run", "small.yaml", *arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_a_task_function_that_raises_is_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "shelf.py").write_text("def books():\n    raise LookupError('the shelf is empty')\n")
    code, out, err = cli("run", "small.yaml", "--set", "task.name=shelf:books", "--engine", engine)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: task: 'shelf:books' raised LookupError: the shelf is empty (shelf.py, line 2)"
    ]
    assert not (tmp_path / "runs").exists()


def test_a_missing_file_and_a_folder_that_is_no_run(cli: Cli) -> None:
    assert cli("run", "none.yaml") == (
        2,
        "",
        "error: none.yaml: No such file or directory; accepted: a YAML experiment file\n",
    )
    code, _, err = cli("report", "nothing")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "nothing" in err


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
    *_, kept, page = err.splitlines()
    folder = Path(kept.removeprefix("what was recorded is kept in "))
    assert page == f"a page of it: gossamer report {folder}"
    done = load_run(folder)
    assert done.status == "failed"
    assert done.metrics.filter(pl.col("round") == 2).height > 0


def test_report_of_two_runs_with_exports(cli: Cli, tmp_path: Path) -> None:
    runs = [
        json.loads(cli("run", "small.yaml", "--json", "--no-report", "--set", f"seed={s}")[1])["run"]
        for s in (1, 2)
    ]
    code, out, _ = cli("report", *runs, "--out", "both.html", "--png", "png", "--csv", "csv")
    assert code == 0
    assert out.split() == ["both.html", "png", "csv"]
    assert (tmp_path / "both.html").stat().st_size > 1_000_000  # plotly is in it
    assert list((tmp_path / "png").glob("*.png"))
    assert list((tmp_path / "csv").glob("*.csv"))


def test_a_page_of_several_runs_takes_the_place_of_none_of_theirs(cli: Cli, tmp_path: Path) -> None:
    first, second = (
        Path(json.loads(cli("run", "small.yaml", "--json", "--set", f"seed={s}")[1])["run"]) for s in (1, 2)
    )
    own = (first / "report.html").read_bytes()
    assert cli("report", str(first), str(second))[:2] == (0, "report.html\n")
    assert (tmp_path / "report.html").is_file()
    assert (first / "report.html").read_bytes() == own
    assert cli("report", str(second))[1] == f"{second / 'report.html'}\n"


def test_a_run_that_is_interrupted_says_so(cli: Cli, tmp_path: Path) -> None:
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
    assert re.match(r"STOPPED {14}at round [56] of 9, ", out)  # nodes 0 and 1 were a round ahead
    code, out, _ = cli(*stopping, "algorithm.name=stops:Stops", "--json")
    assert (code, json.loads(out)["status"]) == (130, "stopped")


def test_a_second_interrupt_ends_the_run_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gossamer.api.run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts beside ignores it
    try:
        code, out, err = cli("run", "small.yaml")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err) == (130, "", "error: interrupted\n")


def test_quiet_keeps_the_log_quiet_too(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    automatic = ("run", "small.yaml", "--no-report", "--set", "engine.trainer=auto")
    assert cli(*automatic, "--quiet")[0] == 0
    assert caplog.messages == []
    assert cli(*automatic, "--json")[0] == 0
    assert "trainer: " in caplog.text
    assert logging.getLogger("gossamer").level == logging.INFO  # for the tests to come


def test_on_a_terminal_a_bar_says_what_its_times_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = cli("run", "small.yaml", "--no-report")
    assert code == 0
    for said in ("round 4/4", "elapsed", "left", "virtual time", "sent"):
        assert said in err


def test_the_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"gossamer {gossamer.__version__}\n", "")


def test_descriptions_are_whole_sentences(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    text = cli("list")[1]
    assert "`" not in text
    assert re.search(r"^wrapper +\(none\)", text, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "200")
    assert "then the exact average over all nodes (the topology is not used)." in cli("list", "algorithm")[1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=d-psgd", ""),
        ("algorithm={name: epidemic-local, degree: 2}", "epidemic-local does not use the topology"),
        ("algorithm=all-reduce", "all-reduce does not use the topology"),
        (
            "topology={name: random-regular, degree: 2, every_rounds: 3}",
            "the graph changes during the run: the figures are of round 0 alone",
        ),
        ("topology=one-peer-exponential", "the graph changes during the run"),
    ],
)
def test_figures_of_a_topology_say_what_they_are_of(cli: Cli, override: str, said: str) -> None:
    code, out, _ = cli("topology", "small.yaml", "--set", override)
    assert code == 0
    notes = [line for line in out.splitlines() if line.startswith("note")]
    assert [said in note for note in notes] == ([True] if said else [])


def test_list_and_topology(cli: Cli, tmp_path: Path) -> None:
    listed = json.loads(cli("list", "--json")[1])
    assert set(listed["algorithm"]) >= {"d-psgd", "fedavg", "all-reduce", "local", "centralized"}
    assert listed["algorithm"]["d-psgd"]["local_steps"] == "1"
    assert "random-regular" in cli("list", "topology")[1]
    assert cli("list", "algoritm")[0] == 2
    code, out, _ = cli("topology", "small.yaml", "--json", "--png", str(tmp_path / "graph.png"))
    measures = json.loads(out)
    assert code == 0
    # A ring of four under Metropolis-Hastings: eigenvalues 1, 1/3, 1/3, -1/3.
    assert measures["spectral_gap"] == pytest.approx(2 / 3)
    assert measures["diameter"] == 2
    assert (tmp_path / "graph.png").read_bytes()[:4] == b"\x89PNG"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, gossamer.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_data_root_on_the_command_line_is_relative_to_the_working_directory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "e.yaml").write_text(SMALL + "data_root: data\n")
    in_file = Experiment.load("deep/e.yaml")
    on_line = Experiment.load("deep/e.yaml", ["data_root=data"])
    assert in_file.data_root == tmp_path / "deep" / "data"
    assert on_line.data_root == tmp_path / "data"


def test_times_to_levels_over_seeds(cli: Cli, tmp_path: Path) -> None:
    for name in ("d-psgd", "local"):
        for seed in (1, 2):
            arguments = (
                "--set",
                f"algorithm.name={name}",
                "--set",
                f"seed={seed}",
                "--set",
                "evaluation.every_rounds=1",
            )
            assert cli("run", "small.yaml", "--quiet", "--no-report", *arguments)[0] == 0
    asked = ("report", "runs", "--time-to", "test_loss=1000000,0", "--baseline", "local", "--out", "all.html")
    code, out, _ = cli(*asked)
    assert code == 0
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["reached", "time / s", "times as fast", "sent", "at the end"] in lines
    [there, never] = [line for line in lines if line[0] == "d-psgd"]
    assert there[:4] == ["d-psgd", "2/2", "0 ± 0", "–"]  # at once: nothing can be said of how much faster
    assert never[:4] == ["d-psgd", "0/2", "> 0.04", "–"]
    assert out.splitlines()[-2:] == ["all.html", "all-time-to.csv"]
    assert 'id="time-to"' in (tmp_path / "all.html").read_text()
    said = json.loads(cli(*asked, "--json")[1])
    assert said["time_to"] == "all-time-to.csv"
    assert [(row["group"], row["level"], row["reached"]) for row in said["table"]] == [
        *(("d-psgd", 1e6, 2), ("local", 1e6, 2), ("d-psgd", 0.0, 0), ("local", 0.0, 0)),
    ]
    assert pl.read_csv(tmp_path / "all-time-to.csv").to_dicts() == said["table"]
    by_seed = json.loads(cli(*asked[:4], "--group-by", "seed", "--json")[1])["table"]
    assert [(row["group"], row["runs"]) for row in by_seed][:2] == [("seed 1", 2), ("seed 2", 2)]


def test_a_report_of_a_run_that_diverged_is_json(cli: Cli, tmp_path: Path) -> None:
    """JSON knows no infinity, and no NaN."""
    assert cli("run", "small.yaml", "--quiet", "--no-report")[0] == 0
    [table] = tmp_path.glob("runs/small/*/metrics.parquet")
    recorded = pl.read_parquet(table)
    last = pl.col("round") == recorded["round"].max()
    for value in (math.inf, math.nan):
        diverged = pl.when(last).then(pl.lit(value)).otherwise("test_loss")
        recorded.with_columns(test_loss=diverged).write_parquet(table)
        code, out, _ = cli("report", "runs", "--time-to", "test_loss=1000000", "--json")
        assert code == 0

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        [row] = json.loads(out, parse_constant=refuse)["table"]
        assert (row["reached"], row["time_s"], row["final"]) == (1, 0.0, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--baseline", "x"), "--baseline: accepted together with --time-to"),
        (("--time-to", "test_loss"), "--time-to test_loss: accepted: METRIC=LEVEL"),
        (
            ("--time-to", "test_los=1"),
            "--time-to test_los: no run has recorded it (did you mean 'test_loss'?)",
        ),
        (
            ("--time-to", "test_loss=1", "--baseline", "x"),
            "--baseline x: 0 groups are called that; accepted: small",
        ),
        (("--timeline", "t.svg"), "no timeline was recorded"),
        (("--group-by", "sead"), "--group-by sead: no run has it (did you mean 'seed'?)"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert cli("run", "small.yaml", "--quiet", "--no-report", "--set", "stop.rounds=1")[0] == 0
    code, out, err = cli("report", "runs", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "report.html").exists()


def test_small_numbers_keep_their_digits(cli: Cli) -> None:
    out = cli("run", "small.yaml", "--no-report", "--set", "optimizer.lr=0.0001")[1]
    summary = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert re.fullmatch(r"\d\.\d{3}e-\d\d", summary["consensus distance"])
    assert "idle share" not in summary
    assert numerals(0.5, 1e-9) == ["0.5000", "0.0000"]
    assert numerals(2e-4, 1e-6) == ["2.000e-04", "1.000e-06"]
    assert numerals(0.0) == ["0.0000"]
    assert spread({"test_loss": [1e-5, 3e-5]}) == "test loss 2.000e-05 (1.000e-05 to 3.000e-05)"
