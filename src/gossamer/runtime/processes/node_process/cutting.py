"""A node's part of the run's checkpoints, in its own process: what it tells its coordinator, and what it writes.

::

    node -> coordinator   marked NUMBER, RANKS      it was cut, all from before has left, and these peers were told
    coordinator -> node   expect NUMBER, RANKS      all nodes were cut; these have sent messages here
    node -> coordinator   saved NUMBER, ROUND, TIME all that they sent before has arrived, and the node's file is written
    coordinator -> node   kept NUMBER               all files are written
    coordinator -> node   cut NUMBER                others have been cut; for one whose rounds are over
    node -> coordinator   broken NUMBER, RANK       a connection to that peer broke since the node was cut
    coordinator -> node   drop NUMBER               that checkpoint is given up

What a connection that breaks had to say of a cut may be lost, and messages are numbered anew on the next one: such a
checkpoint is given up, and so is one while which a node was out of reach. The next one is made when it is due.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gossamer.config import Checkpoints
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.checkpoints import CheckpointFolder
from gossamer.runtime.processes.protocol import Broken, Event, FromNode, Marked, Saved
from gossamer.runtime.processes.transport.transport import Transport
from gossamer.runtime.snapshots import NodeSnapshots

MOST_MARKS = 2**16
"""Cuts of which peers may have told and that are not complete: far more than any node gets ahead, and still little memory."""


class Cutting:
    """One node's cuts.

    Args:
        asked: when nodes are cut.
        cuts: what comes in, and the node at its cuts.
        folder: where its files are written.
        tell: sends a message to the coordinator.
        made: how many cuts need not be made any more.
        first: the number of the next checkpoint in the folder.
    """

    def __init__(
        self,
        asked: Checkpoints,
        cuts: NodeSnapshots,
        folder: CheckpointFolder,
        tell: Callable[[FromNode], None],
        made: int,
        first: int,
    ) -> None:
        self._asked, self._cuts, self._folder, self._tell = asked, cuts, folder, tell
        self._made = made
        self._offset = first - made - 1
        self._transport: Transport
        self._numbers: set[int] = set()  # of this node's cuts
        self._dropped: set[int] = set()  # of checkpoints that are given up
        self._sent: defaultdict[int, dict[int, int]] = defaultdict(
            dict
        )  # what each peer had sent until its cut
        self._expected: dict[int, set[int]] = {}
        self._lost: set[int] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._kept: dict[int, asyncio.Future[None]] = {}
        self._offsets: dict[int, int] = {}

    def use(self, transport: Transport, offsets: dict[int, int]) -> None:
        """Tell peers by way of a transport; its message numbers begin anew where each source's had been so high."""
        self._transport, self._offsets = transport, offsets

    def round_ended(self, saved: Checkpoint) -> None:
        """The node is at the end of a round (or at its start), and is cut if that is due."""
        self._cuts.round_ended(saved)
        self._transport.rounds += 1
        for made in range(self._made + 1, self._asked.due(saved.round, saved.time_s) + 1):
            self._made = made
            self.cut(made + self._offset)

    def cut(self, number: int) -> None:
        """Make a cut where the last round ended."""
        if number not in self._numbers and number not in self._dropped:
            self._numbers.add(number)
            self._cuts.cut(number)
            self._transport.cut(number)

    def told(self, number: int, ranks: list[int]) -> None:
        """All that was sent before a cut has left."""
        self._tell(Marked(number, ranks))

    def marked(self, rank: int, number: int, message: int) -> None:
        """All that a peer had sent before its cut has arrived."""
        if number not in self._dropped and (number in self._sent or len(self._sent) < MOST_MARKS):
            self._sent[number][rank] = message + self._offsets.get(rank, 0)
            self._look(number)

    def expect(self, number: int, ranks: list[int]) -> None:
        """All nodes were cut, and these have sent messages to this one."""
        if number not in self._dropped:
            self._expected[number] = set(ranks)
            self._look(number)

    def relinked(self, rank: int) -> None:
        """A connection to a peer broke, and was made again."""
        for number in sorted(self._numbers):
            self._tell(Broken(number, rank))

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
                self._tell(Event("checkpoint", f"checkpoint {number} could not be written: {error}"))
            elif not done.cancelled():
                self._tell(Saved(number, saved.round, saved.time_s))

        writing.add_done_callback(written)

    async def last(self, number: int, timeout_s: float) -> None:
        """Be cut at the end of the run, and wait until that checkpoint is written, or can't be in time."""
        kept = self._kept[number] = asyncio.get_running_loop().create_future()
        self.cut(number)
        await asyncio.wait((kept,), timeout=timeout_s)

    def kept(self, number: int) -> None:
        """A checkpoint is complete; those before it that are not won't be."""
        for older in [each for each in self._numbers if each < number]:
            self._forget(older)
        self._dropped = {each for each in self._dropped if each > number}
        self._settle(number)

    def drop(self, number: int) -> None:
        """A checkpoint is given up."""
        self._dropped.add(number)
        self._forget(number)
        self._settle(number)

    def _forget(self, number: int) -> None:
        self._numbers.discard(number)
        self._sent.pop(number, None)
        self._expected.pop(number, None)
        self._cuts.drop(number)

    def _settle(self, number: int) -> None:
        """The node need not wait for a checkpoint any more."""
        if number in self._kept and not self._kept[number].done():
            self._kept[number].set_result(None)
