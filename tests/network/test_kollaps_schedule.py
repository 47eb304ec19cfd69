"""The schedule of a Kollaps file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gossamer
from gossamer import Experiment
from gossamer.errors import BadInput
from gossamer.network import Conditions, Kollaps
from gossamer.runtime.setup import prepare

MBPS = 125_000
STAR = """<experiment boot="kollaps:2.0">
    <services> <service name="a"{a}/> <service name="b"{b}/> </services>
    <bridges> <bridge name="s"/> <bridge name="t"/> </bridges>
    <links>
        <link origin="a" dest="s" latency="10" upload="1Mbps" download="2Mbps" drop="0.1"/>
        <link origin="s" dest="t" latency="20" upload="3Mbps"/>
        <link origin="t" dest="s" latency="40" upload="4Mbps"/>
        <link origin="t" dest="b" latency="80" upload="5Mbps" download="6Mbps"/>
    </links>
    <dynamic> {events} </dynamic>
</experiment>"""


def course(
    tmp_path: Path, *events: str, nodes: int = 2, a: str = "", b: str = "", seed: int = 1
) -> dict[float, Conditions]:
    """The network after each change, by time."""
    path = tmp_path / "star.xml"
    path.write_text(STAR.format(a=a, b=b, events=" ".join(f"<schedule {event}/>" for event in events)))
    network = Kollaps(path=path)
    return {0: network.conditions(nodes, seed), **dict(network.changes(nodes, seed))}


def seen(conditions: Conditions, source: int = 0, to: int = 1) -> tuple[float, float, list[float]] | None:
    """Milliseconds, loss and the links' rates of a path."""
    path = conditions.path(source, to)
    if path is None:
        return None
    rates = (conditions.rates[list(path.links)] / MBPS).tolist()
    return round(1000 * path.latency_s, 9), round(path.loss, 9), rates


AHEAD, BACK = (110, 0.1, [1, 3, 5]), (130, 0.1, [6, 4, 2])


def test_event_changes_only_the_named_properties_of_its_link(tmp_path: Path) -> None:
    states = course(
        tmp_path,
        'origin="a" dest="s" time="5" upload="10Mbps" download="20Mbps" drop="0"',
        'origin="s" dest="t" time="2.5" latency="21" upload="30Mbps"',
        'origin="s" dest="a" time="7" upload="200Mbps" latency="1"',
    )
    assert list(states) == [0, 2.5, 5, 7]  # sorted by time
    assert [seen(states[at_s]) for at_s in states] == [
        AHEAD,
        (111, 0.1, [1, 30, 5]),
        (111, 0, [10, 30, 5]),
        (102, 0, [10, 30, 5]),
    ]
    assert [seen(states[at_s], 1, 0) for at_s in states] == [
        BACK,
        BACK,  # the link from t to s is separate
        (130, 0, [6, 4, 20]),
        (121, 0, [6, 4, 200]),
    ]


def test_links_leave_and_rejoin(tmp_path: Path) -> None:
    states = course(
        tmp_path,
        'origin="a" dest="s" time="1" action="leave"',
        'origin="a" dest="s" time="2" action="join" latency="11"',
        'origin="s" dest="t" time="3" action="leave"',
        'origin="s" dest="t" time="4" action="join"',
    )
    assert [seen(conditions) for conditions in states.values()] == [
        *(AHEAD, None, (111, 0.1, [1, 3, 5]), None, (111, 0.1, [1, 3, 5])),
    ]
    there = [seen(conditions, 1, 0) is not None for conditions in states.values()]
    assert there == [True, False, True, True, True]
    assert len({len(conditions.rates) for conditions in states.values()}) == 1


def test_events_at_time_zero_apply_to_the_start(tmp_path: Path) -> None:
    states = course(
        tmp_path, 'origin="a" dest="s" time="0" upload="9Mbps"', 'name="a" time="0.0" action="join"'
    )
    assert list(states) == [0]
    assert seen(states[0]) == (110, 0.1, [9, 3, 5])


def test_replicas_joining_at_the_start_are_the_nodes(tmp_path: Path) -> None:
    event = 'name="b" time="0" action="join" amount="3"'
    states = course(tmp_path, event, nodes=4, b=' replicas="7"')
    assert all(states[0].path(0, rank) for rank in (1, 2, 3))


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (
            'name="b" time="1" action="join"',
            "'time': '1', 'action': 'join'}; accepted: services that join at 0 s",
        ),
        ('name="b" time="0" action="crash"', "'action': 'crash'}; accepted: services that join at 0 s"),
        ('name="b" time="0"', "action: missing; a value is required"),
        ('name="c" time="0" action="join"', "'c'; accepted: a service or a bridge"),
        ('name="b" time="0" action="join" amount="0"', "amount: got '0'; accepted: greater than 0"),
        ('origin="a" dest="b" time="1" action="leave"', "a link from 'a' to 'b' at 1 s; accepted: a link"),
        ('origin="a" dest="b" time="1" download="3Mbps"', "at 1 s; accepted: a link of <links>"),
        ('origin="a" dest="s" time="1" action="flap"', "action: got 'flap'; accepted: 'join' or 'leave'"),
        ('origin="a" dest="s" time="-1" latency="2"', "time: got '-1'; accepted: greater than or equal to 0"),
        ('origin="a" dest="x" time="1" upload="1Mbps"', "'x'; accepted: a service or a bridge"),
        ('origin="a" dest="s" time="1" upload="1MBps"', "upload: got '1MBps'; accepted: a number above 0"),
        ('time="1"', "origin: missing; a value is required"),
    ],
)
def test_invalid_events_are_refused(tmp_path: Path, event: str, problem: str) -> None:
    with pytest.raises(BadInput) as error:
        course(tmp_path, event)
    assert problem in str(error.value)
    assert re.match(rf"network\.path: {tmp_path / 'star.xml'}(, line \d+)?: ", str(error.value))


# --- messages lost in flight

CIRCLE = """<experiment boot="kollaps:2.0">
    <services> <service name="a"/> <service name="b"/> <service name="c"/> </services>
    <bridges> <bridge name="s"/> <bridge name="t"/> </bridges>
    <links>
        <link origin="a" dest="s" latency="10" upload="1Mbps" download="1Mbps"/>
        <link origin="b" dest="s" latency="10" upload="1Mbps" download="1Mbps"/>
        <link origin="c" dest="t" latency="10" upload="1Mbps" download="1Mbps"/>
        <link origin="s" dest="t" latency="10" upload="1Mbps" download="1Mbps"/>
        <link origin="s" dest="t" latency="20" upload="1Mbps"/>
        <link origin="t" dest="s" latency="20" upload="1Mbps"/>
    </links>
    <dynamic> <schedule time="0.05" {event}/> </dynamic>
</experiment>"""


def on_a_circle(path: Path, event: str, algorithm: str) -> Experiment:
    """An experiment with three nodes, one of them behind another bridge."""
    path.write_text(CIRCLE.format(event=event))
    described: dict[str, Any] = {
        "nodes": 3,
        "task": {"name": "least-squares", "features": 2, "samples": 12},
        "topology": "complete",
        "algorithm": algorithm,
        "network": {"name": "kollaps", "path": str(path)},
        "compute": {"name": "constant", "seconds_per_step": 0.02},
        "stop": {"rounds": 4},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return Experiment.of(described)


@pytest.mark.parametrize("algorithm", ["d-psgd", "sgp"])
@pytest.mark.parametrize(
    "event",
    [
        'origin="a" dest="s" upload="6Mbps"',
        'origin="c" dest="t" latency="30"',
        'origin="a" dest="s" drop="0"',
    ],
)
def test_changing_network_without_loss_suits_all_algorithms(
    tmp_path: Path, event: str, algorithm: str
) -> None:
    """The network changes, but every path remains."""
    run = gossamer.run(on_a_circle(tmp_path / "circle.xml", event, algorithm), tmp_path)
    assert run.status == "done"
    assert run.metrics["messages_lost"].sum() == 0
    assert run.metrics["time_s"].max() > 0.05


@pytest.mark.parametrize(
    "event",
    [
        'origin="a" dest="s" action="leave"',
        'origin="s" dest="b" drop="0.001"',
    ],
)
def test_later_loss_is_refused_without_a_timeout(tmp_path: Path, event: str) -> None:
    with pytest.raises(BadInput, match=r"gather\.timeout_s: null, although messages are lost"):
        prepare(on_a_circle(tmp_path / "circle.xml", event, "d-psgd"))
    with pytest.raises(BadInput, match="network: sgp tolerates no message loss"):
        prepare(on_a_circle(tmp_path / "circle.xml", event, "sgp"))
