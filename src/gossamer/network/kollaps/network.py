"""The network of a Kollaps file, and what its schedule makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.network.kollaps.description import Description, Link, LinkEvent, NodeEvent, read_description
from gossamer.network.kollaps.routes import Graph, Routes, directions
from gossamer.network.network import Changing, Conditions
from gossamer.randomness import generator


@register("network", "kollaps")
class Kollaps(Changing):
    """The network of a topology file of Kollaps (Gouveia et al., EuroSys 2020), with its schedule.

    Nodes are the replicas of services, in the order of the file; supervisors are none. A path is the shortest one by hops
    or by latency; along it latencies add up, and so do the variances of jitter; a message survives all links or is lost.
    What only emulation needs (images, commands, ports, ...) is not used. See docs/networks.md for what differs.

    Args:
        path: the file, XML.
        services: regular expressions for whole names of services: which ones are nodes, and in which order; null is all.
    """

    path: FilePath
    services: tuple[str, ...] | None = None

    def conditions(self, nodes: int, seed: int) -> Conditions:
        course = list(self._states(nodes, seed))  # all of the schedule is looked at before anything starts
        return course[0][1]

    def loses(self, nodes: int, seed: int) -> bool:
        return any(conditions.loses(nodes) for _, conditions in self._states(nodes, seed))

    def _states(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        description = read_description(self.path, "network.path")
        play = _Play(description, seed)
        vertices = self._nodes(description, play.graph, nodes)
        numbers = play.graph.numbers(vertices)
        events = description.events
        at_start = [event for event in events if event.time_s == 0]
        for event in at_start:
            play.happens(event)
        yield 0.0, play.routes(vertices, numbers)
        for time_s, together in groupby(events[len(at_start) :], key=attrgetter("time_s")):
            for event in together:
                play.happens(event)
            yield time_s, play.routes(vertices, numbers)

    def _nodes(self, description: Description, graph: Graph, nodes: int) -> list[int]:
        """The vertex of each node."""
        able = [name for name, service in description.services.items() if not service.supervisor]
        chosen = able
        if self.services is not None:
            matching = [self._matching(pattern, able) for pattern in self.services]
            chosen = list(dict.fromkeys(name for names in matching for name in names))
        for name in chosen:
            if not any(name in (link.origin, link.dest) for link in description.links):
                service = description.services[name]
                raise service.element.refuse(
                    f"{name!r} has no link; accepted: one, or network.services without it"
                )
        vertices = [vertex for name in chosen for vertex in graph.vertices[name]]
        if len(vertices) != nodes:
            counts = ", ".join(f"{len(graph.vertices[name])} of {name}" for name in chosen[:5])
            more = f", and of {len(chosen) - 5} more" if len(chosen) > 5 else ""
            raise BadInput(
                f"network.path: {self.path}: {len(vertices)} replicas ({counts}{more}) for {nodes} nodes; accepted:"
                f" nodes: {len(vertices)}, or network.services that pick {nodes}"
            )
        return vertices

    @staticmethod
    def _matching(pattern: str, names: list[str]) -> list[str]:
        try:
            found = [name for name in names if re.fullmatch(pattern, name)]
        except re.error as error:
            raise BadInput(f"network.services: {pattern!r}: {error}; accepted: regular expressions") from None
        if not found:
            raise BadInput(
                f"network.services: {pattern!r} matches no service; accepted: what matches some of {', '.join(names)}"
            )
        return found


class _Play:
    """A description in the course of its schedule.

    Args:
        description: the file.
        seed: the experiment's seed: which replicas join and leave is drawn.
    """

    def __init__(self, description: Description, seed: int) -> None:
        self._description, self._seed = description, seed
        links = [*description.links, *_new_links(description)]
        replicas = {name: _replicas(description, name) for name in description.services}
        self._directions = directions(links, len(description.links))
        self.graph = Graph(description, self._directions, replicas)
        joining = {
            event.name
            for event in description.events
            if isinstance(event, NodeEvent) and event.action == "join"
        }
        self._absent = {
            vertex for name in joining & set(description.services) for vertex in self.graph.vertices[name]
        }
        self._disconnected: set[int] = set()
        self._used: set[int] = set()
        self._drawn = 0

    def routes(self, nodes: list[int], numbers: list[int]) -> Routes:
        """The network as it is now."""
        rates = np.full(2 * len(nodes) + sum(number >= 2 * len(nodes) for number in numbers), np.inf)
        for number, arc in zip(numbers, self.graph.arcs, strict=True):
            rates[number] = self._directions[arc.direction].rate
        gone = frozenset(self._absent | self._disconnected)
        return Routes(
            rates, self.graph, numbers, nodes, list(self._directions), gone, self._description.metric
        )

    def happens(self, event: NodeEvent | LinkEvent) -> None:
        """Let one thing happen.

        Raises:
            BadInput: for what can't: a replica, bridge or link that joins though it's there, or leaves though it isn't.
        """
        if isinstance(event, LinkEvent):
            self._link_happens(event)
        else:
            self._replicas_happen(event)

    def _replicas_happen(self, event: NodeEvent) -> None:
        vertices = self.graph.vertices[event.name]
        there = {vertex for vertex in vertices if vertex not in self._absent}
        cut = there & self._disconnected
        service = self._description.services.get(event.name)
        can: set[int] = {
            "join": set(vertices) - there - (self._used if service and not service.reuse else set()),
            "leave": there,
            "crash": there,
            "disconnect": there - cut,
            "reconnect": cut,
        }[event.action]
        if len(can) < event.amount:
            raise event.element.refuse(
                f"{event.action} of {event.amount} of {event.name!r} at {event.time_s:g} s; accepted: up to {len(can)}"
            )
        self._drawn += 1
        rng = generator(self._seed, "network.kollaps", self._drawn)
        chosen = {int(vertex) for vertex in rng.choice(sorted(can), event.amount, replace=False)}
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

    def _link_happens(self, event: LinkEvent) -> None:
        there = event.action != "join"
        ahead = [n for n in self._between(event.origin, event.dest) if self._directions[n].present == there]
        if not ahead:
            state = "there" if there else "away"
            raise event.element.refuse(
                f"link from {event.origin!r} to {event.dest!r} at {event.time_s:g} s; accepted: one that is {state}"
            )
        back = self._between(event.dest, event.origin)
        links = {self._directions[n].link for n in ahead}
        both = [*ahead, *(n for n in back if self._directions[n].link in links)]
        values = event.values
        if values.download is not None and not back:
            raise event.element.refuse("download: the link has no such direction; accepted: upload")
        if event.action != "change":
            self._change(both, present=event.action == "join")
        self._change(both, latency_s=values.latency_s, jitter_s=values.jitter_s, drop=values.drop)
        self._change(ahead, rate=values.upload)
        self._change(back, rate=values.download)

    def _between(self, origin: str, dest: str) -> list[int]:
        return [
            number
            for number, direction in enumerate(self._directions)
            if (direction.origin, direction.dest) == (origin, dest)
        ]

    def _change(self, numbers: list[int], **values: float | bool | None) -> None:
        said: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        for number in numbers:
            self._directions[number] = replace(self._directions[number], **said)


def _new_links(description: Description) -> list[Link]:
    """Links that the schedule lets join, and that the file doesn't have otherwise."""
    known = {(link.origin, link.dest) for link in description.links}
    known |= {(link.dest, link.origin) for link in description.links if link.values.download is not None}
    found = []
    for event in description.events:
        if not isinstance(event, LinkEvent) or event.action != "join" or (event.origin, event.dest) in known:
            continue
        if event.values.upload is None or event.values.latency_s is None:
            raise event.element.refuse("is a new link; accepted: with upload and latency")
        found.append(Link(event.origin, event.dest, event.values, event.element))
        known.add((event.origin, event.dest))
        if event.values.download is not None:
            known.add((event.dest, event.origin))
    return found


def _replicas(description: Description, name: str) -> int:
    """How many replicas a service ever has at once, or in all where none is used again: as the schedule lets them join,
    else as the service says."""
    service = description.services[name]
    events = [event for event in description.events if isinstance(event, NodeEvent) and event.name == name]
    joined = sum(event.amount for event in events if event.action == "join")
    if not joined:
        return service.replicas
    if not service.reuse:
        return joined
    now = most = 0
    for event in events:
        now += {"join": event.amount, "leave": -event.amount, "crash": -event.amount}.get(event.action, 0)
        most = max(most, now)
    return most
