"""What the nodes of a run know of one another where no supervisor watches over them.

Each node has a :class:`Roster`, and hands it on over its connections. To take in another's roster is to keep, of each
node, what is newest; so it makes no difference what is heard in which order or how often, and all who are connected
know the same after as many steps as they are apart.

A node speaks for itself. Others say of it only that it is lost, and that holds until it hears of it and says otherwise
(as in SWIM: Das, Gupta and Motivala, DSN 2002).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from gossamer.messages import FrameError

DIGEST_BYTES = 16
MOST_ENTRIES = 150
"""Entries in one report, which so stays below 4 KiB: those that changed last, and some of the others in turn."""
ENDS = ("time", "stopped")
"""Why a run may end for all of its nodes at once."""
LEAP = 1000
"""By how much more often than is known a node may have contradicted, when another one says so."""
AHEAD_S = 86400
"""Seconds by which a process may have been started in the future, since clocks differ: incarnations are such times."""
_HIGHEST = 2**32 - 1


class State(enum.IntEnum):
    """How a node is doing; of two that are said of it at once, the later one here counts."""

    RUNNING = 0
    LOST = 1  # it can't be reached, or has failed
    LEFT = 2  # it was asked to stop
    DONE = 3  # it has completed its rounds, and answers until all have


class Entry(NamedTuple):
    """What is known of a node; the greatest (but for ``born``) is the newest.

    Args:
        incarnation: of its process; one that is started later has a higher one.
        number: how often it has contradicted others.
        state: how it is doing.
        round: rounds that it has completed.
        born: the lowest incarnation of it that anybody knew of who went, at that moment; until then the highest there is.
    """

    incarnation: int
    number: int
    state: State
    round: int
    born: int

    def newer(self, other: Entry) -> bool:
        """Whether it is newer than another one."""
        return self[:4] > other[:4]


@dataclass(frozen=True)
class Report:
    """What one node tells another.

    Args:
        digest: of the experiment that it carries out (16 bytes).
        end: why the run is over, for all, if it is: "rounds", as far as whoever says it knows, or one of :data:`ENDS`.
        entries: some of its roster.
    """

    digest: bytes
    end: str | None
    entries: Mapping[int, Entry]

    def pack(self) -> bytes:
        """As it travels."""
        entries = [[rank, *entry] for rank, entry in self.entries.items()]
        packed: bytes = msgpack.packb([self.digest, self.end, entries])
        return packed

    @classmethod
    def unpack(cls, data: bytes, nodes: int) -> Report:
        """What a peer says.

        Raises:
            FrameError: for anything that a peer would not have said.
        """
        try:
            digest, end, rows = msgpack.unpackb(data)
            entries = dict(_entry(row, nodes) for row in rows)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FrameError(f"sent a report that can't be read: {error}") from None
        if not isinstance(digest, bytes) or end not in (None, "rounds", *ENDS):
            raise FrameError("sent a report without digest, or with an end that there is not")
        return cls(digest, end, entries)


def _entry(row: Any, nodes: int) -> tuple[int, Entry]:
    rank, incarnation, number, state, round, born = row
    for value in row:
        if type(value) is not int or not 0 <= value <= _HIGHEST:
            raise ValueError(f"{value!r} in an entry; accepted: 0 to {_HIGHEST}")
    if rank >= nodes:
        raise ValueError(f"rank {rank}; accepted: 0 to {nodes - 1}")
    return rank, Entry(incarnation, number, State(state), round, born)


def _leaps(entry: Entry, known: Entry) -> bool:
    """Whether a node would have contradicted far more often than is known: its number would soon be used up."""
    return entry.incarnation == known.incarnation and entry.number > known.number + LEAP


class Roster:
    """What one node knows of all; starts with knowing itself.

    Args:
        rank: this node.
        nodes: how many there are.
        incarnation: of this node's process.
        digest: of its experiment.
        clock: seconds since 1970.

    Attributes:
        end: why the run is over for all, once it is.
        superseded: whether another process of this rank was started later.
    """

    def __init__(
        self,
        rank: int,
        nodes: int,
        incarnation: int,
        digest: bytes,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._nodes, self._digest, self._clock = rank, nodes, digest, clock
        # Those that changed last are at the end.
        self._entries = {rank: Entry(incarnation, 0, State.RUNNING, 0, _HIGHEST)}
        self._turn = 0
        self.end: str | None = None
        self.superseded = False

    @property
    def own(self) -> Entry:
        """This node's entry."""
        return self._entries[self._rank]

    @property
    def again(self) -> bool:
        """Whether another process of this rank was there when a node went."""
        return self.own.born < self.own.incarnation

    def __getitem__(self, rank: int) -> Entry | None:
        """What is known of a node; None if nothing."""
        return self._entries.get(rank)

    def go(self) -> None:
        """This node goes, with those who are there now: who is started after this comes later."""
        for rank, entry in self._entries.items():
            self._entries[rank] = entry._replace(born=min(entry.born, entry.incarnation))

    def say(self, *, state: State | None = None, round: int | None = None) -> None:
        """This node is doing otherwise."""
        own = self.own
        state = own.state if state is None else state
        self._put(self._rank, own._replace(state=state, round=own.round if round is None else round))

    def lose(self, rank: int) -> bool:
        """This node can't reach another one; whether that is news."""
        known = self._entries.get(rank, Entry(0, 0, State.RUNNING, 0, _HIGHEST))
        if rank == self._rank or known.state is not State.RUNNING:
            return False
        self._put(rank, known._replace(state=State.LOST))
        return True

    def take(self, report: Report, by: int | None = None) -> dict[int, State]:
        """Take in what another one knows; gives those who are doing otherwise than was known.

        What is not plausible is left out. It is no reason to refuse who says it, who may have it from others.

        Args:
            report: what it knows.
            by: the node that says it, whose word on itself is taken; None is none of those that it speaks of.

        Raises:
            FrameError: where it says of itself what can't be.
        """
        changed = {}
        latest = int(self._clock()) + AHEAD_S
        for rank, entry in report.entries.items():
            if entry.incarnation > latest:
                if rank == by:
                    raise FrameError(
                        "says that it was started more than a day from now, by this machine's clock"
                    )
                continue
            known = self._entries.get(rank)
            if known is not None and rank != by and _leaps(entry, known):
                continue
            if known is not None:
                born = min(known.born, entry.born)
                known = self._entries[rank] = known._replace(born=born)
                if not entry.newer(known):
                    continue
                entry = entry._replace(born=born)
            if rank == self._rank:
                self._contradict(entry)
                continue
            anew = known is None or (entry.incarnation, entry.state) != (known.incarnation, known.state)
            if anew:
                changed[rank] = entry.state
                self._put(rank, entry)
            else:
                self._entries[rank] = entry
        # Whoever has rounds left has not been waited for (the others took it for lost), and goes on.
        if self.end is None and (report.end in ENDS or self.own.state is not State.RUNNING):
            self.end = report.end
        return changed

    def _contradict(self, entry: Entry) -> None:
        own = self.own
        if entry.incarnation > own.incarnation:
            self.superseded = True
        elif own.state is not State.LOST:
            self._put(self._rank, own._replace(number=min(entry.number + 1, _HIGHEST)))

    def report(self) -> Report:
        """What to tell the others now; what does not fit comes the next time."""
        newest = list(self._entries)[::-1]
        if len(newest) > MOST_ENTRIES:
            always, others = newest[: MOST_ENTRIES // 2], newest[MOST_ENTRIES // 2 :]
            count = MOST_ENTRIES - len(always)
            self._turn = (self._turn + count) % len(others)
            newest = [*always, *(others + others)[self._turn : self._turn + count]]
        chosen = dict.fromkeys([self._rank, *newest])
        return Report(self._digest, self.end, {rank: self._entries[rank] for rank in chosen})

    def of_state(self, *states: State) -> list[int]:
        """The ranks that are doing so, ascending."""
        return sorted(rank for rank, entry in self._entries.items() if entry.state in states)

    def rounds(self) -> dict[int, int]:
        """The rounds that those who are there have completed, by rank, as far as is known."""
        there = self.of_state(State.RUNNING, State.DONE)
        return {rank: self._entries[rank].round for rank in there}

    def unheard(self) -> list[int]:
        """The ranks of which nothing is known, ascending."""
        return [rank for rank in range(self._nodes) if rank not in self._entries]

    def over(self) -> bool:
        """Whether no node has anything to do any more."""
        return len(self._entries) == self._nodes and not self.of_state(State.RUNNING)

    def next_living(self, gone: Iterable[int]) -> int | None:
        """The next rank, going round, that is there as far as is known; None where there is no other one.

        Args:
            gone: ranks that are not there, whatever is said of them.
        """
        away = set(gone)
        for rank in self._after():
            entry = self._entries.get(rank)
            if rank not in away and (entry is None or entry.state in (State.RUNNING, State.DONE)):
                return rank
        return None

    def _after(self) -> Iterator[int]:
        return ((self._rank + step) % self._nodes for step in range(1, self._nodes))

    def _put(self, rank: int, entry: Entry) -> None:
        self._entries.pop(rank, None)
        self._entries[rank] = entry
