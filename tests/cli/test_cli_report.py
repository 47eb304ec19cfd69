"""gossamer report: pages, exports, times to levels."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import polars as pl
import pytest

from command_line import Cli


def test_report_of_two_runs_with_exports(cli: Cli, tmp_path: Path) -> None:
    runs = [
        json.loads(cli("run", "small.yaml", "--json", "--no-report", "--set", f"seed={s}")[1])["run"]
        for s in (1, 2)
    ]
    code, out, _ = cli("report", *runs, "--out", "both.html", "--figures", "figures")
    assert code == 0
    assert out.split()[-2:] == ["both.html", "figures"]
    assert (tmp_path / "both.html").stat().st_size < 200_000
    assert list((tmp_path / "figures").glob("*.pdf"))
    assert (tmp_path / "figures/captions.md").exists()


def test_joint_page_does_not_overwrite_pages_of_runs(cli: Cli, tmp_path: Path) -> None:
    first, second = (
        Path(json.loads(cli("run", "small.yaml", "--json", "--set", f"seed={s}")[1])["run"]) for s in (1, 2)
    )
    page = (first / "report.html").read_bytes()
    assert cli("report", str(first), str(second))[:2] == (0, "report.html\n")
    assert (tmp_path / "report.html").is_file()
    assert (first / "report.html").read_bytes() == page
    assert cli("report", str(second))[1] == f"{second / 'report.html'}\n"


def test_report_compares_times_to_levels_over_seeds(cli: Cli, tmp_path: Path) -> None:
    for name in ("d-psgd", "local"):
        for seed in (1, 2, 3):
            arguments = (
                "--set",
                f"algorithm.name={name}",
                "--set",
                f"seed={seed}",
                "--set",
                "evaluation.every_rounds=1",
            )
            assert cli("run", "small.yaml", "--quiet", "--no-report", *arguments)[0] == 0
    args = ("report", "runs", "--time-to", "test_loss=1000000,0", "--baseline", "local", "--out", "all.html")
    code, out, _ = cli(*args)
    assert code == 0
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    columns = ["time", "difference", "ratio", "sent", "difference", "ratio"]
    assert ["group", "runs", "seeds", "pairs", *columns] in lines
    reached, never = [line for line in lines if line[0] == "d-psgd"][1:]
    assert reached == ["d-psgd", "3/3", "3", "3", "0 ± 0 s", "0 ± 0 s", "–", "0 ± 0 B", "0 ± 0 B", "–"]
    assert never[:4] == ["d-psgd", "3/3", "3", "0 of 3 reached it"]
    assert out.splitlines()[-2:] == ["all.html", "all-comparison.csv"]
    assert 'id="comparison"' in (tmp_path / "all.html").read_text()
    report = json.loads(cli(*args, "--json")[1])
    assert report["comparison"] == "all-comparison.csv"
    times = [row for row in report["table"] if row["measure"].startswith("time_s to")]
    assert [(row["group"], row["measure"], row["known"]) for row in times] == [
        ("d-psgd", "time_s to test_loss=1e+06", 3),
        ("local", "time_s to test_loss=1e+06", 3),
        ("d-psgd", "time_s to test_loss=0", 0),
        ("local", "time_s to test_loss=0", 0),
    ]
    table = [
        {key: value for key, value in row.items() if not key.endswith("_values")} for row in report["table"]
    ]
    written = pl.read_csv(tmp_path / "all-comparison.csv")
    assert written.drop(pl.selectors.ends_with("_values")).to_dicts() == table
    assert float(written["mean_values"][0].split()[2]) == report["table"][0]["mean_values"][2]


def test_report_of_diverged_run_is_valid_json(cli: Cli, tmp_path: Path) -> None:
    """JSON has neither infinity nor NaN."""
    assert cli("run", "small.yaml", "--quiet", "--no-report")[0] == 0
    [table] = tmp_path.glob("runs/small/*/metrics.parquet")
    (table.parent / "status.json").unlink()  # it has the checksum of the table
    recorded = pl.read_parquet(table)
    last = pl.col("round") == recorded["round"].max()
    for value in (math.inf, math.nan):
        diverged = pl.when(last).then(pl.lit(value)).otherwise("test_loss")
        recorded.with_columns(test_loss=diverged).write_parquet(table)
        code, out, _ = cli("report", "runs", "--time-to", "test_loss=1000000", "--json")
        assert code == 0

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        final, _, _, time, _ = json.loads(out, parse_constant=refuse)["table"]
        assert (final["mean"], time["known"], time["mean"]) == (None, 1, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--baseline", "x"), "--baseline x: no group is called that; accepted: small"),
        (("--time-to", "test_loss"), "--time-to test_loss: accepted: METRIC=LEVEL"),
        (
            ("--time-to", "test_los=1"),
            "--time-to test_los: no run has recorded it (did you mean 'test_loss'?)",
        ),
        (("--area", "test_los"), "--area test_los: no run has recorded it (did you mean 'test_loss'?)"),
        (
            ("--animate", "a.gif", "--metrics", "consensus_distance"),
            "have not recorded consensus_distance; accepted as --metrics: ",
        ),
        (("--animate", "a.mp4"), "--animate a.mp4: accepted: a file *.gif or *.png"),
        (("--figures", "f", "--width", "3"), "--width 3: accepted: 1in to 40in"),
        (("--axis", "bytes"), "--axis: got no --figures; accepted: with --figures FOLDER"),
        (("--budget", "bytes=many"), "--budget bytes=many: accepted: bytes=N"),
        (("--by-hops", "test_loss"), "has no poisoned nodes; accepted: runs with poison"),
    ],
)
def test_bad_report_option_is_one_line(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert cli("run", "small.yaml", "--quiet", "--no-report", "--set", "stop.rounds=1")[0] == 0
    code, out, err = cli("report", "runs", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "report.html").exists()


SWEEP = """
name: spread
base:
  nodes: 5
  task: {name: digits, samples: 200}
  topology: {name: star}
  algorithm: {name: topology-aware}
  poison: [{name: rotate, share: 1.0, at: {rank: 1}}]
  evaluation: {every_rounds: 1, samples: 100}
  stop: {rounds: 2}
  engine: {name: simulate, trainer: sequential}
seeds: 2
cells:
  uniform: {topology.weights: uniform}
  degree: {topology.weights: {name: centrality, measure: degree}}
"""


@pytest.mark.slow
def test_by_hops_report_has_one_row_per_strategy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "spread.yaml").write_text(SWEEP)
    assert cli("sweep", "spread.yaml", "--jobs", "1", "--quiet")[0] == 0
    code, out, _ = cli("report", "runs/spread", "--by-hops", "ood_accuracy", "--out", "all.html")
    assert code == 0
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["0 hops", "1 hop", "2 hops"] in lines  # a leaf, the hub, and the other leaves
    table = {line[0]: line[1:] for line in lines if line[0] in ("uniform", "degree")}
    assert table.keys() == {"uniform", "degree"}
    assert all(re.match(r"[\d.]+, [\d.]+ %", cell) for row in table.values() for cell in row)  # two seeds
    rows = json.loads(cli("report", "runs/spread", "--by-hops", "ood_accuracy", "--json")[1])["by_hops"]
    assert [(row["group"], row["hops"], row["runs"], row["nodes"]) for row in rows] == [
        (group, hops, 2, nodes) for group in ("uniform", "degree") for hops, nodes in enumerate((1, 1, 3))
    ]
    assert all(row["area_half"] is None and len(row["area_values"]) == 2 for row in rows)
    options = ("--area", "ood_accuracy", "--metrics", "ood_accuracy", "--baseline", "uniform")
    out = cli("report", "runs/spread", *options, "--out", "all.html")[1]
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["group", "runs", "seeds", "pairs", "area / rounds", "difference", "ratio"] in lines
    assert ["area under ood accuracy, over rounds 0 to 2, against uniform"] in lines
    rows = json.loads(cli("report", "runs/spread", *options, "--json")[1])["table"]
    assert [(row["group"], row["measure"], row["runs"], row["pairs"]) for row in rows] == [
        (group, measure, 2, pairs)
        for measure in ("ood_accuracy", "area ood_accuracy")
        for group, pairs in (("uniform", 0), ("degree", 2))
    ]


def test_an_animation_is_written(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "small.yaml", "--quiet", "--no-report")[0] == 0
    args = ("report", "runs", "--animate", "loss.gif", "--metrics", "test_loss", "--out", "page.html")
    assert cli(*args)[1].split()[-3:] == ["page.html", "loss.gif", "page-comparison.csv"]
    assert (tmp_path / "loss.gif").read_bytes().startswith(b"GIF89a")
    assert json.loads(cli(*args, "--json")[1])["animation"] == "loss.gif"
