"""Frames: round trips under any split, and hostile streams, which do no harm."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.messages import CHUNK_BYTES, BufferSpec, FrameError, encode, pack_head, wire_bytes
from gossamer.runtime.processes.transport import wire
from gossamer.runtime.processes.transport.wire import (
    BEGIN,
    DATA,
    Arrived,
    Credited,
    Decoder,
    Event,
    Hello,
    Kind,
    abort,
    chunks,
    credit,
    hello,
)

TOKEN = bytes(range(16))
HELLO = hello(3, TOKEN)
LIMIT = 200_000

Content = tuple[tuple[str | int, ...], Any]

payloads = st.one_of(
    st.none(),
    st.binary(max_size=50),
    st.sampled_from([16_300, 16_384 - 24, 16_384, 40_000]).map(bytes),
    st.lists(st.integers(0, 9_000).map(lambda count: torch.arange(count, dtype=torch.int32)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
)
messages = st.lists(st.tuples(st.tuples(st.text(max_size=3), st.integers(0, 999)), payloads), max_size=3)


def stream(contents: list[Content]) -> bytes:
    """HELLO and messages, as the dialling side writes them."""
    frames = [HELLO]
    for number, (tag, payload) in enumerate(contents):
        encoded = encode(payload)
        message = chunks(number, pack_head(tag, 1.5, encoded.structure), encoded.buffers)
        frames.extend(chunk.frame for chunk in message)
    return b"".join(frames)


def read(decoder: Decoder, data: bytes, cuts: list[int]) -> list[Event]:
    """Feed data in pieces. Returns the events."""
    edges = [0, *sorted(cuts), len(data)]
    return [event for start, end in itertools.pairwise(edges) for event in decoder.feed(data[start:end])]


def alike(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right)


@given(messages, st.data())
def test_round_trip_under_any_split(contents: list[Content], data: st.DataObject) -> None:
    sent = stream(contents)
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=8))
    decoder = Decoder(LIMIT)
    greeting, *arrived = read(decoder, sent, cuts)
    assert greeting == Hello(3, TOKEN, 0, 1, 0)
    assert len(arrived) == len(contents)
    for event, (tag, payload) in zip(arrived, contents, strict=True):
        assert isinstance(event, Arrived)
        assert event.tag == tag
        assert event.sent_at == 1.5
        assert alike(event.payload, payload)
    assert decoder.idle
    assert (
        decoder.frame_bytes
        == len(sent) - len(HELLO)
        == sum(wire_bytes(tag, payload) for tag, payload in contents)
    )
    encodings = [(tag, encode(payload)) for tag, payload in contents]
    assert decoder.chunk_bytes == sum(
        len(pack_head(tag, 0.0, encoded.structure)) + sum(buffer.nbytes for buffer in encoded.buffers)
        for tag, encoded in encodings
    )


def test_stream_decodes_byte_by_byte() -> None:
    sent = stream([(("a",), [torch.arange(20), None]), ((), "text")])
    events = read(Decoder(LIMIT), sent, list(range(len(sent))))
    assert [type(event) for event in events] == [Hello, Arrived, Arrived]


def test_received_tensors_are_aligned() -> None:
    """Rounding in matrix kernels depends on alignment: receive buffers are aligned like the simulator's rows."""
    payload = [torch.ones(count) for count in (1, 3, 17, 1000, 20_000)]
    *_, arrived = Decoder(LIMIT).feed(stream([(("a",), payload)]))
    assert isinstance(arrived, Arrived)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in arrived.payload)


def test_credit_frames_are_decoded() -> None:
    assert list(Decoder(None).feed(HELLO + credit(0) + credit(2**32 - 1))) == [
        Hello(3, TOKEN, 0, 1, 0),
        Credited(0),
        Credited(2**32 - 1),
    ]


def stream_of(payload: Any, number: int = 0) -> bytes:
    encoded = encode(payload)
    head = pack_head("tag", 0.0, encoded.structure)
    return b"".join(chunk.frame for chunk in wire.chunks(number, head, encoded.buffers))


def test_aborted_message_is_discarded_and_the_next_one_arrives() -> None:
    encoded = encode(torch.zeros(10_000))
    first = list(chunks(0, pack_head("a", 0.0, encoded.structure), encoded.buffers))
    encoded = encode(7)
    second = list(chunks(0, pack_head("b", 0.0, encoded.structure), encoded.buffers))
    decoder = Decoder(LIMIT)
    _, aborted, arrived = decoder.feed(HELLO + first[0].frame + first[1].frame + abort(0) + second[0].frame)
    assert aborted is Kind.ABORT
    assert isinstance(arrived, Arrived)
    assert arrived.payload == 7
    assert decoder.chunk_bytes == first[0].nbytes + first[1].nbytes + second[0].nbytes
    assert decoder.frame_bytes == decoder.chunk_bytes + 2 * BEGIN.size + DATA.size + len(abort(0))


def begin(number: int = 0, length: int | None = None, total: int = 13, head: int = 13) -> bytes:
    return BEGIN.pack(1, number, min(total, CHUNK_BYTES) if length is None else length, total, head)


EMPTY_HEAD = pack_head("a", 0.0, b"\xc0")  # 14 bytes


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak gossamer's protocol"),
        (b"g\0", "does not speak gossamer's protocol"),
        (wire.HELLO.pack(b"gsmr", 1, 0, TOKEN, 0, 1, 0), "speaks version 1 of the protocol; accepted: 5"),
        (HELLO + HELLO, "type 103"),
        (HELLO + b"\x00", "type 0"),
        (HELLO + credit(5), "type 4"),
        (HELLO + begin(total=LIMIT + 1), f"announced {LIMIT + 1} bytes, limit {LIMIT}"),
        (HELLO + begin(total=2**64 - 1), "announced 18446744073709551615 bytes, limit"),
        (HELLO + begin(head=0), "head of 0 bytes"),
        (HELLO + begin(head=14), "head of 14 bytes in a message of 13"),
        (HELLO + begin(total=0, head=0), "head of 0 bytes"),
        (HELLO + begin(length=12), "chunk of 12 bytes where 13 were due"),
        (HELLO + begin(number=1), "began message 1 where message 0 was due"),
        (HELLO + DATA.pack(2, 0, 5), "message 0, which is not in progress"),
        (HELLO + abort(0), "message 0, which is not in progress"),
        (HELLO + begin(total=CHUNK_BYTES + 9) + bytes([0x93]), None),
        (
            HELLO + begin(total=14, head=14) + b"\xff" + EMPTY_HEAD[1:],
            "bad message: the head is not an array of 3",
        ),
        (
            HELLO + begin(total=14, head=14) + EMPTY_HEAD[:-1] + b"\xc1",
            "bad message: the structure is not msgpack",
        ),
        (
            HELLO + begin(total=15, head=14) + EMPTY_HEAD + b"x",
            "1 bytes after the head, but its tensors take 0",
        ),
    ],
)
def test_malformed_streams_are_refused(sent: bytes, reason: str | None) -> None:
    for cuts in ([], list(range(len(sent)))):
        if reason is None:
            read(Decoder(LIMIT), sent, cuts)
        else:
            with pytest.raises(FrameError, match=reason):
                read(Decoder(LIMIT), sent, cuts)


def test_chunks_of_another_message_are_refused() -> None:
    payload = encode(torch.zeros(10_000))
    first, second, third = chunks(0, pack_head("a", 0.0, payload.structure), payload.buffers)
    later, *_ = chunks(1, pack_head("a", 0.0, payload.structure), payload.buffers)
    short = DATA.pack(2, 0, 5)
    for wrong, reason in [
        (first.frame, "began message 0 before the end of message 0"),
        (DATA.pack(2, 1, CHUNK_BYTES), "message 1, which is not in progress"),
        (short, "chunk of 5 bytes where 16384 were due"),
        (abort(1), "message 1, which is not in progress"),
        (second.frame + third.frame + third.frame, "message 0, which is not in progress"),
        (abort(0) + second.frame, "message 0, which is not in progress"),
        (abort(0) + later.frame, "began message 1 where message 0 was due"),
    ]:
        with pytest.raises(FrameError, match=reason):
            list(Decoder(LIMIT).feed(HELLO + first.frame + wrong))


def test_dialling_side_accepts_only_credit() -> None:
    for frame in (begin(), abort(0)):
        with pytest.raises(FrameError, match="unexpected frame"):
            list(Decoder(None).feed(HELLO + frame))


def test_complete_messages_before_an_error_are_delivered() -> None:
    events = Decoder(LIMIT).feed(stream([(("a",), 1), (("b",), 2)]) + b"\xff")
    assert [type(next(events)) for _ in range(3)] == [Hello, Arrived, Arrived]
    with pytest.raises(FrameError, match="type 255"):
        next(events)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each tensor that a decoder allocates."""
    sizes: list[int] = []
    allocate = wire._allocate

    def counted(spec: BufferSpec) -> Tensor:
        sizes.append(spec.nbytes)
        return allocate(spec)

    monkeypatch.setattr(wire, "_allocate", counted)
    return sizes


@contextlib.contextmanager
def python_memory_within(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes


def test_hostile_announcements_allocate_nothing(allocated: list[int]) -> None:
    huge = encode(torch.zeros(1)).structure.replace((1).to_bytes(8, "little"), (2**40).to_bytes(8, "little"))
    lying = pack_head("a", 0.0, huge)
    attacks = [
        begin(total=LIMIT + 1, head=LIMIT),
        begin(total=len(lying), head=len(lying)) + lying,
        begin(total=len(lying) + 4, head=len(lying)) + lying,
        # Nested arrays that each announce 2^32 - 1 elements.
        begin(total=12 + 160, head=12 + 160) + EMPTY_HEAD[:-1] + b"\xdd\xff\xff\xff\xff" * 32,
    ]
    for attack in attacks:
        with python_memory_within(500_000), pytest.raises(FrameError):
            list(Decoder(LIMIT).feed(HELLO + attack))
    assert allocated == []


def test_decoder_allocates_exactly_the_announced_bytes(allocated: list[int]) -> None:
    list(Decoder(LIMIT).feed(stream([(("a",), [torch.zeros(100), torch.zeros(7, dtype=torch.int8)])])))
    assert allocated == [400, 7]
