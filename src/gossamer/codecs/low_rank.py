"""Low-rank approximation of a model's matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.codecs.codec import Codec, Own, parameter_count, vector_in
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Part, Payload

if TYPE_CHECKING:
    from gossamer.learning.parameters import Field as LayoutField
    from gossamer.learning.parameters import Layout
    from gossamer.node import Node


@register("codec", "low-rank")
class LowRank(Codec):
    """Approximates each weight M [rows, columns] of a difference by P Q^T, with one step of subspace
    iteration from the Q of the previous vector (PowerSGD's compressor, Vogels et al., NeurIPS 2019, Algorithm
    1):

        P = orthonormal(M Q),   Q = M^T P

    A convolution's kernel [out, in, height, width] is a matrix [out, in x height x width]. Vectors are sent
    whole, and so are matrices with no more values than P and Q. The first Q is drawn, keyed by the sender.

    Only for algorithms that send differences.

    Args:
        rank: columns of P and Q."""

    only_differences: ClassVar[bool] = True

    rank: int = Field(default=1, ge=1)

    @property
    def comes_first(self) -> bool:
        return True

    def check(self, layout: Layout) -> None:
        fields = layout.parameters
        compressed = any(low for _, _, _, low in self._matrices(fields))
        if not compressed and any(min(field.matrix) > 1 for field in fields):
            raise BadInput(
                f"codec.rank: got {self.rank}, which makes no matrix of the model smaller; accepted: a smaller rank"
            )

    def _matrices(self, fields: Sequence[LayoutField]) -> Iterator[tuple[int, int, int, bool]]:
        """For each tensor: start, rows, columns, and whether it is approximated."""
        for field in fields:
            rows, columns = field.matrix
            yield field.start, rows, columns, self.rank * (rows + columns) < rows * columns

    def begin(self, node: Node) -> None:
        rng = node.rng("~codec/low-rank")
        sizes = [columns * self.rank for _, _, columns, low in self._matrices(node.layout) if low]
        self.memory(node)["q"] = torch.from_numpy(rng.standard_normal(sum(sizes), dtype=np.float32))

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        previous, offset = self.memory(node)["q"].to(vector.device), 0
        sent, updated = [], []
        for start, rows, columns, low in self._matrices(node.layout):
            values = vector[start : start + rows * columns]
            if not low:
                sent.append(values)
                continue
            matrix = values.view(rows, columns)
            q = previous[offset : offset + columns * self.rank].view(columns, self.rank)
            offset += q.numel()
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.T @ p
            sent += [p.flatten(), q.flatten()]
            # Zero columns keep their old values, since the iteration could never leave a zero subspace.
            updated.append(q.flatten() if q.any() else previous[offset - q.numel() : offset])
        self.memory(node)["q"] = torch.cat(updated) if updated else previous
        return [torch.cat(sent)]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        values, offset = vector_in(payload[0], torch.float32), 0
        vector = values.new_empty(parameter_count(node))
        lengths = [
            self.rank * (rows + columns) if low else rows * columns
            for _, rows, columns, low in self._matrices(node.layout)
        ]
        if len(values) != sum(lengths):
            raise ValueError(f"{len(values)} values; accepted: {sum(lengths)}")
        for (start, rows, columns, low), length in zip(self._matrices(node.layout), lengths, strict=True):
            piece, offset = values[offset : offset + length], offset + length
            if low:
                p, q = piece[: rows * self.rank], piece[rows * self.rank :]
                piece = (p.view(rows, self.rank) @ q.view(columns, self.rank).T).flatten()
            vector[start : start + rows * columns] = piece
        return vector
