"""Decoding of malformed bytes, which raises one kind of error."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.messages import BufferSpec, FrameError, decode, describe, encode, raw
from gossamer.messages.encoding import MAX_DIMENSIONS
from payload_samples import VECTOR, ext, payloads, tensor_ext

INDICES = tensor_ext(torch.int64, 3)


def nested(code: int, levels: int) -> bytes:
    """Extensions nested to the given number of levels."""
    data = b"\xc0"
    for _ in range(levels):
        data = ext(code, data)
    return data


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (b"", "ends early"),
        (b"\xc1", "not msgpack"),
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
        (b"\xa1\xff", "invalid"),
        (b"\xa3\xed\xa0\x80", "invalid"),
        (msgpack.packb(msgpack.Timestamp(1)), "a timestamp"),
        (ext(77, b"abc"), "extension type 77"),
        (ext(1, b""), "header"),
        (ext(1, b"\xff" + bytes(8)), "header"),
        (ext(1, b"\x08" + bytes(7)), "header"),
        (ext(1, b"\x08" + bytes(8 * (MAX_DIMENSIONS + 1))), "header"),
        (tensor_ext(torch.float32, 2**64 - 1), "a tensor of shape"),
        (tensor_ext(torch.float32, 2**32, 2**32), "a tensor of shape"),
        (tensor_ext(torch.float32, 0, 2**62, 2**62), "a tensor of shape"),
        (b"\xdc\x10\x01" + tensor_ext(torch.float32, 0) * 0x1001, "more than 4096 tensors"),
        (ext(2, VECTOR + tensor_ext(torch.int64, 4) + b"\x09"), "indices of shape"),
        (ext(2, VECTOR + VECTOR + b"\x09"), "indices are torch.float32"),
        (ext(2, VECTOR + b"\xc0\x09"), "indices are NoneType"),
        (ext(2, VECTOR + INDICES + b"\xc3"), "a vector of True"),
        (ext(2, VECTOR + INDICES + b"\x09\x00"), "type 2 with 4 values"),
        (ext(2, VECTOR + INDICES) + b"\x09", "type 2 with 2 values"),
        (ext(2, b"\x01\x00\x09"), "not a vector"),
        (ext(2, ext(2, b"") + b"\x00\x09"), "type 2 inside itself"),
        (ext(3, VECTOR + VECTOR + VECTOR), "type 3 with 3 values"),
        (ext(3, ext(3, VECTOR)), "type 3 inside itself"),
        (ext(3, b"\x93\x01\x02\x03"), "parameters are not a vector"),
        (ext(4, tensor_ext(torch.float32, 2, 2)[3:]), "parameters are not a vector"),
        (ext(4, VECTOR[3:] + b"\x00"), "header"),
        (ext(5, b"\x01\x02"), "type 5 with 2 values"),
        (b"\x81" + ext(5, b"\x01") + b"\x01", "nested deeper"),
        (ext(3, VECTOR + tensor_ext(torch.float32)), "buffers are not a vector"),
        (ext(3, VECTOR + b"\x90"), "nested deeper|not a vector"),
        (nested(3, 600), "type 3 inside itself"),
        (nested(5, 600), "type 5 inside itself"),
        (ext(5, b"\x91" + ext(5, b"\x01")), "type 5 inside itself"),
    ],
)
def test_malformed_structures_are_refused(structure: bytes, reason: str) -> None:
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
        ([torch.zeros(4)], r"buffer 0 is torch.float32 \(4,\); accepted: torch.float32 \(3,\)"),
        ([torch.zeros(3, dtype=torch.int32)], "torch.int32"),
    ],
)
def test_wrong_buffers_are_refused(buffers: list[Tensor], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        decode(VECTOR, buffers)


def test_invalid_booleans_and_indices_are_refused() -> None:
    bools = torch.zeros(3, dtype=torch.bool)
    raw(bools)[1] = 2
    with pytest.raises(FrameError, match="byte above 1"):
        decode(tensor_ext(torch.bool, 3), [bools])
    structure = ext(2, VECTOR + tensor_ext(torch.int64, 3) + b"\x09")
    with pytest.raises(FrameError, match="indices run from -1 to 8"):
        decode(structure, [torch.zeros(3), torch.tensor([8, -1, 0])])


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_bytes_raise_only_frame_errors(structure: bytes) -> None:
    try:
        specs = describe(structure).specs
    except FrameError:
        return
    assert all(isinstance(spec, BufferSpec) for spec in specs)


@given(payloads, st.data())
def test_mutated_structures_raise_only_frame_errors(payload: Any, data: st.DataObject) -> None:
    encoded = encode(payload)
    structure = bytearray(encoded.structure)
    for _ in range(data.draw(st.integers(1, 3))):
        structure[data.draw(st.integers(0, len(structure) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        decode(bytes(structure), encoded.buffers)
