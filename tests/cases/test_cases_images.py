"""Folders of pictures of several sizes, modes and depths."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer import BadInput
from gossamer.config.registry import build
from gossamer.tasks import Task
from gossamer.tasks.summary import summary

Image = pytest.importorskip("PIL.Image")

RED = [(10 * number, 90, 200) for number in range(6)]
"""The colours of six pictures."""


def photos(root: Path, **odd: Any) -> Path:
    """Six pictures of 3x2 pixels; those in ``odd`` (number -> picture) are others."""
    (root / "ant").mkdir(exist_ok=True)
    for number, colour in enumerate(RED):
        picture = odd.get(f"n{number}", Image.new("RGB", (3, 2), colour))
        picture.save(root / "ant" / f"{number}.png")
    return root


def hub(path: Path, **settings: Any) -> Task:
    task = build(
        "task", {"name": "hub", "path": str(path), "inputs": "image", "targets": "label", **settings}
    )
    return task.load(None, 1)  # type: ignore[attr-defined]


def first_pixels(task: Task) -> list[tuple[float, ...]]:
    """The first pixel of each picture, in ascending order."""
    return sorted(
        tuple(picture[:, 0, 0].tolist()) for inputs, _ in (task.train, task.test) for picture in inputs
    )


def luma(red: int, green: int, blue: int) -> int:
    """The grey value of ITU-R 601."""
    return round(0.299 * red + 0.587 * green + 0.114 * blue)


def test_the_mode_is_that_of_the_task(tmp_path: Path) -> None:
    photos(tmp_path, n0=Image.new("L", (3, 2), 77), n1=Image.new("RGBA", (3, 2), (1, 2, 3, 51)))
    opaque = [
        (red / 255, green / 255, blue / 255) for red, green, blue in [(77, 77, 77), (1, 2, 3), *RED[2:]]
    ]
    task = hub(tmp_path)
    np.testing.assert_allclose(first_pixels(task), sorted(opaque), atol=1e-6)
    line = summary(task)["line"]
    assert "1 of 6 images are grey, and became colour images; 1 of 6 images lose their transparency" in line
    grey = [77, luma(1, 2, 3), *(luma(*colour) for colour in RED[2:])]
    found = [255 * pixel for (pixel,) in first_pixels(hub(tmp_path, image_mode="L"))]
    np.testing.assert_allclose(found, sorted(grey), atol=1)  # Pillow rounds its weights
    task = hub(tmp_path, image_mode="RGBA")
    alpha = [(*colour, 51 / 255 if colour == opaque[1] else 1.0) for colour in opaque]
    np.testing.assert_allclose(first_pixels(task), sorted(alpha), atol=1e-6)
    assert "images" not in summary(task)["line"]


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_pictures_of_16_bits_are_scaled_by_their_depth(tmp_path: Path, kind: str) -> None:
    """Each picture is a ramp, and its values are v / 65,535; one of 8 bits among them keeps v / 255."""
    (tmp_path / "ant").mkdir()
    ramp = np.arange(6, dtype=np.uint16).reshape(2, 3)
    for number in range(3):
        Image.fromarray(ramp + 20_000 * number).save(tmp_path / "ant" / f"{number}.{kind}")
    Image.new("L", (3, 2), 51).save(tmp_path / "ant" / f"3.{kind}")
    task = hub(tmp_path, train_fraction=0.5)
    pictures = sorted(picture.tolist() for inputs, _ in (task.train, task.test) for picture in inputs[:, 0])
    expected = [(ramp + 20_000 * number) / 65_535 for number in (0, 1, 2)]
    expected.insert(1, np.full((2, 3), 0.2))
    np.testing.assert_allclose(pictures, expected, atol=1e-7)
    assert "3 of 4 images have 16 bits: 65,535 became 1" in summary(task)["line"]
    assert task.train[0].shape[1] == 1
    resized = hub(tmp_path, image_size=[1, 1])
    assert max(first_pixels(resized))[0] == pytest.approx(
        (40_000 + 2.5) / 65_535, abs=1e-5
    )  # the mean of a ramp
    Image.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "ant" / f"4.{kind}")
    assert (1.0, 0.0, 0.0) in first_pixels(hub(tmp_path))


def test_sizes_are_refused_with_the_setting_or_fitted(tmp_path: Path) -> None:
    photos(tmp_path, n0=Image.new("RGB", (20, 20), (7, 8, 9)))
    with pytest.raises(
        BadInput,
        match=r"5 images of 3x2 pixels, 1 of 20x20; accepted: one size, or a height and a width as task.image_size, such as \[2, 3\]",
    ):
        hub(tmp_path)
    task = hub(tmp_path, image_size=[2, 3])
    colours = [(7, 8, 9), *RED[1:]]
    np.testing.assert_allclose(255 * np.array(first_pixels(task)), sorted(colours), atol=1e-4)


def test_damaged_pictures_are_named_by_their_file(tmp_path: Path) -> None:
    photos(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    for content in (b"", b"not a picture", file.getvalue()[:50]):
        (tmp_path / "ant" / "4.png").write_bytes(content)
        with pytest.raises(
            BadInput, match=r"^task: column 'image', ant/4.png: [^<>\n]*; accepted: "
        ) as raised:
            hub(tmp_path)
        assert "\n" not in str(raised.value)
