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
from gossamer.runtime.processes.protocol import Ended, NewRow, Prepared, Refused, RunProgress, Say, Stop
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
        self._experiment, self._listen = experiment, listen
        self._server = server or ForkServer()
        try:
            self._notes = simplified(experiment.network, experiment.nodes, experiment.seed)
            assert isinstance(experiment.engine, Processes)
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
        for text in self._notes:
            observer.say(text)
        ended: Ended | None = None
        channel, listen, address = self._server.channel, self._listen, self._prepared.address
        with ending_signals(lambda: channel.send(Stop())), ExitStack() as stack:
            self._server.fork(str(folder.path), None if cut is None else cut.number)
            if listen is not None and listen.executor is not None and address is not None:
                name, token, count = listen.executor, listen.token, listen.min_workers
                slots = -(-self._experiment.nodes // count)
                stack.enter_context(
                    started_workers(name, count, address, token, slots, lambda why: channel.send(Stop(why)))
                )
                stack.push(self._end_after)
            while ended is None and (message := channel.receive()) is not None:
                match message:
                    case Ended():
                        ended = message
                    case RunProgress(rounds=rounds, time_s=now_s):
                        observer.progress(rounds, now_s)
                        time_s = max(time_s, now_s)
                    case NewRow(row=row):
                        observer.row(row)
                        time_s, wall_s = max(time_s, row["time_s"]), max(wall_s, row["wall_s"])
                    case Say(text=text):
                        observer.say(text)
        if ended is None:
            failure = {"message": f"the fork server died: {self._server.how_it_died()}"}
            ended = Ended("failed", failure, None)
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

    def _end_after(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run after an exception here, since an executor waits for its workers, which end with the run."""
        if kind is not None:
            self._server.close()

    def __enter__(self) -> ProcessesEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
