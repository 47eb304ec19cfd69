"""Where a run of real processes can't go on: what its supervisor takes for that, and what not."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer import Experiment
from gossamer.runtime.processes.coordinator import deadlock
from gossamer.runtime.processes.coordinator.deadlock import DeadlockWatch
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.node_state import NodeState


class Scene:
    """Three nodes that all wait for a message."""

    def __init__(self, **stop: Any) -> None:
        settings = {
            "nodes": 3,
            "task": {"name": "least-squares", "samples": 8, "features": 3},
            "algorithm": "d-psgd",
            "stop": {"rounds": 1, **stop},
        }
        self.children = {rank: NodeState(rank) for rank in range(3)}
        for child in self.children.values():
            child.idle, child.idle_reports = (2, 2, ["a message"]), 2
        self.alive = {0, 1, 2}
        self.events: list[tuple[int, str, str]] = []
        self.deadlock = DeadlockWatch(
            Experiment.of(settings), self.children, self.alive, lambda *said: self.events.append(said)
        )

    def found(self) -> str | None:
        try:
            self.deadlock.look()
        except Ended as end:
            return None if end.failure is None else str(end.failure["message"])
        return None


def test_nodes_that_all_wait_with_nothing_under_way_are_named() -> None:
    found = Scene().found()
    assert found == (
        "all nodes wait and nothing is under way: node 0 for a message; node 1 for a message; node 2 for a message"
    )


def test_nobody_waits_for_ever_who_may_still_be_woken() -> None:
    assert Scene(time_s=3.0).found() is None
    fresh, flying, gone, wiped, busy = (Scene() for _ in range(5))
    fresh.children[1].idle_reports = 1
    flying.children[1].idle = (3, 2, ["a message"])
    gone.alive.discard(1)
    wiped.deadlock.wiped()
    busy.children[1].idle = None
    assert [scene.found() for scene in (fresh, flying, gone, wiped, busy)] == [None] * 5


def test_a_peer_that_lives_and_stays_unreachable_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, now = Scene(), [100.0]
    monkeypatch.setattr(deadlock.time, "monotonic", lambda: now[0])
    scene.deadlock.unreachable(0, 2, "timed out")
    now[0] += deadlock.UNREACHABLE_S - 0.1
    assert scene.found() is None  # though all wait: this may be why
    now[0] += 0.2
    assert scene.found() == "node 0 can't reach node 2: timed out"
    assert scene.events == [(0, "unreachable", "node 0 can't reach node 2: timed out")]


@pytest.mark.parametrize("who", ["reached", "dead", "reporter dead"])
def test_a_peer_that_is_reached_again_or_dead_is_none_that_is_unreachable(
    monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    scene, now = Scene(time_s=3.0), [100.0]
    monkeypatch.setattr(deadlock.time, "monotonic", lambda: now[0])
    scene.deadlock.unreachable(0, 2, "timed out")
    if who == "reached":
        scene.deadlock.reachable(0, 2)
    else:
        scene.alive.discard(2 if who == "dead" else 0)
    now[0] += deadlock.UNREACHABLE_S + 0.1
    assert scene.found() is None
    assert not scene.events
