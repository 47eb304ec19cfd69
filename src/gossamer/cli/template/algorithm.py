"""An algorithm of your own; help(gossamer.Node) describes all that a node can do."""

from gossamer import Algorithm, Node


class MyAlgorithm(Algorithm):
    """Train, send the model to the out-neighbours, and mix those of the in-neighbours (D-PSGD, Lian et al., 2017).

    Args:
        local_steps: mini-batch steps a round.
    """

    local_steps: int = 5  # fields are parameters of the experiment file, checked and recorded

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(self.local_steps)
            node.broadcast(await node.neighbors(r, "out"), node.model, tag=r)
            inbox = await node.gather(await node.neighbors(r, "in"), tag=r)
            await node.mix(inbox, node.mixing_weights(r))
            node.record(heard=len(inbox))  # a column of the metrics
