"""The GIF of a graph coloured by a metric, read with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gossamer.errors import BadInput
from gossamer.results.animation import MAX_RUNS, write_animation
from synthetic_run import synthetic

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")
RING = np.array([0xE1, 0x44, 0x1B])  # of the palette


def frames(path: Path) -> list[np.ndarray]:
    """The pixels of all frames, each [height, width, 3]."""
    with image.open(path) as opened:
        pixels = []
        for number in range(opened.n_frames):
            opened.seek(number)
            pixels.append(np.asarray(opened.convert("RGB")).astype(int))
        return pixels


def differ(first: np.ndarray, second: np.ndarray) -> float:
    """The share of pixels that differ by more than dithering, which varies between the frames of a GIF."""
    return float((np.abs(first - second).sum(axis=2) > 40).mean())


def ringed(pixels: np.ndarray) -> int:
    return int((np.abs(pixels - RING).sum(axis=2) < 60).sum())


def test_animation_has_a_frame_per_evaluation(tmp_path: Path) -> None:
    run = synthetic(tmp_path, nodes=12, rounds=(0, 10, 20, 40), poisoned=(3,))
    for name in ("graph.gif", "graph.png"):
        write_animation([run], "ood_accuracy", tmp_path / name)
        first, *others = frames(tmp_path / name)
        assert len(others) == 3
        assert all(differ(first, other) > 0.01 for other in others)
        assert ringed(first) > 50


def test_runs_are_animated_side_by_side(tmp_path: Path) -> None:
    short, long, changing = (
        synthetic(tmp_path, nodes=8, rounds=(0, 10), seed=1),
        synthetic(tmp_path, nodes=6, rounds=(0, 10, 20, 30), seed=2, lost=(2,)),
        synthetic(tmp_path, nodes=320, rounds=(0, 10), seed=3, changing=True, directed=True),
    )
    write_animation([short, long, changing], "test_loss", tmp_path / "graphs.gif")
    shown = frames(tmp_path / "graphs.gif")
    assert len(shown) == 4
    width = shown[0].shape[1] // 4  # the first run has ended, the second continues
    assert differ(shown[1][60:, :width], shown[3][60:, :width]) < 0.001
    assert differ(shown[1], shown[3]) > 0.002
    assert not ringed(shown[0])


def test_invalid_animation_request_is_refused(tmp_path: Path) -> None:
    run, path = synthetic(tmp_path, nodes=3, rounds=(0, 10)), tmp_path / "graph.gif"
    with pytest.raises(BadInput, match="have not recorded test_acuracy .*did you mean 'test_accuracy'"):
        write_animation([run], "test_acuracy", path)
    with pytest.raises(BadInput, match="the nodes of .* have not recorded"):
        write_animation([run], "consensus_distance", path)  # a metric of the network
    with pytest.raises(BadInput, match=f"got 5 runs; accepted: 1 to {MAX_RUNS}"):
        write_animation([run] * 5, "test_accuracy", path)
