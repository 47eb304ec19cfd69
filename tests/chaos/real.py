"""Schedules of real processes, with disturbances from outside: signals, cut and replayed connections, strangers, full disks."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from chaos.invariants import Record, differences, violations
from chaos.schedule import HARMLESS, OUTSIDE, Disturbance, Schedule
from chaos.simulated import simulate
from forked import FORKER, Child
from gossamer import load_run
from gossamer.runtime.processes.transport import wire

BOUND_S = 240.0
"""Seconds within which a run must end, even on a busy machine."""
EXIT_CODES = {"done": 0, "failed": 1, "diverged": 3}
DISK_BYTES = 4 * 2**20
POSSIBLE = {"stranger", *OUTSIDE} | ({"disk full", *HARMLESS} if os.geteuid() == 0 else set())


def check(schedule: Schedule, out: Path) -> list[str]:
    """Run a schedule in a folder, remove the folder, and give the violations, one line each."""
    out.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            return list(Trial(schedule, out, stack).check())
    except AssertionError as error:
        return [str(error)]
    finally:
        shutil.rmtree(out, ignore_errors=True)


class Trial:
    """One run of a schedule. ``stack`` undoes every disturbance.

    Attributes:
        dialled: the number of connections by "stranger" and "replay" that a node has closed."""

    def __init__(self, schedule: Schedule, out: Path, stack: ExitStack) -> None:
        self._schedule, self._output, self._disk, self._stack = schedule, out / "output", out / "disk", stack
        self._outside = [item for item in schedule.disturbances if item.outside in POSSIBLE]
        self._recorder = Recorder()
        self.dialled = {"stranger": 0, "replay": 0}
        self._disk.mkdir()
        kinds = self._kinds = {disturbance.outside for disturbance in self._outside}
        if "replay" in kinds:
            stack.enter_context(self._recorder)
        if "disk stalls" in kinds:
            with (out / "image").open("wb") as image:
                image.truncate(8 * DISK_BYTES)
            _do("mkfs.ext4", "-q", image.name)
            _do("mount", "-o", "loop,noatime", image.name, self._disk)
        elif "disk full" in kinds:
            _do("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self._disk)
        if kinds & {"disk stalls", "disk full"}:
            stack.callback(_do, "umount", "--lazy", self._disk)

    def check(self) -> Iterator[str]:
        schedule, runs = self._schedule, self._disk / "runs"
        schedule.experiment("processes").save(file := self._output.with_name("experiment.yaml"))
        program = self._start("run", file, "--out", runs)
        self._wait(program, lambda: any(path.stat().st_size for path in runs.glob("*/*/segments/metrics-*")))
        self._disturb(program)
        if schedule.stopped_at is not None:
            self._wait(program, lambda: any(runs.glob("*/*/checkpoints/*/manifest.json")))
            program.end()
            if any(runs.glob("*/*/status.json")):
                return  # the run had ended
            self._output = self._output.with_name("output of resume")
            program = self._start("resume", next(runs.glob("*/*")))
        self._wait(program, lambda: program.poll() is not None)
        record, output = Record.of(load_run(runs)), self._output.read_text()
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        if program.returncode != EXIT_CODES.get(record.status) or len(errors) != (program.returncode == 1):
            yield f"it is {record.status}, ended with exit code {program.returncode} and said {output!r:.500}"
        yield from violations(schedule, record)
        refused = any(kind == "refused" for events in record.events.values() for _, kind, _ in events)
        if self.dialled["stranger"] and not refused and schedule.stopped_at is None:
            yield "no event names the strangers"
        if schedule.synchronous and schedule.lossless and self._kinds <= set(HARMLESS):
            yield from differences(record, simulate(schedule))

    def _start(self, *arguments: object) -> Child:
        program = FORKER.program(*map(str, arguments), "--quiet", "--no-report", output=self._output)
        self._stack.callback(program.end)
        return program

    def _wait(self, program: Child, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not until() and program.poll() is None:
            assert time.monotonic() < deadline, (
                f"no end within {BOUND_S:g} s: {self._output.read_text()!r:.500}"
            )
            time.sleep(0.01)

    # --- disturbances

    def _disturb(self, program: Child) -> None:
        """Apply each disturbance at its instant, in seconds after the first row."""
        start, actions = time.monotonic(), []
        for disturbance in self._outside:
            do, undo = self._actions(disturbance, program)
            actions += [(disturbance.at_s, do), (disturbance.at_s + disturbance.for_s, undo)]
            self._stack.callback(undo)
        for at_s, action in sorted(actions, key=lambda action: action[0]):
            self._wait(program, lambda at_s=at_s: time.monotonic() >= start + at_s)  # type: ignore[misc]
            action()

    def _actions(
        self, item: Disturbance, program: Child
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """The action of a disturbance, and its reversal, which may be called twice."""
        victims: list[psutil.Process] = []
        ballast = self._disk / "ballast"

        def signalled(name: str) -> None:
            victims[:] = victims or self._nodes(program)[item.rank : item.rank + 1]
            for process in victims:
                with suppress(psutil.Error):
                    getattr(process, name)()

        def cut() -> None:
            """Let the kernel reset every connection between nodes."""
            for port in self._ports(program):
                _do(
                    "ss", "--kill", "--tcp", "state", "established", f"( sport = :{port} or dport = :{port} )"
                )

        def dial() -> None:
            """Claim to every node to be a peer, or replay recorded streams to it, and wait until it hangs up."""
            claims = [wire.hello(item.rank, secrets.token_bytes(wire.TOKEN_BYTES))]
            for port in self._ports(program):
                for stream in claims if item.outside == "stranger" else self._recorder.heard(port):
                    with (
                        suppress(OSError),
                        socket.create_connection(("127.0.0.1", port), timeout=15.0) as link,
                    ):
                        link.sendall(stream)
                        while link.recv(4096):
                            continue
                        self.dialled[str(item.outside)] += 1

        def fill() -> None:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        def thaw() -> None:
            with suppress(subprocess.CalledProcessError):  # it is thawed already
                _do("fsfreeze", "--unfreeze", self._disk)

        match item.outside:
            case "kill":
                return lambda: signalled("kill"), int
            case "stop":
                return lambda: signalled("suspend"), lambda: victims and signalled("resume")
            case "disk full":
                return fill, lambda: ballast.unlink(missing_ok=True)
            case "disk stalls":
                return lambda: _do("fsfreeze", "--freeze", self._disk), thaw
            case "cut":
                return cut, int
        return dial, int

    def _nodes(self, program: Child) -> list[psutil.Process]:
        """The processes of the nodes, oldest first."""
        with suppress(psutil.Error, ValueError):
            [coordinator] = psutil.Process(program.pid).children()
            return sorted(coordinator.children(), key=lambda process: process.pid)
        return []

    def _ports(self, program: Child) -> set[int]:
        """The ports on which nodes listen."""
        ports = set()
        for process in self._nodes(program):
            with suppress(psutil.Error):
                links = process.net_connections("tcp")
                ports |= {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
        return ports


class Recorder(threading.Thread):
    """Records the streams of nodes over loopback, from their greetings on, by ports."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                frame, address = self._socket.recvfrom(2**17)
                if address[2] == socket.PACKET_OUTGOING or frame[23] != socket.IPPROTO_TCP:
                    continue  # every packet is seen twice
                tcp, end = 14 + 4 * (frame[14] & 15), 14 + int.from_bytes(frame[16:18])
                ports, payload = (
                    struct.unpack_from("!HH", frame, tcp),
                    frame[tcp + 4 * (frame[tcp + 12] >> 4) : end],
                )
                if payload and (ports in self._streams or payload.startswith(wire.MAGIC)):
                    self._streams[ports] += payload

    def heard(self, port: int) -> list[bytes]:
        """The recorded streams to a port, by connection."""
        return [stream for (_, to), stream in list(self._streams.items()) if to == port]

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._socket.close()


def _do(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
