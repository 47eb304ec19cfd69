"""A run of real processes under connections from strangers that send arbitrary data, or nothing, and may stay."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import gossamer
from gossamer import Experiment, Run
from gossamer.runtime.processes.transport import wire
from gossamer.runtime.processes.transport.connection import HELLO_TIMEOUT_S
from gossamer.runtime.processes.transport.transport import REFUSALS

NODES, ROUNDS = 8, 40
MiB = 2**20
SIMULATE = {"name": "simulate", "trainer": "sequential"}


def gated(gate: Path, at: int) -> dict[str, Any]:
    """D-PSGD that waits in one round until all strangers have dialled."""
    return {"name": "user_algorithms:Gated", "gate": str(gate), "at": at}


def described(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "nodes": NODES,
        "task": {"name": "least-squares", "features": 4, "samples": 80},
        "topology": "complete",
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": None},
        "engine": {"name": "processes", "trainer": "sequential", "pace": True},
        "compute": {"name": "constant", "seconds_per_step": 0.05},
        "stop": {"rounds": ROUNDS},
    }
    return Experiment.of({**fields, **changes})


class Strangers(threading.Thread):
    """Wait for a run's nodes, and dial them until ``count`` connections were made.

    Args:
        count: the number of connections.
        gate: a file that is created once they were made.
        say: the data that a stranger sends, drawn with this generator.
        staying: the share of connections that stay until a node or the run ends them.
        dripping: whether these send a greeting slowly, byte by byte.
    """

    def __init__(
        self,
        count: int,
        gate: Path,
        say: Callable[[random.Random], bytes],
        staying: float,
        *,
        dripping: bool = False,
    ) -> None:
        super().__init__()
        self._gate = gate
        self._count, self._say, self._staying, self._dripping = count, say, staying, dripping
        self._chance = random.Random(7)
        self._run_is_over = threading.Event()
        self._known = set(psutil.Process().children(recursive=True))
        self._here: set[socket.socket] = set()
        self.made = self.stayed = self.dropped = 0
        self.grown: dict[int, int] = {}
        """By process, the greatest growth of its memory since it was first seen, in bytes."""

    def run(self) -> None:
        listeners = self._listeners()
        first = dict(self._memory(listeners))
        drops = iter(WORDS)
        while not self._run_is_over.is_set():
            if self.made < self._count and listeners:
                self._dial(*self._chance.choice(list(listeners.values())))
            else:
                if listeners:
                    self._gate.touch()
                time.sleep(0.2)
                if self._dripping and (drop := next(drops, None)) is not None:
                    self._drip(drop)
            if self.made % 50 == 0 or self.made == self._count:
                self._hear()
                now, later = dict(self._memory(listeners)), dict(self._memory(listeners))
                # (Memory shared with ended processes counts as a survivor's own.)
                if now.keys() == later.keys() == first.keys():
                    self.grown |= {pid: max(self.grown.get(pid, 0), now[pid] - first[pid]) for pid in first}
        for stranger in self._here:
            stranger.close()

    def end(self) -> None:
        """Tell the strangers that the run is over."""
        self._run_is_over.set()
        self.join()

    def _listeners(self) -> dict[int, tuple[str, int]]:
        """The address on which each node's process listens."""
        addresses: dict[int, tuple[str, int]] = {}
        while len(addresses) < NODES and not self._run_is_over.is_set():
            processes = set(psutil.Process().children(recursive=True)) - self._known
            for process in processes:
                try:
                    listening = [
                        link for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN
                    ]
                except psutil.Error:
                    continue
                if len(listening) == 1:  # the supervisor has all listeners
                    addresses[process.pid] = tuple(listening[0].laddr)
            time.sleep(0.01)
        return addresses

    def _memory(self, pids: Any) -> Iterator[tuple[int, int]]:
        for pid in pids:
            try:
                yield pid, psutil.Process(pid).memory_full_info().uss
            except psutil.Error:
                continue  # it has ended

    def _dial(self, host: str, port: int) -> None:
        self.made += 1
        stranger = socket.socket()
        try:
            stranger.settimeout(1.0)
            stranger.connect((host, port))
            stranger.sendall(self._say(self._chance))
        except OSError:
            stranger.close()
            return
        stranger.setblocking(False)
        if self._chance.random() < self._staying:
            self.stayed += 1
            self._here.add(stranger)
        else:
            stranger.close()

    def _drip(self, drop: int) -> None:
        for stranger in self._here:
            with suppress(OSError):  # it was dropped, which _hear notices
                stranger.send(bytes([drop]))

    def _hear(self) -> None:
        """Count and forget the connections that nodes have dropped."""
        for stranger in list(self._here):
            try:
                gone = not stranger.recv(1000)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                self.dropped += 1
                self._here.remove(stranger)
                stranger.close()


WORDS = wire.hello(1, bytes(16))


def anything(chance: random.Random) -> bytes:
    """Garbage, other protocols, and messages of a node with a wrong token."""
    greeting = wire.hello(chance.randrange(NODES), chance.randbytes(16))
    message = wire.BEGIN.pack(1, 0, 16_384, chance.choice([16_384, 2**63]), 100)
    return chance.choice(
        [
            b"",
            greeting[: chance.randrange(len(greeting))],
            greeting,
            greeting + message + bytes(16_384),
            wire.hello(chance.choice([NODES, 2**31, 2**32 - 1]), bytes(16)),
            b"GET / HTTP/1.1\r\nHost: gossip\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01" + chance.randbytes(200),  # the start of a TLS handshake
            chance.randbytes(chance.randrange(1, 3000)),
            message,
            bytes(60_000),
        ]
    )


def nothing(chance: random.Random) -> bytes:
    return b""


def among(strangers: Strangers, experiment: Experiment, out: Path) -> Run:
    strangers.start()
    try:
        return gossamer.run(experiment, out)
    finally:
        strangers.end()


def same_models(left: Run, right: Run) -> None:
    assert left.parameters is not None
    assert right.parameters is not None
    np.testing.assert_array_equal(left.parameters, right.parameters)


def refusals(run: Run) -> list[tuple[int, str]]:
    events = run.events.filter(run.events["event"] == "refused")
    return list(zip(events["node"].to_list(), events["detail"].to_list(), strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without strangers: a simulation, since the engines agree to the bit."""
    return gossamer.run(described(engine=SIMULATE), tmp_path_factory.mktemp("alone"))


def test_a_thousand_strangers_change_nothing(tmp_path: Path, alone: Run) -> None:
    gate = tmp_path / "gate"
    strangers = Strangers(1000, gate, anything, staying=0.3)
    run = among(strangers, described(algorithm=gated(gate, ROUNDS - 1)), tmp_path)
    assert strangers.made == 1000
    same_models(alone, run)
    shown = [(node, line) for node, line in refusals(run) if line != "further refusals are not shown"]
    assert shown
    assert len(refusals(run)) <= len(shown) + NODES  # one more line a node if there are too many
    assert all(line.startswith("stranger at 127.0.0.1:") for _, line in shown)
    assert len(set(shown)) == len(shown)
    assert max(Counter(node for node, _ in shown).values()) <= REFUSALS
    assert max(strangers.grown.values(), default=0) < 16 * MiB


def test_strangers_that_fill_every_slot_do_not_keep_nodes_out(tmp_path: Path) -> None:
    """They dial before the nodes, send nothing, and stay."""
    short, gate = {"stop": {"rounds": 3}}, tmp_path / "gate"
    alone = gossamer.run(described(engine=SIMULATE, **short), tmp_path)
    strangers = Strangers(NODES * 120, gate, nothing, staying=1.0)
    run = among(strangers, described(algorithm=gated(gate, 0), **short), tmp_path)
    same_models(alone, run)
    assert strangers.dropped > 0
    assert any("while others connected" in line for _, line in refusals(run))


@pytest.mark.slow
def test_stranger_that_drips_bytes_is_dropped(tmp_path: Path, alone: Run) -> None:
    """The run outlasts the time in which a stranger must identify itself."""
    strangers = Strangers(NODES * 10, tmp_path / "gate", nothing, staying=1.0, dripping=True)
    lasting = {"name": "constant", "seconds_per_step": 1.5 * HELLO_TIMEOUT_S / ROUNDS}
    run = among(strangers, described(compute=lasting), tmp_path)
    same_models(alone, run)
    assert strangers.dropped == strangers.stayed > 0
    assert any(f"within {HELLO_TIMEOUT_S} s" in line for _, line in refusals(run))
