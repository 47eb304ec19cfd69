"""Algorithms and data for the benchmarks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name

from gossamer import Algorithm, Experiment, Node, Task
from gossamer.config.registry import build
from gossamer.tasks import accuracy, model_factory


class Talk(Algorithm):
    """Every round: sleep for a virtual step, send to five neighbours, gather, mix."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.sleep(0.01)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))


def no_compute(nodes: int, rounds: int) -> Experiment:
    """Five messages per node and round on a random 5-regular graph, with vectors of ten values."""
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


class Push(Algorithm):
    """Asynchronous gossip: step, send the model to five peers, mix the models that have arrived."""

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.train()
            node.broadcast(await node.neighbors(), node.parameters, tag="model")
            inbox = {message.source: message.payload for message in node.drain("model")}
            await node.mix(inbox, dict.fromkeys(inbox, 1 / (len(inbox) + 1)))


def images(model: str | dict[str, Any], channels: int, size: int, samples: int) -> Task:
    """Random images of ten classes."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, channels, size, size, generator=rng)
    targets = torch.randint(10, (samples,), generator=rng)
    return Task(
        model=model_factory(build("model", model), shape=(channels, size, size), classes=10),
        train=(inputs, targets),
        test=(inputs[:100], targets[:100]),
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        classes=tuple(str(label) for label in range(10)),
    )
