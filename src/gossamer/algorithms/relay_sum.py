"""RelaySGD: sums of models are relayed along a tree, so that every model reaches every node exactly once, with a delay.

Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS 2021, Algorithm 1; checked against
the authors' code (epfml/relaysgd, ``RelayMechanism``, normalization "world_size").
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, Literal

from gossamer.algorithms.algorithm import Algorithm, LocalSteps, whole_number
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.node import CheckContext, Node
from gossamer.topology import Graph, Mixing, TopologySchedule


@register("algorithm", "relay-sum")
class RelaySum(Algorithm):
    """RelaySGD (Vogels et al., 2021), on a static tree; ``topology.weights`` are not used.

    After its local steps, node i sends each neighbour j in the tree the sum of its model and of the last round's messages
    from the other neighbours, and the number of models in it. Then it averages; a model from d hops away is d - 1 rounds old:

        m_{i->j} = x_i + sum_{k in N_i \\ j} m_{k->i} (last round's),   c_{i->j} = 1 + sum_{k in N_i \\ j} c_{k->i}
        x_i <- ((n - sum_j c_{j->i}) x_i + sum_j m_{j->i}) / n

    A message missing from a round is not relayed either: its models count as not arrived.

    Args:
        local_steps: mini-batch steps a round.
        tree: "given": the topology is a tree; "spanning": the breadth-first tree of the topology from rank 0 is used, for
            which every node needs the whole graph (an oracle).
        stand_in: the model that replaces those that have not arrived: the node's "own" (as above, and in the
            README of the authors' code), or the "initial" one (as in their deep-learning code)."""

    local_steps: LocalSteps = 1
    tree: Literal["given", "spanning"] = "given"
    stand_in: Literal["own", "initial"] = "own"

    def mixing(self) -> Mixing:
        given = self.tree == "given"
        return Mixing(
            graph="the topology, a tree" if given else "the breadth-first tree of the topology from rank 0",
            weights="1 / n for every node; a model from d hops away is d - 1 rounds old",
            links=_tree,
        )

    def check(self, context: CheckContext) -> None:
        topology = context.topology
        graph = topology.graph(0)
        if not topology.static or graph.directed or not graph.connected:
            name, accepted = topology.topology.name_of(), "one connected, undirected graph for all rounds"
            raise BadInput(f"topology: {name} for relay-sum; accepted: {accepted}")
        if self.tree == "given" and graph.arcs != 2 * (graph.nodes - 1):
            problem = f"{graph.arcs // 2} edges between {graph.nodes} nodes, for relay-sum"
            raise BadInput(f"topology: {problem}; accepted: a tree, or algorithm.tree: spanning")

    def sends_models(self) -> bool:
        return False  # it sends sums of models

    async def run(self, node: Node) -> None:
        peers = spanning_tree(node.topology(0)).neighbors(node.rank)
        like = {"sum": node.model, "count": 1}
        node.expect(0, like, check=lambda message: whole_number(message.payload["count"], 1, "count"))
        if self.stand_in == "initial":
            node.state.setdefault("initial", node.model)
        async for r in node.rounds():
            await node.train(self.local_steps)
            await self._relay(node, peers, r)
            inbox = await node.gather(peers, tag=r)
            await self._average(node, inbox)
            node.state["heard"] = dict(inbox)
            del inbox

    async def _relay(self, node: Node, peers: tuple[int, ...], r: int) -> None:
        heard: dict[int, Any] = node.state.pop("heard", {})
        sums = {rank: message["sum"] for rank, message in heard.items()}
        counts = {rank: message["count"] for rank, message in heard.items()}
        total = await node.combine(node.model, sums, dict.fromkeys(sums, 1.0), self_weight=1.0)
        for peer in peers:
            # One subtraction of the peer's own message instead of a sum over all others.
            returned = {rank: sums[rank] for rank in sums if rank == peer}
            rest = await node.combine(total, returned, dict.fromkeys(returned, -1.0), self_weight=1.0)
            node.send(peer, {"sum": rest, "count": 1 + sum(counts.values()) - counts.get(peer, 0)}, tag=r)

    async def _average(self, node: Node, inbox: dict[int, Any]) -> None:
        sums = {rank: message["sum"] for rank, message in inbox.items()}
        weights = dict.fromkeys(sums, 1 / node.size)
        missing = node.size - 1 - sum(message["count"] for message in inbox.values())
        if self.stand_in == "own":
            await node.mix(sums, weights, self_weight=(1 + missing) / node.size)
        else:
            # The initial model is mixed too, under a number that is not a rank.
            sums[node.size], weights[node.size] = node.state["initial"], missing / node.size
            await node.mix(sums, weights, self_weight=1 / node.size)


def _tree(topology: TopologySchedule, round: int) -> Graph:
    return spanning_tree(topology.graph(0))


@lru_cache(maxsize=8)
def spanning_tree(graph: Graph) -> Graph:
    """The breadth-first tree of a connected graph from rank 0, lower ranks first. A tree is returned
    unchanged."""
    # networkx would take over a gigabyte for a complete graph of 4096 nodes.
    reached, edges = {0: None}, []
    queue = deque(reached)
    while queue:
        rank = queue.popleft()
        children = dict.fromkeys(peer for peer in graph.neighbors(rank) if peer not in reached)
        edges += [(rank, child) for child in children]
        reached |= children
        queue += children
    return Graph(graph.nodes, edges)
