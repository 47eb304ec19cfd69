from __future__ import annotations

import inspect
import json
import logging
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.errors import BadInput
from gossamer.results.folder import RunFolder
from gossamer.results.formatting import bytes_text
from gossamer.results.groups import labels
from gossamer.results.run import Run, load_run, load_runs
from gossamer.results.run_data import model_of
from synthetic_run import PARAMETERS, summary, synthetic


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = load_run(synthetic(tmp_path, nodes=6, rounds=(0, 10), changing=True).path)
    assert run.name == "quickstart"
    assert run.status == "done"
    assert run.error is None
    assert run.wall_s == pytest.approx(0.33)
    assert run.nodes == 6
    assert run.experiment["topology"] == {"name": "random-regular", "degree": 4}
    assert run.environment["command"] == ["gossamer", "run"]
    assert sorted(run.setup["graphs"]) == ["0", "10"]
    assert run.metrics.height == 14
    assert run.parameters is not None
    assert run.parameters.shape == (6, PARAMETERS)
    assert run.setup["parameters"] == PARAMETERS
    assert run.virtual


def test_a_killed_run_is_read_from_its_segments(tmp_path: Path) -> None:
    done = synthetic(tmp_path / "done", nodes=4, rounds=(0, 10), lost=(1,))
    killed = load_run(synthetic(tmp_path / "killed", nodes=4, rounds=(0, 10), lost=(1,), status=None).path)
    assert not (killed.path / "metrics.parquet").exists()
    assert killed.status == "running or killed"
    assert killed.metrics.equals(done.metrics)
    assert killed.events.equals(done.events)
    assert killed.parameters is None
    assert killed.setup["parameters"] == PARAMETERS
    assert killed.wall_s == pytest.approx(0.33, abs=1e-3)  # of the last row


def test_lost_nodes_are_part_of_the_outcome(tmp_path: Path) -> None:
    assert synthetic(tmp_path, nodes=4, rounds=(0, 10)).outcome == "done"
    one = synthetic(tmp_path, nodes=4, rounds=(0, 10), lost=(1,))
    assert (one.lost, one.outcome) == ([1], "done, 1 node lost")
    two = synthetic(tmp_path, nodes=4, rounds=(0, 10), lost=(3, 1), status=None)
    assert (two.lost, two.outcome) == ([1, 3], "running or killed, 2 nodes lost")
    with RunFolder.open(two.path).segment("events") as events:
        for node, event in ((1, "returned"), (3, "returned"), (3, "lost"), (0, "left")):
            events.append({"time_s": 9.0, "node": node, "event": event, "detail": event})
    later = load_run(two.path)
    assert (later.lost, later.away) == ([3], [0, 3])


def test_folder_with_one_run_loads_that_run(tmp_path: Path) -> None:
    first = synthetic(tmp_path, name="b", nodes=1, rounds=(0,))
    assert load_run(tmp_path / "b") == load_run(str(tmp_path)) == first
    second = synthetic(tmp_path, name="a", nodes=1, rounds=(0,))
    with pytest.raises(
        BadInput, match=rf": 2 runs; accepted: one of them, such as b/{first.id}, a/{second.id}$"
    ):
        load_run(tmp_path)
    assert load_run(tmp_path / "b") == first


def test_mean_model_excludes_lost_nodes() -> None:
    parameters = torch.tensor([[1.0, 2.0], [math.nan, math.nan], [4.0, 5.0]])
    mean = model_of({"parameters": parameters}, None)
    assert mean.parameters.tolist() == [2.5, 3.5]
    assert mean.buffers.shape == (0,)
    both = {"parameters": parameters, "buffers": torch.tensor([[1.0], [math.nan], [2.0]])}
    assert model_of(both, None).buffers.tolist() == [1.5]
    assert model_of(both, 2).buffers.tolist() == [2.0]
    with pytest.raises(BadInput, match="rank: 3; accepted: 0 to 2"):
        model_of(both, 3)
    with pytest.raises(BadInput, match="rank: 'first'; accepted: 0 to 2"):
        inspect.unwrap(model_of)(both, "first")  # without the type checks of the tests
    with pytest.raises(BadInput, match="rank: null, of a run without finite models"):
        model_of({"parameters": parameters[1:2]}, None)


def test_run_plots_into_given_axes(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    first, second = (synthetic(tmp_path, nodes=3, rounds=(0, 10), seed=seed) for seed in (1, 2))
    axes = first.plot()
    assert axes.get_ylabel() == "test accuracy"
    assert axes.get_legend() is None
    assert second.plot("test_accuracy", axes, label="other") is axes
    assert [line.get_label() for line in axes.lines] == ["quickstart", "other"]
    assert axes.lines[0].get_color() != axes.lines[1].get_color()
    means = summary(second, "test_accuracy")["mean"].to_list()
    assert axes.lines[1].get_ydata().tolist() == means
    assert axes.get_legend() is not None
    assert first.plot("test_loss", x="bytes").get_xlabel() == "sent by all nodes / bytes"
    for arguments, message in (
        ({"metric": "test_acuracy"}, r"no run has recorded it \(did you mean 'test_accuracy'\?\)"),
        ({"x": "hours"}, "x: got 'hours'; accepted: round, time_s, wall_s, bytes"),
    ):
        with pytest.raises(BadInput, match=message):
            first.plot(**arguments)  # type: ignore[arg-type]
    pyplot.close("all")


def test_notebook_shows_summary_and_main_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic(tmp_path, name="a", nodes=3, rounds=(0, 10))
    assert run.summary["run"] == str(run.path)
    html = run._repr_html_()
    assert all(f">{name}</td>" in html for name in run.summary)
    assert html.count('<img alt="test_accuracy"') == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<img" not in run._repr_html_()
    begun = synthetic(tmp_path, name="b", nodes=3, rounds=(), status=None)
    assert ">running or killed</td>" in begun._repr_html_()


def test_folder_without_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere: no such folder"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"empty: not a run: no experiment.yaml in it"):
        load_run(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("experiment.yaml", "a: [", "experiment"),
        ("experiment.yaml", "- a", "experiment"),
        ("environment.json", "{", "environment"),
        ("status.json", "[]", "status"),
        ("models.safetensors", "no tensors at all", "parameters"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, read: str) -> None:
    run = load_run(synthetic(tmp_path, nodes=1, rounds=(0,)).path)
    (run.path / name).write_text(text)
    with pytest.raises(BadInput, match=name):
        getattr(run, read)


def test_labels_show_what_distinguishes_runs(tmp_path: Path) -> None:
    def made(name: str, seed: int, algorithm: str) -> object:
        return synthetic(
            tmp_path,
            name=name,
            nodes=1,
            rounds=(0,),
            seed=seed,
            experiment={"algorithm": {"name": algorithm}},
        )

    a1, a2, b1, b2, other = (
        made("x", 1, "d-psgd"),
        made("x", 2, "d-psgd"),
        made("x", 1, "jwins"),
        made("x", 2, "jwins"),
        made("y", 1, "jwins"),
    )
    assert labels([a1]) == ["x"]  # type: ignore[list-item]
    assert labels([a1, other]) == ["d-psgd", "jwins"]  # type: ignore[list-item]
    assert labels([a1, b1]) == ["d-psgd", "jwins"]  # type: ignore[list-item]
    assert labels([a1, a2]) == ["x, seed 1", "x, seed 2"]  # type: ignore[list-item]
    assert labels([a1, a2, b1, b2])[3] == "jwins, seed 2"  # type: ignore[list-item]


def test_labels_of_equal_experiments_are_their_ids(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path, nodes=1, rounds=(0,)) for _ in range(2)]
    assert labels(runs) == [run.id for run in runs]


def test_run_without_setup_is_still_read(tmp_path: Path) -> None:
    run = load_run(synthetic(tmp_path, nodes=3, rounds=(0,)).path)
    (run.path / "setup.json").unlink()
    shutil.rmtree(run.path / "segments", ignore_errors=True)
    assert run.setup == {"graphs": {}}
    assert run.nodes == 3
    assert json.loads((run.path / "status.json").read_text())["status"] == "done"


def test_folder_loads_all_its_runs_and_sweeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (synthetic(tmp_path, name=name, nodes=1, rounds=(0,)) for name in ("a", "b"))
    sweep = tmp_path / "sweep"
    swept = [synthetic(sweep, name="x", nodes=1, rounds=(0,), seed=seed) for seed in (1, 2, 3)]
    entries: list[dict[str, Any]] = [
        {
            "cell": f"cell {index}",
            "seed": index,
            "run": "x",
            "folder": str(run.path.relative_to(sweep)),
            "status": status,
        }
        for index, (run, status) in enumerate(zip(swept, ("done", "done", "failed"), strict=True))
    ]
    entries.append({"cell": "cell 9", "seed": 1, "run": "y", "folder": None, "status": "pending"})
    (sweep / "sweep.json").write_text(json.dumps({"name": "sweep", "runs": entries}))
    with caplog.at_level(logging.INFO):
        cells = load_runs(sweep)
    assert cells == [Run(swept[0].path, "cell 0"), Run(swept[1].path, "cell 1")]
    assert "2 of 4 runs are done" in caplog.text
    assert labels(cells) == ["cell 0, seed 1", "cell 1, seed 2"]
    assert load_runs(first.path) == [first]
    assert load_runs(tmp_path / "b") == [second]
    assert load_runs(tmp_path) == [first, second, *cells]
    with pytest.raises(BadInput, match="no such folder"):
        load_runs(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="not a run"):
        load_runs(tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [{"status": "done"}]}'])
def test_damaged_sweep_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(BadInput, match=r"sweep.json: .*accepted: (JSON|data written by gossamer)"):
        load_runs(tmp_path)
    (tmp_path / "sweep.json").write_text('{"runs": []}')
    with pytest.raises(BadInput, match="no run of the sweep is done"):
        load_runs(tmp_path)


def test_unfinished_sweep_does_not_hide_other_runs(tmp_path: Path) -> None:
    only = synthetic(tmp_path, name="a", nodes=1, rounds=(0,))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"name": "sweep", "runs": []}))
    assert load_runs(tmp_path) == [only]
    with pytest.raises(BadInput, match="no run of the sweep is done"):
        load_runs(tmp_path / "sweep")


@pytest.mark.parametrize(
    ("value", "text"), [(999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (999.6e6, "1 GB")]
)
def test_byte_unit_fits_the_rounded_value(value: float, text: str) -> None:
    assert bytes_text(value) == text
