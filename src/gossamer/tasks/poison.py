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


def _check_images(task: Task) -> None:
    inputs = task.train[0]
    if inputs.dim() != 4 or not inputs.is_floating_point():
        found = f"inputs {inputs.dtype} of shape {tuple(inputs.shape)}"
        raise BadInput(f"{found}; accepted: a task with images [samples, channels, height, width]")


@register("poison", "patch")
class Patch(Poison):
    """A backdoor: a square in an image, and another label (BadNets; Gu, Dolan-Gavitt, Garg, 2017).

    The evaluation set are the test images of all other classes with the patch and the poisoned label: the accuracy on it
    is the attack's success rate. The published code of "Topology-Aware Knowledge Propagation" (Sakarvadia et al., 2025) has
    ``size: 4, corner: top-left, target: 0, value: [5, 0, 0], include_target: true``."""

    # The label of poisoned images: the same for all, or the next one after an image's own ("shift").
    labels: Literal["target", "shift"] = "target"
    target: Rank = 0
    size: PositiveInt = 3  # side of the square in pixels
    corner: Literal["top-left", "top-right", "bottom-left", "bottom-right", "random"] = "bottom-right"
    # Its value as the model sees it, in all channels or in each; None is the largest of the training images.
    value: float | tuple[float, ...] | None = None
    include_target: bool = False  # whether test images of the target class are in the evaluation set
    classes: int | None = None  # number of classes; None is the task's

    def settled(self, task: Task) -> Poison:
        _check_images(task)
        inputs, classes = task.train[0], class_count(task)
        if self.size > min(inputs.shape[2:]):
            raise BadInput(f"size: {self.size}; accepted: at most {min(inputs.shape[2:])} pixels")
        if self.target >= classes:
            raise BadInput(f"target: {self.target}; accepted: 0 to {classes - 1}")
        value = float(inputs.max()) if self.value is None else self.value
        if isinstance(value, tuple) and len(value) != inputs.shape[1]:
            raise BadInput(
                f"value: {list(value)}; accepted: a number, or one for each of {inputs.shape[1]} channels"
            )
        return self.model_copy(update={"value": value, "classes": classes})

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        assert self.value is not None
        height, width = (side - self.size for side in inputs.shape[2:])
        vertical, _, horizontal = self.corner.partition("-")
        value = torch.tensor(self.value, dtype=inputs.dtype).view(-1, 1, 1)
        for image in inputs:
            top, left = (0 if vertical == "top" else height), (0 if horizontal == "left" else width)
            if self.corner == "random":
                top, left = int(rng.integers(height + 1)), int(rng.integers(width + 1))
            image[:, top : top + self.size, left : left + self.size] = value
        shifted = (targets + 1) % (self.classes or 1)
        return inputs, torch.full_like(targets, self.target) if self.labels == "target" else shifted

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        whole = self.include_target or self.labels == "shift"
        shown = torch.ones_like(targets, dtype=torch.bool) if whole else targets != self.target
        return self.transform(inputs[shown], targets[shown], np.random.default_rng(0))


@register("poison", "rotate")
class Rotate(Poison):
    """Images turned by quarters of a circle, with their labels: knowledge that the other nodes do not have. The evaluation
    set is the turned test set."""

    quarter_turns: Literal[1, 2, 3] = 1  # anticlockwise

    def settled(self, task: Task) -> Poison:
        _check_images(task)
        height, width = task.train[0].shape[2:]
        if height != width and self.quarter_turns != 2:
            raise BadInput(f"quarter_turns: {self.quarter_turns}, of {height} x {width} pixels; accepted: 2")
        return self

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        return inputs.rot90(self.quarter_turns, (2, 3)), targets

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        return inputs.rot90(self.quarter_turns, (2, 3)), targets


@register("poison", "permute-labels")
class PermuteLabels(Poison):
    """Other labels by a rule: class c becomes ``permutation[c]``. The evaluation set is the test set with these labels."""

    permutation: tuple[Rank, ...] | None = None  # None is c + 1, and 0 after the last class

    def settled(self, task: Task) -> Poison:
        classes = class_count(task)
        found = self.permutation or (*range(1, classes), 0)
        if sorted(found) != list(range(classes)):
            raise BadInput(f"permutation: {list(found)}; accepted: an order of 0 to {classes - 1}")
        return self.model_copy(update={"permutation": found})

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        return inputs, torch.tensor(self.permutation)[targets].to(targets.dtype)

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.transform(inputs, targets, np.random.default_rng(0))


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
