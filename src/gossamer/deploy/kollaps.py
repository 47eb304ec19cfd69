"""An experiment's network as a topology file of Kollaps, which emulates it for real containers.

Each node is a service behind a bridge, and the link between them has the node's uplink and downlink. Where nodes' own
links are all that matters there is one bridge; else each has its own, and the bridges of each two nodes are linked, with
the latency, jitter, loss and rate of the path between these two. Read again (``network: {name: kollaps, ...}``), the
file is the same network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from gossamer.config import Experiment
from gossamer.errors import BadInput
from gossamer.network import Conditions, Kollaps
from gossamer.network.access import Access, Spokes
from gossamer.network.network import Path as NetworkPath

UNLIMITED = "1000Gbps"
"""Kollaps knows no link without a limit."""


def kollaps_xml(experiment: Experiment, image: str = "gossamer", command: str = "['{rank}']") -> str:
    """The topology file of an experiment's network.

    Args:
        experiment: what is run; one whose network was read from a Kollaps file gives that file.
        image: of the services' containers.
        command: of each container; ``{rank}`` is its node's.

    Raises:
        BadInput: for a network that changes with time, or one with links between the nodes' own that several pairs
            share: no path of a Kollaps file is like that without further bridges that nobody has described.
    """
    network, nodes = experiment.network, experiment.nodes
    if isinstance(network, Kollaps):
        return Path(network.path).read_text(encoding="utf-8")
    conditions = network.conditions(nodes, experiment.seed)
    if next(iter(network.changes(nodes, experiment.seed)), None) is not None:
        raise BadInput(
            f"network: {network.name_of()} changes with time; accepted: one that stays, or a Kollaps file"
        )
    own = _own_links(conditions, nodes)
    services = [
        f"<service name={quoteattr(_node(rank))} image={quoteattr(image)}"
        f' command={quoteattr(command.format(rank=rank))} replicas="1"/>'
        for rank in range(nodes)
    ]
    bridges = [_bridge(rank) for rank in range(nodes)] if own is None else ["switch"]
    links = []
    for rank in range(nodes):
        up, down = conditions.rates[rank], conditions.rates[nodes + rank]
        rates = f'upload="{_rate(up)}" download="{_rate(down)}"'
        dest, quality = (
            (_bridge(rank), _quality(0, 0, 0)) if own is None else ("switch", _quality(*own[rank]))
        )
        links.append(f'<link origin="{_node(rank)}" dest="{dest}" {quality} {rates}/>')
    if own is None:
        links += _between(conditions, nodes)
    sections = {
        "services": services,
        "bridges": [f'<bridge name="{name}"/>' for name in bridges],
        "links": links,
    }
    body = "\n".join(_section(tag, lines) for tag, lines in sections.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<experiment boot="kollaps:2.0">\n{body}\n</experiment>\n'


def _own_links(conditions: Conditions, nodes: int) -> list[tuple[float, float, float]] | None:
    """Latency, jitter and loss of each node's own link, where a path is two of these; of which latencies and variances of
    jitter add up, and a message survives both or is lost."""
    if isinstance(conditions, Access):
        drop = 1 - math.sqrt(1 - conditions.loss)
        return [(conditions.latency_s / 2, conditions.jitter_s / math.sqrt(2), drop)] * nodes
    if isinstance(conditions, Spokes):
        columns = (conditions.latency_s, conditions.jitter_s, conditions.loss)
        return [(float(a), float(b), float(c)) for a, b, c in zip(*columns, strict=True)]
    return None


def _between(conditions: Conditions, nodes: int) -> Iterable[str]:
    """The links between the nodes' bridges, one for each direction."""
    crossed: dict[int, tuple[int, int]] = {}
    for source in range(nodes):
        for to in range(nodes):
            path = None if source == to else conditions.path(source, to)
            if path is None:
                continue
            rate = _inner_rate(conditions, path, nodes)
            for link in path.links:
                shared = crossed.setdefault(link, (source, to))
                if link >= 2 * nodes and shared != (source, to):
                    raise BadInput(
                        f"network: nodes {shared[0]} and {shared[1]} share a link with nodes {source} and {to}; accepted:"
                        " one that limits nodes, or pairs of them, or a Kollaps file"
                    )
            quality = _quality(path.latency_s, path.jitter_s, path.loss)
            yield f'<link origin="{_bridge(source)}" dest="{_bridge(to)}" {quality} upload="{_rate(rate)}"/>'


def _inner_rate(conditions: Conditions, path: NetworkPath, nodes: int) -> float:
    inner = [float(conditions.rates[link]) for link in path.links if link >= 2 * nodes]
    return min([path.rate, *inner])


def _node(rank: int) -> str:
    return f"node-{rank}"


def _bridge(rank: int) -> str:
    return f"bridge-{rank}"


def _quality(latency_s: float, jitter_s: float, drop: float) -> str:
    said = f'latency="{_number(1000 * latency_s)}"'
    if jitter_s:
        said += f' jitter="{_number(1000 * jitter_s)}"'
    if drop:
        said += f' drop="{_number(drop)}"'
    return said


def _rate(bytes_per_second: float) -> str:
    return UNLIMITED if math.isinf(bytes_per_second) else f"{_number(bytes_per_second * 8)}bps"


def _number(value: float) -> str:
    """Without a power of ten, and as many digits as it takes."""
    return np.format_float_positional(value, trim="-")


def _section(tag: str, lines: list[str]) -> str:
    inside = "".join(f"    {line}\n" for line in lines)
    return f"  <{tag}>\n{inside}  </{tag}>"
