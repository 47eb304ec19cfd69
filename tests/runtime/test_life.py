"""The rules of a node's life, as tables."""

from __future__ import annotations

from typing import get_args

import pytest

from gossamer.faults import FaultEvent, FaultEventQueue, FaultInterval
from gossamer.runtime import life

STATES = ("away", "here", "leaving", "going")


@pytest.mark.parametrize(
    ("what", "effects"),
    [
        ("crash", ("nothing", "crash", "crash", "crash")),
        ("leave", ("nothing", "leave", "leave", "leave")),
        ("join", ("nothing", "keep away", "keep away", "keep away")),
        ("freeze", ("nothing", "freeze", "freeze", "freeze")),
        ("thaw", ("nothing", "thaw", "thaw", "thaw")),
        ("return", ("start", "nothing", "stay", "start when gone")),
        ("slowed", ("nothing", "record", "record", "record")),
    ],
)
def test_effect_of_a_fault(what: str, effects: tuple[str, ...]) -> None:
    assert get_args(life.State) == STATES
    assert tuple(life.effect(what, state) for state in get_args(life.State)) == effects


@pytest.mark.parametrize("state", ["away", "going"])
@pytest.mark.parametrize("again", ["crash", "leave"])
def test_new_absence_calls_off_a_restart(state: life.State, again: str) -> None:
    presence = life.Membership(range(3))
    presence.take(FaultEvent(1.0, "return", 1, "initial"), state)
    presence.take(FaultEvent(2.0, "return", 2), state)
    assert presence.restarts == {1: "initial", 2: "checkpoint"}
    presence.take(FaultEvent(3.0, again, 1), state)
    assert presence.restarts == {2: "checkpoint"}


@pytest.mark.parametrize(
    ("gathers", "joins", "restarted", "first"),
    [
        (True, True, True, 0),
        (True, False, True, 8),
        (False, False, True, 7),
        (True, False, False, 8),
        (False, False, False, 8),
    ],
)
def test_earliest_round(gathers: bool, joins: bool, restarted: bool, first: int) -> None:
    completed = 0 if joins else 7
    flags = {"gathers": gathers, "joins": joins, "restarted": restarted}
    assert life.earliest(completed, None, **flags) == first
    assert life.earliest(completed, 7, **flags) == min(first, 7)


def test_run_without_nodes_fails_with_the_reasons() -> None:
    presence, queue = life.Membership([0]), FaultEventQueue(iter([FaultInterval(1.0, 2.0, "crash", 1)]))
    presence.keep_away(1, "node 1 has not joined yet")
    assert presence.nobody(queue) is None  # node 0 is up
    presence.up.clear()
    presence.lose(0, "node 0 left after round 2")
    assert not presence.lose(0, "node 0 is frozen")
    text = "no node is left: node 1 has not joined yet; node 0 left after round 2"
    assert str(presence.nobody(queue)) == text
    list(queue.due(1.0))
    assert presence.nobody(queue) is None  # node 1 is expected back
    list(queue.due(2.0))
    presence.restarts[0] = "initial"
    assert presence.nobody(queue) is None
    presence.restarts.clear()
    for rank in range(2, 9):
        presence.lose(rank, str(rank))
    assert str(presence.nobody(queue)) == f"{text}; 2; 3; 4; 4 more"


def test_events_say_what_happened() -> None:
    assert life.lost(3, 7) == (3, "lost", "node 3 crashed in round 7")
    died = life.lost(3, 7, "killed by SIGKILL", planned=False)
    assert died.text == "node 3 died in round 7: killed by SIGKILL"
    assert life.thawed(2) == (2, "thawed", "node 2 continues")
    assert life.thawed(2, 8).text == "node 2 continues, and takes part from round 8 on"
    assert life.back(2, 8, joins=True) == (2, "joined", "node 2 takes part from round 8 on")
    assert life.back(2, 8, joins=False).event == "returned"
    assert life.begins(1, "neighbor", None).text == "node 1 begins with a neighbour's model"
    assert life.begins(1, "checkpoint", None).text == "node 1 begins with its initial model"
