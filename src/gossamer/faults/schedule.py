"""All faults of an experiment together: what happens when. Both engines carry out the same schedule."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count
from operator import attrgetter

from gossamer.errors import BadInput
from gossamer.faults.fault import Disturbance, Fault, RoundCrash, Slowness, Spell, StartFrom
from gossamer.faults.freeze import Standstill
from gossamer.faults.network import disturbed
from gossamer.network import ComputeProfile, Network, Slowdowns
from gossamer.network.slowdowns import Window

AWAY = ("crash", "leave", "join")
"""The spells in which a node is away."""
OVER = {"freeze": "thaw", "partition": "healed", "loss": "loss-over", "slowed": "full-speed"}
"""What the end of a spell is called; of those in which a node is away it's "return"."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something happens.

    Args:
        time_s: when, seconds of the engine's clock.
        what: "crash", "leave" or "join" (a node is not there from now on), "return", "freeze" or "thaw", which engines
            carry out; what else there is, is only for the record.
        node: to whom; None where it is not about one node.
        start_from: what a node begins with that returns.
        detail: what there is to say, for the record.
    """

    time_s: float
    what: str
    node: int | None = None
    start_from: StartFrom = "checkpoint"
    detail: str = ""


class Schedule:
    """The faults of an experiment, for so many nodes.

    Args:
        faults: as the experiment lists them.
        nodes: number of nodes.
        seed: the experiment's seed.

    Attributes:
        hit: the nodes that may be away at some time.
        at_rounds: crashes of a node as soon as it has completed so many rounds, by node.
        asks_neighbors: whether a node may begin with a neighbour's model.
        settled_s: from when on nothing happens but what goes on for ever; ``math.inf`` where nothing does.

    Raises:
        BadInput: for faults that don't fit so many nodes; names the field.
    """

    def __init__(self, faults: Sequence[Fault], nodes: int, seed: int) -> None:
        self._described = [(fault, (nodes, seed, f"faults.{number}")) for number, fault in enumerate(faults)]
        self._nodes = nodes
        self.hit = frozenset(rank for fault, where in self._described for rank in fault.hit(*where))
        self.at_rounds: dict[int, list[RoundCrash]] = {}
        self._slowness: list[Slowness] = []
        self._freezes: list[Spell] = []
        self._disturbances: list[Disturbance] = []
        for fault, where in self._described:
            for crash in fault.at_rounds(*where):
                self.at_rounds.setdefault(crash.node, []).append(crash)
            self._slowness += fault.slowness(*where)
            self._disturbances += fault.disturbances(*where)
            if fault.freezes:
                self._freezes += fault.spells(*where)
            next(fault.spells(*where), None)  # which refuses what doesn't fit
        self.asks_neighbors = any(
            "neighbor" in (getattr(fault, "start_from", None), getattr(fault, "restart_from", None))
            for fault, _ in self._described
        )
        self.settled_s = self._settled() if any(fault.endless for fault in faults) else math.inf

    def _settled(self) -> float:
        passing = (fault.spells(*where) for fault, where in self._described if not fault.endless)
        ends = [time_s for spells in passing for spell in spells for time_s in (spell.from_s, spell.to_s)]
        return max((time_s for time_s in ends if math.isfinite(time_s)), default=0.0)

    def __bool__(self) -> bool:
        return bool(self._described)

    def agenda(self) -> Agenda:
        """What happens when, from the start on."""
        spells = (fault.spells(*where) for fault, where in self._described)
        return Agenda(merge(*spells, key=attrgetter("from_s")))

    def network(self, base: Network, *, frozen: bool) -> Network:
        """What the faults make of a network.

        Args:
            base: the network.
            frozen: whether nothing leaves and reaches a node that stands still because the network says so.
        """
        still = [
            Standstill([each.node], self._nodes, each.from_s, each.to_s)
            for each in self._freezes
            if frozen and each.node is not None
        ]
        return disturbed(base, [*self._disturbances, *still])

    def compute(self, base: ComputeProfile, *, frozen: bool) -> ComputeProfile:
        """What the faults make of a settled compute profile.

        Args:
            base: the profile.
            frozen: whether a computation gets no further on a node that stands still because the profile says so.

        Raises:
            BadInput: for a profile that depends on the time by a rule of its own.
        """
        still = [
            Slowness(each.node, each.from_s, each.to_s, math.inf)
            for each in self._freezes
            if frozen and each.node is not None
        ]
        windows = tuple(
            # (Not validated: a window of an experiment has an end, and a finite factor.)
            Window.model_construct(from_s=each.from_s, to_s=each.to_s, factor=each.factor, ranks=(each.node,))
            for each in (*self._slowness, *still)
        )
        if not windows:
            return base
        if isinstance(base, Slowdowns):
            return base.model_copy(update={"windows": (*base.windows, *windows)})
        if base.depends_on_time:
            raise BadInput(
                f"compute: {base.name_of()}, which depends on the time, with faults that slow nodes down or freeze them;"
                " accepted: slowdowns, or a profile that doesn't depend on the time"
            )
        return Slowdowns.model_construct(base=base, windows=windows, random=None)

    def factor(self, rank: int, time_s: float) -> float:
        """How many times as long a node's computations take at some time."""
        hit = (each for each in self._slowness if each.node == rank and each.from_s <= time_s < each.to_s)
        return math.prod(each.factor for each in hit)


class Agenda:
    """The events of a run in the order of time, and who is away.

    A node is away as long as one of its spells says so, however many do; what it begins with when it returns, the last
    of them says. What nobody foresaw is added on the way (:meth:`add`).

    Args:
        spells: by ``from_s``; may be endless.
    """

    def __init__(self, spells: Iterator[Spell]) -> None:
        self._spells = spells
        self._heap: list[tuple[float, bool, int, int, Spell]] = []  # its bool: whether the spell ends then
        self._latest: Spell | None = None  # of those that were pulled
        self._numbers = count()
        self._active: Counter[tuple[int, str]] = Counter()
        self._for_good: set[int] = set()
        self._pull()

    @property
    def next_s(self) -> float:
        """When something happens next; ``math.inf`` is never."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now_s: float) -> Iterator[Event]:
        """What happens up to now, and has not been asked for before."""
        while self._heap and self._heap[0][0] <= now_s:
            time_s, over, _, _, spell = heapq.heappop(self._heap)
            if not over:
                self._push(spell.to_s, True, spell)
            if spell is self._latest:
                self._pull()
            event = self._ended(spell, time_s) if over else self._began(spell, time_s)
            if event is not None:
                yield event

    def add(self, spell: Spell) -> None:
        """A spell that begins now or later."""
        self._push(spell.from_s, False, spell)

    def returns(self, node: int) -> bool:
        """Whether a node that is away will be back, as far as is known."""
        return self._active[node, "away"] > 0 and node not in self._for_good

    def _pull(self) -> None:
        self._latest = next(self._spells, None)
        if self._latest is not None:
            self._push(self._latest.from_s, False, self._latest)

    def _push(self, time_s: float, over: bool, spell: Spell) -> None:
        if math.isfinite(time_s):
            rank = -1 if spell.node is None else spell.node
            heapq.heappush(self._heap, (time_s, over, rank, next(self._numbers), spell))

    def _began(self, spell: Spell, time_s: float) -> Event | None:
        if spell.node is not None:
            state = spell.node, _state(spell)
            self._active[state] += 1
            if spell.kind in AWAY and math.isinf(spell.to_s):
                self._for_good.add(spell.node)
            if self._active[state] > 1:
                return None
        return Event(time_s, spell.kind, spell.node, spell.start_from, spell.detail)

    def _ended(self, spell: Spell, time_s: float) -> Event | None:
        if spell.node is not None:
            state = spell.node, _state(spell)
            self._active[state] -= 1
            if self._active[state]:
                return None
        what = "return" if spell.kind in AWAY else OVER.get(spell.kind, f"{spell.kind}-over")
        return Event(time_s, what, spell.node, spell.start_from)


def _state(spell: Spell) -> str:
    return "away" if spell.kind in AWAY else spell.kind
