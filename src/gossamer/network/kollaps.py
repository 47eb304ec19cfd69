"""The network of a Kollaps file: services, bridges, links and a schedule; its graph, and its shortest paths."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, groupby, product
from operator import attrgetter
from pathlib import Path as FileSystemPath
from typing import Annotated, Any, Literal, NamedTuple
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring
from jaxtyping import Float
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
)
from pydantic import Tag as Branch

from gossamer.config.registry import FilePath, register
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, listed, suggest
from gossamer.network.network import Conditions, Network, Path
from gossamer.randomness import generator

_ELEMENTS = {"services": "service", "bridges": "bridge", "links": "link", "dynamic": "schedule"}
"""The elements in each part of a file that has some."""
_EMULATION = {
    *("boot", "pool_period", "max_age", "image", "command", "port", "tags", "ip", "machinename"),
    *("topology_file", "controller_ip", "script", "activepaths"),
}
"""Attributes that start containers and machines, and are ignored."""
_UNCHANGING = {"time", "origin", "dest", "network"}
_BITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def _bytes_per_second(text: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)bps", str(text))
    rate = float(found[1]) * _BITS[found[2]] / 8 if found else 0.0
    if rate <= 0:
        raise ValueError("a number above 0 with Kbps, Mbps or Gbps")
    return rate


Name = Annotated[str, Field(min_length=1)]
Flag = Literal["true", "false"]
Rate = Annotated[float, BeforeValidator(_bytes_per_second)]  # a bandwidth, converted to bytes per second
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Delay = Annotated[Seconds, AfterValidator(lambda ms: ms / 1000)]  # milliseconds, converted to seconds
Drop = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class _Attributes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Config(_Attributes):
    shortest_path: Literal["hop", "latency"] = "hop"


class Bridge(_Attributes):
    """A bridge between links."""

    name: Name


class Service(Bridge):
    """A service. ``replicas`` counts unless replicas join by the schedule."""

    replicas: Count = 1
    share: Flag = "false"
    reuse: Flag = "true"
    supervisor: Flag = "false"


class _Ends(_Attributes):
    origin: Name
    dest: Name
    network: str | None = None


class KollapsLink(_Ends):
    """A link between each replica of one name and each of another. Without a download it leads one way."""

    upload: Rate
    download: Rate | None = None
    latency: Delay
    jitter: Delay = 0.0
    drop: Drop = 0.0


class LinkEvent(_Ends):
    """A link changes (without an action), leaves or joins. None leaves a value unchanged."""

    time: Seconds
    action: Literal["join", "leave"] | None = None
    upload: Rate | None = None
    download: Rate | None = None
    latency: Delay | None = None
    jitter: Delay | None = None
    drop: Drop | None = None


class NodeEvent(_Attributes):
    """Replicas of a service, or a bridge, join or leave."""

    time: Seconds
    name: Name
    action: Literal["join", "leave", "crash", "disconnect", "reconnect"]
    amount: Count = 1


class KollapsFile(_Attributes):
    """The parts of a file."""

    config: _Config = _Config()
    services: list[Service]
    bridges: list[Bridge] = []
    links: list[KollapsLink]
    dynamic: list[
        Annotated[
            Annotated[NodeEvent, Branch("name")] | Annotated[LinkEvent, Branch("link")],
            Discriminator(lambda each: "name" if "name" in each else "link"),
        ]
    ] = []


def read_kollaps(path: FileSystemPath, where: str) -> KollapsFile:
    """Read a topology file. A BadInput that begins with ``where`` refuses what is not Kollaps, or is not supported."""
    try:
        file = KollapsFile.model_validate(_read_parts(path, where))
    except ValidationError as error:
        raise bad_input(error, KollapsFile, f"{where}: <experiment>") from None
    owners = {owner.name: owner for owner in (*file.services, *file.bridges)}
    if len(owners) < len(file.services) + len(file.bridges):
        raise BadInput(f"{where}: a name twice; accepted: a name for each service and bridge")
    for element in (*file.links, *file.dynamic):
        if problem := _problem(element, owners):
            raise BadInput(f"{where}: {problem}")
    ends = [*file.links, *(each for each in file.dynamic if isinstance(each, LinkEvent))]
    if len(networks := {each.network for each in ends if each.network}) > 1:
        raise BadInput(f"{where}: the networks {listed(networks)}; accepted: one network for all links")
    return file


def _read_parts(path: FileSystemPath, where: str) -> dict[str, Any]:
    """The attributes of the elements in each part of a file. Kollaps uses attributes only, and no text."""
    try:
        # A document type is refused, because its entities could stand for anything.
        root = fromstring(path.read_bytes(), forbid_dtd=True)
    except DefusedXmlException:
        raise BadInput(f"{where}: a document type; accepted: XML without one") from None
    except (OSError, ParseError, LookupError, ValueError) as error:  # the last two: an unknown encoding
        raise BadInput(f"{where}: {error}; accepted: well-formed XML") from None
    if root.tag != "experiment" or root.attrib.keys() - _EMULATION:
        raise BadInput(f"{where}: <{root.tag}> with {listed(root.attrib)}; accepted: <experiment> with boot")
    if text := "".join(root.itertext()).strip():
        raise BadInput(f"{where}: {text!r}; accepted: elements and comments, without text")
    parts: dict[str, Any] = {}
    for part in root:
        inner = _ELEMENTS.get(part.tag)
        if part.tag in parts:
            raise BadInput(f"{where}: <{part.tag}> a second time; accepted: each part once")
        for child in part:
            if child.tag != inner or len(child):
                accepted = f"<{inner}>, empty" if inner else "nothing"
                raise BadInput(f"{where}: <{child.tag}> in <{part.tag}>; accepted: {accepted}")
        parts[part.tag] = [_used(child.attrib) for child in part] if inner else _used(part.attrib)
    return parts


def _used(attributes: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in attributes.items() if name not in _EMULATION}


def _problem(element: KollapsLink | LinkEvent | NodeEvent, owners: dict[str, Bridge]) -> str | None:
    """How a link or an event does not fit the services and bridges of the file."""
    named = [element.name] if isinstance(element, NodeEvent) else [element.origin, element.dest]
    for name in named:
        if name not in owners:
            return f"{name!r}{suggest(name, owners)}; accepted: a service or a bridge"
    if isinstance(element, NodeEvent):
        if element.action not in ("join", "leave") and not isinstance(owners[element.name], Service):
            return f"{element.action!r} of the bridge {element.name!r}; accepted: join, leave"
    elif element.origin == element.dest:
        return f"a link from {element.origin!r} to itself; accepted: two ends"
    elif isinstance(element, LinkEvent) and element.model_fields_set <= _UNCHANGING:
        return f"an event at {element.time:g} s that changes nothing; accepted: upload, download, latency, jitter, drop"
    return None


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


class _Edge(NamedTuple):
    """An edge between two vertices: a replica of a service, a bridge, or a meeting point. The edge between a replica and a
    meeting point (``own``) has the rate of its arc, but neither latency, jitter nor loss."""

    tail: int
    head: int
    arc: int
    own: bool


@dataclass(frozen=True, eq=False)
class _Routes(Conditions):
    """The network between two events of the schedule: the vertex of each node, and a graph of the vertices and edges that are
    present, which have a ``cost``, a ``link``, and an ``arc`` (None for own edges)."""

    rates: Float[np.ndarray, " links"]
    nodes: list[int]
    graph: nx.DiGraph[int]
    _trees: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def path(self, source: int, to: int) -> Path | None:
        root, vertex = self.nodes[source], self.nodes[to]
        if root not in self.graph:
            return None
        # The vertices before each one on shortest paths. networkx lists those first that it finds first, and follows edges
        # in the order of the file.
        if root not in self._trees:
            self._trees[root] = nx.dijkstra_predecessor_and_distance(self.graph, root, weight="cost")[0]
        before = self._trees[root]
        if vertex not in before or vertex == root:
            return None
        edges: list[dict[str, Any]] = []
        while vertex != root:
            edges.insert(0, self.graph[before[vertex][0]][vertex])
            vertex = before[vertex][0]
        arcs = [edge["arc"] for edge in edges if edge["arc"] is not None]
        loss = 1 - math.prod(1 - arc.drop for arc in arcs)
        if loss >= 1:
            return None
        inner = (edge["link"] for edge in edges if edge["link"] >= 2 * len(self.nodes))
        jitter_s = math.hypot(*(arc.jitter_s for arc in arcs))
        return Path(
            (source, *inner, len(self.nodes) + to), sum(arc.latency_s for arc in arcs), jitter_s, loss
        )


class _Schedule:
    """The state of a network in the course of its schedule.

    If a service shares its link, its replicas are connected to a meeting point, and the link starts there. ``nodes`` has the
    vertex of each node: those of the replicas of the selected services; ``events`` has the schedule in order of time."""

    def __init__(self, file: KollapsFile, selected: list[str], seed: int, where: str) -> None:
        self._file, self._seed, self._where = file, seed, where
        self._services = {service.name: service for service in file.services}
        self.events = sorted(file.dynamic, key=attrgetter("time"))
        self._size = 0
        self._vertices = {name: self._add(self._replicas(name)) for name in self._services}
        self._vertices |= {bridge.name: self._add(1) for bridge in file.bridges}
        self._arcs = self._all_arcs()
        self._edges = list(self._all_edges())
        for name in selected:
            if not any(name in (link.origin, link.dest) for link in file.links):
                raise self._refused(f"{name!r} has no link; accepted: one, or network.services without it")
        self.nodes = [vertex for name in selected for vertex in self._vertices[name]]
        self._links = self._number_links()
        joining = {each.name for each in self.events if isinstance(each, NodeEvent) and each.action == "join"}
        self._absent = {vertex for name in joining & self._services.keys() for vertex in self._vertices[name]}
        self._disconnected: set[int] = set()
        self._used: set[int] = set()
        self._draws = 0

    def _refused(self, problem: str) -> BadInput:
        return BadInput(f"{self._where}: {problem}")

    # --- the graph of everything that is present at any time

    def _add(self, vertices: int) -> range:
        self._size += vertices
        return range(self._size - vertices, self._size)

    def _replicas(self, name: str) -> int:
        """The number of replicas of a service: if they join by the schedule, the most at any one time (in total, if none is
        used again); else as the service says."""
        service, now, most = self._services[name], 0, 0
        change = {"join": 1} if service.reuse == "false" else {"join": 1, "leave": -1, "crash": -1}
        for event in self.events:
            if isinstance(event, NodeEvent) and event.name == name:
                now += event.amount * change.get(event.action, 0)
                most = max(most, now)
        return most or service.replicas

    def _all_arcs(self) -> list[_Arc]:
        """The directions of all links in the file, and of those that join by the schedule."""
        arcs: list[_Arc] = []
        events = [event for event in self.events if isinstance(event, LinkEvent)]
        all_links: list[KollapsLink | LinkEvent] = [*self._file.links, *events]
        for number, link in enumerate(all_links):
            if isinstance(link, LinkEvent):
                known = any((arc.origin, arc.dest) == (link.origin, link.dest) for arc in arcs)
                if known or link.action != "join":
                    continue
                if link.upload is None or link.latency is None:
                    raise self._refused(
                        f"a new link from {link.origin!r} to {link.dest!r}; accepted: with upload and latency"
                    )
            values = link.latency or 0.0, link.jitter or 0.0, link.drop or 0.0
            ends = ((link.origin, link.dest, link.upload), (link.dest, link.origin, link.download))
            for origin, dest, rate in ends:
                if rate is not None:
                    arcs.append(_Arc(origin, dest, number, isinstance(link, KollapsLink), rate, *values))
        return arcs

    def _all_edges(self) -> Iterator[_Edge]:
        shared = {name for name, service in self._services.items() if service.share == "true"}
        meeting: dict[tuple[int, str], range] = {}
        for number, arc in enumerate(self._arcs):
            for name in {arc.origin: None, arc.dest: None}:
                if name in shared and (arc.link, name) not in meeting:
                    meeting[arc.link, name] = self._add(1)
            origin, dest = self._vertices[arc.origin], self._vertices[arc.dest]
            tails, heads = meeting.get((arc.link, arc.origin)), meeting.get((arc.link, arc.dest))
            steps = [(tails or origin, heads or dest, False)]
            if tails:
                steps.insert(0, (origin, tails, True))
            if heads:
                steps.append((heads, dest, True))
            for starts, ends, own in steps:
                for tail, head in product(starts, ends):
                    yield _Edge(tail, head, number, own)

    def _number_links(self) -> list[int]:
        """The link of each edge. A node that is connected to one other vertex, by at most one edge each way, has these edges
        as its uplink and its downlink, unless they belong to another such node. All other edges are inner links."""
        out, into = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for number, edge in enumerate(self._edges):
            out[edge.tail].append(number)
            into[edge.head].append(number)
        links: dict[int, int] = {}
        for rank, vertex in enumerate(self.nodes):
            up, down = out[vertex], into[vertex]
            around = {self._edges[k].head for k in up} | {self._edges[k].tail for k in down}
            if len(around) == 1 and len(up) <= 1 and len(down) <= 1:
                links = dict.fromkeys(up, rank) | dict.fromkeys(down, len(self.nodes) + rank) | links
        inner = count(2 * len(self.nodes))
        return [links[number] if number in links else next(inner) for number in range(len(self._edges))]

    # --- its state

    def conditions(self) -> Conditions:
        """The network as it is now."""
        rates = np.full(max(2 * len(self.nodes) - 1, *self._links) + 1, np.inf)
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(set(range(self._size)) - self._absent - self._disconnected)
        for edge, link in zip(self._edges, self._links, strict=True):
            arc = self._arcs[edge.arc]
            rates[link] = arc.rate
            if not arc.present or edge.tail not in graph or edge.head not in graph:
                continue
            # The latency in nanoseconds, then the number of hops, in one integer that adds up exactly.
            by_latency = self._file.config.shortest_path == "latency" and not edge.own
            cost = (round(1e9 * arc.latency_s) << 32 if by_latency else 0) + 1
            if not graph.has_edge(edge.tail, edge.head) or cost < graph[edge.tail][edge.head]["cost"]:
                graph.add_edge(edge.tail, edge.head, cost=cost, link=link, arc=None if edge.own else arc)
        return _Routes(rates, self.nodes, graph)

    def apply(self, events: Iterable[NodeEvent | LinkEvent]) -> None:
        """Apply events. A replica, bridge or link that joins although it is there, or leaves although it is not, is bad
        input."""
        for event in events:
            if isinstance(event, LinkEvent):
                self._apply_to_link(event)
            else:
                self._apply_to_replicas(event)

    def _apply_to_replicas(self, event: NodeEvent) -> None:
        vertices = set(self._vertices[event.name])
        there = vertices - self._absent
        service = self._services.get(event.name)
        used = self._used if service and service.reuse == "false" else set()
        candidates = {
            "join": vertices - there - used,
            "disconnect": there - self._disconnected,
            "reconnect": there & self._disconnected,
        }.get(event.action, there)
        if len(candidates) < event.amount:
            raise self._refused(
                f"{event.action} of {event.amount} of {event.name!r} at {event.time:g} s; accepted: up to {len(candidates)}"
            )
        self._draws += 1
        rng = generator(self._seed, "network.kollaps", self._draws)
        chosen = {int(vertex) for vertex in rng.choice(sorted(candidates), event.amount, replace=False)}
        self._disconnected -= chosen
        if event.action == "join":
            self._absent -= chosen
            self._used |= chosen
        elif event.action == "disconnect":
            self._disconnected |= chosen
        elif event.action != "reconnect":
            self._absent |= chosen

    def _apply_to_link(self, event: LinkEvent) -> None:
        there = event.action != "join"
        ahead = [n for n in self._between(event.origin, event.dest) if self._arcs[n].present == there]
        back = self._between(event.dest, event.origin)
        if not ahead:
            found = f"link from {event.origin!r} to {event.dest!r} at {event.time:g} s"
            raise self._refused(f"{found}; accepted: one that is {'there' if there else 'away'}")
        if event.download is not None and not back:
            raise self._refused("download: the link has no such direction; accepted: upload")
        links = {self._arcs[n].link for n in ahead}
        both = [*ahead, *(n for n in back if self._arcs[n].link in links)]
        present = None if event.action is None else not there
        self._change(both, present=present, latency_s=event.latency, jitter_s=event.jitter, drop=event.drop)
        self._change(ahead, rate=event.upload)
        self._change(back, rate=event.download)

    def _between(self, origin: str, dest: str) -> list[int]:
        return [n for n, arc in enumerate(self._arcs) if (arc.origin, arc.dest) == (origin, dest)]

    def _change(self, arcs: list[int], **values: float | bool | None) -> None:
        changed: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        for number in arcs:
            self._arcs[number] = replace(self._arcs[number], **changed)


@register("network", "kollaps")
class Kollaps(Network):
    """The network of a topology file of Kollaps (Gouveia et al., EuroSys 2020), with its schedule.

    Nodes are the replicas of services, in the order of the file; supervisors are not nodes. A path is the shortest by hops
    or by latency; along it latencies add up, and so do the variances of jitter; a message survives all links or is lost.
    Attributes that only matter to emulation (images, commands, ports, ...) are not used. docs/networks.md lists the
    differences from Kollaps."""

    path: FilePath  # the file, XML
    # Regular expressions for whole names of services, which select the nodes and their order; null is all.
    services: tuple[str, ...] | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        states = list(self._states(nodes, seed))  # all of the schedule is checked before anything starts
        return states[0][1]

    def loses(self, nodes: int, seed: int) -> bool:
        return any(conditions.loses(nodes) for _, conditions in self._states(nodes, seed))

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        where = f"network.path: {self.path}"
        file = read_kollaps(self.path, where)
        able = [service.name for service in file.services if service.supervisor == "false"]
        schedule = _Schedule(file, able if self.services is None else self._selected(able), seed, where)
        if len(schedule.nodes) != nodes:
            accepted = f"nodes: {len(schedule.nodes)}, or network.services that select {nodes}"
            raise BadInput(f"{where}: {len(schedule.nodes)} replicas for {nodes} nodes; accepted: {accepted}")
        if not any(event.time == 0 for event in schedule.events):
            yield 0.0, schedule.conditions()
        for time_s, simultaneous in groupby(schedule.events, key=attrgetter("time")):
            schedule.apply(simultaneous)
            yield time_s, schedule.conditions()

    def _selected(self, names: list[str]) -> list[str]:
        selected: dict[str, None] = {}
        for pattern in self.services or ():
            try:
                matching = dict.fromkeys(name for name in names if re.fullmatch(pattern, name))
            except re.error as error:
                raise BadInput(
                    f"network.services: {pattern!r}: {error}; accepted: regular expressions"
                ) from None
            if not matching:
                raise BadInput(
                    f"network.services: {pattern!r}; accepted: a match for some of {', '.join(names)}"
                )
            selected |= matching
        return list(selected)
