"""Mixing by aggregators that know more than the models (:meth:`gossamer.learning.Aggregator.aggregate_with`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from gossamer.learning.aggregators import Aggregation, Aggregator, check_shape, own_share
from gossamer.learning.mixing import Mix
from gossamer.messages.tags import Model, Payload
from gossamer.randomness import draws_of

if TYPE_CHECKING:
    from gossamer.node.node import Node

MEMORY = "~aggregator"
"""Key in a node's state for the memory of its aggregator."""


class NodeAggregation(Aggregation):
    """What an aggregator may know of one mixing at a node."""

    def __init__(self, node: Node, step: Mix) -> None:
        ranks = tuple(sorted(step.inbox))
        self._node = node
        self.rank, self.round, self.rounds = node.rank, node.round, node._setup.experiment.stop.rounds
        self.ranks, self.weights = ranks, tuple(float(step.weights[rank]) for rank in ranks)
        self.self_weight = own_share(step)

    @property
    def memory(self) -> dict[str, Payload]:  # type: ignore[override]
        memory: dict[str, Payload] = self._node.state.setdefault(MEMORY, {})
        return memory

    def rng(self, purpose: str, *counters: int) -> np.random.Generator:
        with draws_of("aggregator"):
            return self._node.rng(purpose, *counters)

    async def loss(self, model: Tensor, batch: int | Sequence[int] | Literal["full"] = "full") -> float:
        node = self._node
        size = node._setup.layout.size
        buffers = model[size:] if len(model) > size else node.buffers
        return await node._own.loss(node.step, Model(node._host.store(model[:size]), buffers), batch)


async def aggregated(
    node: Node,
    aggregator: Aggregator,
    own: Tensor | Model,
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None,
) -> Any:
    """The aggregate of a vector or a model and the received ones, of the same type as ``own``. Errors are those of
    :func:`gossamer.learning.mixing.combine`."""
    step = Mix(own, inbox, weights, self_weight, None, aggregator)
    vectors = aggregator.received(own, inbox)
    flat = own.flatten() if isinstance(own, Model) else own
    result = await aggregator.aggregate_with(NodeAggregation(node, step), flat, vectors)
    check_shape(aggregator, result, flat)
    return own.unflatten(result) if isinstance(own, Model) else result


async def mix_informed(
    node: Node,
    aggregator: Aggregator,
    inbox: Mapping[int, Any],
    weights: Mapping[int, float],
    self_weight: float | None,
    *,
    whole: bool,
) -> None:
    """Mix the node's own model. It is written as a computation is: assigned if nothing has written it meanwhile, and else
    changed by what mixing has changed."""
    writes, start = node._own.parameters.writes, node.model
    own = start if whole else start.parameters
    mixed = await aggregated(node, aggregator, own, inbox, weights, self_weight)
    result = mixed if whole else Model(mixed, start.buffers)
    if node._own.parameters.writes != writes:
        result = node.model + (result - start)
    if whole:
        node.buffers = result.buffers
    node.parameters = result.parameters
    node._runtime.shown.mixed(node._own.snapshot())
