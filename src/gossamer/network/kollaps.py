"""The network of a Kollaps file: services, bridges, links and their changes, and the shortest paths."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, groupby, product
from operator import attrgetter
from pathlib import Path as FileSystemPath
from typing import Annotated, Any, Literal, TypeVar
from xml.etree.ElementTree import Element

import networkx as nx
import numpy as np
from jaxtyping import Float
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gossamer.config.ranges import LARGEST_MBPS, Seconds
from gossamer.config.registry import FilePath, register
from gossamer.config.validation import bad_input
from gossamer.errors import BadInput, listed, suggest
from gossamer.files import check_fits, parse_xml
from gossamer.network.network import BYTES_PER_MEGABIT, Conditions, Network, Path

_BITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_ELEMENTS = {"services": "service", "bridges": "bridge", "links": "link", "dynamic": "schedule"}
_TAGS = {"experiment", "config", *_ELEMENTS, *_ELEMENTS.values()}


def _bytes_per_second(text: Any) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)bps", str(text))
    rate = float(match[1]) * _BITS[match[2]] / 8 if match else 0.0
    if not 0 < rate <= LARGEST_MBPS * BYTES_PER_MEGABIT:
        raise ValueError("a number above 0 with Kbps, Mbps or Gbps")
    return rate


Rate = Annotated[float, BeforeValidator(_bytes_per_second)]  # a bandwidth, converted to bytes per second
Delay = Annotated[Seconds, AfterValidator(lambda ms: ms / 1000)]  # milliseconds, converted to seconds
Drop = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]
_AT_START = "services that join at 0 s (the experiment's faults let nodes leave and crash)"


class Bridge(BaseModel):
    """A bridge between links."""

    name: str


class Service(Bridge):
    """A service. Other attributes, such as images and commands, matter only for an emulation."""

    replicas: Count = 1
    supervisor: Literal["true", "false"] = "false"
    share: Literal["false"] = "false"


class Link(BaseModel):
    """A link between each replica of one name and each replica of another. Without a download, it is one-way."""

    model_config = ConfigDict(extra="forbid")
    origin: str
    dest: str
    network: str | None = None
    upload: Rate
    download: Rate | None = None
    latency: Delay
    jitter: Delay = 0.0
    drop: Drop = 0.0


class LinkEvent(BaseModel):
    """A link changes, leaves or joins again. None leaves a value unchanged."""

    model_config = ConfigDict(extra="forbid")
    time: Seconds
    origin: str
    dest: str
    network: str | None = None
    action: Literal["join", "leave"] | None = None
    upload: Rate | None = None
    download: Rate | None = None
    latency: Delay | None = None
    jitter: Delay | None = None
    drop: Drop | None = None


class Joining(BaseModel):
    """Replicas of a service that join at the start, replacing its ``replicas``. Other events of services are refused."""

    model_config = ConfigDict(extra="forbid")
    time: Seconds
    name: str
    action: str
    amount: Count = 1

    @model_validator(mode="after")
    def _at_start(self) -> Joining:
        if self.time or self.action != "join":
            raise ValueError(_AT_START)
        return self


class Config(BaseModel):
    """Settings of the whole file."""

    shortest_path: Literal["hop", "latency"] = "hop"


@dataclass(frozen=True)
class KollapsFile:
    """The contents of a file."""

    services: list[Service]
    bridges: list[Bridge]
    links: list[Link]
    joining: list[Joining]
    dynamic: list[LinkEvent]
    shortest_path: Literal["hop", "latency"]


M = TypeVar("M", bound=BaseModel)


def read_kollaps(path: FileSystemPath, where: str) -> KollapsFile:
    """Read a topology file. A BadInput that begins with ``where`` for a file that is not in Kollaps' format,
    or uses unsupported features."""
    try:
        check_fits(where, path, times=4)
        xml = parse_xml(path.read_bytes(), where)
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror}; accepted: a file of Kollaps") from None
    root, problems = xml.root, list[str]()

    def place(element: Element) -> str:
        return f"{where}, line {xml.lines[element]}: <{element.tag}>"

    def read(kind: type[M], elements: Iterable[Element]) -> list[M]:
        """What the elements say, without those in which something is wrong."""
        said = list[M]()
        for element in elements:
            try:
                said.append(kind.model_validate(element.attrib))
            except ValidationError as error:
                problems.extend(bad_input(error, kind, place(element)).problems)
        return said

    for element in root.iter():
        if element.tag not in _TAGS or (element is root and root.tag != "experiment"):
            raise BadInput(f"{place(element)}; accepted: <experiment> with {listed(_TAGS)}")
    parts = {part: root.findall(f"{part}/{tag}") for part, tag in _ELEMENTS.items()}
    file = KollapsFile(
        services=read(Service, parts["services"]),
        bridges=read(Bridge, parts["bridges"]),
        links=read(Link, parts["links"]),
        joining=read(Joining, (event for event in parts["dynamic"] if "name" in event.attrib)),
        dynamic=read(LinkEvent, (event for event in parts["dynamic"] if "name" not in event.attrib)),
        shortest_path=[Config(), *read(Config, root.findall("config"))][-1].shortest_path,
    )
    known: dict[str, Element] = {}
    for owner in (*parts["services"], *parts["bridges"]):
        name = owner.get("name", "")
        if (first := known.setdefault(name, owner)) is not owner:
            text = f"a second {name!r}, after line {xml.lines[first]}"
            problems.append(f"{place(owner)}: {text}; accepted: a name for each service and bridge")
    for element in (*parts["links"], *parts["dynamic"]):
        for end in ("origin", "dest", "name"):
            if (name := element.get(end, "")) not in known and end in element.attrib:
                text = f"{name!r}{suggest(name, known)}; accepted: a service or a bridge"
                problems.append(f"{place(element)}.{end}: {text}")
    if problems:
        raise BadInput(*problems)
    return file


@dataclass(frozen=True, slots=True)
class _Arc:
    """One direction of the link with the number ``link``."""

    origin: str
    dest: str
    link: int
    rate: float
    latency_s: float
    jitter_s: float
    drop: float
    present: bool = True


@dataclass(frozen=True, eq=False)
class _Routes(Conditions):
    """The network between two changes: the vertex of each node, and a graph whose edges have a ``cost``, a ``link`` and an
    ``arc``."""

    rates: Float[np.ndarray, " links"]
    nodes: list[int]
    graph: nx.DiGraph[int]
    _trees: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def path(self, source: int, to: int) -> Path | None:
        root, vertex = self.nodes[source], self.nodes[to]
        # The predecessors of each vertex on shortest paths. networkx lists them in the order in which it
        # finds them, and follows edges in the order of the file.
        if root not in self._trees:
            self._trees[root] = nx.dijkstra_predecessor_and_distance(self.graph, root, weight="cost")[0]
        predecessors = self._trees[root]
        if vertex not in predecessors or vertex == root:
            return None
        edges: list[dict[str, Any]] = []
        while vertex != root:
            edges.insert(0, self.graph[predecessors[vertex][0]][vertex])
            vertex = predecessors[vertex][0]
        arcs = [edge["arc"] for edge in edges]
        loss = 1 - math.prod(1 - arc.drop for arc in arcs)
        if loss >= 1:
            return None
        inner = (edge["link"] for edge in edges if edge["link"] >= 2 * len(self.nodes))
        links = (source, *inner, len(self.nodes) + to)
        jitter_s = math.hypot(*(arc.jitter_s for arc in arcs))
        return Path(links, math.fsum(arc.latency_s for arc in arcs), jitter_s, loss)


class _Layout:
    """The vertices (replicas and bridges) and edges of a file. ``nodes`` has the vertex of each node."""

    def __init__(self, file: KollapsFile, where: str) -> None:
        self._where = where
        self._by_latency = file.shortest_path == "latency"
        joined = {event.name: 0 for event in file.joining}
        for event in file.joining:
            joined[event.name] += event.amount
        replicas = {service.name: joined.get(service.name, service.replicas) for service in file.services}
        self.vertices: dict[str, range] = {}
        self._size = 0
        for name, size in (replicas | {bridge.name: 1 for bridge in file.bridges}).items():
            self.vertices[name] = range(self._size, self._size + size)
            self._size += size
        workers = [service.name for service in file.services if service.supervisor == "false"]
        self.nodes = [vertex for name in workers for vertex in self.vertices[name]]
        self.arcs: list[_Arc] = []
        for number, link in enumerate(file.links):
            values = link.latency, link.jitter, link.drop
            self.arcs.append(_Arc(link.origin, link.dest, number, link.upload, *values))
            if link.download is not None:
                self.arcs.append(_Arc(link.dest, link.origin, number, link.download, *values))
        self._edges = [
            (tail, head, number)
            for number, arc in enumerate(self.arcs)
            for tail, head in product(self.vertices[arc.origin], self.vertices[arc.dest])
        ]
        self._links = self._number_links()

    def _number_links(self) -> list[int]:
        """The link of each edge. If a node is connected to a single other vertex, by at most one edge in each
        direction, these edges are its uplink and downlink, unless they already belong to another such node.
        All other edges are inner links."""
        outgoing, incoming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for number, (tail, head, _) in enumerate(self._edges):
            outgoing[tail].append(number)
            incoming[head].append(number)
        links: dict[int, int] = {}
        for rank, vertex in enumerate(self.nodes):
            up, down = outgoing[vertex], incoming[vertex]
            neighbours = {self._edges[k][1] for k in up} | {self._edges[k][0] for k in down}
            if len(neighbours) == 1 and len(up) <= 1 and len(down) <= 1:
                links = dict.fromkeys(up, rank) | dict.fromkeys(down, len(self.nodes) + rank) | links
        inner = count(2 * len(self.nodes))
        return [links[number] if number in links else next(inner) for number in range(len(self._edges))]

    def conditions(self) -> Conditions:
        """The current state of the network."""
        rates = np.full(max(2 * len(self.nodes) - 1, *self._links, -1) + 1, np.inf)
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self._size))
        for (tail, head, number), link in zip(self._edges, self._links, strict=True):
            arc = self.arcs[number]
            rates[link] = arc.rate
            # The latency in nanoseconds and the number of hops, combined in one integer, so that sums are exact.
            cost = (round(1e9 * arc.latency_s) << 32 if self._by_latency else 0) + 1
            if arc.present and (not graph.has_edge(tail, head) or cost < graph[tail][head]["cost"]):
                graph.add_edge(tail, head, cost=cost, link=link, arc=arc)
        return _Routes(rates, self.nodes, graph)

    def change(self, event: LinkEvent) -> None:
        """Apply an event: its upload to one direction, its download to the other, and all other values to both."""
        forward, backward = self._between(event.origin, event.dest), self._between(event.dest, event.origin)
        if not forward or (event.download is not None and not backward):
            problem = f"{self._where}: a link from {event.origin!r} to {event.dest!r} at {event.time:g} s"
            raise BadInput(f"{problem}; accepted: a link of <links>, with a download if the event has one")
        values = {"latency_s": event.latency, "jitter_s": event.jitter, "drop": event.drop}
        values["present"] = None if event.action is None else event.action == "join"
        links = {self.arcs[number].link for number in forward}
        both = [*forward, *(number for number in backward if self.arcs[number].link in links)]
        for numbers, changes in (
            (both, values),
            (forward, {"rate": event.upload}),
            (backward, {"rate": event.download}),
        ):
            changed: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
            for number in numbers:
                self.arcs[number] = replace(self.arcs[number], **changed)

    def _between(self, origin: str, dest: str) -> list[int]:
        return [number for number, arc in enumerate(self.arcs) if (arc.origin, arc.dest) == (origin, dest)]


@register("network", "kollaps")
class Kollaps(Network):
    """The network of a Kollaps topology file (Gouveia et al., EuroSys 2020), including its schedule of link
    changes.

    Nodes are the replicas of services, in the order of the file; supervisors are not nodes. A path is the
    shortest one by hops or by latency. Along a path, latencies and variances of the jitter add up; a message
    lost on any link is lost. docs/networks.md lists unsupported features and the differences from Kollaps."""

    path: FilePath  # the file, XML

    def conditions(self, nodes: int, seed: int) -> Conditions:
        states = list(self._states(nodes, seed))  # the whole schedule is checked before the run starts
        return states[0][1]

    def loses(self, nodes: int, seed: int) -> bool:
        return any(conditions.loses(nodes) for _, conditions in self._states(nodes, seed))

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        where = f"network.path: {self.path}"
        file = read_kollaps(self.path, where)
        layout = _Layout(file, where)
        if (replicas := len(layout.nodes)) != nodes:
            raise BadInput(f"{where}: {replicas} replicas for {nodes} nodes; accepted: nodes: {replicas}")
        events = sorted(file.dynamic, key=attrgetter("time"))
        if not any(event.time == 0 for event in events):
            yield 0.0, layout.conditions()
        for time_s, simultaneous in groupby(events, key=attrgetter("time")):
            for event in simultaneous:
                layout.change(event)
            yield time_s, layout.conditions()
