"""Algorithms and a wrapper as a user writes them: outside the package, found by "user_algorithms:Class"."""

from __future__ import annotations

import json
import os
import signal
from itertools import count
from pathlib import Path
from typing import Literal

from gossamer import Algorithm, Node, NodeWrapper
from gossamer.algorithms import DPSGD
from gossamer.messages import Payload


class Ledger(NodeWrapper):
    """Writes down who sends what to whom: a line (tag, source, to) a message, a file a node."""

    folder: str

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        with (Path(self.folder) / f"{node.rank}.jsonl").open("a") as file:
            file.write(json.dumps([tag, node.rank, to]) + "\n")
        return payload


def read_ledger(folder: Path) -> list[tuple[list[str | int], int, int]]:
    """Every message that was sent, by sender, oldest first."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [(tag, source, to) for tag, source, to in map(json.loads, lines)]


class Restless(DPSGD):
    """D-PSGD with unrelated things going on beside it, some at the very same instants."""

    async def run(self, node: Node) -> None:
        for k in range(1 + node.rank % 3):
            node.spawn(self._fidget(node, k))
        await super().run(node)

    async def _fidget(self, node: Node, k: int) -> None:
        for n in count():
            rng = node.rng("fidget", k, n)
            await node.sleep(float(rng.choice([0.0, 0.005, 0.01, rng.exponential(0.01)])))


class Chatter(Algorithm):
    """Asynchronous gossip: train, push to a random peer, mix what happens to be here. Nobody waits."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            peers = node.peers()
            node.send(peers[int(node.rng("peer", r).integers(len(peers)))], node.parameters, tag="model")
            latest = {message.source: message.payload for message in node.drain("model")}
            if latest:
                await node.mix(latest, dict.fromkeys(latest, 1 / (1 + len(latest))))
            node.record(heard=len(latest))


class Fragile(Algorithm):
    """D-PSGD in which one node comes to grief at the start of a round."""

    victim: int = 2
    at: int = 3
    by: Literal["exception", "spawned", "sigkill"] = "exception"

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if (node.rank, r) == (self.victim, self.at):
                await self._fail(node)
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))

    async def _fail(self, node: Node) -> None:
        if self.by == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.by == "spawned":
            # Nobody awaits the task: its failure is the node's all the same.
            node.spawn(self._raise())
        else:
            await self._raise()

    async def _raise(self) -> None:
        raise ArithmeticError("the well is dry")


class Silence(Algorithm):
    """Every node waits for what nobody sends; the last one in a task that it spawned."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            if node.rank == node.size - 1:
                await node.spawn(self._wait(node))
            else:
                await node.gather([(node.rank + 1) % node.size], tag=("never", node.rank, r))

    async def _wait(self, node: Node) -> None:
        await node.receive("nothing", source=0)
