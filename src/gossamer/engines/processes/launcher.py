"""The engine ``processes``, from the user's process: starts the fork server, shows what it says, collects the
models."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from gossamer.engines.outcome import Outcome
from gossamer.engines.processes.system.channel import Channel
from gossamer.engines.processes.system.death import describe_exit
from gossamer.engines.processes.system.memory import FINAL, SharedModels, shared_file
from gossamer.engines.processes.transport.shaper import simplified
from gossamer.engines.recording import Observer, stopwatch
from gossamer.engines.signals import ending_signals
from gossamer.errors import BadInput, RunFailed
from gossamer.experiment import Experiment
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder

KILL_S = 10.0
"""Seconds that the fork server has to end by itself."""


class ProcessesEngine:
    """One operating-system process a node, over TCP on loopback. Making one starts the fork server, which
    finds bad input."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._simplified = simplified(experiment.network, experiment.nodes, experiment.seed)
        self._memory = shared_file()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gossamer.engines.processes.supervisor.server",
                str(theirs.fileno()),
                str(self._memory),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(), self._memory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is this process's to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        try:
            self.description, self._parameters, self._buffers = self._prepare()
        except BaseException:
            self.__exit__()
            raise

    def _prepare(self) -> tuple[dict[str, Any], int, int]:
        self._channel.send("experiment", self._experiment.to_yaml())
        answer = self._channel.receive()
        if answer is None:
            raise RunFailed(f"the fork server died while it loaded the data: {self._exit()}")
        if answer[0] == "bad-input":
            raise BadInput(*answer[1])
        return answer[1], answer[2], answer[3]

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end. Failures of nodes are in the outcome, with what was recorded until then kept."""
        wall, time_s = stopwatch(0.0 if cut is None else cut.wall_s), 0.0
        observer.start(self.description)
        for text in self._simplified:
            observer.say(text)
        reason, failure, private = "failed", None, None
        with ending_signals(lambda: self._channel.send("stop")):
            self._channel.send("folder", str(folder.path), cut is not None)
            while True:
                message = self._channel.receive()
                if message is None:
                    failure = RunFailed(f"the fork server died: {self._exit()}")
                    break
                what, *rest = message
                if what == "ended":
                    reason = rest[0]
                    if rest[1] is not None:
                        details = dict(rest[1])
                        failure = RunFailed(details.pop("message"), **details)
                    break
                if what == "memory":
                    private = rest[0]
                elif what == "progress":
                    observer.progress(rest[0], rest[1])
                    time_s = max(time_s, rest[1])
                elif what == "row":
                    observer.row(rest[0])
                    time_s = max(time_s, rest[0]["time_s"])
                elif what == "say":
                    observer.say(rest[0])
        parameters = buffers = None
        if failure is None:
            models = SharedModels(self._memory, self._experiment.nodes, self._parameters, self._buffers)
            parameters, buffers = models.all(FINAL)
        return Outcome(
            reason, time_s, wall(), parameters, buffers, failure, "sequential", private_bytes=private
        )

    def _exit(self) -> str:
        code = self._server.wait(KILL_S)
        return describe_exit(code << 8 if code >= 0 else -code)

    def __enter__(self) -> ProcessesEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """End the fork server, and with it every node."""
        self._channel.close()
        try:
            self._server.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        os.close(self._memory)
