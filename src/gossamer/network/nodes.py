"""Parameters that select nodes, or give a value to each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import BeforeValidator, Field, NonNegativeInt, PlainSerializer, model_validator

from gossamer.config.registry import Component, build
from gossamer.errors import BadInput
from gossamer.randomness import generator


class SomeNodes(Component):
    """A selection of nodes: exactly one of ``count``, ``fraction`` and ``ranks``.

    Args:
        count: number of nodes.
        fraction: fraction of the nodes, rounded to the nearest number.
        ranks: these nodes.
        which: with ``count`` or ``fraction``: "drawn" by the experiment's seed, or the "first" ranks; refused with
            ``ranks``.
    """

    count: NonNegativeInt | None = None
    fraction: float | None = Field(default=None, ge=0, le=1)
    ranks: tuple[NonNegativeInt, ...] | None = None
    which: Literal["drawn", "first"] = "drawn"

    @model_validator(mode="after")
    def _one_of_three(self) -> SomeNodes:
        if [self.count, self.fraction, self.ranks].count(None) != 2:
            raise ValueError("exactly one of count, fraction and ranks")
        # A saved experiment has the default next to ranks, so only "first" is refused.
        if self.ranks is not None and self.which == "first":
            raise ValueError('which "first" with count or fraction, not with ranks')
        return self

    def chosen(self, nodes: int, seed: int, field: str) -> tuple[int, ...]:
        """The selected ranks, sorted.

        Args:
            nodes: number of nodes.
            seed: the experiment's seed.
            field: this component's field in the experiment, for errors and the key of the draw.

        Raises:
            BadInput: for more nodes than there are, or a rank out of range.
        """
        if self.ranks is not None:
            check_ranks(self.ranks, nodes, f"{field}.ranks")
            return tuple(sorted(set(self.ranks)))
        count = self.count if self.count is not None else int((self.fraction or 0) * nodes + 0.5)
        if count > nodes:
            raise BadInput(f"{field}.count: {count} of {nodes} nodes; accepted: 0 to {nodes}")
        if self.which == "first":
            return tuple(range(count))
        drawn = generator(seed, f"{field}.stragglers").choice(nodes, count, replace=False)
        return tuple(sorted(int(rank) for rank in drawn))


def check_ranks(ranks: Iterable[int], nodes: int, field: str) -> None:
    """Check that ranks are those of nodes.

    Raises:
        BadInput: naming the field and the first rank out of range.
    """
    for rank in ranks:
        if rank >= nodes:
            raise BadInput(f"{field}: node {rank} of {nodes} nodes; accepted: ranks 0 to {nodes - 1}")


def for_each(
    value: float | Sequence[float] | None, nodes: int, field: str, none: float = np.inf
) -> Float[np.ndarray, " nodes"]:
    """A value for each node: the same for all, or one of a list each.

    Args:
        value: of the experiment's field.
        nodes: number of nodes.
        field: the field, for errors.
        none: the value that null stands for.

    Raises:
        BadInput: for a list of another length than the number of nodes.
    """
    if isinstance(value, Sequence):
        if len(value) != nodes:
            raise BadInput(
                f"{field}: {len(value)} values for {nodes} nodes; accepted: one value, or a list of {nodes}"
            )
        return np.array(value, dtype=np.float64)
    return np.full(nodes, none if value is None else value, dtype=np.float64)


def nested_component(kind: str) -> tuple[BeforeValidator, PlainSerializer]:
    """The pydantic annotations of a field ``base`` that holds another component of a kind."""

    def validate(value: Any, info: Any) -> Any:  # info is a ValidationInfo
        with nested(kind):
            return build(kind, value, info.context)

    return BeforeValidator(validate), PlainSerializer(lambda base: base.spec())


@contextmanager
def nested(kind: str) -> Iterator[None]:
    """Rename ``kind.x`` in errors to ``kind.base.x``: for a component inside another one."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(re.sub(rf"^{kind}\b", f"{kind}.base", line) for line in error.problems)) from None
