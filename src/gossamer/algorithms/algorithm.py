"""The base of algorithms: the protocol that one node follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from gossamer.config.registry import Component
from gossamer.node import Node, Setting

LocalSteps = Annotated[int, Field(ge=1, le=1_000_000)]
"""Mini-batch steps between two communications; their batches are drawn at once."""


class Algorithm(Component):
    """One node's protocol: ordinary async Python over flat vectors.

    An algorithm object is frozen and shared by all nodes; its fields are its parameters in the experiment
    file. The memory of a node from round to round is in ``node.state``.

    Attributes:
        gathers: whether it waits for its neighbours with :meth:`Node.gather` (default); then it needs ``gather.timeout_s``
            on a network that loses messages.
        tolerates_loss: whether it may run on a network that loses messages (default).
        tolerates_sampling: whether it may run where neighbours are sampled (``cyclon``): it asks only for out-neighbours,
            neither for weights nor for the graph. Not the default.
        mixes_models: whether it takes weighted means of whole models, with :meth:`Node.mix` or with :meth:`Node.combine` and
            ``aggregate``, so that the experiment may name another ``aggregator``. Not the default.
        sums_suffice: whether all that it sends in a round is its model, once to each out-neighbour, and all that it does
            with others' models is to mix them with ``node.mixing_weights(r)``; then ``secure_aggregation`` can hide them.
            Not the default.
        sends_differences: whether what it sends as :class:`~gossamer.Model` are differences, encoded by
            :meth:`Node.compress`. Not the default.
        needs_every_message: whether a message that comes too late would leave nodes with different ideas of each other; then
            ``gather`` has to wait for all. Not the default.
        tolerates_absence: whether nodes may crash, leave, join and come back while it runs (default)."""

    gathers: ClassVar[bool] = True
    tolerates_loss: ClassVar[bool] = True
    tolerates_sampling: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = False
    sums_suffice: ClassVar[bool] = False
    sends_differences: ClassVar[bool] = False
    needs_every_message: ClassVar[bool] = False
    tolerates_absence: ClassVar[bool] = True
    _state_goes_to: ClassVar[str] = "local variables of run(), or node.state, which checkpoints keep"

    @abstractmethod
    async def run(self, node: Node) -> None:
        """The protocol of one node, until the stop rule ends ``node.rounds()``."""

    def check(self, setting: Setting) -> None:
        """Refuse what the algorithm can't be used with, before any work starts, by a BadInput that names the field, its value
        and what is accepted. The default accepts everything."""

    def message_limit(self, P: int, nodes: int) -> int:
        """The largest message that a node accepts, in bytes: the default allows two models and 64 KiB."""
        return 8 * P + 65536

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks that hold training data, ascending; the partition is over these. The default is all."""
        return tuple(range(nodes))

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks that the others can't do without. The default is none."""
        return ()

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks whose model is the algorithm's outcome: the ones that are evaluated. The default is all."""
        return tuple(range(nodes))

    def reaches_all(self) -> bool:
        """Whether any node may send to any other, whatever the topology. The default is no."""
        return False

    def sends_models(self) -> bool:
        """Whether it sends its models as :class:`~gossamer.Model`, for a codec to encode. The default is yes."""
        return True

    def sends_pieces(self) -> bool:
        """Whether the models that it sends are pieces of models, which only codecs that encode value by value can serve. The
        default is no."""
        return False

    def takes_back(self) -> bool:
        """Whether it cancels messages. The default is no."""
        return False


def participants(node: Node, purpose: str, r: int, candidates: Sequence[int], share: float) -> list[int]:
    """The ranks that take part in a round, at least one, ascending: drawn from a generator that all nodes share, so that
    each knows them without a message."""
    count = max(int(share * len(candidates) + 1e-9), 1)  # 2/49 of 49 is 2
    chosen = node.rng(purpose, r, shared=True).choice(candidates, count, replace=False)
    return sorted(int(rank) for rank in chosen)


MOST = 2**53
"""The largest number that a node takes from a peer; sums of such numbers can still be sent."""


def whole_number(value: object, least: int, said: str) -> int:
    """A number from a peer's message; ValueError for anything but a whole one from ``least`` to :data:`MOST`. (An infinite or
    negative one would distort every later mean.)"""
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{said} of a peer: got {value!r}; accepted: a whole number from {least} to {MOST}")
    return value
