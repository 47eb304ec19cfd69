"""The listener that workers join: both ends prove that they know the token, and strangers cost little."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

import gossamer
from gossamer.errors import BadInput, RunFailed
from gossamer.runtime.processes.channel import SelectorChannel, Session
from gossamer.runtime.processes.coordinator import listener as module
from gossamer.runtime.processes.coordinator.listener import WorkerListener
from gossamer.runtime.processes.protocol import (
    Exited,
    FromWorker,
    JoinRequest,
    NodeReport,
    Prepared,
    ToWorker,
    Welcome,
)
from gossamer.runtime.processes.worker import worker
from gossamer.runtime.processes.worker.worker import join

TOKEN = "a token for the tests"


class Scene:
    """A listener, and the requests and messages that reach it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = WorkerListener("127.0.0.1:0", TOKEN)
        self.refused: list[str] = []
        self.listener.open(self.selector, self.admit, self.refused.append)
        self.refusal: str | None = None
        self.joined: list[tuple[str, int]] = []
        self.heard: list[Any] = []

    def admit(self, request: JoinRequest, host: str, release: Callable[[], socket.socket]) -> str | None:
        if self.refusal is None:
            self.joined.append((request.session, request.slots))
            channel: SelectorChannel[FromWorker] = SelectorChannel(
                release(),
                FromWorker,
                self.selector,
                self.heard.append,
                lambda why: None,
            )
            channel.send(Welcome(self.listener.proof("coordinator", request.nonce), request.received, 7.0))
        return self.refusal

    def serve(self) -> None:
        for key, events in self.selector.select(0.05):
            key.data(events)

    def dial(self, token: str = TOKEN) -> Any:
        """Join as a worker with a token. Returns a connection and an answer, or an error."""
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(join(self.listener.address, token, "me", 3, 5))
            except (RunFailed, OSError) as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while not outcome:
            self.serve()
        thread.join()
        return outcome[0]

    def strangers(self) -> int:
        return len(self.listener._strangers)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.listener.close()
    for key in list(scene.selector.get_map().values()):
        scene.selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
    scene.selector.close()


def test_worker_with_the_token_joins_and_is_heard(scene: Scene) -> None:
    end, welcome = scene.dial()
    assert (welcome.received, welcome.clock) == (5, 7.0)
    assert scene.joined == [("me", 3)]
    with end:
        end.sendall(b"\x0a\0\0\0\x91\xa8Prepared")
        while not scene.heard:
            scene.serve()
    assert scene.heard == [Prepared()]
    assert not scene.strangers()


def test_worker_with_a_wrong_token_is_refused(scene: Scene) -> None:
    for _ in range(2):
        answer = scene.dial("another token, quite long")
        assert isinstance(answer, ConnectionError)  # no reason to give up: anyone may have said so
        assert "says: this worker has the wrong token" in str(answer)
        while scene.strangers():
            scene.serve()
    assert scene.joined == []
    # Reported once.
    assert scene.refused == ["a worker at 127.0.0.1 does not know the token of this run: it has not joined"]


def test_worker_refuses_a_coordinator_without_the_token(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.listener.token = "another token, quite long"
    monkeypatch.setattr(
        module, "hmac", mock.Mock(**{"compare_digest.return_value": True})
    )  # accepts any proof
    answer = scene.dial()
    assert isinstance(answer, ConnectionError)
    assert str(answer) == "what listens there does not know this token"


def test_worker_of_another_run_or_version_is_told_why(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.refusal = "it belongs to another run"
    assert str(scene.dial()).endswith("refuses this worker: it belongs to another run")
    monkeypatch.setattr(worker, "__version__", "0.0")
    for _ in range(2):
        assert "it runs gossamer 0.0, and the coordinator" in str(scene.dial())
    version = f"it runs gossamer 0.0, and the coordinator {gossamer.__version__}"
    told = ["it belongs to another run", version]
    assert scene.refused == [f"a worker at 127.0.0.1 has not joined: {why}" for why in told]


def test_unidentified_connections_are_limited_and_time_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 2)
    host, _, port = scene.listener.address.rpartition(":")
    ends = [socket.create_connection((host, int(port))) for _ in range(3)]
    scene.serve()
    while scene.strangers() < 2:
        scene.serve()
    ends[1].sendall(bytes(range(256)) * 50)  # not TLS
    while scene.strangers() > 1:
        scene.serve()
    scene.listener._strangers = dict.fromkeys(scene.listener._strangers, 0.0)
    scene.listener.drop_silent()
    assert not scene.strangers()
    assert scene.joined == []
    for end in ends:
        end.close()


def test_short_token_and_malformed_address_are_bad_input() -> None:
    with pytest.raises(BadInput, match="accepted: at least 16"):
        WorkerListener("127.0.0.1:0", "short")
    for address in ("host", "host:", "1::2:3", "host:65536"):
        with pytest.raises(BadInput, match="accepted: HOST:PORT"):
            WorkerListener(address, TOKEN)


def test_part_of_a_long_message_is_a_sign_of_life() -> None:
    """It may take minutes over a slow link."""
    selector, heard = selectors.DefaultSelector(), list[Any]()
    session: Session[FromWorker] = Session(FromWorker, selector, heard.append, heard.append)
    near, far = socket.socketpair()
    with far:
        session.attach(near, 0)
        far.sendall(b"\xff\xff\0\0part")
        [(key, events)] = selector.select()
        key.data(events)
        assert session.heard == 8
        assert not heard
        session.close()


def test_session_resends_what_has_not_arrived() -> None:
    """No message is lost or duplicated, wherever a connection breaks."""
    selector = selectors.DefaultSelector()
    heard: list[Any] = []
    gone: list[str | None] = []
    ours: Session[FromWorker] = Session(FromWorker, selector, heard.append, gone.append)
    theirs: Session[ToWorker] = Session(ToWorker, selector, heard.append, gone.append)

    def serve() -> None:
        while ready := selector.select(0):
            for key, events in ready:
                key.data(events)

    sent = [NodeReport(0, number, Exited("x" * 50_000)) for number in range(20)]
    for message in sent[:10]:
        theirs.send(message)
    for broken in range(3):
        near, far = socket.socketpair()
        theirs.attach(near, ours.received)
        ours.attach(far, theirs.received)
        if broken < 2:  # in the middle of a message
            for key, events in selector.select(0):
                key.data(events)
            assert ours.channel is not None
            ours.channel.close()
            ours.channel = None
            serve()
            theirs.send(sent[10 + broken])
    for message in sent[12:]:
        theirs.send(message)
    serve()
    assert heard == sent
    assert theirs.settled
    ours.close()
    theirs.close()
