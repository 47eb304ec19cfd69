"""Gossip learning as it was published first: a model is merged and trained when it is received.

Ormandi, Hegedus and Jelasity, "Gossip Learning with Linear Models on Fully Distributed Data", Concurrency and Computation
2013, Algorithms 1 and 2. Every ``period_s`` seconds a node sends its freshest model to one random neighbour. When it
receives a model m, and the one before was m', its freshest model becomes

- rw (random walk): update(m)
- mu: update(merge(m, m'))
- um: merge(update(m), update(m'))

where update takes local steps, merge(m, m') = (m + m') / 2 has the age max(a, a'), and the first m' is the initial model.

Written from the paper's definitions as they are cited, not checked against the authors' code. The paper's learners (Pegasos,
Adaline) lower their rate with the age of a model; here ``optimizer`` sets the rate, for any model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, LocalSteps, whole_number
from gossamer.config.registry import register
from gossamer.messages.tags import Message, Model
from gossamer.node import Node


@register("algorithm", "gossip-learning-on-receipt")
class GossipLearningOnReceipt(Algorithm):
    """Gossip learning that trains on receipt (Ormandi et al., 2013): asynchronous, no node waits for another.

    A node handles one model after the other. A period ends late if it ends while the node trains; so a period has to be
    longer than the steps that one model takes, or models pile up.

    Args:
        local_steps: mini-batch steps of one update.
        create: how the freshest model is made of the last two that were received: "rw", "mu" or "um".
        period_s: seconds between two models that a node sends: the paper's Delta."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    local_steps: LocalSteps = 1
    create: Literal["rw", "mu", "um"] = "mu"
    period_s: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    async def run(self, node: Node) -> None:
        node.state.setdefault("age", 0)
        node.state.setdefault("last", node.model)
        node.state.setdefault("last_age", 0)
        like = {"model": node.model, "age": 1}
        node.expect("model", like, check=lambda message: whole_number(message.payload["age"], 0, "age"))
        sending = None
        async for r in node.rounds():
            await self._listen(node, node.now() + self.period_s)
            if sending is not None:
                await sending
            peers = await node.neighbors(r, "out")
            if peers:
                to = peers[int(node.rng("peer", r).integers(len(peers)))]
                sending = node.send(to, {"model": node.model, "age": node.state["age"]}, tag="model")

    async def _listen(self, node: Node, until: float) -> None:
        while (left := until - node.now()) > 0:
            try:
                message = await node.receive("model", timeout=left)
            except TimeoutError:
                return
            await self._create(node, message)

    async def _create(self, node: Node, message: Message) -> None:
        received, age = message.payload["model"], message.payload["age"]
        last, last_age = node.state["last"], node.state["last_age"]
        node.state.update(last=received, last_age=age)
        if self.create == "rw":
            await self._update(node, received)
        elif self.create == "mu":
            node.model = received
            await node.mix({0: last}, {0: 0.5}, self_weight=0.5)
            await node.train(self.local_steps)
        else:
            other = await self._update(node, last)
            await self._update(node, received)
            await node.mix({0: other}, {0: 0.5}, self_weight=0.5)
        node.state["age"] = (age if self.create == "rw" else max(age, last_age)) + self.local_steps

    async def _update(self, node: Node, model: Model) -> Model:
        node.model = model
        await node.train(self.local_steps)
        return node.model
