"""Gossip learning: models walk at random, and nodes that they meet train and merge them.

Ormandi, Hegedus and Jelasity, "Gossip Learning with Linear Models on Fully Distributed Data", Concurrency and Computation
2013. Every node, on its own clock, trains, merges the models that have come in, and sends its model x with its age a
(the number of steps behind it) to one random neighbour. A model is weighted by its age (Hegedus, Danner and Jelasity,
"Gossip Learning as a Decentralized Alternative to Federated Learning", DAIS 2019):

- each: x_i <- (a_i x_i + a_j x_j) / (a_i + a_j), a_i <- max(a_i, a_j), for one message after the other
- all (Super-Gossip): x_i <- (a_i x_i + sum_j a_j x_j) / (a_i + sum_j a_j), a_i <- max over all, for the whole queue

Both were checked against sacs-epfl/async-dl (``GossipSharing``, ``SuperGossipNode``), not against the papers. Its
``GossipNode`` and the papers train only when a message comes: ``gossip-learning-on-receipt`` does that, with the merges of
2013. Here nodes train on their own clock. The age of async-dl counts samples, which gives the same weights if all batches
have one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps, whole_number
from gossamer.config.registry import register
from gossamer.messages.tags import Message
from gossamer.node import Node


@register("algorithm", "gossip-learning")
class GossipLearning(Algorithm):
    """Gossip learning (Ormandi et al., 2013) with merging by age: asynchronous, no node waits for another.

    A node waits only for its own uplink: until at most one window (64 KiB) of its last message is left to send.

    Args:
        local_steps: mini-batch steps a round.
        merge: "each": one message after the other, as it comes (but not within a step); "all": all that have come by the end
            of the steps, at once.
        period_s: seconds from one round's start to the next; null, or less than the round takes: as fast as it goes."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    mixes_models: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    merge: Literal["each", "all"] = "each"
    period_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    async def run(self, node: Node) -> None:
        node.state.setdefault("age", 0)
        like = {"model": node.model, "age": 1}
        node.expect("model", like, check=lambda message: whole_number(message.payload["age"], 1, "age"))
        sending = None
        async for r in node.rounds():
            start = node.now()
            await node.train(self.local_steps)
            node.state["age"] += self.local_steps
            await self._merge_queue(node)
            if sending is not None:
                await sending
            peers = await node.neighbors(r, "out")
            if peers:
                to = peers[int(node.rng("peer", r).integers(len(peers)))]
                sending = node.send(to, {"model": node.model, "age": node.state["age"]}, tag="model")
            if self.period_s is not None:
                await self._idle(node, start + self.period_s)

    async def _merge_queue(self, node: Node) -> None:
        queue = node.drain("model")
        if self.merge == "all":
            queues = [sorted(queue, key=lambda message: message.source)] if queue else []
        else:
            queues = [[message] for message in queue]
        for messages in queues:
            await self._merge(node, messages)

    async def _idle(self, node: Node, until: float) -> None:
        if self.merge == "all":
            await node.sleep(max(until - node.now(), 0.0))
            return
        while (left := until - node.now()) > 0:
            try:
                message = await node.receive("model", timeout=left)
            except TimeoutError:
                return
            await self._merge(node, [message])

    async def _merge(self, node: Node, messages: Sequence[Message]) -> None:
        """The mean by age; messages are numbered by their place in the queue, as one sender may have several."""
        own, ages = node.state["age"], [each.payload["age"] for each in messages]
        total = own + sum(ages)
        node.state["age"] = max([own, *ages])
        await node.mix(
            {place: message.payload["model"] for place, message in enumerate(messages)},
            {place: age / total for place, age in enumerate(ages)},
            self_weight=own / total,
        )
