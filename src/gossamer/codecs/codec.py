"""Codec: encodes models before they are sent, and decodes received ones.

An algorithm sends models (:class:`~gossamer.messages.tags.Model`). The experiment's codec encodes the flat
parameter vector of each model, once for all receivers. Buffers are not encoded. Wrappers see the encoded
models.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Shaped
from pydantic import BeforeValidator
from torch import Tensor

from gossamer.config.registry import Component, ComponentField, build, register
from gossamer.errors import BadInput
from gossamer.messages.tags import Part, Payload
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

stream_of_call: ContextVar[str] = ContextVar("stream", default="")
"""The stream of the vector that is encoded or decoded now; "" is the first in which the node has sent one."""


def further_stream() -> bool:
    """Whether the vector that is encoded or decoded now is not in the first stream of its node."""
    return stream_of_call.get() != ""


def sends_own_model(node: Node) -> bool:
    """Whether the node sends its own model in this stream. The first stream counts as one."""
    return node.state.get(STATE, {}).get(STREAMS, {}).get(stream_of_call.get()) is None


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
        stream = stream_of_call.get() if self.per_stream else ""
        name = memory_name(self, stream)
        if name not in memories:
            memories[name] = {}
            if stream:
                self.begin(node)
        return memories[name]


def memory_name(codec: Codec, stream: str) -> str:
    """The name of a codec's memory for a stream."""
    return f"{codec.name_of()}: {stream}" if stream else codec.name_of()


@contextmanager
def own_draws(codec: Codec, place: int) -> Iterator[None]:
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
        with own_draws(self.codecs[0], 0):
            whole = self.codecs[0].encode(node, vector, round)
        return self._continue(node, whole, round)

    def compress(self, node: Node, vector: Float[Tensor, " n"], round: int) -> list[Payload]:
        with own_draws(self.codecs[0], 0):
            whole = self.codecs[0].compress(node, vector, round)
        return self._continue(node, whole, round)

    def _continue(self, node: Node, whole: list[Payload], round: int) -> list[Payload]:
        inner = whole
        for place, codec in enumerate(self.codecs[1:], start=1):
            with own_draws(codec, place):
                encoded = codec.compress(node, inner[0], round)
            inner[0], inner = encoded, encoded
        return whole

    def decode(self, node: Node, source: int, payload: list[Payload], own: Own) -> Tensor | Part:
        layers = [payload]
        for _ in self.codecs[1:]:
            layers.append(layered(layers[-1][0]))
        values: Tensor | Part = layers[-1][0]
        for place in reversed(range(len(self.codecs))):
            with own_draws(self.codecs[place], place):
                values = self.codecs[place].decode(node, source, [values, *layers[place][1:]], own)
        return values


def layered(payload: Payload) -> list[Payload]:
    """A payload as a list, the encoded values first. ValueError for anything else."""
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
