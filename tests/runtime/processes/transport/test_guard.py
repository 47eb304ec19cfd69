"""What strangers may cost."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from transport_scene import dial, network, on_loop

from gossamer.runtime.processes.transport import guard
from gossamer.runtime.processes.transport.guard import Guard, Refuse, network_of
from gossamer.runtime.processes.transport.transport import AT_ONCE
from gossamer.runtime.processes.transport.wire import hello


class Scene:
    def __init__(self, nodes: int = 0) -> None:
        self.time, self.lines = 0.0, list[str]()
        self.guard = Guard(nodes, self.lines.append, lambda: self.time)
        self.refused = list[str]()

    def come(self, host: str, *names: str) -> list[Refuse]:
        strangers = [partial(self._refuse, name) for name in names]
        for stranger in strangers:
            self.guard.enter(host, stranger)
        return list(strangers)

    def _refuse(self, name: str, reason: str) -> None:
        self.refused.append(name)

    def leave(self, host: str, stranger: Refuse) -> None:
        self.guard.leave(host, stranger)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for five strangers, and one for each node."""
    monkeypatch.setattr(guard, "STRANGERS", 5)


@pytest.mark.usefixtures("few")
def test_when_there_is_no_room_the_oldest_of_the_address_with_most_is_closed() -> None:
    scene = Scene(nodes=1)
    for n in range(3):
        scene.come(f"10.0.1.{n}", f"alone {n}")
    scene.come("10.0.0.2", *"abc")
    assert scene.refused == []
    scene.come("10.0.0.3", "x")
    scene.come("10.0.0.2", "d")
    assert scene.refused == ["a", "b"]


@pytest.mark.usefixtures("few")
def test_a_stranger_that_has_left_takes_no_room() -> None:
    scene = Scene(nodes=0)
    a, b, *others = scene.come("10.0.0.2", *"abcde")
    scene.leave("10.0.0.2", a)
    scene.leave("10.0.0.2", a)
    others += scene.come("10.0.0.2", "f")
    assert scene.refused == []
    others += scene.come("10.0.0.2", "g")
    assert scene.refused == ["b"]
    for stranger in (b, *others):  # b too leaves, when its connection is closed
        scene.leave("10.0.0.2", stranger)
    assert scene.guard._here == {}


def test_lines_about_one_address_are_bounded_and_counted() -> None:
    scene = Scene()
    for n in range(100):
        scene.guard.tell("10.0.0.1", f"line {n}")
    assert scene.lines == [f"line {n}" for n in range(guard.LINES)]
    scene.guard.tell("10.0.0.2", "another")
    assert scene.lines[-1] == f"another (and {100 - guard.LINES} refusals that are not shown)"
    scene.time = 61
    scene.guard.tell("10.0.0.1", "a minute later")
    assert scene.lines[-1] == "a minute later"
    scene.guard.close()
    assert scene.lines[-1] == "a minute later"
    for n in range(guard.LINES + 2):
        scene.guard.tell("10.0.0.1", f"line {n}")
    scene.guard.close()
    assert scene.lines[-1] == "3 refusals more that are not shown"


def test_lines_about_many_addresses_are_bounded_too() -> None:
    scene = Scene()
    for n in range(20_000):
        scene.guard.tell(f"10.{n // 65536}.{n // 256 % 256}.{n % 256}", "line")
    assert len(scene.lines) == guard.ALL_LINES
    assert len(scene.guard._lines) <= guard.ALL_LINES


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a.example", "a.example"),
    ],
)
def test_what_counts_as_one_address(host: str, place: str) -> None:
    assert network_of(host) == place


@pytest.mark.usefixtures("wire")
@on_loop
async def test_a_flood_of_connections_is_bounded_and_honest_peers_get_in() -> None:
    async with network(2) as ((a, b), _):
        ends: list[socket.socket] = []
        for _ in range(300):
            end = socket.socket()
            end.setblocking(False)
            await asyncio.get_running_loop().sock_connect(end, a.address)
            ends.append(end)
        most = guard.STRANGERS + 2
        await a.until(lambda: len(a.events) == guard.LINES)
        assert "did not say who it is while others came" in a.events[0][1]
        b.send(0, "honest", "t")
        await a.receive(1)
        assert len(a.transport.connections) <= most
        assert len(a.transport.peers) == 1
        for end in ends:
            end.close()
        while a.transport.guard._here:
            await asyncio.sleep(0)
        assert len(a.events) == guard.LINES


@on_loop
async def test_connections_that_come_all_at_once_do_not_take_all_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    burst, came, most = 400, 0, 0
    enter = Guard.enter

    def counted(self: Guard, host: str, stranger: Refuse) -> None:
        nonlocal came
        came += 1
        enter(self, host, stranger)

    monkeypatch.setattr(Guard, "enter", counted)
    async with network(2) as ((a, b), _):
        with ExitStack() as ends:
            for _ in range(burst):  # the kernel takes them while this loop stands still
                ends.enter_context(socket.create_connection(a.address))
            before = open_files()
            while came < burst:
                await asyncio.sleep(0)
                most = max(most, open_files() - before)
            assert (
                most <= guard.STRANGERS + 2 + 4 * AT_ONCE
            )  # (four turns of the loop from accepting to closing)
            b.send(0, "honest", "t")
            await a.receive(1)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_loop
async def test_a_flood_of_greetings_holds_nothing() -> None:
    async with network(2) as ((a, b), _):
        for n in range(200):
            async with await dial(a, hello(n % 2, b"not the token...")) as end:
                await end.until_closed()
        b.send(0, "honest", "t")
        await a.receive(1)
        assert len(a.events) == guard.LINES
        assert a.transport.guard._here == {}
        assert len(a.transport.connections) == 1
    assert a.events[guard.LINES :] == [("refused", f"{200 - guard.LINES} refusals more that are not shown")]
