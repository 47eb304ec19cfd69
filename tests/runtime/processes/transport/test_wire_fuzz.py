"""Arbitrary bytes of strangers: a decoder gives events or one :class:`FrameError`, in bounded memory and work."""

from __future__ import annotations

import itertools
import math
import random
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.messages import CHUNK_BYTES, BufferSpec, FrameError, encode, encoding, pack_head, raw
from gossamer.messages.encoding import DTYPES, MAX_DEPTH, MAX_ITEMS, Reader
from gossamer.messages.tags import Coded, Model, Part
from gossamer.runtime.processes.transport import wire
from gossamer.runtime.processes.transport.wire import BEAT, LEAVE, Arrived, Decoder, abort, credit, hello

LIMIT = 100_000
HELLO = hello(3, bytes(range(16)))
PYTHON_BYTES = 10 * LIMIT + 256 * MAX_ITEMS
"""A few times the bytes of a message, and the objects that its structure may hold."""
REASON = 1000
"""The most characters of a refusal, which is one line of a log."""

# --- streams of strangers

NEAR = (
    0,
    1,
    2,
    5,
    13,
    14,
    15,
    255,
    256,
    CHUNK_BYTES,
    65_535,
    LIMIT,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64,
)
edges = st.sampled_from(sorted({value + off for value in NEAR for off in (-1, 0, 1)})) | st.integers(0, 300)


def number(width: int) -> st.SearchStrategy[int]:
    """A number of ``width`` bytes, mostly at an edge."""
    return edges.map(lambda value: value % 256**width)


def packed(layout: struct.Struct, *fields: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return st.tuples(*fields).map(lambda values: layout.pack(*values))


numbers = st.integers(0, 2) | number(4)
headers = st.one_of(
    packed(wire.BEGIN, st.just(1), numbers, number(2), number(8), number(4)),
    packed(wire.DATA, st.just(2), numbers, number(2)),
    numbers.map(abort),
    number(4).map(credit),
    st.sampled_from([HELLO, BEAT, LEAVE]),
    packed(wire.DATA, st.integers(0, 255), numbers, number(2)),
)

HONEST: list[object] = [
    None,
    [1, -1, 2.5, "text", b"bytes", True, {"key": [], 7: {}}],
    torch.arange(70, dtype=torch.float32),
    [torch.zeros(3, 2), torch.ones(0, 5, dtype=torch.bfloat16), torch.tensor(True)],
    Model(torch.ones(9), torch.zeros(2)),
    {"part": Part(torch.ones(3), torch.tensor([1, 4, 6]), 9), "other": Model(Coded([torch.ones(2), 7]))},
    torch.zeros(CHUNK_BYTES // 4 * 2 + 3),
]
# (Encoded in advance: strategies may not call functions whose type checks draw at random.)
HEAD = pack_head("a", 0.5, b"")
ENCODED = [encode(item) for item in HONEST]
BODIES = [b"".join(bytes(raw(buffer)) for buffer in encoded.buffers) for encoded in ENCODED]
indices = st.integers(0, len(HONEST) - 1)
honest_structures = indices.map(lambda index: ENCODED[index].structure)


def extension(code: int, inner: bytes) -> bytes:
    return b"\xc9" + struct.pack(">IB", len(inner), code) + inner


tensors = st.tuples(st.integers(0, len(DTYPES) + 1), st.lists(number(8), max_size=4)).map(
    lambda drawn: extension(1, struct.pack(f"<B{len(drawn[1])}Q", drawn[0], *drawn[1]))
)
scalars = st.one_of(
    st.binary(max_size=9),
    st.sampled_from([math.nan, math.inf, -0.0, 5e-324]).map(lambda value: struct.pack(">Bd", 0xCB, value)),
    packed(struct.Struct(">BQ"), st.sampled_from([0xCF, 0xD3]), number(8)),
    packed(struct.Struct(">BI"), st.sampled_from([0xC6, 0xC9, 0xDB, 0xDD, 0xDF, 0xCA]), number(4)),
    packed(struct.Struct(">BH"), st.sampled_from([0xC5, 0xC8, 0xDA, 0xDC, 0xDE]), number(2)),
    st.text(max_size=4).map(lambda text: bytes([0xA0 + len(text.encode())]) + text.encode()),
    tensors,
)
structures = st.one_of(
    honest_structures,
    st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda items: bytes([0x90 + len(items)]) + b"".join(items)),
            st.tuples(number(4), inner).map(lambda drawn: struct.pack(">BI", 0xDD, drawn[0]) + drawn[1]),
            st.lists(inner, max_size=6).map(lambda items: bytes([0x80 + len(items) // 2]) + b"".join(items)),
            st.tuples(st.integers(0, 4), st.lists(inner, max_size=3)).map(
                lambda drawn: extension(drawn[0], b"".join(drawn[1]))
            ),
        ),
        max_leaves=8,
    ),
    st.tuples(
        st.sampled_from(
            [b"\x91", b"\x81\x00", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\xa0", b"\xc7\xff\x02"]
        ),
        st.sampled_from([MAX_DEPTH - 2, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 3000]),
        scalars,
    ).map(lambda drawn: drawn[0] * drawn[1] + drawn[2]),
)
heads = st.one_of(
    structures.map(lambda structure: HEAD + structure),
    st.tuples(st.just(b"\x93"), structures, structures, structures).map(b"".join),
    structures,
)


def framed(head: bytes, body: bytes, excess: int = 0, count: int = 0) -> list[bytes]:
    """Message number ``count`` of a stream, correctly framed except that ``excess`` is added to its total."""
    whole, frames = head + body, []
    for at in range(0, max(len(whole), 1), CHUNK_BYTES):
        piece = whole[at : at + CHUNK_BYTES]
        if at == 0:
            header = wire.BEGIN.pack(1, count, len(piece), (len(whole) + excess) % 2**64, len(head))
        else:
            header = wire.DATA.pack(2, count, len(piece))
        frames.append(header + piece)
    return frames


def honest(chosen: Sequence[int]) -> list[bytes]:
    """The frames of the chosen honest messages."""
    heads = [HEAD + ENCODED[index].structure for index in chosen]
    parts = zip(heads, chosen, strict=True)
    return [
        frame for count, (head, index) in enumerate(parts) for frame in framed(head, BODIES[index], 0, count)
    ]


bodies = st.binary(max_size=40) | st.integers(0, 300).map(bytes)
disguised = st.tuples(heads, bodies, st.just(0) | st.sampled_from([-1, 1, 2**20, 2**63])).map(
    lambda drawn: framed(*drawn)
)
messages = st.lists(indices, min_size=1, max_size=8).map(honest)


@st.composite
def disturbed(draw: st.DrawFn) -> list[bytes]:
    """An honest stream with frames dropped, repeated and reordered, and bytes changed, cut and inserted."""
    frames = draw(messages)
    chance = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(chance.randint(0, 3)):
        if not frames:
            break
        at = chance.randrange(len(frames))
        frame = bytearray(frames[at])
        if not frame:  # an earlier step cut it to nothing
            continue
        match chance.randrange(7):
            case 0:
                del frames[at]
            case 1:
                frames.insert(chance.randrange(len(frames)), frames[at])
            case 2:
                chance.shuffle(frames)
            case 3:
                frames[at] = frames[at][: chance.randrange(len(frame))]
            case 4:
                frames.insert(at, draw(headers))
            case 5:
                frame[chance.randrange(min(len(frame), 60))] = chance.randrange(256)
                frames[at] = bytes(frame)
            case 6:
                frame[(index := chance.randrange(len(frame))) : index] = chance.randbytes(8)
                frames[at] = bytes(frame)
    return frames


parts = st.one_of(
    disturbed(),
    disguised,
    headers.map(lambda frame: [frame]),
    st.binary(max_size=200).map(lambda junk: [junk]),
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """A sequence of such parts."""
    return [frame for _ in range(draw(st.integers(2, 6))) for frame in draw(parts)]


# --- their effects


@dataclass
class Counted:
    """Counters of the work of decoders."""

    allocated: int = 0
    values: int = 0


@pytest.fixture
def counted() -> Iterator[Counted]:
    """Count the bytes of allocated tensors, and the values read."""
    count = Counted()
    allocate, value = wire._allocate, encoding.Reader.value

    def counted_allocate(spec: BufferSpec) -> Tensor:
        count.allocated += spec.nbytes
        return allocate(spec)

    def counted_value(reader: Reader, depth: int) -> object:
        count.values += 1
        return value(reader, depth)

    with (
        mock.patch.object(wire, "_allocate", counted_allocate),
        mock.patch.object(encoding.Reader, "value", counted_value),
    ):
        yield count


def outcome(pieces: Sequence[bytes], limit: int | None) -> list[str]:
    """The events of a decoder, and the reason of its refusal if it refuses the stream."""
    decoder = Decoder(limit)
    events: list[str] = []
    try:
        for piece in pieces:
            for event in decoder.feed(piece):
                events.append(repr(event.tag) if isinstance(event, Arrived) else repr(event))
    except FrameError as error:
        reason = str(error)
        assert reason.isprintable()
        assert len(reason) <= REASON
        events.append(reason)
    return events


def survive(frames: Sequence[bytes], cuts: Sequence[int], greeted: bool, count: Counted) -> int:
    """Feed a stream at once, in pieces, and to the dialling side; gives the number of frames of the first
    two."""
    sent = b"".join([HELLO, *frames] if greeted else frames)
    ends = sorted({cut % (len(sent) + 1) for cut in cuts} | {0, len(sent)})
    pieces = [sent[start:end] for start, end in itertools.pairwise(ends)]
    count.allocated = count.values = 0
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    whole = outcome([sent], LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < PYTHON_BYTES
    # All bytes of every message have arrived, except for the last one and aborted ones.
    assert count.allocated <= len(sent) + (1 + whole.count(repr(wire.Kind.ABORT))) * LIMIT
    assert count.values <= 3 * len(sent) + 3  # head, description, payload: at least a byte a value
    assert outcome(pieces, LIMIT) == whole
    outcome(pieces, None)
    return 2 * len(frames)


quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def fuzz(examples: int, count: Counted) -> int:
    """Feed ``examples`` streams to decoders; gives the number of frames fed."""
    fed = 0

    @settings(max_examples=examples, suppress_health_check=quiet, database=None)
    @given(streams(), st.lists(st.integers(0, 2**20), max_size=6), st.sampled_from([True, True, True, False]))
    def run(frames: Sequence[bytes], cuts: Sequence[int], greeted: bool) -> None:
        nonlocal fed
        fed += survive(frames, cuts, greeted, count)

    tracemalloc.start()
    try:
        run()
    finally:
        tracemalloc.stop()
    return fed


def test_hundreds_of_hostile_frames_do_no_harm(counted: Counted) -> None:
    assert fuzz(120, counted) >= 500  # about 1,000: the number of frames in an example varies


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_hundred_thousand_hostile_frames_do_no_harm(counted: Counted) -> None:
    assert fuzz(14_000, counted) >= 100_000


def test_honest_streams_still_arrive(counted: Counted) -> None:
    """The fuzz test would miss a decoder that refuses everything."""
    sent = b"".join([HELLO, *honest(range(len(HONEST)))])
    assert outcome([sent], LIMIT)[1:] == ["('a',)"] * len(HONEST)
    assert counted.allocated == sum(map(len, BODIES))


@pytest.mark.parametrize("total", [2**63 - 1, 2**63, 2**64 - 1, LIMIT + 1])
@pytest.mark.parametrize("head", [1, 2**31, 2**32 - 1])
def test_announced_bytes_are_not_allocated(total: int, head: int, counted: Counted) -> None:
    tracemalloc.start()
    try:
        [_, refused] = outcome([HELLO, wire.BEGIN.pack(1, 0, CHUNK_BYTES, total, head)], LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused == f"announced {total} bytes, limit {LIMIT}"
    assert peak < 100_000
    assert counted.allocated == 0


@pytest.mark.parametrize("item", [b"\x90", b"\x80"], ids=["lists", "dicts"])
def test_objects_of_a_structure_are_limited(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty container takes one byte on the wire and about sixty in memory."""
    monkeypatch.setattr(encoding, "MAX_ITEMS", 2000)

    def held(count: int) -> tuple[str, int]:
        frames = framed(HEAD + struct.pack(">BI", 0xDD, count) + item * count, b"")
        tracemalloc.start()
        try:
            [_, event] = outcome([HELLO, *frames], LIMIT)
            return event, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    arrived, peak = held(1999)
    assert arrived == "('a',)"
    assert peak < 256 * 2000
    refused, peak = held(LIMIT - 50)
    assert refused == "sent a bad message: more than 2000 values"
    assert peak < 10 * LIMIT + 256 * 2000
