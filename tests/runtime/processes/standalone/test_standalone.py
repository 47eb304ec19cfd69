"""What a node without a supervisor makes of what others tell it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transport_scene import LIMIT, TOKEN, RawEnd, on_loop

from gossamer import Experiment
from gossamer.api import Silent
from gossamer.results.folder import RunFolder
from gossamer.runtime.processes.security import guard
from gossamer.runtime.processes.standalone.roster import Entry, Report, Roster, State
from gossamer.runtime.processes.standalone.standalone import Standalone
from gossamer.runtime.processes.transport.transport import Transport, listen
from gossamer.runtime.processes.transport.wire import beat, hello
from gossamer.runtime.setup import prepare

SETTINGS = {
    "name": "standalone",
    "nodes": 2,
    "task": {"name": "digits", "model": "logistic"},
    "topology": "ring",
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "stop": {"rounds": 1},
    "engine": "processes",
}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (lambda life: b"no report", "report"),
        (lambda life: Report(f"{life:16}".encode(), None, {}).pack(), "runs another experiment"),
    ],
)
@on_loop
async def test_bad_reports_end_their_sender_and_do_not_fill_the_record(
    status: Callable[[int], bytes], reason: str, tmp_path: Path
) -> None:
    setup = prepare(Experiment.of(SETTINGS))
    folder = RunFolder.create(tmp_path, "standalone", experiment="", environment={}, of="node-0")
    standalone = Standalone(
        0, setup, Roster(0, 2, 1, b"the run's digest"), folder, Silent(), began=lambda: None
    )
    listener = listen()
    address = listener.getsockname()[:2]
    transport: Transport = standalone.oversee(lambda order: None).connect(
        0,
        listener,
        [address, ("127.0.0.1", 9)],
        TOKEN,
        limit=LIMIT,
        deliver=lambda message: None,
        lost=lambda rank, why: standalone.send("unreachable", rank, why),
        event=lambda kind, text: standalone.send("event", kind, text),
        now=time.monotonic,
        failed=lambda error: None,
        found=lambda rank: standalone.send("reachable", rank),
        heartbeat_s=None,
        detection_s=10.0,
    )
    await transport.start()
    loop = asyncio.get_running_loop()
    for life in range(50):
        dialled = socket.socket()
        dialled.setblocking(False)
        async with RawEnd(dialled, None) as end:
            await loop.sock_connect(dialled, address)
            await end.say(hello(1, TOKEN, life, 1) + beat(status(life)) * 20)
            await end.until_closed()
    await transport.close()
    standalone.close()
    events = (folder.segments / "events-0.jsonl").read_text().splitlines()
    refused = [line for line in events if '"refused"' in line]
    assert len(refused) == guard.LINES + 1
    assert all(reason in line for line in refused[:-1])
    assert "refusals more that are not shown" in refused[-1]


def told(folder: RunFolder) -> list[dict[str, Any]]:
    """What is on record."""
    return [json.loads(line) for line in (folder.segments / "events-0.jsonl").read_text().splitlines()]


DIGEST = b"the run's digest"


class Scene:
    """Node 0 of several, whose peers don't answer: what they say is put into its mouth.

    Args:
        folder: where it records.
        nodes: how many there are.
        changes: of the experiment.
    """

    def __init__(self, folder: Path, nodes: int, **changes: Any) -> None:
        settings = {**SETTINGS, "nodes": nodes, "gather": {"lost_peer": "skip"}, **changes}
        self.folder = RunFolder.create(folder, "standalone", experiment="", environment={}, of="node-0")
        self.roster = Roster(0, nodes, 1, DIGEST)
        self.orders: list[list[Any]] = []
        self.went = asyncio.Event()
        self.node = Standalone(
            0, prepare(Experiment.of(settings)), self.roster, self.folder, Silent(), began=self.went.set
        )
        listener = listen()
        self._transport = self.node.oversee(self.orders.append).connect(
            0,
            listener,
            [listener.getsockname()[:2], *[("127.0.0.1", 9)] * (nodes - 1)],
            TOKEN,
            limit=LIMIT,
            deliver=lambda message: None,
            lost=lambda rank, why: None,
            event=lambda kind, text: None,
            now=time.monotonic,
            failed=lambda error: None,
            heartbeat_s=None,
            detection_s=10.0,
        )

    def say(self, by: int, entries: dict[int, Entry], end: str | None = None) -> None:
        """What a peer says."""
        self.node._heard(by, Report(DIGEST, end, entries).pack())

    def told(self, what: str) -> list[list[Any]]:
        """What the node was told to do of this kind."""
        return [order for order in self.orders if order[0] == what]

    async def close(self) -> None:
        """End it, also while it waits for others."""
        tasks = list(self.node._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
        self.node.close()


def runs(state: State = State.RUNNING, number: int = 0) -> Entry:
    return Entry(5, number, state, 1, 5)


@pytest.mark.parametrize("back", [False, True])
@on_loop
async def test_who_dies_before_a_node_goes_is_lost_when_it_goes(back: bool, tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4)
    scene.say(1, {1: runs(), 2: runs()})
    scene.node.send("ready")
    scene.node.send("unreachable", 2, "silent for 10 s")
    if back:
        scene.node.send("reachable", 2)
    assert not scene.went.is_set()
    scene.say(3, {3: runs()})  # the neighbour that is still missing
    await scene.went.wait()
    await asyncio.sleep(0)
    assert scene.roster.of_state(State.LOST) == ([] if back else [2])
    assert scene.told("lost") == ([] if back else [["lost", 2, None]])
    assert [event["node"] for event in told(scene.folder)] == ([] if back else [2])
    for rank in (0, 1, 3):
        scene.roster.take(Report(DIGEST, None, {rank: runs(State.DONE)}))
    scene.node.send("done", 1)
    assert scene.node.reason == ("failed" if back else "rounds")  # (it has not ended, or has)
    await scene.close()


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        ("itself", "node 2 can't be reached: silent for 10 s"),
        ("another", "nodes [2] were lost before node 0 went"),
    ],
)
@on_loop
async def test_where_no_loss_is_borne_one_before_a_node_goes_ends_it(
    by: str, reason: str, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, 4, gather={"lost_peer": "fail"})
    scene.say(1, {1: runs(), 2: runs()})
    scene.node.send("ready")
    if by == "itself":
        scene.node.send("unreachable", 2, "silent for 10 s")
    else:
        scene.say(1, {2: runs(State.LOST)})
    scene.say(3, {3: runs()})
    await scene.went.wait()
    await asyncio.sleep(0)
    assert reason in str(scene.node.failure)
    assert [order[0] for order in scene.orders if order[0] in ("go", "finish")] == ["finish"]
    await scene.close()


@on_loop
async def test_who_has_rounds_left_does_not_end_because_others_have_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, stop={"rounds": 100})
    for rank in (1, 2):
        scene.say(rank, {rank: runs()})
    scene.node.send("ready")
    await scene.went.wait()
    scene.node.send("progress", 57, 1.0)
    lost = scene.roster.own._replace(state=State.LOST)
    for rank in (1, 2):
        scene.say(rank, {0: lost, 1: runs(State.DONE), 2: runs(State.DONE)}, "rounds")
    await asyncio.sleep(0)
    assert scene.told("finish") == []
    assert scene.roster.own.state is State.RUNNING
    scene.node.send("done", 100)
    for rank in (1, 2):
        scene.say(rank, {0: scene.roster.own, rank: runs(State.DONE)}, "rounds")
    while not scene.told("finish"):
        await asyncio.sleep(0)
    # (As far as this node was told, the others have completed one round each of a hundred.)
    assert scene.told("finish") == [["finish", "rounds", None, True]]
    await scene.close()


@on_loop
async def test_that_a_node_returned_before_its_rounds_were_done_is_on_record(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, stop={"rounds": 100})
    scene.node.send("done", 57)
    [event] = told(scene.folder)
    assert (event["node"], event["event"]) == (0, "ended-early")
    assert event["detail"].startswith("node 0 returned after 57 of 100 rounds")
    await scene.close()


@on_loop
async def test_who_is_done_does_not_wait_for_one_that_was_lost_and_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    for rank in (1, 2):
        scene.say(rank, {rank: runs()})
    scene.node.send("ready")
    await scene.went.wait()
    scene.say(1, {1: runs(State.DONE), 2: runs(State.LOST)})
    scene.node.send("done", 1)
    assert scene.node.reason == "rounds"
    scene.say(1, {0: scene.roster.own, 1: runs(State.DONE)}, "rounds")
    await asyncio.sleep(0)
    assert scene.told("finish") == []  # the other one has not heard of it
    scene.say(2, {0: scene.roster.own, 2: runs(number=1)})
    while not scene.told("finish"):
        await asyncio.sleep(0)
    await scene.close()


@pytest.mark.parametrize("turns", [49, 50])
@on_loop
async def test_a_peer_that_comes_and_goes_does_not_fill_the_record(turns: int, tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    scene.roster.take(Report(DIGEST, None, {rank: runs(State.DONE) for rank in (1, 2)}))
    scene.node.send("ready")
    await scene.went.wait()
    for turn in range(turns):
        state, number = (State.LOST, turn // 2) if turn % 2 == 0 else (State.RUNNING, turn // 2 + 1)
        scene.say(2, {1: Entry(6, number, state, 1, 5)})
    await scene.close()
    events = told(scene.folder)
    assert len(events) == guard.LINES + 1
    last = "lost" if turns % 2 else "found"
    assert events[-1]["event"] == last  # the record says who is there at the end
    assert [order for order in scene.orders if order[0] in ("lost", "found")][-1][
        0
    ] == last  # and so knows the node
    assert len(scene.told("lost")) == 25
