"""A node's part of checkpoints, in its own process. A run is resumed from checkpoints of the whole run. A
node is restarted from a checkpoint of its own, while the others continue.

Checkpoints of the run are consistent and stop no node. A node takes a snapshot at the end of one of its
rounds; the snapshots of all nodes with the same number form a checkpoint. Messages complete it (Chandy and
Lamport, 1985): a message that was sent before its sender's snapshot, and received after its receiver's, is
saved with the receiver. Messages of a pair are numbered and arrive in order, so two counts per pair identify
them: the messages received before the receiver's snapshot, and those sent before the sender's::

    node -> coordinator   marked NUMBER, SENT       its snapshot is taken, and all earlier messages have left
    coordinator -> node   expect NUMBER, SENT       all snapshots are taken; earlier messages to this node
    node -> coordinator   saved NUMBER, ROUND, TIME these have arrived, and the node's file is written
                          (with an error)           or can't be written: the checkpoint is abandoned
    coordinator -> node   snapshot NUMBER           others took snapshots; sent to nodes whose rounds are over
    coordinator -> node   settled NUMBER            all files are written, or the checkpoint is abandoned: a
                                                    node was unreachable, or can't write its file

The next checkpoint is made when it is due.

A resumed run repeats the messages that were sent after their sender's snapshot, although their receivers may
have received them already. An algorithm that waits for its messages (``Algorithm.gathers``) sends the same
messages again, and the node ignores them. With any other algorithm, and under secure aggregation, whose keys
are new, the repeated messages differ, and the node takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from msgspec import structs

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
from gossamer.secure.protocol import TAG


@dataclass(eq=False)
class _Boundary:
    """The node's state at the end of a round, the number of messages received from each source by then, and
    the messages received since."""

    saved: Checkpoint
    received: Mapping[int, int]
    since: list[Message] = field(default_factory=list)


class NodeCheckpoints:
    """A node's part of the run's checkpoints, and its resumption from one. Messages to the node pass through
    it."""

    def __init__(
        self,
        node: NodeRuntime,
        experiment: Experiment,
        context: NodeContext,
        tell: Callable[[protocol.FromNode], None],
    ) -> None:
        self._node, self._tell, self._options = node, tell, experiment.checkpoint
        self._folder = CheckpointFolder(context.folder.checkpoints, experiment, context.job.digest)
        # Whether the node sends the same messages when its rounds are repeated.
        self._repeats = experiment.algorithm.gathers and experiment.secure_aggregation is None
        # Number of snapshots that were due so far.
        self._made = 0 if context.checkpoint is None else context.checkpoint.snapshots(self._options)
        self._offset = context.job.next_checkpoint - self._made - 1
        self._transport: Transport
        # Numbers of messages by source: in all runs so far, in earlier runs, and in the node's saved state.
        self._received: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._newest: _Boundary | None = None
        self._over = False  # whether the node's rounds are over
        self._newest_number = 0  # of its snapshots
        # By checkpoint: a snapshot whose messages have not all arrived; their numbers by source, once known.
        self._open: dict[int, _Boundary] = {}
        self._expected: dict[int, Mapping[int, int]] = {}
        self._watching: list[_Boundary] = []  # the boundaries that record incoming messages
        self._settled = 0  # all checkpoints up to this number are settled
        self._settled_event = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, transport: Transport, start: Checkpoint, *, resumed: bool = False) -> None:
        """Begin at the node's start, or where it was saved: message numbers and counters continue from
        that point."""
        self._transport = transport
        if resumed:
            self._before, self._received = _counts(start, "sent"), _counts(start, "received")
            self._known = dict(self._received) if self._repeats else {}
            transport.traffic = Traffic(**start.engine["traffic"])
        self.round_ended(start)
        for message in start.arriving:  # all of them have had time to arrive
            self._count(message, 1)
            self._take(message)

    def deliver(self, message: Message) -> None:
        """Take an incoming message. Its number continues those of its sender before the run was resumed."""
        before = self._before.get(message.source, 0)
        self._take(structs.replace(message, number=message.number + before) if before else message)
        for number in list(self._expected):
            self._write_if_complete(number)

    def _take(self, message: Message) -> None:
        source, number = message.source, message.number
        if number < self._known.get(source, 0):  # it was received before the run was resumed
            self._count(message, -1)
            return
        self._received[source] = max(number + 1, self._received.get(source, 0))
        for boundary in self._watching:
            boundary.since.append(message)
        self._node.deliver(message)

    def _count(self, message: Message, times: int) -> None:
        self._transport.traffic.messages_received += times
        self._transport.traffic.bytes_received += times * wire_bytes(message.tag, message.payload)

    def round_ended(self, saved: Checkpoint) -> None:
        """Take the snapshots that are due at the end of a round, or at the node's start."""
        self._newest = _Boundary(saved, dict(self._received))
        self._watch()
        self._transport.rounds += 1
        due = self._options.due(saved.round, saved.time_s)
        before, self._made = self._made, max(self._made, due)
        for number in range(before + 1, due + 1):
            self.snapshot(number + self._offset)

    def over(self) -> None:
        """The node's rounds are over: it reads no later messages, whose number may be unlimited."""
        self._over = True
        self._watch()

    def _watch(self) -> None:
        newest = None if self._over and not self._repeats else self._newest
        boundaries = dict.fromkeys((newest, *self._open.values()))
        self._watching = [boundary for boundary in boundaries if boundary is not None]

    def hear(self, message: protocol.Command | protocol.Expect) -> None:
        match message:
            case protocol.Command("snapshot", number):
                self.snapshot(number)
            case protocol.Expect(number=number, sent=sent) if number in self._open:
                # Include sources that have sent nothing since the run was resumed.
                self._expected[number] = {
                    rank: sent.get(rank, 0) + self._before.get(rank, 0) for rank in {*sent, *self._before}
                }
                self._write_if_complete(number)
            case protocol.Command("settled", number):
                self._settled = number
                self._open = {later: boundary for later, boundary in self._open.items() if later > number}
                self._expected = {later: sent for later, sent in self._expected.items() if later > number}
                self._watch()
                self._settled_event.set()

    def snapshot(self, number: int) -> None:
        """Take a snapshot as of the end of the last round, unless it was taken or is settled."""
        if number > max(self._newest_number, self._settled):
            assert self._newest is not None, "a node's start is the end of a round"
            self._newest_number, self._open[number] = number, self._newest
            self._transport.add_snapshot(lambda sent: self._tell(protocol.Marked(number, sent)))

    def _write_if_complete(self, number: int) -> None:
        """Write the node's part of a checkpoint, if all messages that belong to it have arrived."""
        sent = self._expected[number]
        if all(self._received.get(rank, 0) >= n for rank, n in sent.items()):
            del self._expected[number]
            saved = self._complete(self._open.pop(number), sent)
            self._watch()
            writing = asyncio.get_running_loop().run_in_executor(
                self._writer, self._folder.write, number, saved
            )
            writing.add_done_callback(lambda done: self._written(number, saved, done))

    def _complete(self, boundary: _Boundary, sent: Mapping[int, int]) -> Checkpoint:
        """The node's state at a boundary, with its messages: the first ``sent`` of each source."""
        unread, received = boundary.saved.unread, boundary.received

        def belongs(message: Message) -> bool:
            # Secrets are not saved. Nodes that resume at the end of the same round agree on new ones.
            return message.number < sent.get(message.source, 0) and message.tag[:1] != (TAG,)

        if not self._repeats:
            unread = list(filter(belongs, unread))
            received = {source: min(count, sent.get(source, 0)) for source, count in received.items()}
        return replace(
            boundary.saved,
            unread=unread,
            arriving=list(filter(belongs, boundary.since)),
            engine={**boundary.saved.engine, "received": dict(received), "sent": dict(sent)},
        )

    def _written(self, number: int, saved: Checkpoint, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        self._tell(protocol.Saved(number, saved.round, saved.time_s, None if error is None else str(error)))

    async def last(self, number: int, timeout_s: float) -> None:
        """Take a snapshot at the end of the run, and wait up to ``timeout_s`` seconds until it is settled."""
        self.snapshot(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._settled < number:
                    self._settled_event.clear()
                    await self._settled_event.wait()


def _counts(saved: Checkpoint, name: str) -> dict[int, int]:
    return {int(source): int(count) for source, count in saved.engine.get(name, {}).items()}


class RestartFile:
    """A node's own checkpoint, for a restart in the same run."""

    def __init__(
        self,
        folder: RunFolder,
        node: NodeRuntime,
        options: Checkpoints,
        tell: Callable[[protocol.FromNode], None],
    ) -> None:
        self._path, self._identity = folder.restart(node.rank), {"run": run_id(folder.path)}
        self._node, self._options, self._tell = node, options, tell
        self._made = 0  # number of saves that were due so far

    def round_ended(self) -> None:
        """Save the node at the end of a round, if due. If the node is killed meanwhile, the previous file remains."""
        due = self._options.due(self._node.round, self._node.node.now())
        if due <= self._made:
            return
        self._made = due
        try:
            self._path.parent.mkdir(exist_ok=True)
            with atomic(self._path) as temporary:
                checkpoint.write(self._node.checkpoint(), temporary, self._identity)
        except OSError as error:  # a full disk is no reason to end; the previous file is intact
            self._tell(protocol.Event("checkpoint", f"its checkpoint could not be written: {error}"))
        else:
            self._tell(protocol.Saved(None, self._node.round, self._node.node.now()))

    def restore(self) -> Checkpoint | None:
        saved = None
        if self._path.exists():
            try:
                saved = checkpoint.read(self._path, self._identity)
                self._node.restore(saved, again=True)
            except BadInput as error:
                saved = None
                self._tell(protocol.Event("checkpoint", f"its checkpoint can't be used: {error}"))
        self._made = self._options.due(self._node.round, self._node.node.now())
        return saved
