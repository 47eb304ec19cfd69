"""Keys for tests of the transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transport_scene

from gossamer.runtime.processes.security.keys import make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers
from gossamer.runtime.processes.security.trust import Security, key_file


def make_securities(folder: Path, nodes: int) -> list[Security]:
    """Keys of some nodes that know each other."""
    made = make_keys(folder, range(nodes))
    peers = Peers([Peer.of(rank, f"127.0.0.1:{9000 + rank}", der) for rank, der in made.items()])
    return [Security(key_file(folder, rank), peers, rank) for rank in range(nodes)]


@pytest.fixture(scope="session")
def securities(tmp_path_factory: pytest.TempPathFactory) -> list[Security]:
    """Keys of nodes that know each other."""
    return make_securities(tmp_path_factory.mktemp("keys"), 8)


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> list[Security]:
    """Keys of others."""
    return make_securities(tmp_path_factory.mktemp("others"), 3)


@pytest.fixture(params=["plain", "tls"])
def wire(request: pytest.FixtureRequest, securities: list[Security]) -> Iterator[str]:
    """Play a network without TLS, and with it."""
    if request.param == "tls":
        transport_scene.securities.extend(securities)
    yield request.param
    transport_scene.securities.clear()


@pytest.fixture
def tls(securities: list[Security]) -> Iterator[None]:
    """Play a network with TLS."""
    transport_scene.securities.extend(securities)
    yield
    transport_scene.securities.clear()
