"""DivShare: each fragment of a model goes to different nodes, and fragments that are not sent in time are
dropped.

Biswas et al., "Boosting Asynchronous Decentralized Learning with Model Fragmentation", WWW 2025 (arXiv
2410.12918). The rules and their order are taken from the authors' code. So are the baselines, which differ
from the protocols they are named after (``ad-psgd`` and ``swift``): after its steps, a node averages with the
newest model of every node that it has heard from since its last averaging, x_i <- (x_i + sum_{j in heard}
x_j) / (1 + |heard|), and it never drops queued messages, so a slow node sends increasingly stale models.
``divshare`` with ``fraction: 1`` and with ``queue: keep`` separates the two differences.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from gossamer.algorithms.algorithm import Algorithm, LocalSteps
from gossamer.config.experiment import MAX_NODES
from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.messages.tags import Message, Model, Sending
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing, TopologySchedule


@register("algorithm", "divshare")
class DivShare(Algorithm):
    """DivShare (Biswas et al., 2025): each of the model's C fragments is sent to J nodes.

    The coordinates are assigned once, at random, to C = floor(1 / Omega) fragments, which are the same on all
    nodes. Each tensor is divided separately (the buffers count as one tensor); the last fragment also gets
    the remainder. At its own pace, each node i

    1. takes H local steps, while messages travel,
    2. drops the messages that it has not yet sent,
    3. queues each fragment for J nodes, drawn separately for each fragment, in random order,
    4. averages each coordinate p with the values received: x_i[p] <- (x_i[p] + sum_j x_j[p]) / (1 + number of j),
       over the nodes j whose fragment with p it has; of two with the same number from one node, the newer counts.

    Args:
        fraction: Omega. Above 1/2, whole models are sent.
        recipients: J, the number of nodes that each fragment is sent to; null is ceil(log2 n).
        local_steps: H, mini-batch steps a round.
        recipients_from: "all" other nodes, whatever the topology, or "neighbors" in it (all of them if there
            are fewer than J).
        queue: "drop" cancels, after a round's steps, every message that has not left completely; "keep" sends
            everything, first in, first out. (On a simulated network whose ``sharing`` is "fifo", a message
            that has left and waits for a slow downlink can't be cancelled.)
        backlog: with "keep", the number of rounds whose messages may still be queued. A node waits until
            older messages have been sent. Null, as in the published code, sets no limit.

    Records ``received_share``: the number of fragments averaged in a round, divided by the J C that a node
    sends."""

    gathers: ClassVar[bool] = False
    tolerates_sampling: ClassVar[bool] = True
    fraction: float = Field(default=0.1, ge=1e-5, le=1)
    recipients: int | None = Field(default=None, ge=1)
    local_steps: LocalSteps = 1
    recipients_from: Literal["all", "neighbors"] = "all"
    queue: Literal["drop", "keep"] = "drop"
    backlog: int | None = Field(default=None, ge=1)

    def check(self, context: CheckContext) -> None:
        nodes, topology = context.nodes, context.topology
        if (J := self.recipients) is not None and nodes <= J:
            accepted = f"1 to {nodes - 1}, or null" if nodes > 1 else "null"
            raise BadInput(f"algorithm.recipients: {J} for {nodes} nodes; accepted: {accepted}")
        if self.backlog is not None and self.queue == "drop":
            raise BadInput(f'algorithm.backlog: {self.backlog} with queue "drop"; accepted: null, or "keep"')
        if topology.sampled and self.recipients_from == "all":
            problem = f'"all" on {topology.topology.name_of()}'
            raise BadInput(f'algorithm.recipients_from: {problem}; accepted: "neighbors"')

    def mixing(self) -> Mixing:
        everyone = self.recipients_from == "all"
        return Mixing(
            graph="new random recipients in every round"
            if everyone
            else "the topology, to J random neighbours",
            weights="the plain mean, per coordinate, of its own value and those received",
            links=None if everyone else TopologySchedule.graph,
        )

    def reaches_all(self) -> bool:
        return self.recipients_from == "all"

    def sends_pieces(self) -> bool:
        return self.fragments > 1

    def takes_back(self) -> bool:
        return self.queue == "drop"

    @property
    def fragments(self) -> int:
        """C."""
        return int(1 / self.fraction + 1e-9)  # 1 / (1/49) is 49

    async def run(self, node: Node) -> None:
        fragments = Fragments(node, self.fragments)
        node.expect("fragment", *([node.model] if self.fragments == 1 else ()), check=fragments.fit)
        queue: list[Sending] = []
        leaving: deque[list[Sending]] = deque()
        async for r in node.rounds():
            await node.train(self.local_steps)
            if self.queue == "drop":
                for sending in reversed(queue):  # otherwise the next one would start, and be dropped
                    sending.cancel()
            payloads = fragments.cut(node.model)
            pairs = await self._pairs(node, r, list(payloads))
            queue = [node.send(to, payloads[c], tag=("fragment", c)) for c, to in pairs]
            received = node.drain("fragment", newest=True)
            node.record(received_share=len(received) / max(len(pairs), 1))
            await fragments.average(received)
            await wait_for_backlog(leaving, queue, self.backlog)

    async def _pairs(self, node: Node, r: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs (fragment, recipient) with J recipients for each fragment, in random order."""
        others = node.peers() if self.recipients_from == "all" else await node.neighbors(r, "out")
        J = math.ceil(math.log2(node.size)) if self.recipients is None else self.recipients
        rng = node.rng("recipients", r)
        choices = np.argsort(rng.random((len(numbers), len(others))), axis=1)[:, :J].tolist()
        pairs = [(c, others[k]) for c, chosen in zip(numbers, choices, strict=True) for k in chosen]
        return [pairs[k] for k in rng.permutation(len(pairs)).tolist()]


async def wait_for_backlog(leaving: deque[list[Sending]], sent: list[Sending], backlog: int | None) -> None:
    """Wait until at most the messages of the last ``backlog`` rounds are still leaving; None sets no limit."""
    if backlog is not None:
        leaving.append(sent)
        if len(leaving) > backlog:
            for sending in leaving.popleft():
                await sending


class Fragments:
    """One node's use of the ``count`` fragments, which are the same on all nodes."""

    def __init__(self, node: Node, count: int) -> None:
        self._node, self._whole = node, count == 1
        seed = int(node.rng("fragments", shared=True).integers(2**63))
        sizes, device = tuple(math.prod(field.shape) for field in node.layout), node.parameters.device
        self.parameters = assign_fragments(seed, sizes, count, device)
        self.buffers = assign_fragments(seed, (len(node.buffers),), count, device)

    def cut(self, model: Model) -> dict[int, Model]:
        """The fragments of a model by number: values only, since the receiver knows the coordinates. Empty
        fragments are left out."""
        if self._whole:
            return {0: model}
        # Fragments are views of one stored vector, so that none is copied for each recipient.
        pieces = self.parameters.split(self._node.store(self.parameters.in_fragment_order(model.parameters)))
        buffer_pieces = self.buffers.split(self.buffers.in_fragment_order(model.buffers))
        pairs = enumerate(zip(pieces, buffer_pieces, strict=True))
        return {c: Model(*pair) for c, pair in pairs if len(pair[0]) or len(pair[1])}

    def fit(self, message: Message) -> bool:
        """Whether a message contains the fragment named in its tag."""
        _, c = message.tag
        if self._whole or type(c) is not int or c < 0:
            return c == 0
        if not isinstance(message.payload, Model):
            return False
        expected = self.parameters.sizes[c], self.buffers.sizes[c]
        return all(
            v.dtype is torch.float32 and len(v) == n for v, n in zip(message.payload, expected, strict=True)
        )

    async def average(self, received: Sequence[Message]) -> None:
        """Average each coordinate of the node's model with its received values."""
        node = self._node
        heard = [(int(m.tag[1]), m.payload) for m in sorted(received, key=lambda message: message.source)]
        if self._whole:
            models = {message.source: message.payload for message in received}
            await node.mix(models, dict.fromkeys(models, 1 / (1 + len(models))))
        elif heard:
            node.model = Model(
                self.parameters.mean(node.parameters, [(c, model.parameters) for c, model in heard]),
                self.buffers.mean(node.buffers, [(c, model.buffers) for c, model in heard]),
            )
            node.mixed = node.model


@dataclass(frozen=True, eq=False)
class FragmentAssignment:
    """The assignment of a vector's coordinates [n] to fragments."""

    order: Int[Tensor, " n"]  # the coordinates, fragment by fragment
    positions: Int[Tensor, " n"]  # the position of each coordinate in that order
    sizes: tuple[int, ...]  # lengths of the fragments

    def in_fragment_order(self, v: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """A new vector with the values in fragment order."""
        return v.index_select(0, self.order)  # takes a third of the time of indexing with brackets

    def split(self, ordered: Float[Tensor, " n"]) -> tuple[Tensor, ...]:
        """The fragments of such a vector, as views."""
        return torch.split(ordered, list(self.sizes))

    def mean(self, own: Float[Tensor, " n"], heard: Iterable[tuple[int, Tensor]]) -> Float[Tensor, " n"]:
        """The mean of each coordinate over the node's own value and those in ``heard``, pairs of (fragment,
        values)."""
        total = self.in_fragment_order(own)
        pieces, counts = self.split(total), [1] * len(self.sizes)
        for c, values in heard:
            pieces[c].add_(values)
            counts[c] += 1
        for piece, count in zip(pieces, counts, strict=True):
            piece.div_(count)
        return total.index_select(0, self.positions)


@lru_cache(maxsize=8)
def assign_fragments(
    seed: int, sizes: tuple[int, ...], count: int, device: torch.device
) -> FragmentAssignment:
    """Assign the coordinates of a vector that consists of tensors of these sizes to ``count`` fragments. The
    result is cached for the nodes of a simulation."""
    rng = np.random.default_rng(seed)
    fragments: list[list[Int[np.ndarray, " _"]]] = [[] for _ in range(count)]
    start = 0
    for size in sizes:
        shuffled, share = start + rng.permutation(size), size // count
        for c, indices in enumerate(np.split(shuffled, [share * c for c in range(1, count)])):
            fragments[c].append(indices)
        start += size
    # Ascending within a fragment, for sequential memory access.
    order = torch.from_numpy(np.concatenate([np.sort(np.concatenate(parts)) for parts in fragments]))
    lengths = tuple(sum(map(len, parts)) for parts in fragments)
    return FragmentAssignment(order.to(device), torch.argsort(order).to(device), lengths)


@register("algorithm", "swift-artifact")
class SwiftArtifact(Algorithm):
    """SWIFT as in DivShare's published code: whole models go to J other nodes, drawn in every round.

    It uses neither a graph nor weights and keeps no models: it is DivShare with one fragment and ``queue:
    keep``.

    Args:
        recipients: J; null is ceil(log2 n).
        local_steps: mini-batch steps a round.
        backlog: as in ``divshare``."""

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True
    recipients: int | None = Field(default=None, ge=1)
    local_steps: LocalSteps = 1
    backlog: int | None = Field(default=None, ge=1)

    def _divshare(self) -> DivShare:
        return DivShare(fraction=1.0, queue="keep", **dict(self))

    def mixing(self) -> Mixing:
        return self._divshare().mixing()

    def check(self, context: CheckContext) -> None:
        self._divshare().check(context)

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        await self._divshare().run(node)


@register("algorithm", "ad-psgd-artifact")
class ADPSGDArtifact(Algorithm):
    """AD-PSGD as in DivShare's published code: a node sends its model to a few others, which reply with
    theirs.

    It does not average in pairs, has no active and passive nodes, draws the peers with replacement, and sends
    the model from after the last steps, before averaging. One defect of that code is not reproduced: all
    messages of a round share one dictionary, in which the markers of requests and replies overwrite each
    other.

    Args:
        degree: mean number of messages that a node sends in a round: half of it, rounded down, are requests,
            and equally many are replies.
        local_steps: mini-batch steps a round.
        backlog: number of rounds whose requests may still be queued; null, as in the published code, sets no
            limit. Replies are not limited.

    Records ``received_share``: the number of models averaged in a round, divided by the mean number that a
    node sends."""

    gathers: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = True
    degree: int = Field(default=6, ge=2, le=MAX_NODES)
    local_steps: LocalSteps = 1
    backlog: int | None = Field(default=None, ge=1)

    def mixing(self) -> Mixing:
        return Mixing(
            graph="new random peers in every round",
            weights="the plain mean of its own model and those received",
            links=None,
        )

    def check(self, context: CheckContext) -> None:
        if context.nodes < 2:
            raise BadInput(f"nodes: {context.nodes} for ad-psgd-artifact; accepted: at least 2")

    def reaches_all(self) -> bool:
        return True

    async def run(self, node: Node) -> None:
        state, peers, requests = node.state, node.peers(), self.degree // 2
        state["latest"] = node.model
        node.expect("model", node.model, check=lambda message: message.tag[1] in ("question", "answer"))
        node.expect("heard", node.model)
        node.spawn(self._listen(node))
        leaving: deque[list[Sending]] = deque()
        async for r in node.rounds():
            await node.train(self.local_steps)
            state["latest"] = node.model
            drawn = node.rng("peers", r).integers(len(peers), size=requests)
            questions = [
                node.send(peers[k], state["latest"], tag=("model", "question")) for k in drawn.tolist()
            ]
            heard = {message.source: message.payload for message in node.drain("heard", newest=True)}
            node.record(received_share=len(heard) / (2 * requests))
            await node.mix(heard, dict.fromkeys(heard, 1 / (1 + len(heard))))
            del heard
            await wait_for_backlog(leaving, questions, self.backlog)

    async def _listen(self, node: Node) -> None:
        """Answer requests until the run ends. The received models stay in the mailbox until the next
        averaging."""
        while True:
            message = await node.receive("model", keep_as="heard")
            if message.tag[1] == "question":
                node.send(message.source, node.state["latest"], tag=("model", "answer"))
