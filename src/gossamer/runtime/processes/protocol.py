"""The messages between the processes of one run, except those between nodes (``transport``).

::

    launcher      the process of the user: ``gossamer run``
    coordinator   decides and records; a process next to the launcher
    worker        forks the nodes of its slots, and relays between them and the coordinator
    node          one node of the experiment

Each message is a :class:`msgspec.Struct`. On a channel it is a msgpack array that begins with the name of its class; anything
that does not have exactly the fields and types below is refused (:mod:`gossamer.runtime.processes.channel`).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gossamer.errors import PeerFailure, RecordError, cause

StartFrom = Literal["checkpoint", "initial", "neighbor"]
"""As :data:`gossamer.faults.StartFrom`. (This module is imported before everything that takes long.)"""
Moment = int | tuple[str, int] | str
"""As :data:`gossamer.runtime.recording.Moment`."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Anything that one process of a run says to another."""


class Ready(Message):
    """The node accepts connections and waits for :class:`Go`, or a worker has prepared its :class:`Job`."""


class Progress(Message):
    """The node has completed this many rounds and sent this many bytes, by this second of its clock; what it waits for."""

    round: int
    time_s: float
    bytes_sent: int = 0
    waits: list[str] = []


class Row(Message):
    """The node was recorded."""

    moment: Moment
    row: dict[str, Any]
    slot: int | None  # where its model is in the shared memory
    view: list[int] | None = None  # the ranks that it knew, where neighbours are sampled


class Done(Message):
    """The node's protocol has returned after this many rounds."""

    round: int


class Final(Message):
    """The node has handed in its last model and ends."""

    round: int
    private: int | None  # bytes of memory that it shared with no other process


class Marked(Message):
    """The node has taken a snapshot, and all earlier messages have left: how many, to each rank."""

    number: int
    sent: dict[int, int]


class Saved(Message):
    """The node's file of a checkpoint (None: the one from which it can be restarted) is written, or can't be (``error``)."""

    number: int | None
    round: int
    time_s: float
    error: str | None = None


class At(Message):
    """The node is in this round (the answer to :class:`Find` about ``rank``)."""

    rank: int
    round: int


class Crash(Message):
    """The node kills itself now, as planned crash ``number`` of its list says."""

    number: int


class Event(Message):
    """Something for the record of events."""

    kind: str
    text: str


class Unreachable(Message):
    """The node can't reach a peer, or hears nothing of it."""

    rank: int
    why: str


class Failed(Message):
    """The node failed. A file that can't be written needs no traceback."""

    text: str
    round: int
    trace: str

    @classmethod
    def of(cls, error: BaseException, round: int) -> Failed:
        if isinstance(error, RecordError):
            return cls(str(error), round, "")
        trace = "" if isinstance(error, PeerFailure) else "".join(traceback.format_exception(error))
        return cls(cause(error), round, trace)


FromNode = Ready | Progress | Row | Done | Final | Failed | Crash | Event | At | Unreachable | Marked | Saved
"""Messages from a node to the coordinator."""


class Arrival(Message):
    """How a node takes part that starts while the others run."""

    first: int  # the round that it begins with
    together: Sequence[tuple[int, int]]  # ranks, and the rounds from which on they and it wait for each other
    start_from: StartFrom
    tick: int  # the first instant of the time grid at which it is recorded
    traffic: dict[str, int]  # its counters in its last row


class Go(Message):
    """The run starts, or started, at this instant of the machine's monotonic clock."""

    start: float
    arrival: Arrival | None = None


class Finish(Message):
    """The run is over. A node takes checkpoint ``checkpoint`` if there is one, and is recorded once more if ``row``."""

    reason: str
    checkpoint: int | None = None
    row: bool = False


class Lost(Message):
    """A peer is dead, or taken for dead. ``incarnation`` is the one that is over; None where it may run."""

    rank: int
    why: str
    incarnation: int | None = None


class Find(Message):
    """A node starts, or returns: say which round you are in."""

    rank: int
    restarted: bool


class Meet(Message):
    """Wait for each of these peers from a round on: (rank, round). Go on in round ``first``, unless that is None."""

    together: list[tuple[int, int]]
    first: int | None = None


class Expect(Message):
    """All nodes have taken a snapshot, and had sent this many messages to this one, by rank."""

    number: int
    sent: dict[int, int]


class Note(Message):
    """A short order. "leave" the run in order; "slots": this number of nodes of the machine may compute; "consumed": the
    oldest snapshot of the node's model was read, and its place is free; "snapshot": others have taken theirs for this
    checkpoint (to a node whose rounds are over); "settled": it, and all before it, are complete or given up."""

    what: Literal["leave", "slots", "consumed", "snapshot", "settled"]
    number: int = 0


class Addresses(Message):
    """Nodes listen at these addresses: (rank, host, port). Also said by workers, and to them."""

    nodes: list[tuple[int, str, int]]


ToNode = Go | Finish | Lost | Find | Meet | Expect | Note | Addresses
"""Messages from the coordinator to a node."""


class Listen(Message):
    """Open a port for each of these ranks; answered by :class:`Addresses`."""

    ranks: list[int]
    keys: list[bytes] = []  # their private keys and certificates (PEM), where nodes talk over TLS


class Fork(Message):
    """Start the process of a node."""

    rank: int
    incarnation: int  # how often it was started before
    crashes: Sequence[int]  # the rounds after which it kills itself


class Tell(Message):
    """A message for a node."""

    rank: int
    message: ToNode


class Signal(Message):
    """Send the process of a node a signal."""

    rank: int
    number: int


class Job(Message):
    """The preparations of a worker that has joined, after the run's files."""

    experiment: str  # YAML; names files relative to the worker's folder
    run: str  # which identifies it in the record
    digest: str  # of the experiment that the coordinator has, for checkpoints
    first_checkpoint: int  # the number of the next one
    token: bytes  # by which the nodes of this run know each other
    certificates: list[bytes]  # of every rank (DER)
    reconnect_s: float  # for how long the worker tries to reach a coordinator that it has lost


class File(Message):
    """A file for the worker's folder, which travels before the messages about it."""

    path: str
    data: bytes


class Acknowledge(Message):
    """This many messages of a :class:`~gossamer.runtime.processes.channel.Session` have arrived."""

    count: int


ToPool = Listen | Addresses | Fork | Tell | Signal
"""Orders about the processes of nodes."""
ToWorker = ToPool | Job | File | Acknowledge | Finish
"""Messages from the coordinator to a worker that has joined."""


class Exited(Message):
    """The process of a node is gone, and all that it said has come before; or it can't be started."""

    how: str


FromProcess = FromNode | Exited


class Said(Message):
    """A message of a node, or about its process. From another machine, the files and the model that it is about come with
    it."""

    rank: int
    incarnation: int
    message: FromProcess
    files: dict[str, bytes] = {}  # by their path in the run's folder
    model: tuple[int, bytes] | None = None  # for a slot of the shared models


class Refused(Message):
    """The experiment can't be run, or the worker can't join."""

    problems: list[str]


FromPool = Addresses | Said
FromWorker = FromPool | Ready | Refused | Acknowledge
"""Messages from a worker to the coordinator."""


class Join(Message):
    """A worker's first message on a connection. Both ends prove that they know the token (``security``)."""

    version: str  # of gossamer
    session: str  # a name for its session, new or old
    slots: int
    received: int  # messages of this session that have arrived
    nonce: bytes
    proof: bytes


class Welcome(Message):
    """The worker has joined, or is back."""

    proof: bytes  # the coordinator's
    received: int  # messages of this session that have arrived
    clock: float  # the coordinator's monotonic clock


ToJoining = Welcome | Refused
"""Messages from the coordinator to a worker that joins."""


class Prepare(Message):
    """Load and check an experiment. With ``listen`` ("host:port"), nodes run on workers that join there with ``token``; the
    run starts when there are at least ``min_workers``, and slots for all nodes."""

    experiment: str  # YAML
    listen: str | None = None
    token: str = ""
    min_workers: int = 1


class Run(Message):
    """Run what was prepared, recording into a folder, from the checkpoint of a number if there is one."""

    folder: str
    checkpoint: int | None


class Stop(Message):
    """The user asks the run to end in order. With ``why``, it can't start, and fails if it has not."""

    why: str | None = None


ToCoordinator = Prepare | Run | Stop
"""Messages from the launcher to the coordinator."""


class Prepared(Message):
    """The experiment can be run."""

    description: dict[str, Any]  # ``Setup.description``
    parameters: int  # the lengths of its flat vectors
    buffers: int
    trainer: str
    address: str | None  # at which workers join, if they do


class Shown(Message):
    """For the user: rounds that all nodes together have completed by this second of their clock, a row that was recorded, or
    a line of text."""

    what: tuple[int, float] | dict[str, Any] | str


class Ended(Message):
    """The run is over (see :class:`~gossamer.runtime.outcome.Outcome`)."""

    reason: str
    failure: dict[str, Any] | None  # the arguments of RunFailed
    private: dict[str, float] | None  # bytes, mean and maximum over the nodes


ToLauncher = Refused | Prepared | Shown | Ended
"""Messages from the coordinator to the launcher."""
