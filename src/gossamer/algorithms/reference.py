"""Lower and upper references, which send no messages."""

from __future__ import annotations

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm
from gossamer.config.registry import register
from gossamer.node import Node


@register("algorithm", "local")
class Local(Algorithm):
    """Every node trains on its own data and never communicates: x_i <- x_i - eta g_i(x_i).

    Args:
        local_steps: mini-batch steps a round.
    """

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
        local_steps: mini-batch steps a round.
    """

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
