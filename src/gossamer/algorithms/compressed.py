"""Algorithms that mix compressed differences: CHOCO-SGD, DeepSqueeze, BEER.

The experiment's codec is the compressor C. It compresses the difference between a vector and what the
neighbours know of it. The next difference includes what C has lost, so any C whose error is smaller than the
difference is suitable. Without a codec, C is the identity. W is the matrix of ``topology.weights``, which has
to be symmetric and doubly stochastic; eta is the learning rate. The formulas are taken from the authors' code
(epfml/ChocoSGD, epfml/powergossip, liboyue/beer), not from the papers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.algorithms.corrected import check_doubly_stochastic
from gossamer.config.ranges import PositiveShareFloat32
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.learning.optimizer import SGD
from gossamer.messages.tags import Model, dense
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing, TopologySchedule
from gossamer.topology.mixing import damped


class _Compressed(Algorithm):
    """Base class of algorithms that mix compressed differences.

    Args:
        gamma: step size of the mixing. The more C loses, the smaller gamma has to be; 1 is the plain weighted mean."""

    sends_differences: ClassVar[bool] = True
    needs_every_message: ClassVar[bool] = True

    gamma: PositiveShareFloat32 = 0.4

    def mixing(self) -> Mixing:
        return Mixing(
            weights="(1 - gamma) I + gamma W, with W of topology.weights",
            row=damped(self.gamma),
        )

    def check(self, context: CheckContext) -> None:
        check_doubly_stochastic(context.topology, self.name_of())

    def unencoded(self, topology: TopologySchedule) -> str:
        replicas = self.needs_every_message and not topology.static
        return "the replicas for new neighbours" if replicas else ""


async def _exchange(
    node: Node, r: int, name: str, vector: Float[Tensor, " params"], *, buffers: bool = False
) -> Model:
    """Send the change of a vector, and mix the replicas. Returns sum_j W_ij x̂_j - x̂_i and the mean of the
    buffers. ``node.state[name]`` holds the replicas by rank, including the node's own. When the graph
    changes, new neighbours get the replica itself, unencoded."""
    known: dict[int, Tensor] = node.state.setdefault(name, {})
    zeros = torch.zeros_like(vector)
    sent, change = node.compress(vector - known.get(node.rank, zeros))
    parameters = node.store(known.get(node.rank, zeros) + change)
    own = Model(parameters, node.buffers) if buffers else Model(parameters)
    receivers = set(await node.neighbors(r, "out"))
    earlier = set(await node.neighbors(max(r - 1, 0), "out"))
    node.broadcast(receivers & earlier, Model(sent, own.buffers), tag=(name, r))
    node.broadcast(receivers - earlier, own, tag=(name, r), exact=True)
    inbox = await node.gather(await node.neighbors(r, "in"), tag=(name, r))
    replicas = {}
    for rank, model in inbox.items():
        if rank in known or r == 0:
            model = Model(node.store(known.get(rank, zeros) + dense(model.parameters)), model.buffers)
        replicas[rank] = model
    node.state[name] = {rank: model.parameters for rank, model in {node.rank: own, **replicas}.items()}
    mixed: Model = await node.combine(own, replicas, node.mixing_weights(r))
    return Model(mixed.parameters - own.parameters, mixed.buffers)


@register("algorithm", "choco-sgd")
class ChocoSGD(_Compressed):
    """CHOCO-SGD (Koloskova et al., 2019): nodes keep a replica of each neighbour's model.

    Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication",
    ICML 2019, Algorithm 2, with replicas x̂, zero at first:

        x_i <- x_i - eta g_i(x_i)
        q_i = C(x_i - x̂_i), which is sent;   x̂_j <- x̂_j + q_j for j = i and all neighbours
        x_i <- x_i + gamma sum_j W_ij (x̂_j - x̂_i)

    Args:
        local_steps: mini-batch steps a round."""

    local_steps: LocalSteps = 1

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            drift = await _exchange(node, r, "replicas", node.parameters, buffers=True)
            node.model = Model(node.parameters + self.gamma * drift.parameters, drift.buffers)
            node.mixed = node.model


@register("algorithm", "deepsqueeze")
class DeepSqueeze(_Compressed):
    """DeepSqueeze (Tang et al., 2019): nodes keep their compression error, and no replicas.

    Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019, Algorithm 1, with
    the error e, initially zero. C(v_i) replaces the C(v_j) of a neighbour missing from a round.

        x_i <- x_i - eta g_i(x_i),   v_i = x_i + e_i,   C(v_i) is sent,   e_i <- v_i - C(v_i)
        x_i <- x_i + gamma sum_j W_ij (C(v_j) - C(v_i))

    Args:
        local_steps: mini-batch steps a round."""

    needs_every_message: ClassVar[bool] = False

    local_steps: LocalSteps = 1

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            v = node.parameters + node.state.get("error", 0.0)
            sent, own = node.compress(v)
            node.state["error"] = v - own
            node.broadcast(await node.neighbors(r, "out"), Model(sent, node.buffers), tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            models = {rank: Model(dense(model.parameters), model.buffers) for rank, model in inbox.items()}
            mixed = await node.combine(Model(own, node.buffers), models, node.mixing_weights(r))
            parameters = node.parameters + self.gamma * (mixed.parameters - own)
            node.model = Model(parameters, mixed.buffers)
            node.mixed = node.model


@register("algorithm", "beer")
class BEER(_Compressed):
    """BEER (Zhao et al., 2022): converges to the optimum of the average loss on heterogeneous data, with
    compressed messages.

    Zhao et al., "BEER: Fast O(1/T) Rate for Decentralized Nonconvex Optimization with Communication
    Compression", NeurIPS 2022, Algorithm 1: gradient tracking with replicas H of the models and G of the
    directions V; initially, V is the first gradient and H = G = 0. A round takes one gradient and sends two
    messages to each neighbour. The optimizer has to be plain SGD.

        X' = X + gamma H (W - I) - eta V            H' = H + C(X' - H)
        V' = V + gamma G (W - I) + g(X') - g(X)     G' = G + C(V' - G)"""

    gamma: PositiveShareFloat32 = 0.1

    def ends_with_steps(self) -> bool:
        return True

    def check(self, context: CheckContext) -> None:
        super().check(context)
        optimizer = context.optimizer
        if optimizer != SGD(lr=optimizer.lr, schedule=optimizer.schedule):
            accepted = "sgd with lr and schedule alone"
            raise BadInput(f"optimizer: other than plain sgd, for beer; accepted: {accepted}")

    async def run(self, node: Node) -> None:
        state, gamma = node.state, self.gamma
        async for r in node.rounds():
            if r == 0:
                state["gradient"] = state["direction"] = await node.gradient()
                state["model drift"] = state["direction drift"] = torch.zeros_like(node.parameters)
            mixed = node.parameters + gamma * state["model drift"]
            node.mixed = Model(mixed)
            node.parameters = mixed - node.lr * state["direction"]
            drift = await _exchange(node, r, "models", node.parameters, buffers=True)
            node.model = Model(node.parameters, drift.buffers)
            state["model drift"] = drift.parameters
            gradient = await node.gradient()
            direction = state["direction"] + gamma * state["direction drift"]
            state["direction"] = direction + gradient - state["gradient"]
            state["gradient"] = gradient
            state["direction drift"] = (await _exchange(node, r, "directions", state["direction"])).parameters
