"""How a worker and a coordinator authenticate each other: both know the token of the run, and neither sends it.

The worker dials; TLS 1.3 with a key that the coordinator made for this run, which the worker does not know yet. Then each
sends a nonce, and proves the token by an HMAC (SHA-256) over both nonces and the certificate that it saw::

    worker -> coordinator    Hello      nonce_w
    coordinator -> worker    Challenge  nonce_c, HMAC(token, "coordinator", certificate, nonce_w, nonce_c)
    worker -> coordinator    Proof      HMAC(token, "worker", certificate, nonce_w, nonce_c), and what it offers

A man in the middle would have to show another certificate, for which the proofs do not hold. Any stranger that dials gets one
proof by the coordinator, against which it can test guesses of the token offline. So a token has at least 16 characters, and
a generated one has 128 bits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from gossamer.errors import BadInput

NONCE_BYTES = 32
LEAST_CHARACTERS = 16


def new_token() -> str:
    """A random token of 128 bits."""
    return secrets.token_urlsafe(16)


def check_token(token: str) -> str:
    """The same, if it is long enough.

    Raises:
        BadInput: if not.
    """
    if len(token) < LEAST_CHARACTERS:
        raise BadInput(
            f"token: {len(token)} characters; accepted: at least {LEAST_CHARACTERS}, which nobody can guess"
        )
    return token


def proof(token: str, side: str, certificate: bytes, nonce_worker: bytes, nonce_coordinator: bytes) -> bytes:
    """The proof of a side ("worker" or "coordinator") that it knows the token."""
    fingerprint = hashlib.sha256(certificate).digest()
    said = b"".join((side.encode().ljust(16), fingerprint, nonce_worker, nonce_coordinator))
    return hmac.new(token.encode(), said, hashlib.sha256).digest()


def proved(sent: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one."""
    return hmac.compare_digest(sent, expected)
