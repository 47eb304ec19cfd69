"""A simulation's checkpoints: how all nodes are saved without being stopped, and how they go on from a checkpoint.

What a node's part of a checkpoint is, under every engine, is in :mod:`gossamer.runtime.snapshots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Arrival, Checkpoint
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.runtime.simulate.clock import NS, to_ns
from gossamer.runtime.simulate.host import SimContext, SimHost
from gossamer.runtime.simulate.links import NEVER_NS, Transfer
from gossamer.runtime.simulate.recording import SimRecorder
from gossamer.runtime.snapshots import NodeSnapshots, made, repeats_messages, sent_here


@dataclass(eq=False)
class _Incomplete:
    """A checkpoint that is not complete yet. Messages are awaited as (sender, receiver, number) once all nodes are saved."""

    saved: dict[int, Checkpoint] = field(default_factory=dict)
    sent: dict[int, Mapping[int, int]] = field(default_factory=dict)  # by sender and receiver
    awaited: set[tuple[int, int, int]] = field(default_factory=set)


class SimCheckpoints:
    """Saves all nodes of a simulation, and writes the checkpoints in a thread.

    A checkpoint is complete when every node has been saved at the end of one of its rounds, and every message that was sent
    before its sender was saved has arrived or been lost. With a ``cut``, the nodes are restored from it first; ``place`` puts
    a tensor that was read from a file where the simulation keeps it.

    Attributes:
        inboxes: by rank, the function that receives a node's messages.
        starts_ns: when each node goes on; None in a run that was not resumed.

    Raises:
        BadInput: for a checkpoint that can't be read."""

    def __init__(
        self,
        context: SimContext,
        recorder: SimRecorder,
        folder: RunFolder,
        cut: Cut | None,
        nodes: Sequence[NodeRuntime],
        hosts: Mapping[int, SimHost],
        place: Callable[[Tensor], Tensor],
    ) -> None:
        experiment, links = context.setup.experiment, context.links
        self._context, self._recorder, self._hosts = context, recorder, hosts
        self._asked = experiment.checkpoint
        self._folder = CheckpointFolder(folder.checkpoints, experiment)
        links.flights = self
        # By sender: how many messages it has sent to each receiver, and those in flight by receiver and number, with the
        # instant (nanoseconds) at which they are due, or their transfer.
        self._sent: list[dict[int, int]] = [{} for _ in nodes]
        self._flying: list[dict[tuple[int, int], tuple[Message, Transfer | int]]] = [{} for _ in nodes]
        now, repeats = context.clock.now, repeats_messages(experiment)
        uncount = links.uncount
        self._nodes = [NodeSnapshots(n.deliver, now, repeats, partial(uncount, n.rank)) for n in nodes]
        self.inboxes = [each.deliver for each in self._nodes]
        before = 0 if cut is None else made(self._asked, cut)
        self._made = [before] * len(nodes)  # checkpoints that each node has a part in
        self._offset = highest(folder.checkpoints) - before  # from these numbers to those in the folder
        self._sent_before: list[Mapping[int, int]] = [{}] * len(nodes)  # before each node was saved
        self._incomplete: dict[int, _Incomplete] = {}
        self._over: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self.starts_ns: list[int] | None = None
        if cut is not None:
            saved = [cut.read(node.rank, place) for node in nodes]
            self.starts_ns = self._resume(saved, nodes)
            recorder.resume(cut, read_metrics(folder.path), self.starts_ns)
            for each in saved:
                self._save(each)

    def _resume(self, saved: Sequence[Checkpoint], nodes: Sequence[NodeRuntime]) -> list[int]:
        """Restore every node; gives the instants at which they go on."""
        clock, links = self._context.clock, self._context.links
        starts_ns = [to_ns(each.time_s) for each in saved]
        clock.now_ns = min(starts_ns)
        for rank, each in enumerate(saved):
            nodes[rank].restore(each)
            self._nodes[rank].restore(each)
            links.restore(rank, each.engine)
            self._context.compute.restore(rank, each.engine["computing_s"])
            self._recorder.usage[rank].restore(each.engine["usage"])
            self._hosts[rank].secrets = each.engine["secrets"]
            for source, count in sent_here(each).items():
                self._sent[source][rank] = count
            for arrival in each.arriving:
                links.arrives(arrival.message, rank, max(to_ns(arrival.due_s), starts_ns[rank]))
        return starts_ns

    # --- messages in flight

    def numbered(self, message: Message, to: int) -> Message:
        number = self._sent[message.source].get(to, 0)
        self._sent[message.source][to] = number + 1
        return replace(message, number=number)

    def take_off(self, message: Message, to: int, due: Transfer | int) -> None:
        """A message is sent; it is due at an instant (nanoseconds), or when its transfer is."""
        self._flying[message.source][to, message.number] = message, due

    def land(self, message: Message, to: int) -> None:
        self._flying[message.source].pop((to, message.number), None)
        key = message.source, to, message.number
        for number, checkpoint in list(self._incomplete.items()):
            if key in checkpoint.awaited:
                checkpoint.awaited.remove(key)
                if not checkpoint.awaited:
                    self._complete(number)

    def unsent(self, rank: int, now_ns: int) -> tuple[int, int]:
        """How many of a node's messages have not left completely yet, and their bytes."""
        transfers = [due for _, due in self._flying[rank].values() if isinstance(due, Transfer)]
        sizes = [transfer.size for transfer in transfers if transfer.end_ns > now_ns]
        return len(sizes), sum(sizes)

    # --- saving

    def round_ended(self, node: NodeRuntime) -> None:
        """Save a node at its start or at the end of a round."""
        rank = node.rank
        engine = {
            **self._context.links.saved(rank),
            "computing_s": self._context.compute.busy_seconds(rank),
            "usage": self._recorder.usage[rank].saved(),
            "secrets": self._hosts[rank].secrets,
        }
        self._save(node.checkpoint(**engine))

    def _save(self, saved: Checkpoint) -> None:
        rank = saved.rank
        self._nodes[rank].round_ended(saved)
        self._sent_before[rank] = dict(self._sent[rank])
        for number in range(self._made[rank] + 1, self._asked.due(saved.round, saved.time_s) + 1):
            self._made[rank] = number
            self._add(rank, number)

    def over(self, rank: int) -> None:
        """A node's rounds are over: it is part of all later checkpoints as it is now."""
        self._over.add(rank)
        self._nodes[rank].over()
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

    def end(self) -> None:
        """Write a last checkpoint, of the newest ends of rounds and the messages in flight."""
        if not self._asked.on:
            return
        number = max(self._made, default=0) + 1
        saved = {rank: node.cut(number) for rank, node in enumerate(self._nodes)}
        self._incomplete = {number: _Incomplete(saved, dict(enumerate(self._sent_before)))}
        arriving: list[list[Arrival]] = [[] for _ in self._nodes]
        for source, flying in enumerate(self._flying):
            for (to, sent), (message, due) in flying.items():
                if sent >= self._sent_before[source].get(to, 0):
                    continue  # it will be sent again
                if isinstance(due, int):
                    arriving[to].append(Arrival(message, due / NS))
                elif not due.lost:
                    # A message that has not begun to leave arrives as soon as its receiver goes on.
                    began, due_ns = due.start_ns != NEVER_NS, due.end_ns + due.latency_ns
                    arriving[to].append(Arrival(message, due_ns / NS if began else saved[to].time_s))
        self._complete(number, arriving)

    def _complete(self, number: int, arriving: Sequence[Sequence[Arrival]] | None = None) -> None:
        """Write a complete checkpoint, with the messages in flight of the last one."""
        received: list[dict[int, int]] = [{} for _ in self._nodes]
        for source, sent in self._incomplete.pop(number).sent.items():
            for to, count in sent.items():
                received[to][source] = count
        parts = [node.finish(number, received[rank]) for rank, node in enumerate(self._nodes)]
        if arriving is not None:
            parts = [replace(p, arriving=[*p.arriving, *arriving[p.rank]]) for p in parts]
        self._context.mixing.settle()
        self._report()
        wall_s, trainer = self._recorder.wall(), self._context.executor.chosen
        self._written = self._writer.submit(self._write, number + self._offset, parts, wall_s, trainer)

    def _write(self, number: int, parts: Sequence[Checkpoint], wall_s: float, trainer: str | None) -> None:
        for part in parts:
            self._folder.write(number, part)
        rounds, times_s = {p.rank: p.round for p in parts}, {p.rank: p.time_s for p in parts}
        self._folder.complete(number, rounds, times_s, wall_s, trainer)

    def _report(self) -> None:
        """Say that a checkpoint could not be written (disk full, ...), which does not end the run."""
        if self._written is not None and self._written.done() and (error := self._written.exception()):
            self._written = None
            self._context.observer.say(f"a checkpoint could not be written: {error}")

    def close(self) -> None:
        self._writer.shutdown()
        self._report()
