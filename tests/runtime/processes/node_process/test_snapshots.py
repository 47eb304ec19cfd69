"""Checkpoints of real processes whose connections break meanwhile: consistent or abandoned, and never awaited in vain."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_scene import Peer, listen, on_loop, settle

from gossamer import Experiment
from gossamer.messages.tags import Message, Model, Traffic
from gossamer.node.checkpoint import Checkpoint, read
from gossamer.results.checkpoints import newest
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.coordinator.checkpoints import CheckpointCoordinator
from gossamer.runtime.processes.node_process.checkpoints import NodeCheckpoints
from gossamer.runtime.processes.protocol import Expect, Marked, Saved

NODES = 3
EXPERIMENT = Experiment.of(
    {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 2, "samples": 8},
        "algorithm": "d-psgd",
        "checkpoint": {"every_rounds": 1, "keep": 1000},
        "stop": {"rounds": 1},
    }
)


class Member:
    """A node that sends, receives, ends rounds and takes snapshots."""

    def __init__(self, rank: int, run: Run, listener: Any, addresses: list[tuple[str, int]]) -> None:
        self.rank, self.round = rank, 0
        self.sent: Counter[int] = Counter()
        self.sent_before: dict[int, dict[int, int]] = {}  # by completed rounds, then by receiver
        node: Any = SimpleNamespace(deliver=lambda message: None)
        context: Any = SimpleNamespace(
            folder=run.folder, checkpoint=None, job=SimpleNamespace(digest=None, next_checkpoint=1)
        )
        self.cutting = NodeCheckpoints(node, EXPERIMENT, context, partial(run.hear, rank))
        self.peer = Peer(
            rank,
            listener,
            addresses,
        )
        self.peer.transport.deliver = self.cutting.deliver
        self.cutting._transport = self.peer.transport

    def send(self, to: int) -> None:
        self.peer.send(to, self.sent[to], "t")
        self.sent[to] += 1

    def end_round(self) -> None:
        self.sent_before[self.round] = dict(self.sent)
        saved = Checkpoint(self.rank, self.round, 0.0, Model(torch.zeros(2), torch.zeros(0)), None, {}, {})
        self.cutting.round_ended(saved)
        self.round += 1

    def break_connection(self, to: int, members: list[Member]) -> None:
        """Lose the bytes that the other node has not read yet."""
        if (contact := members[to].peer.transport.peers.get(self.rank)) is not None and contact.incoming:
            contact.incoming.link.abort()


class Run:
    """Members and the coordinator of their checkpoints; messages between them arrive in order, a little later."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(path, "run", experiment="", environment={})
        self.notices: list[str] = []
        self.members: list[Member] = []
        self._waiting: deque[Any] = deque()
        self.checkpoints = CheckpointCoordinator(
            EXPERIMENT, self.folder, None, self._tell, self.notices.append
        )

    def _later(self, call: Any) -> None:
        self._waiting.append(call)
        asyncio.get_running_loop().call_soon(lambda: self._waiting.popleft()())

    def hear(self, rank: int, message: Any) -> None:
        self._later(lambda: self.checkpoints.hear(rank, message))

    def _tell(self, rank: int, message: Any) -> None:
        self._later(lambda: self.members[rank].cutting.hear(message))

    async def until_complete(self, number: int) -> None:
        while (checkpoint := newest(self.folder.checkpoints)) is None or checkpoint.number < number:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def run_in(path: Path) -> AsyncIterator[Run]:
    run = Run(path)
    listeners = [listen() for _ in range(NODES)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    run.members = [Member(rank, run, listeners[rank], addresses) for rank in range(NODES)]
    run.checkpoints.begin(range(NODES), 0.0)
    try:
        for member in run.members:
            await member.peer.transport.start()
            member.end_round()
        yield run
    finally:
        for member in run.members:
            await member.peer.transport.close()


async def all_send(run: Run) -> None:
    for member in run.members:
        for to in range(NODES):
            if to != member.rank:
                member.send(to)
    for member in run.members:
        await member.peer.transport.flush()


@on_loop
async def test_connection_break_after_a_snapshot_costs_no_checkpoint(tmp_path: Path) -> None:
    async with run_in(tmp_path) as run:
        await all_send(run)
        contact = run.members[1].peer.transport.peers[0]
        assert contact.incoming is not None
        contact.incoming.link.pause_reading()
        run.members[0].send(1)
        for member in run.members:
            member.end_round()
        await settle()
        run.members[0].break_connection(1, run.members)
        await run.until_complete(1)
        assert run.notices == []
        check(run, run.folder.checkpoints / "1")


@on_loop
async def test_abandoned_last_checkpoint_releases_its_waiters(tmp_path: Path) -> None:
    async with run_in(tmp_path) as run:
        await all_send(run)
        waiting = [asyncio.ensure_future(member.cutting.last(7, 1000.0)) for member in run.members[:2]]
        await settle()
        run.checkpoints.away(2)
        await asyncio.gather(*waiting)
        assert len(run.notices) == 1


@on_loop
async def test_unwritable_last_checkpoint_releases_its_waiters(tmp_path: Path) -> None:
    async with run_in(tmp_path) as run:
        await all_send(run)
        run.folder.checkpoints.write_text("in the way of the folder")
        await asyncio.gather(*(member.cutting.last(7, 1000.0) for member in run.members))
        [notice] = run.notices
        assert notice.startswith("checkpoint 7 is abandoned: [Errno")


@pytest.mark.parametrize("event", ["away", "back"])
@on_loop
async def test_checkpoint_is_abandoned_when_a_node_goes_or_returns(event: str, tmp_path: Path) -> None:
    async with run_in(tmp_path) as run:
        await all_send(run)
        if event == "back":
            run.checkpoints.away(2)
        run.members[0].end_round()
        while 1 not in run.checkpoints._open:
            await asyncio.sleep(0)
        getattr(run.checkpoints, event)(2)
        for member in run.members[1:]:
            member.end_round()  # too late
        if event == "away":
            run.checkpoints.back(2)
        for member in run.members:
            member.end_round()
        await run.until_complete(2)
        checkpoint = newest(run.folder.checkpoints)
        assert checkpoint is not None
        assert sorted(checkpoint.rounds) == [0, 1, 2]
        assert len(run.notices) == 1


@on_loop
async def test_no_checkpoint_is_made_while_a_pair_is_cut(tmp_path: Path) -> None:
    """The two would not count each other's messages, and a resumed run would take new ones for known ones."""
    async with run_in(tmp_path) as run:
        await all_send(run)
        run.members[0].end_round()
        run.checkpoints.hold("nodes 1 and 2 can't reach each other")
        assert run.checkpoints.last() is None
        for member in run.members[1:]:
            member.end_round()
        for member in run.members:
            member.end_round()
        await settle()
        assert newest(run.folder.checkpoints) is None
        run.checkpoints.release()
        for member in run.members:
            member.end_round()
        await run.until_complete(3)
        first, *others = run.notices
        assert first == "no checkpoint is made for now: nodes 1 and 2 can't reach each other"
        assert others[-1] == "checkpoints are made again"


def test_death_of_the_last_nodes_completes_no_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", experiment="", environment={})
    assembly = CheckpointCoordinator(EXPERIMENT, folder, None, lambda rank, *message: None, lambda text: None)
    assembly.begin([0, 1], 0.0)
    assembly.hear(0, Marked(1, {}))
    (folder.checkpoints / "1").mkdir(parents=True)  # a node has begun to write its part
    for rank in (1, 0):
        assembly.away(rank)
    assert not (folder.checkpoints / "1").exists()


@on_loop
async def test_second_resume_keeps_messages_of_silent_sources(
    tmp_path: Path,
) -> None:
    async with run_in(tmp_path) as run:
        messages: list[Any] = []
        context: Any = SimpleNamespace(
            folder=run.folder,
            checkpoint=SimpleNamespace(snapshots=lambda asked: 5),
            job=SimpleNamespace(digest=None, next_checkpoint=1),
        )
        model = Model(torch.zeros(2), torch.zeros(0))
        saved = Checkpoint(
            0,
            5,
            0.0,
            model,
            None,
            {},
            {},
            arriving=[Message(1, ("t",), 5, 0.0, number=5)],  # the last message that node 1 had sent
            engine={"traffic": asdict(Traffic()), "received": {1: 5}, "sent": {1: 6}},
        )
        node: Any = SimpleNamespace(deliver=lambda message: None)
        resumed = NodeCheckpoints(node, EXPERIMENT, context, messages.append)
        resumed.begin(run.members[0].peer.transport, saved, resumed=True)
        resumed.snapshot(1)
        resumed.hear(Expect(1, {2: 0}))  # node 1 has sent nothing since
        while not any(isinstance(message, Saved) for message in messages):
            await asyncio.sleep(0.001)
        again = read(run.folder.checkpoints / "1" / "node-0.safetensors")
        assert [message.payload for message in again.arriving] == [5]
        assert {int(rank): count for rank, count in again.engine["sent"].items()} == {1: 6, 2: 0}


pairs = st.permutations(range(NODES)).map(lambda ranks: ranks[:2])
steps = st.one_of(
    st.tuples(st.just("send"), pairs),
    st.tuples(st.just("end"), pairs),
    st.tuples(st.just("break"), pairs),
    st.tuples(st.just("settle"), pairs),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(steps, min_size=5, max_size=40))
def test_complete_checkpoint_is_consistent_despite_breaks(schedule: list[tuple[str, list[int]]]) -> None:
    @on_loop
    async def play() -> None:
        with tempfile.TemporaryDirectory() as path:
            async with run_in(Path(path)) as run:
                for step, (rank, peer) in schedule:
                    member = run.members[rank]
                    match step:
                        case "send":
                            member.send(peer)
                        case "end":
                            member.end_round()
                        case "break":
                            member.break_connection(peer, run.members)
                        case "settle":
                            await settle()
                await all_send(run)
                last = max(member.round for member in run.members)
                for member in run.members:
                    while member.round <= last:
                        member.end_round()
                await run.until_complete(last)
                assert run.notices == []
                for folder in run.folder.checkpoints.iterdir():
                    if (folder / "manifest.json").exists():
                        check(run, folder)

    play()


def check(run: Run, folder: Path) -> None:
    """Check that each part has all messages sent before the sender's snapshot, as received or as arriving."""
    parts = {rank: read(folder / f"node-{rank}.safetensors") for rank in range(NODES)}
    for rank, part in parts.items():
        for source in set(range(NODES)) - {rank}:
            before = run.members[source].sent_before[parts[source].round].get(rank, 0)
            received = {int(k): v for k, v in part.engine["received"].items()}.get(source, 0)
            arriving = [message.payload for message in part.arriving if message.source == source]
            assert arriving == list(range(received, before)), (rank, source, received, before)
