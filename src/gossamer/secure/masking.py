"""Masks that cancel in a sum of integers: fixed-point numbers, keys, pseudorandom streams, and secret
sharing.

Values are sent as fixed-point numbers in the ring of integers modulo 2^b, where a sum is exact in any order
and a uniformly random mask hides its term perfectly. Floating-point masks achieve neither, and leave rounding
errors on the scale of the masks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import shamirs  # type: ignore[import-untyped]
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import Float, UInt

SECRET_BYTES = 16
"""Length in bytes of a secret that can be shared."""
_PRIME = 2**130 - 5  # Shamir's scheme needs a field that contains every secret
SHARE_BYTES = 17
KEY_BYTES = 32

_WORDS: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


class IntegerRing:
    """Fixed-point numbers modulo 2^bits.

    Attributes:
        dtype: the unsigned integer type of its elements.
        bound: sums of smaller absolute value are exact, except for the rounding of their terms."""

    def __init__(self, bits: int, fraction_bits: int) -> None:
        self.dtype = _WORDS[bits]
        self._signed = np.dtype(f"<i{bits // 8}")
        self._scale = 2.0**fraction_bits
        # One less, to allow for the rounding of up to 2^(fraction_bits + 1) terms.
        self.bound = 2.0 ** (bits - 1 - fraction_bits) - 1

    def fix(self, values: Float[np.ndarray, " n"], weight: float) -> UInt[np.ndarray, " n"]:
        """Each value times a weight, rounded to a fixed-point number."""
        scaled = np.multiply(values, weight * self._scale, dtype=np.float64)
        words: np.ndarray = np.rint(scaled, out=scaled).astype(self._signed).view(self.dtype)
        return words

    def number(self, words: UInt[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The numbers that words represent, float64."""
        return np.asarray(words.view(self._signed) / self._scale)

    def sum(self, terms: Sequence[UInt[np.ndarray, " n"]]) -> UInt[np.ndarray, " n"]:
        """The sum of vectors of words; ValueError if they differ in length."""
        if len({len(term) for term in terms}) > 1:
            raise ValueError(f"words of lengths {[len(term) for term in terms]}; accepted: one length")
        total = np.zeros(len(terms[0]) if terms else 0, self.dtype)
        for term in terms:
            total += term
        return total

    def stream(self, key: bytes, length: int) -> UInt[np.ndarray, " n"]:
        """Words that look random without the key: AES-256 in counter mode. Use a key only once. The next call
        overwrites the words."""
        zeros, words = _scratch(length * self.dtype.itemsize)
        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into(zeros, words)
        return np.frombuffer(words, self.dtype, count=length)


@lru_cache(maxsize=2)
def _scratch(size: int) -> tuple[bytes, bytearray]:
    """Zeros, and memory for this number of stream bytes, cached because allocating it takes as long as
    filling it."""
    return bytes(size), bytearray(size + 15)  # update_into() requires an extra block minus one byte


def derive(secret: bytes, purpose: str, *numbers: int) -> bytes:
    """A key for one purpose (HKDF with SHA-256, RFC 5869). The numbers are part of the purpose."""
    info = b"gossamer/secure-aggregation/" + purpose.encode() + struct.pack(f">{len(numbers)}Q", *numbers)
    return HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(secret)


class KeyPair:
    """A pair of X25519 keys (RFC 7748), derived from a secret."""

    def __init__(self, secret: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(derive(secret, "key"))
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """The secret shared with the owner of a public key. ValueError for a key of small order."""
        return self._private.exchange(X25519PublicKey.from_public_bytes(public))


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret (Shamir, "How to share a secret", 1979): ``threshold`` of them determine it; fewer
    reveal nothing."""
    shares = shamirs.shares(int.from_bytes(secret, "big"), count, _PRIME, threshold)
    return [share.value.to_bytes(SHARE_BYTES, "big") for share in shares]


def join(shares: dict[int, bytes]) -> bytes:
    """The secret of some shares, by their positions in the result of :func:`split`. Needs ``threshold``
    shares. ValueError for shares that belong to no secret."""
    points = [
        shamirs.share(position + 1, int.from_bytes(share, "big"), _PRIME)
        for position, share in shares.items()
    ]
    secret: int = shamirs.interpolate(points)
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("shares that belong to no secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def seal(key: bytes, message: bytes, sender: int, context: bytes) -> bytes:
    """Encrypt and authenticate a message, bound to its sender and context. Each sender may use a key only
    once."""
    return ChaCha20Poly1305(key).encrypt(sender.to_bytes(12, "big"), message, context)


def unseal(key: bytes, sealed: bytes, sender: int, context: bytes) -> bytes:
    """Decrypt a message of :func:`seal`. ValueError if it was changed, or belongs to another key, sender or
    context."""
    try:
        return ChaCha20Poly1305(key).decrypt(sender.to_bytes(12, "big"), sealed, context)
    except InvalidTag:
        raise ValueError("a sealed message that was changed, or has another key, sender or context") from None
