"""The messages between the processes of one run, except those between nodes (``transport``).

::

    coordinator   decides and records, in the user's process: ``gossamer run``
    worker        forks the nodes of its slots, and relays between them and the coordinator
    node          one node of the experiment

Each message is a :class:`msgspec.Struct`. On a channel it is a msgpack array that begins with the name of its
class; anything that does not have exactly the fields, types and ranges below is refused
(:mod:`gossamer.runtime.processes.channel`). What a message may say also depends on the run, such as which checkpoint
comes next; the code that takes it raises :class:`Violation`. The one who sent it is cut off, and its nodes have crashed.

Text is cleaned and cut where a message is created or decoded, so no control character of another process reaches
a terminal or a record."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta, structs

from gossamer.faults import StartFrom
from gossamer.fingerprint import Fingerprint
from gossamer.messages.encoding import MAX_DEPTH
from gossamer.messages.tags import COUNTERS, LONGEST_S, Count, Traffic
from gossamer.results.schema import Rank
from gossamer.runtime.outcome import describe_failure
from gossamer.runtime.recording import Moment, moment_text

MAX_LINE, MAX_TEXT = 2_000, 2**16
"""Most characters of a sentence, and of a traceback or a recorded text."""
MAX_LINES = 100
"""Most sentences of one kind in a message."""
MAX_COLUMNS = 10_000
"""Most columns of one row: a hundred classes in each of a hundred evaluation sets."""
MAX_VALUES = 2**20
"""Most values in one row, those in lists counted each. Eight characters of text count as a value."""

ALIVE_S = 1.0
"""Seconds between two reports of a node of what it waits for."""
REPORTS_PER_SECOND = 256
"""Most such reports of all nodes in a second: a thousand would keep a core busy."""

Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
"""A time since the start of the run, or a duration."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]
"""The number of a checkpoint, or of a node's start."""
Line = Annotated[str, Meta(max_length=MAX_LINE)]
Lines = Annotated[list[Line], Meta(max_length=MAX_LINES)]
Names = Annotated[dict[Line, Line], Meta(max_length=MAX_LINES)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class Violation(Exception):
    """The other end has sent an invalid message: what it sent, and what is accepted."""


_CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"  # escape sequences
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"  # also what reverses lines
)


def clean(text: str) -> str:
    """A text without escape sequences, and without control characters other than tabs and ends of lines."""
    return text if text.isprintable() else _CONTROLS.sub("", text)


def line(text: str, longest: int = MAX_LINE) -> str:
    """A clean text in one line of at most ``longest`` characters."""
    text = text if text.isprintable() else " ".join(clean(text).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def lines(texts: Sequence[str]) -> list[str]:
    """The first texts, each in one line."""
    return [line(text) for text in texts[:MAX_LINES]]


def _in_lines(value: Any) -> Any:
    """A value of mappings with all text in it in clean lines."""
    if isinstance(value, dict):
        return {line(name): _in_lines(item) for name, item in value.items()}
    return line(value) if isinstance(value, str) else value


def report_every_s(nodes: int) -> float:
    """Seconds between two reports of one of this many nodes, if nothing happens there."""
    return max(ALIVE_S, nodes / REPORTS_PER_SECOND)


class ProtocolMessage(msgspec.Struct, tag=True, array_like=True):
    """A message from one process of a run to another."""


class Ready(ProtocolMessage):
    """The node accepts connections at this address, and waits for :class:`Go`."""

    host: Line  # an IP address
    port: Annotated[int, Meta(ge=1, le=65_535)]

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)
        if not self.host.isprintable():  # the zone of an IPv6 address may be any text
            raise ValueError("an address with control characters")


class Progress(ProtocolMessage):
    """The node's completed rounds and its traffic at ``time_s`` on its clock, what it waits for, and whether its algorithm
    counts rounds."""

    round: Count
    time_s: Seconds
    traffic: Traffic
    waits: Lines = []
    counts_rounds: bool = True

    def __post_init__(self) -> None:
        self.waits = lines(self.waits)


class Values(msgspec.Struct, array_like=True):
    """The values of :func:`~gossamer.runtime.recording.node_row` that every row has, except the traffic."""

    round: Count
    step: Count
    time_s: Seconds
    wall_s: Seconds
    model_age_s: Seconds
    train_loss: float | None  # NaN or infinite for a diverging model
    staleness_s: Seconds | None
    staleness_max_s: Seconds | None
    idle_share: Share | None
    uplink_share: Share | None
    downlink_share: Share | None


_GIVEN = {"node", "network_bytes", "moment", *Values.__struct_fields__, *COUNTERS}
"""The columns of :func:`~gossamer.runtime.recording.node_row` that are not in :attr:`Row.columns`."""


class Row(ProtocolMessage):
    """The node has been recorded. ``columns`` has the values on evaluation sets and those of ``node.record``."""

    moment: Moment
    values: Values
    traffic: Traffic
    columns: dict[Text, bool | int | float | str | list[Any] | dict[Any, Any] | None]
    model: bytearray | None  # its vectors, float32
    view: list[Rank] | None = None  # the ranks in its view, if neighbours are sampled

    def __post_init__(self) -> None:
        match self.moment:
            case int(number) | ("tick", int(number)) if 0 <= number <= 2**53:
                pass
            case "end":
                pass
            case moment:
                raise ValueError(f"a row at {line(repr(moment), 60)}; accepted: a round, a tick, or the end")
        if len(self.columns) > MAX_COLUMNS:
            raise ValueError(f"a row with {len(self.columns):,} columns; accepted: at most {MAX_COLUMNS:,}")
        self.columns, _ = _recordable(self.columns, MAX_VALUES, MAX_DEPTH)

    @classmethod
    def of(
        cls, moment: Moment, row: Mapping[str, Any], model: bytearray | None, view: list[int] | None
    ) -> Row:
        """The message with a row of :func:`~gossamer.runtime.recording.node_row`, and further columns."""
        values = Values(*(row[name] for name in Values.__struct_fields__))
        traffic = Traffic(**{name: row[name] for name in COUNTERS})
        columns = {name: value for name, value in row.items() if name not in _GIVEN}
        return cls(moment, values, traffic, columns, model, view)

    def row(self, rank: int, network_bytes: int) -> dict[str, Any]:
        """The row of node ``rank``, when all nodes together had sent ``network_bytes``."""
        return {
            "node": rank,
            **structs.asdict(self.values),
            "network_bytes": network_bytes,
            "moment": moment_text(self.moment, self.values.round),
            **{name: getattr(self.traffic, name) for name in COUNTERS},
            **self.columns,
        }


_CONTAINERS, _NUMBERS = (dict, list, tuple), {int, float, bool, type(None)}


def _recordable(value: Any, left: int, depth: int) -> tuple[Any, int]:
    """A value that a segment can hold, with clean text. ``left`` values and ``depth`` levels of containers are accepted;
    returns how many values are left. ValueError for anything else."""
    left -= 1
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        if len(value) > left:
            left = -1
        elif set(map(type, items)) <= _NUMBERS:  # the most frequent ones
            left -= len(value)
        elif not depth:
            raise ValueError(f"a row with values nested deeper; accepted: {MAX_DEPTH} levels")
        else:
            checked = []
            for item in items:
                if type(item) in _NUMBERS:
                    left -= 1
                else:
                    item, left = _recordable(item, left, depth - 1)
                checked.append(item)
            items = checked
        if isinstance(value, dict):
            keys = [_key(key) for key in value]
            left -= sum(len(key) // 8 for key in keys if isinstance(key, str))
            value = dict(zip(keys, items, strict=True))
        else:
            value = items
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ValueError(f"a row with a text of {len(value):,} characters; accepted: {MAX_TEXT:,}")
        value, left = clean(value), left - len(value) // 8
    elif type(value) not in _NUMBERS and not isinstance(value, int | float):  # such as a number of NumPy
        kind = type(value).__name__
        raise ValueError(f"a row with a {kind}; accepted: numbers, text, None, lists, mappings")
    if left < 0:
        raise ValueError(f"a row with more than {MAX_VALUES:,} values; accepted: fewer")
    return value, left


def _key(key: Any) -> Any:
    if isinstance(key, str):
        return line(key)
    if isinstance(key, int):
        return key
    raise ValueError(f"a row with a key that is {type(key).__name__}; accepted: text and whole numbers")


class Done(ProtocolMessage):
    """The node's protocol has returned after this many rounds, which are over because the node ``leaves``."""

    round: Count
    leaves: bool = False


class FinalModel(ProtocolMessage):
    """The node ends, with the model of its last row (its vectors, float32)."""

    round: Count
    model: bytearray
    private: Count | None  # bytes of memory that its process shared with no other
    has_mixed: bool = True  # counted for ``evaluation.of: mixed``


class Marked(ProtocolMessage):
    """The node has taken a snapshot, and all earlier messages have left; ``sent`` counts them by receiver."""

    number: Number
    sent: dict[Rank, Count]


class Saved(ProtocolMessage):
    """The node's file of checkpoint ``number`` (None: its restart file) is written, or can't be written
    (``error``)."""

    number: Number | None
    round: Count
    time_s: Seconds
    error: Line | None = None

    def __post_init__(self) -> None:
        self.error = None if self.error is None else line(self.error)


class CurrentRound(ProtocolMessage):
    """The node is in this round (the answer to :class:`Find` about ``rank``)."""

    rank: Rank
    round: Count


class Crashing(ProtocolMessage):
    """The node kills itself now: crash ``number`` in its list of planned crashes."""

    number: Number


_EVENTS = {"begins", "checkpoint", "diverged", "malformed", "refused", "slow", "unread"}
"""The events that nodes report. All others are the coordinator's own."""


class Event(ProtocolMessage):
    """An entry for the event log."""

    kind: str
    text: Line

    def __post_init__(self) -> None:
        if self.kind not in _EVENTS:
            raise ValueError(f"an event {line(self.kind, 60)!r}; accepted: {', '.join(sorted(_EVENTS))}")
        self.text = line(self.text)


class Unreachable(ProtocolMessage):
    """The node can't reach a peer, or the peer is silent."""

    rank: Rank
    why: Line

    def __post_init__(self) -> None:
        self.why = line(self.why)


class Reached(ProtocolMessage):
    """The node has reached a peer that it had been told it is cut off from (:class:`Lost`)."""

    rank: Rank


class Failed(ProtocolMessage):
    """The node failed, with the arguments of RunFailed."""

    text: Line
    round: Count | None
    traceback: Text

    def __post_init__(self) -> None:
        self.text, self.traceback = line(self.text), clean(self.traceback)[-MAX_TEXT:]

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
    | Reached
    | Marked
    | Saved
)
"""Messages from a node to the coordinator."""


class Arrival(ProtocolMessage):
    """Instructions for a node that starts while the others run."""

    first: Count  # its first round
    together: Sequence[tuple[Rank, Count]]  # (rank, round): from this round on, the two wait for each other
    start_from: StartFrom
    tick: Count  # the first instant of the time grid at which it is recorded
    traffic: Traffic  # the last report of the process before it; the counters continue from there


class Go(ProtocolMessage):
    """The run starts, or started, at this instant of the machine's monotonic clock."""

    start: float
    arrival: Arrival | None = None


class Finish(ProtocolMessage):
    """The run is over for a node. It takes the last ``checkpoint``, if any, and is recorded once more if
    ``row``."""

    reason: str
    checkpoint: Number | None = None
    row: bool = False


class Lost(ProtocolMessage):
    """A peer is dead, or considered dead. ``incarnation`` has ended; None if the peer may still run. If it is ``apart``, it
    takes part without this node, since the two can't reach each other: the node tries again, and says when it has
    (:class:`Reached`)."""

    rank: Rank
    why: Text
    incarnation: Number | None = None
    apart: bool = False


class Find(ProtocolMessage):
    """A node starts or returns: answer with your round (:class:`CurrentRound`)."""

    rank: Rank
    restarted: bool


class Meet(ProtocolMessage):
    """Wait for each of these peers from a round on: (rank, round). Continue in round ``first``, if given."""

    together: list[tuple[Rank, Count]]
    first: Count | None = None


class Expect(ProtocolMessage):
    """All nodes have taken a snapshot. ``sent`` counts their earlier messages to this node, by sender."""

    number: Number
    sent: dict[Rank, Count]


class Command(ProtocolMessage):
    """A short command. "leave": leave the run after the round. "stay": do not leave after all, unless the rounds
    are over. "snapshot": others have taken their snapshots for this checkpoint (sent to a node whose rounds are
    over). "settled": this checkpoint and all earlier ones are complete or abandoned. "read": a row with a model has
    been read."""

    what: Literal["leave", "stay", "snapshot", "settled", "read"]
    number: Number = 0


class Addresses(ProtocolMessage):
    """Nodes listen at these addresses: (rank, host, port)."""

    nodes: list[tuple[Rank, str, int]]


ToNode = Go | Finish | Lost | Find | Meet | Expect | Command | Addresses
"""Messages from the coordinator to a node."""


class Fork(ProtocolMessage):
    """Start the process of a node."""

    rank: Rank
    incarnation: Number  # number of earlier starts
    crashes: Sequence[int]  # the rounds after which it kills itself
    key: bytes | None = None  # its private key and certificate (PEM), if nodes use TLS
    files: dict[str, bytes] = {}  # those from which it resumes, by path in the run's folder


class Tell(ProtocolMessage):
    """A message for a node."""

    rank: Rank
    message: ToNode


class Signal(ProtocolMessage):
    """Send the process of a node a signal."""

    rank: Rank
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
    sources: dict[str, str] = {}  # gossamer's own, likewise, for a worker on another machine


class RunOver(ProtocolMessage):
    """The run is over for a worker: how it ended, and why, if one of its nodes was the cause."""

    how: Line
    fault: Line = ""

    def __post_init__(self) -> None:
        self.how, self.fault = line(self.how), line(self.fault)


class Dismissed(ProtocolMessage):
    """The worker is refused."""

    why: Line

    def __post_init__(self) -> None:
        self.why = line(self.why)


class Acknowledge(ProtocolMessage):
    """This many messages of a :class:`~gossamer.runtime.processes.channel.Session` have arrived."""

    count: Count


ToPool = Fork | Tell | Signal
"""Commands about the processes of nodes."""
ToWorker = ToPool | Job | Acknowledge | RunOver | Dismissed
"""Messages from the coordinator to a worker."""


class Exited(ProtocolMessage):
    """A node's process has ended, and all of its messages have arrived; or it can't be started."""

    how: Line

    def __post_init__(self) -> None:
        self.how = line(self.how)


FromProcess = FromNode | Exited


class NodeReport(ProtocolMessage):
    """A message from a node or about its process; from another machine, with the files to which it refers."""

    rank: Rank
    incarnation: Number
    message: FromProcess
    files: dict[Line, bytes] = {}  # by their path in the run's folder


class _Machine(TypedDict):
    host: Line
    architecture: Line
    cpus: Count | None
    gpus: Count


class _Numerics(TypedDict):
    processor: Line
    kernels: Line
    mkl: Line | None
    settings: Names


class Computer(TypedDict):
    """The machine of a worker and what is installed there, as in ``environment.json``
    (:func:`~gossamer.results.folder.this_computer`), with the packages that the experiment names."""

    python: Line
    platform: Line
    machine: _Machine
    numerics: _Numerics
    packages: Names


class Preparing(ProtocolMessage):
    """What takes long while the worker prepares its :class:`Job`, besides loading the experiment."""

    what: Literal["compiles kernels"]


class Prepared(ProtocolMessage):
    """The worker has prepared its :class:`Job`, or found no problem (:class:`Check`). From another machine, it says what
    computes there, and which data could not be compared with the coordinator's."""

    computer: Computer | None = None
    not_compared: Lines = []

    def __post_init__(self) -> None:
        self.computer, self.not_compared = _in_lines(self.computer), lines(self.not_compared)


class Differs(ProtocolMessage):
    """The worker has other own code or other data than the coordinator: these modules and files."""

    what: Lines

    def __post_init__(self) -> None:
        self.what = lines(self.what)


class Refused(ProtocolMessage):
    """The experiment can't be run."""

    problems: Lines

    def __post_init__(self) -> None:
        self.problems = lines(self.problems)


class Leaving(ProtocolMessage):
    """The worker was stopped by its user, and ends with its nodes."""


FromWorker = NodeReport | Preparing | Prepared | Differs | Refused | Leaving | Acknowledge
"""Messages from a worker to the coordinator."""


class JoinRequest(ProtocolMessage):
    """A worker's first message on a connection. Both ends prove that they know the token (``security``)."""

    version: Annotated[str, Meta(max_length=64)]  # of gossamer
    session: Annotated[str, Meta(max_length=64)]  # the name of a new or existing session
    slots: Annotated[int, Meta(ge=1, le=10**6)]
    received: Count  # messages of this session that have arrived
    nonce: bytes
    proof: bytes


class Welcome(ProtocolMessage):
    """The worker has joined, or is back."""

    proof: bytes  # the coordinator's
    received: Count  # messages of this session that have arrived
    clock: float  # the coordinator's monotonic clock


class NotAdmitted(ProtocolMessage):
    """The worker can't join. Without the coordinator's proof, anyone may have said so."""

    why: Line
    proof: bytes = b""

    def __post_init__(self) -> None:
        self.why = line(self.why)


ToJoining = Welcome | NotAdmitted
"""Messages from the coordinator to a worker that joins."""
