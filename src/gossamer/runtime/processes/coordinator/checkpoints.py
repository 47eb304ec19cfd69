"""Assembles checkpoints of the whole run: tracks the snapshots that nodes have taken and the files written.

The messages are explained in :mod:`gossamer.runtime.processes.node_process.checkpoints`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gossamer.config import Experiment
from gossamer.results.checkpoints import CheckpointFolder, RunCheckpoint, highest
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.protocol import Violation

MAX_OPEN = 1_000
"""Most checkpoints that are not complete. Beyond it, the oldest is abandoned."""


@dataclass
class _Open:
    """A checkpoint that is not complete."""

    # Messages before the snapshots, by sender and receiver.
    sent: dict[int, dict[int, int]] = field(default_factory=dict)
    announced: bool = False  # the nodes know which messages to wait for
    saved: dict[int, protocol.Saved] = field(default_factory=dict)


class CheckpointCoordinator:
    """Assembles the checkpoints of a run, which resumes from ``checkpoint``, if given. ``tell`` sends a message to a
    node. ``say`` reports a checkpoint that can't be written or is abandoned."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        checkpoint: RunCheckpoint | None,
        tell: Callable[[int, protocol.ToNode], None],
        say: Callable[[str], None],
    ) -> None:
        self._on = experiment.checkpoint.on
        self._folder = CheckpointFolder(folder.checkpoints, experiment)
        self._tell, self._say = tell, say
        self._alive: set[int] = set()
        self._done: set[int] = set()
        self._open: dict[int, _Open] = {}
        self._held: str | None = None  # why no checkpoint can be made now
        # The newest complete checkpoint, and the newest up to which all are complete or abandoned.
        self._complete = self._settled = highest(folder.checkpoints)
        self._wall_before_s = 0.0 if checkpoint is None else checkpoint.wall_s
        self._start = time.monotonic()

    def begin(self, alive: Iterable[int], start: float) -> None:
        self._alive, self._start = set(alive), start

    def last(self) -> int | None:
        """The number of the checkpoint at the end of the run; None without checkpoints, or if none can be made now."""
        if not self._on or self._held is not None:
            return None
        return max([self._settled, *self._open]) + 1

    def check(self, rank: int, message: protocol.FromProcess) -> None:
        """Raise Violation for a message about a checkpoint that is not due."""
        highest = max([self._settled, *self._open])
        match message:
            case protocol.Marked(number=number) if number > highest + 1:
                raise Violation(
                    f"a snapshot of node {rank} for checkpoint {number} after checkpoint {highest}"
                )
            case protocol.Saved(number=int(number)) if number > highest:
                raise Violation(f"a file of node {rank} of checkpoint {number}, which was not begun")
            case protocol.Saved(number=int(number), error=None) if number in self._open:
                if not self._open[number].announced:
                    raise Violation(f"a file of node {rank} of checkpoint {number} before all snapshots")

    def hear(self, rank: int, message: protocol.Marked | protocol.Saved | protocol.Done) -> None:
        """Take a node's message about its part of a checkpoint, or about the end of its rounds."""
        match message:
            case protocol.Marked(number=number, sent=sent):
                self._marked(rank, number, sent)
            case protocol.Saved(number=int(number), error=str(error)):
                self._give_up(number, error)
            case protocol.Saved(number=number) if number in self._open:
                self._open[number].saved[rank] = message
                self._advance(number)
            case protocol.Saved(number=int(number)) if number > self._complete:  # it was abandoned meanwhile
                self._folder.drop(number)
            case protocol.Done():  # its current state is part of all later checkpoints
                self._done.add(rank)
                for number, checkpoint in self._open.items():
                    if rank not in checkpoint.sent:
                        self._tell(rank, protocol.Command("snapshot", number))

    def _marked(self, rank: int, number: int, sent: dict[int, int]) -> None:
        if number <= self._settled:
            self._tell(rank, protocol.Command("settled", self._settled))
            return
        if self._held is not None:
            self._folder.drop(number)
            self._settle(number)
            return
        if number not in self._open:
            self._open[number] = _Open()
            if len(self._open) > MAX_OPEN:
                self._give_up(min(self._open), f"node {rank} is {MAX_OPEN:,} checkpoints ahead of another")
            for done in sorted(self._done & self._alive):
                self._tell(done, protocol.Command("snapshot", number))
        self._open[number].sent[rank] = sent
        self._advance(number)

    def away(self, rank: int) -> None:
        """A node is dead, or unreachable for the others."""
        self._alive.discard(rank)
        self.abandon(f"node {rank} is away")

    def back(self, rank: int) -> None:
        self._alive.add(rank)
        self.abandon(f"node {rank} came back")
        self._tell(rank, protocol.Command("settled", self._settled))

    def abandon(self, why: str) -> None:
        """Abandon the checkpoints that are not complete: messages that belong to them may not arrive."""
        self._give_up(max(self._open, default=0), why)

    def hold(self, why: str) -> None:
        """Make no checkpoint until :meth:`release`: nodes that take part without each other are in rounds that do not fit
        together, and do not count each other's messages."""
        if self._held is None and self._on:
            self._say(f"no checkpoint is made for now: {why}")
        self.abandon(why)
        self._held = why

    def release(self) -> None:
        """Make the checkpoints that are due again."""
        if self._on:
            self._say("checkpoints are made again")
        self._held = None

    def _give_up(self, number: int, why: str) -> None:
        """Abandon a checkpoint, and the earlier ones that are not complete."""
        if number <= self._settled:
            return
        for abandoned in sorted({number, *self._open}):
            if abandoned <= number:
                self._say(f"checkpoint {abandoned} is abandoned: {why}; the next one is made when it is due")
                self._folder.drop(abandoned)
        self._settle(number)

    def _settle(self, number: int) -> None:
        self._settled = number
        self._open = {later: checkpoint for later, checkpoint in self._open.items() if later > number}
        for rank in sorted(self._alive):
            self._tell(rank, protocol.Command("settled", number))

    def _advance(self, number: int) -> None:
        """Continue a checkpoint after a message about it has arrived."""
        checkpoint, alive = self._open[number], self._alive
        if not checkpoint.announced and alive and alive <= checkpoint.sent.keys():
            checkpoint.announced = True
            for rank in sorted(alive):
                sent = {
                    other: to[rank] for other, to in checkpoint.sent.items() if rank in to and other in alive
                }
                self._tell(rank, protocol.Expect(number, sent))
        if checkpoint.announced and alive <= checkpoint.saved.keys():
            saved = {rank: checkpoint.saved[rank] for rank in sorted(alive)}
            rounds = {rank: part.round for rank, part in saved.items()}
            times_s = {rank: part.time_s for rank, part in saved.items()}
            wall_s = self._wall_before_s + time.monotonic() - self._start
            try:
                self._folder.complete(number, rounds, times_s, wall_s)
            except OSError as error:  # such as a full disk, which is no reason to end a run
                self._say(f"checkpoint {number} could not be written: {error}")
            self._complete = number
            self._settle(number)
