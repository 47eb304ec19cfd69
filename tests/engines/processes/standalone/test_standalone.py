"""What a node without a supervisor makes of what others tell it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transport_scene import LIMIT, TOKEN, RawEnd, on_loop

from gossamer import Experiment
from gossamer.api import Silent
from gossamer.engines.processes.security import guard
from gossamer.engines.processes.standalone.roster import Report, Roster
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
