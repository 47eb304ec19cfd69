"""The messages between the processes of one run, except those between nodes (``transport``).

::

    coordinator   decides and records, in the user's process: ``gossamer run``
    worker        forks the nodes of its slots, and relays between them and the coordinator
    node          one node of the experiment

Each message is a :class:`msgspec.Struct`. On a channel it is a msgpack array that begins with the name of its
class; anything that does not have exactly the fields and types below is refused
(:mod:`gossamer.runtime.processes.channel`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gossamer.faults import StartFrom
from gossamer.fingerprint import Fingerprint
from gossamer.messages.tags import Traffic
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.recording import Moment


class ProtocolMessage(msgspec.Struct, tag=True, array_like=True):
    """A message from one process of a run to another."""


class Ready(ProtocolMessage):
    """The node accepts connections at this address, and waits for :class:`Go`."""

    host: str
    port: int


class Progress(ProtocolMessage):
    """The node's completed rounds and its traffic at ``time_s`` on its clock, and what it waits for."""

    round: int
    time_s: float
    traffic: Traffic
    waits: list[str] = []


class Row(ProtocolMessage):
    """The node has been recorded."""

    moment: Moment
    row: dict[str, Any]
    model: bytearray | None  # its vectors, float32
    view: list[int] | None = None  # the ranks in its view, if neighbours are sampled


class Done(ProtocolMessage):
    """The node's protocol has returned after this many rounds."""

    round: int


class FinalModel(ProtocolMessage):
    """The node ends, with the model of its last row (its vectors, float32)."""

    round: int
    model: bytearray
    private: int | None  # bytes of memory that its process shared with no other
    has_mixed: bool = True  # counted for ``evaluation.of: mixed``


class Marked(ProtocolMessage):
    """The node has taken a snapshot, and all earlier messages have left; ``sent`` counts them by receiver."""

    number: int
    sent: dict[int, int]


class Saved(ProtocolMessage):
    """The node's file of checkpoint ``number`` (None: its restart file) is written, or can't be written
    (``error``)."""

    number: int | None
    round: int
    time_s: float
    error: str | None = None


class CurrentRound(ProtocolMessage):
    """The node is in this round (the answer to :class:`Find` about ``rank``)."""

    rank: int
    round: int


class Crashing(ProtocolMessage):
    """The node kills itself now: crash ``number`` in its list of planned crashes."""

    number: int


class Event(ProtocolMessage):
    """An entry for the event log."""

    kind: str
    text: str


class Unreachable(ProtocolMessage):
    """The node can't reach a peer, or the peer is silent."""

    rank: int
    why: str


class Failed(ProtocolMessage):
    """The node failed, with the arguments of RunFailed."""

    text: str
    round: int | None
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int, round: int | None) -> Failed:
        failure = describe_failure(error, rank, round)
        return cls(str(failure), failure.round, failure.traceback)


FromNode = (
    Ready
    | Progress
    | Row
    | Done
    | FinalModel
    | Failed
    | Crashing
    | Event
    | CurrentRound
    | Unreachable
    | Marked
    | Saved
)
"""Messages from a node to the coordinator."""


class Arrival(ProtocolMessage):
    """Instructions for a node that starts while the others run."""

    first: int  # its first round
    together: Sequence[tuple[int, int]]  # (rank, round): from this round on, the two wait for each other
    start_from: StartFrom
    tick: int  # the first instant of the time grid at which it is recorded
    traffic: Traffic  # the last report of the process before it; the counters continue from there


class Go(ProtocolMessage):
    """The run starts, or started, at this instant of the machine's monotonic clock."""

    start: float
    arrival: Arrival | None = None


class Finish(ProtocolMessage):
    """The run is over. The node takes the last ``checkpoint``, if any, and is recorded once more if
    ``row``."""

    reason: str
    checkpoint: int | None = None
    row: bool = False


class Lost(ProtocolMessage):
    """A peer is dead, or considered dead. ``incarnation`` has ended; None if the peer may still run."""

    rank: int
    why: str
    incarnation: int | None = None


class Find(ProtocolMessage):
    """A node starts or returns: answer with your round (:class:`CurrentRound`)."""

    rank: int
    restarted: bool


class Meet(ProtocolMessage):
    """Wait for each of these peers from a round on: (rank, round). Continue in round ``first``, if given."""

    together: list[tuple[int, int]]
    first: int | None = None


class Expect(ProtocolMessage):
    """All nodes have taken a snapshot. ``sent`` counts their earlier messages to this node, by sender."""

    number: int
    sent: dict[int, int]


class Note(ProtocolMessage):
    """A short command. "leave": leave the run after the round. "snapshot": others have taken their snapshots for
    this checkpoint (sent to a node whose rounds are over). "settled": this checkpoint and all earlier ones
    are complete or abandoned. "read": a row with a model has been read."""

    what: Literal["leave", "snapshot", "settled", "read"]
    number: int = 0


class Addresses(ProtocolMessage):
    """Nodes listen at these addresses: (rank, host, port)."""

    nodes: list[tuple[int, str, int]]


ToNode = Go | Finish | Lost | Find | Meet | Expect | Note | Addresses
"""Messages from the coordinator to a node."""


class Fork(ProtocolMessage):
    """Start the process of a node."""

    rank: int
    incarnation: int  # number of earlier starts
    crashes: Sequence[int]  # the rounds after which it kills itself
    key: bytes | None = None  # its private key and certificate (PEM), if nodes use TLS
    files: dict[str, bytes] = {}  # those from which it resumes, by path in the run's folder


class Tell(ProtocolMessage):
    """A message for a node."""

    rank: int
    message: ToNode


class Signal(ProtocolMessage):
    """Send the process of a node a signal."""

    rank: int
    number: int


class Check(ProtocolMessage):
    """The first message to a fork server: check that it can read this experiment (YAML) and import what it names."""

    experiment: str


class Job(ProtocolMessage):
    """The run that a worker must prepare."""

    experiment: str  # YAML; names files relative to the worker's folder
    trainer: str  # the one that has proved itself at the coordinator
    folder: str | None  # the run's, if the worker is on the coordinator's machine
    files: dict[str, bytes]  # for a worker on another machine, which has its own folder
    checkpoint: int | None  # number of the checkpoint from which the run resumes
    next_checkpoint: int
    digest: str  # of the coordinator's experiment, for checkpoints
    token: bytes  # identifies the nodes of this run to each other
    certificates: list[bytes]  # of every rank (DER); empty without TLS
    reconnect_s: float  # how long the worker tries to reach a lost coordinator
    fingerprint: Fingerprint | None = None  # of the coordinator's code and data, which the worker must have


class Acknowledge(ProtocolMessage):
    """This many messages of a :class:`~gossamer.runtime.processes.channel.Session` have arrived."""

    count: int


ToPool = Fork | Tell | Signal
"""Commands about the processes of nodes."""
ToWorker = ToPool | Job | Acknowledge | Finish
"""Messages from the coordinator to a worker."""


class Exited(ProtocolMessage):
    """A node's process has ended, and all of its messages have arrived; or it can't be started."""

    how: str


FromProcess = FromNode | Exited


class NodeReport(ProtocolMessage):
    """A message from a node or about its process; from another machine, with the files to which it refers."""

    rank: int
    incarnation: int
    message: FromProcess
    files: dict[str, bytes] = {}  # by their path in the run's folder


class Prepared(ProtocolMessage):
    """The worker has prepared its :class:`Job`, or found no problem (:class:`Check`)."""


class Differs(ProtocolMessage):
    """The worker has other own code or other data than the coordinator: these modules and files."""

    what: list[str]


class Refused(ProtocolMessage):
    """The experiment can't be run, or the worker can't join."""

    problems: list[str]


FromWorker = NodeReport | Prepared | Differs | Refused | Acknowledge
"""Messages from a worker to the coordinator."""


class JoinRequest(ProtocolMessage):
    """A worker's first message on a connection. Both ends prove that they know the token (``security``)."""

    version: str  # of gossamer
    session: str  # the name of a new or existing session
    slots: int
    received: int  # messages of this session that have arrived
    nonce: bytes
    proof: bytes


class Welcome(ProtocolMessage):
    """The worker has joined, or is back."""

    proof: bytes  # the coordinator's
    received: int  # messages of this session that have arrived
    clock: float  # the coordinator's monotonic clock


ToJoining = Welcome | Refused
"""Messages from the coordinator to a worker that joins."""
