"""Whole messages: heads, and sizes on the wire."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.messages import FrameError, encode, framed_bytes, pack_head, unpack_head, wire_bytes
from payload_samples import VECTOR, ext, payloads


@given(
    st.lists(st.one_of(st.text(max_size=4), st.integers(-(2**63), 2**64 - 1)), max_size=4),
    st.floats(0.0, 1e10),
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
        *(b"\x93\x90" + struct.pack(">Bd", 0xCB, time_s) for time_s in (math.nan, math.inf, -1.0, 1e11)),
        b"\x93\xdc\x04\x01" + 1_025 * b"\x01" + struct.pack(">Bd", 0xCB, 1.0),
        b"\x93\x90\xcb\x00",
    ],
)
def test_malformed_heads_are_refused(head: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_head(head)


def test_unsupported_tags_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        pack_head(2**64, 0.0, b"")
    with pytest.raises(ValueError, match="Unicode"):
        pack_head("\ud800", 0.0, b"")
    with pytest.raises(ValueError, match="1027 bytes; accepted: at most 1024"):
        pack_head("x" * 1_023, 0.0, b"")
    assert unpack_head(pack_head("x" * 1_020, 0.0, b"\xc0"))[0] == ("x" * 1_020,)


def test_wire_bytes_match_a_hand_count() -> None:
    # Head: array of 3 (1), array of 1 (1), "t" (2), float64 (9), ext 8 of 9 bytes (3 + 9) = 25; one chunk.
    assert wire_bytes("t", torch.zeros(100)) == 25 + 400 + 19
    # 359,336 bytes of vector as in the paper's GN-LeNet: 359,361 bytes in 22 chunks.
    assert wire_bytes("t", torch.zeros(89_834)) == 359_361 + 19 + 21 * 7
    assert framed_bytes(16_384) == 16_384 + 19
    assert framed_bytes(16_385) == 16_385 + 19 + 7


@given(payloads)
def test_wire_bytes_of_payload_and_of_encoding_agree(payload: Any) -> None:
    assert wire_bytes(("a", 1), payload) == wire_bytes(("a", 1), encode(payload))
