"""Checkpoints of a simulation, which save nodes without stopping them. See :mod:`replay` for resuming."""

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
from gossamer.runtime.simulate.core import Order
from gossamer.runtime.simulate.flights import Flights
from gossamer.runtime.simulate.host import SimContext
from gossamer.runtime.simulate.recording import SimRecorder
from gossamer.runtime.simulate.replay import Replay
from gossamer.secure.protocol import TAG


@dataclass(frozen=True, eq=False)
class _RoundEnd:
    """A node's state at the end of a round, the number of messages that it had sent to each receiver, and the
    messages that have reached it since."""

    saved: Checkpoint
    sent: Mapping[int, int]
    since: list[Message] = field(default_factory=list)


class SimCheckpoints:
    """Saves all nodes of a simulation, and writes the checkpoints in a thread.

    A checkpoint holds every node as of the end of one of its rounds, and the messages that were sent before
    their sender was saved and had not arrived when their receiver was saved (Chandy and Lamport, 1985). In a
    resumed run (``replay``), a node is saved only after it has been restored."""

    def __init__(
        self,
        context: SimContext,
        recorder: SimRecorder,
        folder: RunFolder,
        nodes: Sequence[NodeRuntime],
        replay: Replay | None,
    ) -> None:
        experiment = context.setup.experiment
        self._context, self._recorder, self._nodes, self._replay = context, recorder, nodes, replay
        self._options, self._gathers = experiment.checkpoint, experiment.algorithm.gathers
        self._folder, self._numbers = CheckpointFolder(folder.checkpoints, experiment), folder.checkpoints
        self._flights = context.links.flights = Flights(len(nodes))
        self._newest: dict[int, _RoundEnd] = {}
        self._open: dict[int, dict[int, _RoundEnd]] = {}  # incomplete checkpoints, by number and rank
        before = 0 if replay is None else replay.checkpoint.snapshots(self._options)
        self._made = [before] * len(nodes)  # the number of checkpoints that include each node
        self._over: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def arriving(self, rank: int, message: Message) -> Message:
        """Register a message that reaches a node. Returns it with its right payload."""
        node = self._nodes[rank]
        if rank in self._over and not node.mailbox.retired and self._context.compute.is_idle(rank):
            self._snapshot(node)  # its rounds are over, but its tasks may still answer messages
        if self._replay is not None:
            message = self._replay.delivered(message, rank)
        # Otherwise no task will take it, not even in a resumed run.
        if self._gathers or not node.mailbox.retired:
            for round_end in self._round_ends_before(message, rank):
                round_end.since.append(message)
        return message

    def _round_ends_before(self, message: Message, rank: int) -> set[_RoundEnd]:
        """The saved states of a node for which an arriving message may have been in flight: those for
        which the sender had not been saved when it sent the message."""
        round_ends = {self._newest[rank]} if rank in self._newest else set()
        for parts in self._open.values():
            sender = parts.get(message.source)
            if rank in parts and (sender is None or message.number < sender.sent.get(rank, 0)):
                round_ends.add(parts[rank])
        return round_ends

    def round_ended(self, node: NodeRuntime) -> None:
        """Save a node at its start or at the end of a round, unless it computes in the background."""
        rank = node.rank
        if self._context.compute.is_idle(rank) and self._snapshot(node):
            for number in range(self._made[rank] + 1, self._options.due(node.round, node.node.now()) + 1):
                self._made[rank] = number
                self._add(rank, number)

    def _snapshot(self, node: NodeRuntime) -> bool:
        """Save a node's state, unless the replay has yet to restore it. Returns whether it was saved."""
        rank, context = node.rank, self._context
        traffic, unrecorded = asdict(context.links.traffic(rank)), self._recorder.unrecorded(rank)
        if self._replay is not None and not self._replay.restores(
            node, traffic, unrecorded, context.mixing.settle
        ):
            return False
        saved = node.checkpoint(traffic=traffic, unrecorded=unrecorded)
        self._newest[rank] = _RoundEnd(saved, dict(self._flights.counts[rank]))
        return True

    def over(self, rank: int) -> None:
        """A node's rounds are over. All later checkpoints include it."""
        self._over.add(rank)
        for number in list(self._open):
            self._add(rank, number)

    def _add(self, rank: int, number: int) -> None:
        """Add a node to a checkpoint, as of the end of its last round. The last node completes it."""
        if number not in self._open:
            self._open[number] = {other: self._newest[other] for other in self._over}
        parts = self._open[number]
        parts.setdefault(rank, self._newest[rank])
        if len(parts) == len(self._nodes):
            core, saved = self._context.core, self._saved(self._open.pop(number))
            # Write once everything at this instant is recorded.
            write = partial(self._write, saved, core.now())
            core.at(core.now_ns, Order.OBSERVE, len(self._nodes), write, background=True)

    def end(self) -> None:
        """Write a last checkpoint, of every node's newest round end."""
        if self._options.on and (self._replay is None or self._replay.over):
            self._write(self._saved(self._newest), self._context.core.now())

    def _saved(self, parts: Mapping[int, _RoundEnd]) -> list[Checkpoint]:
        """The nodes' parts of a checkpoint, with the messages that belong to them."""
        sent: list[dict[int, int]] = [{} for _ in parts]  # by receiver and sender
        arriving = [list(parts[rank].since) for rank in range(len(parts))]
        for source, flying in enumerate(self._flights.messages):
            for to, count in parts[source].sent.items():
                sent[to][source] = count
            for (to, _), message in flying.items():
                arriving[to].append(
                    message if self._replay is None else self._replay.saved_message(message, to)
                )

        def belonging(messages: Sequence[Message], known: Mapping[int, int]) -> list[Message]:
            # Leave out messages with secrets: the resumed run sends the same ones again.
            return [
                message
                for message in messages
                if message.number < known.get(message.source, 0) and message.tag[:1] != (TAG,)
            ]

        return [
            replace(
                parts[rank].saved,
                unread=belonging(parts[rank].saved.unread, known),
                arriving=belonging(arriving[rank], known),
                engine={**parts[rank].saved.engine, "sent": known},
            )
            for rank, known in enumerate(sent)
        ]

    def _write(self, saved: Sequence[Checkpoint], time_s: float) -> None:
        self._context.mixing.settle()
        self._context.links.settle()
        self._finish_writing()
        self._written = self._writer.submit(self._write_files, saved, time_s, self._recorder.wall())

    def _write_files(self, saved: Sequence[Checkpoint], time_s: float, wall_s: float) -> None:
        number = highest(self._numbers) + 1
        for part in saved:
            self._folder.write(number, part)
        rounds, times_s = {p.rank: p.round for p in saved}, {p.rank: p.time_s for p in saved}
        self._folder.complete(number, rounds, times_s, wall_s, time_s)

    def _finish_writing(self) -> None:
        """Wait for the last checkpoint. If it can't be written (disk full, ...), tell the user."""
        if self._written is not None and (error := self._written.exception()):
            self._context.observer.say(f"a checkpoint could not be written: {error}")
        self._written = None

    def close(self) -> None:
        self._finish_writing()
        self._writer.shutdown()
