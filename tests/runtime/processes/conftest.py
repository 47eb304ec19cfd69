"""Keys for tests of the transport, and workers on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transport_scene

from gossamer.runtime.processes.fork_server import Listen
from gossamer.runtime.processes.security import Security, issue
from worker_fleet import TOKEN, Fleet, free_port


def issued(nodes: int) -> list[Security]:
    """Keys of nodes that trust each other."""
    identities = [issue() for _ in range(nodes)]
    certificates = [identity.certificate for identity in identities]
    return [Security(identity.pem, certificates) for identity in identities]


@pytest.fixture(scope="session")
def securities() -> list[Security]:
    """Keys of nodes that trust each other."""
    return issued(8)


@pytest.fixture(scope="session")
def strangers() -> list[Security]:
    """Keys of nodes that the others do not trust."""
    return issued(3)


@pytest.fixture(params=["plain", "tls"])
def wire(request: pytest.FixtureRequest, securities: list[Security]) -> Iterator[str]:
    """Run a network without TLS, and with it."""
    if request.param == "tls":
        transport_scene.securities.extend(securities)
    yield request.param
    transport_scene.securities.clear()


@pytest.fixture
def tls(securities: list[Security]) -> Iterator[None]:
    """Run a network with TLS."""
    transport_scene.securities.extend(securities)
    yield
    transport_scene.securities.clear()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def listen() -> Listen:
    return Listen(f"127.0.0.1:{free_port()}", TOKEN, 2)
