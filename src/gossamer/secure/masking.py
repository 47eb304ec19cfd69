"""Masks that cancel in a sum of integers: fixed-point numbers, keys, the streams that masks are, and shares of secrets.

Values travel as fixed-point numbers in the ring of integers modulo 2^b, where a sum is exact in any order and a uniformly
random mask hides its term perfectly. (Floating-point masks do neither: they leave rounding errors of their own size.)
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
"""Length of a secret that can be shared."""
_PRIME = 2**130 - 5  # Shamir's scheme works in a field that has every secret among its elements
SHARE_BYTES = 17
KEY_BYTES = 32

_WORDS: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


class Ring:
    """Fixed-point numbers modulo 2^bits, of which some bits are behind the point.

    Attributes:
        dtype: the unsigned integers of its elements.
        bound: sums of a smaller absolute value than this are exact but for the rounding of their terms."""

    def __init__(self, bits: int, fraction_bits: int) -> None:
        self.dtype = _WORDS[bits]
        self._signed = np.dtype(f"<i{bits // 8}")
        self._scale = 2.0**fraction_bits
        # One less, for the roundings of up to 2^(fraction_bits + 1) terms.
        self.bound = 2.0 ** (bits - 1 - fraction_bits) - 1

    def fix(self, values: Float[np.ndarray, " n"], weight: float) -> UInt[np.ndarray, " n"]:
        """Each value times a weight, rounded to a fixed-point number."""
        scaled = np.multiply(values, weight * self._scale, dtype=np.float64)
        words: np.ndarray = np.rint(scaled, out=scaled).astype(self._signed).view(self.dtype)
        return words

    def number(self, words: UInt[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The numbers, float64, that words stand for."""
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
        """Words that look random without the key: AES-256 in counter mode. A key must serve once, and the next call
        overwrites the words."""
        zeros, words = _scratch(length * self.dtype.itemsize)
        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into(zeros, words)
        return np.frombuffer(words, self.dtype, count=length)


@lru_cache(maxsize=2)
def _scratch(size: int) -> tuple[bytes, bytearray]:
    """Zeros, and memory for as many bytes of a stream: to allocate it each time would take as long as to fill it."""
    return bytes(size), bytearray(size + 15)  # update_into() asks for a block less one byte more


def derive(secret: bytes, purpose: str, *numbers: int) -> bytes:
    """A key for one purpose (HKDF with SHA-256, RFC 5869); the numbers are part of what it is for."""
    info = b"gossamer/secure-aggregation/" + purpose.encode() + struct.pack(f">{len(numbers)}Q", *numbers)
    return HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(secret)


class KeyPair:
    """A pair of X25519 keys (RFC 7748), which follows from a secret."""

    def __init__(self, secret: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(derive(secret, "key"))
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """The secret that this pair has in common with that of a public key; ValueError for a key of small order."""
        return self._private.exchange(X25519PublicKey.from_public_bytes(public))


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret (Shamir, "How to share a secret", 1979): ``threshold`` of them determine it, fewer say nothing."""
    shares = shamirs.shares(int.from_bytes(secret, "big"), count, _PRIME, threshold)
    return [share.value.to_bytes(SHARE_BYTES, "big") for share in shares]


def join(shares: dict[int, bytes]) -> bytes:
    """The secret of which these are shares: position in what :func:`split` returned -> share. Needs as many as its
    threshold; ValueError for shares that none has."""
    points = [
        shamirs.share(position + 1, int.from_bytes(share, "big"), _PRIME)
        for position, share in shares.items()
    ]
    secret: int = shamirs.interpolate(points)
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("shares that belong to no secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def seal(key: bytes, message: bytes, sender: int, context: bytes) -> bytes:
    """Encrypt a message so that it can't be read or changed, nor opened as another sender's or in another context. A key must
    serve each sender once."""
    return ChaCha20Poly1305(key).encrypt(sender.to_bytes(12, "big"), message, context)


def unseal(key: bytes, sealed: bytes, sender: int, context: bytes) -> bytes:
    """The message in what :func:`seal` returned; ValueError if it was changed, or is of another key, sender or context."""
    try:
        return ChaCha20Poly1305(key).decrypt(sender.to_bytes(12, "big"), sealed, context)
    except InvalidTag:
        raise ValueError("a sealed message of another key, sender or context, or a changed one") from None
