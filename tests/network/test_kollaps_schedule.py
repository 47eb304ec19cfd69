"""The schedule of a Kollaps file."""

from __future__ import annotations

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


def test_a_link_changes_as_the_event_says_and_no_more(tmp_path: Path) -> None:
    states = course(
        tmp_path,
        'origin="a" dest="s" time="5" upload="10Mbps" download="20Mbps" drop="0"',
        'origin="s" dest="t" time="2.5" latency="21" upload="30Mbps"',
        'origin="s" dest="a" time="7" upload="200Mbps" latency="1"',
    )
    assert list(states) == [0, 2.5, 5, 7]  # in the order of time
    assert [seen(states[at_s]) for at_s in states] == [
        AHEAD,
        (111, 0.1, [1, 30, 5]),
        (111, 0, [10, 30, 5]),
        (102, 0, [10, 30, 5]),
    ]
    assert [seen(states[at_s], 1, 0) for at_s in states] == [
        BACK,
        BACK,  # the link from t to s is another one
        (130, 0, [6, 4, 20]),
        (121, 0, [6, 4, 200]),
    ]


def test_links_and_bridges_leave_and_come_back(tmp_path: Path) -> None:
    states = course(
        tmp_path,
        'origin="a" dest="s" time="1" action="leave"',
        'origin="a" dest="s" time="2" action="join" latency="11"',
        'origin="s" dest="t" time="3" action="leave"',
        'origin="s" dest="t" time="4" action="join"',
        'name="t" time="5" action="leave"',
        'name="t" time="6" action="join"',
    )
    assert [seen(conditions) for conditions in states.values()] == [
        *(AHEAD, None, (111, 0.1, [1, 3, 5]), None, (111, 0.1, [1, 3, 5]), None, (111, 0.1, [1, 3, 5])),
    ]
    there = [seen(conditions, 1, 0) is not None for conditions in states.values()]
    assert there == [True, False, True, True, True, False, True]
    assert len({len(conditions.rates) for conditions in states.values()}) == 1


def test_a_new_link_may_join(tmp_path: Path) -> None:
    states = course(tmp_path, 'origin="a" dest="t" time="3" action="join" latency="1" upload="7Mbps"')
    # a will have two links: neither is its uplink
    assert seen(states[0]) == (110, 0.1, [float("inf"), 1, 3, 5])
    assert seen(states[3]) == (81, 0, [float("inf"), 7, 5])
    assert seen(states[3], 1, 0) == (130, 0.1, [6, 4, 2, float("inf")])


def test_what_happens_at_the_start_is_the_start(tmp_path: Path) -> None:
    states = course(
        tmp_path, 'origin="a" dest="s" time="0" upload="9Mbps"', 'name="a" time="0.0" action="join"'
    )
    assert list(states) == [0]
    assert seen(states[0]) == (110, 0.1, [9, 3, 5])


def test_replicas_join_leave_and_disconnect(tmp_path: Path) -> None:
    """There are as many nodes as are ever present at once; the seed draws which of them are affected."""
    events = (
        'name="b" time="0" action="join" amount="2"',
        'name="b" time="1" action="join"',
        'name="b" time="2" action="crash" amount="2"',
        'name="b" time="3" action="join" amount="2"',
        'name="b" time="4" action="disconnect" amount="3"',
        'name="b" time="5" action="reconnect"',
        'name="b" time="6" action="leave" amount="3"',
    )

    def reached(seed: int) -> list[set[int]]:
        states = course(tmp_path, *events, nodes=4, b=' replicas="7"', seed=seed)
        for conditions in states.values():
            there = {rank for rank in (1, 2, 3) if conditions.path(0, rank)}
            assert there == {rank for rank in (1, 2, 3) if conditions.path(rank, 0)}
            assert all(
                bool(conditions.path(i, j)) == ({i, j} <= there)
                for i in (1, 2, 3)
                for j in (1, 2, 3)
                if i != j
            )
        return [{rank for rank in (1, 2, 3) if conditions.path(0, rank)} for conditions in states.values()]

    assert [len(ranks) for ranks in reached(1)] == [2, 3, 1, 3, 0, 1, 0]
    assert reached(1) == reached(1)
    courses = [reached(seed) for seed in range(12)]
    assert {frozenset(ranks[2]) for ranks in courses} == {frozenset([1]), frozenset([2]), frozenset([3])}


def test_replicas_that_are_not_used_again(tmp_path: Path) -> None:
    events = (
        'name="b" time="0" action="join"',
        'name="b" time="1" action="leave"',
        'name="b" time="2" action="join"',
    )
    states = course(tmp_path, *events, nodes=3, b=' reuse="false"')
    ranks = [{rank for rank in (1, 2) if conditions.path(0, rank)} for conditions in states.values()]
    assert sorted(map(len, ranks)) == [0, 1, 1]
    assert ranks[0] != ranks[2]
    assert len(course(tmp_path, *events, nodes=2)) == 3  # else it's the same one again


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('name="b" time="1" action="leave" amount="2"', "leave of 2 of 'b' at 1 s; accepted: up to 1"),
        ('name="b" time="1" action="reconnect"', "reconnect of 1 of 'b' at 1 s; accepted: up to 0"),
        ('name="t" time="1" action="join"', "join of 1 of 't' at 1 s; accepted: up to 0"),
        ('name="t" time="1" action="crash"', "'crash' of the bridge 't'; accepted: join, leave"),
        (
            'name="b" time="1" action="explode"',
            "action: got 'explode'; accepted: 'join', 'leave', 'crash', 'disconnect' or 'reconnect'",
        ),
        ('name="b" time="1"', "action: missing; a value is required"),
        ('name="c" time="1" action="join"', "'c'; accepted: a service or a bridge"),
        (
            'name="b" time="1" action="join" upload="1Mbps"',
            "upload: unknown field; accepted: action, amount, name, time",
        ),
        ('name="b" time="1" action="leave" amount="0"', "amount: got '0'; accepted: greater than 0"),
        ('name="b" time="120s" action="leave"', "time: got '120s'; accepted: a number"),
        ('name="b" time="-1" action="leave"', "time: got '-1'; accepted: greater than or equal to 0"),
        ('name="b" action="leave"', "time: missing; a value is required"),
        (
            'origin="a" dest="b" time="1" action="leave"',
            "link from 'a' to 'b' at 1 s; accepted: one that is there",
        ),
        (
            'origin="a" dest="s" time="1" action="join"',
            "link from 'a' to 's' at 1 s; accepted: one that is away",
        ),
        (
            'origin="a" dest="b" time="1" action="join"',
            "a new link from 'a' to 'b'; accepted: with upload and latency",
        ),
        ('origin="a" dest="s" time="1" action="flap"', "action: got 'flap'; accepted: 'join' or 'leave'"),
        (
            'origin="a" dest="s" time="1"',
            "an event at 1 s that changes nothing; accepted: upload, download, latency",
        ),
        ('origin="a" dest="x" time="1" upload="1Mbps"', "'x'; accepted: a service or a bridge"),
        ('origin="a" dest="s" time="1" upload="1MBps"', "upload: got '1MBps'; accepted: a number above 0"),
        ('time="1"', "origin: missing; a value is required"),
    ],
)
def test_events_that_cannot_happen(tmp_path: Path, event: str, said: str) -> None:
    with pytest.raises(BadInput) as error:
        course(tmp_path, event)
    assert said in str(error.value)
    assert f"network.path: {tmp_path / 'star.xml'}: " in str(error.value)


def test_a_direction_that_is_not_there_has_no_rate(tmp_path: Path) -> None:
    text = 'origin="a" dest="t" time="{}" {} upload="2Mbps"'
    join, change = text.format(1, 'action="join" latency="1"'), text.format(2, 'download="3Mbps"')
    with pytest.raises(BadInput, match="download: the link has no such direction; accepted: upload"):
        course(tmp_path, join, change)


# --- what is lost on its way

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
    """Three nodes, one of them behind another bridge."""
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
def test_a_network_on_which_nothing_is_lost_is_for_all_algorithms(
    tmp_path: Path, event: str, algorithm: str
) -> None:
    """It changes, but every path stays."""
    run = gossamer.run(on_a_circle(tmp_path / "circle.xml", event, algorithm), tmp_path)
    assert run.status == "done"
    assert run.metrics["messages_lost"].sum() == 0
    assert run.metrics["time_s"].max() > 0.05


@pytest.mark.parametrize(
    "event",
    [
        'name="b" action="leave"',
        'name="c" action="crash"',
        'name="a" action="disconnect"',
        'name="t" action="leave"',
        'origin="a" dest="s" action="leave"',
        'origin="s" dest="b" drop="0.001"',
    ],
)
def test_a_network_that_loses_messages_later_is_refused_where_they_are_waited_for(
    tmp_path: Path, event: str
) -> None:
    with pytest.raises(BadInput, match=r"gather\.timeout_s: null, and messages are lost"):
        prepare(on_a_circle(tmp_path / "circle.xml", event, "d-psgd"))
    with pytest.raises(BadInput, match="network: messages are lost, for sgp"):
        prepare(on_a_circle(tmp_path / "circle.xml", event, "sgp"))
