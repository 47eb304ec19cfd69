"""Nodes that come and go: at random, or as a file says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import merge
from itertools import count
from operator import attrgetter
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.faults.fault import Fault, Nodes, Spell, check_window, chosen, until
from gossamer.network.tables import read_number, read_records
from gossamer.randomness import generator

GOES = ("crash", "leave")


@register("fault", "churn")
class Churn(Fault):
    """Nodes come and go.

    At random: each of some nodes is there and away by turns, for times that are exponential and its own. Or by a schedule:
    a CSV file with the columns ``time_s,node,event``, where an event is crash, leave or join; a node whose first event is
    join is not there before.

    Args:
        nodes: at random: who: ranks, a number or a fraction of the nodes (drawn), or "all".
        mean_up_s: how long a node is there, on average, seconds.
        mean_down_s: how long it is away.
        by: how they go: "crash", or "leave" in good order.
        from_s: when it begins; all are there until then.
        to_s: from then on nobody goes any more, and who is away comes back in its time; null is never.
        restart_from: what nodes begin with that come back: their newest checkpoint (without one: the initial model), the
            initial model, or the model of a neighbour.
        path: the schedule, in place of ``nodes`` and the two means.
    """

    nodes: Nodes = "all"
    mean_up_s: PositiveFloat | None = None
    mean_down_s: PositiveFloat | None = None
    by: Literal["crash", "leave"] = "crash"
    from_s: NonNegativeFloat = 0.0
    to_s: PositiveFloat | None = None
    restart_from: Literal["checkpoint", "initial", "neighbor"] = "checkpoint"
    path: FilePath | None = None

    @model_validator(mode="after")
    def _random_or_given(self) -> Churn:
        check_window(self.from_s, self.to_s)
        means = (self.mean_up_s, self.mean_down_s)
        if None in means if self.path is None else means != (None, None):
            raise ValueError("mean_up_s and mean_down_s, or path")
        return self

    @property
    def endless(self) -> bool:
        return self.path is None and self.to_s is None

    def spells(self, nodes: int, seed: int, field: str) -> Iterator[Spell]:
        if self.path is not None:
            return iter(self._given(nodes, field))
        ranks = self.hit(nodes, seed, field)
        return merge(*(self._drawn(rank, seed, field) for rank in ranks), key=attrgetter("from_s"))

    def hit(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        if self.path is not None:
            return tuple(
                sorted({spell.node for spell in self._given(nodes, field) if spell.node is not None})
            )
        return chosen(self.nodes, nodes, seed, field)

    def _drawn(self, rank: int, seed: int, field: str) -> Iterator[Spell]:
        assert self.mean_up_s is not None
        assert self.mean_down_s is not None
        now = self.from_s
        for number in count():
            rng = generator(seed, f"{field}.churn", rank, number)
            gone = now + rng.exponential(self.mean_up_s)
            if gone >= until(self.to_s):
                return
            now = gone + rng.exponential(self.mean_down_s)
            yield Spell(gone, now, self.by, rank, self.restart_from)

    def _given(self, nodes: int, field: str) -> list[Spell]:
        assert self.path is not None
        spells: list[Spell] = []
        since: dict[int, tuple[float, str]] = {}  # who is away: from when on, and how it went
        last: dict[int, float] = {}
        for where, cells in read_records(self.path, f"{field}.path", ("time_s", "node", "event")):
            time_s, rank = read_number(cells["time_s"], where), read_number(cells["node"], where)
            node, event = int(rank), cells["event"].strip()
            if rank != node or node >= nodes:
                raise BadInput(f"{where}: node {cells['node']}; accepted: ranks 0 to {nodes - 1}")
            if time_s < last.get(node, 0.0):
                raise BadInput(
                    f"{where}: {time_s:g} s, after an event of node {node} at {last[node]:g} s; accepted: ascending"
                )
            if event not in (*GOES, "join"):
                raise BadInput(f"{where}: {event!r}; accepted: crash, join or leave")
            if event in GOES and node in since:
                raise BadInput(f"{where}: {event} of node {node}, which is away; accepted: join")
            if event == "join" and node not in since and node in last:
                raise BadInput(f"{where}: join of node {node}, which is there; accepted: crash or leave")
            if event == "join":
                from_s, by = since.pop(node, (0.0, "join"))
                if time_s > from_s:
                    spells.append(Spell(from_s, time_s, by, node, self.restart_from))
            else:
                since[node] = time_s, event
            last[node] = time_s
        spells += [Spell(from_s, math.inf, by, node) for node, (from_s, by) in since.items()]
        return sorted(spells, key=attrgetter("from_s", "node"))
