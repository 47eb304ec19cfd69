"""What gossamer itself puts around a node, and the one order of everything that acts there.

From the algorithm to the engine: the middlewares of the experiment, in the order of its file; the messages that measures
see; the models for newcomers; the peer sampler; the codec, or the masks of secure aggregation; the wrappers of messages on
the wire. What comes in passes in reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gossamer.layers.coded import CodedNode
from gossamer.layers.masked import MaskedNode
from gossamer.layers.measured import MeasuredNode
from gossamer.layers.newcomer import WelcomingNode
from gossamer.layers.sampled import SampledNode
from gossamer.layers.wire import WireNode
from gossamer.node.middleware import wrapped

if TYPE_CHECKING:
    from gossamer.config import Experiment
    from gossamer.node import Node

__all__ = ["CodedNode", "MaskedNode", "MeasuredNode", "SampledNode", "WelcomingNode", "WireNode", "layers_of"]


def layers_of(
    experiment: Experiment,
    wrapped_ranks: Sequence[Sequence[int]] = (),
    *,
    sampled: bool,
    asks_neighbors: bool,
) -> list[Callable[[Node], Node]]:
    """What acts around each node, from the algorithm to the engine: functions of the node inside.

    Args:
        experiment: names the middlewares, the codec, secure aggregation and the wrappers.
        wrapped_ranks: the ranks at which each middleware acts.
        sampled: whether nodes sample their neighbours themselves.
        asks_neighbors: whether newcomers ask their neighbours for models."""
    layers: list[Callable[[Node], Node]] = [
        partial(wrapped, middleware=middleware, place=f"{middleware.name_of()}.{k}", ranks=frozenset(ranks))
        for k, (middleware, ranks) in enumerate(zip(experiment.middleware, wrapped_ranks, strict=True))
    ]
    if experiment.measures:
        layers.append(MeasuredNode)
    if asks_neighbors:
        layers.append(WelcomingNode)
    if sampled:
        layers.append(SampledNode)
    if experiment.secure_aggregation is not None:
        layers.append(MaskedNode)  # it encodes the models itself
    elif experiment.codec is not None:
        layers.append(CodedNode)
    if experiment.wrappers:
        layers.append(WireNode)
    return layers
