from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from gossamer.errors import BadInput
from gossamer.results.groups import groups
from gossamer.results.plots import (
    MAX_NODES_DRAWN,
    curve_figure,
    drawn_nodes,
    parse_width,
    positions,
    write_figures,
)
from synthetic_run import summary, synthetic


def test_ring_is_drawn_as_a_circle() -> None:
    points = positions(range(12), [[i, (i + 1) % 12] for i in range(12)])
    centre = [sum(axis) / 12 for axis in zip(*points, strict=True)]
    radii = [math.dist(point, centre) for point in points]
    assert max(radii) == pytest.approx(min(radii), rel=0.02)


@pytest.mark.parametrize("changing", [False, True])
def test_positions_fit_the_square_and_are_keyed(changing: bool) -> None:
    edges = [list(edge) for edge in nx.random_regular_graph(4, 150, seed=1).edges]
    first = positions(range(150), edges, seed=1, changing=changing)
    assert max(abs(value) for point in first for value in point) == pytest.approx(1.0)
    assert first == positions(range(150), edges, seed=1, changing=changing)
    assert (first == positions(range(150), edges, seed=2, changing=changing)) == changing


@pytest.mark.parametrize(
    ("nodes", "edges"), [(1, []), (2, []), (2, [[0, 1]]), (5, [[0, 1], [2, 3]]), (3, [[0, 0]])]
)
def test_small_and_disconnected_graphs_can_be_drawn(nodes: int, edges: list[list[int]]) -> None:
    points = positions(range(nodes), edges)
    assert len(set(points)) == nodes
    assert all(math.isfinite(value) for point in points for value in point)


def test_large_graph_is_drawn_around_node_0() -> None:
    n = 1000
    ring = [[i, (i + 1) % n] for i in range(n)]
    drawn = drawn_nodes(n, ring)
    half = MAX_NODES_DRAWN // 2
    assert len(drawn) == MAX_NODES_DRAWN
    assert set(drawn) >= set(range(half)) | set(range(n - half + 1, n))
    assert len(drawn_nodes(n, [])) == MAX_NODES_DRAWN
    assert drawn_nodes(3, []) == [0, 1, 2]


def test_figures_have_column_width_embedded_fonts_and_captions(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    runs = [
        synthetic(tmp_path, nodes=4, rounds=(0, 10), seed=seed, experiment={"batch_size": size})
        for size in (8, 16)
        for seed in (1, 2, 3)
    ]
    folder, options = tmp_path / "figures", {"metrics": ["test_accuracy"], "axes": ["bytes", "round"]}
    for kind in ("pdf", "svg", "png"):
        paths = write_figures(runs, groups(runs), folder, format=kind, **options)
        assert [path.name for path in paths] == [f"test-accuracy-vs-{x}.{kind}" for x in ("bytes", "round")]
    pdf = (folder / "test-accuracy-vs-bytes.pdf").read_bytes()
    assert b"/FontFile2" in pdf  # TrueType
    assert b"/Type3" not in pdf
    assert re.findall(rb"/MediaBox \[ 0 0 ([\d.]+)", pdf) == [b"237.6"]  # 3.3 inches of 72 points
    assert matplotlib.imread(folder / "test-accuracy-vs-round.png").shape[1] == 990
    assert "<text" not in (folder / "test-accuracy-vs-round.svg").read_text()  # text is drawn as outlines
    first, _ = (folder / "captions.md").read_text().split("\n\n")
    assert first == (
        "**test-accuracy-vs-bytes.png**: Test accuracy in % against bytes that all nodes have sent, 4 nodes. Lines: mean over"
        " runs, each the mean over its nodes of their newest models (batch_size 8: 3 runs; batch_size 16: 3 runs). Bands: 95 % confidence interval"
        " over the runs (Student's t)."
    )
    alone = write_figures(runs[:1], groups(runs[:1]), folder, **options)
    assert len(alone) == 2
    caption = (folder / "captions.md").read_text()
    assert "Bands: ± one standard deviation over the nodes" in caption
    for change, message in (
        ({"metrics": ["tset"]}, "--metrics tset: no run has recorded it"),
        ({"axes": ["epoch"]}, "--axis epoch: accepted: round, time_s"),
        ({"format": "gif"}, "--format gif: accepted: pdf, svg, png"),
    ):
        with pytest.raises(BadInput, match=message):
            write_figures(runs, groups(runs), folder, **{**options, **change})


def test_width_needs_a_unit() -> None:
    assert parse_width("3.3in") == 3.3
    assert parse_width("84mm") == pytest.approx(3.307, abs=1e-3)
    for wrong in ("3.3", "in", "0.1in", "-3in", "3 ft"):
        with pytest.raises(BadInput, match=r"--width .*such as 3.3in"):
            parse_width(wrong)


def test_a_figure_draws_the_mean_of_each_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [synthetic(tmp_path, nodes=3, rounds=(0, 10, 20), seed=seed) for seed in (1, 2)]
    [axes] = curve_figure(runs, "test_accuracy", "bytes").axes
    assert [line.get_label() for line in axes.lines] == ["quickstart, seed 1", "quickstart, seed 2"]
    assert axes.lines[0].get_xdata().tolist() == [0, 3 * 10 * 80_000, 3 * 20 * 80_000]
    assert axes.get_xlabel() == "sent by all nodes / bytes"
    with pytest.raises(BadInput, match="metric nothing: no run has recorded it"):
        curve_figure(runs, "nothing")


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic(tmp_path, nodes=1, rounds=(0,))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r"pip install 'gossamer\[report\]'"):
        write_figures([run], groups([run]), tmp_path, metrics=["test_loss"], axes=["round"])


def test_every_group_is_drawn_as_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        synthetic(tmp_path, nodes=3, rounds=(0, 10), seed=seed, experiment={"batch_size": size})
        for size in (8, 16)
        for seed in (1, 2, 3)
    ]
    [axes] = curve_figure(runs, "test_accuracy", "round", groups(runs)).axes
    assert [line.get_label() for line in axes.lines] == ["batch_size 8", "batch_size 16"]
    means = [summary(run, "test_accuracy")["mean"] for run in runs]
    first = np.array([mean.to_list() for mean in means[:3]])
    assert axes.lines[0].get_ydata().tolist() == pytest.approx(first.mean(axis=0))
    band = axes.collections[0].get_paths()[0].vertices
    half = 4.302653 * first.std(axis=0, ddof=1) / np.sqrt(3)  # t(0.975, 2) of a printed table
    highest = [band[band[:, 0] == r][:, 1].max() for r in (0, 10)]
    assert highest == pytest.approx(first.mean(axis=0) + half, rel=1e-4)
    with pytest.raises(BadInput, match="metric nothing: no run has recorded it"):
        curve_figure(runs, "nothing", groups=groups(runs))
