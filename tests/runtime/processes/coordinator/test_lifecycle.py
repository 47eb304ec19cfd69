"""The decisions about a run of real processes, without the processes: events in, decisions out."""

from __future__ import annotations

import json
import signal
from functools import cache
from typing import Any

import pytest

from gossamer import Experiment
from gossamer.messages.tags import Traffic
from gossamer.runtime.processes.coordinator import lifecycle
from gossamer.runtime.processes.coordinator.lifecycle import (
    Decision,
    End,
    Fail,
    HoldCheckpoints,
    Lifecycle,
    RecordEvent,
    Rejoin,
    ReleaseCheckpoints,
    Show,
    Without,
)
from gossamer.runtime.processes.protocol import (
    Addresses,
    Command,
    Crashing,
    CurrentRound,
    Done,
    Exited,
    FinalModel,
    Find,
    Finish,
    Fork,
    FromProcess,
    Go,
    Lost,
    Meet,
    Progress,
    Reached,
    Ready,
    Signal,
    Tell,
    Unreachable,
    Violation,
)
from gossamer.runtime.setup import Setup, prepare

DETECTION_S = 4.0
READY, LAST = Ready("127.0.0.1", 1), FinalModel(1, bytearray(), None)


@cache
def prepared(settings: str) -> Setup:
    """Many scenes are of the same experiment."""
    return prepare(Experiment.of(json.loads(settings)))


class Scene:
    """A run whose nodes and clock the test plays, and the decisions about it."""

    def __init__(self, nodes: int = 2, *, room: bool = True, **changes: Any) -> None:
        settings = {
            "nodes": nodes,
            "task": {"name": "least-squares", "samples": 8 * nodes, "features": 3},
            "algorithm": "d-psgd",
            "topology": "complete",
            "gather": {"lost_peer": "skip", "timeout_s": 5.0},
            "failures": {"detection_s": DETECTION_S},
            "stop": {"rounds": 1},
            "engine": "processes",
            **changes,
        }
        self.room = room
        self.now = 100.0
        self.decisions: list[Decision] = []
        self.lifecycle = Lifecycle(prepared(json.dumps(settings)))
        self._new(self.lifecycle.start(self.now))

    def _new(self, decisions: list[Decision]) -> list[Decision]:
        """Note new decisions, and give them without addresses."""
        new = [item for item in decisions if not isinstance(getattr(item, "message", None), Addresses)]
        self.decisions += new
        return new

    def begin(self) -> Scene:
        for rank in sorted(self.lifecycle.alive):
            self.take(rank, READY)
        assert self.lifecycle.up
        self._new(self.lifecycle.begin(self.now))
        return self

    def take(self, rank: int, message: FromProcess) -> list[Decision]:
        return self._new(self.lifecycle.take(rank, message, self.now))

    def finish(self, reason: str, checkpoint: int | None) -> list[Decision]:
        return self._new(self.lifecycle.finish(reason, checkpoint, self.now))

    def give_up(self) -> list[Decision]:
        return self._new(self.lifecycle.give_up())

    def pass_time(self, seconds: float) -> list[Decision]:
        before = len(self.decisions)
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self._new(self.lifecycle.run_due(self.now))
            for rank in self.lifecycle.to_restart if self.room else ():
                self._new(self.lifecycle.restart(rank, self.now))
        return self.decisions[before:]

    def unheard(self, rank: int) -> None:
        """Let so much time pass without a word of a node that it counts as dead if another one can't reach it."""
        for _ in range(round(DETECTION_S)):
            for other in self.lifecycle.alive - {rank}:
                self.take(other, Progress(0, 0.0, Traffic()))
            self.pass_time(1.0)

    def of(self, kind: type[Any]) -> list[Any]:
        return [decision for decision in self.decisions if type(decision) is kind]

    def events(self) -> list[tuple[int | None, str]]:
        return [(record.rank, record.event) for record in self.of(RecordEvent)]

    def shown(self) -> list[str]:
        return [show.text for show in self.of(Show)]

    def failure(self) -> str | None:
        """The first failure; nothing after it counts."""
        return next((str(fail.error) for fail in self.of(Fail)), None)


def test_run_starts_and_ends_when_all_rounds_are_done() -> None:
    scene = Scene(3)
    assert scene.decisions == [Fork(rank, 0, []) for rank in range(3)]
    assert not scene.lifecycle.up
    scene.begin()
    assert scene.decisions[3:] == [Tell(rank, Go(scene.now)) for rank in range(3)]
    for rank in range(3):
        assert scene.pass_time(1.0) == []
        assert scene.take(rank, Done(1)) == []
    assert scene.pass_time(0.5) == [End("rounds")]
    assert scene.finish("rounds", 7) == [Tell(rank, Finish("rounds", 7)) for rank in range(3)]
    for rank in range(3):
        assert not scene.lifecycle.over(scene.now)
        scene.take(rank, LAST)
        scene.take(rank, Exited("exit code 0"))
    assert scene.lifecycle.over(scene.now)
    assert scene.give_up() == []


DEAD, OUT_OF_REACH = "node 1 died in round 0: killed by SIGKILL", "node 0 can't reach node 2: timed out"


@pytest.mark.parametrize(
    ("rank", "message", "decisions"),
    [
        (1, Progress(7, 0.0, Traffic()), []),
        (1, Done(7), []),
        (1, CurrentRound(2, 7), []),
        (
            1,
            Exited("killed by SIGKILL"),
            [
                RecordEvent(1, "lost", DEAD, show=False),
                Show(DEAD),
                *(Tell(rank, Lost(1, DEAD, 0)) for rank in (0, 2)),
                Without(1, keep=False),
            ],
        ),
        (
            0,
            Unreachable(2, "timed out"),
            [
                RecordEvent(0, "unreachable", f"{OUT_OF_REACH}; the two go on without each other"),
                Tell(0, Lost(2, OUT_OF_REACH, apart=True)),
                Tell(2, Lost(0, OUT_OF_REACH, apart=True)),
                HoldCheckpoints("nodes 0 and 2 can't reach each other"),
            ],
        ),
    ],
)
def test_message_leads_to_these_decisions(rank: int, message: FromProcess, decisions: list[Decision]) -> None:
    assert Scene(3).begin().take(rank, message) == decisions


@pytest.mark.parametrize(
    ("fault", "decisions"),
    [
        ({"name": "crash", "nodes": [1]}, [Signal(1, signal.SIGKILL)]),
        ({"name": "leave", "nodes": [1]}, [Tell(1, Command("leave"))]),
        (
            {"name": "freeze", "nodes": [1], "for_s": 1.0},
            [
                Signal(1, signal.SIGSTOP),
                RecordEvent(1, "frozen", "node 1 is frozen"),
                Signal(1, signal.SIGCONT),
                RecordEvent(1, "thawed", "node 1 continues"),
            ],
        ),
    ],
)
def test_fault_leads_to_these_decisions(fault: dict[str, Any], decisions: list[Decision]) -> None:
    scene = Scene(3, faults=[{**fault, "at_s": 1.0}]).begin()
    assert scene.pass_time(0.5) == []
    assert scene.pass_time(2.0) == decisions


def test_second_ready_message_changes_nothing() -> None:
    scene = Scene(3).begin()
    assert scene.take(0, Ready("127.0.0.1", 2)) == []
    assert scene.lifecycle.nodes[0].address == ("127.0.0.1", 1)


def test_node_that_does_not_end_is_killed() -> None:
    scene = Scene().begin()
    scene.finish("stopped", None)
    scene.take(0, LAST)
    scene.now += lifecycle.END_S
    assert not scene.lifecycle.over(scene.now)
    scene.now += 0.1
    assert scene.lifecycle.over(scene.now)
    decisions = scene.give_up()
    assert Signal(1, signal.SIGKILL) in decisions


def test_nodes_that_are_not_up_in_time_are_named() -> None:
    scene = Scene(engine={"name": "processes", "start_timeout_s": 10.0})
    scene.take(0, READY)
    scene.pass_time(10.5)
    assert scene.failure() == "nodes [1] were not up within engine.start_timeout_s = 10.0"


@pytest.mark.parametrize("reason", ["stopped", "time", "target"])
def test_requested_end_takes_effect_at_the_next_poll(reason: str) -> None:
    scene = Scene().begin()
    scene.lifecycle.end(reason)
    scene.lifecycle.end("another")
    assert scene.pass_time(0.5) == [End(reason)]


def test_other_nodes_are_told_of_a_death() -> None:
    scene = Scene(3).begin()
    scene.take(1, Progress(7, 0.0, Traffic()))
    decisions = scene.take(1, Exited("killed by SIGKILL"))
    text = "node 1 died in round 7: killed by SIGKILL"
    assert [decision for decision in decisions if type(decision) is Tell] == [
        Tell(rank, Lost(1, text, 0)) for rank in (0, 2)
    ]
    assert Without(1, keep=False) in decisions
    assert scene.lifecycle.awaited() == [0, 2]
    scene.take(0, Exited("exit code 1"))
    scene.take(2, Exited("exit code 1"))
    scene.pass_time(0.5)
    assert scene.failure() == f"no node is left: {text}; " + "; ".join(
        f"node {rank} died in round 0: exit code 1" for rank in (0, 2)
    )


def test_run_that_needs_all_nodes_ends_at_the_first_death() -> None:
    scene = Scene(gather={"lost_peer": "fail"}).begin()
    scene.take(1, Exited("exit code 3"))
    assert scene.failure() == "node 1 died in round 0: exit code 3"


RESTARTED: dict[str, Any] = {
    "engine": {"name": "processes", "restart": "always", "restart_limit": 1},
    "checkpoint": {"every_rounds": 1},
    "stop": {"rounds": 100},
}


def test_restarted_node_rejoins_in_the_most_common_round() -> None:
    scene = Scene(4, **RESTARTED).begin()
    scene.take(1, Progress(7, 0.0, Traffic()))
    scene.room = False
    scene.take(1, Exited("killed by SIGKILL"))
    assert scene.pass_time(1.0) == []
    scene.room = True
    assert scene.pass_time(0.5) == [Fork(1, 1, [])]
    decisions = scene.take(1, READY)
    assert decisions == [Tell(rank, Find(1, True)) for rank in (0, 2, 3)]
    assert scene.take(0, CurrentRound(1, 9)) == scene.take(2, CurrentRound(1, 9)) == []
    decisions = scene.take(3, CurrentRound(1, 12))
    assert decisions[:3] == [Tell(rank, Meet([(1, since)])) for rank, since in ((0, 10), (2, 10), (3, 13))]
    assert decisions[3] == Rejoin(1, 9, [(0, 10), (2, 10), (3, 13)], "checkpoint")
    assert scene.events()[-1] == (1, "returned")
    assert scene.lifecycle.awaited() == [0, 1, 2, 3]
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(5.0)
    assert len(scene.of(Fork)) == 5  # restart_limit


def test_node_whose_rounds_are_over_begins_no_other() -> None:
    scene = Scene(3, **RESTARTED).begin()
    scene.take(1, Done(100))
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(0.5)
    scene.take(1, READY)
    for rank in (0, 2):
        scene.take(rank, CurrentRound(1, 40))
    assert scene.of(Rejoin) == [Rejoin(1, 100, [(0, 100), (2, 100)], "checkpoint")]


def test_nodes_restart_as_there_is_room() -> None:
    scene = Scene(4, room=False, **RESTARTED).begin()
    for rank in (1, 2):
        scene.take(rank, Exited("killed by SIGKILL"))
    scene.pass_time(1.0)
    assert scene.lifecycle.to_restart == [1, 2]
    assert scene.lifecycle.restart(2, scene.now) == [Fork(2, 1, [])]
    assert scene.lifecycle.to_restart == [1]


def test_silent_node_has_crashed() -> None:
    """Reports come every second, or less often with many nodes."""
    scene = Scene(3, engine={"name": "processes", "start_timeout_s": 20.0}).begin()
    for _ in range(30):
        scene.pass_time(1.0)
        for rank in (0, 2):
            scene.take(rank, Progress(0, 0.0, Traffic()))
    text = "node 1 died in round 0: it did not answer for 20 s (engine.start_timeout_s)"
    assert scene.lifecycle.presence.why == {1: text}
    assert scene.of(Signal) == [Signal(1, signal.SIGKILL)]
    assert scene.failure() is None


def test_coordinator_that_was_stopped_blames_no_node() -> None:
    scene = Scene(2, engine={"name": "processes", "start_timeout_s": 20.0}).begin()
    scene.now += 1000.0
    scene.pass_time(5.0)
    assert scene.of(Signal) == []


def test_restarted_node_that_is_never_ready_has_crashed() -> None:
    scene = Scene(3, **RESTARTED).begin()
    scene.take(1, Exited("killed by SIGKILL"))
    for _ in range(130):
        scene.pass_time(1.0)
        for rank in (0, 2):
            scene.take(rank, Progress(0, 0.0, Traffic()))
    assert scene.events() == [(1, "lost")] * 2
    assert "it was not up within 120 s (engine.start_timeout_s)" in scene.of(RecordEvent)[-1].text


def test_node_that_keeps_others_from_returning_has_crashed() -> None:
    """It reports that it is alive, but does not say in which round it is."""
    scene = Scene(3, **RESTARTED).begin()
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(0.5)
    scene.take(1, READY)
    scene.take(0, CurrentRound(1, 3))
    for _ in range(130):
        scene.pass_time(1.0)
        for rank in (0, 1, 2):
            if rank in scene.lifecycle.alive:
                scene.take(rank, Progress(0, 0.0, Traffic()))
    assert (2, "lost") in scene.events()
    assert (1, "returned") in scene.events()


@pytest.mark.parametrize("message", [Crashing(1), Crashing(99)])
def test_crash_that_is_not_planned_is_refused(message: FromProcess) -> None:
    scene = Scene(3, faults=[{"name": "crash", "nodes": [1], "at_round": 2}]).begin()
    scene.lifecycle.check(1, Crashing(0))
    for rank in (0, 1):
        with pytest.raises(Violation, match="is not planned"):
            scene.lifecycle.check(rank, message)
    scene.take(1, Crashing(0))
    with pytest.raises(Violation, match="which had crashed"):
        scene.lifecycle.check(1, Progress(2, 0.0, Traffic()))
    scene.lifecycle.check(1, Exited("killed by SIGKILL"))


def test_message_that_does_not_fit_the_state_of_a_node_is_refused() -> None:
    scene = Scene(3)
    with pytest.raises(Violation, match="Done of node 0, which does not take part yet"):
        scene.lifecycle.check(0, Done(1))
    scene.begin()
    scene.lifecycle.check(0, Done(1))
    scene.finish("time", None)
    scene.lifecycle.check(0, LAST)
    scene.take(0, LAST)
    with pytest.raises(Violation, match="FinalModel of node 0 after its last model"):
        scene.lifecycle.check(0, LAST)


def test_end_does_not_wait_for_ever_for_a_node_that_is_alive() -> None:
    scene = Scene(2).begin()
    scene.finish("time", None)
    scene.take(0, LAST)
    for _ in range(int(lifecycle.LAST_S / 20) + 1):
        assert not scene.lifecycle.over(scene.now)
        scene.now += 20.0
        scene.take(1, Progress(1, 0.0, Traffic()))
    assert scene.lifecycle.over(scene.now)


def missed(scene: Scene) -> str | None:
    failure = scene.lifecycle.missed()
    return None if failure is None else str(failure)


def test_run_is_failed_without_a_round_of_a_lost_node() -> None:
    scene = Scene(4).begin()
    scene.take(1, Exited("exit code 3"))
    scene.take(2, Progress(1, 0.0, Traffic()))
    scene.take(2, Exited("exit code 3"))
    assert missed(scene) == "node 1 completed no round: node 1 died in round 0: exit code 3"
    scene.unheard(3)
    scene.take(0, Unreachable(3, "timed out"))
    assert str(missed(scene)).startswith("nodes 1 and 3 completed no round: node 1 died")
    scene.take(3, Progress(0, 0.0, Traffic()))
    for rank in (0, 3):
        scene.take(rank, CurrentRound(3, 0))
    assert "node 1 completed" in str(missed(scene))  # node 3 is back


def test_planned_slow_and_late_nodes_do_not_fail_the_run() -> None:
    faults = [
        {"name": "crash", "nodes": [1], "at_s": 1.0},
        {"name": "freeze", "nodes": [2], "at_s": 1.0, "for_s": 1_000.0},
        {"name": "join", "nodes": [3], "at_s": 100.0},
    ]
    scene = Scene(5, faults=faults).begin()
    scene.pass_time(2 * DETECTION_S)
    scene.take(1, Exited("killed by SIGKILL"))
    scene.take(0, Unreachable(2, "timed out"))
    scene.finish("time", None)
    for rank in (0, 2):
        scene.take(rank, LAST)
    scene.give_up()  # node 4 was slow
    assert sorted(scene.lifecycle.presence.why) == [1, 2, 3]
    assert missed(scene) is None


def test_returning_node_hears_of_peers_lost_meanwhile() -> None:
    """Otherwise it would wait for them (make chaos, seed 1004 of real processes)."""
    scene = Scene(3, **RESTARTED).begin()
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(0.5)
    scene.take(1, READY)
    scene.take(0, CurrentRound(1, 3))
    decisions = scene.take(2, Exited("killed by SIGKILL"))
    assert Tell(1, Lost(2, "node 2 died in round 0: killed by SIGKILL")) in decisions
    assert any(type(decision) is Rejoin for decision in decisions)


def test_run_whose_last_nodes_leave_is_not_done() -> None:
    """make chaos, seed 1144 of real processes."""
    scene = Scene(2, faults=[{"name": "leave", "nodes": "all", "at_s": 1.0}], stop={"rounds": 5}).begin()
    assert scene.pass_time(1.0) == [Tell(rank, Command("leave")) for rank in (0, 1)]
    for rank in (0, 1):
        assert scene.take(rank, Done(2)) == [Tell(rank, Finish("left"))]
    assert scene.pass_time(0.5) == []
    for rank in (0, 1):
        scene.take(rank, FinalModel(2, bytearray(), None))
        scene.take(rank, Exited("exit code 0"))
    scene.pass_time(0.5)
    assert scene.of(End) == []
    assert scene.failure() == "no node is left: node 0 left after round 2; node 1 left after round 2"


def leaving_and_returning() -> Scene:
    """A run in which node 1 is told to leave and then, before its round is over, to stay."""
    churn = {
        "name": "churn",
        "nodes": [1],
        "by": "leave",
        "mean_up_s": 5.0,
        "mean_down_s": 1e-6,
        "to_s": 40.0,
    }
    scene = Scene(3, faults=[churn], stop={"rounds": 100}, seed=3).begin()
    while Tell(1, Command("stay")) not in scene.decisions:
        scene.pass_time(0.5)
    assert [tell.message for tell in scene.of(Tell)[-2:]] == [Command("leave"), Command("stay")]
    return scene


def test_node_that_has_not_left_yet_stays_if_it_is_to_return() -> None:
    scene = leaving_and_returning()
    before = len(scene.decisions)
    assert scene.take(1, Progress(3, 0.0, Traffic())) == []
    assert scene.take(1, Done(100)) == []
    assert scene.decisions[before:] == []
    assert scene.lifecycle.to_restart == []


def test_node_whose_rounds_are_over_leaves_and_returns() -> None:
    scene = leaving_and_returning()
    assert scene.take(1, Done(2, leaves=True)) == [Tell(1, Finish("left"))]
    scene.take(1, FinalModel(2, bytearray(), None))
    assert scene.events() == [(1, "left")]
    assert scene.lifecycle.to_restart == []  # its process has not ended
    scene.take(1, Exited("exit code 0"))
    assert scene.lifecycle.to_restart == [1]
    assert scene.lifecycle.restart(1, scene.now) == [Fork(1, 1, [])]


def test_node_that_dies_on_its_way_out_is_not_restarted() -> None:
    scene = Scene(3, faults=[{"name": "leave", "nodes": [1], "at_s": 1.0}], **RESTARTED).begin()
    scene.pass_time(1.0)
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(5.0)
    assert [fork.rank for fork in scene.of(Fork)] == [0, 1, 2]


def test_node_that_dies_before_it_takes_part_joins_later() -> None:
    scene = Scene(3, faults=[{"name": "join", "nodes": [1], "at_s": 1.0}], **RESTARTED).begin()
    scene.pass_time(1.0)
    scene.take(1, Exited("it can't be started: no memory"))
    assert scene.pass_time(0.5) == [Fork(1, 1, [])]
    scene.take(1, READY)
    for rank in (0, 2):
        scene.take(rank, CurrentRound(1, 3))
    assert scene.events() == [(1, "absent"), (1, "lost"), (1, "joined")]
    assert scene.of(Rejoin) == [Rejoin(1, 3, [(0, 4), (2, 4)], "checkpoint")]


def test_failed_restart_is_recorded() -> None:
    scene = Scene(3, **RESTARTED).begin()
    scene.take(1, Exited("killed by SIGKILL"))
    scene.pass_time(0.5)
    scene.take(1, Exited("it can't be started: no memory"))
    assert [event for event in scene.events() if event[0] == 1] == [(1, "lost"), (1, "lost")]
    for rank in (0, 2):
        scene.take(rank, Done(100))
    assert scene.pass_time(0.5) == [End("rounds")]


@pytest.mark.parametrize("seconds", [DETECTION_S - 0.5, DETECTION_S + 0.5])
def test_frozen_node_is_lost_only_after_the_detection_time(seconds: float) -> None:
    freeze = {"name": "freeze", "nodes": [1], "at_s": 1.0, "for_s": seconds}
    scene = Scene(faults=[freeze]).begin()
    scene.pass_time(1.0)
    assert scene.of(Signal) == [Signal(1, signal.SIGSTOP)]
    scene.pass_time(2 * DETECTION_S)
    assert scene.of(Signal)[1:] == [Signal(1, signal.SIGCONT)]
    assert scene.events() == [(1, "frozen"), (1, "thawed")]
    assert list(scene.lifecycle.presence.why) == ([1] if seconds > DETECTION_S else [])


def test_node_wrongly_thought_dead_rejoins_when_heard() -> None:
    scene = Scene(3).begin()
    scene.unheard(2)
    scene.take(0, Unreachable(2, "timed out"))
    assert scene.lifecycle.presence.why == {2: "node 0 can't reach node 2: timed out"}
    assert scene.take(2, Progress(4, 0.0, Traffic())) == [Tell(rank, Find(2, False)) for rank in range(3)]


def test_value_of_an_unreachable_node_counts_until_it_dies() -> None:
    scene = Scene(3).begin()
    scene.unheard(2)
    scene.take(0, Unreachable(2, "timed out"))
    assert scene.of(Without) == [Without(2, keep=True, gone=False)]
    scene.take(2, Exited("killed by SIGKILL"))
    assert scene.of(Without)[1:] == [Without(2, keep=False)]


def parted(*asked_again: int) -> Scene:
    """A scene in which nodes 0 and 2 can't reach each other, until some of them do."""
    scene = Scene(3, stop={"rounds": 9}).begin()
    scene.take(0, Unreachable(2, "timed out"))
    for rank in asked_again:
        scene.take(rank, Reached(2 - rank))
    return scene


def test_pair_that_is_cut_takes_part_without_each_other() -> None:
    """Node 2 says to the coordinator that it is well, and node 1 reaches both."""
    scene = parted()
    assert scene.lifecycle.presence.lost == set()
    assert scene.of(Without) == []
    before = len(scene.decisions)
    scene.take(2, Progress(4, 0.0, Traffic()))
    scene.take(2, Unreachable(0, "timed out"))  # the other direction, which is no news
    scene.take(0, Unreachable(2, "timed out"))
    assert scene.decisions[before:] == []


def test_pair_comes_together_once_both_have_reached_each_other() -> None:
    """With one direction only, as behind a firewall that lets nobody in, they stay apart."""
    scene = parted(0)
    assert scene.of(Tell)[-1] == Tell(2, Lost(0, OUT_OF_REACH, apart=True))
    assert scene.take(2, Reached(0)) == [Tell(0, Find(2, False)), Tell(2, Find(0, False))]
    assert scene.take(0, CurrentRound(2, 3)) == []
    assert scene.take(2, CurrentRound(0, 5)) == [
        Tell(0, Meet([(2, 6)])),  # neither has begun round 6
        Tell(2, Meet([(0, 6)])),
        RecordEvent(
            0, "reached", "node 0 and node 2 reach each other again, and wait for each other from round 6 on"
        ),
    ]
    assert scene.take(0, Progress(6, 0.0, Traffic())) == []  # node 2 is still in a round without node 0
    assert scene.take(2, Progress(6, 0.0, Traffic())) == [ReleaseCheckpoints()]
    assert scene.take(2, Reached(0)) == []


def test_pair_that_is_cut_again_while_it_comes_together_stays_apart() -> None:
    scene = parted(0, 2)
    assert scene.take(0, CurrentRound(2, 3)) == []
    again = scene.take(2, Unreachable(0, "timed out"))
    assert again[:2] == [
        Tell(0, Lost(2, OUT_OF_REACH, apart=True)),
        Tell(2, Lost(0, OUT_OF_REACH, apart=True)),
    ]
    assert scene.take(2, CurrentRound(0, 5)) == []
    assert [event for _, event in scene.events()] == ["unreachable"]


def test_node_of_a_cut_pair_that_falls_silent_counts_as_dead_for_all() -> None:
    """It was out of reach for the coordinator too, a little later."""
    scene = parted()
    scene.unheard(2)
    assert scene.lifecycle.presence.why == {2: OUT_OF_REACH}
    assert scene.of(Without) == [Without(2, keep=True, gone=False)]


def test_pair_that_is_cut_is_over_with_either_node() -> None:
    scene = parted(0)
    scene.take(2, Exited("killed by SIGKILL"))
    assert scene.of(Tell)[-2:] == [Tell(rank, Lost(2, scene.shown()[-1], 0)) for rank in (0, 1)]
    assert scene.of(ReleaseCheckpoints) == [ReleaseCheckpoints()]
    assert scene.take(0, Reached(2)) == []


def test_nodes_that_wait_for_lost_peers_say_that_they_wait_for_each_other() -> None:
    scene = Scene(3, gather={"lost_peer": "wait", "timeout_s": 5.0}).begin()
    [event, *_] = scene.take(0, Unreachable(2, "timed out"))
    assert (
        event.text == f"{OUT_OF_REACH}; the two wait for each other in vain, up to gather.timeout_s a round"
    )


def test_events_of_very_many_pairs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_PAIR_EVENTS", 1)
    scene = Scene(4).begin()
    for peer in (1, 2, 3):
        scene.take(0, Unreachable(peer, "timed out"))
    assert [event for _, event in scene.events()] == ["unreachable", "left-out"]


def test_waits_are_reported_while_no_round_ends() -> None:
    scene = Scene(3).begin()
    for rank in range(3):
        scene.take(rank, Progress(1, 0.0, Traffic(), waits=["a message"]))
    scene.take(2, Progress(1, 0.0, Traffic()))
    scene.pass_time(lifecycle.REPORT_WAITS_S - 1.0)
    assert scene.shown() == []
    scene.take(2, Progress(2, 0.0, Traffic()))
    scene.pass_time(lifecycle.REPORT_WAITS_S - 0.5)
    assert scene.shown() == []
    scene.pass_time(lifecycle.REPORT_WAITS_S + 1.0)
    assert scene.shown() == ["no round has ended for 30 s: nodes 0, 1 for a message"] * 2


def test_unreachable_peer_ends_a_run_that_needs_all_nodes() -> None:
    scene = Scene(3, gather={"lost_peer": "fail", "timeout_s": None}).begin()
    scene.take(0, Unreachable(2, "timed out"))
    assert scene.failure() == "node 0 can't reach node 2: timed out"
    assert scene.events() == [(0, "unreachable")]


def test_leaving_peer_is_not_reported_unreachable() -> None:
    """Its peers see its connections close before they are told, and before its process ends."""
    leave = {"name": "leave", "nodes": [2], "at_s": 1.0}
    scene = Scene(3, algorithm="divshare", gather={"lost_peer": "fail", "timeout_s": None}, faults=[leave])
    scene.begin()
    scene.pass_time(1.0)
    assert scene.take(0, Unreachable(2, "closed its connections")) == []
    scene.take(2, LAST)
    assert scene.take(1, Unreachable(2, "closed its connections")) == []
    assert scene.events() == [(2, "left")]
