"""Row-stochastic weights, and yet the mean of all nodes' objectives.

Mai & Abed, "Distributed Optimization over Weighted Directed Graphs Using Row Stochastic Matrix", ACC 2016 (from memory).
"""

from __future__ import annotations

import torch
from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.node import Node, Setting


@register("algorithm", "influence-corrected")
class InfluenceCorrected(Algorithm):
    """Training by epochs whose displacement is divided by the node's influence, and mixing by ``topology.weights``.

    Nodes that mix by a row-stochastic W agree on a mean in which node i counts by its stationary influence pi_i (pi W = pi):
    hubs decide. Mai & Abed divide a node's steps by its influence, which the nodes find by mixing unit vectors:

        x_i <- sum_j W_ij x_j - eta g_i(x_i) / y_ii,   y_i <- sum_j W_ij y_j,   y_i = e_i at first

    y_ii tends to pi_i. Here the displacement of a round's epochs takes the place of the step, nodes train before they mix,
    and the divisor is n y_ii, so that steps have their usual length where all nodes count the same. A message grows by n
    numbers. The weights must not change with the round. The column ``influence`` has y_ii.

    Args:
        local_epochs: passes over a node's samples a round.
        most: the largest factor of a displacement. Nodes of little influence would take very long steps; those that reach the
            limit still count for less than the others."""

    local_epochs: int = Field(default=1, ge=1)
    most: float = Field(default=10.0, ge=1)

    def check(self, setting: Setting) -> None:
        if not setting.topology.static_weights:
            found = "weights that change with the round, for influence-corrected"
            raise BadInput(f"topology: {found}; accepted: static ones")

    async def run(self, node: Node) -> None:
        if "influences" not in node.state:
            node.state["influences"] = torch.eye(node.size)[node.rank].clone()
        async for r in node.rounds():
            x, y = node.parameters, node.state["influences"]
            await node.train(self.local_epochs * node.steps_per_epoch)
            node.record(influence=float(y[node.rank]))
            factor = min(1 / (node.size * max(float(y[node.rank]), 1e-30)), self.most)
            node.parameters = x + factor * (node.parameters - x)
            W = node.mixing_weights(r)
            node.broadcast(await node.neighbors(r, "out"), {"model": node.model, "influences": y}, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix({rank: each["model"] for rank, each in inbox.items()}, W)
            others = {rank: each["influences"] for rank, each in inbox.items()}
            node.state["influences"] = await node.combine(y, others, W)
