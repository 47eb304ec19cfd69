"""A node's part of checkpoints, in its own process: of the whole run, from which it is resumed, and of the node alone, from
which the node is restarted while the others go on.

::

    node -> coordinator   marked NUMBER, SENT       it took its snapshot, and all from before has left: how much, to each rank
    coordinator -> node   expect NUMBER, SENT       all nodes took theirs, and had sent this much here
    node -> coordinator   saved NUMBER, ROUND, TIME all of that has arrived, and the node's file is written
                          (with an error)           or can't be: the checkpoint is given up
    coordinator -> node   snapshot NUMBER           others took theirs; for a node whose rounds are over
    coordinator -> node   settled NUMBER            all files are written, or the checkpoint is given up: a node was out of
                                                    reach, or can't write its file

The next one is made when it is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from gossamer.config import Checkpoints, Experiment
from gossamer.errors import BadInput
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Message, Traffic
from gossamer.node import NodeRuntime, checkpoint
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder
from gossamer.results.folder import RunFolder, atomic, run_id
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.node_process.host import NodeContext
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.snapshots import NodeSnapshots, repeats_messages, sent_here, snapshots_taken


class NodeCheckpoints:
    """One node's part of the run's checkpoints, and how it goes on from one."""

    def __init__(
        self,
        node: NodeRuntime,
        experiment: Experiment,
        context: NodeContext,
        tell: Callable[[protocol.FromNode], None],
    ) -> None:
        path, cut = context.folder.checkpoints, context.cut
        self._asked, self._tell = experiment.checkpoint, tell
        self._folder = CheckpointFolder(path, experiment, context.digest)
        repeats = repeats_messages(experiment)
        self._cuts = NodeSnapshots(node.deliver, repeats, lambda again: self._count(again, -1))
        # Snapshots that need not be taken any more.
        self._made = 0 if cut is None else snapshots_taken(self._asked, cut)
        self._offset = context.next_checkpoint - self._made - 1
        self._transport: Transport
        self._before: dict[int, int] = {}  # messages by each source when the run was resumed
        self._arrived: dict[int, int] = {}  # messages by each source
        self._numbers: set[int] = set()  # of this node's snapshots whose checkpoints are not settled
        # By checkpoint: messages by each source until its snapshot.
        self._expected: dict[int, dict[int, int]] = {}
        self._settled = 0  # all checkpoints up to this one are
        self._news = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, transport: Transport, start: Checkpoint, *, resumed: bool = False) -> None:
        """The node is at its start, or where it was saved: messages and a transport's counters go on from there."""
        self._transport = transport
        if not resumed:
            self.round_ended(start)
            return
        self._cuts.restore(start)
        self._before = sent_here(start)
        self._arrived = dict(self._before)
        transport.traffic = Traffic(**start.engine["traffic"])
        self.round_ended(start)
        for message in start.arriving:  # each had the time since to arrive
            self._count(message, 1)
            self._cuts.deliver(message)

    def deliver(self, message: Message) -> None:
        """A message has come in: its number goes on where those of its sender were when the run was resumed."""
        before = self._before.get(message.source, 0)
        self._arrived[message.source] = message.number + before + 1
        self._cuts.deliver(replace(message, number=message.number + before) if before else message)
        for number in list(self._expected):
            self._look(number)

    def _count(self, message: Message, times: int) -> None:
        self._transport.traffic.messages_received += times
        self._transport.traffic.bytes_received += times * wire_bytes(message.tag, message.payload)

    def round_ended(self, saved: Checkpoint) -> None:
        """The node is at the end of a round (or at its start): take the snapshots that are due."""
        self._cuts.round_ended(saved)
        self._transport.rounds += 1
        due = self._asked.due(saved.round, saved.time_s)
        before, self._made = self._made, max(self._made, due)
        for number in range(before + 1, due + 1):
            self.snapshot(number + self._offset)

    def over(self) -> None:
        self._cuts.over()

    def hear(self, message: protocol.Note | protocol.Expect) -> None:
        match message:
            case protocol.Note("snapshot", number):
                self.snapshot(number)
            case protocol.Expect(number=number, sent=sent) if number in self._numbers:
                self._expected[number] = {rank: n + self._before.get(rank, 0) for rank, n in sent.items()}
                self._look(number)
            case protocol.Note("settled", number):
                self._settled = number
                for each in [each for each in self._numbers if each <= number]:
                    self._numbers.discard(each)
                    self._expected.pop(each, None)
                    self._cuts.drop(each)
                self._news.set()

    def snapshot(self, number: int) -> None:
        if number not in self._numbers and number > self._settled:
            self._numbers.add(number)
            self._cuts.cut(number)
            self._transport.cut(lambda sent: self._tell(protocol.Marked(number, sent)))

    def _look(self, number: int) -> None:
        sent = self._expected[number]
        if all(self._arrived.get(rank, 0) >= n for rank, n in sent.items()):
            del self._expected[number]
            saved = self._cuts.finish(number, sent)
            writing = asyncio.get_running_loop().run_in_executor(
                self._writer, self._folder.write, number, saved
            )
            writing.add_done_callback(lambda done: self._written(number, saved, done))

    def _written(self, number: int, saved: Checkpoint, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        self._tell(protocol.Saved(number, saved.round, saved.time_s, None if error is None else str(error)))

    async def last(self, number: int, timeout_s: float) -> None:
        """Take a snapshot at the end of the run, and wait until that checkpoint is written, or can't be in time."""
        self.snapshot(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._settled < number:
                    self._news.clear()
                    await self._news.wait()


class RestartFile:
    """A node's own checkpoint, for a restart in the same run."""

    def __init__(
        self,
        folder: RunFolder,
        node: NodeRuntime,
        asked: Checkpoints,
        tell: Callable[[protocol.FromNode], None],
    ) -> None:
        self._path, self._identity = folder.restart(node.rank), {"run": run_id(folder.path)}
        self._node, self._asked, self._tell = node, asked, tell
        self._made = 0  # saves that were due by now

    def round_ended(self) -> None:
        """The node is at the end of a round: save it, if that is due; a kill at any instant leaves the file before."""
        due = self._asked.due(self._node.round, self._node.node.now())
        if due <= self._made:
            return
        self._made = due
        try:
            self._path.parent.mkdir(exist_ok=True)
            with atomic(self._path) as temporary:
                checkpoint.write(self._node.checkpoint(), temporary, self._identity)
        except OSError as error:  # a full disk is no reason to end; the file before is still there
            self._tell(protocol.Event("checkpoint", f"it could not be written: {error}"))
        else:
            self._tell(protocol.Saved(None, self._node.round, self._node.node.now()))

    def restore(self) -> Checkpoint | None:
        saved = None
        if self._path.exists():
            try:
                saved = checkpoint.read(self._path, self._identity)
                self._node.restore(saved)
            except BadInput as error:
                saved = None
                self._tell(protocol.Event("checkpoint", f"it is of no use: {error}"))
        self._made = self._asked.due(self._node.round, self._node.node.now())
        return saved
