"""What a node saves of itself for when it is restarted in the same run."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.config import Checkpoints
from gossamer.errors import BadInput
from gossamer.node import NodeRuntime, checkpoint
from gossamer.node.checkpoint import Checkpoint
from gossamer.results.folder import RunFolder, atomic
from gossamer.runtime.processes.protocol import Event, FromNode, RestartSaved


class RestartFile:
    """A node's file.

    Args:
        folder: the run's.
        node: who is saved.
        asked: when it is.
        now: the node's clock in seconds.
        tell: told when the file is written, or why it can't be written or read.
    """

    def __init__(
        self,
        folder: RunFolder,
        node: NodeRuntime,
        asked: Checkpoints,
        now: Callable[[], float],
        tell: Callable[[FromNode], None],
    ) -> None:
        self._path = folder.restart(node.rank)
        self._node, self._asked, self._now, self._tell = node, asked, now, tell
        self._made = 0  # so many were due by now

    def round_ended(self) -> None:
        """The node is at the end of a round: save it, if that is due; a kill at any instant leaves the file before."""
        due = self._asked.due(self._node.round, self._now())
        if due > self._made:
            self._made = due
            self._write(self._node.checkpoint())

    def _write(self, saved: Checkpoint) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            with atomic(self._path) as temporary:
                checkpoint.write(saved, temporary, "")
        except OSError as error:  # a full disk is no reason to end; the file before is still there
            self._tell(Event("checkpoint", f"it could not be written: {error}"))
        else:
            self._tell(RestartSaved())

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
            self._tell(Event("checkpoint", f"it is of no use: {error}"))
        self._made = self._asked.due(self._node.round, self._now())
        return saved
