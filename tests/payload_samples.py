"""Strategies for payloads of all kinds, and their equality."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import torch
from hypothesis import strategies as st
from torch import Tensor

from gossamer.messages import raw
from gossamer.messages.encoding import DTYPES
from gossamer.messages.tags import Coded, Model, Part


def same(left: Any, right: Any) -> bool:
    """Whether both are equal in type and bits; a tuple equals a list."""
    if isinstance(left, Model) or isinstance(right, Model):
        return type(left) is type(right) and all(map(same, left, right))
    if isinstance(left, tuple):
        left = list(left)
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        alike = left.dtype is right.dtype and left.shape == right.shape
        return alike and bytes(raw(left.contiguous())) == bytes(raw(right.contiguous()))
    if isinstance(left, Coded):
        return same(left.payload, right.payload)
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
    where = torch.tensor(index, dtype=draw(st.sampled_from([torch.int32, torch.int64, torch.uint8])))
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
    st.builds(
        Model,
        st.one_of(
            st.integers(0, 4).map(torch.ones),
            parts(),
            st.builds(Coded, st.one_of(tensors(), st.tuples(tensors(), st.integers(0, 2**40)).map(list))),
        ),
        st.integers(0, 2).map(torch.zeros),
    ),
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


def ext(code: int, data: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


def tensor_ext(dtype: torch.dtype, *shape: int) -> bytes:
    return ext(1, struct.pack(f"<B{len(shape)}Q", DTYPES.index(dtype), *shape))


VECTOR = tensor_ext(torch.float32, 3)
