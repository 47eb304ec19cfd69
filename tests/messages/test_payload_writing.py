"""Encoding and freezing of payloads: round trips, copies, and refused values."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from gossamer.messages import Encoded, decode, describe, encode, encoding, freeze, raw, wire_bytes
from gossamer.messages.encoding import MAX_DEPTH, MAX_DIMENSIONS, MAX_ITEMS, MAX_TENSORS
from gossamer.messages.tags import Coded, Model, Part
from payload_samples import payloads, same


@given(payloads)
def test_payload_round_trip(payload: Any) -> None:
    encoded = encode(payload)
    assert same(payload, decode(encoded.structure, encoded.buffers))
    assert describe(encoded.structure).specs == [
        (buffer.dtype, tuple(buffer.shape)) for buffer in encoded.buffers
    ]
    assert encoded.nbytes == len(encoded.structure) + sum(len(raw(buffer)) for buffer in encoded.buffers)


@given(payloads)
def test_structure_is_plain_msgpack(payload: Any) -> None:
    """The msgpack library reads the same values, apart from the tensors."""
    structure = encode(payload).structure
    read = msgpack.unpackb(structure, strict_map_key=False, ext_hook=lambda code, data: (code, len(data)))

    def without_tensors(item: Any) -> Any:
        if isinstance(item, Tensor):
            return (1, 1 + 8 * item.dim())
        if isinstance(item, Coded):
            return (5, len(encode(item.payload).structure))
        if isinstance(item, Model):
            if not len(item.buffers):
                return (
                    (4, 9)
                    if isinstance(item.parameters, Tensor)
                    else (3, len(encode(item.parameters).structure))
                )
            return (3, len(encode(item.parameters).structure) + 12)
        if isinstance(item, Part):
            return (2, 12 + 12 + 1)
        if isinstance(item, list | tuple):
            return [without_tensors(inner) for inner in item]
        if isinstance(item, dict):
            return {key: without_tensors(inner) for key, inner in item.items()}
        return item

    assert repr(read) == repr(without_tensors(payload))


@given(payloads)
def test_freeze_equals_the_decoded_payload(payload: Any) -> None:
    encoded = encode(payload)
    assert same(freeze(payload, lambda tensor: False), decode(encoded.structure, encoded.buffers))


def test_freeze_copies_all_but_the_permitted_tensors() -> None:
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


def test_views_and_parameters_become_plain_tensors() -> None:
    payload = [
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
            assert not tensor.requires_grad


def test_number_subclasses_are_sent_as_plain_numbers() -> None:
    frozen = freeze([np.float64(0.5)], lambda tensor: False)
    assert type(frozen[0]) is float
    assert decode(encode(np.float64(0.5)).structure, []) == 0.5


def test_encoding_does_not_copy_plain_tensors() -> None:
    tensor = torch.zeros(5)
    encoded = encode([tensor])
    assert isinstance(encoded, Encoded)
    assert encoded.buffers[0].data_ptr() == tensor.data_ptr()


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
        ({"a": [1, np.zeros(2)]}, TypeError, "payload: ndarray can't be sent; accepted: None, bool"),
        ({1, 2}, TypeError, "payload: set can't"),
        (nn.Linear(1, 1), TypeError, "payload: Linear can't"),
        ({2.5: 1}, ValueError, "a key that is float, not str or int"),
        ({True: 1}, ValueError, "a key that is bool"),
        (torch.eye(2).to_sparse(), TypeError, "sparse"),
        (torch.empty(2, device="meta"), TypeError, "meta tensor"),
        (
            torch.empty(2, dtype=torch.bits8),
            TypeError,
            "torch.bits8 can't be sent; accepted: dense ones of torch.bool",
        ),
        (torch.zeros([1] * (MAX_DIMENSIONS + 1)), ValueError, "dimensions"),
        ({"k": 2**64}, ValueError, "payload: 18446744073709551616 does not fit into 64 bits"),
        (-(2**63) - 1, ValueError, "64 bits"),
        ({2**64: 1}, ValueError, "64 bits"),
        (["\ud800"], ValueError, "surrogates"),
        ({"\ud800": 1}, ValueError, "surrogates"),
        (cyclic(), ValueError, "nested deeper|recursion limit"),
        (nested(MAX_DEPTH + 1), ValueError, "nested deeper"),
        ([0] * MAX_ITEMS, ValueError, f"more than {MAX_ITEMS} values"),
        ([torch.zeros(0)] * (MAX_TENSORS + 1), ValueError, f"more than {MAX_TENSORS} tensors"),
        (Part(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int32), 9), ValueError, "not a vector"),
        (Part(torch.zeros(4), torch.arange(4), 3), ValueError, "4 values of a vector of 3"),
        (Part(torch.zeros(4), 0, 9), ValueError, "indices are int"),  # type: ignore[arg-type]
        (Part(torch.zeros(4), torch.zeros(3, dtype=torch.int64), 9), ValueError, r"indices of shape \(3,\)"),
        (Part(torch.zeros(3), torch.zeros(3), 9), ValueError, "indices are torch.float32"),
        (Model(torch.zeros(2, 2), torch.zeros(0)), ValueError, "a model's parameters are not a vector"),
        (Model(torch.zeros(2), torch.zeros(())), ValueError, "a model's buffers are not a vector"),
        (Model(torch.zeros(2), None), ValueError, "a model's buffers are not a vector"),  # type: ignore[arg-type]
    ],
)
def test_unsupported_payloads_are_refused(payload: Any, error: type[Exception], reason: str) -> None:
    freezes = [lambda item: freeze(item, lambda tensor: False)] if error is TypeError else []
    for attempt in (encode, lambda item: wire_bytes("t", item), *freezes):
        with pytest.raises(error, match=reason) as raised:
            attempt(payload)
        assert "\n" not in str(raised.value)


def test_indices_outside_the_vector_are_refused() -> None:
    with pytest.raises(ValueError, match="indices run from 0 to 9 in a vector of 9"):
        encode(Part(torch.zeros(2), torch.tensor([0, 9]), 9))


def test_encoding_and_decoding_have_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_ITEMS", 61)
    monkeypatch.setattr(encoding, "MAX_TENSORS", 20)
    part = Part(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1)
    model = Model(torch.zeros(1), torch.zeros(1))
    coded = Model(Coded([torch.zeros(1), 1]))  # type: ignore[arg-type]
    largest = [
        nested(MAX_DEPTH),
        {str(i): i for i in range(30)},
        [part] * 10,
        [model] * 10,
        [torch.zeros(0)] * 20,
        [coded] * 12,
    ]
    for payload in largest:
        encoded = encode(payload)
        assert same(payload, decode(encoded.structure, encoded.buffers))
    for payload in ({str(i): i for i in range(31)}, [*largest[2], part], [*largest[3], model], [coded] * 13):
        with pytest.raises(ValueError, match="more than"):
            encode(payload)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: {"model": Model(v), "round": 1},
        lambda v: [v, 1],
        lambda v: Part(v, torch.arange(3), 9),
        lambda v: Model(Part(v, torch.arange(3), 9)),
    ],
)
def test_no_reference_cycle_keeps_a_tensor_alive(wrap: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        vector = torch.ones(3)
        kept = weakref.ref(vector)
        payload = freeze(wrap(vector), lambda tensor: True)
        encoded = encode(payload)
        decode(encoded.structure, encoded.buffers)
        del vector, payload, encoded
        assert kept() is None
    finally:
        gc.enable()
