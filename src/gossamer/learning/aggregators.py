"""Aggregators: rules by which a node combines its own model with the received ones.

``Node.mix`` uses the experiment's ``aggregator``, which is the weighted mean by default. Robust aggregators
count every model once, regardless of its weight, but ignore models of weight 0 (such as the server's own in
``fedavg``). Their result stays close to the honest models even if up to f models come from Byzantine nodes,
which may send anything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.config.registry import Component, register
from gossamer.errors import BadInput
from gossamer.learning.mixing import Fresh, Mix, checked, combine, half, own_weight, sort_columns
from gossamer.messages.tags import Model, Part, Payload

Vector = Float[Tensor, " params"]
_ROUNDING = 1e-12  # a smaller remainder of 1 after all other weights counts as 0


class Aggregation(ABC):
    """What a rule may know of the aggregation that it carries out (:meth:`Aggregator.aggregate_with`).

    Attributes:
        rank: the node's number.
        round: the node's number of completed rounds.
        rounds: ``stop.rounds`` of the experiment; None if something else ends the run.
        ranks: the senders of the received models, ascending.
        weights: their weights, in this order.
        self_weight: the weight of the node's own model.
        memory: what must outlive a round, by name. The values must be payloads; checkpoints keep them."""

    rank: int
    round: int
    rounds: int | None
    ranks: tuple[int, ...]
    weights: tuple[float, ...]
    self_weight: float
    memory: dict[str, Payload]

    @abstractmethod
    def rng(self, purpose: str, *counters: int) -> np.random.Generator:
        """A new generator for the key (experiment seed, the aggregator, purpose, this rank, counters)."""

    @abstractmethod
    async def loss(self, model: Vector, batch: int | Sequence[int] | Literal["full"] = "full") -> float:
        """The mean loss of a model on training samples of the node: all of them, a batch of its stream by number, or some by
        position, as in :meth:`gossamer.Node.gradient`. It takes time on the node's clock as :meth:`gossamer.Node.evaluate`
        does: in a simulation, a third of a step for each batch of samples."""


class Aggregator(Component):
    """Base class of aggregators. A subclass implements :meth:`aggregate` or, to know more, :meth:`aggregate_with`;
    :attr:`least` if it needs several models, and :meth:`aggregate_models` if it treats parameters and buffers differently.

    A part of a model, as sent by sparsifying codecs, is filled with the node's own values, unless a subclass overrides
    :meth:`mix`."""

    @property
    def least(self) -> int:
        """The smallest number of models that can be aggregated, including the node's own."""
        return 1

    def aggregate(
        self, own: Vector, vectors: Sequence[Vector], weights: Sequence[float], self_weight: float
    ) -> Vector:
        """Combine a node's own vector and the received ones, in rank order, with their weights. The vectors
        must not be modified. It may be called in any thread."""
        raise NotImplementedError

    async def aggregate_with(
        self, aggregation: Aggregation, own: Vector, vectors: Sequence[Vector]
    ) -> Vector:
        """Combine as :meth:`aggregate` does, with everything that :class:`Aggregation` offers. It is called in place of
        :meth:`aggregate` by a class that overrides it; models with buffers come as one vector [P + B]. If something
        writes the node's model in the meantime, the change ``result - own`` is added."""
        raise NotImplementedError

    @property
    def informed(self) -> bool:
        """Whether the rule is :meth:`aggregate_with`."""
        return type(self).aggregate_with is not Aggregator.aggregate_with

    def aggregate_models(
        self, own: Model, models: Sequence[Model], weights: Sequence[float], self_weight: float
    ) -> Model:
        """Aggregate models with buffers. By default, :meth:`aggregate` combines parameters and buffers as one
        vector [P + B]."""
        joined = [model.flatten() for model in models]
        return own.unflatten(self.aggregate(own.flatten(), joined, weights, self_weight))

    def mix(self, step: Mix, fresh: Fresh) -> Any:
        """Aggregate a node's inbox, in vectors that ``fresh`` creates. ValueError for different lengths."""
        own, inbox = step.own, step.inbox
        ranks, share = sorted(inbox), own_share(step)
        weights = [step.weights[rank] for rank in ranks]
        if isinstance(own, Model):
            halves = [[self._whole(half(inbox[k], h), own[h], k) for k in ranks] for h in range(2)]
            mixed = self.aggregate_models(own, list(map(Model, *halves)), weights, share)
            return Model(*(self._filled(fresh, vector, own[h]) for h, vector in enumerate(mixed)))
        vectors = [self._whole(inbox[rank], own, rank) for rank in ranks]
        return self._filled(fresh, self.aggregate(own, vectors, weights, share), own)

    def _filled(self, fresh: Fresh, result: Tensor, own: Tensor) -> Tensor:
        check_shape(self, result, own)
        return fresh(len(own)).copy_(result)

    def _whole(self, vector: Any, own: Tensor, rank: int) -> Tensor:
        return checked(vector.over(own) if isinstance(vector, Part) else vector, own, rank)

    def received(self, own: Tensor | Model, inbox: Mapping[int, Any]) -> list[Tensor]:
        """The received vectors in rank order; models with buffers as one vector [P + B]. Errors are those of :meth:`mix`."""
        ranks = sorted(inbox)
        if not isinstance(own, Model):
            return [self._whole(inbox[rank], own, rank) for rank in ranks]
        halves = [[self._whole(half(inbox[k], h), own[h], k) for k in ranks] for h in range(2)]
        return [Model(*pair).flatten() for pair in zip(*halves, strict=True)]


def check_shape(aggregator: Aggregator, result: Tensor, own: Tensor) -> None:
    """ValueError for a result that has another shape than the node's own vector."""
    if result.shape != own.shape:
        problem = f"{aggregator.name_of()} returns a tensor of shape {tuple(result.shape)}"
        raise ValueError(f"aggregator: {problem}; accepted: {tuple(own.shape)}, as the node's own")


def own_share(step: Mix) -> float:
    """The weight of a node's own model. At 0, the model is ignored."""
    share = own_weight(step.inbox, step.weights, step.self_weight)
    return 0.0 if step.self_weight is None and abs(share) < _ROUNDING else share


@register("aggregator", "mean")
class Mean(Aggregator):
    """The weighted mean: x_i <- w_ii x_i + sum_j w_ij x_j."""

    def aggregate(
        self, own: Tensor, vectors: Sequence[Tensor], weights: Sequence[float], self_weight: float
    ) -> Tensor:
        inbox = dict(enumerate(vectors))
        mixed: Tensor = combine(own, inbox, dict(enumerate(weights)), self_weight, fresh=own.new_empty)
        return mixed


@register("aggregator", "deviation-mean")
class DeviationMean(Aggregator):
    """Per coordinate, a mean in which values farther from the weighted mean m count more, so that the knowledge
    of few nodes is not lost in the noise of the others. With d_j = x_j - m over the closed neighbourhood and
    a power q:

        x_i <- m + sum_j w_j |d_j|^q d_j / sum_j w_j |d_j|^q

    A power of 0 is the mean. With higher powers, the farthest value dominates, as when models are merged
    by largest magnitude (MagMax; Marczak et al., ECCV 2024). The result is between the smallest and the
    largest value. Of two values, the one with the smaller weight is farther from the mean and counts more, so
    unequal weights bring no benefit. The rule is the opposite of robust: a single attacker has more influence
    than under the mean. Buffers are averaged. The rule is gossamer's own; see
    docs/reproductions/topology-aware.md."""

    power: float = Field(default=2.0, ge=0, le=100)

    def aggregate(
        self, own: Tensor, vectors: Sequence[Tensor], weights: Sequence[float], self_weight: float
    ) -> Tensor:
        shares = own.new_tensor([self_weight, *weights])[:, None]
        models = torch.stack([own, *vectors])
        mean = (shares * models).sum(0)
        deviations = models - mean
        farthest = deviations.abs().amax(0)
        # Without a scale, powers would underflow or overflow. A scale that is a power of two changes no bit.
        scale = torch.where(farthest > 0, farthest / torch.frexp(farthest).mantissa, 1)
        pulls = shares * (deviations.abs() / scale).pow(self.power)
        total = pulls.sum(0)
        # Equal values have no deviation that could weight them.
        return torch.where(total > 0, mean + (pulls * deviations).sum(0) / total, mean)

    def aggregate_models(
        self, own: Model, models: Sequence[Model], weights: Sequence[float], self_weight: float
    ) -> Model:
        parameters = [model.parameters for model in models]
        buffers = [model.buffers for model in models]
        return Model(
            self.aggregate(own.parameters, parameters, weights, self_weight),
            Mean().aggregate(own.buffers, buffers, weights, self_weight),
        )


class _Unweighted(Aggregator):
    """Base class of aggregators that count every model once. A subclass implements :meth:`_aggregate`."""

    @abstractmethod
    def _aggregate(self, models: Float[Tensor, "models values"], P: int) -> Float[Tensor, " values"]:
        """Combine all models, the node's own first. The first P values are parameters, the others buffers."""

    def aggregate(
        self, own: Tensor, vectors: Sequence[Tensor], weights: Sequence[float], self_weight: float
    ) -> Tensor:
        return self._aggregate(self._counted([own, *vectors], [self_weight, *weights]), len(own))

    def aggregate_models(
        self, own: Model, models: Sequence[Model], weights: Sequence[float], self_weight: float
    ) -> Model:
        joined = self._counted([model.flatten() for model in (own, *models)], [self_weight, *weights])
        return own.unflatten(self._aggregate(joined, len(own.parameters)))

    def _counted(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> Float[Tensor, "models values"]:
        """The vectors with non-zero weights. ValueError if there are fewer than :attr:`least`."""
        if not all(map(math.isfinite, weights)):
            raise ValueError(f"aggregator: weights {weights}; accepted: finite numbers")
        counted = [vector for vector, weight in zip(vectors, weights, strict=True) if weight]
        if len(counted) < self.least:
            problem = f"{self.name_of()} got {len(counted)} models, the node's own included"
            raise ValueError(
                f"aggregator: {problem}; accepted: at least {self.least}, as from more neighbours"
            )
        return torch.stack(counted)


@register("aggregator", "coordinate-mean")
class CoordinateMean(_Unweighted):
    """Per coordinate, the plain mean of the available values: x_i[p] <- (x_i[p] + sum_j x_j[p]) / (1 + number
    of j that sent p). Parts of models are taken as they are."""

    def _aggregate(self, models: Tensor, P: int) -> Tensor:
        return models.mean(0)

    def mix(self, step: Mix, fresh: Fresh) -> Any:
        weights = {rank: float(step.weights[rank] != 0) for rank in step.inbox}
        self_weight = float(own_share(step) != 0)
        return combine(step.own, step.inbox, weights, self_weight, missing="renormalize", fresh=fresh)


@register("aggregator", "trimmed-mean")
class TrimmedMean(_Unweighted):
    """Per coordinate, the mean without the smallest and the largest values (Yin et al., "Byzantine-Robust Distributed
    Learning", ICML 2018, Definition 2): of n sorted values, the mean of those from b + 1 to n - b."""

    count: int | None = Field(default=None, ge=0)  # b
    # beta: b = floor(beta n) of the n available models, with at least one value left.
    share: float | None = Field(default=None, ge=0, lt=0.5)

    @model_validator(mode="after")
    def _exactly_one(self) -> TrimmedMean:
        if (self.count is None) == (self.share is None):
            problem = f"trimmed-mean with count {self.count} and share {self.share}"
            raise BadInput(f"aggregator: {problem}; accepted: exactly one of them")
        return self

    @property
    def least(self) -> int:
        return 2 * (self.count or 0) + 1

    def _aggregate(self, models: Tensor, P: int) -> Tensor:
        n = len(models)
        # A product such as 10 * 0.3 may round to just below a whole number, or up to one.
        by_share = min(int((self.share or 0) * n + 1e-9), (n - 1) // 2)
        return _middle(models, by_share if self.count is None else self.count)


@register("aggregator", "median")
class Median(_Unweighted):
    """Per coordinate, the median (Yin et al., ICML 2018, Definition 1). For an even number of values, it is
    the mean of the two middle ones."""

    def _aggregate(self, models: Tensor, P: int) -> Tensor:
        return _middle(models, (len(models) - 1) // 2)


def _middle(models: Float[Tensor, "models params"], trimmed: int) -> Float[Tensor, " params"]:
    """Per coordinate, the mean without the ``trimmed`` smallest and largest values. NaN counts as largest."""
    return sort_columns(models)[trimmed : len(models) - trimmed].mean(0)


@register("aggregator", "krum")
class Krum(_Unweighted):
    """Krum and Multi-Krum (Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017): of n models,
    the mean of the m with the lowest scores s(i) = sum_{i -> j} ||x_i - x_j||^2 over the n - f - 2 models j
    that are nearest to i. Ties go to the node's own model first, then to the lower rank. Distances are
    computed on parameters; the buffers are the mean of the selected models' buffers."""

    # f, the maximum number of Byzantine models; n has to be above 2 f + 2.
    byzantine: int = Field(ge=0)
    # m; 1 is Krum, more is Multi-Krum. At most n - f models can be selected.
    selected: int = Field(default=1, ge=1)

    @property
    def least(self) -> int:
        return max(2 * self.byzantine + 3, self.selected + self.byzantine)

    def _aggregate(self, models: Tensor, P: int) -> Tensor:
        x = models[:, :P]
        distances = torch.stack([(x - row).square().sum(1, dtype=torch.float64) for row in x])
        # Models with non-finite values are far from all others.
        nearest = distances.nan_to_num(torch.inf).fill_diagonal_(-1.0).sort(dim=1).values
        scores = nearest[:, 1 : len(models) - self.byzantine - 1].sum(1)
        return models[scores.sort(stable=True).indices[: self.selected].sort().values].mean(0)
