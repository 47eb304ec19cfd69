"""The network of a Kollaps file: its graph, its shortest paths, and its schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, groupby, product
from operator import attrgetter, itemgetter
from typing import Any

import networkx as nx
import numpy as np
from jaxtyping import Float

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.network.kollaps_file import KollapsFile, KollapsLink, LinkEvent, NodeEvent, read_kollaps
from gossamer.network.network import Changing, Conditions, Path
from gossamer.randomness import generator


@register("network", "kollaps")
class Kollaps(Changing):
    """The network of a topology file of Kollaps (Gouveia et al., EuroSys 2020), with its schedule.

    Nodes are the replicas of services, in the order of the file; supervisors are not nodes. A path is the shortest by hops
    or by latency; along it latencies add up, and so do the variances of jitter; a message survives all links or is lost.
    Attributes that only matter to emulation (images, commands, ports, ...) are not used. docs/networks.md lists the
    differences from Kollaps.

    Args:
        path: the file, XML.
        services: regular expressions for whole names of services, which select the nodes and their order; null is all.
    """

    path: FilePath
    services: tuple[str, ...] | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        states = list(self._states(nodes, seed))  # all of the schedule is checked before anything starts
        return states[0][1]

    def loses(self, nodes: int, seed: int) -> bool:
        return any(conditions.loses(nodes) for _, conditions in self._states(nodes, seed))

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        file = read_kollaps(self.path, "network.path")
        state = _State(file, seed)
        state.graph.number_links(self._select(file, state.graph, nodes))
        at_start = [event for event in file.events if event.time == 0]
        for event in at_start:
            state.apply(event)
        yield 0.0, state.conditions()
        for time_s, simultaneous in groupby(file.events[len(at_start) :], key=attrgetter("time")):
            for event in simultaneous:
                state.apply(event)
            yield time_s, state.conditions()

    def _select(self, file: KollapsFile, graph: _KollapsGraph, nodes: int) -> list[int]:
        """The vertex of each node."""
        able = [name for name, service in file.services.items() if service.supervisor == "false"]
        selected = able
        if self.services is not None:
            matching = [_matching(pattern, able) for pattern in self.services]
            selected = list(dict.fromkeys(name for names in matching for name in names))
        for name in selected:
            if not any(name in (link.origin, link.dest) for link in file.links):
                raise file.services[name].refuse(
                    f"{name!r} has no link; accepted: one, or network.services without it"
                )
        vertices = [vertex for name in selected for vertex in graph.vertices[name]]
        if len(vertices) != nodes:
            counts = ", ".join(f"{len(graph.vertices[name])} of {name}" for name in selected[:5])
            more = f", and of {len(selected) - 5} more" if len(selected) > 5 else ""
            raise BadInput(
                f"network.path: {self.path}: {len(vertices)} replicas ({counts}{more}) for {nodes} nodes; accepted:"
                f" nodes: {len(vertices)}, or network.services that select {nodes}"
            )
        return vertices


def _matching(pattern: str, names: list[str]) -> list[str]:
    try:
        found = [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise BadInput(f"network.services: {pattern!r}: {error}; accepted: regular expressions") from None
    if not found:
        raise BadInput(
            f"network.services: {pattern!r} matches no service; accepted: a match for some of {', '.join(names)}"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Arc:
    """The state of one direction of a link; ``link`` is the number of the link."""

    origin: str
    dest: str
    link: int
    present: bool
    rate: float
    latency_s: float
    jitter_s: float
    drop: float


def _arcs(file: KollapsFile) -> list[_Arc]:
    """The directions of all links in the file, and of those that join by the schedule."""
    found = []
    links: list[KollapsLink | LinkEvent] = [*file.links, *_new_links(file)]
    for number, link in enumerate(links):
        latency_s, jitter_s, drop = link.latency or 0.0, link.jitter or 0.0, link.drop or 0.0
        ends = ((link.origin, link.dest, link.upload), (link.dest, link.origin, link.download))
        for origin, dest, rate in ends:
            if rate is not None:
                present = number < len(file.links)
                found.append(_Arc(origin, dest, number, present, rate, latency_s, jitter_s, drop))
    return found


def _new_links(file: KollapsFile) -> list[LinkEvent]:
    """The links that join by the schedule and are not in the file otherwise."""
    known: set[tuple[str, str]] = set()
    found = []

    def add(link: KollapsLink | LinkEvent) -> None:
        known.add((link.origin, link.dest))
        if link.download is not None:
            known.add((link.dest, link.origin))

    for link in file.links:
        add(link)
    for event in file.events:
        if (
            isinstance(event, LinkEvent)
            and event.action == "join"
            and (event.origin, event.dest) not in known
        ):
            if event.upload is None or event.latency is None:
                raise event.refuse("is a new link; accepted: with upload and latency")
            found.append(event)
            add(event)
    return found


def _replicas(file: KollapsFile, name: str) -> int:
    """The number of replicas of a service: if they join by the schedule, the most at any one time (in total, if none is
    used again); else as the service says."""
    service = file.services[name]
    events = [event for event in file.events if isinstance(event, NodeEvent) and event.name == name]
    joined = sum(event.amount for event in events if event.action == "join")
    if not joined:
        return service.replicas
    if service.reuse == "false":
        return joined
    now = most = 0
    for event in events:
        now += {"join": event.amount, "leave": -event.amount, "crash": -event.amount}.get(event.action, 0)
        most = max(most, now)
    return most


class _KollapsGraph:
    """The graph of everything that is present at any time.

    A vertex is a replica of a service, a bridge, or a meeting point: if a service shares its link, its replicas are
    connected to a meeting point, and the link starts there. An edge belongs to an arc (its attribute ``arc``). The edge
    between a replica and a meeting point (``own``) has the arc's rate, but neither latency, jitter nor loss.

    Args:
        file: the Kollaps file.
        arcs: of all its links.

    Attributes:
        vertices: the vertices of each service and bridge.
        nodes: the vertex of each node.
        links: number of links of the network.
    """

    def __init__(self, file: KollapsFile, arcs: list[_Arc]) -> None:
        self.edges: nx.MultiDiGraph[int] = nx.MultiDiGraph()
        self._keys = count()
        self.vertices = {name: self._add(_replicas(file, name)) for name in file.services}
        self.vertices |= {name: self._add(1) for name in file.bridges}
        shared = {name for name, service in file.services.items() if service.share == "true"}
        meeting: dict[tuple[int, str], range] = {}
        for number, arc in enumerate(arcs):
            for name in (arc.origin, arc.dest):
                if name in shared and (arc.link, name) not in meeting:
                    meeting[arc.link, name] = self._add(1)
            tails = meeting.get((arc.link, arc.origin), self.vertices[arc.origin])
            heads = meeting.get((arc.link, arc.dest), self.vertices[arc.dest])
            if arc.origin in shared:
                self._connect(self.vertices[arc.origin], tails, number, own=True)
            self._connect(tails, heads, number, own=False)
            if arc.dest in shared:
                self._connect(heads, self.vertices[arc.dest], number, own=True)

    def _add(self, vertices: int) -> range:
        first = len(self.edges)
        self.edges.add_nodes_from(range(first, first + vertices))
        return range(first, first + vertices)

    def _connect(self, tails: range, heads: range, arc: int, *, own: bool) -> None:
        for tail, head in product(tails, heads):
            self.edges.add_edge(tail, head, key=next(self._keys), arc=arc, own=own)

    def number_links(self, nodes: list[int]) -> None:
        """Number the edges as links of the network (attribute ``link``).

        A node that is connected to one other vertex, by at most one edge each way, has these edges as its uplink and its
        downlink, unless they belong to another such node. All other edges are inner links.

        Args:
            nodes: the vertex of each node.
        """
        self.nodes = nodes
        for rank, vertex in enumerate(nodes):
            out, into = self.edges.out_edges(vertex, data=True), self.edges.in_edges(vertex, data=True)
            around = {head for _, head, _ in out} | {tail for tail, _, _ in into}
            if len(around) == 1 and len(out) <= 1 and len(into) <= 1:
                for _, _, edge in out:
                    edge.setdefault("link", rank)
                for _, _, edge in into:
                    edge.setdefault("link", len(nodes) + rank)
        self.links = 2 * len(nodes)
        for tail, head, key in sorted(self.edges.edges(keys=True), key=itemgetter(2)):
            if "link" not in self.edges[tail][head][key]:
                self.edges[tail][head][key]["link"] = self.links
                self.links += 1


@dataclass(frozen=True, eq=False)
class _Routes(Conditions):
    """The network between two events of the schedule.

    Args:
        rates: bytes per second of all links.
        graph: vertices and edges.
        arcs: as they are now.
        gone: the vertices that are not there.
        by_latency: whether shortest paths are those with the least latency; else with the fewest hops.
    """

    rates: Float[np.ndarray, " links"]
    graph: _KollapsGraph
    arcs: list[_Arc]
    gone: frozenset[int]
    by_latency: bool
    _trees: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def path(self, source: int, to: int) -> Path | None:
        nodes = self.graph.nodes
        root, vertex = nodes[source], nodes[to]
        if root not in self._trees:
            self._trees[root] = self._tree(root)
        tree = self._trees[root]
        if vertex not in tree or vertex == root:
            return None
        edges: list[dict[str, Any]] = []
        while vertex != root:
            before = tree[vertex][0]
            edges.append(min(self._present(self.graph.edges[before][vertex]), key=self._cost))
            vertex = before
        edges.reverse()
        arcs = [self.arcs[edge["arc"]] for edge in edges if not edge["own"]]
        loss = 1 - math.prod(1 - arc.drop for arc in arcs)
        if loss >= 1:
            return None
        inner = (edge["link"] for edge in edges if edge["link"] >= 2 * len(nodes))
        return Path(
            (source, *inner, len(nodes) + to),
            sum(arc.latency_s for arc in arcs),
            math.hypot(*(arc.jitter_s for arc in arcs)),
            loss,
        )

    def _tree(self, root: int) -> dict[int, list[int]]:
        """The vertices that can be reached, and for each the vertices before it on shortest paths.

        Of paths of equal length the first one is used. networkx lists those first that it finds first, and follows edges
        in the order in which they were added, which is that of the file.
        """
        if root in self.gone:
            return {}

        def cost(tail: int, head: int, edges: dict[Any, dict[str, Any]]) -> int | None:
            present = [] if head in self.gone else self._present(edges)
            return min(map(self._cost, present), default=None)

        tree: dict[int, list[int]] = nx.dijkstra_predecessor_and_distance(
            self.graph.edges, root, weight=cost
        )[0]
        return tree

    def _present(self, edges: Mapping[Any, dict[str, Any]]) -> list[dict[str, Any]]:
        return [edge for edge in edges.values() if self.arcs[edge["arc"]].present]

    def _cost(self, edge: dict[str, Any]) -> int:
        """The latency in nanoseconds, then the number of hops, in one integer that adds up exactly."""
        ns = round(1e9 * self.arcs[edge["arc"]].latency_s) if self.by_latency and not edge["own"] else 0
        return (ns << 32) + 1


class _State:
    """The state of a network in the course of its schedule.

    Args:
        file: the Kollaps file.
        seed: the experiment's seed, by which the replicas that join and leave are drawn.
    """

    def __init__(self, file: KollapsFile, seed: int) -> None:
        self._file, self._seed = file, seed
        self._arcs = _arcs(file)
        self.graph = _KollapsGraph(file, self._arcs)
        joining = {each.name for each in file.events if isinstance(each, NodeEvent) and each.action == "join"}
        self._absent = {
            vertex for name in joining & set(file.services) for vertex in self.graph.vertices[name]
        }
        self._disconnected: set[int] = set()
        self._used: set[int] = set()
        self._draws = 0

    def conditions(self) -> Conditions:
        """The network as it is now."""
        rates = np.full(self.graph.links, np.inf)
        for _, _, edge in self.graph.edges.edges(data=True):
            rates[edge["link"]] = self._arcs[edge["arc"]].rate
        gone = frozenset(self._absent | self._disconnected)
        return _Routes(rates, self.graph, list(self._arcs), gone, self._file.metric == "latency")

    def apply(self, event: NodeEvent | LinkEvent) -> None:
        """Apply an event.

        Raises:
            BadInput: for an impossible event: a replica, bridge or link that joins although it is there, or leaves although
                it is not.
        """
        if isinstance(event, LinkEvent):
            self._apply_to_link(event)
        else:
            self._apply_to_replicas(event)

    def _apply_to_replicas(self, event: NodeEvent) -> None:
        vertices = set(self.graph.vertices[event.name])
        there = vertices - self._absent
        service = self._file.services.get(event.name)
        used = self._used if service and service.reuse == "false" else set()
        candidates = {
            "join": vertices - there - used,
            "leave": there,
            "crash": there,
            "disconnect": there - self._disconnected,
            "reconnect": there & self._disconnected,
        }[event.action]
        if len(candidates) < event.amount:
            raise event.refuse(
                f"{event.action} of {event.amount} of {event.name!r} at {event.time:g} s; accepted: up to {len(candidates)}"
            )
        self._draws += 1
        rng = generator(self._seed, "network.kollaps", self._draws)
        chosen = {int(vertex) for vertex in rng.choice(sorted(candidates), event.amount, replace=False)}
        match event.action:
            case "join":
                self._absent -= chosen
                self._used |= chosen
            case "leave" | "crash":
                self._absent |= chosen
                self._disconnected -= chosen
            case "disconnect":
                self._disconnected |= chosen
            case "reconnect":
                self._disconnected -= chosen

    def _apply_to_link(self, event: LinkEvent) -> None:
        there = event.action != "join"
        ahead = [n for n in self._between(event.origin, event.dest) if self._arcs[n].present == there]
        if not ahead:
            state = "there" if there else "away"
            raise event.refuse(
                f"link from {event.origin!r} to {event.dest!r} at {event.time:g} s; accepted: one that is {state}"
            )
        back = self._between(event.dest, event.origin)
        links = {self._arcs[n].link for n in ahead}
        both = [*ahead, *(n for n in back if self._arcs[n].link in links)]
        if event.download is not None and not back:
            raise event.refuse("download: the link has no such direction; accepted: upload")
        if event.action is not None:
            self._change(both, present=event.action == "join")
        self._change(both, latency_s=event.latency, jitter_s=event.jitter, drop=event.drop)
        self._change(ahead, rate=event.upload)
        self._change(back, rate=event.download)

    def _between(self, origin: str, dest: str) -> list[int]:
        return [n for n, arc in enumerate(self._arcs) if (arc.origin, arc.dest) == (origin, dest)]

    def _change(self, arcs: list[int], **values: float | bool | None) -> None:
        changed: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        for number in arcs:
            self._arcs[number] = replace(self._arcs[number], **changed)
