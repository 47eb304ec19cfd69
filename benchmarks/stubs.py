"""An algorithm that computes nothing: what is left is the engine."""

from __future__ import annotations

from gossamer import Algorithm, Experiment, Node


class Talk(Algorithm):
    """Every round: sleep for a virtual step, send to five neighbours, gather, mix."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.sleep(0.01)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))


def no_compute(nodes: int, rounds: int) -> Experiment:
    """Five messages a node and round on a random 5-regular graph, vectors of ten values."""
    return Experiment.of(
        {
            "name": "bench-engine",
            "nodes": nodes,
            "task": {"name": "least-squares", "features": 10, "samples": nodes},
            "topology": {"name": "random-regular", "degree": 5},
            "algorithm": {"name": "stubs:Talk"},
            "evaluation": {"every_rounds": None},
            "stop": {"rounds": rounds},
        }
    )
