"""The experiment's codec: models leave encoded, and are decoded when a task takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gossamer.codecs.coder import Coder
from gossamer.messages import freeze
from gossamer.messages.tags import Payload, Sending, dense
from gossamer.node import Node
from gossamer.node.expectations import Form
from gossamer.node.late import LateSending
from gossamer.node.middleware import Layer
from gossamer.node.waiting import NodeTask, all_ended


class CodedNode(Layer):
    """A node whose models are encoded. If encoding takes the time given by the compute profile, a message waits until it and
    every earlier message is encoded."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        experiment = self._setup.experiment
        algorithm = experiment.algorithm
        self.coder = Coder(
            experiment.codec, node, differences=algorithm.sends_differences, pieces=algorithm.sends_pieces()
        )
        self._mailbox.decoder = self.coder
        self._charged = 0  # number of encodings whose time has passed

    def round_counted(self, rounds: int) -> None:
        self.coder.end_round()

    def overwritten(self) -> None:
        self.coder.forget()

    def _compress(self, v: Float[Tensor, " params"]) -> tuple[Any, Float[Tensor, " params"]]:
        sent, decoded = self.coder.compress(v)
        return sent, dense(decoded)

    def _send(
        self,
        ranks: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
        form: Form | None,
    ) -> list[Sending]:
        if not exact:
            payload, form = self.coder.encode(payload, tag), None
        steps, own, host = 0.0, self._own, self._host
        if host.paced:
            encoded, self._charged = self.coder.encoded - self._charged, self.coder.encoded
            steps = encoded * self._setup.experiment.compute.steps_per_encoding
        if not steps and (own.encoding is None or own.encoding.done()):
            return self.node._send(ranks, payload, tag, exact, form)
        payload = freeze(payload, host.is_stored)
        late = {rank: LateSending(host) for rank in ranks}
        own.encoding = self.spawn(self._send_later(own.encoding, steps, late, payload, tag, exact))
        return list(late.values())

    async def _send_later(
        self,
        previous: NodeTask[None] | None,
        steps: float,
        late: Mapping[int, LateSending],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
    ) -> None:
        if previous is not None:
            await all_ended(self._host.slot, (previous,))
        if steps:
            await self._own.encode(self.step, steps)
        waiting = [rank for rank, sending in late.items() if not sending.done()]
        sendings = self.node._send(waiting, payload, tag, exact, None)
        for rank, sending in zip(waiting, sendings, strict=True):
            late[rank].queued(sending)
