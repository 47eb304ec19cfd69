"""AD-PSGD: asynchronous decentralized parallel stochastic gradient descent.

Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, Algorithm 1.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from typing import ClassVar

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.ranges import PositiveSeconds
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Model
from gossamer.node import CheckContext, Node, PeerLost
from gossamer.topology import Graph, Mixing, TopologySchedule


@register("algorithm", "ad-psgd")
class ADPSGD(Algorithm):
    """AD-PSGD (Lian et al., 2018) on an undirected graph.

    At any time, some node i draws a neighbour j; both average their models, and i applies a gradient of an older
    model:

        x_i, x_j <- (x_i + x_j) / 2;    x_i <- x_i - eta g_i(x_i as it was)

    Active nodes send requests and passive nodes reply, so that no cycle of nodes can deadlock. The active
    nodes are :func:`active_ranks` of the first graph; edges between two active or two passive nodes are not
    used. A passive node averages and replies in one step:

        d = (x_i - x_j) / 2;    x_j <- x_j + d;    answer -d;    and when it arrives:  x_i <- x_i - d

    In the published protocol, the reply is x_j. Half the difference takes as many bytes and is correct even
    if it arrives late: averaging preserves the sum of all models and of the replies in flight. A codec
    encodes only the requests, not the answers; d is zero at coordinates that it leaves out. With sampled neighbours
    (``cyclon``), every node is both active and passive.

    A round is ``local_steps`` steps, during which an active node averages with one passive neighbour, drawn for the round.

    Args:
        local_steps: mini-batch steps a round, and thus for each averaging of an active node.
        wait_free: an active node whose averaging takes longer than its steps continues with the next steps,
            and starts the next averaging in the first round after this one has finished. Otherwise a round
            ends when both are done.
        timeout_s: seconds after which an active node stops waiting for a reply in this round. A later reply
            still counts. A lost request costs this time. After its last round, a node waits this long for
            late replies."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    wait_free: bool = False
    timeout_s: PositiveSeconds = 30.0

    def mixing(self) -> Mixing:
        return Mixing(
            graph="the edges of the topology between an active and a passive node",
            weights="1/2 for each model of a pair",
            links=_links,
        )

    def check(self, context: CheckContext) -> None:
        topology = context.topology
        if topology.sampled:
            return
        graph = topology.graph(0)
        if graph.directed:
            raise BadInput("topology: a directed graph for ad-psgd; accepted: an undirected one")
        active = active_ranks(graph)
        for rank in sorted(active):
            if active.issuperset(graph.neighbors(rank)):
                raise BadInput(
                    f"topology: node {rank} has no neighbour to average with; accepted: at least one"
                )

    def unencoded(self, topology: TopologySchedule) -> str:
        return "the answers of passive nodes, which are halves of differences,"

    def ends_with_steps(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        sampled = node.view is not None
        active = frozenset[int]() if sampled else active_ranks(node.topology(0))
        node.expect("average", node.model)
        node.expect("answer", node.model, exact=True)
        if node.rank not in active:
            node.answer("average", partial(self._meet, node), exact=True)
        averaging = None
        async for r in node.rounds():
            if (sampled or node.rank in active) and (averaging is None or averaging.done()):
                averaging = node.spawn(self._average(node, r, active))
            await node.train(self.local_steps)
            if averaging is not None and not self.wait_free:
                await averaging
        if averaging is not None:
            await averaging
        while (minus_d := await node.next_answer()) is not None:  # the passive nodes have averaged already
            node.model = node.model + minus_d
            node.mixed = node.model

    async def _average(self, node: Node, r: int, active: frozenset[int]) -> None:
        """Average once as the active node."""
        for minus_d in node.drain_answers():
            node.model = node.model + minus_d
            node.mixed = node.model
        passive = [rank for rank in await node.neighbors(r, "out") if rank not in active]
        if not passive:  # possible when the graph changes
            return
        partner = passive[int(node.rng("partner", r).integers(len(passive)))]
        with suppress(TimeoutError, PeerLost):
            minus_d = await node.ask(
                partner, node.model, ("average", r), self.timeout_s, keep_s=2 * self.timeout_s
            )
            node.model = node.model + minus_d
            node.mixed = node.model

    def _meet(self, node: Node, question: Message) -> Model:
        """Average as the passive node, and reply with -d."""
        own, theirs = node.model, question.payload
        d: Model = (theirs.over(own) - own) / 2
        node.model = own + d
        node.mixed = node.model
        return -d


@lru_cache(maxsize=8)
def active_ranks(graph: Graph) -> frozenset[int]:
    """The active nodes: those at an even depth in the depth-first tree from the lowest rank of each
    component.

    In a bipartite graph, these are one side. In any other graph, the edges between active and passive nodes
    include the tree, so they connect each component. In a complete graph, active and passive nodes
    alternate."""
    # networkx would take over a gigabyte for a complete graph of 4096 nodes.
    depth: dict[int, int] = {}
    for root in range(graph.nodes):
        if root in depth:
            continue
        depth[root] = 0
        path = [(root, iter(graph.neighbors(root)))]
        while path:
            rank, neighbors = path[-1]
            child = next((neighbor for neighbor in neighbors if neighbor not in depth), None)
            if child is None:
                path.pop()
            else:
                depth[child] = depth[rank] + 1
                path.append((child, iter(graph.neighbors(child))))
    return frozenset(rank for rank, level in depth.items() if level % 2 == 0)


def _links(topology: TopologySchedule, round: int) -> Graph:
    """The edges along which nodes average: with sampled neighbours, all of them."""
    graph = topology.graph(round)
    return graph if topology.sampled else _between(graph, active_ranks(topology.graph(0)))


@lru_cache(maxsize=8)
def _between(graph: Graph, active: frozenset[int]) -> Graph:
    return Graph(graph.nodes, ((i, j) for i, j in graph.edges() if (i in active) != (j in active)))
