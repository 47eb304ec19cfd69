"""What strangers may cost."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from transport_scene import Peer, dial, network, on_loop, settle

from gossamer.runtime.processes.security import guard
from gossamer.runtime.processes.security.guard import Guard, place_of
from gossamer.runtime.processes.transport.transport import _AT_ONCE, listen
from gossamer.runtime.processes.transport.wire import hello


class Scene:
    def __init__(self, *hosts: str) -> None:
        self.time, self.lines = 0.0, list[str]()
        self.guard = Guard(hosts, self.lines.append, lambda: self.time)
        self.refused = list[str]()

    def come(self, host: str, *names: str) -> list[Stranger]:
        strangers = [Stranger(name, self.refused) for name in names]
        for stranger in strangers:
            self.guard.enter(host, stranger)
        return strangers


class Stranger:
    def __init__(self, name: str, refused: list[str]) -> None:
        self.name, self._refused = name, refused

    def refuse(self, reason: str) -> None:
        self._refused.append(self.name)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places an address beside those of nodes, five in all beside them."""
    monkeypatch.setattr(guard, "STRANGERS_EACH", 2)
    monkeypatch.setattr(guard, "STRANGERS", 5)


@pytest.mark.usefixtures("few")
def test_the_oldest_of_an_address_makes_room() -> None:
    scene = Scene("10.0.0.1")
    scene.come("10.0.0.2", *"abcd")
    assert scene.refused == ["a", "b"]
    scene.come("10.0.0.1", *"xyz")  # where a node is, there is a place more
    assert scene.refused == ["a", "b"]
    scene.come("10.0.0.1", "w")
    assert scene.refused == ["a", "b", "x"]


@pytest.mark.usefixtures("few")
def test_nodes_have_their_places_at_each_address_of_their_host() -> None:
    scene = Scene("one.example", "one.example", "10.0.0.3")
    assert scene.guard.names == {"one.example"}
    scene.guard.locate("one.example", ["10.0.0.1", "10.0.0.3", "2001:db8::1", "2001:db8::2"])
    assert scene.guard.names == set()
    scene.come("10.0.0.1", *"abcd")
    scene.come("2001:db8::5")
    assert scene.refused == []
    scene.come("10.0.0.1", "e")
    assert scene.refused == ["a"]
    assert scene.guard._at == {"10.0.0.1": 2, "10.0.0.3": 3, "2001:db8::/64": 2}


@pytest.mark.usefixtures("few")
def test_who_has_left_holds_no_place() -> None:
    scene = Scene("10.0.0.1")
    a, b = scene.come("10.0.0.2", *"ab")
    scene.guard.leave("10.0.0.2", a)
    scene.guard.leave("10.0.0.2", a)
    [c] = scene.come("10.0.0.2", "c")
    assert scene.refused == []
    [d] = scene.come("10.0.0.2", "d")
    assert scene.refused == ["b"]
    for stranger in (b, c, d):  # b too leaves, when its connection is closed
        scene.guard.leave("10.0.0.2", stranger)
    assert scene.guard._here == {}


@pytest.mark.usefixtures("few")
def test_when_all_places_are_taken_the_address_with_most_loses_one() -> None:
    scene = Scene("10.0.0.1")
    for n in range(3):
        scene.come(f"10.0.1.{n}", f"alone {n}")
    scene.come("10.0.0.2", *"ab")
    scene.come("10.0.0.3", "x")
    assert scene.refused == []
    scene.come("10.0.0.4", "y")
    assert scene.refused == ["a"]


def test_places_are_bounded_altogether() -> None:
    scene = Scene("10.0.0.1")
    for n in range(250):
        scene.come(f"10.0.1.{n}", str(n))
    assert len(scene.refused) == 250 - guard.STRANGERS - 1


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
    assert len(scene.guard._ration._lines) <= 1024


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
    assert place_of(host) == place


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
        most = guard.STRANGERS_EACH + 2  # both nodes are at that address
        await a.until(lambda: len(a.events) == guard.LINES)
        assert "did not say who it is while others came" in a.events[0][1]
        b.send(0, "honest", "t")
        await a.receive(1)
        assert len(a.transport._end.connections) <= most
        assert len(a.transport._contacts) == 1
        for end in ends:
            end.close()
        while a.transport._end.guard._here:
            await asyncio.sleep(0)
        assert len(a.events) == guard.LINES


@on_loop
async def test_connections_that_come_all_at_once_do_not_take_all_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    burst, came, most = 400, 0, 0
    enter = Guard.enter

    def counted(self: Guard, host: str, stranger: guard.Stranger) -> None:
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
                most <= guard.STRANGERS_EACH + 2 + 4 * _AT_ONCE
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
        assert a.transport._end.guard._here == {}
        assert len(a.transport._end.connections) == 1
    assert a.events[guard.LINES :] == [("refused", f"{200 - guard.LINES} refusals more that are not shown")]


@on_loop
async def test_hosts_that_go_by_name_are_looked_up_once_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_up(host: str, port: None, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host == "none.example":
            raise socket.gaierror("not known")
        return [(2, 1, 6, "", ("10.0.0.7", 0)), (10, 1, 6, "", ("2001:db8::7", 0, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    addresses = [("127.0.0.1", 9000), ("one.example", 9000), ("none.example", 9000), ("one.example", 9001)]
    monkeypatch.setattr("gossamer.runtime.processes.transport.transport._check_loopback", lambda _: None)
    peer = Peer(0, listen(), addresses)
    await peer.transport.start()
    await settle()
    assert asked == ["none.example", "one.example"]
    at = {"loopback": 1, "10.0.0.7": 2, "2001:db8::/64": 2, "none.example": 1}
    assert peer.transport._end.guard._at == at
    await peer.transport.close()
