"""Starting a run on several machines, and bringing its record home."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
import shlex
import signal
import tarfile
import tempfile
from asyncio.subprocess import Process
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gossamer.api import Silent
from gossamer.config import Experiment
from gossamer.deploy.bundle import EXPERIMENT, KEYS, PEERS, Bundle
from gossamer.deploy.collect import Collected, collect
from gossamer.deploy.hosts import Host, Hosts
from gossamer.deploy.node import as_deployed
from gossamer.deploy.remote import Remote, RemoteError
from gossamer.errors import RunFailed
from gossamer.runtime.processes.security.keys import make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers
from gossamer.runtime.processes.security.trust import check_private, key_file, own_certificate
from gossamer.runtime.recording import Observer

AT_ONCE = 8
"""Nodes of one host that are being started at once: a host drops connections (``MaxStartups`` of sshd: from ten on) where
more have not said who they are."""
END_S = 60.0
"""Seconds that nodes have to write their results when they are told to end."""
KILL_S = 10.0
"""Seconds that a host may take to end them."""
SILENT_S = 60.0
"""Seconds, besides those after which a lost peer is noticed, that nodes may be silent when the run is over for others."""
REACHED = json.dumps({"reached": True})
"""What a host says before it becomes a node, which takes it a while."""
FETCH_S = 600.0
"""Seconds in which a host's records have to come."""


@dataclass(eq=False)
class _Node:
    """One node, as whoever launched it sees it."""

    rank: int
    host: Host
    process: Process
    pid: int | None = None
    began: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its host has said something, or the connection has ended."""

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host.name})"

    def end(self) -> None:
        """Have it end in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def launch(
    experiment: Experiment,
    hosts: Hosts,
    out: str | Path = "runs",
    *,
    keys: str | Path | None = None,
    insecure: bool = False,
    shape: bool = False,
    more: Iterable[str | Path] = (),
    observer: Observer | None = None,
) -> Collected:
    """Run an experiment on several machines.

    The ranks fill the hosts' slots in order; each is a process of its own. What they need is copied there, what they recorded
    is put together into ``<out>/<name>/<id>``, and nothing is left behind. Nodes end when the connection through which
    they were started ends, so that none outlives this process by much.

    Args:
        experiment: what is run.
        hosts: where.
        out: the folder of all runs.
        keys: the folder with all nodes' keys; None makes keys for this run alone. Each host gets those of its nodes.
        insecure: without TLS.
        shape: have the experiment's network delay and limit what is sent, on top of what the real one does.
        more: further files and folders to copy into the working directory of each node (modules of the experiment).
        observer: told of what happens.

    Raises:
        BadInput: if something can't be used.
        RemoteError: if a host can't be reached.
        RunFailed: if a node can't start; what others have recorded by then is kept.
    """
    experiment = as_deployed(experiment, shape=shape)
    places = hosts.place(experiment.nodes)
    bundle = Bundle(experiment, more)
    with tempfile.TemporaryDirectory(prefix="gossamer-") as scratch:
        folder = Path(scratch) / KEYS if keys is None else Path(keys)
        if keys is None:
            make_keys(folder, range(experiment.nodes))
        rows = []
        for rank, (host, slot) in enumerate(places):
            check_private(key_file(folder, rank))
            rows.append(Peer.of(rank, host.endpoint(slot), own_certificate(key_file(folder, rank))))
        Peers(rows).save(Path(scratch) / PEERS)
        bundle.put(PEERS, Path(scratch) / PEERS)
        options = [*(["--insecure"] if insecure else ["--keys", KEYS]), *(["--shape"] if shape else [])]
        options += ["--run", secrets.token_hex(16)]
        launcher = _Launcher(experiment, hosts, places, folder, options, observer or Silent())
        return asyncio.run(launcher.run(bundle, Path(out), Path(scratch) / "records"))


class _Launcher:
    """The course of one launch."""

    def __init__(
        self,
        experiment: Experiment,
        hosts: Hosts,
        places: list[tuple[Host, int]],
        keys: Path,
        options: list[str],
        observer: Observer,
    ) -> None:
        self._experiment, self._places, self._keys = experiment, places, keys
        self._options, self._observer = options, observer
        self._id = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        ssh = shlex.split(hosts.ssh)
        used = {host.name: host for host, _ in places}
        self._hosts = [(host, Remote(ssh, name)) for name, host in used.items()]
        self._nodes: list[_Node] = []
        self._rounds: dict[int, int] = {}
        self._unfetched: set[str] = set()
        self._ending = False
        self._killing: asyncio.Task[None] | None = None
        self._failure: RunFailed | None = None
        self._over = False  # for some node, and so for all
        self._silence: asyncio.TimerHandle | None = None

    async def run(self, bundle: Bundle, out: Path, records: Path) -> Collected:
        """From copying to tidying up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        started = False
        try:
            await self._copy(bundle)
            started = True
            await self._live()
            if self._failure is not None and not any(node.began for node in self._nodes):
                started = False  # nothing was learned
                raise self._failure
            await self._fetch(records)
            collected = collect([records], out / self._experiment.name / self._id)
            started = False
            if self._failure is not None:
                self._failure.folder = collected.run.path
                raise self._failure
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await self._tidy_up(keep=started)
        return collected

    def _stop(self) -> None:
        """Ctrl-C: have all nodes end, with their results; the second time, at once."""
        if self._ending and self._killing is None:
            self._killing = asyncio.ensure_future(self._kill())
        self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(END_S, self._stop)
        for node in self._nodes:
            node.end()

    async def _kill(self) -> None:
        remotes = {host.name: remote for host, remote in self._hosts}
        left = [node for node in self._nodes if node.process.returncode is None]
        jobs = [
            remotes[node.host.name].do(f"kill -9 {node.pid}", timeout_s=KILL_S)
            for node in left
            if node.pid is not None
        ]
        await asyncio.gather(*jobs, return_exceptions=True)
        for node in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)  # its session: whatever carries it there

    # --- copying

    def _folder(self, host: Host) -> str:
        return shlex.quote(f"{host.workdir}/{self._id}")

    async def _copy(self, bundle: Bundle) -> None:
        self._observer.say(f"copying to {', '.join(host.name for host, _ in self._hosts)}")
        jobs = []
        for host, remote in self._hosts:
            ranks = [rank for rank, (where, _) in enumerate(self._places) if where is host]
            secret = {f"{KEYS}/{key_file('', rank).name}": key_file(self._keys, rank) for rank in ranks}
            folder = self._folder(host)
            command = f"mkdir -p {folder} && chmod 700 {folder} && tar -x -f - -C {folder}"
            jobs.append(remote.do(command, bundle.tar(secret)))
        await _all(jobs)

    async def _fetch(self, records: Path) -> None:
        self._observer.say(f"collecting from {', '.join(host.name for host, _ in self._hosts)}")
        jobs = [
            remote.do(f"cd {self._folder(host)} && mkdir -p runs && tar -c -f - runs", timeout_s=FETCH_S)
            for host, remote in self._hosts
        ]
        for (host, _), packed in zip(
            self._hosts, await asyncio.gather(*jobs, return_exceptions=True), strict=True
        ):
            if isinstance(packed, RemoteError):
                self._observer.say(f"{packed}: its records stay in {host.workdir}/{self._id}")
                self._unfetched.add(host.name)
            elif isinstance(packed, BaseException):
                raise packed
            else:
                with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                    archive.extractall(records / host.name, filter="data")

    async def _tidy_up(self, *, keep: bool) -> None:
        """Leave nothing behind, but records that could not be brought home."""
        if keep:
            self._observer.say(f"what the nodes recorded stays where it is, in .../{self._id}/runs")
        jobs = []
        for host, remote in self._hosts:
            folder = self._folder(host)
            if keep or host.name in self._unfetched:
                command = f"rm -rf {folder}/{KEYS}"
            else:  # (the folder of all runs goes with its last one)
                command = f"rm -rf {folder}; rmdir {shlex.quote(host.workdir)} 2>/dev/null; true"
            jobs.append(remote.do(command))
        for problem in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(problem, BaseException):
                self._observer.say(str(problem))

    # --- watching

    async def _live(self) -> None:
        remotes = {host.name: remote for host, remote in self._hosts}
        gates = {name: asyncio.Semaphore(AT_ONCE) for name in remotes}
        await _all(
            [
                self._run(rank, host, remotes[host.name], gates[host.name])
                for rank, (host, _) in enumerate(self._places)
            ]
        )
        if self._silence is not None:
            self._silence.cancel()
        if self._killing is not None:
            await self._killing

    async def _run(self, rank: int, host: Host, remote: Remote, gate: asyncio.Semaphore) -> None:
        """A node, from its start, as soon as it's its turn, to its end."""
        async with gate:
            if self._ending:
                return
            try:
                node = _Node(rank, host, await remote.start(self._command(rank, host)))
            except RemoteError:
                self._end()
                raise
            self._nodes.append(node)
            if self._ending:
                node.end()
            watching = asyncio.ensure_future(self._watch(node))
            watching.add_done_callback(lambda _: node.reached.set())
            await node.reached.wait()
        await watching

    def _command(self, rank: int, host: Host) -> str:
        root = [] if host.data_root is None else ["--set", f"data_root={host.data_root}"]
        words = ["node", EXPERIMENT, "--rank", str(rank), "--peers", PEERS, *self._options, *root]
        words += ["--out", "runs", "--attached", "--json"]
        return f"cd {self._folder(host)} && echo '{REACHED}' && exec {host.command} {shlex.join(words)}"

    async def _watch(self, node: _Node) -> None:
        process = node.process
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(_last_line(process.stderr))
        async for line in process.stdout:
            node.reached.set()
            try:
                said = json.loads(line)
            except ValueError:
                said = {"said": line.decode(errors="replace").rstrip()}
            self._hear(node, said)
            self._listen()
        code, error = await process.wait(), await errors
        if self._experiment.gather.lost_peer == "fail":
            self._over = True  # a run that bears no loss
        self._listen()
        if code and node.began and not self._ending:
            self._observer.say(f"{node.name} ended ({_how(code)}){': ' if error else ''}{error}")
        if not node.began and not self._ending:
            self._failure = RunFailed(f"{node.name} did not start: {error or _how(code)}")
            self._end()  # the others would wait for it

    def _listen(self) -> None:
        """Once the run is over, don't wait for ever for those that say nothing: their hosts may have vanished."""
        if self._silence is not None:
            self._silence.cancel()
        if self._over:
            silent_s = SILENT_S + self._experiment.failures.detection_s
            self._silence = asyncio.get_running_loop().call_later(silent_s, self._give_up, silent_s)

    def _give_up(self, silent_s: float) -> None:
        left = [node.name for node in self._nodes if node.process.returncode is None]
        if left and not self._ending:
            self._observer.say(
                f"the run is over, and nothing was heard for {silent_s:g} s of {', '.join(left)}: ended"
            )
            self._end()

    def _hear(self, node: _Node, said: dict[str, Any]) -> None:
        match said:
            case {"reached": _}:
                pass
            case {"pid": int(pid)}:
                node.pid = pid
            case {"began": _}:
                node.began = True
            case {"row": dict(row)}:
                self._observer.row(row)
            case {"round": int(round), "time_s": float(time_s)}:
                self._rounds[node.rank] = round
                self._observer.progress(sum(self._rounds.values()), time_s)
            case {"said": str(text)}:
                self._observer.say(f"{node.name}: {text}")
            case {"status": str(status)}:
                self._over |= status == "done"  # no node is, before all are that it knows of
                self._observer.say(f"{node.name} is {status}")
            case _:
                self._observer.say(f"{node.name}: {said}")


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"its connection was killed by signal {-code}"


async def _last_line(stream: asyncio.StreamReader) -> str:
    last = ""
    async for line in stream:
        last = line.decode(errors="replace").strip() or last
    return last


async def _all(jobs: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Wait for all; the first failure is raised when the others have ended too."""
    for result in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
