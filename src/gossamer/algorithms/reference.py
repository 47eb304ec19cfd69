"""Baselines: no communication (local), all data at one node (centralized), the exact average in every round
(all-reduce), and federated averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps, participants, whole_number
from gossamer.config.ranges import PositiveSeconds
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Model, Payload
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing

DISMISSALS = 100  # times that the server, after its last round, tells waiting clients that no model will come


@register("algorithm", "local")
class Local(Algorithm):
    """Every node trains on its own data and never communicates: x_i <- x_i - eta g_i(x_i).

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: LocalSteps = 1

    def mixing(self) -> Mixing:
        return Mixing(graph="none: nodes send nothing", weights="none", links=None)

    def sends_messages(self) -> bool:
        return False

    def sends_models(self) -> bool:
        return False

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.train(self.local_steps)


@register("algorithm", "centralized")
class Centralized(Local):
    """One node (rank 0) holds all data and trains alone; the other nodes do nothing and are not evaluated.

    Args:
        local_steps: mini-batch steps a round."""

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        return (0,)

    async def run(self, node: Node) -> None:
        if node.rank == 0:
            await super().run(node)


@register("algorithm", "all-reduce")
class AllReduce(Algorithm):
    """Synchronous data parallelism: local steps, then the exact average over all nodes (the topology is not used).

    x_i <- (1/n) sum_j (x_j - eta g_j(x_j)), by a reduce-scatter and an all-gather (Rabenseifner,
    "Optimization of Collective Reduction Operations", ICCS 2004), each as direct messages: node j averages
    segment j of all nodes in rank order and sends the result to all. A node sends 2 (n - 1) / n of a model
    per round, and all nodes end with the same bits. A codec encodes each segment in both phases; the owner of
    a segment continues with the mean that the others decode.

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: LocalSteps = 1

    def mixing(self) -> Mixing:
        return Mixing(graph="all nodes", weights="1 / n for every node", links=None)

    def reaches_all(self) -> bool:
        return True

    def sends_pieces(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            node.model = await self._average(node, r, node.model)
            node.mixed = node.model

    async def _average(self, node: Node, r: int, model: Model) -> Model:
        segments = [Model(*pair) for pair in zip(*(v.tensor_split(node.size) for v in model), strict=True)]
        node.expect("scatter", segments[node.rank])
        node.expect("gather", check=lambda message: _alike(message.payload, segments[message.source]))
        for peer in node.peers():
            node.send(peer, segments[peer], tag=("scatter", r))
        parts = await node.gather(node.peers(), tag=("scatter", r))
        # The average is over the peers that are alive.
        mean = await node.combine(segments[node.rank], parts, dict.fromkeys(parts, 1 / (1 + len(parts))))
        sent, decoded = node.compress(mean.parameters)
        node.broadcast(node.peers(), Model(sent, mean.buffers), tag=("gather", r))
        means = await node.gather(node.peers(), tag=("gather", r))
        means[node.rank] = Model(decoded, mean.buffers)
        # A segment whose owner is dead keeps the node's own values.
        averaged = [means.get(rank, segments[rank]) for rank in range(node.size)]
        return Model(*(torch.cat(vectors) for vectors in zip(*averaged, strict=True)))


@register("algorithm", "fedavg")
class FedAvg(Algorithm):
    """FedAvg (McMahan et al., 2017). The server holds no training data; its model is the one that is evaluated.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1:
    each round the server sends x to a set S of max(C K, 1) of the K clients; each takes local steps from it and sends the
    result x_k back:

        x <- sum_{k in S} (n_k / sum_{l in S} n_l) x_k

    The server skips clients whose models do not arrive. Such a client continues with the next model that
    reaches it. The server sends to clients directly; the topology is only plotted.

    Args:
        local_steps: mini-batch steps of a client a round. A client's optimizer is reset in each round.
        client_fraction: C, the fraction of clients that take part in a round.
        weighting: "data" weighs clients by their number of samples (the paper); "uniform" is DecentralizePy's
            plain mean.
        server: rank of the server.
        idle_s: minimum length in seconds of a round in which no client answers. (Otherwise rounds would take no time while
            all clients are away.) Also the interval at which the server dismisses waiting clients after its last round."""

    mixes_models: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    client_fraction: float = Field(default=1.0, gt=0, le=1)
    weighting: Literal["data", "uniform"] = "data"
    server: int = Field(default=0, ge=0)
    idle_s: PositiveSeconds = 1.0

    def mixing(self) -> Mixing:
        by_data = self.weighting == "data"
        return Mixing(
            graph="the server and the clients of the round",
            weights="in proportion to the samples of the clients" if by_data else "the same for every client",
            links=None,
        )

    def check(self, context: CheckContext) -> None:
        if self.server >= context.nodes:
            last = context.nodes - 1
            raise BadInput(f"algorithm.server: rank {self.server} of {last + 1} nodes; accepted: 0 to {last}")

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        return tuple(rank for rank in range(nodes) if rank != self.server)

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        return (self.server,)

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        return (self.server,)

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        like = {"model": node.model, "samples": 0}
        node.expect("update", like, check=lambda m: whole_number(m.payload["samples"], 0, "samples"))
        node.expect("model", node.model, None, check=lambda message: type(message.tag[1]) is int)
        clients = self.data_ranks(node.size)
        async for r in node.rounds():
            chosen = participants(node, "clients", r, clients, self.client_fraction)
            if node.rank == self.server:
                await self._serve(node, r, chosen)
            elif node.rank in chosen:
                await self._work(node, r)
        if node.rank == self.server:
            node.spawn(self._dismiss(node))

    async def _serve(self, node: Node, r: int, clients: Sequence[int]) -> None:
        start = node.now()
        node.broadcast(clients, node.model, tag=("model", r))
        replies = await node.gather(clients, tag=("update", r))
        by_data = self.weighting == "data"
        sizes = {k: reply["samples"] if by_data else 1 for k, reply in replies.items()}
        models = {k: reply["model"] for k, reply in replies.items()}
        if any(sizes.values()):
            await node.mix(models, {k: sizes[k] / sum(sizes.values()) for k in models}, self_weight=0.0)
        else:
            await node.sleep(max(start + self.idle_s - node.now(), 0.0))

    async def _work(self, node: Node, r: int) -> None:
        model = await self._model(node, r)
        if model is None:
            return
        node.model = model
        node.reset_optimizer()
        await node.train(self.local_steps)
        node.send(self.server, {"model": node.model, "samples": node.samples}, tag=("update", r))

    async def _model(self, node: Node, r: int) -> Payload:
        """The server's model of a round; None if the model of a later round arrived instead."""
        while node.state.get("round", -1) < r:
            message = await node.receive("model", source=self.server)
            node.state["round"], node.state["model"] = message.tag[1], message.payload
        return node.state.pop("model") if node.state["round"] == r else None

    async def _dismiss(self, node: Node) -> None:
        for _ in range(DISMISSALS):
            await node.sleep(self.idle_s)
            node.broadcast(self.data_ranks(node.size), None, tag=("model", node.round))


def _alike(model: Model, other: Model) -> bool:
    return [(v.dtype, len(v)) for v in model] == [(v.dtype, len(v)) for v in other]
