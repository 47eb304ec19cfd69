"""Topology-aware mixing without knowledge of the graph: nodes compute their centralities by gossip, while they train.

The weights are those of Sakarvadia et al., "Topology-Aware Knowledge Propagation in Decentralized Learning", arXiv
2505.11760.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from gossamer.algorithms.algorithm import MOST, Algorithm, whole_number
from gossamer.config.registry import register
from gossamer.messages.tags import Message
from gossamer.node import Node
from gossamer.topology.weights import shares


@register("algorithm", "gossiped-centrality")
class GossipedCentrality(Algorithm):
    """Training by epochs, and mixing by centralities that nodes learn from their neighbours, not by ``topology.weights``.

    Over the closed neighbourhood of i, with scores s and a temperature,

        x_i <- sum_j C_ij x_j,   C_ij = exp(s_j / temperature) / sum_k exp(s_k / temperature)

    A node sends its score and its degree with its model. PageRank (Brin & Page, 1998) is the limit of a power iteration, of
    which nodes take one step a round, with in-neighbours j that have d_j out-neighbours:

        p_i <- (1 - damping) / n + damping * sum_j p_j / d_j

    The last score that came stands in for a lost one. The column ``score`` has the scores.

    Args:
        local_epochs: passes over a node's samples a round.
        measure: "degree" is the share of all other nodes that are neighbours, "pagerank" the probability to be there.
        temperature: of the softmax; null takes weights in proportion to the scores. (A PageRank is about 1 / n.)
        damping: of PageRank, the chance to follow a link."""

    mixes_models: ClassVar[bool] = True
    local_epochs: int = Field(default=1, ge=1)
    measure: Literal["degree", "pagerank"] = "pagerank"
    temperature: float | None = Field(default=None, gt=0)
    damping: float = Field(default=0.85, gt=0, lt=1)

    async def run(self, node: Node) -> None:
        node.state.setdefault("score", 1 / node.size)
        node.expect(0, {"model": node.model, "score": 1.0, "degree": 1}, check=_check)
        heard = node.state.setdefault("heard", {})  # rank -> the newest score and degree
        async for r in node.rounds():
            await node.train(self.local_epochs * node.steps_per_epoch)
            receivers, senders = await node.neighbors(r, "out"), await node.neighbors(r, "in")
            if self.measure == "degree":
                node.state["score"] = len({*receivers, *senders}) / max(node.size - 1, 1)
            own, degree = node.state["score"], len(receivers)
            node.record(score=own)
            node.broadcast(receivers, {"model": node.model, "score": own, "degree": degree}, tag=r)
            inbox = await node.gather(senders, tag=r)
            for rank, each in inbox.items():
                heard[rank] = each["score"], each["degree"]
            if inbox:
                scores = {node.rank: own, **{rank: each["score"] for rank, each in inbox.items()}}
                weights = shares(scores, self.temperature)
                self_weight = weights.pop(node.rank)
                models = {rank: each["model"] for rank, each in inbox.items()}
                await node.mix(models, weights, self_weight=self_weight)
            if self.measure == "pagerank":
                followed = sum(heard[rank][0] / heard[rank][1] for rank in senders if rank in heard)
                node.state["score"] = (1 - self.damping) / node.size + self.damping * followed


def _check(message: Message) -> None:
    """ValueError for a degree that is not a whole number of at least 1, or a score below 0 or above MOST."""
    whole_number(message.payload["degree"], 1, "degree")
    score = message.payload["score"]
    if not isinstance(score, float) or not 0 <= score <= MOST:
        raise ValueError(f"score of a peer: got {score!r}; accepted: a number from 0 to {MOST}")
