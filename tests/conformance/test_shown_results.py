"""What tables say of models that are shown at the ends of rounds, on the files in experiments/evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gossamer
from gossamer import Experiment, Run
from gossamer.results.comparison import quantity
from gossamer.sweep.sweep import Sweep

FOLDER = Path(__file__).parents[2] / "experiments" / "evaluation"
CELLS = [(graph, links) for graph in ("ring", "one-peer") for links in ("even", "stragglers")]


def node_rows(run: Run) -> pl.DataFrame:
    return run.metrics.filter(pl.col("node") >= 0)


@pytest.fixture(scope="module")
def by_rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """The runs of one seed, by graph and links, which are evaluated after every round."""
    out = tmp_path_factory.mktemp("links")
    planned = Sweep.load(FOLDER / "links.yaml", [], out).planned
    first = [one for one in planned if one.experiment.seed == 1]
    assert [(one.cell.labels["cell"], one.cell.labels["links"]) for one in first] == CELLS
    return {cell: gossamer.run(one.experiment, out) for cell, one in zip(CELLS, first, strict=True)}


@pytest.mark.slow
def test_at_equal_rounds_differences_have_the_same_bits_under_both_networks(
    by_rounds: dict[tuple[str, str], Run],
) -> None:
    """Right: the difference of the means of all nodes, from the raw rows of one round."""
    means = {}
    for cell, run in by_rounds.items():
        complete = node_rows(run).unique(["node", "round"]).sort("node").group_by("round")
        table = complete.agg(pl.len(), pl.col("test_accuracy").sum()).filter(pl.col("len") == 8)
        means[cell] = dict(table.select("round", "test_accuracy").rows())
    common = set.intersection(*(set(by_round) for by_round in means.values()))
    assert len(common) > 10
    for r in common:
        even, slow = (
            means["one-peer", links][r] - means["ring", links][r] for links in ("even", "stragglers")
        )
        assert even == slow, r


@pytest.mark.parametrize("cell", CELLS)
def test_at_an_end_by_bytes_each_value_is_of_the_round_that_its_row_names(
    by_rounds: dict[tuple[str, str], Run], tmp_path: Path, cell: tuple[str, str]
) -> None:
    evaluated = by_rounds[cell]
    described = Experiment.load(evaluated.path / "experiment.yaml").override(
        evaluation={"every_rounds": 1000, "samples": None}
    )
    run = gossamer.run(described, tmp_path)
    ends = node_rows(run).filter(pl.col("moment") == "end")
    assert len(ends) == 8
    right = node_rows(evaluated).unique(["node", "round"])
    both = ends.join(right, on=["node", "round"], suffix="_right")
    assert len(both) == 8
    assert both["test_accuracy"].to_list() == both["test_accuracy_right"].to_list()
    assert both["test_loss"].to_list() == both["test_loss_right"].to_list()
    assert run.parameters is not None
    assert evaluated.parameters is not None
    assert run.parameters.equal(evaluated.parameters)


def on_grid(out: Path, **evaluation: Any) -> Run:
    described = Experiment.load(FOLDER / "grid.yaml")
    return gossamer.run(described.override(evaluation={"samples": None, **evaluation}), out)


@pytest.mark.slow
def test_time_to_a_level_depends_on_the_grid_by_at_most_one_step_of_it(tmp_path: Path) -> None:
    right = on_grid(tmp_path, every_rounds=1)
    grids = {every_s: on_grid(tmp_path, every_s=every_s) for every_s in (0.2, 0.5, 0.13)}
    reached = 0
    for level in (0.2, 0.3, 0.4, 0.5):
        time_to = quantity(f"time_s to test_accuracy={level}")
        exact = time_to.of(right)
        if exact is None:
            continue
        reached += 1
        for every_s, run in grids.items():
            answer = time_to.of(run)
            assert answer is not None
            assert exact <= answer <= exact + every_s
    assert reached >= 2


def test_every_value_on_a_grid_is_of_a_complete_round(tmp_path: Path) -> None:
    right, grid = on_grid(tmp_path, every_rounds=1), on_grid(tmp_path, every_s=0.2)
    key = ["node", "round", "step"]
    both = node_rows(grid).join(node_rows(right).unique(key), on=key, how="left", suffix="_right")
    assert len(both) > 300
    assert both["test_accuracy"].to_list() == both["test_accuracy_right"].to_list()


def test_instants_differ_from_the_ends_of_rounds(tmp_path: Path) -> None:
    """Otherwise these tests show nothing: with label skew, models in the middle of a round are worse."""
    shown, instant = (on_grid(tmp_path, every_s=0.2, of=of) for of in ("round", "instant"))
    late = pl.col("time_s") > 4
    means = [node_rows(run).filter(late)["test_accuracy"].mean() for run in (shown, instant)]
    assert means[0] > means[1] + 0.05  # type: ignore[operator]
