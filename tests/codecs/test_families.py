"""Each family of codecs against its definition in NumPy, on drawn vectors with ties, zeros, huge and tiny values."""

from __future__ import annotations

import math
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pywt
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from gossamer import BadInput, Part
from gossamer.codecs import (
    JWINS,
    QSGD,
    STC,
    BFloat16,
    Chain,
    Codec,
    Entropy,
    LowRank,
    Quantize,
    RoundRobin,
    Sign,
    Threshold,
    TopK,
    Wavelet,
    indices,
)
from gossamer.learning.parameters import Field, Layout
from gossamer.messages.tags import dense
from gossamer.randomness import generator

SHAPES = ((4, 3), (5,), (2, 3, 2, 2))
P = sum(math.prod(shape) for shape in SHAPES)


class OneNode(SimpleNamespace):
    """The part of a node that codecs use."""

    def __init__(self, parameters: Tensor, rank: int = 0, shapes: Any = None) -> None:
        fields, start = [], 0
        for number, shape in enumerate(shapes or [(len(parameters),)]):
            fields.append(Field(f"t{number}", start, shape))
            start += math.prod(shape)
        super().__init__(parameters=parameters, rank=rank, layout=tuple(fields), state={}, round=0)

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        return generator(1, purpose, -1 if shared else self.rank, *counters)

    def store(self, v: Tensor) -> Tensor:
        return v.clone()


def pair(codec: Codec, initial: Tensor, shapes: Any = None) -> tuple[Any, Any]:
    """A sender and a receiver in the same initial state."""
    nodes = OneNode(initial, 0, shapes), OneNode(initial, 1, shapes)
    for node in nodes:
        for part in codec.parts():
            part.begin(node)  # type: ignore[arg-type]
    return nodes


def compressed(codec: Codec, vector: Tensor, shapes: Any = None, own: Tensor | None = None) -> Tensor:
    """The difference as receivers decode it."""
    sender, receiver = pair(codec, torch.zeros_like(vector), shapes)
    payload = codec.compress(sender, vector, 0)
    base = torch.zeros_like(vector) if own is None else own
    return dense(codec.decode(receiver, 0, payload, lambda: base))


reals = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = hnp.arrays(
    np.float32, st.integers(1, 60), elements=reals | st.sampled_from([0.0, 1.0, -1.0, 1e-42])
)


# --- indices


@given(st.data())
def test_indices_round_trip_close_to_their_entropy(data: Any) -> None:
    size = data.draw(st.integers(1, 5000))
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=300))
    where = np.array(sorted(chosen), dtype=np.int64)
    packed = indices.packed(where, size)
    assert indices.unpacked(packed, len(where), size).tolist() == where.tolist()
    share = len(where) / size
    entropy = 0.0 if share in (0, 1) else -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert 8 * len(packed) <= size * entropy * 1.01 + 96


@pytest.mark.parametrize(("size", "count"), [(5, 2), (90, 9), (90_000, 9_000), (90_000, 45_000), (10**6, 10)])
def test_length_depends_only_on_the_number_of_indices(size: int, count: int) -> None:
    """Bytes and seconds of a run then agree between machines that round differently."""
    rng = np.random.default_rng(0)
    drawn = [np.sort(rng.choice(size, count, replace=False)) for _ in range(5)]
    lengths = {
        len(indices.packed(where, size))
        for where in (*drawn, np.arange(count), np.arange(size - count, size))
    }
    assert len(lengths) == 1


@pytest.mark.parametrize("size", [10**6, 2**31 - 1])
def test_largest_gaps_round_trip(size: int) -> None:
    for where in ([0], [size - 1], [0, size - 1], [0, 1, 1024, 1025, 2049, size - 2, size - 1]):
        packed = indices.packed(np.array(where), size)
        assert indices.unpacked(packed, len(where), size).tolist() == where


@given(st.binary(max_size=64), st.integers(-1, 60), st.integers(0, 50))
def test_arbitrary_bytes_give_valid_indices_or_an_error(data: bytes, count: int, size: int) -> None:
    try:
        decoded = indices.unpacked(np.frombuffer(data, np.uint8), count, size)
    except ValueError:
        return
    assert len(decoded) == count
    assert decoded.tolist() == sorted(set(range(size)) & set(decoded.tolist()))


# --- sparse


@given(vectors, st.floats(0.01, 1))
def test_top_k_keeps_the_largest_values(x: np.ndarray, fraction: float) -> None:
    decoded = compressed(TopK(fraction=fraction), torch.from_numpy(x)).numpy()
    k = max(1, round(fraction * len(x)))
    kept = decoded != 0
    assert (decoded[kept] == x[kept]).all()
    assert kept.sum() <= k
    smallest = np.sort(np.abs(x))[len(x) - k]
    assert (np.abs(x[~kept]) <= smallest).all()
    assert kept.sum() >= min(k, np.count_nonzero(np.abs(x) > smallest))


def test_top_k_prefers_nan_and_the_first_of_equal_changes() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 2.0, math.nan, 0.5])
    [values, packed] = TopK(fraction=0.5).compress(pair(TopK(fraction=0.5), torch.zeros(6))[0], x, 0)
    assert indices.unpacked(packed.numpy(), 3, 6).tolist() == [1, 2, 4]  # type: ignore[union-attr]
    assert values[:2].tolist() == [-2.0, 2.0]  # type: ignore[index]


def test_top_k_of_all_coordinates_sends_no_indices() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    sender, receiver = pair(codec := TopK(fraction=1.0), torch.zeros(40))
    payload = codec.encode(sender, x, 0)
    assert payload[1] is None
    assert torch.equal(dense(codec.decode(receiver, 0, payload, lambda: x)), x)


@given(vectors, st.just(0.0) | st.floats(1e-6, 2), st.booleans())
def test_threshold_sends_only_larger_changes(x: np.ndarray, threshold: float, relative: bool) -> None:
    codec = Threshold(threshold=threshold, relative=relative)
    sender, receiver = pair(codec, torch.zeros(len(x)))
    part = codec.decode(
        receiver, 0, codec.encode(sender, torch.from_numpy(x), 0), lambda: torch.zeros(len(x))
    )
    scale = math.sqrt(np.square(x.astype(np.float64)).mean()) if relative else 1.0
    border = np.abs(np.abs(x) - threshold * scale) <= 1e-5 * threshold * scale
    decoded, expected = dense(part).numpy(), np.where(np.abs(x) > threshold * scale, x, 0)
    assert (decoded == expected)[~border].all()


def test_threshold_accumulates_small_changes() -> None:
    codec = Threshold(threshold=1.0)
    sender, _ = pair(codec, torch.zeros(2))
    sent = [len(codec.encode(sender, torch.tensor([0.4 * r, 0.0]), r)[0]) for r in range(1, 7)]
    assert sent == [0, 0, 1, 0, 0, 1]


@given(st.integers(1, 50), st.integers(1, 12), st.sampled_from(["own", "common"]))
def test_round_robin_sends_each_coordinate_once_per_cycle(size: int, blocks: int, support: Any) -> None:
    codec = RoundRobin(blocks=blocks, support=support)
    x = torch.arange(1.0, size + 1)
    total = torch.zeros(size)
    for r in range(blocks):
        part = codec.decode(OneNode(x), 3, codec.encode(OneNode(x, rank=3), x, r), lambda: x)  # type: ignore[arg-type]
        assert len(part.values) in (size // blocks, -(-size // blocks))  # type: ignore[union-attr]
        total += dense(part)
    assert torch.equal(total, x)


# --- wavelets


def transform(x: np.ndarray, name: str, levels: int) -> np.ndarray:
    depth = min(levels, pywt.dwt_max_level(len(x), pywt.Wavelet(name).dec_len))
    padded = np.pad(x, (0, -len(x) % 2**depth), mode="edge")
    return np.concatenate(pywt.wavedec(padded, name, level=depth, mode="periodization"))


@given(hnp.arrays(np.float32, st.integers(1, 70), elements=st.floats(-100, 100, width=32)), st.data())
def test_wavelets_send_the_largest_coefficients(x: np.ndarray, data: Any) -> None:
    name = data.draw(st.sampled_from(["haar", "sym2", "db3"]))
    codec = Wavelet(fraction=data.draw(st.floats(0.05, 1)), wavelet=name, levels=data.draw(st.integers(1, 4)))
    own = torch.from_numpy(np.random.default_rng(0).normal(size=len(x)).astype(np.float32))
    sender, receiver = pair(codec, torch.zeros(len(x)))
    decoded = codec.decode(receiver, 0, codec.encode(sender, torch.from_numpy(x), 0), lambda: own)
    z, mine = transform(x, name, codec.levels), transform(own.numpy(), name, codec.levels)
    k = max(1, round(codec.fraction * len(z)))
    got = transform(dense(decoded).numpy(), name, codec.levels)
    scale = 1 + np.abs(z).max()
    if len(z) == len(x):  # without padding, compare coefficient by coefficient
        smallest = np.sort(np.abs(z))[len(z) - k]
        sure = np.abs(np.abs(z) - smallest) > 1e-4 * scale
        expected = np.where(np.abs(z) >= smallest, z, mine)
        np.testing.assert_allclose(got[sure], expected[sure], atol=1e-4 * scale)
    if k == len(z):
        np.testing.assert_allclose(dense(decoded).numpy(), x, atol=1e-4 * scale)


def test_jwins_draws_its_fraction_and_sends_wavelet_changes() -> None:
    codec = JWINS(fractions=(0.25, 1.0), levels=2)
    rng = np.random.default_rng(4)
    sender, receiver = pair(codec, torch.zeros(32))
    last, counts = np.zeros(32, dtype=np.float32), set()
    for r in range(12):
        x, own = (torch.from_numpy(rng.normal(size=32).astype(np.float32)) for _ in range(2))
        payload = codec.encode(sender, x, r)
        counts.add(len(payload[0]))
        z = transform(x.numpy(), "sym2", 2)
        chosen = np.argsort(-np.abs(z - last))[: len(payload[0])]
        last[chosen] = z[chosen]
        mixed = transform(own.numpy(), "sym2", 2)
        mixed[chosen] = z[chosen]
        bands = np.split(mixed, [8, 16])
        expected = pywt.waverec(bands, "sym2", mode="periodization")
        decoded = dense(codec.decode(receiver, 0, payload, lambda own=own: own))  # type: ignore[misc]
        np.testing.assert_allclose(decoded.numpy(), expected, atol=1e-5)
    assert counts == {8, 32}


def test_non_orthogonal_wavelet_is_refused() -> None:
    with pytest.raises(BadInput, match=r"codec\.wavelet: got 'bior2\.2'; accepted: .*sym2"):
        Wavelet(wavelet="bior2.2")


# --- fewer bits


@given(vectors)
def test_bfloat16_keeps_eight_bits(x: np.ndarray) -> None:
    decoded = compressed(BFloat16(), torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(decoded, x, rtol=2**-8, atol=1e-40)


@given(vectors, st.integers(2, 16), st.sampled_from(["vector", 1, 7]))
def test_rounding_to_nearest_is_within_half_a_level(x: np.ndarray, width: int, block: Any) -> None:
    decoded = compressed(Quantize(bits=width, rounding="nearest", block=block), torch.from_numpy(x)).numpy()
    size, levels = len(x) if block == "vector" else block, 2 ** (width - 1) - 1
    for start in range(0, len(x), size):
        piece = x[start : start + size].astype(np.float64)
        error = np.abs(piece - decoded[start : start + size])
        assert error.max() <= np.abs(piece).max() * (0.5 / levels + 1e-6) + 1e-44


def test_each_tensor_block_has_its_own_scale() -> None:
    x = torch.randn(P, generator=torch.Generator().manual_seed(1))
    x[:12] *= 1000
    codec = Quantize(bits=8, rounding="nearest", block="tensor")
    decoded, start = compressed(codec, x, SHAPES), 0
    for shape in SHAPES:
        piece = slice(start, start := start + math.prod(shape))
        torch.testing.assert_close(decoded[piece], x[piece], rtol=0, atol=float(x[piece].abs().max()) / 250)
    with pytest.raises(BadInput, match="quantize after another codec"):
        compressed(Chain(codecs=[TopK(fraction=0.5), codec]), x, SHAPES)  # type: ignore[arg-type]


def test_qsgd_is_unbiased_and_within_the_variance_bound() -> None:
    """Lemma 3.1: E Q(x) = x and E ||Q(x) - x||^2 <= min(n / s^2, sqrt(n) / s) ||x||^2."""
    x = torch.randn(50, generator=torch.Generator().manual_seed(2))
    codec = QSGD(levels=4)
    sender, receiver = pair(codec, torch.zeros(50))
    draws = torch.stack(
        [codec.decode(receiver, 0, codec.encode(sender, x, 0), lambda: x) for _ in range(4000)]  # type: ignore[misc]
    )
    torch.testing.assert_close(draws.mean(0), x, rtol=0, atol=0.15)
    bound = min(50 / 16, math.sqrt(50) / 4) * float(x.square().sum())
    assert float((draws - x).square().sum(1).mean()) <= bound
    contracted = QSGD(levels=4, contract=True)
    sender, receiver = pair(contracted, torch.zeros(50))
    decoded = dense(contracted.decode(receiver, 0, contracted.encode(sender, x, 0), lambda: x))
    torch.testing.assert_close(decoded * (1 + min(50 / 16, math.sqrt(50) / 4)), draws[0])


@given(vectors, st.sampled_from(["vector", 5]))
def test_signs_are_scaled_by_the_mean_magnitude(x: np.ndarray, block: Any) -> None:
    decoded = compressed(Sign(block=block), torch.from_numpy(x)).numpy()
    size = len(x) if block == "vector" else block
    for start in range(0, len(x), size):
        piece = x[start : start + size].astype(np.float64)
        expected = np.where(piece >= 0, 1, -1) * np.abs(piece).mean()
        np.testing.assert_allclose(decoded[start : start + size], expected, rtol=1e-5, atol=1e-44)


@given(vectors, st.floats(0.01, 1))
def test_stc_sends_signs_and_one_magnitude(x: np.ndarray, fraction: float) -> None:
    decoded = compressed(STC(fraction=fraction), torch.from_numpy(x)).numpy()
    plain = compressed(TopK(fraction=fraction), torch.from_numpy(x)).numpy()
    k = max(1, round(fraction * len(x)))
    mean = np.sort(np.abs(x.astype(np.float64)))[len(x) - k :].mean()
    assert np.count_nonzero(decoded) <= k
    np.testing.assert_allclose(np.abs(decoded[decoded != 0]), mean, rtol=1e-5, atol=1e-44)
    assert (np.sign(decoded)[plain != 0] == np.sign(plain)[plain != 0]).all() or mean < 1e-37


def test_low_rank_is_exact_at_its_rank_and_converges_otherwise() -> None:
    rng = np.random.default_rng(5)
    shapes = ((8, 6), (5,), (4, 3, 2, 2))
    size = sum(math.prod(shape) for shape in shapes)
    exact = [rng.normal(size=(8, 2)) @ rng.normal(size=(2, 6)), rng.normal(size=5)]
    exact.append(rng.normal(size=(4, 2)) @ rng.normal(size=(2, 12)))
    x = torch.from_numpy(np.concatenate([values.ravel() for values in exact]).astype(np.float32))
    torch.testing.assert_close(compressed(LowRank(rank=2), x, shapes), x, atol=1e-4, rtol=1e-4)
    codec = LowRank(rank=1)
    sender, receiver = pair(codec, torch.zeros(size), shapes)
    for r in range(30):  # repeating the same matrix is subspace iteration
        decoded = dense(codec.decode(receiver, 0, codec.encode(sender, x, r), lambda: x))
    u, s, v = np.linalg.svd(exact[0])
    np.testing.assert_allclose(decoded[:48].view(8, 6), s[0] * np.outer(u[:, 0], v[0]), atol=1e-3)
    assert torch.equal(decoded[48:53], x[48:53])


@given(vectors, st.sampled_from(["none", "float16", "bfloat16", "quantize"]))
def test_entropy_coding_is_lossless(x: np.ndarray, before: str) -> None:
    x = np.clip(x, -6e4, 6e4)
    chain: Any = [{"name": "top-k", "fraction": 1.0}, *([] if before == "none" else [before])]
    plain, coded = (Chain(codecs=[*chain, *last]) for last in ([], [Entropy()]))
    assert torch.equal(compressed(plain, torch.from_numpy(x)), compressed(coded, torch.from_numpy(x)))


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_refused_by_entropy(data: bytes) -> None:
    node: Any = OneNode(torch.zeros(10))
    with pytest.raises(ValueError, match=r"."):
        Entropy().decode(
            node, 0, [torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8), "f4"], lambda: node
        )


def test_decompression_bomb_is_refused_before_decompression() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    node: Any = OneNode(torch.zeros(10))
    with pytest.raises(ValueError, match="67108864 bytes"):
        Entropy().decode(node, 0, [torch.frombuffer(bytearray(bomb), dtype=torch.uint8), "f4"], lambda: node)


@pytest.mark.parametrize(
    "codec",
    [TopK(fraction=0.3), Wavelet(fraction=0.5), Quantize(), Sign(), STC(fraction=0.2), LowRank()],
    ids=str,
)
def test_compression_error_is_below_the_difference(codec: Codec) -> None:
    """Algorithms with compressed differences need this contraction: ||C(x) - x|| < ||x||."""
    for seed in range(20):
        x = torch.randn(P, generator=torch.Generator().manual_seed(seed))
        assert float((compressed(codec, x, SHAPES) - x).norm()) < float(x.norm())


@pytest.mark.parametrize("block", [24, "vector"])
@pytest.mark.parametrize("length", [60, 90])
def test_blocks_longer_than_8_s_squared_need_not_contract(block: Any, length: int) -> None:
    """The worst case: all values but the largest are a quarter of the step between two levels."""
    codec = Quantize(bits=3, block=block)  # s = 3, so at most 72 values
    x = torch.full((length,), 1 / (4 * codec.s))
    x[:: block if isinstance(block, int) else length] = 1.0
    sender, receiver = pair(codec, torch.zeros(length), [(length,)])
    decoded = [codec.decode(receiver, 0, codec.compress(sender, x, k), lambda: x) for k in range(300)]
    ratio = fmean(float((dense(vector) - x).norm() ** 2) for vector in decoded) / float(x.norm()) ** 2
    accepted = codec.contracts_only_with(Layout((Field("w", 0, (length,)),), ()), length) is None
    assert accepted == (ratio < 1), ratio


def test_dense_part_has_zeros_elsewhere() -> None:
    part = Part(torch.tensor([5.0]), torch.tensor([2]), 4)
    assert dense(part).tolist() == [0, 0, 5, 0]
