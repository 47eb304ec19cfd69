"""Checkpoints: everything that one node needs to continue from the end of a round, and the file format.

A file is in the safetensors format, so that any reader of that format can show its vectors: ``model.0`` are
the parameters, ``model.1`` the buffers, ``optimizer.K`` the optimizer's state in the order of its names, and
``state.K`` the tensors in ``node.state``. The metadata has everything else: the structure of each of these
sections (:mod:`gossamer.messages`, in base64), and a checksum of the whole file. Nothing is unpickled."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer import files
from gossamer.errors import BadInput
from gossamer.messages import decode, describe, encode, raw
from gossamer.messages.tags import Message, Model, Payload

VERSION = "5"
"""Version of the file format. A file of another version is refused."""

_FORMAT = "gossamer-checkpoint"
Place = Callable[[Tensor], Tensor]
"""Moves a tensor from the file to where the node keeps such tensors."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One node at the end of a round. Immutable: models are shared with the node, not copied."""

    rank: int
    round: int  # rounds completed
    time_s: float  # the node's clock, seconds
    model: Model
    optimizer: Mapping[str, Tensor] | None  # its state; None before the first step
    state: Mapping[str, Payload]  # node.state
    node: Mapping[str, Payload]  # the node's other values, as NodeRuntime.restore takes them
    unread: Sequence[Message] = ()  # messages in its mailbox, oldest first
    arriving: Sequence[Message] = ()  # messages in flight to it, sent before their senders were saved
    engine: Mapping[str, Payload] = field(default_factory=dict)  # what the engine keeps about the node

    def sections(self) -> dict[str, Payload]:
        """The checkpoint as payloads, by their names in a file."""
        fields = {"rank": self.rank, "round": self.round, "time_s": self.time_s}
        # One section for each message: a full mailbox may exceed the limits of a payload.
        unread = {f"unread-{k}": _fields(message) for k, message in enumerate(self.unread)}
        arriving = {f"arriving-{k}": _fields(message) for k, message in enumerate(self.arriving)}
        return {
            "model": self.model,
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
            "state": dict(self.state),
            "node": {**fields, "node": dict(self.node), "engine": dict(self.engine)},
            **unread,
            **arriving,
        }

    @staticmethod
    def of(sections: Mapping[str, Payload]) -> Checkpoint:
        """The checkpoint with these :meth:`sections`. LookupError, TypeError, ValueError or AttributeError if
        they are invalid."""

        def messages(name: str) -> list[Message]:
            saved = [section for key, section in sections.items() if key.startswith(f"{name}-")]
            return [
                Message(int(source), tuple(tag), payload, float(sent_at), number=int(number))
                for source, tag, sent_at, number, payload in saved
            ]

        return Checkpoint(
            **sections["node"],
            model=Model(*sections["model"]),
            optimizer=sections["optimizer"],
            state=sections["state"],
            unread=messages("unread"),
            arriving=messages("arriving"),
        )


def _fields(message: Message) -> Payload:
    return [message.source, list(message.tag), message.sent_at, message.number, message.payload]


# --- the file


def write(checkpoint: Checkpoint, path: Path, identity: Mapping[str, str]) -> None:
    """Write a checkpoint's file in place, with its ``identity``, such as the run. Callers that need an atomic
    write rename the file afterwards. OSError or SafetensorError if it can't be written; TypeError or
    ValueError for a value in ``node.state`` that is not a payload."""
    encoded = {name: encode(payload) for name, payload in checkpoint.sections().items()}
    structures = {name: base64.b64encode(section.structure).decode() for name, section in encoded.items()}
    metadata = {
        "format": _FORMAT,
        "version": VERSION,
        **identity,
        "rank": str(checkpoint.rank),
        "round": str(checkpoint.round),
        "structures": json.dumps(structures),
    }
    crc, tensors = _crc(metadata), {}
    for name, section in encoded.items():
        for k, buffer in enumerate(section.buffers):
            crc = zlib.crc32(raw(buffer), crc)
            tensors[f"{name}.{k}"] = buffer.clone()  # safetensors refuses tensors that share memory
    save_file(tensors, path, {**metadata, "crc32": f"{crc:08x}"})


def read(path: Path, identity: Mapping[str, str] = {}, place: Place | None = None) -> Checkpoint:
    """Read and check a checkpoint's file; ``place`` moves its tensors to where the node keeps them. BadInput
    for a file that is missing or damaged, or has another ``identity``, which may include its rank and
    round."""
    files.checked(path, files.MAX_ROWS_BYTES, path.parent, "a checkpoint")
    try:
        return _read(path, identity, place or (lambda tensor: tensor))
    except Exception as error:  # noqa: BLE001 - of any kind, since the bytes may be anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{path}: {reason:.200}; accepted: a checkpoint written by gossamer") from None


def _read(path: Path, identity: Mapping[str, str], place: Place) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        expected = int(metadata.pop("crc32"), 16)
        name, version = metadata["format"], metadata["version"]
        if (name, version) != (_FORMAT, VERSION):
            raise ValueError(f"it is {name}, version {version}, not {_FORMAT}, version {VERSION}")
        for name, value in identity.items():
            if metadata[name] != value:
                raise ValueError(f"its {name} is {metadata[name]}, not {value}")
        crc, sections = _crc(metadata), {}
        for name, text in json.loads(metadata["structures"]).items():
            structure = base64.b64decode(text, validate=True)
            buffers = []
            for k in range(len(describe(structure).specs)):
                # Copied, because results depend on alignment. The file's own memory is not aligned, and would
                # stay mapped.
                tensor = file.get_tensor(f"{name}.{k}").clone()
                crc = zlib.crc32(raw(tensor), crc)
                buffers.append(place(tensor))
            sections[name] = decode(structure, buffers)
    if crc != expected:
        raise ValueError("its checksum does not match: it is damaged")
    return Checkpoint.of(sections)


def _crc(metadata: Mapping[str, str]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
