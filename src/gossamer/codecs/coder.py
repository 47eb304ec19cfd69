"""The encoding and decoding of the models in one node's payloads."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from msgspec.structs import replace
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.codecs.codec import (
    MAX_STREAMS,
    STATE,
    STREAMS,
    Codec,
    layered,
    memory_name,
    own_draws,
    parameter_count,
    stream_of_call,
)
from gossamer.messages.encoding import narrow, part_fault
from gossamer.messages.tags import Coded, Message, Model, Part, Payload

if TYPE_CHECKING:
    from gossamer.node import Node

_DIGITS = re.compile(r"\d+")


class Coder:
    """Applies the experiment's codec to the models in one node's payloads. ``differences`` and ``pieces``
    tell whether the algorithm sends these; ``encoded`` counts the vectors encoded so far."""

    def __init__(self, codec: Codec, node: Node, *, differences: bool = False, pieces: bool = False) -> None:
        self._codec, self.node = codec, node
        self._differences, self._pieces = differences, pieces
        self.encoded = 0
        self._alike = all(part.decodes_alike for part in codec.parts())
        self._reads_own = any(part.sparse for part in codec.parts())
        self._whole = next((part.name_of() for part in codec.parts() if part.comes_first), None)
        self._coded: MutableMapping[Tensor, tuple[tuple[int, int], Coded]] = WeakTensorKeyDictionary()
        for place, part in enumerate(codec.parts()):
            with own_draws(part, place):
                part.begin(node)

    # --- streams

    @property
    def _streams(self) -> dict[str, Tensor | None]:
        """See :data:`STREAMS`."""
        streams: dict[str, Tensor | None] = self.node.state.setdefault(STATE, {}).setdefault(STREAMS, {})
        return streams

    def _sent_in(self, name: str, vector: Tensor) -> str:
        """Note that a vector is sent in a stream of this name. Returns the stream, "" if it is the first."""
        node, streams = self.node, self._streams
        if not streams:
            self._rename_memory(name)
        first = next(iter(streams), name)
        if name not in streams and len(streams) == MAX_STREAMS:
            if not self._remembers_streams():
                return name
            raise ValueError(
                f"node {node.rank} sends models in more than {MAX_STREAMS} streams, the next one as {name}; accepted with a"
                " codec: fewer places and tags (numbers in a tag do not count), or exact=True"
            )
        keeps = self._reads_own and name != first and vector is not node.parameters
        streams[name] = node.store(vector) if keeps else None
        return "" if name == first else name

    def _remembers_streams(self) -> bool:
        """Whether a codec keeps something for each stream."""
        once = {part.name_of() for part in self._codec.parts() if not part.per_stream}
        return self._reads_own or bool(self.node.state[STATE].keys() - {STREAMS, *once})

    def _rename_memory(self, first: str) -> None:
        """Make the memory of decoding in the stream that has become the first one a part of the first memory."""
        memories = self.node.state[STATE]
        for part in self._codec.parts():
            for key, value in memories.pop(memory_name(part, first), {}).items():
                memories.setdefault(part.name_of(), {}).setdefault(key, value)

    def _received_in(self, name: str) -> tuple[str, Tensor | None]:
        """The stream of this name, "" if it is the first, and the node's own vector in it; None stands for its model."""
        streams = self._streams
        return "" if name == next(iter(streams), None) else name, streams.get(name)

    # --- outgoing models

    def compress(self, vector: Float[Tensor, " params"]) -> tuple[Coded, Tensor | Part]:
        """The payload of a difference or a piece, and the vector that receivers decode from it."""
        self.encoded += 1
        with own_draws(self._codec, 0):
            coded = Coded(self._codec.compress(self.node, vector.detach(), self.node.round))
        decoded = self._vector(self.node.rank, coded, "", None)
        return coded, decoded

    def encode(self, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        """A payload with its models encoded. A model that is sent again in the same round is not encoded
        again. ValueError for a bare vector as long as a model, which was probably meant to be encoded."""
        return self._encoded(payload, "" if self._pieces else _named(tag))

    def _encoded(self, payload: Payload, name: str) -> Payload:
        if isinstance(payload, Model):
            return Model(self._encode(payload.parameters, name), payload.buffers)
        if isinstance(payload, dict):
            return {key: self._encoded(item, self._at(name, key)) for key, item in payload.items()}
        if isinstance(payload, list | tuple):
            return [self._encoded(item, self._at(name, place)) for place, item in enumerate(payload)]
        if (
            isinstance(payload, Tensor)
            and payload.shape == self.node.parameters.shape
            and payload.is_floating_point()
        ):
            what = (
                "node.parameters" if payload is self.node.parameters else f"a vector of {len(payload)} values"
            )
            raise ValueError(
                f"{what} is sent, which no codec encodes; accepted with a codec: node.model, Model(vector), or exact=True"
            )
        return payload

    def _at(self, name: str, place: str | int) -> str:
        return name if self._pieces else f"{name}[{place!r}]"

    def _encode(self, vector: Any, name: str) -> Any:
        if isinstance(vector, Part):
            return self._encode_part(vector)
        if not isinstance(vector, Tensor):  # a compressed difference
            return vector
        if vector.requires_grad:
            vector = vector.detach()
        stream = "" if self._pieces else self._sent_in(name, vector)
        key = vector._version, self.node.round
        if (known := self._coded.get(vector)) is not None and known[0] == key:
            return known[1]
        with _in_stream(stream), own_draws(self._codec, 0):
            payload = self._codec.encode(self.node, vector, self.node.round)
        if payload[0] is vector and len(payload) == 1:
            return vector
        coded = Coded(payload)
        self.encoded += 1
        self._coded[vector] = key, coded
        return coded

    def _encode_part(self, part: Part) -> Part | Coded:
        """A part with its values encoded, by codecs that encode value by value."""
        if self._whole is not None:
            raise ValueError(
                f"a Part of a model is sent, but codec {self._whole} takes whole models; accepted: codecs that encode"
                " value by value, or exact=True"
            )
        values = part.values.detach() if part.values.requires_grad else part.values
        with own_draws(self._codec, 0):
            payload = self._codec.encode(self.node, values, self.node.round)
        if payload[0] is values and len(payload) == 1:
            return part
        self.encoded += 1
        return Coded({"values": payload, "where": narrow(part.where.clone(), part.size), "size": part.size})

    def forget(self) -> None:
        """Discard cached encodings, because vectors were overwritten."""
        self._coded.clear()

    def end_round(self) -> None:
        """Tell the codecs that a round has ended."""
        further = list(self._streams)[1:]
        for place, part in enumerate(self._codec.parts()):
            for stream in ["", *further] if part.per_stream else [""]:
                with _in_stream(stream), own_draws(part, place):
                    part.end_round(self.node)

    # --- incoming models

    def decode(self, message: Message) -> Message:
        """A message with its models decoded. ValueError for a payload that the codec does not produce."""
        payload = self._decode(message.source, message.payload, "" if self._pieces else _named(message.tag))
        return message if payload is message.payload else replace(message, payload=payload, form=[])

    def _decode(self, source: int, payload: Payload, name: str) -> Payload:
        if isinstance(payload, Model):
            coded: Any = payload.parameters
            if type(coded) is not Coded:
                return payload
            stream, own = ("", None) if self._pieces else self._received_in(name)
            return Model(self._vector(source, coded, stream, own), payload.buffers)
        if isinstance(payload, dict):
            return {key: self._decode(source, item, self._at(name, key)) for key, item in payload.items()}
        if isinstance(payload, list):
            return [self._decode(source, item, self._at(name, place)) for place, item in enumerate(payload)]
        return payload

    def _vector(self, source: int, coded: Coded, stream: str, sent: Tensor | None) -> Any:
        """The vector in a payload of a stream in which this node has itself sent a vector; None stands for its model."""
        if coded.decoded:
            return coded.decoded[0]
        node, size, reads = self.node, parameter_count(self.node), 0

        def own() -> Tensor:
            nonlocal reads
            reads += 1
            if self._differences:
                return torch.zeros_like(node.parameters)
            return node.parameters if sent is None else sent

        try:
            with _in_stream(stream), own_draws(self._codec, 0):
                part = coded.payload if isinstance(coded.payload, dict) else None
                payload = layered(coded.payload if part is None else part["values"])
                vector = self._codec.decode(node, source, payload, own)
            if part is not None:
                vector = _part(vector, part)
            if not self._pieces and (vector.size if isinstance(vector, Part) else len(vector)) != size:
                raise ValueError("a vector of another length")
        except Exception as error:  # any exception, since the payload is untrusted
            raise ValueError(
                f"a model from node {source} that codec {self._codec.name_of()} can't decode: {error}"
            ) from error
        device = node.parameters.device
        if isinstance(vector, Part):
            vector = Part(vector.values.to(device), vector.where.to(device), vector.size)
        else:
            vector = vector.to(device) if self._pieces else node.store(vector)
        if not self._alike or reads:
            return vector
        coded.decoded.append(vector)  # if several threads decode it at the same time, the first result counts
        return coded.decoded[0]


def _part(values: Any, payload: dict[str, Payload]) -> Part:
    """The part in a payload of :meth:`Coder._encode_part`, whose values have been decoded."""
    part = Part(values, payload["where"], payload["size"])
    if (fault := part_fault(part)) is not None:
        raise ValueError(fault)
    return part


@lru_cache(maxsize=256)  # for all nodes of a simulation
def _named(tag: tuple[str | int, ...]) -> str:
    """The name of the streams under a tag. Numbers do not count, since they distinguish messages about one vector."""
    return "/".join("#" if type(word) is int else _DIGITS.sub("#", str(word)) for word in tag)


@contextmanager
def _in_stream(stream: str) -> Iterator[None]:
    token = stream_of_call.set(stream)
    try:
        yield
    finally:
        stream_of_call.reset(token)
