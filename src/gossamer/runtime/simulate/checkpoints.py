"""A simulation's checkpoints: how all nodes are saved without being stopped. How a run goes on from one is in :mod:`replay`;
what a node's part of a checkpoint is, under every engine, is in :mod:`gossamer.runtime.snapshots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder, highest
from gossamer.results.folder import RunFolder
from gossamer.runtime.simulate.clock import Order
from gossamer.runtime.simulate.host import SimContext
from gossamer.runtime.simulate.links import Transfer
from gossamer.runtime.simulate.recording import SimRecorder
from gossamer.runtime.simulate.replay import Replay
from gossamer.runtime.snapshots import NodeSnapshots, snapshots_taken


@dataclass(eq=False)
class _Incomplete:
    """A checkpoint that is not complete yet. Messages are awaited as (sender, receiver, number) once all nodes are saved."""

    saved: dict[int, Checkpoint] = field(default_factory=dict)
    sent: dict[int, Mapping[int, int]] = field(default_factory=dict)  # by sender and receiver
    awaited: set[tuple[int, int, int]] = field(default_factory=set)


class SimCheckpoints:
    """Saves all nodes of a simulation, and writes the checkpoints in a thread.

    A checkpoint is complete when every node has been saved at the end of one of its rounds, and every message that was sent
    before its sender was saved has arrived or been lost. With a ``replay``, the run is resumed: what is on record until the
    checkpoint that it goes on from is not saved again.

    Attributes:
        inboxes: by rank, the function that receives a node's messages."""

    def __init__(
        self,
        context: SimContext,
        recorder: SimRecorder,
        folder: RunFolder,
        nodes: Sequence[NodeRuntime],
        replay: Replay | None,
    ) -> None:
        experiment = context.setup.experiment
        self._context, self._recorder, self._runtimes, self._replay = context, recorder, nodes, replay
        self._asked = experiment.checkpoint
        self._folder, self._numbers = CheckpointFolder(folder.checkpoints, experiment), folder.checkpoints
        context.links.flights = self
        # By sender: how many messages it has sent to each receiver, and those in flight by receiver and number, with the
        # instant (nanoseconds) at which they are due, or their transfer.
        self._sent: list[dict[int, int]] = [{} for _ in nodes]
        self._flying: list[dict[tuple[int, int], tuple[Message, Transfer | int]]] = [{} for _ in nodes]
        self._nodes = [NodeSnapshots(node.deliver) for node in nodes]
        self.inboxes = [partial(self._deliver, rank) for rank in range(len(nodes))]
        self._delivered = [0] * len(nodes)  # messages to each node
        before = 0 if replay is None else snapshots_taken(self._asked, replay.cut)
        self._made = [before] * len(nodes)  # checkpoints that each node has a part in
        self._sent_before: list[Mapping[int, int]] = [{}] * len(nodes)  # before each node was saved
        self._incomplete: dict[int, _Incomplete] = {}
        self._over: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    # --- messages

    def numbered(self, message: Message, to: int) -> Message:
        number = self._sent[message.source].get(to, 0)
        self._sent[message.source][to] = number + 1
        return replace(message, number=number)

    def sent(self, message: Message, to: int, due: Transfer | int) -> None:
        """A message is sent; it is due at an instant (nanoseconds), or when its transfer is."""
        self._flying[message.source][to, message.number] = message, due

    def arrived(self, message: Message, to: int) -> None:
        """A message is in flight no more: it has arrived, is lost, or was taken back."""
        self._flying[message.source].pop((to, message.number), None)
        key = message.source, to, message.number
        for number, checkpoint in list(self._incomplete.items()):
            if key in checkpoint.awaited:
                checkpoint.awaited.remove(key)
                if not checkpoint.awaited:
                    self._complete(number)

    def _deliver(self, rank: int, message: Message) -> None:
        listens = rank in self._over and not self._runtimes[rank].mailbox.retired
        if listens and self._context.compute.is_idle(rank):
            # No round of it will end any more, but its tasks may still answer messages.
            self._look_at(self._runtimes[rank])
        self._delivered[rank] += 1
        self._nodes[rank].deliver(message if self._replay is None else self._replay.delivered(message, rank))

    def _as_sent(self, message: Message, to: int) -> Message:
        """A message in flight, with the payload that it had before the run was resumed."""
        known = {} if self._replay is None else self._replay.payloads
        return known.get((message.source, to, message.number), message)

    # --- saving

    def round_ended(self, node: NodeRuntime) -> None:
        """Save a node at its start or at the end of a round, unless it computes in the background."""
        rank = node.rank
        if self._context.compute.is_idle(rank) and self._look_at(node):
            for number in range(self._made[rank] + 1, self._asked.due(node.round, node.node.now()) + 1):
                self._made[rank] = number
                self._add(rank, number)

    def _look_at(self, node: NodeRuntime) -> bool:
        """Note what a node is now, or restore it if this is where it was saved; says whether its values are right."""
        rank, replay = node.rank, self._replay
        engine = {
            "delivered": self._delivered[rank],
            "traffic": asdict(self._context.links.traffic(rank)),
            "computing_s": self._context.compute.busy_seconds(rank),
        }
        if replay is not None and rank not in replay.restored:
            replay.look_at(node, engine, self._recorder.unrecorded(rank))
            if rank not in replay.restored:
                return False
        saved = node.checkpoint(**engine, unrecorded=self._recorder.unrecorded(rank))
        self._nodes[rank].round_ended(saved)
        self._sent_before[rank] = dict(self._sent[rank])
        return True

    def over(self, rank: int) -> None:
        """A node's rounds are over: it is part of all later checkpoints."""
        self._over.add(rank)
        for number in list(self._incomplete):
            self._add(rank, number)

    def _add(self, rank: int, number: int) -> None:
        """Add a node to a checkpoint, as it was at the end of its last round."""
        if number not in self._incomplete:
            self._incomplete[number] = _Incomplete()
            for other in self._over - {rank}:
                self._add(other, number)
        checkpoint = self._incomplete[number]
        if rank in checkpoint.saved:
            return
        checkpoint.saved[rank], checkpoint.sent[rank] = self._nodes[rank].cut(number), self._sent_before[rank]
        if len(checkpoint.saved) == len(self._nodes):
            checkpoint.awaited = {
                (source, to, sent)
                for source, flying in enumerate(self._flying)
                for to, sent in flying
                if sent < checkpoint.sent[source].get(to, 0)
            }
            if not checkpoint.awaited:
                self._complete(number)

    def _complete(self, number: int) -> None:
        """A checkpoint is complete: write it when all of this instant is on record."""
        parts, clock = self._parts(number, self._incomplete.pop(number)), self._context.clock
        write = partial(self._write, parts, clock.now())
        clock.at(clock.now_ns, Order.OBSERVE, len(self._nodes), write, background=True)

    def end(self) -> None:
        """Write a last checkpoint, of the newest ends of rounds and the messages in flight."""
        if not self._asked.on or (self._replay is not None and not self._replay.over):
            return
        number = max(self._made, default=0) + 1
        saved = {rank: node.cut(number) for rank, node in enumerate(self._nodes)}
        parts = self._parts(number, _Incomplete(saved, dict(enumerate(self._sent_before))))
        for source, flying in enumerate(self._flying):
            for (to, sent), (message, due) in flying.items():
                if sent >= self._sent_before[source].get(to, 0):
                    continue  # it will be sent again
                if isinstance(due, int) or not due.lost:
                    arriving = [*parts[to].arriving, self._as_sent(message, to)]
                    parts[to] = replace(parts[to], arriving=arriving)
        self._write(parts, self._context.clock.now())

    def _parts(self, number: int, checkpoint: _Incomplete) -> list[Checkpoint]:
        received: list[dict[int, int]] = [{} for _ in self._nodes]
        for source, sent in checkpoint.sent.items():
            for to, count in sent.items():
                received[to][source] = count
        return [node.finish(number, received[rank]) for rank, node in enumerate(self._nodes)]

    def _write(self, parts: Sequence[Checkpoint], time_s: float) -> None:
        self._context.mixing.settle()
        self._context.links.settle()
        self._report()
        wall_s, trainer = self._recorder.wall(), self._context.executor.trainer.name
        self._written = self._writer.submit(self._write_files, parts, time_s, wall_s, trainer)

    def _write_files(
        self, parts: Sequence[Checkpoint], time_s: float, wall_s: float, trainer: str | None
    ) -> None:
        number = highest(self._numbers) + 1
        for part in parts:
            self._folder.write(number, part)
        rounds, times_s = {p.rank: p.round for p in parts}, {p.rank: p.time_s for p in parts}
        self._folder.complete(number, rounds, times_s, wall_s, trainer, time_s)

    def _report(self) -> None:
        """Say that a checkpoint could not be written (disk full, ...), which does not end the run."""
        if self._written is not None and self._written.done() and (error := self._written.exception()):
            self._written = None
            self._context.observer.say(f"a checkpoint could not be written: {error}")

    def close(self) -> None:
        self._writer.shutdown()
        self._report()
