"""Encoded images, as the hub stores them, and their pixels."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from jaxtyping import Shaped, UInt8, UInt16

from gossamer.errors import BadInput, first_line
from gossamer.files import check_room
from gossamer.tasks.data import ColumnDecoder, RowPlace, package

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # a data file can't invoke Pillow's rarer decoders
MOST = 65_535
"""The highest value of a pixel of 16 bits. One of 8 bits, v, is 257 v in 16 bits."""

Mode = Literal["L", "RGB", "RGBA"]
"""Pillow's modes that images can have in a task: grey, colour, and colour with transparency."""
CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3, "RGBA": 4}

_GREY = ("1", "L", "LA", "La")  # Pillow's modes of grey images of at most 8 bits
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")


@dataclass(frozen=True)
class Shapes:
    """The sizes (height, width) of a column of images, and how many of them are grey, in colour, transparent, and of 16
    bits for each pixel and channel."""

    sizes: Counter[tuple[int, int]]
    grey: int
    colour: int
    transparent: int
    deep: int


def is_image(column: pl.Series) -> bool:
    """Whether a column has encoded images, as the hub stores them."""
    return isinstance(column.dtype, pl.Struct) and any(field.name == "bytes" for field in column.dtype.fields)


def shapes(column: pl.Series) -> Shapes:
    """The shapes of all images of a column. Images that can't be opened are left out; decoding names them."""
    sizes, kinds = Counter[tuple[int, int]](), Counter[str]()
    for data in _encoded(column):
        with suppress(OSError, SyntaxError, ValueError), opened(data) as image:
            sizes[image.height, image.width] += 1
            deep = _is_deep(image)
            kinds["grey" if deep or image.mode in _GREY else "colour"] += 1
            kinds["transparent"] += image.mode in _TRANSPARENT or "transparency" in image.info
            kinds["deep"] += deep
    return Shapes(sizes, kinds["grey"], kinds["colour"], kinds["transparent"], kinds["deep"])


def image_decoder(height: int, width: int, channels: int) -> ColumnDecoder:
    """A decoder of a column of encoded images of one size to uint8 pixels; 1 channel is grey, 3 are colour. Images of another
    mode are converted, and lose transparency."""
    mode: Mode = "L" if channels == 1 else "RGB"
    return partial(decoded, size=(height, width), mode=mode)


def decoded(
    column: pl.Series,
    where: str,
    place: RowPlace,
    *,
    size: tuple[int, int],
    mode: Mode,
    resize: bool = False,
    deep: bool = False,
) -> UInt8[np.ndarray, "rows height width channels"] | UInt16[np.ndarray, "rows height width channels"]:
    """The pixels of a column of encoded images, converted to one mode.

    Args:
        where: the column, for errors.
        place: the place of a row, for errors.
        size: the height and the width.
        resize: whether images of other sizes are resized, and not refused.
        deep: whether the pixels have 16 bits, so that 65,535 is white; images of 16 bits are refused without.

    Raises:
        BadInput: for a column of something else, and for an image that is damaged, has several frames or other bits, or
            another size; the line has its place."""
    if not is_image(column):
        raise BadInput(f"{where}: {column.dtype}; accepted: images")
    dtype = np.uint16 if deep else np.uint8
    check_room(f"{where}: the pixels", len(column) * prod(size) * CHANNELS[mode] * dtype().itemsize)
    pixels = np.empty((len(column), *size, CHANNELS[mode]), dtype)
    for row, data in enumerate(_encoded(column)):
        try:
            with opened(data) as image:
                if not resize and (image.height, image.width) != size:
                    raise ValueError(f"{image.width}x{image.height} pixels")
                if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
                    raise ValueError(f"{frames} frames")
                pixels[row] = _pixels(image, size, mode, deep)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damaged images
            wanted = "" if resize else f"{size[1]}x{size[0]} pixels as "
            accepted = f"{wanted}one frame of {', '.join(FORMATS)}"
            raise BadInput(
                f"{where}, {place(row)}: {_without_object(error)}; accepted: {accepted}"
            ) from error
    return pixels


def opened(data: bytes | Path | None) -> Any:
    """An encoded image, opened by Pillow but not decoded yet. ValueError for one with too many pixels."""
    package("PIL", "'gossamer[data]'", "pillow")
    from PIL import Image

    try:
        return Image.open(data if isinstance(data, Path) else io.BytesIO(data or b""), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(first_line(error)) from None


def _is_deep(image: Any) -> bool:
    """Whether an image has 16 bits for each pixel. (Pillow itself reduces those in colour to 8 bits a channel, and versions
    before 11.3 call a PNG file of 16 bits I.)"""
    mode: str = image.mode
    return mode.startswith("I;16") or (mode == "I" and image.format == "PNG")


def _pixels(
    image: Any, size: tuple[int, int], mode: Mode, deep: bool
) -> Shaped[np.ndarray, "height width channels"]:
    """The pixels of an opened image."""
    from PIL import Image

    width_height = size[::-1]
    if _is_deep(image):
        if not deep:
            raise ValueError(f"16 bits per pixel and channel (mode {image.mode})")
        values = np.asarray(image).astype(np.float32)
        if (
            values.shape != size
        ):  # Pillow resizes images of 16 bits without interpolation, but not those of floats
            resized = Image.fromarray(values).resize(width_height, Image.Resampling.BICUBIC)
            values = np.asarray(resized).round().clip(0, MOST)
        channels = np.repeat(values.astype(np.uint16)[..., None], CHANNELS[mode], axis=2)
        channels[..., 3:] = MOST  # opaque
        return channels
    if image.mode in ("I", "F"):
        raise ValueError(f"32 bits per pixel (mode {image.mode})")
    converted = image.convert(mode)
    fitted = converted if converted.size == width_height else converted.resize(width_height)
    eight = np.asarray(fitted).reshape(*size, CHANNELS[mode])
    return eight.astype(np.uint16) * 257 if deep else eight


def _encoded(column: pl.Series) -> Iterator[bytes | None]:
    """The bytes of each image of a column."""
    return iter(column.struct.field("bytes"))


def _without_object(error: Exception) -> str:
    """The first line of an error without an address in memory."""
    return re.sub(r" <_io\.BytesIO[^>]*>", "", first_line(error))
