"""The rules of a node's life, which are the same under both engines: what a fault does to a node in its state, who takes
part and who counts as away, from which round on a node takes part, and what the events say.

Nothing here knows an engine, a clock or a process. The coordinator of real processes and the simulator ask these rules,
and execute the answers: one with signals and messages to every node that is concerned, the other in virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from gossamer.errors import RunFailed
from gossamer.faults import FaultEvent, FaultEventQueue, StartFrom
from gossamer.faults.fault import AWAY
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.rejoin import earliest_round

MOST_REASONS = 6
"""Reasons that the error of a run without nodes names."""

# --- what a fault does to a node

State = Literal["away", "here", "leaving", "going"]
"""A node is away if it does not run. It is "leaving" if it was told to leave after its round, and "going" once this
can't be taken back: its rounds are over, or it is being killed. A frozen node is one of the last three."""
Effect = Literal[
    "nothing", "record", "keep away", "crash", "leave", "freeze", "thaw", "start", "start when gone", "stay"
]
"""What an engine does to a node, or about it."""
_EFFECTS: dict[str, Effect] = {
    "join": "keep away",
    "crash": "crash",
    "leave": "leave",
    "freeze": "freeze",
    "thaw": "thaw",
}
_AT_RETURN: dict[State, Effect] = {
    "away": "start",
    "here": "nothing",
    "leaving": "stay",
    "going": "start when gone",
}


def effect(what: str, state: State) -> Effect:
    """What a :class:`~gossamer.faults.FaultEvent` does to a node. Nothing but its return happens to a node that is away. A
    node is away as long as its faults say so, and no longer: the end of an absence lets a node stay that has not
    left yet, with its model, and starts a node again whose rounds are over as soon as it has left."""
    if what == "return":
        return _AT_RETURN[state]
    return "nothing" if state == "away" else _EFFECTS.get(what, "record")


def earliest(completed: int, last: int | None, *, gathers: bool, joins: bool, restarted: bool) -> int:
    """The earliest round in which a node that joins or returns can take part, after it has completed some. ``last`` is the
    number of rounds of the run, if that is fixed; ``joins``: it takes part for the first time; ``restarted``: it
    begins with a saved or another model, and does not continue where it stopped. A node that continues does not repeat
    the round in which it was thought dead, nor does one that was restarted if nodes wait for each other
    (``gathers``)."""
    return earliest_round(completed, last, again=not restarted or (gathers and not joins))


# --- who takes part


class Membership:
    """The nodes that take part in a run. Engines tell it what has happened to a node, and when it is noticed: at once by a
    worker, or after a time of detection.

    Attributes:
        up: the ranks that run, frozen nodes included.
        absent: the ranks that have not joined yet.
        lost: the ranks without which the others go on, because they are absent, have left, or count as dead.
        why: the reason, for each rank that is absent, gone or lost, in the order in which they went.
        restarts: the nodes to start as soon as their last incarnation is gone, each with the model to start from."""

    def __init__(self, up: Iterable[int]) -> None:
        self.up, self.absent, self.lost = set(up), set[int](), set[int]()
        self.why: dict[int, str] = {}
        self.restarts: dict[int, StartFrom] = {}

    def keep_away(self, rank: int, why: str) -> None:
        """A node is absent from the start of the run."""
        self.up.discard(rank)
        self.absent.add(rank)
        self.lost.add(rank)
        self.why[rank] = why

    def take(self, fault: FaultEvent, state: State) -> Effect:
        """What a fault does to a node (:func:`effect`), whose next start is noted. A new absence calls it off."""
        assert fault.node is not None
        what = effect(fault.what, state)
        if what in ("start", "start when gone"):
            self.restarts[fault.node] = fault.start_from
        elif fault.what in AWAY:
            self.restarts.pop(fault.node, None)
        return what

    def lose(self, rank: int, why: str) -> bool:
        """The others go on without a node. False if they do already."""
        if rank in self.lost:
            return False
        self.lost.add(rank)
        self.why.setdefault(rank, why)
        return True

    def find(self, rank: int) -> None:
        """The others wait for a node (again)."""
        self.absent.discard(rank)
        self.lost.discard(rank)
        self.why.pop(rank, None)

    def nobody(self, faults: FaultEventQueue) -> RunFailed | None:
        """The failure of a run in which no node takes part and none will."""
        if self.up or self.restarts or any(map(faults.returns, self.why)):
            return None
        whys = [*self.why.values()]
        if len(whys) > MOST_REASONS:
            whys[MOST_REASONS - 1 :] = [f"{len(whys) - MOST_REASONS + 1} more"]
        return RunFailed(f"no node is left: {'; '.join(whys)}")


# --- what the events say


class LifeEvent(NamedTuple):
    """An entry for the event log."""

    rank: int
    event: str
    text: str


def absent(rank: int) -> LifeEvent:
    """A node joins later."""
    return LifeEvent(rank, "absent", f"node {rank} has not joined yet")


def missing_since_checkpoint(rank: int) -> LifeEvent:
    """The checkpoint from which the run resumes lacks a node."""
    return LifeEvent(rank, "absent", f"node {rank} was lost before the run was resumed")


def lost(rank: int, round: int, how: str = "", *, planned: bool = True) -> LifeEvent:
    """A node has crashed, as planned by a fault, or has died. ``how`` its process ended is for the record."""
    text = f"node {rank} {'crashed' if planned else 'died'} in round {round}"
    return LifeEvent(rank, "lost", f"{text}: {how}" if how else text)


def left(rank: int, round: int) -> LifeEvent:
    """A node is gone, as it was told."""
    return LifeEvent(rank, "left", f"node {rank} left after round {round}")


def frozen(rank: int) -> LifeEvent:
    """A node has stopped, and may continue."""
    return LifeEvent(rank, "frozen", f"node {rank} is frozen")


def thawed(rank: int, first: int | None = None) -> LifeEvent:
    """A node continues. If it counted as dead, it takes part again from round ``first`` on. That is None if real processes
    have yet to find it out; then an event "returned" will say so."""
    text = f"node {rank} continues"
    return LifeEvent(rank, "thawed", text if first is None else f"{text}, and {_takes_part(first)}")


def back(rank: int, first: int, *, joins: bool) -> LifeEvent:
    """A node takes part, for the first time (``joins``) or again."""
    return LifeEvent(rank, "joined" if joins else "returned", f"node {rank} {_takes_part(first)}")


def apart(rank: int, why: str, *, waits: bool) -> LifeEvent:
    """Two nodes are cut off from each other. With ``waits``, a node waits for those that it does not hear."""
    what = (
        "wait for each other in vain, up to gather.timeout_s a round" if waits else "go on without each other"
    )
    return LifeEvent(rank, "unreachable", f"{why}; the two {what}")


def together(rank: int, other: int, first: int | None) -> LifeEvent:
    """Two nodes that were cut off from each other reach each other again, and wait for each other from round ``first`` on,
    if the algorithm waits for messages."""
    text = f"node {rank} and node {other} reach each other again"
    since = "" if first is None else f", and wait for each other from round {first} on"
    return LifeEvent(rank, "reached", text + since)


def begins(rank: int, start_from: StartFrom, saved: Checkpoint | None) -> LifeEvent:
    """A node begins with a checkpoint, if it has one, or with another model."""
    model = "a neighbour's model" if start_from == "neighbor" else "its initial model"
    if saved is not None:
        model = f"its checkpoint of round {saved.round}"
    return LifeEvent(rank, "begins", f"node {rank} begins with {model}")


def _takes_part(first: int) -> str:
    return f"takes part from round {first} on"
