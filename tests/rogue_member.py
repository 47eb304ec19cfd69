"""A member of a run that knows the token and speaks the protocol, but says what it likes."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.protocol import ToWorker
from gossamer.runtime.processes.worker.worker import join
from hostile_messages import plain
from worker_fleet import TOKEN

TIMEOUT_S = 60.0


class Rogue(threading.Thread):
    """Joins the coordinator at an address, and plays a script. It stays connected until the coordinator is gone, or
    the script has returned with ``leave``.

    Attributes:
        ranks: its nodes, once they were started: ``nodes`` of them, at most ``slots``.
    """

    def __init__(
        self, address: str, script: Callable[[Rogue], object], *, nodes: int = 1, slots: int | None = None
    ) -> None:
        super().__init__(daemon=True)
        self._address, self._script, self._nodes, self._slots = address, script, nodes, slots or nodes
        self.ranks: list[int] = []
        self.job: protocol.Job
        self._end: socket.socket
        self.start()

    def run(self) -> None:
        self._end, _ = self._join()
        self._end.settimeout(TIMEOUT_S)
        self._channel: Channel[Any] = Channel(self._end, ToWorker)
        try:
            self.job = self.hear(protocol.Job)
            self._script(self)
            while self._channel.receive() is not None:
                continue
        except OSError:
            pass  # it was cut off
        finally:
            self._end.close()

    def _join(self) -> Any:
        for _ in range(600):
            try:
                return join(self._address, TOKEN, secrets.token_hex(16), self._slots, 0)
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        raise AssertionError("no coordinator")

    # --- speaking

    def say(self, message: Any) -> None:
        """Send a message, or plain values in its place."""
        self.send(msgspec.msgpack.encode(message))

    def send(self, body: bytes) -> None:
        """Send the bytes of a message."""
        self._end.sendall(struct.pack("<I", len(body)) + body)

    def report(self, message: Any, rank: int | None = None, files: Any = None, incarnation: int = 0) -> None:
        """Send a message of a node (None: the first one here), or plain values in its place."""
        rank = self.ranks[0] if rank is None else rank
        inner = message if isinstance(message, list | bytes | str) else plain(message)
        self.say(["NodeReport", rank, incarnation, inner, files or {}])

    # --- the honest part of a script

    def hear(self, kind: type[Any], inner: type[Any] | None = None) -> Any:
        """The next message of a kind, and for :class:`~gossamer.runtime.processes.protocol.Tell`, with a message of a kind
        in it. Earlier ones are ignored."""
        while (message := self._channel.receive()) is not None:
            if isinstance(message, kind) and (inner is None or isinstance(message.message, inner)):
                return message
        raise ConnectionError("the coordinator is gone")

    def prepare(self) -> None:
        """Say that the run is prepared, and wait until all nodes here were started."""
        self.say(protocol.Prepared())
        while len(self.ranks) < self._nodes:
            self.ranks.append(self.hear(protocol.Fork).rank)

    def begin(self) -> None:
        """Be an honest member until its nodes take part."""
        self.prepare()
        for rank in self.ranks:
            self.report(protocol.Ready("127.0.0.1", 9), rank)
        self.hear(protocol.Tell, protocol.Go)
