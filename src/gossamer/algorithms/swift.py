"""SWIFT: wait-free averaging with the last models received.

Bornstein et al., "SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication", ICLR
2023, Algorithm 1; checked against the authors' code, which sends a model only after its gradient is computed,
instead of at once.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Model, Sending
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing, TopologySchedule
from gossamer.topology.mixing import topology_row, with_own
from gossamer.topology.weights import Row, ccs


@register("algorithm", "swift")
class Swift(Algorithm):
    """SWIFT (Bornstein et al., 2023): averaging, at a node's own pace, with the last models received.

    Node i sends its model to its neighbours and takes a gradient; every (s + 1)-th time it also averages:

        x_i <- w_ii x_i + sum_j w_ij x_j^last - eta g_i(x_i before averaging),    else    x_i <- x_i - eta g_i(x_i)

    A neighbour is skipped while more than one window of the last model for it is unsent. On a slow link it
    gets fewer models rather than increasingly stale ones.

    Args:
        local_steps: mini-batch steps a round. Their total displacement replaces the paper's single step.
        average_every: average in every k-th round: s + 1 in the paper (its C_0 is 1, C_1 is 2).
        memory: "stored" averages with the last model of every neighbour, however old, on a static topology; before the first
            one arrives, the node's initial model replaces it. "fresh" averages only with models that arrived since the last
            averaging and gives the other weights to the node itself: the memory-efficient variant.
        boost: with "fresh", multiply the weights of the models that arrived by (1 + degree) / (1 + their number), but keep
            at least the share 1 / (1 + their number) for the node itself.
        weights: "ccs" is the rule of the paper (:class:`gossamer.topology.CCS`; each node computes it from the whole
            graph, while the paper's nodes exchange it before the start); "topology" is ``topology.weights``.

    Records ``heard``, the number of models that arrived for the last averaging, and with stored models
    ``mixed_staleness_s``, the mean age of the neighbours' models, where the initial one is as old as the run."""

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    average_every: int = Field(default=1, ge=1)
    memory: Literal["stored", "fresh"] = "stored"
    boost: bool = False
    weights: Literal["ccs", "topology"] = "ccs"

    def mixing(self) -> Mixing:
        by_topology = self.weights == "topology"
        return Mixing(
            weights="topology.weights" if by_topology else "ccs",
            row=topology_row if by_topology else _ccs_row,
            note="the figures describe rounds in which all models arrive; nodes mix at their own pace",
        )

    def check(self, context: CheckContext) -> None:
        topology = context.topology
        if self.boost and self.memory != "fresh":
            raise BadInput('algorithm.boost: true with memory "stored"; accepted: false, or memory "fresh"')
        if self.memory == "stored" and not topology.static:
            problem = 'one that changes, for algorithm.memory "stored"'
            raise BadInput(f'topology: {problem}; accepted: a static one, or "fresh"')
        if topology.graph(0).directed and self.weights == "ccs":
            accepted = '"topology", or an undirected graph'
            raise BadInput(f'algorithm.weights: "ccs" on a directed graph; accepted: {accepted}')

    def mixes_what_arrives(self) -> bool:
        return self.memory == "fresh"

    def ends_with_steps(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        if self.memory == "stored":
            first: Model = node.state.setdefault("first", node.model)
            last: dict[int, Model] = node.state.setdefault("last", {})
            sent_at: dict[int, float] = node.state.setdefault("sent_at", {})
        leaving: dict[int, Sending] = {}
        async for r in node.rounds():
            before = node.model
            free = [j for j in await node.neighbors(r, "out") if j not in leaving or leaving[j].done()]
            leaving.update(zip(free, node.broadcast(free, before, tag="model"), strict=True))
            await node.train(self.local_steps)
            if (r + 1) % self.average_every:
                continue
            arrived = node.drain("model", newest=True)
            newest = {message.source: message.payload for message in arrived}
            by_topology = self.weights == "topology"
            weights = node.mixing_weights(r) if by_topology else ccs(node.topology(r))[node.rank]
            if self.memory == "stored":
                last.update(newest)
                sent_at.update({message.source: message.sent_at for message in arrived})
                heard = {j: last.get(j, first) for j in weights}
                if weights:
                    mean_sent_at = math.fsum(sent_at.get(j, 0.0) for j in weights) / len(weights)
                    node.record(mixed_staleness_s=node.now() - mean_sent_at)
            else:
                heard = {j: newest[j] for j in weights if j in newest}
                weights = self._fresh_weights(weights, list(heard))
            mixed = await node.combine(before, heard, weights, aggregate=True)
            # Keep the updates of the steps since then.
            node.model = mixed + (node.model - before)
            node.record(heard=len(arrived))

    def _fresh_weights(self, weights: dict[int, float], heard: list[int]) -> dict[int, float]:
        """The weights of the models that arrived."""
        total = math.fsum(weights[j] for j in heard)
        if not self.boost or not total:
            return {j: weights[j] for j in heard}
        share = 1 / (1 + len(heard))
        factor = min((1 + len(weights)) * share, (1 - share) / total)
        return {j: factor * weights[j] for j in heard}


def _ccs_row(topology: TopologySchedule, rank: int, round: int) -> Row:
    return with_own(rank, dict(ccs(topology.graph(round))[rank]))
