"""Partitions: splits of the training samples over the nodes. Each sample goes to at most one node; each node
gets at least one sample."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int
from pydantic import ConfigDict, Field, PositiveInt, field_validator

from gossamer.config.registry import Component, register
from gossamer.errors import BadInput, cause
from gossamer.randomness import generator
from gossamer.tasks.data import package
from gossamer.tasks.task import Task, class_count

log = logging.getLogger("gossamer")

Parts = list[Int[np.ndarray, " _"]]  # the indices of each node's training samples


class Partition(Component):
    """Base class of components of kind ``partition``. A subclass implements :meth:`split`."""

    # Fraction of each node's samples drawn for the node's own test set and not trained on; None: no such set.
    personal_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    @abstractmethod
    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        """The samples of each node, for 1 to ``task.samples`` nodes, in any order. :meth:`assign` sorts and
        checks them."""

    def assign(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        """The samples of each node: sorted, disjoint, non-empty int64 arrays of indices into ``task.train``.
        BadInput for a split that is impossible with this task and this number of nodes."""
        if not 1 <= nodes <= task.samples:
            raise BadInput(f"nodes: {nodes} for {task.samples} samples; accepted: 1 to {task.samples}")
        parts, subject = self.split(task, nodes, rng), f"partition {self.name_of()!r}"
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
        if len(parts) != nodes or not all(map(len, parts)):
            problem = f"{len(parts)} parts for {nodes} nodes, the smallest of {min(map(len, parts))} samples"
            raise BadInput(f"{subject}: {problem}; accepted: one per node, with at least one sample each")
        used = np.concatenate(parts)
        if used.min() < 0 or used.max() >= task.samples or np.bincount(used).max() > 1:
            problem = "samples that do not exist, or that two nodes have"
            raise BadInput(f"{subject}: {problem}; accepted: 0 to {task.samples - 1}, each once")
        if unused := task.samples - len(used):
            message = "partition %s: %d of %d training samples are left out"
            log.warning(message, self.name_of(), unused, task.samples)
        return parts

    def held_out(self, parts: Parts, seed: int) -> tuple[Parts, Parts]:
        """The training samples that each node keeps, and the samples of its own test set, both ascending and
        non-empty. BadInput for a node with a single sample. (A node without samples gets neither.)"""
        if self.personal_fraction is None:
            return parts, [part[:0] for part in parts]
        kept, personal = [], []
        for rank, part in enumerate(parts):
            if len(part) == 1:
                problem = f"node {rank} has one sample"
                raise BadInput(f"partition.personal_fraction: {problem}; accepted: two or more")
            count = min(max(round(self.personal_fraction * len(part)), 1), max(len(part) - 1, 0))
            order = generator(seed, "personal-test-set", rank).permutation(part)
            kept.append(np.sort(order[count:]))
            personal.append(np.sort(order[:count]))
        return kept, personal

    def _labels(self, task: Task) -> Int[np.ndarray, " samples"]:
        labels = task.labels()
        targets = task.groups if labels is None else labels
        if targets is None:
            problem = "the task's targets are not class numbers; accepted: a task with classes or groups, or iid, sizes"
            raise BadInput(f"partition {self.name_of()!r}: {problem}")
        return targets.numpy(force=True)


@register("partition", "iid")
class IID(Partition):
    """Independent, identically distributed parts: a random split into parts whose sizes differ by at most one."""

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        return np.array_split(rng.permutation(task.samples), nodes)


@register("partition", "shards")
class Shards(Partition):
    """A few shards of label-sorted data per node (McMahan et al., AISTATS 2017, Section 3: two).

    The samples, sorted by label (in random order within a label), are cut into ``nodes * per_node`` shards,
    whose sizes differ by at most one. The shards are assigned to nodes at random."""

    per_node: PositiveInt = 2  # shards per node

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        labels, shards = self._labels(task), nodes * self.per_node
        if shards > task.samples:
            problem = f"{self.per_node} for {nodes} nodes and {task.samples} training samples"
            raise BadInput(f"partition.per_node: {problem}; accepted: at most {task.samples // nodes}")
        shuffled = rng.permutation(task.samples)
        pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], shards)
        assignment = rng.permutation(shards).reshape(nodes, self.per_node)
        return [np.concatenate([pieces[shard] for shard in row]) for row in assignment]


@register("partition", "dirichlet")
class Dirichlet(Partition):
    """Label skew from a Dirichlet distribution: a small ``alpha`` gives few labels per node, a large
    ``alpha`` is close to IID.

    For each class c, shares p_c ~ Dirichlet_nodes(alpha, ..., alpha) are drawn, and node i gets the share p_ci of the
    samples of c (Yurochkin et al., ICML 2019, Section 4; Li et al., ICDE 2022, Section IV-A), so nodes' sizes differ too.
    Hsu, Qi, Brown (arXiv:1909.06335), to whom most code attributes this, draw the class mix of equally large clients.

    There is only one draw. Nodes below ``min_samples`` then get the missing samples one by one, each from the
    largest class of the node that has the most samples at that time (the lowest rank in a tie). Every sample
    is used."""

    alpha: Annotated[float, Field(ge=1e-9, le=1e9)]  # concentration: the smaller, the more skewed
    min_samples: PositiveInt = 1  # minimum number of samples per node

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        labels = self._labels(task)
        if nodes * self.min_samples > task.samples:
            problem = f"{self.min_samples} for {nodes} nodes and {task.samples} training samples"
            raise BadInput(f"partition.min_samples: {problem}; accepted: at most {task.samples // nodes}")
        _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        shares = rng.dirichlet(np.full(nodes, self.alpha), size=len(sizes))
        # Rounding cumulative shares assigns every sample, and keeps each count within one of its share.
        ends = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0).T
        _top_up(counts, self.min_samples)

        by_class = []
        for c in range(len(sizes)):
            members = rng.permutation(np.flatnonzero(class_of == c))
            by_class.append(np.split(members, np.cumsum(counts[:-1, c])))
        return [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]


def _top_up(counts: Int[np.ndarray, "nodes classes"], minimum: int) -> None:
    """Move single samples from the largest nodes to those with fewer than ``minimum``, in place."""
    totals = counts.sum(axis=1)
    for node in np.flatnonzero(totals < minimum):
        for _ in range(minimum - int(totals[node])):
            # As long as a node lacks samples and there are enough in total, the largest node has some to spare.
            donor = totals.argmax()
            largest = counts[donor].argmax()
            counts[donor, largest] -= 1
            counts[node, largest] += 1
            totals[donor] -= 1


@register("partition", "natural")
class Natural(Partition):
    """By owner in the data (writers, speakers, users; Caldas et al., LEAF, 2018): node i gets the i-th owner
    id. If there are more owners than nodes, whole owners are assigned at random, evenly."""

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        if task.groups is None:
            accepted = "a task with groups, such as hub with task.owner"
            raise BadInput(f"partition 'natural': the task has no owner ids; accepted: {accepted}")
        owners, owner_of = np.unique(task.groups.numpy(force=True), return_inverse=True)
        if len(owners) < nodes:
            problem = f"{nodes} for {len(owners)} owners, with partition natural"
            raise BadInput(f"nodes: {problem}; accepted: at most {len(owners)}")
        order = np.arange(nodes) if len(owners) == nodes else rng.permutation(len(owners))
        node_of = np.empty(len(owners), np.int64)
        for rank, group in enumerate(np.array_split(order, nodes)):
            node_of[group] = rank
        ranks = node_of[owner_of]
        return np.split(np.argsort(ranks, kind="stable"), np.cumsum(np.bincount(ranks, minlength=nodes))[:-1])


@register("partition", "sizes")
class Sizes(Partition):
    """A random split: node i gets ``fractions[i]`` of the samples, to within one. Remaining samples are left out."""

    # One per node, each above 0, with a sum of at most 1.
    fractions: tuple[Annotated[float, Field(gt=0, le=1)], ...]

    @field_validator("fractions")
    @classmethod
    def _sum_to_one_at_most(cls, fractions: tuple[float, ...]) -> tuple[float, ...]:
        if sum(fractions) > 1 + 1e-9:
            raise ValueError(f"a sum of at most 1 (this is {sum(fractions):g})")
        return fractions

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        if (count := len(self.fractions)) != nodes:
            raise BadInput(f"partition.fractions: {count} for {nodes} nodes; accepted: one per node")
        # Rounded after cumulation, so that three thirds leave no sample out.
        ends = np.rint(np.cumsum(self.fractions) * task.samples).astype(np.int64).clip(max=task.samples)
        return np.split(rng.permutation(task.samples)[: ends[-1]], ends[:-1])


@register("partition", "flower")
class Flower(Partition):
    """A partitioner of the package ``flwr-datasets``, if it is installed, with its own parameters.

    ``partition_by`` is ``label`` (class numbers) or ``owner``. ``num_partitions`` is the number of nodes, and
    ``seed`` follows the experiment's. Samples are shuffled first, as in Flower's ``FederatedDataset``."""

    model_config = ConfigDict(extra="allow")
    partitioner: str  # the name of the partitioner's class, such as DirichletPartitioner

    def split(self, task: Task, nodes: int, rng: np.random.Generator) -> Parts:
        partitioners = package("flwr_datasets", "flwr-datasets", "flwr-datasets").partitioner
        datasets = package("datasets", "flwr-datasets")
        datasets.disable_progress_bars()
        order = rng.permutation(task.samples)
        columns: dict[str, Any] = {"index": order}
        for name, values in (("label", task.labels()), ("owner", task.groups)):
            if values is not None:
                columns[name] = values.numpy(force=True)[order]
        offered = {"num_partitions": nodes, "seed": int(rng.integers(2**31))}
        try:
            cls = getattr(partitioners, self.partitioner)
            accepted = {name: offered[name] for name in offered if name in inspect.signature(cls).parameters}
            partitioner = cls(**{**accepted, **(self.model_extra or {})})
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            count = partitioner.num_partitions
            return [np.asarray(partitioner.load_partition(rank)["index"]) for rank in range(count)]
        except Exception as error:  # flwr-datasets raises many kinds of errors
            problem = f"{self.partitioner!r}: {cause(error)}"
            raise BadInput(
                f"partition.partitioner: {problem}; accepted: a partitioner of flwr-datasets"
            ) from error


def label_counts(task: Task, parts: Parts) -> Int[np.ndarray, "nodes classes"] | None:
    """The number of samples of each class at each node, or None if the targets are not classes."""
    targets = task.labels()
    if targets is None:
        return None
    if task.classes is None and not 0 <= int(targets.min()) <= int(targets.max()) < task.samples:
        return None
    labels, classes = targets.numpy(force=True), class_count(task)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
