"""PowerGossip: each pair of neighbours averages along a low-rank approximation of the difference between
their models.

Vogels, Karimireddy and Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
NeurIPS 2020, Algorithm 1, as in the authors' code (epfml/powergossip). Of each weight M [rows, columns] (a
convolution's kernel [out, in, height, width] is a matrix [out, in x height x width]) the link between nodes i
< j has an orthonormal V [columns, rank], which both nodes know. After the local steps, in even rounds,

    M_i V and M_j V are sent;   D = M_i V - M_j V
    M_i <- M_i - W_ij D V^T,    M_j <- M_j + W_ij D V^T,    U = orthonormal(D)

and in odd rounds they do the same with the transposed matrices and U, which gives the next V. Thus both nodes
perform one step of power iteration on M_i - M_j in every round. Vectors (biases, norms) are sent whole: x_i
<- x_i + W_ij (x_j - x_i). There is no step size to tune. The formulas are taken from the code, not from the
paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.algorithms.corrected import check_doubly_stochastic, check_symmetric
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.learning.parameters import Field as LayoutField
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing
from gossamer.topology.mixing import topology_row


class _Matrix(NamedTuple):
    """A tensor of the model as a matrix; a vector has no columns."""

    start: int
    rows: int
    columns: int

    def of(self, x: Float[Tensor, " params"], *, transposed: bool) -> Float[Tensor, "left right"]:
        """The matrix in a flat vector, or its transpose."""
        matrix = x[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)
        return matrix.T if transposed else matrix


@register("algorithm", "powergossip")
class PowerGossip(Algorithm):
    """PowerGossip (Vogels et al., 2020); weights come from ``topology.weights``.

    A new link starts with a V that both nodes draw from the same key. Every message has to arrive. Buffers
    are not mixed.

    Args:
        local_steps: mini-batch steps a round.
        rank: columns of V and U."""

    needs_every_message: ClassVar[bool] = True

    local_steps: LocalSteps = 1
    rank: int = Field(default=1, ge=1)

    def mixing(self) -> Mixing:
        return Mixing(
            weights="topology.weights, for a low-rank part of each difference",
            row=topology_row,
            note="the figures describe whole differences; a low rank makes mixing slower",
        )

    def sends_models(self) -> bool:
        return False

    def check(self, context: CheckContext) -> None:
        if context.topology.graph(0).directed:
            raise BadInput("topology: directed, for powergossip; accepted: an undirected one")
        check_symmetric(context.topology, self.name_of())
        check_doubly_stochastic(context.topology, self.name_of())
        fields = context.layout.parameters
        low = any(matrix.columns for matrix in self._matrices(fields))
        if not low and any(min(field.matrix) > 1 for field in fields):
            raise BadInput(
                f"algorithm.rank: got {self.rank}, which makes no matrix of the model smaller; accepted: a smaller rank"
            )

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            x, links = node.parameters, node.state.get("links", {})
            peers, weights = await node.neighbors(r), node.mixing_weights(r)
            matrices = list(self._matrices(node.layout))
            bases = {peer: links.get(peer) or self._initial_bases(node, peer, r, matrices) for peer in peers}
            sent = {peer: self._projections(x, bases[peer], matrices, r) for peer in peers}
            for peer in peers:
                node.send(peer, sent[peer], tag=r)
            inbox = await node.gather(peers, tag=r)
            mixed, node.state["links"] = x.clone(), {}
            for peer, theirs in inbox.items():
                # Both nodes subtract the higher rank's values from the lower rank's, so that they compute the
                # same result.
                difference = sent[peer] - theirs if node.rank < peer else theirs - sent[peer]
                sign = 1.0 if node.rank < peer else -1.0
                change, node.state["links"][peer] = self._step(x, difference, bases[peer], matrices, r)
                mixed -= sign * weights[peer] * change
            node.parameters = node.parameters + (mixed - x)
            node.mixed = node.model

    def _matrices(self, fields: Sequence[LayoutField]) -> Iterator[_Matrix]:
        for field in fields:
            rows, columns = field.matrix
            low = self.rank * max(rows, columns) < rows * columns
            yield _Matrix(field.start, *((rows, columns) if low else (rows * columns, 0)))

    def _initial_bases(self, node: Node, peer: int, r: int, matrices: list[_Matrix]) -> list[Tensor]:
        """The bases of a new link, drawn from a key that both nodes know."""
        rng = node.rng("powergossip", min(node.rank, peer), max(node.rank, peer), r, shared=True)
        sides = [matrix.rows if r % 2 else matrix.columns for matrix in matrices if matrix.columns]
        gaussian = [torch.from_numpy(rng.standard_normal((n, self.rank), dtype=np.float32)) for n in sides]
        return [torch.linalg.qr(columns).Q.to(node.parameters.device) for columns in gaussian]

    def _projections(
        self, x: Tensor, bases: list[Tensor], matrices: list[_Matrix], r: int
    ) -> Float[Tensor, " sent"]:
        """M V (or M^T U) of all matrices, and all vectors, concatenated."""
        parts, remaining = [], iter(bases)
        for matrix in matrices:
            if matrix.columns:
                parts.append((matrix.of(x, transposed=r % 2 == 1) @ next(remaining)).flatten())
            else:
                parts.append(x[matrix.start : matrix.start + matrix.rows])
        return torch.cat(parts)

    def _step(
        self,
        x: Tensor,
        difference: Float[Tensor, " sent"],
        bases: list[Tensor],
        matrices: list[_Matrix],
        r: int,
    ) -> tuple[Float[Tensor, " params"], list[Tensor]]:
        """The link's estimate of the difference of both models, and its next bases."""
        change, next_bases, start, remaining = torch.zeros_like(x), [], 0, iter(bases)
        for matrix in matrices:
            if not matrix.columns:
                change[matrix.start : matrix.start + matrix.rows] = difference[start : start + matrix.rows]
                start += matrix.rows
                continue
            basis, side = next(remaining), matrix.columns if r % 2 else matrix.rows
            D = difference[start : start + side * self.rank].view(side, self.rank)
            start += side * self.rank
            matrix.of(change, transposed=r % 2 == 1).copy_(D @ basis.T)
            # If the matrices are equal, D = 0 would give a basis that misses some differences forever.
            next_bases.append(torch.linalg.qr(D if D.any() else torch.ones_like(D)).Q)
        return change, next_bases
