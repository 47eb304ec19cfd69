"""The engine ``processes``, from the user's process: has the fork server do the work, shows what it says, collects the
models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gossamer.config import Experiment, Processes
from gossamer.errors import BadInput, RunFailed
from gossamer.network import Constant
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.outcome import Outcome
from gossamer.runtime.processes.executors import started_workers
from gossamer.runtime.processes.fork_server import ForkServer, Listen
from gossamer.runtime.processes.protocol import Ended, NewRow, Prepared, Refused, RunProgress, Say, Stop
from gossamer.runtime.processes.system.memory import FINAL, SharedModels
from gossamer.runtime.processes.transport.shaper import simplified
from gossamer.runtime.recording import Observer
from gossamer.runtime.signals import ending_signals


class ProcessesEngine:
    """One operating-system process a node, over TCP. Constructing one has the fork server prepare the run, which finds bad
    input.

    Args:
        experiment: what is run.
        server: the fork server, which ends with this; None starts one.
        listen: where workers join; None runs all nodes on this machine.
    """

    def __init__(
        self, experiment: Experiment, server: ForkServer | None = None, listen: Listen | None = None
    ) -> None:
        self._experiment, self._listen = experiment, listen
        self._server = server or ForkServer()
        try:
            self._otherwise = simplified(experiment.network, experiment.nodes, experiment.seed) + _unpaced(
                experiment
            )
            self._prepared = self._prepare()
            self.description = self._prepared.description
        except BaseException:
            self._server.close()
            raise

    def _prepare(self) -> Prepared:
        self._server.begin(self._experiment.to_yaml(), self._listen)
        answer = self._server.channel.receive()
        if answer is None:
            raise RunFailed(f"the fork server died while it loaded the data: {self._server.how_it_died()}")
        if isinstance(answer, Refused):
            raise BadInput(*answer.problems)
        assert isinstance(answer, Prepared)
        return answer

    def run(self, folder: RunFolder, observer: Observer, cut: Cut | None = None) -> Outcome:
        """Run to the end. Failures of nodes are in the outcome, with what was recorded until then kept."""
        wall_s, time_s = 0.0 if cut is None else cut.wall_s, 0.0  # by the nodes' clock, as in the rows
        observer.start(self.description)
        for text in self._otherwise:
            observer.say(text)
        reason = "failed"
        private: dict[str, float] | None = None
        execution: dict[str, dict[str, int]] = {}
        failure: RunFailed | None = None
        channel = self._server.channel
        with ending_signals(lambda: channel.send(Stop())), self._workers():
            self._server.fork(str(folder.path), resume=cut is not None)
            while True:
                message = channel.receive()
                if message is None:
                    failure = RunFailed(f"the fork server died: {self._server.how_it_died()}")
                    break
                match message:
                    case Ended(reason=reason, failure=details, private=private, execution=execution):
                        failure = None if details is None else RunFailed(details.pop("message"), **details)
                        break
                    case RunProgress(rounds=rounds, time_s=now_s):
                        observer.progress(rounds, now_s)
                        time_s = max(time_s, now_s)
                    case NewRow(row=row):
                        observer.row(row)
                        time_s, wall_s = max(time_s, row["time_s"]), max(wall_s, row["wall_s"])
                    case Say(text=text):
                        observer.say(text)
        parameters = buffers = None
        if failure is None:
            models = SharedModels(
                self._server.memory, self._experiment.nodes, self._prepared.parameters, self._prepared.buffers
            )
            parameters, buffers = models.all(FINAL)
        return Outcome(
            reason,
            time_s,
            wall_s,
            parameters,
            buffers,
            failure,
            "sequential",
            private_bytes=private,
            execution=execution,
        )

    @contextmanager
    def _workers(self) -> Iterator[None]:
        """Have an executor start the workers, where one is named."""
        listen, address = self._listen, self._prepared.address
        if listen is None or listen.executor is None or address is None:
            yield
            return
        slots = -(-self._experiment.nodes // listen.min_workers)
        with started_workers(listen.executor, listen.min_workers, address, listen.token, slots):
            yield

    def __enter__(self) -> ProcessesEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """End the fork server, and with it every node."""
        self._server.close()


def _unpaced(experiment: Experiment) -> list[str]:
    """What there is to say of a compute profile that was asked for and is not kept."""
    engine = experiment.engine
    if (isinstance(engine, Processes) and engine.pace) or experiment.compute == Constant():
        return []
    return [
        "compute: steps take as long as they take here; with engine.pace=true, no less than the compute profile says"
    ]
