"""Paths of Kollaps files: shortest routes, and the properties of their links."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.registry import build
from gossamer.network import Conditions, Kollaps

MBPS = 125_000


def xml(services: str, links: str, bridges: str = "", rest: str = "") -> str:
    return f"""<?xml version="1.0"?>
    <experiment boot="kollaps:2.0">
        <services>{services}</services> <bridges>{bridges}</bridges> <links>{links}</links> {rest}
    </experiment>"""


def start(folder: Path, text: str, nodes: int, **fields: object) -> Conditions:
    """The network at the start."""
    path = folder / "topology.xml"
    path.write_text(text)
    network = build("network", {"name": "kollaps", "path": str(path), **fields})
    assert isinstance(network, Kollaps)
    return network.conditions(nodes, 1)


def crossed(conditions: Conditions, source: int, to: int) -> list[float]:
    """The finite link rates of a path, in megabits per second."""
    path = conditions.path(source, to)
    assert path
    rates = conditions.rates[list(path.links)] / MBPS
    return rates[np.isfinite(rates)].tolist()


DUMBBELL = xml(
    '<service name="a"/> <service name="boss" supervisor="true"/> <service name="b" replicas="2"/>',
    """<link origin="a" dest="s" latency="10" upload="100Mbps" download="200Mbps" drop="0.1" jitter="3"/>
    <link origin="s" dest="t" latency="20" upload="1.5Gbps" download="40Kbps" drop="0.5" jitter="4" network="n"/>
    <link origin="t" dest="b" latency="5" upload="7Mbps" download="8Mbps" network="n"/>""",
    '<bridge name="s"/> <bridge name="t"/>',
)


def test_latency_jitter_and_loss_accumulate_along_a_path(tmp_path: Path) -> None:
    conditions = start(tmp_path, DUMBBELL, 3)
    path, back = conditions.path(0, 1), conditions.path(2, 0)
    assert path
    assert back
    assert (path.latency_s, path.jitter_s, path.loss) == pytest.approx((0.035, 0.005, 0.55))
    assert (back.latency_s, back.jitter_s, back.loss) == pytest.approx((0.035, 0.005, 0.55))
    assert crossed(conditions, 0, 1) == [100, 1500, 7]
    assert crossed(conditions, 2, 0) == pytest.approx([8, 0.04, 200])


def test_only_link_of_a_node_is_its_uplink_and_downlink(tmp_path: Path) -> None:
    conditions = start(tmp_path, DUMBBELL, 3)
    assert (conditions.rates[:6] / MBPS).tolist() == [100, 8, 8, 200, 7, 7]
    ahead, other, beside = conditions.path(0, 1), conditions.path(0, 2), conditions.path(1, 2)
    assert ahead
    assert other
    assert beside
    assert ahead.links[0] == other.links[0] == 0
    assert (ahead.links[-1], other.links[-1]) == (4, 5)
    assert ahead.links[1:-1] == other.links[1:-1]
    assert len(ahead.links) == 3
    assert beside.links == (1, 5)


def test_services_may_be_linked_without_a_bridge(tmp_path: Path) -> None:
    text = xml(
        '<service name="a"/><service name="b"/>', '<link origin="a" dest="b" latency="1" upload="3bps"/>'
    )
    conditions = start(tmp_path, text, 2)
    assert crossed(conditions, 0, 1) == pytest.approx([3e-6])
    assert conditions.path(1, 0) is None  # a link without a download leads one way


def test_each_pair_of_replicas_has_its_own_link(tmp_path: Path) -> None:
    text = xml(
        '<service name="a" replicas="2"/><service name="b" replicas="2"/>',
        '<link origin="a" dest="b" latency="1" upload="5Mbps" download="5Mbps"/>',
    )
    conditions = start(tmp_path, text, 4)
    paths = [conditions.path(source, to) for source in (0, 1) for to in (2, 3)]
    inner = [path.links[1:-1] for path in paths if path]
    assert len(set(inner)) == 4
    relayed = conditions.path(0, 1)  # as in Kollaps, via a replica of the other service
    assert relayed
    assert relayed.latency_s == 0.002


@pytest.mark.parametrize(("metric", "rates"), [("hop", [1, 2]), ("latency", [3, 4, 5])])
def test_paths_are_shortest_by_hops_or_by_latency(tmp_path: Path, metric: str, rates: list[float]) -> None:
    text = xml(
        '<service name="a"/><service name="b"/>',
        "".join(
            f'<link origin="{origin}" dest="{dest}" latency="{latency}" upload="{rate}Mbps"/>'
            for rate, (origin, dest, latency) in enumerate(
                [("a", "s", 9), ("s", "b", 9), ("a", "t", 1), ("t", "u", 1), ("u", "b", 1)], start=1
            )
        ),
        "".join(f'<bridge name="{name}"/>' for name in "stu"),
        f'<config shortest_path="{metric}"/>',
    )
    assert crossed(start(tmp_path, text, 2), 0, 1) == rates


@pytest.mark.parametrize("metric", ["hop", "latency"])
def test_ties_between_paths_go_to_the_first_in_the_file(tmp_path: Path, metric: str) -> None:
    """By latency, fewer hops break ties; 0.1 + 0.2 counts as 0.3."""
    hops = [("a", "u", 0.1), ("u", "v", 0.2), ("v", "b", 0.1), ("a", "t", 0.1), ("a", "s", 0.3)]
    hops += [("s", "b", 0.1), ("t", "b", 0.3), ("s", "b", 0.1)]
    links = "".join(
        f'<link origin="{origin}" dest="{dest}" latency="{latency}" upload="{rate}Mbps"/>'
        for rate, (origin, dest, latency) in enumerate(hops, start=1)
    )
    text = xml(
        '<service name="a"/><service name="b"/>',
        links,
        "".join(f'<bridge name="{name}"/>' for name in "stuv"),
        f'<config shortest_path="{metric}"/>',
    )
    assert crossed(start(tmp_path, text, 2), 0, 1) == [4, 7]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), metric=st.sampled_from(["hop", "latency"]))
def test_path_lengths_match_networkx(
    tmp_path_factory: pytest.TempPathFactory, seed: int, metric: str
) -> None:
    rng = np.random.default_rng(seed)
    services, bridges = int(rng.integers(2, 6)), int(rng.integers(0, 7))
    names = [f"s{k}" for k in range(services)] + [f"b{k}" for k in range(bridges)]
    pairs = [(a, b) for a in names for b in names if a != b]
    chosen = [pair for pair in pairs if rng.random() < 2.5 / len(names)]
    used = {name for pair in chosen for name in pair}
    chosen += [(name, names[name == names[0]]) for name in names[:services] if name not in used]
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(names)
    links = []
    for rate, (origin, dest) in enumerate(chosen, start=1):
        values = {
            "latency": int(rng.integers(20)),
            "jitter": int(rng.integers(20)),
            "drop": float(rng.choice([0, 0.1, 0.5])),
        }
        graph.add_edge(origin, dest, rate=rate, **values)
        attributes = " ".join(f'{name}="{value}"' for name, value in values.items())
        links.append(f'<link origin="{origin}" dest="{dest}" {attributes} upload="{rate}Mbps"/>')
    text = xml(
        "".join(f'<service name="{name}"/>' for name in names[:services]),
        "".join(links),
        "".join(f'<bridge name="{name}"/>' for name in names[services:]),
        f'<config shortest_path="{metric}"/>',
    )
    conditions = start(tmp_path_factory.mktemp("graph"), text, services)
    by_rate = {values["rate"]: (origin, dest, values) for origin, dest, values in graph.edges(data=True)}
    weight = None if metric == "hop" else "latency"
    for source in range(services):
        lengths = nx.single_source_dijkstra_path_length(graph, names[source], weight=weight or (lambda *_: 1))
        for to in range(services):
            path = conditions.path(source, to)
            if source == to or names[to] not in lengths:
                assert path is None
                continue
            assert path
            edges = [by_rate[round(rate)] for rate in crossed(conditions, source, to)]
            assert edges[0][0] == names[source]
            assert edges[-1][1] == names[to]
            assert all(first[1] == second[0] for first, second in pairwise(edges))
            values = [edge[2] for edge in edges]
            length = len(edges) if metric == "hop" else sum(value["latency"] for value in values)
            assert length == lengths[names[to]]
            assert path.latency_s == pytest.approx(sum(value["latency"] for value in values) / 1000)
            assert path.jitter_s == pytest.approx(
                math.sqrt(sum(value["jitter"] ** 2 for value in values)) / 1000
            )
            assert path.loss == pytest.approx(1 - math.prod(1 - value["drop"] for value in values))
            assert (path.links[0], path.links[-1]) == (source, services + to)
            assert all(2 * services <= link < len(conditions.rates) for link in path.links[1:-1])
