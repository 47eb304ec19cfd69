"""Checkpoints: everything that one node needs to continue from a round's end, and its file.

A file is safetensors, so that any reader of that format sees the vectors in it: ``model.0`` are the parameters, ``model.1``
the buffers, ``optimizer.K`` the optimizer's state in the order of its names, ``state.K`` the tensors in ``node.state``. What
is not a tensor lies in the file's metadata: for each of these sections its structure (:mod:`gossamer.messages`, in base64),
and a checksum of everything. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gossamer.errors import BadInput
from gossamer.messages import BufferSpec, FrameError, decode, describe, encode, raw
from gossamer.messages.tags import Message, Model, Payload

VERSION = "2"
"""Of the file format; a file of another version is refused."""

_FORMAT = "gossamer-checkpoint"
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 2**30
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names; what it has none for is written as bytes."""

Place = Callable[[Tensor], Tensor]
"""Puts a tensor that was read where its node keeps such ones."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A message that was on its way when its receiver was saved.

    Args:
        message: what will be delivered.
        due_s: seconds by the receiver's clock; an earlier message is delivered at once.
    """

    message: Message
    due_s: float


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One node at the end of a round. Immutable: models are shared with the node, not copied.

    Args:
        rank: which node.
        round: rounds completed.
        time_s: its clock, seconds.
        model: parameters and buffers.
        optimizer: the optimizer's state; None before the first step.
        state: ``node.state``.
        node: the node's other values, as :meth:`NodeRuntime.restore` takes them.
        unread: the messages in its mailbox, oldest first.
        arriving: the messages on their way, sent before their senders were saved.
        engine: what the engine keeps about the node.
    """

    rank: int
    round: int
    time_s: float
    model: Model
    optimizer: Mapping[str, Tensor] | None
    state: Mapping[str, Payload]
    node: Mapping[str, Payload]
    unread: Sequence[Message] = ()
    arriving: Sequence[Arrival] = ()
    engine: Mapping[str, Payload] = field(default_factory=dict)

    def sections(self) -> dict[str, Payload]:
        """The checkpoint as payloads, by the names that a file has for them."""
        fields = {"rank": self.rank, "round": self.round, "time_s": self.time_s}
        return {
            "model": self.model,
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
            "state": dict(self.state),
            "node": {**fields, "node": dict(self.node), "engine": dict(self.engine)},
            # One section for each message: a full mailbox may exceed the limits of a payload.
            **{f"unread-{k}": _message(message) for k, message in enumerate(self.unread)},
            **{
                f"arriving-{k}": [arrival.due_s, _message(arrival.message)]
                for k, arrival in enumerate(self.arriving)
            },
        }

    @staticmethod
    def of(sections: Mapping[str, Payload]) -> Checkpoint:
        """The checkpoint that has these :meth:`sections`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: for anything else.
        """
        fields = sections["node"]
        return Checkpoint(
            rank=fields["rank"],
            round=fields["round"],
            time_s=fields["time_s"],
            model=Model(*sections["model"]),
            optimizer=sections["optimizer"],
            state=sections["state"],
            node=fields["node"],
            unread=[_as_message(sections[name]) for name in _numbered(sections, "unread")],
            arriving=[
                Arrival(_as_message(message), float(due_s))
                for due_s, message in (sections[name] for name in _numbered(sections, "arriving"))
            ],
            engine=fields["engine"],
        )


def _message(message: Message) -> Payload:
    return [message.source, list(message.tag), message.sent_at, message.number, message.payload]


def _as_message(fields: Payload) -> Message:
    source, tag, sent_at, number, payload = fields
    return Message(int(source), tuple(tag), payload, float(sent_at), number=int(number))


def _numbered(sections: Mapping[str, Payload], name: str) -> list[str]:
    count = sum(1 for each in sections if each.startswith(f"{name}-"))
    return [f"{name}-{k}" for k in range(count)]


# --- the file


def write(checkpoint: Checkpoint, path: Path, experiment: str) -> None:
    """Write a checkpoint's file in place; callers that need an atomic write rename it afterwards.

    Args:
        checkpoint: what is written.
        path: the file.
        experiment: identifies the experiment, e.g. a digest.

    Raises:
        OSError: where it can't be written.
        TypeError, ValueError: for a ``node.state`` with something in it that is no payload.
    """
    encoded = {name: encode(payload) for name, payload in checkpoint.sections().items()}
    structures = {name: base64.b64encode(each.structure).decode() for name, each in encoded.items()}
    buffers = {f"{name}.{k}": b for name, each in encoded.items() for k, b in enumerate(each.buffers)}
    specs = {name: BufferSpec(buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
    metadata = {
        "format": _FORMAT,
        "version": VERSION,
        "experiment": experiment,
        "rank": str(checkpoint.rank),
        "round": str(checkpoint.round),
        "structures": json.dumps(structures),
    }
    table = _table(specs)
    crc = _crc(metadata)
    for name in table:
        crc = zlib.crc32(raw(buffers[name]), crc)
    header = json.dumps({"__metadata__": {**metadata, "crc32": f"{crc:08x}"}, **table}).encode()
    header += b" " * (-len(header) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(header)) + header)
        for name in table:
            file.write(raw(buffers[name]))


def read(path: Path, experiment: str | None = None, place: Place | None = None) -> Checkpoint:
    """Read a checkpoint's file, and check all of it.

    Args:
        path: the file.
        experiment: the experiment that it must belong to; None is any.
        place: moves its tensors to where the node keeps them; None leaves them.

    Raises:
        BadInput: for a file that is missing, damaged, or of another experiment.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size, experiment, place)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}; accepted: a checkpoint") from None
    except (
        FrameError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{path}: {why:.200}; accepted: a checkpoint as gossamer has written it") from None


def _read(file: BinaryIO, size: int, experiment: str | None, place: Place | None) -> Checkpoint:
    start = _LENGTH.size
    length = _LENGTH.unpack(file.read(start))[0] if size >= start else size
    if length > min(size - start, _MOST_HEADER):
        raise ValueError("it is no safetensors file, or not whole")
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__")
    crc = int(metadata.pop("crc32"), 16)
    if metadata["format"] != _FORMAT or metadata["version"] != VERSION:
        raise ValueError(
            f"it is {metadata['format']}, version {metadata['version']}, not {_FORMAT}, version {VERSION}"
        )
    if experiment is not None and metadata["experiment"] != experiment:
        raise ValueError("it is of another experiment")
    structures = {
        name: base64.b64decode(text, validate=True)
        for name, text in json.loads(metadata["structures"]).items()
    }
    described = {name: describe(structure) for name, structure in structures.items()}
    specs = {f"{name}.{k}": spec for name, each in described.items() for k, spec in enumerate(each)}
    table = _table(specs)
    end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
    if header != table or size != start + length + end:
        raise ValueError("it is not whole, or its tensors are others than its structures say")
    found, tensors = _crc(metadata), {}
    for name in table:
        tensor = torch.empty(specs[name].shape, dtype=specs[name].dtype)
        if (memory := raw(tensor)).nbytes and file.readinto(memory) != memory.nbytes:  # type: ignore[attr-defined]
            raise ValueError("it is not whole")
        found = zlib.crc32(memory, found)
        tensors[name] = tensor if place is None else place(tensor)
    if found != crc:
        raise ValueError("its checksum does not fit: it is damaged")
    sections = {
        name: decode(structure, [tensors[f"{name}.{k}"] for k in range(len(described[name]))])
        for name, structure in structures.items()
    }
    return Checkpoint.of(sections)


def _table(specs: Mapping[str, BufferSpec]) -> dict[str, Any]:
    """safetensors' table: one tensor after the other, the widest numbers first, so that all are aligned."""
    table: dict[str, Any] = {}
    start = 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        known = _DTYPES.get(spec.dtype)
        shape = list(spec.shape) if known else [spec.nbytes]
        stop = start + math.prod(spec.shape) * spec.dtype.itemsize
        table[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    return table


def _crc(metadata: Mapping[str, str]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
