"""Gossip learning: models perform random walks, and the nodes they visit train and merge them.

Ormandi, Hegedus and Jelasity, "Gossip Learning with Linear Models on Fully Distributed Data", Concurrency and
Computation 2013; merging by age: Hegedus, Danner and Jelasity, "Gossip Learning as a Decentralized
Alternative to Federated Learning", DAIS 2019. The age a of a model is the number of steps it has been trained
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from gossamer.algorithms.algorithm import Algorithm, LocalSteps, whole_number
from gossamer.config.ranges import PositiveSeconds
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Model, Sending
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing

_GRAPH = "the topology, to one random neighbour at a time"


class _Gossip(Algorithm):
    """The common part of both protocols. A node does not wait for other nodes, only for its own uplink, until
    at most one window (64 KiB) of its last message is left to send."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    local_steps: LocalSteps = 1

    async def _pass_on(self, node: Node, r: int, previous: Sending | None) -> Sending | None:
        """Send the model with its age to one random neighbour, once the previous message has been sent."""
        if previous is not None:
            await previous
        peers = await node.neighbors(r, "out")
        if not peers:
            return previous
        to = peers[int(node.rng("peer", r).integers(len(peers)))]
        return node.send(to, {"model": node.model, "age": node.state["age"]}, tag="model")


@register("algorithm", "gossip-learning")
class GossipLearning(_Gossip):
    """Gossip learning with merging by age (Hegedus et al., 2019): nodes train, merge and send on their own clocks.

        each:                  x_i <- (a_i x_i + a_j x_j) / (a_i + a_j),                  a_i <- max(a_i, a_j)
        all (Super-Gossip):    x_i <- (a_i x_i + sum_j a_j x_j) / (a_i + sum_j a_j),      a_i <- max over all

    Both were checked against sacs-epfl/async-dl (``GossipSharing``, ``SuperGossipNode``), whose age counts samples.

    Args:
        local_steps: mini-batch steps a round.
        merge: "each" merges every message as it arrives (but not within a step); "all" merges all messages
            that have arrived by the end of the steps together.
        period_s: seconds from one round's start to the next. Null, or less than a round takes, starts the
            next round at once."""

    mixes_models: ClassVar[bool] = True
    merge: Literal["each", "all"] = "each"
    period_s: PositiveSeconds | None = None

    def mixing(self) -> Mixing:
        return Mixing(graph=_GRAPH, weights="in proportion to the ages of the models")

    async def run(self, node: Node) -> None:
        node.state.setdefault("age", 0)
        _expect_models(node, minimum=1)
        sending = None
        async for r in node.rounds():
            start = node.now()
            await node.train(self.local_steps)
            node.state["age"] += self.local_steps
            await self._merge_queue(node)
            sending = await self._pass_on(node, r, sending)
            if self.period_s is not None:
                await self._idle(node, start + self.period_s)

    async def _merge_queue(self, node: Node) -> None:
        queue = node.drain("model")
        if self.merge == "each":
            for message in queue:
                await self._merge(node, [message])
        elif queue:
            await self._merge(node, sorted(queue, key=lambda message: message.source))

    async def _idle(self, node: Node, until: float) -> None:
        if self.merge == "all":
            await node.sleep(max(until - node.now(), 0.0))
            return
        while (message := await _received(node, until)) is not None:
            await self._merge(node, [message])

    async def _merge(self, node: Node, messages: Sequence[Message]) -> None:
        """Take the mean weighted by age. Messages are numbered by their position in the queue, since a sender
        may have several in it."""
        own, ages = node.state["age"], [message.payload["age"] for message in messages]
        total = own + sum(ages)
        node.state["age"] = max([own, *ages])
        await node.mix(
            {position: message.payload["model"] for position, message in enumerate(messages)},
            {position: age / total for position, age in enumerate(ages)},
            self_weight=own / total,
        )


@register("algorithm", "gossip-learning-on-receipt")
class GossipLearningOnReceipt(_Gossip):
    """Gossip learning that trains on receipt (Ormandi et al., 2013): the original protocol.

    Algorithms 1 and 2, as cited in later work. If a node receives a model m after m', its freshest model
    becomes

        rw (random walk):    update(m)
        mu:                  update(merge(m, m'))
        um:                  merge(update(m), update(m'))

    where update takes local steps, merge(m, m') = (m + m') / 2 has the age max(a, a'), and the first m' is the initial model.
    The paper's learners lower their rate with the age of a model; here ``optimizer`` sets the rate.

    A node handles one model at a time. Training delays the end of a period. A period therefore has to
    be longer than the training of one model, or models pile up.

    Args:
        local_steps: mini-batch steps of one update.
        create: how the freshest model is created from the last two received: "rw", "mu" or "um".
        period_s: seconds between two models that a node sends: the paper's Delta."""

    create: Literal["rw", "mu", "um"] = "mu"
    period_s: PositiveSeconds = 1.0

    def check(self, context: CheckContext) -> None:
        if context.nodes == 1:
            problem = "1 for gossip-learning-on-receipt, whose nodes train only what they receive"
            raise BadInput(f"nodes: {problem}; accepted: at least 2")

    def ends_with_steps(self) -> bool:
        return self.create == "mu"

    def mixing(self) -> Mixing:
        replaced = self.create == "rw"
        return Mixing(
            graph=_GRAPH,
            weights="none: models replace each other"
            if replaced
            else "1/2 for each of the last two models received",
        )

    async def run(self, node: Node) -> None:
        node.state.setdefault("age", 0)
        node.state.setdefault("last", node.model)
        node.state.setdefault("last_age", 0)
        _expect_models(node, minimum=0)
        sending = None
        async for r in node.rounds():
            until = node.now() + self.period_s
            while (message := await _received(node, until)) is not None:
                await self._create(node, message)
            sending = await self._pass_on(node, r, sending)

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
            updated = await self._update(node, last)
            await self._update(node, received)
            await node.mix({0: updated}, {0: 0.5}, self_weight=0.5)
        node.state["age"] = (age if self.create == "rw" else max(age, last_age)) + self.local_steps

    async def _update(self, node: Node, model: Model) -> Model:
        node.model = model
        await node.train(self.local_steps)
        return node.model


def _expect_models(node: Node, minimum: int) -> None:
    like = {"model": node.model, "age": 1}
    node.expect("model", like, check=lambda message: whole_number(message.payload["age"], minimum, "age"))


async def _received(node: Node, until: float) -> Message | None:
    """The next model that arrives before a deadline; None if none does."""
    if (remaining := until - node.now()) <= 0:
        return None
    try:
        return await node.receive("model", timeout=remaining)
    except TimeoutError:
        return None
