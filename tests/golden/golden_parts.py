"""User-defined components of the golden experiments: a task with buffers, wrappers, algorithms."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from gossamer import Algorithm, Experiment, Message, Model, Node, NodeWrapper, Part, Task

FEATURES = 6
Tag = tuple[str | int, ...]


def batch_norm(samples: int = 96) -> Task:
    """A regression whose model has buffers."""
    rng = np.random.default_rng(1)
    # Sums of products of sixteenths are exact in single precision, in any order.
    x = rng.integers(-32, 33, (samples + 40, FEATURES)).astype("float32") / 16
    y = (x * np.arange(1, FEATURES + 1, dtype="float32")).sum(axis=1, keepdims=True) / 4
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )

    return Task(
        model=model,
        train=(inputs[:samples], targets[:samples]),
        test=(inputs[samples:], targets[samples:]),
        loss=nn.functional.mse_loss,
        metrics={"mae": nn.functional.l1_loss},
    )


class Untouched(NodeWrapper):
    """Changes nothing."""


class Inverted(NodeWrapper):
    """Attackers send negated models, and messages from one node are dropped in every third round."""

    attackers: tuple[int, ...] = (1,)
    deaf_to: int = 2

    def outgoing(self, node: Node, to: int, payload: Model, tag: Tag) -> Model:
        return -payload if node.rank in self.attackers else payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        r = message.tag[-1]
        return None if message.source == self.deaf_to and isinstance(r, int) and r % 3 == 2 else message


class Everything(Algorithm):
    """Makes calls that few or no built-in algorithms make: layers, parts, prefixes, time limits, state, tasks, shared
    draws, evaluation on demand."""

    share: float = 0.5

    async def run(self, node: Node) -> None:
        kept = round(self.share * len(node.parameters))
        first = torch.arange(kept, dtype=torch.int32)
        echoes = node.spawn(self._echo(node))
        async for r in node.rounds():
            if r == 2:
                node.lr /= 2
                node.reset_optimizer()
            await node.apply(await node.gradient())
            await node.train()
            near, far = await node.neighbors(r, layer="near"), await node.neighbors(r, layer="far")
            start = int(node.rng("window", r, shared=True).integers(kept))
            v = node.parameters
            node.broadcast(near, Part(v[:kept], first, len(v)), tag=("near", r))
            node.broadcast(far, Part(v[start : start + kept], start + first, len(v)), tag=("far", r))
            for tag, peers in ((("near", r), near), (("far", r), far)):
                inbox = await node.gather(peers, tag=tag)
                node.parameters = await node.combine(
                    node.parameters, inbox, dict.fromkeys(inbox, 1.0), self_weight=1.0, missing="renormalize"
                )
            peer = near[int(node.rng("asked", r).integers(len(near)))]
            await node.send(peer, {"round": r, "words": ["how", 2, None, True, 0.5, b"go"]}, tag=("ask", r))
            try:
                answer = await node.receive(("answer",), timeout=0.004)
                heard = int(answer.payload)
            except TimeoutError:
                heard = -1
            judged = await node.evaluate(on="train")
            node.state["heard"] = node.state.get("heard", 0) + heard
            node.record(heard=heard, heard_in_all=node.state["heard"], own_loss=judged["loss"])
            await node.sleep(0.001 * (1 + node.rank % 2))
        echoes.cancel()

    async def _echo(self, node: Node) -> None:
        while True:
            message = await node.receive("ask")
            await node.sleep(0.0015 * node.rank)
            node.send(message.source, message.payload["round"], tag=("answer", node.rank))

    def message_limit(self, P: int, nodes: int) -> int:
        return 4 * P + 4096


class Settled(Algorithm):
    """Runs another algorithm, waits until no message is in flight, and writes the node's traffic to a file."""

    gathers: ClassVar[bool] = False

    inner: dict[str, Any]
    folder: str
    until_s: float = 1.5

    async def run(self, node: Node) -> None:
        inner = {"nodes": node.size, "task": "digits", "algorithm": self.inner, "stop": {"rounds": 1}}
        await Experiment.of(inner).algorithm.run(node)
        late = node.now() > self.until_s
        await node.sleep(max(self.until_s - node.now(), 0.3))
        traffic = {**asdict(node.traffic), "late": late}
        (Path(self.folder) / f"traffic-{node.rank}.json").write_text(json.dumps(traffic))


class Stumbling(Algorithm):
    """Nodes train alone until one raises an error."""

    victim: int = 2
    at: int = 3

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            if (node.rank, r) == (self.victim, self.at):
                raise ArithmeticError("nothing adds up")
