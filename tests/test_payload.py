"""Payloads: round trips, what is refused, what they weigh."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import payload as payload_module
from gossamer.errors import GossamerError
from gossamer.messages import Model, Part
from gossamer.payload import (
    DTYPES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_ITEMS,
    MAX_TENSORS,
    BufferSpec,
    Encoded,
    FrameError,
    decode,
    describe,
    encode,
    framed_bytes,
    freeze,
    pack_head,
    raw,
    unpack_head,
    wire_bytes,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type and in bits; a tuple is as good as a list."""
    if isinstance(left, Model) or isinstance(right, Model):
        return type(left) is type(right) and all(map(same, left, right))
    if isinstance(left, tuple):
        left = list(left)
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        alike = left.dtype is right.dtype and left.shape == right.shape
        return alike and bytes(raw(left.contiguous())) == bytes(raw(right.contiguous()))
    if isinstance(left, Part):
        return all(same(getattr(left, name), getattr(right, name)) for name in ("values", "where", "size"))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    tensor = torch.empty(shape, dtype=dtype)
    raw(tensor)[:] = bytes(byte & 1 for byte in content) if dtype is torch.bool else content
    return tensor


@st.composite
def parts(draw: st.DrawFn) -> Part:
    count = draw(st.integers(0, 5))
    size = draw(st.integers(max(count, 1), 20))
    values = torch.arange(count, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8])))
    index = draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))
    where = draw(
        st.one_of(
            st.integers(0, size - count),
            st.text(max_size=5),
            st.sampled_from([torch.int32, torch.int64, torch.uint8]).map(
                lambda dtype: torch.tensor(index, dtype=dtype)
            ),
        )
    )
    return Part(values, where, size)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=300),
    tensors(),
    parts(),
    st.builds(Model, st.integers(0, 4).map(torch.ones), st.integers(0, 2).map(torch.zeros)),
)
payloads = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=20).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**64 - 1)), inner, max_size=5),
    ),
    max_leaves=20,
)


@given(payloads)
def test_round_trip(payload: Any) -> None:
    encoded = encode(payload)
    assert same(payload, decode(encoded.structure, encoded.buffers))
    assert describe(encoded.structure) == [(buffer.dtype, tuple(buffer.shape)) for buffer in encoded.buffers]
    assert encoded.nbytes == len(encoded.structure) + sum(len(raw(buffer)) for buffer in encoded.buffers)


@given(payloads)
def test_structure_is_plain_msgpack(payload: Any) -> None:
    """Another reader of the same format agrees on everything but the tensors."""
    structure = encode(payload).structure
    read = msgpack.unpackb(structure, strict_map_key=False, ext_hook=lambda code, data: (code, len(data)))

    def without_tensors(item: Any) -> Any:
        if isinstance(item, Tensor):
            return (1, 1 + 8 * item.dim())
        if isinstance(item, Model):
            return (3, 24)
        if isinstance(item, Part):
            where = item.where
            return (2, 12 + (12 if isinstance(where, Tensor) else len(msgpack.packb(where))) + 1)
        if isinstance(item, list | tuple):
            return [without_tensors(inner) for inner in item]
        if isinstance(item, dict):
            return {key: without_tensors(inner) for key, inner in item.items()}
        return item

    assert repr(read) == repr(without_tensors(payload))


@given(payloads)
def test_freeze_gives_what_the_receiver_gets(payload: Any) -> None:
    encoded = encode(payload)
    assert same(freeze(payload, lambda tensor: False), decode(encoded.structure, encoded.buffers))


def test_freeze_is_independent_and_keeps_what_it_may() -> None:
    kept, changed = torch.arange(3.0), torch.arange(3.0)
    inner: list[Any] = [changed.requires_grad_()]
    payload = {"a": inner, 1: (kept, Part(changed, torch.tensor([0, 1, 2]), 9))}
    frozen = freeze(payload, lambda tensor: tensor is kept)
    assert frozen[1][0] is kept
    with torch.no_grad():
        changed += 5
    inner.append(None)
    assert torch.equal(frozen["a"][0], torch.arange(3.0))
    assert not frozen["a"][0].requires_grad
    assert len(frozen["a"]) == 1
    assert torch.equal(frozen[1][1].values, torch.arange(3.0))
    assert isinstance(frozen[1], list)


def test_lazy_and_scattered_tensors_become_plain() -> None:
    complex_numbers = torch.tensor([1 + 2j, 3 - 1j])
    payload = [
        complex_numbers.conj(),
        complex_numbers.conj().imag,
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(1).expand(4),
        nn.Parameter(torch.ones(2)),
        torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    ]
    encoded = encode(payload)
    frozen = freeze(payload, lambda tensor: False)
    for sent, buffer, clone in zip(payload, encoded.buffers, frozen, strict=True):
        assert torch.equal(buffer, sent)
        assert torch.equal(clone, sent)
        for tensor in (buffer, clone):
            assert type(tensor) is Tensor
            assert tensor.is_contiguous()
            assert not tensor.is_conj()
            assert not tensor.is_neg()
            assert not tensor.requires_grad


def test_number_subclasses_travel_as_numbers() -> None:
    frozen = freeze([np.float64(0.5)], lambda tensor: False)
    assert type(frozen[0]) is float
    assert decode(encode(np.float64(0.5)).structure, []) == 0.5


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def nested(levels: int) -> Any:
    payload: Any = 7
    for _ in range(levels):
        payload = [payload]
    return payload


@pytest.mark.parametrize(
    ("payload", "error", "reason"),
    [
        (
            {"a": [1, np.zeros(2)]},
            TypeError,
            r"payload\['a'\]\[1\]: ndarray can't be sent; accepted: None, bool",
        ),
        ({1, 2}, TypeError, "payload: set can't"),
        (nn.Linear(1, 1), TypeError, "payload: Linear can't"),
        ([bytearray(b"x")], TypeError, r"payload\[0\]: bytearray"),
        ({2.5: 1}, TypeError, "float 2.5 as a key; accepted: str and int"),
        ({True: 1}, TypeError, "bool True as a key"),
        (torch.eye(2).to_sparse(), TypeError, "sparse"),
        (torch.empty(2, device="meta"), TypeError, "meta tensor"),
        (torch.empty(2, dtype=torch.bits8), TypeError, "torch.bits8 can't be sent; accepted: torch.bool"),
        (torch.zeros([1] * (MAX_DIMENSIONS + 1)), ValueError, "dimensions"),
        ({"k": 2**64}, ValueError, r"payload\['k'\]: 18446744073709551616 does not fit into 64 bits"),
        (-(2**63) - 1, ValueError, "64 bits"),
        ({2**64: 1}, ValueError, "64 bits"),
        (["\ud800"], ValueError, r"payload\[0\].*surrogates"),
        ({"\ud800": 1}, ValueError, "surrogates"),
        (cyclic(), ValueError, "nested deeper"),
        (nested(MAX_DEPTH + 1), ValueError, "nested deeper"),
        ([0] * MAX_ITEMS, ValueError, f"more than {MAX_ITEMS} values"),
        ([torch.zeros(0)] * (MAX_TENSORS + 1), ValueError, f"more than {MAX_TENSORS} tensors"),
        (Part(torch.zeros(2, 2), 0, 9), ValueError, "not a vector"),
        (Part(torch.zeros(4), 6, 9), ValueError, "4 values from 6 in a vector of 9"),
        (Part(torch.zeros(4), -1, 9), ValueError, "from -1"),
        (Part(torch.zeros(4), 0, 3), ValueError, "4 values of a vector of 3"),
        (Part(torch.zeros(4), torch.zeros(3, dtype=torch.int64), 9), ValueError, r"indices of shape \(3,\)"),
        (Part(torch.zeros(3), torch.zeros(3), 9), ValueError, "indices are torch.float32"),
        (Part(torch.zeros(3), True, 9), ValueError, "where is bool"),
        (Model(torch.zeros(2, 2), torch.zeros(0)), ValueError, "a model's parameters are not a vector"),
        (Model(torch.zeros(2), torch.zeros(())), ValueError, "a model's buffers are not a vector"),
        (Model(torch.zeros(2), None), TypeError, r"payload\['buffers'\]: NoneType; accepted: a tensor"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_sent(payload: Any, error: type[Exception], reason: str) -> None:
    for attempt in (
        encode,
        lambda item: freeze(item, lambda tensor: False),
        lambda item: wire_bytes("t", item),
    ):
        with pytest.raises(error, match=reason) as raised:
            attempt(payload)
        assert "\n" not in str(raised.value)


def test_indices_outside_the_vector_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="indices run from 0 to 9 in a vector of 9"):
        encode(Part(torch.zeros(2), torch.tensor([0, 9]), 9))


def test_both_sides_have_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "MAX_ITEMS", 60)
    monkeypatch.setattr(payload_module, "MAX_TENSORS", 20)
    part = Part(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1)
    model = Model(torch.zeros(1), torch.zeros(0))
    largest = [
        nested(MAX_DEPTH),
        {str(i): i for i in range(59)},
        [part] * 10,
        [model] * 10,
        [torch.zeros(0)] * 20,
    ]
    for payload in largest:
        encoded = encode(payload)
        assert same(payload, decode(encoded.structure, encoded.buffers))
    for payload in ({str(i): i for i in range(60)}, [*largest[2], part], [*largest[3], model]):
        with pytest.raises(ValueError, match="more than"):
            encode(payload)


def ext(code: int, data: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


def tensor_ext(dtype: torch.dtype, *shape: int) -> bytes:
    return ext(1, struct.pack(f"<B{len(shape)}Q", DTYPES.index(dtype), *shape))


VECTOR = tensor_ext(torch.float32, 3)


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (b"", "ends 1 bytes early"),
        (b"\xc1", "0xc1"),
        (b"\xca\x00\x00\x00\x00", "0xca"),
        (b"\x01\x02", "1 bytes after the end"),
        (b"\xdd\xff\xff\xff\xff", "early"),
        (b"\xdf\xff\xff\xff\xff", "early"),
        (b"\xc6\xff\xff\xff\xff", "early"),
        (b"\xc9\xff\xff\xff\xff\x01", "early"),
        (b"\xdd\x00\x02\x00\x00" + b"\xc0" * 0x20000, "more than 65536 values"),
        (b"\x91" * 5000 + b"\xc0", "nested deeper"),
        (b"\x81\xa1a" * 5000 + b"\xc0", "nested deeper"),
        (b"\x82\xa1a\x01\xa1a\x02", "key 'a' twice"),
        (b"\x82\x01\x01\xcc\x01\x02", "key 1 twice"),
        (b"\x81\xc3\x01", "a key that is bool"),
        (b"\x81\x90\x01", "nested deeper|a key"),
        (b"\x81" + VECTOR + b"\x01", "a key that is BufferSpec"),
        (b"\xa1\xff", "not UTF-8"),
        (b"\xa3\xed\xa0\x80", "not UTF-8"),
        (msgpack.packb(msgpack.Timestamp(1)), "extension type 255"),
        (ext(77, b"abc"), "extension type 77"),
        (ext(1, b""), "header"),
        (ext(1, b"\xff" + bytes(8)), "header"),
        (ext(1, b"\x08" + bytes(7)), "header"),
        (ext(1, b"\x08" + bytes(8 * (MAX_DIMENSIONS + 1))), "header"),
        (tensor_ext(torch.float32, 2**64 - 1), "a tensor of shape"),
        (tensor_ext(torch.float32, 2**32, 2**32), "a tensor of shape"),
        (tensor_ext(torch.float32, 0, 2**62, 2**62), "a tensor of shape"),
        (b"\xdc\x10\x01" + tensor_ext(torch.float32, 0) * 0x1001, "more than 4096 tensors"),
        (ext(2, VECTOR + b"\x07\x09"), "3 values from 7 in a vector of 9"),
        (ext(2, VECTOR + b"\xff\x09"), "from -1"),
        (ext(2, VECTOR + tensor_ext(torch.int64, 4) + b"\x09"), "indices of shape"),
        (ext(2, VECTOR + VECTOR + b"\x09"), "indices are torch.float32"),
        (ext(2, VECTOR + b"\xc0\x09"), "where is NoneType"),
        (ext(2, VECTOR + b"\x00\xc3"), "size is True"),
        (ext(2, VECTOR + b"\x00\x09\x00"), "not as long as what it holds"),
        (ext(2, VECTOR + b"\x00") + b"\x09", "not as long as what it holds"),
        (ext(2, b"\x01\x00\x09"), "not a vector"),
        (ext(2, ext(2, b"") + b"\x00\x09"), "inside a key, a part or a model"),
        (ext(3, VECTOR + tensor_ext(torch.float32)), "buffers are not a vector"),
        (ext(3, VECTOR + b"\x90"), "nested deeper|not a vector"),
    ],
)
def test_malformed_structures(structure: bytes, reason: str) -> None:
    for attempt in (describe, lambda data: decode(data, [])):
        with pytest.raises(FrameError) as raised:
            attempt(structure)
        assert "\n" not in str(raised.value)
    with pytest.raises(FrameError, match=reason):
        describe(structure)
    assert issubclass(FrameError, GossamerError)
    assert issubclass(FrameError, ValueError)


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([], "0 buffers for more tensors"),
        ([torch.zeros(3), torch.zeros(3)], "2 buffers for 1 tensors"),
        ([torch.zeros(4)], r"buffer 0 is torch.float32 \(4,\); torch.float32 \(3,\) is due"),
        ([torch.zeros(3, dtype=torch.int32)], "torch.int32"),
    ],
)
def test_wrong_buffers(buffers: list[Tensor], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        decode(VECTOR, buffers)


def test_contents_that_torch_could_not_bear_are_refused() -> None:
    bools = torch.zeros(3, dtype=torch.bool)
    raw(bools)[1] = 2
    with pytest.raises(FrameError, match="byte above 1"):
        decode(tensor_ext(torch.bool, 3), [bools])
    structure = ext(2, VECTOR + tensor_ext(torch.int64, 3) + b"\x09")
    with pytest.raises(FrameError, match="indices run from -1 to 8"):
        decode(structure, [torch.zeros(3), torch.tensor([8, -1, 0])])


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_structures_raise_nothing_else(structure: bytes) -> None:
    try:
        specs = describe(structure)
    except FrameError:
        return
    assert all(isinstance(spec, BufferSpec) for spec in specs)


@given(payloads, st.data())
def test_mutated_structures_raise_nothing_else(payload: Any, data: st.DataObject) -> None:
    encoded = encode(payload)
    structure = bytearray(encoded.structure)
    for _ in range(data.draw(st.integers(1, 3))):
        structure[data.draw(st.integers(0, len(structure) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        decode(bytes(structure), encoded.buffers)


@given(
    st.lists(st.one_of(st.text(max_size=4), st.integers(-(2**63), 2**64 - 1)), max_size=4),
    st.floats(-1e9, 1e9),
)
def test_head_round_trip(tag: list[str | int], sent_at: float) -> None:
    assert unpack_head(pack_head(tuple(tag), sent_at, VECTOR)) == (tuple(tag), sent_at, VECTOR)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x92\x90\xc0",
        b"\x93\xa1a" + struct.pack(">Bd", 0xCB, 1.0),
        b"\x93\x91\xc3" + struct.pack(">Bd", 0xCB, 1.0),
        b"\x93\x91" + ext(2, VECTOR + b"\x00\x09") + struct.pack(">Bd", 0xCB, 1.0),
        b"\x93\x90\x05",
        b"\x93\x90" + struct.pack(">Bd", 0xCB, math.nan),
        b"\x93\x90\xcb\x00",
    ],
)
def test_malformed_heads(head: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_head(head)


def test_tags_that_cannot_travel() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        pack_head(2**64, 0.0, b"")
    with pytest.raises(ValueError, match="Unicode"):
        pack_head("\ud800", 0.0, b"")


def test_wire_bytes_counted_by_hand() -> None:
    # Head: array of 3 (1), array of 1 (1), "t" (2), float64 (9), ext 8 of 9 bytes (3 + 9) = 25; one chunk.
    assert wire_bytes("t", torch.zeros(100)) == 25 + 400 + 19
    # 359,336 bytes of vector as in the paper's GN-LeNet: 359,361 bytes in 22 chunks.
    assert wire_bytes("t", torch.zeros(89_834)) == 359_361 + 19 + 21 * 7
    assert framed_bytes(16_384) == 16_384 + 19
    assert framed_bytes(16_385) == 16_385 + 19 + 7


@given(payloads)
def test_wire_bytes_of_payload_and_of_encoding_agree(payload: Any) -> None:
    assert wire_bytes(("a", 1), payload) == wire_bytes(("a", 1), encode(payload))


def test_encoding_does_not_copy_what_is_plain() -> None:
    tensor = torch.zeros(5)
    encoded = encode([tensor])
    assert isinstance(encoded, Encoded)
    assert encoded.buffers[0].data_ptr() == tensor.data_ptr()
