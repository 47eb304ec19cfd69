"""D-PSGD: decentralized parallel stochastic gradient descent.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, Algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.registry import register
from gossamer.messages.tags import Model
from gossamer.node import Node
from gossamer.topology import BY_TOPOLOGY, Mixing


@register("algorithm", "d-psgd")
class DPSGD(Algorithm):
    """D-PSGD (Lian et al., 2017): local steps, then a mean with the neighbours, weighted by W
    (``topology.weights``).

        local steps first (as in DecentralizePy):    x_i <- sum_j W_ij (x_j - eta g_j(x_j))
        overlap (the paper's):                       x_i <- sum_j W_ij x_j - eta g_i(x_i)

    Args:
        local_steps: mini-batch steps a round.
        overlap: mix the models from before the steps while the steps are computed. With several steps, their
            total displacement replaces the single step. Batch-norm buffers are not mixed in this form."""

    mixes_models: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    overlap: bool = False

    def ends_with_steps(self) -> bool:
        return self.overlap

    def mixing(self) -> Mixing:
        return BY_TOPOLOGY

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if self.overlap:
                await self._overlapped(node, r)
                continue
            await node.train(self.local_steps)
            node.broadcast(await node.neighbors(r, "out"), node.model, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix(inbox, node.mixing_weights(r))
            del inbox  # frees this round's vectors before the next round's are computed

    async def _overlapped(self, node: Node, r: int) -> None:
        before = node.parameters
        training = node.spawn(node.train(self.local_steps))
        node.broadcast(await node.neighbors(r, "out"), Model(before), tag=r)
        inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
        mixed = await node.combine(before, inbox, node.mixing_weights(r), aggregate=True)
        # Keep the update so far. The rest is added to the mixed model when it is committed.
        node.parameters = mixed + (node.parameters - before)
        await training
