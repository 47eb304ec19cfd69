"""Admits workers to a run if they prove that they know its token
(:mod:`gossamer.runtime.processes.security`)."""

from __future__ import annotations

import hmac
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from gossamer.errors import BadInput
from gossamer.runtime.processes.channel import LARGEST_STRANGER, SelectorChannel, parse_address
from gossamer.runtime.processes.protocol import JoinRequest, Refused
from gossamer.runtime.processes.security import check_token, context, issue, proof
from gossamer.version import __version__

JOIN_S = 10.0
"""Seconds that a stranger has to prove that it knows the token."""
MAX_STRANGERS = 64
"""Most open connections without a proof; a further one replaces the oldest. Also the most refusals
reported."""

Admit = Callable[[JoinRequest, str, Callable[[], socket.socket]], str | None]
"""Called with a worker that knows the token, its host, and a function that hands over its connection. Returns
the reason for a refusal, or None."""


class WorkerListener:
    """Listens at "host:port" for workers that know the token. Raises BadInput if the token is too short, or the
    address can't be used."""

    def __init__(self, address: str, token: str) -> None:
        self.token = check_token(token)
        host, port = parse_address(address, "--listen")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise BadInput(
                f"--listen {address}: {error.strerror or error}; accepted: a free address of this machine"
            ) from None
        self._listener.setblocking(False)
        key, self._certificate = issue()
        self._context = context(ssl.PROTOCOL_TLS_SERVER, key, ())
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        self._strangers: dict[SelectorChannel[JoinRequest], float] = {}  # with the deadline for their proofs
        self._reported_hosts: set[str] = set()  # hosts whose workers were reported for a wrong token

    def open(self, selector: selectors.BaseSelector, admit: Admit, refused: Callable[[str], None]) -> None:
        self._selector, self._admit, self._refused = selector, admit, refused
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def proof(self, side: str, nonce: bytes) -> bytes:
        """The proof of a side that it knows the token, for a connection to this listener."""
        return proof(self.token, side, self._certificate, nonce)

    def _accept(self, events: int) -> None:
        try:
            end, (host, *_) = self._listener.accept()
            end.setblocking(False)
            end = self._context.wrap_socket(end, server_side=True, do_handshake_on_connect=False)
        except OSError:
            return  # the connection is already gone
        if len(self._strangers) >= MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)))
        stranger = SelectorChannel[JoinRequest](
            end,
            JoinRequest,
            self._selector,
            lambda join: self._hear(stranger, host, join),
            lambda error: self._refuse(stranger),
            largest=LARGEST_STRANGER,
        )
        self._strangers[stranger] = time.monotonic() + JOIN_S

    def _hear(self, stranger: SelectorChannel[JoinRequest], host: str, join: JoinRequest) -> None:
        if not hmac.compare_digest(join.proof, self.proof("worker", join.nonce)):
            if host not in self._reported_hosts and len(self._reported_hosts) < MAX_STRANGERS:
                self._reported_hosts.add(host)
                self._refused(f"a worker at {host} does not know the token of this run: it has not joined")
            self._refuse(stranger, "it has the wrong token")
        elif join.version != __version__:
            self._refuse(stranger, f"it runs gossamer {join.version}, and the coordinator {__version__}")
        elif why := self._admit(join, host, stranger.release):
            self._refuse(stranger, why)
        else:
            del self._strangers[stranger]

    def _refuse(self, stranger: SelectorChannel[JoinRequest], why: str | None = None) -> None:
        self._strangers.pop(stranger, None)
        if why is not None:
            stranger.send(Refused([why]))
        stranger.close()

    def drop_silent(self) -> None:
        for stranger in [late for late, deadline in self._strangers.items() if time.monotonic() > deadline]:
            self._refuse(stranger)

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._listener.close()  # accepts no more connections, and leaves the selector
        for stranger in list(self._strangers):
            self._refuse(stranger)

    def __enter__(self) -> WorkerListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
