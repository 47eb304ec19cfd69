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
from gossamer.engines.processes.security import guard
from gossamer.engines.processes.standalone.roster import Entry, Report, Roster, State
from gossamer.engines.processes.standalone.standalone import Standalone
from gossamer.engines.processes.transport.transport import Transport, listen
from gossamer.engines.processes.transport.wire import beat, hello
from gossamer.engines.setup import prepare
from gossamer.results.folder import RunFolder

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
    assert len(refused) == guard.LINES
    assert all(reason in line for line in refused)


def told(folder: RunFolder) -> list[dict[str, Any]]:
    """What is on record."""
    return [json.loads(line) for line in (folder.segments / "events-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("turns", [49, 50])
@on_loop
async def test_a_peer_that_comes_and_goes_does_not_fill_the_record(turns: int, tmp_path: Path) -> None:
    setup = prepare(Experiment.of({**SETTINGS, "nodes": 3, "gather": {"lost_peer": "skip"}}))
    folder = RunFolder.create(tmp_path, "standalone", experiment="", environment={}, of="node-0")
    roster = Roster(0, 3, 1, b"the run's digest")
    roster.take(Report(b"the run's digest", None, {rank: Entry(5, 0, State.DONE, 1, 5) for rank in (1, 2)}))
    orders: list[list[Any]] = []
    went = asyncio.Event()
    standalone = Standalone(0, setup, roster, folder, Silent(), began=went.set)
    listener = listen()
    transport = standalone.oversee(orders.append).connect(
        0,
        listener,
        [listener.getsockname()[:2], ("127.0.0.1", 9), ("127.0.0.1", 9)],
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
    standalone.send("ready")
    await went.wait()
    for turn in range(turns):
        state, number = (State.LOST, turn // 2) if turn % 2 == 0 else (State.RUNNING, turn // 2 + 1)
        standalone._heard(2, Report(b"the run's digest", None, {1: Entry(6, number, state, 1, 5)}).pack())
    await transport.close()
    standalone.close()
    events = told(folder)
    assert len(events) == guard.LINES + 1
    last = "lost" if turns % 2 else "found"
    assert events[-1]["event"] == last  # the record says who is there at the end
    assert [order[0] for order in orders if order[0] in ("lost", "found")][
        -1
    ] == last  # and so knows the node
    assert sum(order[0] == "lost" for order in orders) == 25
