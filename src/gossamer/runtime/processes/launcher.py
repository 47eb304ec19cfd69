"""The engine ``processes``: checks the experiment, and coordinates the fork server or joined workers."""

from __future__ import annotations

from contextlib import ExitStack

from gossamer.config import Experiment, Processes
from gossamer.errors import BadInput, RunFailed
from gossamer.learning.thread_pool import one_thread
from gossamer.network import Constant
from gossamer.results.checkpoints import RunCheckpoint
from gossamer.results.folder import RunFolder
from gossamer.results.observer import Observer
from gossamer.runtime.outcome import Outcome, ending_signals
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.coordinator import Coordinator
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.executors import started_workers
from gossamer.runtime.processes.fork_server import ForkServer, Listen
from gossamer.runtime.processes.protocol import Check, Prepared, Refused
from gossamer.runtime.processes.system import check_supported
from gossamer.runtime.processes.transport.shaper import simplified
from gossamer.runtime.setup import prepare


class ProcessesEngine:
    """One operating-system process per node, over TCP. The constructor rejects bad input.

    Args:
        experiment: the experiment to run.
        server: the fork server, which ends with this engine; None starts one.
        listen: where workers join; None runs all nodes on this machine.
    """

    def __init__(
        self, experiment: Experiment, server: ForkServer | None = None, listen: Listen | None = None
    ) -> None:
        assert isinstance(experiment.engine, Processes)
        check_supported()
        self._listen = listen
        with ExitStack() as stack:
            self._server: ForkServer | WorkerListener
            if listen is None:
                self._server = stack.enter_context(server or ForkServer())
            else:
                self._server = stack.enter_context(WorkerListener(listen.address, listen.token))
            self._notes = simplified(experiment.network, experiment.nodes, experiment.seed)
            if experiment.compute != Constant() and not experiment.engine.pace:
                self._notes.append(
                    "compute: steps take their real time;"
                    " with engine.pace=true, at least that of the compute profile"
                )
            if listen is not None and (root := experiment.data_root) is not None and not root.is_dir():
                raise BadInput(f"data_root: {root} is not a folder; accepted: null, or a folder")
            self._setup = prepare(experiment)
            if isinstance(self._server, ForkServer):
                _check(self._server, experiment)
            self._resources = stack.pop_all()
        self.description = self._setup.description()
        self.fingerprint = self._setup.fingerprint

    def run(self, folder: RunFolder, observer: Observer, checkpoint: RunCheckpoint | None = None) -> Outcome:
        """Run to the end. The failure of a node is part of the outcome; rows recorded before it are kept."""
        observer.start(self.description)
        for text in [*self._setup.notes(), *self._notes]:
            observer.say(text)
        listen, server = self._listen, self._server
        min_workers = 1 if listen is None else listen.min_workers
        # One thread, as at the nodes, so that averages and evaluations have the same bits.
        with one_thread(), ExitStack() as stack:
            coordinator = Coordinator(
                self._setup,
                folder,
                observer,
                checkpoint,
                server,
                min_workers,
                stack,
                replaceable=listen is not None and listen.executor is None,
            )
            stack.enter_context(ending_signals(coordinator.stop, observer.say))
            if listen is not None and listen.executor is not None and isinstance(server, WorkerListener):
                slots = -(-self._setup.experiment.nodes // min_workers)
                workers = started_workers(listen, server.address, slots, coordinator.fail_to_start)
                stack.enter_context(workers)
            return coordinator.run()

    def __enter__(self) -> ProcessesEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


def _check(server: ForkServer, experiment: Experiment) -> None:
    """Refuse an experiment that the fork server can't read, e.g. one that names a class defined in a
    notebook."""
    channel: Channel[Prepared | Refused] = Channel(server.end, Prepared | Refused)
    channel.send(Check(experiment.to_yaml()))
    match channel.receive():
        case None:
            raise RunFailed(f"the fork server died: {server.how_it_died()}")
        case Refused(problems=problems):
            raise BadInput(*problems)
