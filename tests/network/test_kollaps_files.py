"""Kollaps files: published examples, those of this repository, and invalid ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.network import Kollaps

ROOT = os.environ.get("GOSSAMER_DATA_ROOT")
DIVSHARE = Path(__file__).parents[2] / "experiments" / "divshare"
MBPS = 125_000
GOOD = '<experiment boot="x"><services>{services}</services><links>{links}</links>{rest}</experiment>'
SERVICES = '<service name="a"/><service name="b"/>'
LINKS = '<link origin="a" dest="b" latency="1" upload="1Mbps"/>'

EXAMPLES = {
    "iperf3_complextopology": 8,
    "iperf3_dynamic": 6,
    "iperf3_example": 6,
    "iperf3_linklevel": 2,
    "iperf3_topology": 6,
    "iperf3network_topology": 3,
    "memcached_largescale": 16,
    "memcached_topology": 3,
    "ping_topology": 2,
}
"""The examples of Kollaps, with their numbers of nodes."""


@pytest.mark.data
@pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no Kollaps examples")
@pytest.mark.parametrize("name", EXAMPLES)
def test_published_examples_are_read(tmp_path: Path, name: str) -> None:
    text = (Path(str(ROOT)) / "network" / "kollaps" / f"{name}.xml").read_text()
    file = tmp_path / "example.xml"  # without leaving services, which are refused
    file.write_text(re.sub(r'<schedule name="[^>]*(leave|crash)[^>]*/>', "", text))
    network = Kollaps(path=file)
    nodes = EXAMPLES[name]
    start = network.conditions(nodes, 1)
    for conditions in (start, *(later for _, later in network.changes(nodes, 1))):
        assert len(conditions.rates) == len(start.rates)
        for source in range(nodes):
            for to in set(range(nodes)) - {source}:
                path = conditions.path(source, to)
                assert conditions is not start or path is not None
                assert path is None or (path.latency_s > 0 and max(path.links) < len(start.rates))
    with pytest.raises(BadInput, match=f"{nodes} replicas for {nodes + 1} nodes; accepted: nodes: {nodes}"):
        network.conditions(nodes + 1, 1)


@pytest.mark.data
@pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no Kollaps examples")
def test_regions_of_a_published_example_have_one_way_links() -> None:
    """The two directions between regions are separate links with different jitter."""
    conditions = Kollaps(
        path=Path(str(ROOT)) / "network" / "kollaps" / "memcached_largescale.xml"
    ).conditions(16, 1)
    oregon, ireland = 0, 4
    there, back = conditions.path(oregon, ireland), conditions.path(ireland, oregon)
    assert there
    assert back
    assert (there.latency_s, there.jitter_s) == pytest.approx((0.087, 0.009899))
    assert (back.latency_s, back.jitter_s) == pytest.approx((0.087, 0.007778))
    assert (conditions.rates[list(there.links)] / MBPS).tolist() == [1000, 100, 1000]


@pytest.mark.parametrize(("name", "slow"), [("star-60", [12, 12, 12, 13, 10, 13, 11]), ("star-60-30", None)])
def test_star_files_of_divshare_have_their_rates(name: str, slow: list[float] | None) -> None:
    if slow is None:
        slow = np.rint(np.random.default_rng(30).normal(12, 1, 30)).tolist()  # as the file says
    conditions = Kollaps(path=DIVSHARE / f"{name}.xml").conditions(60, 1)
    assert (conditions.rates / MBPS).tolist() == 2 * [*slow, *[60] * (60 - len(slow))]
    for pair in ((0, 59), (59, 0), (1, 2)):
        path = conditions.path(*pair)
        assert path
        assert (path.links, path.latency_s, path.loss) == ((pair[0], 60 + pair[1]), 0.002, 0)


def load(tmp_path: Path, text: str | bytes, nodes: int = 2, **fields: object) -> None:
    path = tmp_path / "bad.xml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    network = build("network", {"name": "kollaps", "path": str(path), **fields})
    assert isinstance(network, Kollaps)
    network.conditions(nodes, 1)


def test_smallest_file_is_accepted(tmp_path: Path) -> None:
    load(tmp_path, GOOD.format(services=SERVICES, links=LINKS, rest=""))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"services": SERVICES + "<node/>"}, "<node>; accepted: <experiment> with bridge, "),
        ({"services": SERVICES + "<service/>"}, "<service>.name: missing; a value is required"),
        (
            {"services": SERVICES + '<service name="a"/>'},
            "a second 'a', after line 3; accepted: a name for each service and bridge",
        ),
        (
            {"services": '<service name="a" replicas="2.5"/>'},
            "<service>.replicas: got '2.5'; accepted: an integer",
        ),
        ({"services": '<service name="a" share="true"/>'}, "share: got 'true'; accepted: 'false'"),
        (
            {"links": '<link origin="a" dest="b" latency="1"/>'},
            "<link>.upload: missing; a value is required",
        ),
        ({"links": LINKS.replace('"b"', '"c"')}, "'c'; accepted: a service or a bridge"),
        ({"links": LINKS.replace('"1"', '"-1"')}, "latency: got '-1'; accepted: greater than or equal to 0"),
        ({"links": LINKS.replace('"1"', '"1ms"')}, "latency: got '1ms'; accepted: a number"),
        ({"links": LINKS.replace('"1"', '"nan"')}, "latency: got 'nan'; accepted: a finite number"),
        (
            {"links": LINKS.replace("1Mbps", "0Mbps")},
            "upload: got '0Mbps'; accepted: a number above 0 with Kbps",
        ),
        ({"links": LINKS.replace("1Mbps", "1 Mbps")}, "upload: got '1 Mbps'; accepted: a number above 0"),
        (
            {"links": LINKS.replace("/>", ' drop="1.5"/>')},
            "drop: got '1.5'; accepted: less than or equal to 1",
        ),
        ({"links": LINKS.replace("/>", ' mtu="1500"/>')}, "<link>.mtu: unknown field; accepted: dest, "),
        ({"rest": "<routers/>"}, "<routers>; accepted: <experiment> with"),
        (
            {"rest": '<config shortest_path="widest"/>'},
            "shortest_path: got 'widest'; accepted: 'hop' or 'latency'",
        ),
    ],
)
def test_invalid_descriptions_are_refused(tmp_path: Path, parts: dict[str, str], problem: str) -> None:
    text = GOOD.format(**{"services": SERVICES, "links": LINKS, "rest": "", **parts})
    with pytest.raises(BadInput, match=problem) as error:
        load(tmp_path, "\n\n" + text)
    assert f"network.path: {tmp_path / 'bad.xml'}, line 3: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<experiment><services>", "line 1, column .*: no element found; accepted: well-formed XML"),
        ("", "line 1, column .*: no element found; accepted: well-formed XML"),
        (b"\xff\xfe\x00", "accepted: well-formed XML"),
        ("<topology/>", "<topology>; accepted: <experiment>"),
        ('<?xml version="1.0" encoding="bogus"?><experiment/>', "accepted: XML in UTF-8"),
        ("<experiment/>", "0 replicas for 2 nodes"),
        (
            '<!DOCTYPE x [<!ENTITY a "b">]><experiment boot="&a;"/>',
            "a document type; accepted: XML without one",
        ),
        (
            '<!DOCTYPE x SYSTEM "file:///etc/passwd"><experiment/>',
            "a document type; accepted: XML without one",
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        load(tmp_path, text)


def test_other_numbers_of_nodes_are_refused(tmp_path: Path) -> None:
    text = GOOD.format(services=SERVICES, links=LINKS, rest="")
    with pytest.raises(BadInput, match="2 replicas for 3 nodes; accepted: nodes: 2"):
        load(tmp_path, text, 3)
    with pytest.raises(BadInput, match="No such file or directory"):
        Kollaps(path=tmp_path / "gone.xml").conditions(2, 1)
