"""The GIF of a graph coloured by a metric, read with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gossamer.errors import BadInput
from gossamer.results.animation import MOST_RUNS, Animation
from synthetic_run import synthetic

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")
RING = np.array([0xE1, 0x44, 0x1B])  # of the palette


def frames(path: Path) -> list[np.ndarray]:
    """The pixels of all frames, each [height, width, 3]."""
    with image.open(path) as opened:
        found = []
        for number in range(opened.n_frames):
            opened.seek(number)
            found.append(np.asarray(opened.convert("RGB")).astype(int))
        return found


def differ(one: np.ndarray, other: np.ndarray) -> float:
    """The share of pixels of another colour; a GIF renders colours by dithering, a little differently in each frame."""
    return float((np.abs(one - other).sum(axis=2) > 40).mean())


def ringed(pixels: np.ndarray) -> int:
    return int((np.abs(pixels - RING).sum(axis=2) < 60).sum())


def test_a_frame_for_each_evaluation(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=12, rounds=(0, 10, 20, 40), poisoned=(3,))
    path = Animation([run], "ood_accuracy").write(tmp_path / "page.html")
    assert path == tmp_path / "page-ood-accuracy.gif"
    first, *others = frames(path)
    assert len(others) == 3
    assert all(differ(first, other) > 0.01 for other in others)
    assert ringed(first) > 50


def test_several_runs_side_by_side_and_points_without_a_value(tmp_path: Path) -> None:
    short, long, changing = (
        synthetic(tmp_path, nodes=8, rounds=(0, 10), seed=1),
        synthetic(tmp_path, nodes=6, rounds=(0, 10, 20, 30), seed=2, lost=(2,)),
        synthetic(tmp_path, nodes=320, rounds=(0, 10), seed=3, changing=True, directed=True),
    )
    animation = Animation([short, long, changing], "test_loss")
    shown = frames(animation.write(tmp_path / "page.html"))
    assert len(shown) == 4
    width = shown[0].shape[1] // 4  # the first run has ended, the second goes on
    assert differ(shown[1][60:, :width], shown[3][60:, :width]) < 0.001
    assert differ(shown[1], shown[3]) > 0.002
    assert not ringed(shown[0])
    assert [graph.axes.get_title() for graph in animation.graphs] == [
        f"{graph.run['label']}: round {r}" for graph, r in zip(animation.graphs, (10, 30, 10), strict=True)
    ]
    assert animation.graphs[0].nodes.get_sizes()[0] > 5 * animation.graphs[2].nodes.get_sizes()[0]
    limits = {graph.nodes.get_clim() for graph in animation.graphs}
    losses = [run.metrics["test_loss"] for run in (short, long)]
    assert len(limits) == 1
    [(low, high)] = limits
    assert low <= min(loss.min() for loss in losses) + 1e-6
    assert high >= max(loss.max() for loss in losses) - 1e-6


def test_what_cannot_be_animated_is_refused(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=3, rounds=(0, 10))
    with pytest.raises(BadInput, match="--animate test_acuracy: .*did you mean 'test_accuracy'"):
        Animation([run], "test_acuracy")
    with pytest.raises(BadInput, match="the nodes of .* have not recorded it"):
        Animation([run], "consensus_distance")  # it is the network's
    with pytest.raises(BadInput, match=f"got 5 runs; accepted: 1 to {MOST_RUNS}"):
        Animation([run] * 5, "test_accuracy")
