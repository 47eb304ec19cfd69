"""Epidemic Learning: each node draws new recipients in every round.

De Vos et al., "Epidemic Learning: Boosting Decentralized Learning with Randomized Communication", NeurIPS
2023, Algorithm 1. All nodes draw senders and receivers from one shared generator, with the paper's
distribution. The published artifact queries a sampling process (Oracle), or notifies every node that is not
chosen, with O(n^2) small messages a round (Local).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.node import CheckContext, Node
from gossamer.topology import Graph, Mixing, random_regular

_PLAIN_MEAN = "the plain mean of its own model and those received"


class Epidemic(Algorithm):
    """The protocol that both variants share: local steps, sending the model to s nodes, then the plain mean
    of all received models, x_i <- (x_i + sum_{j in received} x_j) / (1 + |received|).

    Args:
        degree: s, the number of nodes to which a node sends its model.
        local_steps: mini-batch steps a round."""

    mixes_models: ClassVar[bool] = True
    degree: int = Field(default=7, ge=1)
    local_steps: LocalSteps = 1

    def check(self, context: CheckContext) -> None:
        nodes = context.nodes
        if nodes < 2:
            raise BadInput(f"nodes: {nodes} for {self.name_of()}; accepted: at least 2")
        if self.degree >= nodes:
            raise BadInput(f"algorithm.degree: {self.degree} for {nodes} nodes; accepted: 1 to {nodes - 1}")

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            seed = int(node.rng("epidemic", r, shared=True).integers(2**63))
            recipients, senders = self._draw(seed, node)
            node.broadcast(recipients, node.model, tag=r)
            inbox = await node.gather(senders, tag=r)
            await node.mix(inbox, {j: 1 / (1 + len(inbox)) for j in inbox})
            del inbox  # frees this round's vectors before the next round's are computed

    def _draw(self, seed: int, node: Node) -> tuple[Sequence[int], Sequence[int]]:
        """The recipients and the senders of a node."""
        raise NotImplementedError


@register("algorithm", "epidemic-oracle")
class EpidemicOracle(Epidemic):
    """EL-Oracle (de Vos et al., 2023): a fresh undirected s-regular graph over all nodes each round."""

    def mixing(self) -> Mixing:
        return Mixing(graph="a new random regular graph in every round", weights=_PLAIN_MEAN, links=None)

    def check(self, context: CheckContext) -> None:
        super().check(context)
        if self.degree * context.nodes % 2:
            problem = f"{self.degree} for {context.nodes} nodes"
            raise BadInput(f"algorithm.degree: {problem}; accepted: an even degree")

    def _draw(self, seed: int, node: Node) -> tuple[Sequence[int], Sequence[int]]:
        neighbors = _regular_graph(seed, node.size, self.degree).neighbors(node.rank)
        return neighbors, neighbors


@register("algorithm", "epidemic-local")
class EpidemicLocal(Epidemic):
    """EL-Local (de Vos et al., 2023): each node draws s out-neighbours, uniformly without replacement;
    in-degrees vary."""

    def mixing(self) -> Mixing:
        return Mixing(graph="new random recipients in every round", weights=_PLAIN_MEAN, links=None)

    def _draw(self, seed: int, node: Node) -> tuple[Sequence[int], Sequence[int]]:
        recipients, senders = _directed_graph(seed, node.size, self.degree)
        return recipients[node.rank], senders[node.rank]


@lru_cache(maxsize=8)  # a simulation draws each round once, not once for each node
def _regular_graph(seed: int, nodes: int, degree: int) -> Graph:
    return random_regular(nodes, degree, np.random.default_rng(seed))


@lru_cache(maxsize=8)
def _directed_graph(seed: int, nodes: int, degree: int) -> tuple[list[list[int]], list[list[int]]]:
    """The recipients and the senders of each node, ascending."""
    rng, recipients = np.random.default_rng(seed), []
    senders: list[list[int]] = [[] for _ in range(nodes)]
    for rank in range(nodes):
        order = rng.random(nodes)
        order[rank] = np.inf
        recipients.append(sorted(np.argpartition(order, degree - 1)[:degree].tolist()))
        for recipient in recipients[rank]:
            senders[recipient].append(rank)
    return recipients, senders
