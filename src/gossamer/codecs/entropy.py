"""Lossless compression of the output of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Shaped
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import PADDING, Codec, Own, parameter_count, vector_in
from gossamer.config.registry import register
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node

_DTYPES = {"u1": torch.uint8, "f2": torch.float16, "b2": torch.bfloat16, "f4": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@register("codec", "entropy")
class Entropy(Codec):
    """Compresses values without loss (Zstandard). It is the last codec of a chain, such as ``[top-k,
    quantize, entropy]``. The bytes of multi-byte numbers are first grouped by significance. Indices are not
    compressed, since they are already sent in the fewest bits possible.

    Args:
        level: Zstandard's compression level, 1 to 19."""

    final: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    level: int = Field(default=3, ge=1, le=19)

    def encode(self, node: Node, vector: Shaped[Tensor, " n"], round: int) -> list[Payload]:
        import zstandard

        values = vector.detach().cpu().contiguous()
        octets = values.view(torch.uint8).numpy().reshape(-1, values.element_size())
        data = zstandard.ZstdCompressor(level=self.level).compress(octets.T.tobytes())
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8), _NAMES[values.dtype]]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        import zstandard

        data, name = payload
        data, dtype = vector_in(data, torch.uint8).numpy().tobytes(), _DTYPES[name]
        limit = (parameter_count(node) + PADDING) * dtype.itemsize
        try:
            # Checked before any memory of that size is allocated.
            if not 0 <= (length := zstandard.frame_content_size(data)) <= limit or length % dtype.itemsize:
                raise ValueError(f"{length} bytes of {dtype}; accepted: up to {limit}")
            octets = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        ordered = np.array(octets.reshape(dtype.itemsize, -1).T, order="C").reshape(-1)
        return torch.from_numpy(ordered).view(dtype)
