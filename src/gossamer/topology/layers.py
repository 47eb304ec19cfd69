"""Several named topologies over the same nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from gossamer.config.registry import build, register
from gossamer.errors import BadInput
from gossamer.topology.graph import Graph, union
from gossamer.topology.topology import Topology


@register("topology", "layers")
class Layers(Topology):
    """Named layers, each a topology with its own parameters, draws and weights; the graph is their union.

    An algorithm asks for a layer by name: ``node.neighbors(r, layer="near")``. Each layer has to be connected unless its
    own ``allow_disconnected`` is set. The union is directed if any layer is. The field ``weights`` applies to the union.

    Args:
        layers: name -> topology, at least one.
    """

    layers: dict[str, Topology] = Field(min_length=1)

    @field_validator("layers", mode="before")
    @classmethod
    def _build_layers(cls, value: Any, info: Any) -> Any:  # info is a ValidationInfo
        if not isinstance(value, dict):
            return value
        return {
            name: build("topology", layer, info.context, f"topology.layers.{name}")
            for name, layer in value.items()
        }

    @model_validator(mode="after")
    def _no_sampled_layer(self) -> Layers:
        for name, layer in self.layers.items():
            if layer.sampled:
                raise BadInput(
                    f"topology.layers.{name}: {layer.name_of()}; accepted: a topology with a graph"
                )
        return self

    @field_serializer("layers")
    def _layers_spec(self, layers: dict[str, Topology]) -> dict[str, Any]:
        return {name: layer.spec() for name, layer in layers.items()}

    def draw(self, nodes: int, rng: np.random.Generator, round: int) -> Graph:
        """The union of one draw of each layer, in order.

        A :class:`~gossamer.topology.TopologySchedule` does not call this: it keeps one schedule per layer, each with its
        own key, so that the graphs of a layer do not depend on the other layers.
        """
        return union([layer.draw(nodes, rng, layer.drawn_at(nodes, round)) for layer in self.layers.values()])

    def drawn_at(self, nodes: int, round: int) -> int:
        return round

    def cycle(self, nodes: int) -> int:
        return max(layer.cycle(nodes) for layer in self.layers.values())
