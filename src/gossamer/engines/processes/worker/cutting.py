"""A node's part of the run's checkpoints, in its own process: what it tells its supervisor, and what it writes.

::

    node -> supervisor    marked NUMBER, RANKS      it was cut, all from before has left, and these peers were told
    supervisor -> node    expect NUMBER, RANKS      all nodes were cut; these have sent messages here
    node -> supervisor    saved NUMBER, ROUND, TIME all that they sent before has arrived, and the node's file is written
    supervisor -> node    kept NUMBER               all files are written
    supervisor -> node    cut NUMBER                others have been cut; for one whose rounds are over
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from gossamer.checkpoint import Checkpoint
from gossamer.engines.cuts import NodeCuts, made, sent_here
from gossamer.engines.processes.transport.transport import Transport
from gossamer.experiment import Experiment
from gossamer.messages import Message, Traffic
from gossamer.node import Node
from gossamer.payload import wire_bytes
from gossamer.results.checkpoints import CheckpointFolder, Cut, highest
from gossamer.results.folder import RunFolder


class Cutting:
    """One node's cuts.

    Args:
        node: who is cut.
        experiment: what is run.
        folder: the run's.
        now: the node's clock in seconds.
        state: gives what its engine saves of it.
        tell: sends a message to the supervisor.
        cut: the checkpoint from which the run goes on; None is its start.
        saved: the node's part of that.
    """

    def __init__(
        self,
        node: Node,
        experiment: Experiment,
        folder: RunFolder,
        now: Callable[[], float],
        state: Callable[[], dict[str, Any]],
        tell: Callable[..., None],
        cut: Cut | None,
        saved: Checkpoint | None,
    ) -> None:
        self._node, self._asked, self._state, self._tell = node, experiment.checkpoint, state, tell
        self._saved = saved
        self._cuts = NodeCuts(node.deliver, now, experiment.algorithm.gathers, self._ignore)
        self._folder = CheckpointFolder(folder.checkpoints, experiment)
        self._made = 0 if cut is None else made(self._asked, cut)
        self._offset = highest(folder.checkpoints) - self._made
        self._transport: Transport
        self._numbers: set[int] = set()  # of this node's cuts
        self._sent: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by each peer, until its cut
        self._sent_before: dict[int, int] = {}  # by each peer, when the run was resumed
        self._expected: dict[int, set[int]] = {}
        self._lost: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._kept: dict[int, asyncio.Future[None]] = {}
        if saved is not None:
            node.restore(saved)
            self._cuts.restore(saved)
            self._sent_before = sent_here(saved)

    def begin(self, transport: Transport) -> None:
        """The node is at its start, or where it was saved; it tells its peers by way of a transport, whose counters go on
        from there."""
        self._transport = transport
        if self._saved is None:
            self.round_ended()
            return
        transport.traffic = Traffic(**self._saved.engine["traffic"])
        self._round_ended(self._saved)
        for arrival in self._saved.arriving:  # whatever was on its way has had the time since
            self._count(arrival.message, 1)
            self._cuts.deliver(arrival.message)

    def deliver(self, message: Message) -> None:
        """A message has come in: its number goes on where those of its sender were when the run was resumed."""
        before = self._sent_before.get(message.source, 0)
        self._cuts.deliver(replace(message, number=message.number + before) if before else message)

    def _ignore(self, message: Message) -> None:
        """A message is one that the node had before the run was resumed: it does not count again."""
        self._count(message, -1)

    def _count(self, message: Message, times: int) -> None:
        self._transport.traffic.messages_received += times
        self._transport.traffic.bytes_received += times * wire_bytes(message.tag, message.payload)

    def round_ended(self) -> None:
        """The node is at the end of a round (or at its start), and is cut if that is due."""
        self._round_ended(self._node.checkpoint(**self._state()))

    def _round_ended(self, saved: Checkpoint) -> None:
        self._cuts.round_ended(saved)
        self._transport.rounds += 1
        for due in range(self._made + 1, self._asked.due(saved.round, saved.time_s) + 1):
            self._made = due
            self.cut(due + self._offset)

    def over(self) -> None:
        """The node's rounds are over."""
        self._cuts.over()

    def cut(self, number: int) -> None:
        """Make a cut where the last round ended."""
        if number not in self._numbers:
            self._numbers.add(number)
            self._cuts.cut(number)
            self._transport.cut(number)

    def told(self, number: int, ranks: list[int]) -> None:
        """All that was sent before a cut has left."""
        self._tell("marked", number, ranks)

    def marked(self, rank: int, number: int, message: int) -> None:
        """All that a peer had sent before its cut has arrived."""
        self._sent[number][rank] = message + self._sent_before.get(rank, 0)
        self._look(number)

    def expect(self, number: int, ranks: list[int]) -> None:
        """All nodes were cut, and these have sent messages to this one."""
        self._expected[number] = set(ranks)
        self._look(number)

    def lost(self, rank: int) -> None:
        """A peer is dead: nothing more comes from it."""
        self._lost.add(rank)
        for number in list(self._expected):
            self._look(number)

    def _look(self, number: int) -> None:
        if number in self._expected and self._expected[number] - self._lost <= self._sent[number].keys():
            del self._expected[number]
            self._finish(number, self._cuts.finish(number, self._sent.pop(number)))

    def _finish(self, number: int, saved: Checkpoint) -> None:
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._folder.write, number, saved)

        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._tell("event", "checkpoint", f"checkpoint {number} could not be written: {error}")
            elif not done.cancelled():
                self._tell("saved", number, saved.round, saved.time_s)

        writing.add_done_callback(written)

    async def last(self, number: int, timeout_s: float) -> None:
        """Be cut at the end of the run, and wait until that checkpoint is written, or can't be in time."""
        kept = self._kept[number] = asyncio.get_running_loop().create_future()
        self.cut(number)
        await asyncio.wait((kept,), timeout=timeout_s)

    def kept(self, number: int) -> None:
        """A checkpoint is complete; those before it that are not won't be."""
        for older in [each for each in self._numbers if each < number]:
            self._numbers.discard(older)
            self._sent.pop(older, None)
            self._expected.pop(older, None)
            self._cuts.drop(older)
        if number in self._kept and not self._kept[number].done():
            self._kept[number].set_result(None)
