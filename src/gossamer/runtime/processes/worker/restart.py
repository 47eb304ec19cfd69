"""What a node saves of itself for when it is started anew in the same run."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.config import Checkpoints
from gossamer.errors import BadInput
from gossamer.node import NodeRuntime, checkpoint
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.folder import RunFolder, atomic


class RestartFile:
    """A node's file.

    Args:
        folder: the run's.
        node: who is saved.
        asked: when it is.
        now: the node's clock in seconds.
        say: told of a file that can't be written, or read.
        keeps: keep the end of the last round in memory, for when the node is stopped.
    """

    def __init__(
        self,
        folder: RunFolder,
        node: NodeRuntime,
        asked: Checkpoints,
        now: Callable[[], float],
        say: Callable[[str], None],
        *,
        keeps: bool = False,
    ) -> None:
        self._path = folder.restart(node.rank)
        self._node, self._asked, self._now, self._say = node, asked, now, say
        self._made = 0  # so many were due by now
        self._keeps = keeps
        self._last: Checkpoint | None = None  # the end of the last round, where that is not in the file

    def round_ended(self) -> None:
        """The node is at the end of a round: save it, if that is due; a kill at any instant leaves the file before."""
        due = self._asked.due(self._node.round, self._now())
        if due > self._made:
            self._made, self._last = due, None
            self._write(self._node.checkpoint())
        elif self._keeps:
            self._last = self._node.checkpoint()

    def stopped(self) -> None:
        """The node ends before its rounds are over: save it as it was at the end of the last one."""
        if self._last is not None:
            self._write(self._last)

    def _write(self, saved: Checkpoint) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            with atomic(self._path) as temporary:
                checkpoint.write(saved, temporary, "")
        except OSError as error:  # a full disk is no reason to end; the file before is still there
            self._say(f"it could not be written: {error}")

    def restore(self) -> Checkpoint | None:
        """Let the node be as it was saved; gives what it was, or None where there is no such file."""
        if not self._path.exists():
            return None
        saved = None
        try:
            saved = checkpoint.read(self._path)
            self._node.restore(saved)
        except BadInput as error:
            saved = None
            self._say(f"it is of no use: {error}")
        self._made = self._asked.due(self._node.round, self._now())
        return saved
