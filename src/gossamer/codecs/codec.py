"""Codec: encodes models before they are sent, and decodes received ones.

An algorithm sends models (:class:`~gossamer.messages.tags.Model`). The experiment's codec encodes the flat
parameter vector of each model, once for all receivers. Buffers are not encoded. Wrappers see the encoded
models.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from pydantic import BeforeValidator
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.config.registry import Component, ComponentField, build, register
from gossamer.errors import BadInput
from gossamer.messages.encoding import narrow, part_fault
from gossamer.messages.tags import Coded, Message, Model, Part, Payload
from gossamer.randomness import draws_of

if TYPE_CHECKING:
    from gossamer.learning.parameters import Layout
    from gossamer.node import Node

Own = Callable[[], Tensor]
"""Returns the vector [P] on which decoding may depend: the receiver's own parameters, or zeros if differences
are sent. A payload whose decoding calls it is decoded again for each receiver."""
STATE = "~codec"
"""Key in a node's state for the memory of its codecs: by their names, and for further streams with the stream's name."""
STREAMS = "~streams"
"""Key there for the streams in which the node has sent vectors, in that order: by name, the vector that it sent last, or
None for its own model."""
MAX_STREAMS = 16
"""Streams of models that a node may send, since a codec keeps vectors for each."""
PADDING = 1024
"""Maximum number of values by which a transforming codec may lengthen a vector."""
_DIGITS = re.compile(r"\d+")

_stream: ContextVar[str] = ContextVar("stream", default="")
"""The stream of the vector that is encoded or decoded now; "" is the first in which the node has sent one."""


def further_stream() -> bool:
    """Whether the vector that is encoded or decoded now is not in the first stream of its node."""
    return _stream.get() != ""


def sends_own_model(node: Node) -> bool:
    """Whether the node sends its own model in this stream. The first stream counts as one."""
    return node.state.get(STATE, {}).get(STREAMS, {}).get(_stream.get()) is None


class Codec(Component):
    """Base class of codecs: encodes a vector for the wire and decodes it again.

    A codec is frozen, and all nodes of a simulation share it. Its state for each node is in :meth:`memory`.

    An algorithm may send several vectors in a round, such as a model and a direction. Vectors at one place in the payload
    and under one tag, whatever its numbers, are a stream. Each stream has its own memory: that of the first one begins
    before the protocol starts, that of each further one with its first vector.

    Attributes:
        needs_static_graph: whether the topology must not change.
        needs_every_message: whether every message must arrive: none may be lost, cancelled or late.
        sparse: whether it decodes to a :class:`Part`; then it comes first in a chain.
        final: whether its output is not floating-point. If so, only lossless codecs may follow it in a
            chain.
        lossless: whether it takes values of any type and restores them exactly.
        only_differences: whether it is only for algorithms that send differences, because its error is too
            large for models.
        per_stream: whether the memory is kept for each stream by itself (default), or once for each node.
        decodes_alike: whether ``decode`` returns the same for every receiver of a payload, unless it reads
            ``own`` (default). If so, it is called once for all receivers within one process."""

    needs_static_graph: ClassVar[bool] = False
    needs_every_message: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    final: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    only_differences: ClassVar[bool] = False
    per_stream: ClassVar[bool] = True
    decodes_alike: ClassVar[bool] = True
    _state_goes_to: ClassVar[str] = "self.memory(node), which checkpoints keep"

    @property
    def comes_first(self) -> bool:
        """Whether it encodes only whole vectors, so that it has to come first in a chain and does not support
        pieces of models. This is so for sparse codecs."""
        return self.sparse

    @property
    def common_support(self) -> bool:
        """Whether all nodes encode the same coordinates in a round, so that the encoded values can be
        summed."""
        return not self.sparse

    def parts(self) -> tuple[Codec, ...]:
        """The codecs of a chain, or the codec itself."""
        return (self,)

    def check(self, layout: Layout) -> None:
        """Refuse parameters that do not suit a model of this layout, before any work starts, with a BadInput.
        The default accepts everything."""

    def contracts_only_with(self, layout: Layout, count: int) -> str | None:
        """None if this codec is a contraction for ``count`` values of a model's difference, as algorithms that send
        differences require: its expected squared error is smaller than that of sending nothing. Otherwise the
        settings that make it one. The default is None."""
        return None

    def begin(self, node: Node) -> None:
        """Called with each node before its protocol starts, when its parameters are the initial ones, and again when the
        memory of a further stream begins (:meth:`memory` is then that of the stream)."""

    def end_round(self, node: Node) -> None:
        """Called after each round of a node, when it has mixed; once for each of its streams."""

    @abstractmethod
    def encode(self, node: Node, vector: Shaped[Tensor, " n"], round: int) -> list[Payload]:
        """The payload to send instead of a vector. Called once for all receivers.

        Args:
            node: the sender.
            vector: its parameters [P], or the values [n] returned by the previous codec in a chain. It must
                not be modified.
            round: the sender's current round.

        Returns:
            The values, a tensor, followed by everything else that decoding needs. The next codec of a chain
            encodes the values. ``[vector]`` itself is sent as if there were no codec."""

    def compress(self, node: Node, vector: Shaped[Tensor, " n"], round: int) -> list[Payload]:
        """As :meth:`encode`, for a difference instead of a model (:meth:`~gossamer.Node.compress`). A codec
        that encodes the change of a model encodes the difference directly."""
        return self.encode(node, vector, round)

    @abstractmethod
    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        """The vector encoded in a payload of :meth:`encode`, or the part of it that was sent. It is called in
        any thread, but by only one thread at a time for each node.

        Args:
            node: the receiver.
            source: the sender.
            payload: a payload from a peer, which may be faulty.
            own: see :data:`Own`.

        Raises:
            ValueError, TypeError: for a payload that the codec does not produce."""

    def memory(self, node: Node) -> dict[str, Payload]:
        """The codec's state for a node, and for the stream whose vector is encoded or decoded. It is saved with the
        node, so its values must be payloads."""
        memories: dict[str, dict[str, Payload]] = node.state.setdefault(STATE, {})
        stream = _stream.get() if self.per_stream else ""
        name = _memory_name(self, stream)
        if name not in memories:
            memories[name] = {}
            if stream:
                self.begin(node)
        return memories[name]


def _memory_name(codec: Codec, stream: str) -> str:
    return f"{codec.name_of()}: {stream}" if stream else codec.name_of()


@contextmanager
def _own_draws(codec: Codec, place: int) -> Iterator[None]:
    """The context of a call of one codec of a chain: one that is not built in draws its own numbers."""
    built_in = type(codec).__module__.startswith("gossamer.")
    with draws_of("algorithm" if built_in else f"codec.{place}"):
        yield


@register("codec", "identity")
class Identity(Codec):
    """Sends models unchanged. Use it as a baseline to measure the cost of other codecs."""

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        return [vector]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        return vector_in(payload[0], torch.float32)


def _codecs(value: Any, info: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("a list of codecs")
    built: list[Any] = [build("codec", item, info.context, f"codec.{k}") for k, item in enumerate(value)]
    codecs = tuple(part for codec in built for part in codec.parts())  # nested chains are flattened
    for k, codec in enumerate(codecs):
        if codec.comes_first and k > 0:
            raise BadInput(f"codec.{k}: {codec.name_of()} after another codec; accepted: as the first codec")
        if codec.final and any(not following.lossless for following in codecs[k + 1 :]):
            accepted = "as the last codec, or before lossless ones"
            raise BadInput(f"codec.{k}: {codec.name_of()} before another codec; accepted: {accepted}")
    return codecs


@register("codec", "chain")
class Chain(Codec):
    """Codecs in sequence. An experiment may give just the list: ``[{name: top-k, fraction: 0.1}, float16]``.

    Args:
        codecs: the first encodes the model; each following one encodes the values returned by its
            predecessor."""

    codecs: Annotated[
        tuple[Codec, ...], BeforeValidator(_codecs, Annotated[list[Any], ComponentField("codec", many=True)])
    ]

    @property
    def common_support(self) -> bool:
        return all(codec.common_support for codec in self.codecs)

    def parts(self) -> tuple[Codec, ...]:
        return self.codecs

    def spec(self) -> Any:
        return [codec.spec() for codec in self.codecs]

    def encode(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        with _own_draws(self.codecs[0], 0):
            whole = self.codecs[0].encode(node, vector, round)
        return self._continue(node, whole, round)

    def compress(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        with _own_draws(self.codecs[0], 0):
            whole = self.codecs[0].compress(node, vector, round)
        return self._continue(node, whole, round)

    def _continue(self, node: Node, whole: list[Payload], round: int) -> list[Payload]:
        inner = whole
        for place, codec in enumerate(self.codecs[1:], start=1):
            with _own_draws(codec, place):
                encoded = codec.compress(node, inner[0], round)
            inner[0], inner = encoded, encoded
        return whole

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        layers = [payload]
        for _ in self.codecs[1:]:
            layers.append(_layers(layers[-1][0]))
        values: Tensor | Part = layers[-1][0]
        for place in reversed(range(len(self.codecs))):
            with _own_draws(self.codecs[place], place):
                values = self.codecs[place].decode(node, source, [values, *layers[place][1:]], own)
        return values


def _layers(payload: Payload) -> list[Payload]:
    if not isinstance(payload, list) or not payload:
        raise ValueError(f"a {type(payload).__name__}; accepted: a list, the encoded values first")
    return payload


def vector_in(item: Payload, dtype: torch.dtype) -> Tensor:
    """An item of a payload as a vector. ValueError for anything else."""
    if not isinstance(item, Tensor) or item.dim() != 1 or item.dtype is not dtype:
        kind = f"{item.dtype} {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__
        raise ValueError(f"a codec's payload with {kind}; accepted: a vector of {dtype}")
    return item


def parameter_count(node: Node) -> int:
    """P, the length of a node's parameter vector."""
    return node.layout[-1].start + math.prod(node.layout[-1].shape) if node.layout else 0


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
            with _own_draws(part, place):
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
            for key, value in memories.pop(_memory_name(part, first), {}).items():
                memories.setdefault(part.name_of(), {}).setdefault(key, value)

    def _received_in(self, name: str) -> tuple[str, Tensor | None]:
        """The stream of this name, "" if it is the first, and the node's own vector in it; None stands for its model."""
        streams = self._streams
        return "" if name == next(iter(streams), None) else name, streams.get(name)

    # --- outgoing models

    def compress(self, vector: Float[Tensor, " params"]) -> tuple[Coded, Tensor | Part]:
        """The payload of a difference or a piece, and the vector that receivers decode from it."""
        self.encoded += 1
        with _own_draws(self._codec, 0):
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
        with _in_stream(stream), _own_draws(self._codec, 0):
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
        with _own_draws(self._codec, 0):
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
                with _in_stream(stream), _own_draws(part, place):
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
            with _in_stream(stream), _own_draws(self._codec, 0):
                part = coded.payload if isinstance(coded.payload, dict) else None
                payload = _layers(coded.payload if part is None else part["values"])
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
    token = _stream.set(stream)
    try:
        yield
    finally:
        _stream.reset(token)
