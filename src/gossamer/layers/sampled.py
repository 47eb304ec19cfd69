"""Neighbours that a node samples itself, in place of a graph."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Literal

from gossamer.node import Node
from gossamer.node.middleware import Layer
from gossamer.topology import Graph
from gossamer.topology.cyclon import TAG


class SampledNode(Layer):
    """A node with a peer sampler."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        sampler = self._setup.topology.sampler(node, self._host)
        assert sampler is not None, "the topology samples"
        self.sampler = sampler
        self._runtime.services[TAG] = sampler.deliver

    def background(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self.sampler.run(),)

    def round_counted(self, rounds: int) -> None:
        self.sampler.round_ended(rounds)

    async def neighbors(
        self, r: int | None = None, direction: Literal["both", "in", "out"] = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        if layer is not None:
            return await self.node.neighbors(r, direction, layer)
        return self.sampler.neighbors(self.round if r is None else r, direction)

    def mixing_weights(self, r: int | None = None) -> dict[int, float]:
        accepted = "1 / (1 + n) for each of n models that have arrived"
        raise ValueError(f"node.mixing_weights with sampled neighbours; accepted: {accepted}")

    def topology(self, r: int | None = None) -> Graph:
        raise ValueError('node.topology with sampled neighbours; accepted: neighbors(r, "out")')

    @property
    def view(self) -> tuple[int, ...]:
        return self.sampler.view
