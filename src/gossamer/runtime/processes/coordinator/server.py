"""The process of a coordinator.

A process of its own, because it forks: it imports everything and loads the data once, with one torch thread and no event
loop, and every node of an ordinary run is a fork of it. With ``--listen``, workers on other machines fork the nodes.
"""

from __future__ import annotations

import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from gossamer.config import Experiment
from gossamer.errors import BadInput, cause
from gossamer.learning.malloc import keep_freed_memory
from gossamer.results.checkpoints import newest
from gossamer.results.folder import RunFolder
from gossamer.results.segment import RecordError
from gossamer.runtime.processes import protocol
from gossamer.runtime.processes.channel import Channel
from gossamer.runtime.processes.coordinator.coordinator import Coordinator
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.remote import Door
from gossamer.runtime.processes.node_process.computing import Stage, with_data_for_forks
from gossamer.runtime.processes.protocol import Prepare, Prepared, Refused, Run, ToCoordinator
from gossamer.runtime.processes.security.join import check_token
from gossamer.runtime.processes.system.descriptors import raise_descriptor_limit
from gossamer.runtime.setup import prepare


def outcome_of(run: Callable[[], Ended]) -> Ended:
    """How a run ended, also where the coordinator itself failed."""
    try:
        return run()
    except RecordError as error:  # a full disk, ...: a run that isn't recorded is none
        return Ended("failed", message=f"the record can't be written: {error}")
    except OSError as error:  # no descriptor or process is left, ...
        trace = traceback.format_exc()
        return Ended("failed", message=f"the coordinator failed: {cause(error)}", traceback=trace)


def serve(channel: int, memory: int) -> None:
    """Prepare the experiment that the launcher names, and run it.

    Args:
        channel: descriptor of the channel to the launcher.
        memory: descriptor of the file that all processes of this machine share.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # before any operation: a fork after one with more threads hangs
    keep_freed_memory()
    launcher: Channel[ToCoordinator] = Channel(socket.socket(fileno=channel), ToCoordinator)
    asked = launcher.receive()
    if not isinstance(asked, Prepare):
        return
    door = None
    try:
        if asked.listen is not None:
            door = Door(asked.listen, check_token(asked.token))
        setup = with_data_for_forks(prepare(Experiment.parse(asked.experiment)))
        raise_descriptor_limit(setup, channels=setup.experiment.nodes)
    except BadInput as error:
        launcher.send(Refused(list(error.problems)))
        return
    where = None if door is None else door.address
    launcher.send(Prepared(setup.description(), setup.layout.size, setup.layout.buffer_size, where))
    stage = Stage(setup)
    if door is None:
        stage.warm_up()  # while the launcher makes the folder
    answer = launcher.receive()
    if not isinstance(answer, Run):
        return
    folder = RunFolder.open(Path(answer.folder))
    cut = newest(folder.checkpoints) if answer.resume else None
    coordinator = Coordinator(setup, stage, folder, launcher, memory, cut, door, asked.min_workers)
    end = outcome_of(coordinator.run)
    launcher.send(protocol.Ended(end.reason, end.failure, coordinator.private_bytes(), coordinator.forms()))
