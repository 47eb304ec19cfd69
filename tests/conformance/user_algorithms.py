"""Algorithms and wrappers as a user writes them: outside the package, named "user_algorithms:Class"."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from gossamer import Algorithm, Message, Node, NodeWrapper
from gossamer.algorithms import DPSGD
from gossamer.messages.tags import Payload


class Ledger(NodeWrapper):
    """Logs the messages sent: a line (tag, source, to) for each, a file for each node."""

    folder: str

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        with (Path(self.folder) / f"{node.rank}.jsonl").open("a") as file:
            file.write(json.dumps([tag, node.rank, to]) + "\n")
        return payload


def read_ledger(folder: Path) -> list[tuple[list[str | int], int, int]]:
    """Every message that was sent, by sender, oldest first."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [(tag, source, to) for tag, source, to in map(json.loads, lines)]


class Forerunners(NodeWrapper):
    """Logs the messages that arrive before their receiver's round: a line (round, source, to) for each, a file for each
    node."""

    folder: str

    def incoming(self, node: Node, message: Message) -> Message | None:
        r = message.tag[-1]
        if isinstance(r, int) and r > node.round:
            with (Path(self.folder) / f"{node.rank}.jsonl").open("a") as file:
                file.write(json.dumps([r, message.source, node.rank]) + "\n")
        return message


class Restless(DPSGD):
    """D-PSGD with unrelated concurrent timers, some at the same instants."""

    async def run(self, node: Node) -> None:
        for k in range(1 + node.rank % 3):
            node.spawn(self._fidget(node, k))
        await super().run(node)

    async def _fidget(self, node: Node, k: int) -> None:
        for n in count():
            rng = node.rng("fidget", k, n)
            await node.sleep(float(rng.choice([0.0, 0.005, 0.01, rng.exponential(0.01)])))


class Gated(DPSGD):
    """D-PSGD that waits in one round until a file exists."""

    gate: str
    at: int

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            while r == self.at and not Path(self.gate).exists():
                await node.sleep(0.02)
            await node.train(self.local_steps)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))


class Rates(DPSGD):
    """D-PSGD that records each round's learning rate, and sets that of round 2."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            node.record(at_first=node.lr)
            if r == 2:
                node.lr = 0.25
            await node.train(self.local_steps)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
            node.record(at_last=node.lr)


class Chatter(Algorithm):
    """Asynchronous gossip: train, push to a random peer, mix the models that have arrived. No node waits."""

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
    """D-PSGD in which one node fails at the start of a round."""

    victim: int = 2
    at: int = 3
    by: Literal["exception", "spawned", "forgotten", "rebound", "return", "sigkill"] = "exception"

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if (node.rank, r) == (self.victim, self.at):
                if self.by == "return":
                    return
                await self._fail(node)
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.parameters, tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))

    async def _fail(self, node: Node) -> None:
        if self.by == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.by == "spawned":
            # The task is never awaited: its failure still fails the node.
            node.spawn(self._raise())
        elif self.by == "forgotten":
            node.train()  # type: ignore[unused-coroutine]
        elif self.by == "rebound":
            for _ in range(2):
                loss = node.train()
            await loss
        else:
            await self._raise()

    async def _raise(self) -> None:
        raise ArithmeticError("the well is dry")


class Interrupted(Algorithm):
    """Interrupts the run twice on every node that runs."""

    turns: ClassVar[list[int]] = []

    async def run(self, node: Node) -> None:
        self.turns.append(node.rank)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


class WrongTag(Algorithm):
    """Gathers under a tag that differs from that of the messages."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            node.broadcast(node.peers(), node.model, tag=("m", r))
            await node.gather(node.peers(), tag=("model", r))


class Silence(Algorithm):
    """Every node waits for a message that is never sent; the last one in a spawned task."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            if node.rank == node.size - 1:
                await node.spawn(self._wait(node))
            else:
                await node.gather([(node.rank + 1) % node.size], tag=("never", node.rank, r))

    async def _wait(self, node: Node) -> None:
        await node.receive("nothing", source=0)


class Deaf(NodeWrapper):
    """One node fails on the messages of a round (for algorithms whose tag is the round)."""

    victim: int = 2
    at: int = 3

    def incoming(self, node: Node, message: Message) -> Message | None:
        if (node.rank, message.tag) == (self.victim, (self.at,)):
            raise UnicodeError("it is all Greek")
        return message


class Lone(Algorithm):
    """Every node trains alone; one misbehaves in one round, or (large) from it on."""

    victim: int = 2
    at: int = 3
    deed: Literal["large", "in-place", "in-place-and-write"] = "large"

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if self.deed == "large":
                await node.train()
                if node.rank == self.victim and r >= self.at:
                    node.parameters = torch.full_like(node.parameters, 1e9)
            elif (node.rank, r) != (self.victim, self.at):
                await node.train()
            else:
                training = node.spawn(node.train())
                await node.sleep(0)
                if self.deed == "in-place-and-write":
                    node.parameters = node.parameters + 1.0
                node.parameters.add_(1.0)
                await training


class Scribbler(Algorithm):
    """Node 0 broadcasts a payload of containers, and every node then modifies its own."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if node.rank == 0:
                payload: dict[str, Payload] = {"list": [0, [1]], "inner": {"x": 0}, "v": torch.zeros(3)}
                node.broadcast(node.peers(), payload, tag=r)
            else:
                payload = (await node.receive(r)).payload
            node.record(seen=json.dumps({name: payload[name] for name in payload if name != "v"}))
            payload["list"][1].append(node.rank)
            payload["inner"]["x"] = node.rank
            payload["new"] = node.rank


class Overwriter(Algorithm):
    """Node 0 sends a gradient and then overwrites it; node 1 counts overwritten values in the message."""

    yields: int = 0

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            if node.rank == 0:
                gradient = await node.gradient()
                node.send(1, gradient, "g")
                for _ in range(self.yields):
                    await node.sleep(0)
                gradient.fill_(7.0)
                await node.sleep(0.5)
            elif node.rank == 1:
                gradient = (await node.receive("g")).payload
                node.record(sevens=int((gradient == 7.0).sum()))


class Scalars(Algorithm):
    """Records scalars of NumPy and torch."""

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            node.record(
                k=np.int64(3), t=torch.tensor(2.0), f=np.float32(0.5), yes=np.bool_(True), plain=node.rank
            )


class TakesBack(Algorithm):
    """Node 0 queues three large messages and cancels the second one, twice."""

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            if node.rank == 0:
                _, second, third = (node.send(1, bytes(500_000), number) for number in range(3))
                node.record(answers=json.dumps([second.cancel(), second.cancel()]))
                await second
                await third
                await node.receive("thanks")
            else:
                node.record(answers=json.dumps([(await node.receive()).tag[0] for _ in range(2)]))
                node.send(0, None, "thanks")

    def message_limit(self, P: int, nodes: int) -> int:
        return 2**20


class EventTriggered(Algorithm):
    """A node sends a neighbour its model only if the model is farther than a threshold from the last one sent there:
    receivers depend on values."""

    threshold: float = 0.0
    local_steps: int = 1

    async def run(self, node: Node) -> None:
        neighbors = await node.neighbors()
        told: dict[int, torch.Tensor] = {}
        heard: dict[int, torch.Tensor] = {}
        sent = 0
        async for r in node.rounds():
            await node.train(self.local_steps)
            for j in neighbors:
                # Neighbours alternate, so that the models last sent to them differ.
                due = (r + node.rank + j) % 2 == 0
                if due and (j not in told or torch.dist(node.parameters, told[j]) > self.threshold):
                    node.send(j, node.parameters, tag="model")
                    told[j] = node.parameters
                    sent += 1
            heard |= {message.source: message.payload for message in node.drain("model", newest=True)}
            await node.mix(heard, {j: node.mixing_weights()[j] for j in heard})
            node.record(told=sent)


class Brief(Algorithm):
    """Every node trains alone; ranks below ``first`` return after some rounds, counted or not, or sleep from then on until
    the run ends."""

    first: int = 4
    after: int = 3
    counted: bool = True
    sleeps: bool = False

    async def run(self, node: Node) -> None:
        if not self.counted:
            await node.train(self.after)
            return
        async for r in node.rounds():
            if r == self.after and node.rank < self.first:
                if not self.sleeps:
                    return
                await node.sleep(1e6)
            await node.train()


class Heavy(Algorithm):
    """Custom momentum, kept in local variables, in ``node.state``, or (nothing) not at all."""

    kept: Literal["locals", "state", "nothing"] = "locals"

    async def run(self, node: Node) -> None:
        momentum, recent, seen = (
            torch.zeros_like(node.parameters),
            deque[float](maxlen=2),
            np.zeros(node.size),
        )
        steps, before, sendings = 0, node.model, {}
        drawn, noise = np.random.default_rng(node.rank), torch.Generator().manual_seed(node.rank)
        async for r in node.rounds():
            if self.kept == "state":
                momentum = node.state.get("momentum", momentum)
            gradient = await node.gradient()
            if self.kept != "nothing":
                momentum = 0.9 * momentum + gradient
            if self.kept == "locals":
                steps += 1
                recent.append(float(momentum.sum()))
                seen[node.rank] += 1
                drawn.random()
                torch.rand(1, generator=noise)
            if self.kept == "state":
                node.state["momentum"] = momentum
            node.parameters = node.parameters - 0.05 * (momentum + before.parameters)
            peers = await node.neighbors(r)
            sendings = dict(zip(peers, node.broadcast(peers, node.model, tag=r), strict=True))
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))
            before = node.model
            node.record(steps=steps, sent=len(sendings))
