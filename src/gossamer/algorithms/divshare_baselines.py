"""The baselines of DivShare as its authors implemented them, which differ from the protocols that they are named after.

Biswas et al., "Boosting Asynchronous Decentralized Learning with Model Fragmentation", WWW 2025 (arXiv 2410.12918):
for comparisons with the published figures. In both, a node that has done its steps averages with the newest model of
every node that it has heard from since the last averaging,

    x_i <- (x_i + sum_{j in heard} x_j) / (1 + |heard|)

and it never drops queued messages, so a slow node sends ever older models. ``divshare`` with ``fraction: 1`` and with
``queue: keep`` separates the two differences. The protocols themselves are ``ad-psgd`` and ``swift``.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from pydantic import Field

from gossamer.algorithms.algorithm import Algorithm
from gossamer.algorithms.divshare import DivShare
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Sending
from gossamer.node import Node, Setting


@register("algorithm", "swift-artifact")
class SwiftArtifact(Algorithm):
    """SWIFT as in DivShare's published code: whole models to J others, drawn in every round. It uses no graph and no weights
    and keeps no models; it is DivShare with one fragment and a kept queue.

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
        return DivShare(fraction=1.0, queue="keep", **dict(self))

    def check(self, setting: Setting) -> None:
        self._divshare().check(setting)

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        await self._divshare().run(node)


@register("algorithm", "ad-psgd-artifact")
class ADPSGDArtifact(Algorithm):
    """AD-PSGD as in DivShare's published code: a node sends its model to a few others, which answer with theirs.

    It does not average in pairs, has no active and passive nodes, draws the others with replacement, and sends the model as
    it was after the last steps, before averaging. One defect of that code is not repeated: all messages of a round share one
    dictionary, in which the marks of questions and answers overwrite each other.

    Args:
        degree: messages that a node sends in a round on average: half of it, rounded down, are questions, and as many are
            answers.
        local_steps: mini-batch steps a round.
        backlog: number of rounds whose questions may still be waiting to leave; null, as in the published code, sets no
            limit. Answers are not limited.

    Records ``received_share``: models that a round has averaged, divided by those that a node sends on average.
    """

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True

    degree: int = Field(default=6, ge=2)
    local_steps: int = Field(default=1, ge=1)
    backlog: int | None = Field(default=None, ge=1)

    def check(self, setting: Setting) -> None:
        if setting.nodes < 2:
            raise BadInput(f"nodes: {setting.nodes} for ad-psgd-artifact; accepted: at least 2")

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        state, peers, asked = node.state, node.peers(), self.degree // 2
        state["latest"] = node.model
        node.spawn(self._listen(node))
        leaving: deque[list[Sending]] = deque()
        async for r in node.rounds():
            await node.train(self.local_steps)
            state["latest"] = node.model
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
                    for question in leaving.popleft():
                        await question

    async def _listen(self, node: Node) -> None:
        """Answer questions as long as the run lasts; the models stay in the mailbox until the next averaging."""
        while True:
            message = await node.receive("model", keep_as="heard")
            if message.tag[1] == "question":
                node.send(message.source, node.state["latest"], tag=("model", "answer"))
