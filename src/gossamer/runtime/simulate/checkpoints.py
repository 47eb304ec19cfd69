"""A simulation's checkpoints: what is saved of a node at the end of a round, and how all nodes go on from one.

Who is cut when, and when a checkpoint is whole, is in :mod:`gossamer.runtime.simulate.snapshots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gossamer.messages.tags import Message
from gossamer.node import NodeRuntime
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder
from gossamer.results.recorder import read_metrics
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import to_ns
from gossamer.runtime.simulate.context import SimContext
from gossamer.runtime.simulate.flights import Flights
from gossamer.runtime.simulate.host import NodeHost
from gossamer.runtime.simulate.recording import Recording
from gossamer.runtime.simulate.snapshots import Cuts
from gossamer.runtime.snapshots import NodeSnapshots, made, sent_here


class RunCheckpoints:
    """Between the simulator, which delivers messages, and all its nodes.

    Args:
        setup: what is run.
        context: what nodes share, counters among it.
        recording: the record that a checkpoint is of.
        folder: the run's.
        cut: the checkpoint from which the run goes on; None is its start.
        nodes: all nodes, as they begin; restored, if they were saved before.
        hosts: theirs, by rank.
        place: puts a tensor that was read from a file where the simulation keeps it.
        trainer: which trainer computes, as far as that is known.
        say: told of a checkpoint that can't be written.

    Attributes:
        inboxes: what takes each node's messages, by rank.
        starts_ns: when each node goes on; None where all begin.

    Raises:
        BadInput: for a checkpoint that can't be read.
    """

    def __init__(
        self,
        setup: Setup,
        context: SimContext,
        recording: Recording,
        folder: RunFolder,
        cut: Cut | None,
        nodes: Sequence[NodeRuntime],
        hosts: Mapping[int, NodeHost],
        place: Callable[[Tensor], Tensor],
        trainer: Callable[[], str | None],
        say: Callable[[str], None],
    ) -> None:
        experiment = setup.experiment
        self._machinery, self._recording, self._folder, self._hosts = context, recording, folder, hosts
        self._asked = experiment.checkpoint
        self._flights = context.links.flights = Flights(len(nodes))
        repeats, now = experiment.algorithm.gathers, context.clock.now
        parts = [
            NodeSnapshots(node.deliver, now, repeats, partial(context.links.take_back, node.rank))
            for node in nodes
        ]
        self.inboxes = [partial(_into, part, self._flights, rank) for rank, part in enumerate(parts)]
        self.starts_ns: list[int] | None = None
        saved: list[Checkpoint] = []
        if cut is not None:
            saved = [cut.read(node.rank, place) for node in nodes]
            self._resume(cut, saved, nodes, parts)
        self._cuts = Cuts(
            self._asked,
            parts,
            self._flights,
            CheckpointFolder(folder.checkpoints, experiment),
            context.mixing.settle,
            recording.wall,
            trainer,
            say,
            0 if cut is None else made(self._asked, cut),
            highest(folder.checkpoints) + 1,
        )
        for each in saved:
            self._cuts.round_ended(each)

    def _resume(
        self,
        cut: Cut,
        saved: Sequence[Checkpoint],
        nodes: Sequence[NodeRuntime],
        parts: Sequence[NodeSnapshots],
    ) -> None:
        """Have every node go on where it was cut, at its own instant."""
        clock, links, compute = self._machinery.clock, self._machinery.links, self._machinery.compute
        self.starts_ns = starts_ns = [to_ns(each.time_s) for each in saved]
        clock.now_ns = min(starts_ns)
        for rank, each in enumerate(saved):
            nodes[rank].restore(each)
            parts[rank].restore(each)
            links.restore(rank, each.engine)
            compute.restore(rank, each.engine["computing_s"])
            self._recording.usage(rank).restore(each.engine["usage"])
            self._hosts[rank].secrets = each.engine["secrets"]
            for source, count in sent_here(each).items():
                self._flights.sent[source][rank] = count
            for arrival in each.arriving:
                links.arrives(arrival.message, rank, max(to_ns(arrival.due_s), starts_ns[rank]))
        self._recording.resume(cut, read_metrics(self._folder.path))

    def round_ended(self, node: NodeRuntime) -> None:
        """A node is at the end of a round, or at its start."""
        rank, links, compute = node.rank, self._machinery.links, self._machinery.compute
        engine = {
            **links.saved(rank),
            "computing_s": compute.busy_seconds(rank),
            "usage": self._recording.usage(rank).saved(),
            "secrets": self._hosts[rank].secrets,
        }
        self._cuts.round_ended(node.checkpoint(**engine))

    def over(self, rank: int) -> None:
        """A node's rounds are over."""
        self._cuts.over(rank)

    def end(self) -> None:
        """The run ends in order."""
        if self._asked.on:
            self._cuts.end()

    def close(self) -> None:
        """Wait until all is written."""
        self._cuts.close()


def _into(part: NodeSnapshots, flights: Flights, rank: int, message: Message) -> None:
    """A message arrives at a node; then its way is over."""
    part.deliver(message)
    flights.land(message, rank)
