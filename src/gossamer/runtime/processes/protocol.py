"""The messages between the processes of one run, except those between nodes (``transport``).

::

    launcher      the process of the user: ``gossamer run``
    coordinator   decides and records; a process next to the launcher
    worker        forks the nodes of its slots, and relays between them and the coordinator
    node          one node of the experiment

Each message is a :class:`msgspec.Struct`. On a channel it is a msgpack array that begins with the name of its
class; anything that does not have exactly the fields and types below is refused (:mod:`gossamer.runtime.processes.channel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

StartFrom = Literal["checkpoint", "initial", "neighbor"]
"""As :data:`gossamer.faults.StartFrom`. (This module is imported before all that takes long.)"""
Moment = int | tuple[str, int] | str
"""As :data:`gossamer.runtime.barrier.Moment`."""


class Message(msgspec.Struct, tag=True, array_like=True):
    """Anything that one process of a run says to another."""


# --- node -> coordinator


class Ready(Message):
    """The node accepts connections and waits for :class:`Go`."""


class Progress(Message):
    """The node has completed this many rounds, by this second of its clock."""

    round: int
    time_s: float


class TimeUp(Message):
    """The node's clock has reached ``stop.time_s``."""


class Row(Message):
    """The node was recorded. ``slot`` says where in the shared memory its model is; None: nowhere."""

    moment: Moment
    row: dict[str, Any]
    slot: int | None


class View(Message):
    """The ranks that the node knew at an evaluation point, where neighbours are sampled."""

    moment: Moment
    round: int
    ranks: list[int]


class Done(Message):
    """The node's protocol has returned after this many rounds."""

    round: int


class Final(Message):
    """The node has handed in its last model and ends; ``private`` is the memory that it shared with no other, bytes."""

    round: int
    private: int | None


class Marked(Message):
    """The node has taken snapshot ``number``: all messages from before have left, and ``ranks`` were told."""

    number: int
    ranks: list[int]


class Saved(Message):
    """The node's file of checkpoint ``number`` is written."""

    number: int
    round: int
    time_s: float


class Broken(Message):
    """The connection to ``peer`` broke after the node had taken snapshot ``number``."""

    number: int
    peer: int


class At(Message):
    """The node is in this round (the answer to :class:`Find` about ``rank``)."""

    rank: int
    round: int


class Crash(Message):
    """The node kills itself now, as planned crash ``number`` of its list says."""

    number: int


class Idle(Message):
    """Nothing but a message could wake the node: its messages so far, and what it waits for. None: it is busy again."""

    sent: int
    received: int
    waits: list[str] | None


class Event(Message):
    """Something for the record of events."""

    kind: str
    text: str


class Unreachable(Message):
    """The node can't reach a peer."""

    rank: int
    why: str


class Reachable(Message):
    """The node reaches a peer again."""

    rank: int


class Failed(Message):
    """The node failed."""

    text: str
    round: int
    trace: str


FromNode = (
    Ready
    | Progress
    | TimeUp
    | Row
    | View
    | Done
    | Final
    | Marked
    | Saved
    | Broken
    | At
    | Crash
    | Idle
    | Event
    | Unreachable
    | Reachable
    | Failed
)


# --- coordinator -> node


class Arrival(Message):
    """How a node takes part that comes, or comes back, while the others run.

    Args:
        first: the round that it begins with.
        together: (rank, round): from that round on it and another node wait for each other.
        start_from: the model that it begins with.
        tick: the first instant of the time grid at which it is recorded.
        traffic: its counters in its last row.
        meet: the ranks that it asks for the round to begin with, where nobody has told it.
    """

    first: int
    together: Sequence[tuple[int, int]]
    start_from: StartFrom
    tick: int
    traffic: dict[str, int]
    meet: Sequence[int] | None = None


class Go(Message):
    """The run starts, or started, at this instant of the machine's monotonic clock."""

    start: float
    arrival: Arrival | None = None


class Finish(Message):
    """The run is over: take checkpoint ``checkpoint`` if there is one, and record once more if ``row``."""

    reason: str
    checkpoint: int | None = None
    row: bool = False


class Lost(Message):
    """A peer is dead, or taken for dead. ``incarnation`` is the one that is over; None where it may run. Without a reason
    the transport knows, and looks for the peer."""

    rank: int
    why: str | None
    incarnation: int | None = None


class Snapshot(Message):
    """Other nodes have taken snapshot ``number``; for a node whose rounds are over."""

    number: int


class Expect(Message):
    """All nodes have taken snapshot ``number``, and ``ranks`` have sent messages to this one."""

    number: int
    ranks: list[int]


class Kept(Message):
    """Checkpoint ``number`` is complete."""

    number: int


class Drop(Message):
    """Checkpoint ``number`` is given up."""

    number: int


class Leave(Message):
    """Leave the run in order."""


class Find(Message):
    """A node comes, or comes back: say which round you are in."""

    rank: int
    restarted: bool


class Meet(Message):
    """Wait for a peer from this round on."""

    rank: int
    since: int


class Met(Message):
    """Go on in round ``first``, together with the others from these rounds on."""

    first: int
    together: list[tuple[int, int]]


class Slots(Message):
    """This many nodes of the machine may compute at once."""

    count: int


class Consumed(Message):
    """The oldest snapshot of the node's model was read: its slot is free."""


class Found(Message):
    """A peer that was lost is there again (told by a node without a coordinator)."""

    rank: int


class MeetAgain(Message):
    """Agree with a peer on the round to go on with (told by a node without a coordinator)."""

    rank: int


ToNode = (
    Found
    | MeetAgain
    | Go
    | Finish
    | Lost
    | Snapshot
    | Expect
    | Kept
    | Drop
    | Leave
    | Find
    | Meet
    | Met
    | Slots
    | Consumed
)


# --- launcher -> coordinator


class Prepare(Message):
    """Load and check an experiment (YAML)."""

    experiment: str


class Run(Message):
    """Run what was prepared, recording into a folder, from its newest checkpoint if ``resume``."""

    folder: str
    resume: bool


class Stop(Message):
    """The user asks the run to end in order."""


ToCoordinator = Prepare | Run | Stop


# --- coordinator -> launcher


class Refused(Message):
    """The experiment can't be run."""

    problems: list[str]


class Prepared(Message):
    """The experiment can be run; its description (``Setup.description``), and the lengths of its flat vectors."""

    description: dict[str, Any]
    parameters: int
    buffers: int


class RunProgress(Message):
    """Rounds that all nodes together have completed, by this second of the nodes' clock."""

    rounds: int
    time_s: float


class NewRow(Message):
    """A row was recorded."""

    row: dict[str, Any]


class Say(Message):
    """Something to show to the user."""

    text: str


class Ended(Message):
    """The run is over. ``failure`` has the arguments of :class:`~gossamer.errors.RunFailed`; ``private`` is the memory that
    nodes shared with no other process, bytes: mean and maximum."""

    reason: str
    failure: dict[str, Any] | None
    private: dict[str, float] | None


ToLauncher = Refused | Prepared | RunProgress | NewRow | Say | Ended
