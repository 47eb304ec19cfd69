"""Selectors: which nodes a part of an experiment concerns, by rank, at random, or by their place in the graph of round 0.
docs/experiments.md ("Which nodes") describes all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import networkx as nx
from pydantic import Field, PositiveInt, model_validator

from gossamer.config.registry import Section
from gossamer.errors import BadInput
from gossamer.randomness import generator

if TYPE_CHECKING:
    NetworkX = nx.Graph[int]
else:
    NetworkX = nx.Graph  # generic in its stubs only

Rank = Annotated[int, Field(ge=0, strict=True)]
FirstGraph = Callable[[], NetworkX]
"""Returns the graph of round 0."""

_SHORT = (
    "a list of ranks from 0, a number of nodes from 1, a fraction of them below 1, 'all', or a mapping such as"
    " {degree_rank: 0}"
)


def _later(default: Any = None, **limits: Any) -> Any:
    """A field that selectors did not have at first: at its default it stays out of saved experiments, so that the finished
    runs of a sweep are not done again."""
    return Field(default=default, exclude_if=lambda value: value == default, **limits)


class Hops(Section):
    """The nodes at a distance of ``hops`` from the node ``rank``, or within ``at_most`` hops of it, itself included. On a
    directed graph, hops follow the arcs."""

    rank: Rank
    hops: PositiveInt | None = None
    at_most: PositiveInt | None = _later()

    @model_validator(mode="after")
    def _one_distance(self) -> Hops:
        if (self.hops is None) == (self.at_most is None):
            raise ValueError("rank, and one of hops and at_most")
        return self


class Selector(Section):
    """A choice of nodes, by exactly one of its fields (beside ``which``). A list is short for ``ranks``, a whole number for
    ``count``, a number below 1 for ``fraction``, and the word all for ``all: true``. Places are those in the graph of
    round 0."""

    rank: Rank | None = None
    ranks: tuple[Rank, ...] | None = None
    count: Annotated[int, Field(ge=0, strict=True)] | None = _later()  # number of nodes
    fraction: float | None = _later(ge=0, le=1)  # fraction of the nodes, rounded to the nearest number
    # With count or fraction: "drawn" by the experiment's seed, or the "first" ranks.
    which: Literal["drawn", "first"] = _later("drawn")
    # 0 is the node with the most neighbours (on a directed graph, in both directions), 1 the next one; ties go to the
    # lower rank.
    degree_rank: Rank | None = None
    # The same, by betweenness centrality (Freeman, 1977), without end points.
    betweenness_rank: Rank | None = None
    hops_from: Hops | None = None
    all: Literal[True] | None = _later()

    @classmethod
    def kinds(cls) -> list[str]:
        """The names of the fields that choose."""
        return [name for name in cls.model_fields if name != "which"]

    @property
    def kind(self) -> str:
        """The name of the field that chooses."""
        return next(name for name in self.kinds() if getattr(self, name) is not None)

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        """The mapping for which a short form stands."""
        match value:
            case bool():
                pass
            case "all":
                return {"all": True}
            case int() if value >= 1:
                return {"count": value}
            case float() if 0 < value < 1:
                return {"fraction": value}
            case list() | tuple() if all(type(rank) is int and rank >= 0 for rank in value):
                return {"ranks": value}
            case dict() | Selector():
                return value
        raise ValueError(_SHORT)

    @model_validator(mode="after")
    def _one_kind(self) -> Selector:
        if sum(getattr(self, name) is not None for name in self.kinds()) != 1:
            raise ValueError(f"one of {', '.join(self.kinds())}")
        if self.which == "first" and self.kind not in ("count", "fraction"):
            raise ValueError(f"which: first with count or fraction, not with {self.kind}")
        return self

    def short(self) -> Any:
        """The short form, if there is one, or else the mapping."""
        if self.all:
            return "all"
        if self.ranks is not None:
            return list(self.ranks)
        number = self.count if self.fraction in (None, 1) else self.fraction
        if number and self.which == "drawn":
            return number
        return self.model_dump(mode="json", exclude_none=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        rank = {"type": "integer", "minimum": 0}
        fraction = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        short = [
            {"type": "array", "items": rank},
            {"type": "integer", "minimum": 1},
            fraction,
            {"const": "all"},
        ]
        return {"anyOf": [*short, handler(schema)]}


def chosen(
    selector: Selector,
    *,
    nodes: int,
    seed: int,
    field: str,
    graph: FirstGraph | None = None,
    key: str | None = None,
    least: int = 1,
) -> tuple[int, ...]:
    """The ranks that a selector chooses among ``nodes`` nodes, ascending.

    Args:
        selector: the choice.
        nodes: number of nodes.
        seed: the experiment's seed.
        field: the selector's field in the experiment, for messages.
        graph: returns the graph of round 0; it is called only for a place in it. None if there is no graph, because nodes
            sample their neighbours.
        key: the purpose of the draw (:func:`~gossamer.randomness.generator`); the field by default.
        least: the smallest number of nodes that ``count`` and ``fraction`` may choose.

    Raises:
        BadInput: for a rank, a place or a number of nodes that does not exist, and for a place without a graph."""
    kind = selector.kind
    match kind:
        case "all":
            return tuple(range(nodes))
        case "rank":
            assert selector.rank is not None
            check_ranks([selector.rank], nodes, f"{field}.rank")
            return (selector.rank,)
        case "ranks":
            check_ranks(selector.ranks or (), nodes, field)
            return tuple(sorted(set(selector.ranks or ())))
        case "count" | "fraction":
            return _some(selector, nodes, seed, field, key or field, least)
    if graph is None:
        others = ", ".join(name for name in Selector.kinds() if name not in _PLACES)
        problem = f"{kind} is a place in the graph, and a sampled topology has none"
        raise BadInput(f"{field}: {problem}; accepted: {others}")
    if selector.hops_from is not None:
        return _at_distance(selector.hops_from, nodes, graph, f"{field}.hops_from")
    place = getattr(selector, kind)
    if place >= nodes:
        raise BadInput(f"{field}.{kind}: {place}; accepted: 0 to {nodes - 1}")
    found = graph()
    scores = dict(found.degree()) if kind == "degree_rank" else nx.betweenness_centrality(found)
    # Rounded, so that equivalent nodes tie.
    return (sorted(scores, key=lambda rank: (-round(scores[rank], 12), rank))[place],)


_PLACES = ("degree_rank", "betweenness_rank", "hops_from")


def _some(selector: Selector, nodes: int, seed: int, field: str, key: str, least: int) -> tuple[int, ...]:
    """The first nodes, or drawn ones."""
    number, of = selector.count, ""
    if number is None:
        assert selector.fraction is not None
        number, of = int(selector.fraction * nodes + 0.5), f"{selector.fraction:g}, which is "
    if not least <= number <= nodes:
        raise BadInput(f"{field}: {of}{number} of {nodes} nodes; accepted: {least} to {nodes}")
    if selector.which == "first":
        return tuple(range(number))
    return tuple(sorted(generator(seed, key).choice(nodes, number, replace=False).tolist()))


def _at_distance(hops: Hops, nodes: int, graph: FirstGraph, field: str) -> tuple[int, ...]:
    check_ranks([hops.rank], nodes, f"{field}.rank")
    distances = nx.single_source_shortest_path_length(graph(), hops.rank)
    if hops.at_most is not None:
        return tuple(sorted(rank for rank, distance in distances.items() if distance <= hops.at_most))
    ranks = tuple(sorted(rank for rank, distance in distances.items() if distance == hops.hops))
    if not ranks:
        farthest = max(distances.values())
        accepted = (
            f"1 to {farthest}" if farthest else f"another rank, since node {hops.rank} has no neighbours"
        )
        raise BadInput(f"{field}.hops: {hops.hops}; accepted: {accepted}")
    return ranks


def check_ranks(ranks: Iterable[int], nodes: int, field: str) -> None:
    """Raise a BadInput with the field and the first rank that is out of range, if any."""
    for rank in ranks:
        if rank >= nodes:
            raise BadInput(f"{field}: node {rank} of {nodes} nodes; accepted: ranks 0 to {nodes - 1}")
