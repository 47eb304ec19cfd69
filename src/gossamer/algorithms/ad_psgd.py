"""AD-PSGD: asynchronous decentralized parallel stochastic gradient descent.

Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, Algorithm 1.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from typing import ClassVar

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Model
from gossamer.node import Node, PeerLost, Setting
from gossamer.topology import Graph


@register("algorithm", "ad-psgd")
class ADPSGD(Algorithm):
    """AD-PSGD (Lian et al., 2018) on an undirected graph.

    At any time some node i draws a neighbour j, both average, and i applies a gradient at an older model:

        x_i, x_j <- (x_i + x_j) / 2;    x_i <- x_i - eta g_i(x_i as it was)

    Active nodes ask and passive ones answer, so that no circle of nodes can wait for each other (:func:`active_ranks` of the
    first graph; edges between two active or two passive nodes are not used). A passive node averages and answers in one step:

        d = (x_i - x_j) / 2;    x_j <- x_j + d;    answer -d;    and when it arrives:  x_i <- x_i - d

    The published protocol answers with x_j. The half difference takes as many bytes and is right however late it comes:
    averaging keeps the sum of all models and of the answers on their way. A codec encodes the questions only; d is zero at
    coordinates that it leaves out. Where neighbours are sampled (``cyclon``), every node is both active and passive.

    A round is ``local_steps`` steps, during which an active node averages with one passive neighbour, drawn for the round.

    Args:
        local_steps: mini-batch steps a round, and so to one averaging of an active node.
        wait_free: an active node whose averaging takes longer than its steps continues with the next steps, and begins
            the next averaging in the first round that finds this one finished. Otherwise a round ends when both are done.
        timeout_s: seconds after which an active node stops waiting for an answer in this round; a later answer still
            counts. A lost question costs this time. After its last round, a node waits as long again for late answers."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    wait_free: bool = False
    timeout_s: float = Field(default=30.0, gt=0)

    def check(self, setting: Setting) -> None:
        topology = setting.topology
        if topology.sampled:
            return
        graph = topology.graph(0)
        if graph.directed:
            raise BadInput("topology: a directed graph for ad-psgd; accepted: an undirected one")
        active = active_ranks(graph)
        for rank in sorted(active):
            if active.issuperset(graph.neighbors(rank)):
                raise BadInput(f"topology: node {rank} has no neighbour to average with; accepted: one each")

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
        while (minus_d := await node.next_answer()) is not None:  # passive nodes have moved already
            node.model = node.model + minus_d

    async def _average(self, node: Node, r: int, active: frozenset[int]) -> None:
        """An active node's part of one averaging."""
        for minus_d in node.drain_answers():
            node.model = node.model + minus_d
        passive = [rank for rank in await node.neighbors(r, "out") if rank not in active]
        if not passive:  # in a round of a graph that changes
            return
        partner = passive[int(node.rng("partner", r).integers(len(passive)))]
        with suppress(TimeoutError, PeerLost):
            minus_d = await node.ask(
                partner, node.model, ("average", r), self.timeout_s, keep_s=2 * self.timeout_s
            )
            node.model = node.model + minus_d

    def _meet(self, node: Node, question: Message) -> Model:
        """A passive node's part: it moves, and answers -d."""
        own, theirs = node.model, question.payload
        d: Model = (theirs.over(own) - own) / 2
        node.model = own + d
        return -d


@lru_cache(maxsize=8)
def active_ranks(graph: Graph) -> frozenset[int]:
    """The active nodes: those at an even depth of the depth-first tree from the lowest rank (of each component).

    In a bipartite graph these are one side. In any other one, the edges between active and passive nodes contain the
    tree, so that the graph that they form is connected; in a complete graph, active and passive nodes alternate."""
    # Not through networkx, which takes over a gigabyte for a complete graph of 4096 nodes.
    depth: dict[int, int] = {}
    for root in range(graph.nodes):
        if root in depth:
            continue
        depth[root] = 0
        path = [(root, iter(graph.neighbors(root)))]
        while path:
            rank, others = path[-1]
            child = next((other for other in others if other not in depth), None)
            if child is None:
                path.pop()
            else:
                depth[child] = depth[rank] + 1
                path.append((child, iter(graph.neighbors(child))))
    return frozenset(rank for rank, level in depth.items() if level % 2 == 0)
