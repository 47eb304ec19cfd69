"""References: no communication (local), all data at one node (centralized), the exact average every round (all-reduce).

All-reduce is a reduce-scatter, then an all-gather (Rabenseifner, "Optimization of Collective Reduction Operations", ICCS
2004), each as direct messages: the vector is split into n segments; node j averages segment j of all nodes in rank order and
sends the result to all. A node sends 2 (n - 1) / n of a model a round, and all nodes end with the same bits:

    x_i <- (1/n) sum_j (x_j - eta g_j(x_j))
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm
from gossamer.config.registry import register
from gossamer.node import Node


@register("algorithm", "local")
class Local(Algorithm):
    """Every node trains on its own data and never communicates: x_i <- x_i - eta g_i(x_i).

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: int = Field(default=1, ge=1)

    def sends_models(self) -> bool:
        return False

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.train(self.local_steps)


@register("algorithm", "centralized")
class Centralized(Algorithm):
    """One node (rank 0) holds all data and trains alone; the other nodes do nothing and are not evaluated.

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: int = Field(default=1, ge=1)

    def sends_models(self) -> bool:
        return False

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    async def run(self, node: Node) -> None:
        if node.rank == 0:
            async for _ in node.rounds():
                await node.train(self.local_steps)


@register("algorithm", "all-reduce")
class AllReduce(Algorithm):
    """Synchronous data parallelism: local steps, then the exact average over all nodes (the topology is not used).

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: int = Field(default=1, ge=1)

    def reaches_all(self) -> bool:
        return True

    def sends_models(self) -> bool:
        return False  # but segments of models

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            model = node.model
            node.model = model.unflatten(await self._average(node, r, model.flatten()))

    async def _average(self, node: Node, r: int, v: Tensor) -> Tensor:
        segments = v.tensor_split(node.size)
        for peer in node.peers():
            node.send(peer, segments[peer], tag=("scatter", r))
        parts = await node.gather(node.peers(), tag=("scatter", r))
        # Where peers are dead, the average is over those that are left.
        mean = await node.combine(segments[node.rank], parts, dict.fromkeys(parts, 1 / (1 + len(parts))))
        node.broadcast(node.peers(), mean, tag=("gather", r))
        means = {**await node.gather(node.peers(), tag=("gather", r)), node.rank: mean}
        # A segment whose owner is dead keeps the node's own values.
        return torch.cat([means.get(rank, segments[rank]) for rank in range(node.size)])
