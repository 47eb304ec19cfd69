"""TLS without a socket: a connection gives it what came in, and writes what it gives back.

(asyncio's own TLS holds 256 KiB a connection, and a second write buffer from which nothing can be taken back.)
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator

from gossamer.messages import FrameError

_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "has a key that is none of this run's",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "shows no certificate",
    "UNSUPPORTED_PROTOCOL": "speaks an older TLS; accepted: 1.3",
    "WRONG_VERSION_NUMBER": "does not speak TLS",
    "HTTP_REQUEST": "does not speak TLS",
    "HTTPS_PROXY_REQUEST": "does not speak TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know this node's key",
}


class Tls:
    """One end of a connection.

    Args:
        context: whom to trust, and what to prove.
        server_side: whether the other end dialled.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read: Callable[[int, memoryview], int] = self._end.read  # type: ignore[assignment]  # into a buffer
        self.secure = False
        """Whether the other end has proved its key."""

    @property
    def certificate(self) -> bytes | None:
        """The other end's certificate (DER), once it is secure."""
        return self._end.getpeercert(binary_form=True)

    def begin(self) -> bytes:
        """What the side that dialled says first."""
        for _ in self.open(b"", memoryview(b"")):
            raise AssertionError("nothing has come in yet")
        return self.due()

    def open(self, data: bytes | memoryview, into: memoryview) -> Iterator[memoryview]:
        """Take what came in, and give what it says, piece by piece.

        Args:
            data: bytes of the wire.
            into: where to put each piece, one after the other.

        Raises:
            FrameError: for anything that a peer would not have sent.
        """
        self._incoming.write(data)
        try:
            if not self.secure:
                self._end.do_handshake()
                self.secure = True
            while length := self._read(len(into), into):
                yield into[:length]
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            raise FrameError(_REASONS.get(reason, f"broke TLS: {reason}")) from None

    def due(self) -> bytes:
        """What TLS itself has to say to the other end."""
        return self._outgoing.read()

    def seal(self, frame: bytes) -> bytes:
        """What to write to the wire for a frame."""
        self._end.write(frame)
        return self._outgoing.read()
