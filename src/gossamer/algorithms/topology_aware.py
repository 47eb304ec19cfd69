"""Training by epochs, and mixing that depends on a node's position in the graph: by given weights, by
centralities that nodes learn by gossip, or corrected for the nodes' influence.

Sakarvadia et al., "Topology-Aware Knowledge Propagation in Decentralized Learning", arXiv 2505.11760; the
rules are those of its published code, whose experiments start from different models (``initial:
independent``) and a new optimizer each round (``optimizer.reset_every_round``).

The idea of correcting for influence is from Mai & Abed, "Distributed Optimization over Weighted Directed Graphs Using Row
Stochastic Matrix", ACC 2016 (cited from memory); :class:`InfluenceCorrected` states the form used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import MAX_NUMBER, Algorithm, LocalSteps, participants, whole_number
from gossamer.config.ranges import Factor, NonNegativeFloat32
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message
from gossamer.node import CheckContext, Node
from gossamer.topology import BY_TOPOLOGY, Mixing, TopologySchedule
from gossamer.topology.mixing import topology_row
from gossamer.topology.weights import Row, shares


@register("algorithm", "topology-aware")
class TopologyAware(Algorithm):
    """Training by epochs and mixing by the weights of the topology (Sakarvadia et al., 2025).

    With the weights C of ``topology.weights`` (``centrality`` is the paper's), over the closed neighbourhood of node i,

        m_i <- LocalTrain(m_i; E epochs),   m_i <- sum_j C_ij m_j

    Args:
        local_epochs: E, passes over a node's samples a round.
        participation: the fraction of nodes that train and mix in a round, drawn for each round. The others
            keep their models, and still send them to the neighbours that mix.
        proximal: mu of a proximal term, which pulls a node's model towards the models a_k of its neighbours
            at the start of the round: the loss is f(x) + mu / 2 sum_k D(x, a_k). It requires a second
            exchange of models.
        distance: D of the proximal term: "squared" is ||x - a||^2 (FedProx; Li et al., MLSys 2020), "norm" the sum over the
            model's tensors of ||x_p - a_p||, as in the published code.
        order: "simultaneous" mixes by C exactly. With "sequential", nodes mix one after the other, by rank,
            and use the mixed models of those before them, as the published code does by mistake when it runs
            in one thread.
        evaluate_trained: the evaluation sets (``test``, ...) on which a node evaluates its trained model before it mixes, in
            columns ``trained_<set>_<metric>``. This takes time on the node's clock."""

    mixes_models: ClassVar[bool] = True
    local_epochs: LocalSteps = 1
    participation: float = Field(default=1.0, gt=0, le=1)
    proximal: NonNegativeFloat32 = 0.0
    distance: Literal["squared", "norm"] = "squared"
    order: Literal["simultaneous", "sequential"] = "simultaneous"
    evaluate_trained: tuple[str, ...] = ()

    def mixing(self) -> Mixing:
        if self.order == "sequential":
            return Mixing(weights="topology.weights, one node after the other")
        if self.participation < 1:
            return Mixing(weights="topology.weights, at the nodes drawn for the round")
        return BY_TOPOLOGY

    def check(self, context: CheckContext) -> None:
        for name in self.evaluate_trained:
            if name not in context.evaluation_sets:
                accepted = ", ".join(context.evaluation_sets)
                raise BadInput(f"algorithm.evaluate_trained: {name!r}; accepted: {accepted}")

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            mixing = participants(node, "participants", r, range(node.size), self.participation)
            receivers = [rank for rank in await node.neighbors(r, "out") if rank in mixing]
            senders = await node.neighbors(r, "in") if node.rank in mixing else ()
            anchors: list[Tensor] = []
            if self.proximal:
                node.broadcast(receivers, node.model, tag=("anchor", r))
                models = await node.gather(senders, tag=("anchor", r))
                anchors = [model.over(node.model).parameters for model in models.values()]
            if node.rank in mixing:
                await self._train(node, anchors)
            await self._mix(node, r, receivers, senders)

    async def _mix(self, node: Node, r: int, receivers: Sequence[int], senders: Sequence[int]) -> None:
        """Collect the neighbours' models: trained ones, or mixed ones from nodes that mix before this
        node."""
        at_once = self.order == "simultaneous"
        node.broadcast([k for k in receivers if at_once or k < node.rank], node.model, tag=("trained", r))
        inbox = dict(await node.gather([k for k in senders if at_once or k > node.rank], tag=("trained", r)))
        if not at_once:
            inbox |= await node.gather([k for k in senders if k < node.rank], tag=("mixed", r))
        if senders:
            await node.mix(inbox, node.mixing_weights(r))
        if not at_once:
            node.broadcast([k for k in receivers if k > node.rank], node.model, tag=("mixed", r))

    async def _train(self, node: Node, anchors: Sequence[Tensor]) -> None:
        steps = self.local_epochs * node.steps_per_epoch
        if not anchors:
            await node.train(steps)
        else:
            for _ in range(steps):
                gradient = await node.gradient()
                await node.apply(gradient + self._pull(node, anchors))
        for name in self.evaluate_trained:
            metrics = await node.evaluate(on=name)
            node.record(**{f"trained_{name}_{metric}": value for metric, value in metrics.items()})

    def _pull(self, node: Node, anchors: Sequence[Tensor]) -> Float[Tensor, " params"]:
        """The gradient of the proximal term."""
        differences = node.parameters - torch.stack(list(anchors))
        if self.distance == "squared":
            return self.proximal * differences.sum(0)
        for tensor in node.layout:
            part = differences[:, tensor.start : tensor.stop]
            part /= part.norm(dim=1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)
        return self.proximal / 2 * differences.sum(0)


@register("algorithm", "gossiped-centrality")
class GossipedCentrality(Algorithm):
    """Training by epochs, and mixing by centralities that nodes learn from their neighbours, not by ``topology.weights``.

    Over the closed neighbourhood of i, with scores s and a temperature,

        x_i <- sum_j C_ij x_j,   C_ij = exp(s_j / temperature) / sum_k exp(s_k / temperature)

    A node sends its score and its degree with its model. PageRank (Brin & Page, 1998) is the limit of a power
    iteration. Nodes take one step of it per round, with in-neighbours j that have d_j out-neighbours:

        p_i <- (1 - damping) / n + damping * sum_j p_j / d_j

    The last score received replaces a lost one. Records ``score``.

    Args:
        local_epochs: passes over a node's samples a round.
        measure: "degree" is the fraction of all other nodes that are neighbours, "pagerank" the stationary
            probability of a random surfer.
        temperature: temperature of the softmax. Null makes the weights proportional to the scores. (A
            PageRank is about 1 / n.)
        damping: PageRank's probability of following a link."""

    mixes_models: ClassVar[bool] = True
    local_epochs: LocalSteps = 1
    measure: Literal["degree", "pagerank"] = "pagerank"
    temperature: Factor | None = None
    damping: float = Field(default=0.85, gt=0, lt=1)

    def mixing(self) -> Mixing:
        return Mixing(
            weights="by the scores that nodes learn by gossip",
            row=self._degree_row if self.measure == "degree" else None,  # a PageRank changes with the round
        )

    def _degree_row(self, topology: TopologySchedule, rank: int, round: int) -> Row:
        graph = topology.graph(round)
        closed = sorted((rank, *graph.neighbors(rank, "in")))
        return shares(
            {
                j: self._degree(graph.neighbors(j, "out"), graph.neighbors(j, "in"), graph.nodes)
                for j in closed
            },
            self.temperature,
        )

    @staticmethod
    def _degree(receivers: Sequence[int], senders: Sequence[int], nodes: int) -> float:
        """The fraction of all other nodes that are neighbours."""
        return len({*receivers, *senders}) / max(nodes - 1, 1)

    async def run(self, node: Node) -> None:
        node.state.setdefault("score", 1 / node.size)
        node.expect(0, {"model": node.model, "score": 1.0, "degree": 1}, check=_check)
        heard = node.state.setdefault("heard", {})  # rank -> the newest score and degree
        async for r in node.rounds():
            await node.train(self.local_epochs * node.steps_per_epoch)
            receivers, senders = await node.neighbors(r, "out"), await node.neighbors(r, "in")
            if self.measure == "degree":
                node.state["score"] = self._degree(receivers, senders, node.size)
            own, degree = node.state["score"], len(receivers)
            node.record(score=own)
            node.broadcast(receivers, {"model": node.model, "score": own, "degree": degree}, tag=r)
            inbox = await node.gather(senders, tag=r)
            for rank, message in inbox.items():
                heard[rank] = message["score"], message["degree"]
            if inbox:
                scores = {node.rank: own, **{rank: message["score"] for rank, message in inbox.items()}}
                weights = shares(scores, self.temperature)
                self_weight = weights.pop(node.rank)
                models = {rank: message["model"] for rank, message in inbox.items()}
                await node.mix(models, weights, self_weight=self_weight)
            if self.measure == "pagerank":
                followed = math.fsum(heard[rank][0] / heard[rank][1] for rank in senders if rank in heard)
                node.state["score"] = (1 - self.damping) / node.size + self.damping * followed


def _check(message: Message) -> None:
    """ValueError for a degree that is not a whole number of at least 1, or a score below 0 or above MAX_NUMBER."""
    whole_number(message.payload["degree"], 1, "degree")
    score = message.payload["score"]
    if not isinstance(score, float) or not 0 <= score <= MAX_NUMBER:
        raise ValueError(f"score of a peer: got {score!r}; accepted: a number from 0 to {MAX_NUMBER}")


@register("algorithm", "influence-corrected")
class InfluenceCorrected(Algorithm):
    """Training by epochs with the displacement divided by the node's influence, and mixing by
    ``topology.weights``.

    Nodes that mix by a row-stochastic W agree on a mean in which node i is weighted by its stationary
    influence pi_i (pi W = pi), so hubs dominate. After an idea of Mai & Abed, a node's steps are divided by its
    influence, which the nodes find by mixing unit vectors:

        x_i <- sum_j W_ij x_j - eta g_i(x_i) / y_ii,   y_i <- sum_j W_ij y_j,   y_i = e_i at first

    y_ii converges to pi_i. Here the displacement of a round's epochs replaces the step, nodes train before
    they mix, and the divisor is n y_ii, so that steps have their usual length if all nodes have equal
    influence. A message grows by n numbers. The weights must not change with the round. Records
    ``influence``, which is y_ii.

    Args:
        local_epochs: passes over a node's samples a round.
        most: the largest factor of a displacement. It limits the steps of nodes with little influence; nodes
            at the limit still count for less than the others."""

    local_epochs: LocalSteps = 1
    most: float = Field(default=10.0, ge=1)

    def mixing(self) -> Mixing:
        return Mixing(row=topology_row, note="the steps of a node are divided by its influence")

    def message_limit(self, P: int, nodes: int) -> int:
        return super().message_limit(P, nodes) + 4 * nodes

    def check(self, context: CheckContext) -> None:
        if not context.topology.static_weights:
            problem = "weights that change with the round, for influence-corrected"
            raise BadInput(f"topology: {problem}; accepted: static ones")

    async def run(self, node: Node) -> None:
        if "influences" not in node.state:
            node.state["influences"] = node.parameters.new_zeros(node.size)
            node.state["influences"][node.rank] = 1.0
        async for r in node.rounds():
            x, y = node.parameters, node.state["influences"]
            await node.train(self.local_epochs * node.steps_per_epoch)
            node.record(influence=float(y[node.rank]))
            factor = min(1 / (node.size * max(float(y[node.rank]), 1e-30)), self.most)
            node.parameters = x + factor * (node.parameters - x)
            W = node.mixing_weights(r)
            node.broadcast(await node.neighbors(r, "out"), {"model": node.model, "influences": y}, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix({rank: message["model"] for rank, message in inbox.items()}, W)
            ys = {rank: message["influences"] for rank, message in inbox.items()}
            node.state["influences"] = await node.combine(y, ys, W)
