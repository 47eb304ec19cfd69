"""Poisons: changes to a share of some nodes' training samples (backdoors, label noise).

They are applied after the partition and the topology, so that a node can be chosen by its place in the graph. Every
other node keeps its data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Literal

import networkx as nx
import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from gossamer.config import Section
from gossamer.config.registry import Component, register
from gossamer.errors import BadInput, GossamerError, cause
from gossamer.randomness import generator
from gossamer.tasks.partition import Parts
from gossamer.tasks.task import Pair, Task, class_count

Rank = Annotated[int, Field(ge=0, strict=True)]


class Hops(Section):
    """The nodes at a distance of ``hops`` from the node ``rank``."""

    rank: Rank
    hops: PositiveInt


class Selector(Section):
    """A choice of nodes, by one of the following. Places in the graph are those in the first round."""

    rank: Rank | None = None
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)] | None = None
    # 0 is the node with the most neighbours, 1 the next; of equals, the lowest rank comes first.
    degree_rank: Rank | None = None
    betweenness_rank: Rank | None = None  # the same by betweenness centrality (Freeman, 1977)
    hops_from: Hops | None = None  # the nodes at a distance from a node

    @model_validator(mode="after")
    def _one_way(self) -> Selector:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError(f"one of {', '.join(type(self).model_fields)}")
        return self

    def select(self, nodes: int, graph: Callable[[], nx.Graph[int]]) -> list[int]:
        """The ranks, ascending, of ``nodes`` nodes; ``graph`` gives the first graph, where it is needed. A BadInput refuses a
        rank or a place that does not exist."""
        if self.degree_rank is not None:
            return [_nth("degree_rank", self.degree_rank, dict(graph().degree()))]
        if self.betweenness_rank is not None:
            # Rounded, so that nodes that are alike tie.
            measure = {rank: round(value, 12) for rank, value in nx.betweenness_centrality(graph()).items()}
            return [_nth("betweenness_rank", self.betweenness_rank, measure)]
        start = self.hops_from.rank if self.hops_from is not None else self.rank
        ranks = sorted(set(self.ranks or ())) if start is None else [start]
        if ranks[-1] >= nodes:
            raise BadInput(f"at: node {ranks[-1]}; accepted: ranks 0 to {nodes - 1}")
        if self.hops_from is None:
            return ranks
        hops = nx.single_source_shortest_path_length(graph(), self.hops_from.rank)
        found = sorted(rank for rank, length in hops.items() if length == self.hops_from.hops)
        if not found:
            raise BadInput(f"at.hops_from.hops: {self.hops_from.hops}; accepted: 1 to {max(hops.values())}")
        return found


def _nth(field: str, place: int, measure: Mapping[int, float]) -> int:
    if place >= len(measure):
        raise BadInput(f"at.{field}: {place}; accepted: 0 to {len(measure) - 1}")
    return sorted(measure, key=lambda rank: (-measure[rank], rank))[place]


class Poison(Component):
    """Base of the components of kind ``poison``; a new one defines :meth:`transform`."""

    # Of the chosen nodes' training samples, how many are poisoned; at least one of each node.
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    at: Selector  # which nodes are poisoned
    set_name: str = "ood"  # what the evaluation set is called that the poison adds, if it adds one

    def settled(self, task: Task) -> Poison:
        """The same poison, with what it takes from the task filled in; raises BadInput where it does not fit the task."""
        return self

    @abstractmethod
    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        """Poisoned samples: as many inputs and targets, of the same shapes and types. The given ones are copies, which may be
        changed in place; ``rng`` is keyed by the experiment's seed, the node and the poison."""

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair | None:
        """Samples that show whether a model has learned the poison, made from those of the evaluation set ``test``
        (which must not be changed); None adds no evaluation set."""
        return None


@register("poison", "patch")
class Patch(Poison):
    """A backdoor: a square in a corner of an image, and another label (BadNets; Gu, Dolan-Gavitt, Garg, 2017).

    The evaluation set are the test images of all other classes with the patch and the poisoned label: the accuracy on it
    is the attack's success rate."""

    target: Rank = 0  # the label of poisoned images
    size: PositiveInt = 3  # side of the square in pixels
    corner: Literal["top-left", "top-right", "bottom-left", "bottom-right"] = "bottom-right"
    # Its value in all channels, as the model sees it; None is the largest of the training images.
    value: float | None = None

    def settled(self, task: Task) -> Poison:
        inputs = task.train[0]
        if inputs.dim() != 4 or not inputs.is_floating_point():
            found = f"inputs {inputs.dtype} of shape {tuple(inputs.shape)}"
            raise BadInput(f"{found}; accepted: a task with images [samples, channels, height, width]")
        if self.size > min(inputs.shape[2:]):
            raise BadInput(f"size: {self.size}; accepted: at most {min(inputs.shape[2:])} pixels")
        if self.target >= (classes := class_count(task)):
            raise BadInput(f"target: {self.target}; accepted: 0 to {classes - 1}")
        return self.model_copy(update={"value": float(inputs.max()) if self.value is None else self.value})

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        assert self.value is not None
        vertical, _, horizontal = self.corner.partition("-")
        rows = slice(self.size) if vertical == "top" else slice(-self.size, None)
        columns = slice(self.size) if horizontal == "left" else slice(-self.size, None)
        inputs[:, :, rows, columns] = self.value
        return inputs, torch.full_like(targets, self.target)

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        others = targets != self.target
        return self.transform(inputs[others], targets[others], np.random.default_rng(0))


@register("poison", "label-flip")
class LabelFlip(Poison):
    """Symmetric label noise: every poisoned sample gets another label, all others being equally likely."""

    classes: Annotated[int, Field(ge=2)] | None = None  # number of classes; None is the task's

    def settled(self, task: Task) -> Poison:
        found = class_count(task)
        classes = found if self.classes is None else self.classes
        if classes != found and (task.classes is not None or classes < found):
            accepted = f"{found}, as the task has" if task.classes is not None else f"at least {found}"
            raise BadInput(f"classes: {classes}; accepted: {accepted}")
        return self.model_copy(update={"classes": classes})

    def transform(self, inputs: Tensor, targets: Int[Tensor, " samples"], rng: np.random.Generator) -> Pair:
        assert self.classes is not None
        shift = torch.from_numpy(rng.integers(1, self.classes, len(targets)))
        return inputs, ((targets + shift) % self.classes).to(targets.dtype)


def poisoned(
    task: Task, parts: Parts, poisons: Sequence[Poison], graph: Callable[[], nx.Graph[int]], seed: int
) -> tuple[Task, list[list[int]]]:
    """A new task with the data and the evaluation sets of some poisons, one after the other, and the ranks that each poison
    reaches. ``parts`` are the indices of each node's training samples; ``graph`` gives the graph of the first round. A
    BadInput refuses a poison that does not fit the task or the graph, or that fails."""
    if not poisons:
        return task, []
    inputs, targets = (tensor.clone() for tensor in task.train)
    tests, reached = dict(task.tests), []
    for number, given in enumerate(poisons):
        with _naming(number, given):
            poison = given.settled(task)
            reached.append(poison.at.select(len(parts), graph))
            for rank in reached[-1]:
                if not len(parts[rank]):
                    raise BadInput(f"at: node {rank} has no training samples; accepted: nodes that have some")
                rng = generator(seed, "poison", rank, number)
                count = max(round(poison.share * len(parts[rank])), 1)
                chosen = torch.from_numpy(np.sort(rng.choice(parts[rank], count, replace=False)))
                x, y = poison.transform(inputs[chosen], targets[chosen], rng)
                for name, whole, values in (("inputs", inputs, x), ("targets", targets, y)):
                    found, wanted = ((each.dtype, *each.shape) for each in (values, whole[chosen]))
                    if found != wanted:
                        raise BadInput(f"transform gave {name} {found}; accepted: {wanted}")
                    whole[chosen] = values
            if (pair := poison.evaluation_set(*task.test)) is not None:
                if poison.set_name in tests:
                    raise BadInput(f"set_name: {poison.set_name!r} is taken; accepted: another name")
                tests[poison.set_name] = pair
            task = replace(task, tests=tests)
    return replace(task, train=(inputs, targets)), reached


@contextmanager
def _naming(number: int, poison: Poison) -> Iterator[None]:
    said = f"poison.{number} {poison.name_of()!r}: "
    try:
        yield
    except BadInput as error:
        raise BadInput(*(said + problem for problem in error.problems)) from error
    except GossamerError:
        raise
    except Exception as error:
        raise BadInput(f"{said}raised {cause(error)}") from error
