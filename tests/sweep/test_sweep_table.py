"""The tables of a sweep: one row per run, and one row per cell."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import sweeps
import yaml
from sweeps import make_sweep

from command_line import Cli
from gossamer import BadInput, Sweep, load_run, load_runs
from gossamer.results.finals import final_summary
from gossamer.results.folder import RunFolder
from gossamer.results.tidy import ASYNCHRONY
from gossamer.sweep.table import compared, metric_columns, states, summary, write_state


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    sweep = make_sweep(
        tmp_path_factory.mktemp("runs"),
        seeds=3,
        cells={"a": {}, "same": None},
        grid={"optimizer.lr": [0.05, 0.1]},
    )
    sweeps.run_here(sweep)
    return sweep


def test_results_have_one_row_per_run_with_its_summary(done: Sweep) -> None:
    table = done.results()
    assert table.height == len(done.planned) == 12
    assert table.columns[:3] == ["cell", "optimizer.lr", "seed"]
    assert table.schema["optimizer.lr"] == pl.Float64
    assert metric_columns(table)[:3] == ["test_loss", "train_loss", "consensus_distance"]
    assert set(metric_columns(table)[3:]) <= set(ASYNCHRONY)
    for row, run in zip(table.iter_rows(named=True), done.planned, strict=True):
        final = final_summary(load_run(done.folder / row["run"]))
        best = final.metrics["test_loss"].best
        assert best is not None
        assert (row["cell"], row["optimizer.lr"]) == (run.cell.labels["cell"], run.experiment.optimizer.lr)
        assert (row["seed"], row["status"], row["cause"]) == (run.experiment.seed, "done", None)
        assert (row["test_loss"], row["best_test_loss"]) == (final.metrics["test_loss"].mean, best.mean)
        assert (row["rounds"], row["time_s"], row["bytes_sent"]) == (2, final.time_s, final.bytes_sent)
        assert row["wall_s"] == final.wall_s
        for fate in ("received", "superseded", "cancelled", "lost"):
            assert row[f"messages_{fate}"] == final.messages[fate]
        assert row["messages_received"] > 0
        assert "best_idle_share" not in row
    # Cells of equal experiments share their runs.
    assert table.filter(cell="a")["run"].to_list() == table.filter(cell="same")["run"].to_list()


def test_result_files_hold_the_table(done: Sweep) -> None:
    table = done.results()
    assert pl.read_parquet(done.folder / "results.parquet").equals(table)
    lines = (done.folder / "results.csv").read_text().splitlines()
    assert lines[0] == ",".join(table.columns)
    assert len(lines) == 13


def test_summary_counts_finished_runs_with_the_metric() -> None:
    table = pl.DataFrame(
        {
            "cell": ["a", "a", "a", "b"],
            "seed": [1, 2, 3, 1],
            "status": ["done", "done", "failed", "pending"],
            "cause": [None, None, "it broke", None],
            "test_loss": [2.0, None, 9.0, None],
            "time_s": [1, 3, 9, None],
            "run": ["x", "y", "z", None],
        }
    )
    assert summary(table, "test_loss").rows() == [("a", 1, 2.0, None, None), ("b", 0, None, None, None)]
    # Two seeds have no interval.
    assert summary(table, "time_s").select("mean", "low").rows() == [(2, None), (None, None)]
    diverged = table.with_columns(status=pl.Series(["done", "diverged", "failed", "pending"]))
    assert summary(diverged, "test_loss")["mean"].to_list() == [None, None]


def test_summary_has_mean_and_interval_of_every_cell(done: Sweep) -> None:
    table = done.summary("test_loss")
    assert table.columns == ["cell", "optimizer.lr", "runs", "mean", "low", "high"]
    assert table.select("cell", "optimizer.lr", "runs").rows() == [
        ("a", 0.05, 3),
        ("a", 0.1, 3),
        ("same", 0.05, 3),
        ("same", 0.1, 3),
    ]
    values = done.results().filter(cell="a").filter(pl.col("optimizer.lr") == 0.1)["test_loss"]
    mean, low, high = table.row(1)[3:]
    assert mean == pytest.approx(values.mean())
    # Student's t with two degrees of freedom, from a printed table.
    assert high - mean == pytest.approx(mean - low)
    assert high - mean == pytest.approx(4.3027 * values.std(ddof=1) / 3**0.5, rel=1e-4)


def test_summary_of_unknown_metric_is_refused(done: Sweep) -> None:
    with pytest.raises(
        BadInput, match=r"metric: got 'test_los' \(did you mean 'test_loss'\?\); accepted: .*bytes_sent"
    ):
        done.summary("test_los")
    with pytest.raises(BadInput, match="metric: got 'status'; accepted"):
        done.summary("status")


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    sweeps.run_here(sweep)
    [row] = sweep.summary("test_loss").rows(named=True)
    assert (row["runs"], row["low"], row["high"]) == (1, None, None)
    assert row["mean"] > 0


def test_unfinished_runs_have_rows_but_do_not_affect_the_mean(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, seeds=3)
    sweeps.run_here(sweep)
    first, second, _ = (states(sweep)[planned.run].folder for planned in sweep.planned)
    assert first is not None
    assert second is not None
    RunFolder.open(first).write_status("failed", error="it broke\nbadly")
    (second / "status.json").unlink()
    table = sweep.results()
    assert table["status"].to_list() == ["failed", "interrupted", "done"]
    assert table["cause"].to_list() == ["it broke badly", None, None]
    assert table["test_loss"].null_count() == 0
    [row] = summary(table, "test_loss").rows(named=True)
    assert (row["runs"], row["mean"]) == (1, table["test_loss"][2])


def test_sweep_never_run_has_only_pending_rows(tmp_path: Path) -> None:
    table = make_sweep(tmp_path, seeds=2, grid={"topology": ["ring", "complete"]}).results()
    assert table.select("topology", "seed", "status").rows() == [
        ("ring", 1, "pending"),
        ("ring", 2, "pending"),
        ("complete", 1, "pending"),
        ("complete", 2, "pending"),
    ]
    assert summary(table, "time_s")["runs"].to_list() == [0, 0]


def test_damaged_run_has_null_values_and_hides_no_other(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, seeds=2)
    sweeps.run_here(sweep)
    folder = states(sweep)[sweep.planned[0].run].folder
    assert folder is not None
    (folder / "metrics.parquet").write_bytes(b"no table")
    assert sweep.results()["test_loss"].is_null().to_list() == [True, False]


def test_labels_of_mixed_kinds_are_text(tmp_path: Path) -> None:
    table = make_sweep(tmp_path, grid={"batch_size": [4, "full"], "optimizer.lr": [1, 0.5]}).results()
    assert table["batch_size"].unique(maintain_order=True).to_list() == ["4", "full"]
    assert table["optimizer.lr"].unique(maintain_order=True).to_list() == [1.0, 0.5]


def test_equal_values_have_zero_width_interval() -> None:
    table = pl.DataFrame({"cell": ["a"] * 3, "seed": [1, 2, 3], "status": ["done"] * 3, "cause": [None] * 3})
    intervals = summary(table.with_columns(test_accuracy=pl.lit(0.9), run=pl.lit("x")), "test_accuracy")
    assert intervals.select("mean", "low", "high").row(0) == (0.9, 0.9, 0.9)


@pytest.mark.slow
def test_report_and_sweep_count_the_same_runs(tmp_path: Path, cli: Cli) -> None:
    sweep = make_sweep(
        tmp_path / "runs", seeds=3, cells={"a": {}, "b": {"optimizer.lr": 0.01}, "c": {"batch_size": 4}}
    )
    sweeps.run_here(sweep)
    for number, status in ((1, "diverged"), (5, "failed")):
        folder = states(sweep)[sweep.planned[number].run].folder
        assert folder is not None
        RunFolder.open(folder).write_status(status, error="bad luck")  # type: ignore[arg-type]
    write_state(sweep, states(sweep))
    printed = compared(sweep).rows
    code, out, _ = cli("report", str(sweep.folder), "--json", "--out", str(tmp_path / "page.html"))
    assert code == 0
    reported = pl.DataFrame(json.loads(out)["table"], schema=printed.schema)
    counts = reported.filter(measure="test_loss").select(
        "group", "runs", "counted", "diverged", "units", "pairs"
    )
    assert counts.rows() == [("a", 3, 2, 1, 2, 0), ("b", 3, 2, 0, 2, 0), ("c", 3, 3, 0, 3, 0)]
    assert reported.equals(printed)
    assert len(load_runs(sweep.folder)) == 7
    with_failed = json.loads(cli("report", str(sweep.folder), "--json", "--unfinished")[1])["table"]
    assert [row["counted"] for row in with_failed if row["measure"] == "test_loss"] == [2, 3, 3]


def test_runs_that_show_other_models_are_never_averaged_with_the_rest(tmp_path: Path, cli: Cli) -> None:
    """The first two seeds of the grid were run by a version that showed the models of the instant."""
    grid = {"evaluation.every_rounds": None, "evaluation.every_s": 0.5}
    sweep = make_sweep(tmp_path / "runs", seeds=3, cells={"grid": grid, "rounds": {}})
    sweeps.run_here(sweep)
    for planned in sweep.planned[:2]:
        folder = states(sweep)[planned.run].folder
        assert folder is not None
        file = folder / "experiment.yaml"
        recorded = yaml.safe_load(file.read_text())
        del recorded["evaluation"]["of"]
        file.write_text(yaml.safe_dump(recorded, sort_keys=False))
    write_state(sweep, states(sweep))
    printed = compared(sweep).rows
    counts = printed.filter(measure="test_loss").select("group", "counted", "known", "pairs")
    # The second cell has one baseline that shows the same models as itself.
    assert counts.rows() == [("grid, of instant", 2, 2, 0), ("grid, of round", 1, 1, 0), ("rounds", 3, 3, 1)]
    assert sweep.results()["shown"].to_list() == [*["instant"] * 2, *["round"] * 4]
    assert sweep.summary("test_loss")["mean"].is_null().to_list() == [True, False]
    code, out, _ = cli("report", str(sweep.folder), "--json", "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert pl.DataFrame(json.loads(out)["table"], schema=printed.schema).equals(printed)
