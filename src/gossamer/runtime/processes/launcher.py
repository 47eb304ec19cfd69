"""The engine ``processes``, from the user's process: it has the fork server do the work, shows its reports, and
collects the models."""

from __future__ import annotations

from contextlib import ExitStack

from gossamer.config import Experiment, Processes
from gossamer.errors import BadInput, RunFailed
from gossamer.network import Constant
from gossamer.results.checkpoints import Cut
from gossamer.results.folder import RunFolder
from gossamer.runtime.outcome import Outcome, ending_signals
from gossamer.runtime.processes.executors import started_workers
from gossamer.runtime.processes.fork_server import ForkServer, Listen
from gossamer.runtime.processes.protocol import Ended, Prepare, Prepared, Refused, Shown, Stop
from gossamer.runtime.processes.shared_models import FINAL, SharedModels
from gossamer.runtime.processes.transport.shaper import simplified
from gossamer.runtime.recording import Observer


class ProcessesEngine:
    """One operating-system process per node, over TCP. The constructor has the fork server prepare the run, which finds bad
    input.

    Args:
        experiment: what is run.
        server: the fork server, which ends with this engine; None starts one.
        listen: where workers join; None runs all nodes on this machine.
    """

    def __init__(
        self, experiment: Experiment, server: ForkServer | None = None, listen: Listen | None = None
    ) -> None:
        assert isinstance(experiment.engine, Processes)
        self._experiment, self._listen = experiment, listen
        self._server = server or ForkServer()
        try:
            self._notes = simplified(experiment.network, experiment.nodes, experiment.seed)
            if experiment.compute != Constant() and not experiment.engine.pace:
                self._notes += [
                    "compute: steps take as long as they take here;"
                    " with engine.pace=true, no less than the compute profile says"
                ]
            self._prepared = self._prepare()
            self.description = self._prepared.description
        except BaseException:
            self._server.close()
            raise

    def _prepare(self) -> Prepared:
        where = () if (at := self._listen) is None else (at.address, at.token, at.min_workers)
        self._server.channel.send(Prepare(self._experiment.to_yaml(), *where))
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
        for text in self._notes:
            observer.say(text)
        ended: Ended | None = None
        channel = self._server.channel
        with ending_signals(lambda: channel.send(Stop())), ExitStack() as stack:
            self._server.fork(str(folder.path), None if cut is None else cut.number)
            self._start_workers(stack)
            while ended is None and (message := channel.receive()) is not None:
                match message:
                    case Ended():
                        ended = message
                    case Shown((rounds, now_s)):
                        observer.progress(rounds, now_s)
                        time_s = max(time_s, now_s)
                    case Shown(dict(row)):
                        observer.row(row)
                        time_s, wall_s = max(time_s, row["time_s"]), max(wall_s, row["wall_s"])
                    case Shown(str(text)):
                        observer.say(text)
        if ended is None:
            died = {"message": f"the fork server died: {self._server.how_it_died()}"}
            ended = Ended("failed", died, None)
        parameters = buffers = None
        if ended.failure is None:
            nodes, prepared = self._experiment.nodes, self._prepared
            models = SharedModels(self._server.memory, nodes, prepared.parameters, prepared.buffers)
            parameters, buffers = models.all(FINAL)
        return Outcome(
            ended.reason,
            time_s,
            wall_s,
            parameters,
            buffers,
            None if ended.failure is None else RunFailed(**ended.failure),
            self._prepared.trainer,
            private_bytes=ended.private,
        )

    def _start_workers(self, stack: ExitStack) -> None:
        """Have an executor start the workers, if one is to. It waits for them, and they end with the run: so after an
        exception here, the run is ended first."""
        listen, address, channel = self._listen, self._prepared.address, self._server.channel
        if listen is None or listen.executor is None or address is None:
            return
        count, slots = listen.min_workers, -(-self._experiment.nodes // listen.min_workers)
        stack.enter_context(
            started_workers(
                listen.executor, count, address, listen.token, slots, lambda why: channel.send(Stop(why))
            )
        )
        stack.push(lambda kind, *_: None if kind is None else self._server.close())

    def __enter__(self) -> ProcessesEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
