"""Nodes whose processes are stopped, as their supervisor sees them: it talks to them, notices, and lets others compute."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gossamer import Experiment
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.channel import Channel, PatientChannel
from gossamer.runtime.processes.coordinator import fault_runner
from gossamer.runtime.processes.coordinator.ended import Ended
from gossamer.runtime.processes.coordinator.fault_runner import FaultRunner
from gossamer.runtime.processes.coordinator.node_state import Child
from gossamer.runtime.processes.coordinator.process_pool import ProcessPool
from gossamer.runtime.processes.node_process.warmup import Stage
from gossamer.runtime.processes.protocol import FromNode, Kept, Message, ToNode
from gossamer.runtime.processes.system.cpu_slots import CpuSlots, news
from gossamer.runtime.processes.system.shared_file import shared_file
from gossamer.runtime.setup import prepare

DETECTION_S = 4.0


def experiment(lost_peer: str = "skip", algorithm: str = "d-psgd") -> Experiment:
    return Experiment.of(
        {
            "nodes": 2,
            "task": {"name": "least-squares", "samples": 16},
            "algorithm": algorithm,
            "topology": "complete",
            "gather": {"lost_peer": lost_peer, "timeout_s": 5.0},
            "failures": {"detection_s": DETECTION_S},
            "stop": {"rounds": 1},
            "engine": {"name": "processes", "train_at_once": 1},
        }
    )


@pytest.fixture
def process_pool(tmp_path: Path) -> Iterator[ProcessPool]:
    setup, memory = prepare(experiment()), shared_file()
    folder = RunFolder.create(tmp_path, "run", experiment="", environment={})
    with selectors.DefaultSelector() as selector:
        made = ProcessPool(setup, folder, memory, Stage(setup), None, selector, lambda rank: ())
        yield made
        made.kill_all()
    os.close(memory)


def adopt(process_pool: ProcessPool, *, inside: bool) -> tuple[Child, Channel[Any]]:
    """A process that stops itself, in a place to compute or outside, and goes on for ever."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            if inside:
                with CpuSlots(process_pool._memory, 1, news()).one():
                    os.kill(os.getpid(), signal.SIGSTOP)
                    signal.pause()
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()
        finally:
            os._exit(0)
    child = process_pool.children[0] = Child(0, pid, PatientChannel(ours, FromNode))
    process_pool.alive.add(0)
    process_pool._selector.register(child.channel, selectors.EVENT_READ, child)
    return child, Channel(theirs, ToNode)


@pytest.mark.parametrize("inside", [True, False])
def test_it_is_noticed_and_others_may_compute_meanwhile(process_pool: ProcessPool, inside: bool) -> None:
    child, theirs = adopt(process_pool, inside=inside)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert list(process_pool.stopped()) == [(child, True)]
    assert process_pool.cpu_slots == (2 if inside else 1)
    assert list(process_pool.stopped()) == []
    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
    assert list(process_pool.stopped()) == [(child, False)]
    assert process_pool.cpu_slots == 1
    child.channel.close()
    theirs.close()


def test_the_place_of_one_that_dies_is_counted_no_more(process_pool: ProcessPool) -> None:
    child, theirs = adopt(process_pool, inside=True)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert len(list(process_pool.stopped())) == 1
    os.kill(child.pid, signal.SIGKILL)
    assert process_pool.bury(child) == "killed by SIGKILL"
    assert process_pool.cpu_slots == 1
    assert list(process_pool.stopped()) == []
    theirs.close()


def test_what_it_does_not_read_holds_nobody_up_and_arrives_when_it_goes_on(process_pool: ProcessPool) -> None:
    child, theirs = adopt(process_pool, inside=False)
    sent = 0
    while not child.behind:
        process_pool.tell(0, Kept(sent))
        sent += 1
    assert not process_pool._selector.select(0)
    came: list[int] = []
    while len(came) < sent:
        came += [said.number for said in theirs.read() or []]
        for key, events in process_pool._selector.select(0):
            assert (key.data, events) == (child, selectors.EVENT_WRITE)
            process_pool.send_on(child)
    assert came == list(range(sent))
    assert not process_pool._selector.select(0)  # there is room, and nothing to say
    child.channel.close()
    theirs.close()


class Hands:
    """Notes what is done."""

    def __init__(self) -> None:
        self.children = {rank: Child(rank, -1, mock.Mock()) for rank in range(2)}
        self.alive = set(self.children)
        self.said: list[str] = []
        self.shown: list[str] = []
        self.lost: list[int] = []

    def say(self, rank: int | None, event: str, text: str) -> None:
        self.said.append(event)

    def show(self, text: str) -> None:
        self.shown.append(text)

    def without(self, rank: int, *, keep: bool) -> None:
        self.lost.append(rank)

    def tell(self, rank: int, message: Message) -> None:
        assert rank not in self.lost


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    with mock.patch.object(fault_runner, "time") as time:
        time.monotonic.return_value = 100.0
        yield time.monotonic


def begun(lost_peer: str = "skip", algorithm: str = "d-psgd") -> tuple[FaultRunner, Hands]:
    hands = Hands()
    made = FaultRunner(prepare(experiment(lost_peer, algorithm)), hands)  # type: ignore[arg-type]
    made.begin(100.0)
    made.look()
    return made, hands


def pass_time(made: FaultRunner, clock: mock.Mock, seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        clock.return_value += 0.5
        made.look()


def test_it_is_taken_for_dead_in_time_unless_it_goes_on(clock: mock.Mock) -> None:
    made, hands = begun()
    for child, seconds in zip(hands.children.values(), (DETECTION_S - 0.5, DETECTION_S), strict=True):
        made.stands(child, still=True)
        pass_time(made, clock, seconds)
        made.stands(child, still=False)
        assert hands.said[-2:] == ["frozen", "thawed"]
    pass_time(made, clock, 2 * DETECTION_S)
    assert hands.lost == [1]


def test_a_run_that_needs_all_nodes_ends_and_names_it(clock: mock.Mock) -> None:
    made, hands = begun("fail")
    made.stands(hands.children[1], still=True)
    with pytest.raises(Ended) as ended:
        pass_time(made, clock, DETECTION_S)
    assert ended.value.failure == {"message": "node 1 stands still: it was stopped", "node": 1, "round": 0}


def test_it_is_said_for_whom_the_others_wait_ever_more_rarely_until_it_is_back(clock: mock.Mock) -> None:
    made, hands = begun("wait")
    hands.children[0].round = 7
    pass_time(made, clock, 20)
    assert hands.shown == []
    made.died(hands.children[1], "node 1 died")
    pass_time(made, clock, 65)
    assert hands.shown == [
        f"waiting for node 1 (away for {seconds} s); the others are in round 7 or later"
        for seconds in (10, 20, 40)
    ]
    hands.shown.clear()
    made.away.clear()
    pass_time(made, clock, 20)
    assert hands.shown == []
    made.away[1] = "node 1 is silent"
    pass_time(made, clock, 11)
    assert len(hands.shown) == 1


@pytest.mark.parametrize(("lost_peer", "algorithm"), [("skip", "d-psgd"), ("wait", "gossip-learning")])
def test_where_nobody_waits_for_the_lost_nothing_is_said_of_it(
    clock: mock.Mock, lost_peer: str, algorithm: str
) -> None:
    made, hands = begun(lost_peer, algorithm)
    made.died(hands.children[1], "node 1 died")
    pass_time(made, clock, 30)
    assert hands.shown == []


def test_a_supervisor_that_was_itself_stopped_blames_nobody(clock: mock.Mock) -> None:
    made, hands = begun()
    made.stands(hands.children[0], still=True)
    looks = 0
    while not hands.lost:
        clock.return_value += 1000.0
        made.look()
        looks += 1
    assert looks == DETECTION_S  # a second counts for each
