"""Algorithms whose order of events few of the built-in ones have."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import torch

from gossamer import Algorithm, Model, Node


class Questions(Algorithm):
    """Questions with limits of time, whose answers come late, twice, or never, because one node is asleep."""

    gathers: ClassVar[bool] = False

    async def run(self, node: Node) -> None:
        node.answer("ask", lambda message: {"to": message.payload, "by": node.rank})
        node.answer("slow", lambda message: message.payload)
        async for r in node.rounds():
            await node.train()
            for peer in (await node.neighbors())[:2]:
                try:
                    await node.ask(peer, r, ("ask", r), timeout=0.003 if r % 2 else None)
                except TimeoutError:
                    await node.sleep(0.001 * (node.rank + 1))
            try:
                await node.ask(node.peers()[r % (node.size - 1)], r, ("slow", r), 0.0001, keep_s=0.02)
            except TimeoutError:
                await node.next_answer()
            node.drain_answers()


class Tasks(Algorithm):
    """Tasks that wait for each other by asyncio's own means, and that are cancelled at every stage."""

    gathers: ClassVar[bool] = False

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            ready, queue = asyncio.Event(), asyncio.Queue[int]()
            made = [node.spawn(self._maker(node, k, ready, queue)) for k in range(3)]
            gone = node.spawn(node.sleep(1.0))
            early = node.spawn(node.train())
            await node.train()
            ready.set()
            first = await queue.get()
            await asyncio.sleep(0)
            done, waiting = await asyncio.wait(made, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*made)
            await asyncio.shield(early)
            gone.cancel()
            await asyncio.wait([gone])
            node.record(first=first, done=len(done), waiting=len(waiting), left=queue.qsize())
            node.broadcast(await node.neighbors(r), node.model, tag=("model", r))
            received = node.spawn(node.receive(("never", r), timeout=5.0))
            await node.receive(("model", r))
            received.cancel()
            node.drain("model")

    async def _maker(self, node: Node, k: int, ready: asyncio.Event, queue: asyncio.Queue[int]) -> None:
        await ready.wait()
        await node.sleep(0.001 * (2 - k))
        queue.put_nowait(k)
        await asyncio.sleep(0)
        await node.evaluate()


class Partly(Algorithm):
    """Gathers that are content with some messages, or with those of a limited time; late ones arrive in a later round."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train(1 + node.rank % 3)
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=("model", r))
            some = await node.gather(peers, tag=("model", r), at_least=2)
            await node.mix(some, dict.fromkeys(some, 0.2))
            node.broadcast(peers, torch.tensor([float(node.rank)]), tag=("rank", r, node.rank))
            heard = await node.gather(peers, tag=("rank", r), timeout=0.002)
            node.record(some=len(some), heard=len(heard), missing=len(heard.missing))
            await node.receive(("later", r), timeout=0.001 * node.rank) if r == 2 and node.rank else None


class Malformed(Algorithm):
    """One node sends what the others do not expect: other shapes, kinds and values, and messages without a reader."""

    async def run(self, node: Node) -> None:
        node.expect(("number",), 1, check=lambda message: message.payload < 5)
        async for r in node.rounds():
            await node.train()
            peers, wrong = await node.neighbors(r), node.rank == 1
            node.broadcast(
                peers, Model(node.parameters[:-1]) if wrong and r % 2 else node.model, tag=("model", r)
            )
            node.broadcast(peers, ["seven", 7.5, 9, 3][r % 4] if wrong else r % 4, tag=("number", r))
            node.broadcast(peers, r, tag=("unread", node.rank))
            for tag in ("model", "number"):
                await node.gather(peers, tag=(tag, r), timeout=0.05)


class Stuck(Algorithm):
    """Waits for messages that nobody sends."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            node.broadcast(await node.neighbors(r), node.model, tag=("sent", r))
            await node.gather(await node.neighbors(r), tag=("awaited", r))


class Spinning(Algorithm):
    """One node never lets time pass."""

    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.train()
            while node.rank == 2:
                await asyncio.sleep(0)
