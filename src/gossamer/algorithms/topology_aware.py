"""The rounds in which the spread of knowledge over a graph was studied.

Sakarvadia et al., "Topology-Aware Knowledge Propagation in Decentralized Learning", arXiv 2505.11760; the rules are those of
its published code, whose experiments begin with different models (``initial: independent``) and a new optimizer each round
(``optimizer.reset_every_round``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm, participants
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.node import Node, Setting


@register("algorithm", "topology-aware")
class TopologyAware(Algorithm):
    """Training by epochs and mixing by the weights of the topology (Sakarvadia et al., 2025).

    With the weights C of ``topology.weights`` (``centrality`` is the paper's), over the closed neighbourhood of node i,

        m_i <- LocalTrain(m_i; E epochs),   m_i <- sum_j C_ij m_j

    Args:
        local_epochs: E, passes over a node's samples a round.
        participation: the share of nodes that train and mix in a round, drawn for each; the others keep their models.
        proximal: mu of a proximal term, which pulls a node's model toward those with which its neighbours began the round,
            a_k: the loss is f(x) + mu / 2 sum_k D(x, a_k). It costs a second exchange of models.
        distance: D of the proximal term: "squared" is ||x - a||^2 (FedProx; Li et al., MLSys 2020), "norm" the sum over the
            model's tensors of ||x_p - a_p||, as in the published code.
        order: "simultaneous" mixes by C exactly. In "sequential" order nodes mix one after the other, by rank, and take the
            mixed models of those before them: the published code does that by mistake, whenever one thread runs it.
        evaluate_trained: the evaluation sets (``test``, ...) on which a node evaluates its trained model before it mixes, in
            columns ``trained_<set>_<metric>``. This takes time on the node's clock."""

    mixes_models: ClassVar[bool] = True
    local_epochs: int = Field(default=1, ge=1)
    participation: float = Field(default=1.0, gt=0, le=1)
    proximal: float = Field(default=0.0, ge=0)
    distance: Literal["squared", "norm"] = "squared"
    order: Literal["simultaneous", "sequential"] = "simultaneous"
    evaluate_trained: tuple[str, ...] = ()

    def check(self, setting: Setting) -> None:
        for name in self.evaluate_trained:
            if name not in setting.evaluation_sets:
                accepted = ", ".join(setting.evaluation_sets)
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
        """Take others' models as they trained them, or, of those that mix before this node, as they mixed them."""
        first = self.order == "simultaneous"
        node.broadcast([k for k in receivers if first or k < node.rank], node.model, tag=("trained", r))
        inbox = dict(await node.gather([k for k in senders if first or k > node.rank], tag=("trained", r)))
        if not first:
            inbox |= await node.gather([k for k in senders if k < node.rank], tag=("mixed", r))
        if senders:
            await node.mix(inbox, node.mixing_weights(r))
        if not first:
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
            found = await node.evaluate(on=name)
            node.record(**{f"trained_{name}_{metric}": value for metric, value in found.items()})

    def _pull(self, node: Node, anchors: Sequence[Tensor]) -> Float[Tensor, " params"]:
        """The gradient of the proximal term."""
        away = node.parameters - torch.stack(list(anchors))
        if self.distance == "squared":
            return self.proximal * away.sum(0)
        for tensor in node.layout:
            part = away[:, tensor.start : tensor.stop]
            part /= part.norm(dim=1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)
        return self.proximal / 2 * away.sum(0)
