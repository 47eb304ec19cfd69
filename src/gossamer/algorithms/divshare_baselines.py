"""The rivals of DivShare as its authors' code has them, which are not the protocols that they are named after.

Biswas et al., "Boosting Asynchronous Decentralized Learning with Model Fragmentation", WWW 2025 (arXiv 2410.12918):
for comparisons with the published figures. In both a node averages, when its steps are done, with the newest model of
everybody it has heard since the last time,

    x_i <- (x_i + sum_{j in heard} x_j) / (1 + |heard|)

and its queue of messages is never emptied otherwise than by sending them, so that what a slow node sends is ever older.
The published comparison therefore mixes two differences; ``divshare`` with ``fraction: 1`` and with ``queue: keep``
tells them apart. For the protocols themselves see ``ad-psgd`` and ``swift``.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm, left, shared_model
from gossamer.algorithms.divshare import DivShare
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Sending
from gossamer.node import Node


@register("algorithm", "swift-artifact")
class SwiftArtifact(Algorithm):
    """SWIFT as in DivShare's published code: whole models to J others, drawn afresh every round. No graph, no weights,
    no models kept; so it is DivShare with one fragment and a queue that is kept.

    Args:
        recipients: J; null is ceil(log2 n).
        local_steps: mini-batch steps a round.
        backlog: as in ``divshare``.
    """

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True

    recipients: int | None = Field(default=None, ge=1)
    local_steps: int = Field(default=1, ge=1)
    backlog: int | None = Field(default=None, ge=1)

    def _divshare(self) -> DivShare:
        return DivShare(
            fraction=1.0,
            recipients=self.recipients,
            local_steps=self.local_steps,
            queue="keep",
            backlog=self.backlog,
        )

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        return self._divshare().data_ranks(nodes)

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        await self._divshare().run(node)


@register("algorithm", "ad-psgd-artifact")
class ADPSGDArtifact(Algorithm):
    """AD-PSGD as in DivShare's published code: a node sends its model to a few others, which answer with theirs.

    Nothing is averaged in pairs, nobody is active or passive, others are drawn with replacement, and what a node sends
    is its model as it was after its last steps, before it averaged. One defect of that code is not repeated: it marks a
    message as question or answer in a dictionary that all messages of a round share, so that answering somebody turns
    queued questions into answers, which nobody answers, and the other way round.

    Args:
        degree: messages a node sends a round on average: half of it, rounded down, are questions, and as many answers (so
            an odd degree is the even one below it).
        local_steps: mini-batch steps a round.
        backlog: a node waits for all questions that it has asked more than so many rounds ago to leave, before its next
            round; null, as in the published code, sets no limit. Answers are not limited.

    Records ``received_share``: models that a round has averaged with, over those that a node sends on average.
    """

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True

    degree: int = Field(default=6, ge=2)
    local_steps: int = Field(default=1, ge=1)
    backlog: int | None = Field(default=None, ge=1)

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        if nodes < 2:
            raise BadInput(f"nodes: {nodes} for ad-psgd-artifact; accepted: at least 2")
        return super().data_ranks(nodes)

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        state, peers, asked = node.state, node.peers(), self.degree // 2
        state["latest"] = shared_model(node)
        node.spawn(self._listen(node))
        leaving: deque[list[Sending]] = deque()
        async for r in node.rounds():
            await node.train(self.local_steps)
            state["latest"] = shared_model(node)
            drawn = node.rng("peers", r).integers(len(peers), size=asked)
            questions = [
                node.send(peers[k], state["latest"], tag=("model", "question")) for k in drawn.tolist()
            ]
            heard = {message.source: message.payload for message in node.drain("heard", newest=True)}
            node.record(received_share=len(heard) / (2 * asked))
            await node.mix(heard, dict.fromkeys(heard, 1 / (1 + len(heard))))
            del heard
            if self.backlog is not None:
                leaving.append(questions)
                if len(leaving) > self.backlog:
                    await left(*leaving.popleft())

    async def _listen(self, node: Node) -> None:
        """Answer questions as long as the run lasts; what came in stays in the mailbox until the next averaging."""
        while True:
            message = await node.receive("model", keep_as="heard")
            if message.tag[1] == "question":
                node.send(message.source, node.state["latest"], tag=("model", "answer"))
