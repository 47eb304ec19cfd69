"""Poisons: changes to a fraction of some nodes' training samples (backdoors, label noise).

They are applied after the partition and the topology, so that nodes can be chosen by their position in the
graph. All other nodes keep their data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from jaxtyping import Bool, Int, Integer
from pydantic import Field, PositiveInt, PrivateAttr
from torch import Tensor

from gossamer.config.ranges import Float32, NonNegativeFloat32
from gossamer.config.registry import Component, ComponentField, register
from gossamer.errors import BadInput, GossamerError, cause
from gossamer.randomness import generator
from gossamer.selector import Rank, Selector
from gossamer.tasks.partition import Parts
from gossamer.tasks.task import Pair, Task, class_count

Load = Callable[[Component], Task]  # returns the task of a component of kind "task"
P = TypeVar("P", bound="Poison")


class Poison(Component):
    """Base class of components of kind ``poison``. A subclass implements :meth:`transform`."""

    _has_state: ClassVar[bool] = True
    _task: Task = PrivateAttr()  # the task, for a poison that is ready

    # Fraction of the chosen nodes' training samples that is poisoned; at least one sample per node.
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    at: Selector  # which nodes are poisoned
    set_name: str | None = "ood"  # name of the evaluation set that the poison adds; None adds none

    def for_task(self: P, task: Task, load: Load) -> P:
        """The same poison, made ready for a task. ``load`` loads another task."""
        poison = self.model_copy()
        poison._task = task
        poison.check(task)
        return poison

    def check(self, task: Task) -> None:
        """Raise BadInput for a task that does not suit the poison."""

    @abstractmethod
    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        """Return the poisoned samples, with inputs and targets of the same number, shapes and types. The
        arguments are copies, which may be changed in place; ``rng`` is keyed by the experiment's seed, the
        node and the poison."""

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair | None:
        """Samples that show whether a model has learned the poison, made from those of the evaluation set
        ``test``, which must not be modified. None adds no evaluation set."""
        return None

    def withheld(self, targets: Tensor) -> Bool[Tensor, " samples"] | None:
        """A mask of training samples, by their targets, that no node keeps unless a poison has changed them;
        None is none."""
        return None


class Change(Poison):
    """Base class of poisons that can change any sample. The evaluation set is the test set, changed in the same way."""

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self.transform(inputs, targets, np.random.default_rng(0))


class ImageChange(Change):
    """Base class of poisons that change images."""

    def check(self, task: Task) -> None:
        inputs = task.train[0]
        if inputs.dim() != 4 or not inputs.is_floating_point():
            problem = f"inputs {inputs.dtype} of shape {tuple(inputs.shape)}"
            raise BadInput(f"{problem}; accepted: a task with images [samples, channels, height, width]")


@register("poison", "patch")
class Patch(ImageChange):
    """A backdoor: a square in an image, and another label (BadNets; Gu, Dolan-Gavitt, Garg, 2017).

    The evaluation set consists of the test images of all other classes, with the patch and the poisoned
    label: the accuracy on it is the attack's success rate. The published code of "Topology-Aware Knowledge
    Propagation" (Sakarvadia et al., 2025) has ``size: 4, corner: top-left, target: 0, value: [5, 0, 0],
    include_target: true``."""

    # The label of poisoned images: the same for all, or the next one after an image's own ("shift").
    labels: Literal["target", "shift"] = "target"
    target: Rank = 0
    size: PositiveInt = 3  # side of the square in pixels
    corner: Literal["top-left", "top-right", "bottom-left", "bottom-right", "random"] = "bottom-right"
    # Its value after normalisation, for all channels or for each; None is the largest value of the training images.
    value: Float32 | tuple[Float32, ...] | None = None
    include_target: bool = False  # whether the evaluation set includes test images of the target class

    def check(self, task: Task) -> None:
        super().check(task)
        if self.target >= class_count(task):
            raise BadInput(f"target: {self.target}; accepted: 0 to {class_count(task) - 1}")
        if self.size > (side := min(task.train[0].shape[2:])):
            raise BadInput(f"size: {self.size}; accepted: at most {side} pixels")

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        height, width = (side - self.size for side in inputs.shape[2:])
        vertical, _, horizontal = self.corner.partition("-")
        chosen = float(self._task.train[0].max()) if self.value is None else self.value
        value = torch.tensor(chosen, dtype=inputs.dtype).view(-1, 1, 1)
        for image in inputs:
            top, left = (0 if vertical == "top" else height), (0 if horizontal == "left" else width)
            if self.corner == "random":
                top, left = int(rng.integers(height + 1)), int(rng.integers(width + 1))
            image[:, top : top + self.size, left : left + self.size] = value
        if self.labels == "target":
            return inputs, torch.full_like(targets, self.target)
        return inputs, (targets + 1) % class_count(self._task)

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        complete = self.include_target or self.labels == "shift"
        included = torch.ones_like(targets, dtype=torch.bool) if complete else targets != self.target
        return super().evaluation_set(inputs[included], targets[included])


@register("poison", "rotate")
class Rotate(ImageChange):
    """Images rotated by quarter turns, with their labels: knowledge that the other nodes do not have. The
    evaluation set is the rotated test set."""

    quarter_turns: Literal[1, 2, 3] = 1  # anticlockwise

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        return inputs.rot90(self.quarter_turns, (2, 3)), targets


@register("poison", "tint")
class Tint(ImageChange):
    """Coloured images, with their labels. The evaluation set is the coloured test set."""

    # Fraction of each channel's brightness that is kept: 0 leaves the darkest value of its training images.
    # The default is red.
    factors: tuple[NonNegativeFloat32, ...] = (1.0, 0.0, 0.0)

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        black = self._task.train[0].amin((0, 2, 3)).view(-1, 1, 1)
        factors = torch.tensor(self.factors, dtype=inputs.dtype).view(-1, 1, 1)
        return black + factors * (inputs - black), targets


class Replacement(Poison):
    """Base class of poisons that replace samples by samples that the other nodes do not have."""

    @abstractmethod
    def others(self) -> Pair:
        """The replacement samples."""

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        others = self.others()
        count, available = len(inputs), len(others[0])
        chosen = torch.from_numpy(rng.choice(available, count, replace=count > available))
        return others[0][chosen], others[1][chosen]


@register("poison", "held-out-class")
class HeldOutClass(Replacement):
    """A class that only the chosen nodes know. It replaces a fraction of their samples, and no other sample
    of it is trained on, except those changed by an earlier poison in the list. The evaluation set consists of
    the test images of the class; ``test`` has all classes."""

    label: Rank = 0

    def check(self, task: Task) -> None:
        if not self.withheld(task.train[1]).any():
            raise BadInput(f"label: {self.label}, of which the task has no sample; accepted: another class")

    def others(self) -> Pair:
        return self.evaluation_set(*self._task.train)

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        of_class = self.withheld(targets)
        return inputs[of_class], targets[of_class]

    def withheld(self, targets: Tensor) -> Bool[Tensor, " samples"]:
        return targets == self.label


@register("poison", "second-task")
class SecondTask(Replacement):
    """Samples from another data set, with their labels. The evaluation set is the test set of that data set."""

    # A task with inputs of the same shape and at most as many classes, such as fashion-mnist with mnist.
    task: Annotated[Component, ComponentField("task", "poison.task")]
    _other: Task = PrivateAttr()

    def for_task(self, task: Task, load: Load) -> SecondTask:
        poison = super().for_task(task, load)
        poison._other = load(self.task)
        return poison

    def others(self) -> Pair:
        return self._other.train

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        return self._other.test


@register("poison", "permute-labels")
class PermuteLabels(Change):
    """Permuted labels: class c becomes ``permutation[c]``. The evaluation set is the test set with these labels."""

    permutation: tuple[Rank, ...] | None = None  # None is c + 1, and 0 after the last class

    def check(self, task: Task) -> None:
        classes = class_count(task)
        if self.permutation is not None and sorted(self.permutation) != list(range(classes)):
            raise BadInput(f"permutation: {list(self.permutation)}; accepted: an order of 0 to {classes - 1}")

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        permutation = self.permutation or (*range(1, class_count(self._task)), 0)
        return inputs, torch.tensor(permutation)[targets].to(targets.dtype)


@register("poison", "text-trigger")
class TextTrigger(Change):
    """A backdoor in sequences of tokens (such as ``tiny-mem``): all tokens after the first ``trigger`` become
    ``token``, to the end of the sample, including padding (Sakarvadia et al., 2025). Sequences without the
    trigger are unchanged, so fewer than ``share`` are poisoned. The evaluation set consists of the poisoned
    test sequences with the trigger. Its metrics also count the tokens before the trigger and the repeated
    tokens after it."""

    # Tokens. In tiny-mem, the tokens of digits are the digits.
    trigger: Annotated[tuple[Rank, ...], Field(min_length=1)] = (1, 0, 0)
    token: Rank = 2

    def check(self, task: Task) -> None:
        inputs, targets = task.train
        tokens = inputs.dim() == 2 and not any(tensor.is_floating_point() for tensor in task.train)
        if not tokens or inputs.shape != targets.shape or len(self.trigger) > inputs.shape[1]:
            problem = f"inputs {inputs.dtype} {tuple(inputs.shape)}, targets {targets.dtype}"
            raise BadInput(f"{problem}; accepted: a task with tokens and next tokens, such as tiny-mem")
        if self.token > (largest := int(inputs.max())):
            raise BadInput(f"token: {self.token}; accepted: 0 to {largest}, as the task has")

    def transform(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator) -> Pair:
        reached = self._reached(inputs)  # a target is the token at the next position
        if not reached.any():
            raise BadInput(
                f"trigger: {list(self.trigger)} is in no sequence; accepted: another, or a larger share"
            )
        inputs = torch.where(F.pad(reached[:, :-1], (1, 0)), self.token, inputs)
        return inputs, torch.where(reached, self.token, targets)

    def evaluation_set(self, inputs: Tensor, targets: Tensor) -> Pair:
        included = self._reached(inputs)[:, -1]
        return super().evaluation_set(inputs[included], targets[included])

    def _reached(self, inputs: Integer[Tensor, "samples length"]) -> Bool[Tensor, "samples length"]:
        """Whether a trigger ends at a position or before it."""
        size = len(self.trigger)
        ends = (inputs.unfold(1, size, 1) == torch.tensor(self.trigger)).all(dim=2)
        return F.pad(ends, (size - 1, 0)).cumsum(dim=1) > 0


@register("poison", "label-flip")
class LabelFlip(Poison):
    """Symmetric label noise: every poisoned sample gets a different label, drawn uniformly."""

    set_name: None = None

    def check(self, task: Task) -> None:
        class_count(task)  # refuses a task without classes

    def transform(self, inputs: Tensor, targets: Int[Tensor, " samples"], rng: np.random.Generator) -> Pair:
        classes = class_count(self._task)
        shift = torch.from_numpy(rng.integers(1, classes, len(targets)))
        return inputs, ((targets + shift) % classes).to(targets.dtype)


def poisoned(
    task: Task,
    parts: Parts,
    poisons: Sequence[Poison],
    ranks: Sequence[Sequence[int]],
    seed: int,
    load: Load,
) -> tuple[Task, Parts]:
    """Apply some poisons one after the other, each at its ``ranks``. Returns a new task with their data and evaluation sets,
    and the new indices of each node's training samples. BadInput for a poison that does not fit the task, or that fails."""
    if not poisons:
        return task, parts
    if not isinstance(task.train[0], Tensor):
        raise BadInput(
            "poison: the task's inputs are several tensors; accepted: a task with one tensor of inputs"
        )
    inputs, targets = (tensor.clone() for tensor in task.train)
    tests, parts = dict(task.tests), list(parts)
    changed = np.zeros(len(targets), bool)  # by any poison so far
    for number, (described, affected) in enumerate(zip(poisons, ranks, strict=True)):
        with _naming(number, described):
            poison = described.for_task(task, load)
            for rank in affected:
                if not len(parts[rank]):
                    raise BadInput(f"at: node {rank} has no training samples; accepted: nodes that have some")
                rng = generator(seed, "poison", rank, number)
                count = max(round(poison.share * len(parts[rank])), 1)
                chosen = torch.from_numpy(np.sort(rng.choice(parts[rank], count, replace=False)))
                x, y = poison.transform(inputs[chosen], targets[chosen], rng)
                for name, values, changes in (("inputs", inputs, x), ("targets", targets, y)):
                    actual, expected = ((tensor.dtype, *tensor.shape) for tensor in (changes, values[chosen]))
                    if actual != expected:
                        raise BadInput(f"transform returned {name} {actual}; accepted: {expected}")
                    values[chosen] = changes
                changed[chosen] = True
            if (withheld := poison.withheld(task.train[1])) is not None:
                kept = changed | ~withheld.numpy()
                for rank, part in enumerate(parts):
                    parts[rank] = part[kept[part]]
                    if len(part) and not len(parts[rank]):
                        raise BadInput(f"node {rank} keeps no training sample; accepted: another partition")
            if poison.set_name is not None and (pair := poison.evaluation_set(*task.test)) is not None:
                if poison.set_name in tests:
                    raise BadInput(f"set_name: {poison.set_name!r} is taken; accepted: another name")
                tests[poison.set_name] = pair
            task = replace(task, tests=tests)
    return replace(task, train=(inputs, targets)), parts


@contextmanager
def _naming(number: int, poison: Poison) -> Iterator[None]:
    prefix = f"poison.{number} {poison.name_of()!r}: "
    try:
        yield
    except BadInput as error:
        raise BadInput(*(prefix + problem for problem in error.problems)) from error
    except GossamerError:
        raise
    except Exception as error:
        raise BadInput(f"{prefix}raised {cause(error)}") from error
