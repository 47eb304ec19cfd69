"""Fixed-point sums, streams, shares and sealed messages."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from gossamer.secure import masking
from gossamer.secure.masking import IntegerRing, KeyPair

VALUES = st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20)


@pytest.mark.parametrize(("bits", "fraction"), [(32, 20), (64, 40)])
@given(vectors=st.lists(VALUES, min_size=1, max_size=6), weight=st.floats(0, 1))
def test_ring_sum_equals_sum_of_rounded_terms(
    bits: int, fraction: int, vectors: list[list[float]], weight: float
) -> None:
    ring = IntegerRing(bits, fraction)
    length = min(map(len, vectors))
    weight /= len(vectors)
    terms = [np.array(vector[:length], dtype=np.float32) for vector in vectors]
    exact = sum(np.rint(term.astype(np.float64) * weight * 2.0**fraction) for term in terms) / 2.0**fraction
    np.testing.assert_array_equal(ring.number(ring.sum([ring.fix(term, weight) for term in terms])), exact)


def test_empty_sum_is_empty_and_lengths_must_agree() -> None:
    ring = IntegerRing(32, 20)
    assert len(ring.sum([])) == 0
    with pytest.raises(ValueError, match="accepted: one length"):
        ring.sum([np.zeros(3, np.uint32), np.zeros(1, np.uint32)])


def test_values_up_to_the_bound_sum_without_overflow() -> None:
    ring = IntegerRing(32, 20)
    for sign in (1, -1):
        terms = [ring.fix(np.array([sign * ring.bound], np.float32), 1 / 7) for _ in range(7)]
        assert abs(ring.number(ring.sum(terms))[0] - sign * ring.bound) < 1e-5


def test_a_stream_is_aes_in_counter_mode() -> None:
    key = bytes(range(32))
    expected = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(40))
    assert IntegerRing(32, 20).stream(key, 10).tobytes() == expected
    assert IntegerRing(64, 20).stream(key, 5).tobytes() == expected


def test_keys_differ_by_secret_purpose_and_numbers() -> None:
    keys = [masking.derive(*parts) for parts in ((b"a", "x"), (b"b", "x"), (b"a", "y"), (b"a", "x", 0))]
    keys += [masking.derive(b"a", "x", *numbers) for numbers in ((1, 2), (2, 1), (0, 0))]
    assert len({*keys}) == len(keys)


def test_key_agreement_is_symmetric_and_exclusive() -> None:
    first, second, third = (KeyPair(bytes([byte] * 16)) for byte in (1, 2, 3))
    assert first.agree(second.public) == second.agree(first.public) != first.agree(third.public)
    assert KeyPair(bytes([1] * 16)).public == first.public
    with pytest.raises(ValueError, match="shared key"):
        first.agree(bytes(32))


@pytest.mark.parametrize(("threshold", "count"), [(2, 2), (2, 3), (3, 5), (4, 6)])
def test_threshold_shares_determine_secret_and_fewer_do_not(threshold: int, count: int) -> None:
    secret = bytes(range(256 - 16, 256))
    shares = dict(enumerate(masking.split(secret, threshold, count)))
    for chosen in itertools.combinations(shares, threshold):
        assert masking.join({rank: shares[rank] for rank in chosen}) == secret
    for chosen in itertools.combinations(shares, threshold - 1):
        with suppress(ValueError):  # three in four field elements are no secret
            assert masking.join({rank: shares[rank] for rank in chosen}) != secret


@given(
    secret=st.binary(min_size=16, max_size=16),
    seed=st.randoms(use_true_random=False),
    count=st.integers(2, 9),
)
def test_shares_lie_on_polynomial_with_secret_at_zero(secret: bytes, seed: random.Random, count: int) -> None:
    prime, threshold = 2**130 - 5, count // 2 + 1
    shares = [int.from_bytes(share, "big") for share in masking.split(secret, threshold, count)]
    chosen = seed.sample(range(count), threshold)
    at_zero = Fraction(0)
    for i in chosen:  # Lagrange interpolation in exact fractions, reduced modulo the prime below
        term = Fraction(shares[i])
        for j in chosen:
            if j != i:
                term *= Fraction(j + 1, j - i)
        at_zero += term
    value = at_zero.numerator * pow(at_zero.denominator, -1, prime) % prime
    assert value == int.from_bytes(secret, "big")
    assert masking.join({i: shares[i].to_bytes(17, "big") for i in chosen}) == secret


def test_invalid_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="belong to no secret"):
        masking.join({0: (2**130 - 6).to_bytes(17, "big")})
    with pytest.raises(ValueError, match="modulus"):
        masking.join({0: (2**130).to_bytes(17, "big")})


def test_sealed_message_needs_its_key_sender_and_context() -> None:
    key, other = bytes(32), bytes([1] * 32)
    sealed = masking.seal(key, b"share", 3, b"roster")
    assert masking.unseal(key, sealed, 3, b"roster") == b"share"
    for wrong in (
        (other, sealed, 3, b"roster"),
        (key, sealed, 4, b"roster"),
        (key, sealed, 3, b"other"),
        (key, sealed[:-1] + b"!", 3, b"roster"),
    ):
        with pytest.raises(ValueError, match="another key, sender or context"):
            masking.unseal(*wrong)
