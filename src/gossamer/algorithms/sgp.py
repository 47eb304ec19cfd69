"""Stochastic gradient push: push-sum averaging over directed graphs.

Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019; checked against the
authors' code (facebookresearch/stochastic_gradient_push, ``gossip_module``), which, with overlap, sends again
as soon as the last exchange is complete, or after ``synch_freq`` steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import ClassVar

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Payload
from gossamer.node import CheckContext, Node
from gossamer.topology import Graph, Mixing, TopologySchedule
from gossamer.topology.weights import Row


@register("algorithm", "sgp")
class SGP(Algorithm):
    """Stochastic gradient push (Assran et al., 2019), on any topology whose union over time is strongly connected.
    A static graph in which a node sends to nodes that can't reach it is refused: its weight would go to zero, and its
    steps eta / w would grow without bound. The union of a changing graph is not checked beyond ``topology`` itself.

    Algorithm 1. ``topology.weights`` are not used: P_ji = 1 / (1 + out-degree of i) for node i and its
    out-neighbours j. A weight w, initially 1, accompanies x and corrects the bias that P introduces:

        x_i <- x_i - eta g_i(z_i),   x_i <- sum_j P_ij x_j,   w_i <- sum_j P_ij w_j,   z_i = x_i / w_i

    z is the model that is trained, recorded and evaluated. x is never computed: a message is (z_j, P_ij w_j),
    and

        w_i <- sum_j P_ij w_j,   z_i <- sum_j (P_ij w_j / w_i) z_j

    where a step of x is one of z with the learning rate eta / w_i. The weights of all nodes and of the
    messages in flight sum to n. A lost message loses its weight permanently, and the steps eta / w_i would grow
    with every loss. Networks that lose messages, faults that remove nodes and ``gather.timeout_s`` are
    therefore refused.

    Args:
        local_steps: mini-batch steps a round.
        overlap: tau, the number of rounds between two exchanges (Algorithm 2, OSGP): a message is added at the end of the
            round in which it arrives, and a node waits for the messages of one exchange at the next. The k-th exchange uses
            the graph of round k. 0: exchange and wait in every round."""

    needs_every_message: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    overlap: int = Field(default=0, ge=0)

    def ends_with_steps(self) -> bool:
        return self.overlap > 1  # the steps of rounds without an exchange

    def mixing(self) -> Mixing:
        return Mixing(
            weights="1 / (1 + out-degree of the sender), column-stochastic",
            row=_row,
            note="push-sum corrects the bias of these weights: repeated exchanges converge to the mean",
        )

    def check(self, context: CheckContext) -> None:
        topology = context.topology
        if topology.static and (edge := _without_return(topology.graph(0))) is not None:
            where = f"{topology.topology.name_of()}, where node {edge[0]} sends to node {edge[1]}, which can't reach it"
            raise BadInput(f"topology: {where}, for sgp; accepted: strongly connected graphs")

    async def run(self, node: Node) -> None:
        node.state.setdefault("weight", 1.0)
        like = {"model": node.model, "weight": 1.0}
        node.expect(0, like, check=lambda message: 0 < message.payload["weight"] <= node.size)
        async for r in node.rounds():
            await self._train(node)
            if self.overlap:
                await self._overlapped(node, *divmod(r, self.overlap))
                continue
            await self._push(node, r)
            await self._add(node, await node.gather(await node.neighbors(r, "in"), tag=r))

    async def _overlapped(self, node: Node, exchange: int, rounds_since: int) -> None:
        if rounds_since == 0:
            await self._push(node, exchange)
            await self._add(node, await node.gather(node.state.get("due", []), tag=exchange - 1))
            node.state["due"] = list(await node.neighbors(exchange, "in"))
        arrived = {message.source: message.payload for message in node.drain(exchange)}
        node.state["due"] = [rank for rank in node.state["due"] if rank not in arrived]
        await self._add(node, arrived)

    async def _train(self, node: Node) -> None:
        lr = node.lr
        node.lr = lr / node.state["weight"]
        await node.train(self.local_steps)
        node.lr = lr

    async def _push(self, node: Node, exchange: int) -> None:
        """Split the weight equally among the node itself and its out-neighbours."""
        receivers = await node.neighbors(exchange, "out")
        share = node.state["weight"] / (1 + len(receivers))
        node.broadcast(receivers, {"model": node.model, "weight": share}, tag=exchange)
        node.state["weight"] = share

    async def _add(self, node: Node, inbox: Mapping[int, Payload]) -> None:
        if not inbox:
            return
        shares = {rank: inbox[rank]["weight"] for rank in sorted(inbox)}
        own = node.state["weight"]
        # The weights are added one by one, since sum() rounds floats differently from Python 3.12 on.
        total = node.state["weight"] = own + reduce(operator.add, shares.values())
        await node.mix(
            {rank: payload["model"] for rank, payload in inbox.items()},
            {rank: share / total for rank, share in shares.items()},
            self_weight=own / total,
        )


def _row(topology: TopologySchedule, rank: int, round: int) -> Row:
    """A row of P."""
    senders = (rank, *topology.neighbors(rank, round, "in"))
    return {j: 1 / (1 + len(topology.neighbors(j, round, "out"))) for j in senders}


def _without_return(graph: Graph) -> tuple[int, int] | None:
    """The first edge from which no path leads back, if any. A node before such an edge loses all of its weight."""
    if not graph.directed or graph.connected:
        return None
    component = graph.component_of()
    return next(((i, j) for i, j in graph.edges() if component[i] != component[j]), None)
