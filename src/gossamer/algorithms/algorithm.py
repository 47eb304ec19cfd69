"""The base class of algorithms: the protocol that one node follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from gossamer.config.registry import Component
from gossamer.node import CheckContext, Node
from gossamer.topology import Mixing, TopologySchedule

LocalSteps = Annotated[int, Field(ge=1, le=1_000_000)]
"""Mini-batch steps between two communications. Their batches are drawn together."""


class Algorithm(Component):
    """One node's protocol: ordinary async Python on flat vectors.

    An algorithm object is frozen and shared by all nodes. Its fields are its parameters in the experiment
    file. Keep what a node must remember between rounds in ``node.state``.

    Attributes:
        gathers: whether it waits for its neighbours with :meth:`Node.gather` (default). If so, a network that
            loses messages requires ``gather.timeout_s``.
        tolerates_sampling: whether it may run with sampled neighbours (``cyclon``): it uses only
            out-neighbours, neither mixing weights nor the graph. Not the default.
        mixes_models: whether it takes weighted means of whole models, with :meth:`Node.mix` or with :meth:`Node.combine` and
            ``aggregate``, so that the experiment may name another ``aggregator``. Not the default.
        sums_suffice: whether it only sends its model once to each out-neighbour in a round, and only mixes
            the received models with ``node.mixing_weights(r)``. If so, ``secure_aggregation`` can hide the
            models. Not the default.
        sends_differences: whether it sends differences, encoded by :meth:`Node.compress`, as
            :class:`~gossamer.Model`. Not the default.
        needs_every_message: whether one missing message would spoil all later rounds, as it does for nodes that keep
            copies of each other's state. If so, no message may be lost, ``gather`` has to wait for all of
            them, and no node may crash, leave, join or come back while it runs. Not the default."""

    gathers: ClassVar[bool] = True
    tolerates_sampling: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = False
    sums_suffice: ClassVar[bool] = False
    sends_differences: ClassVar[bool] = False
    needs_every_message: ClassVar[bool] = False
    _state_goes_to: ClassVar[str] = "local variables of run(), or node.state, which checkpoints keep"

    @abstractmethod
    async def run(self, node: Node) -> None:
        """Run the protocol of one node until the stop rule ends ``node.rounds()``."""

    def check(self, context: CheckContext) -> None:
        """Refuse an experiment for which the algorithm can't be used, before any work starts: raise BadInput with
        the field, its value and what is accepted. The default accepts everything."""

    def mixing(self) -> Mixing | None:
        """The graph and the weights with which it mixes, as ``gossamer topology``, reports and ``--by-hops`` describe
        them. The default, None, declares nothing: they then describe the topology with its weights, and say that the
        algorithm may not use them."""
        return None

    def mixes_what_arrives(self) -> bool:
        """Whether it mixes the models that have arrived, perhaps none, in place of one from each in-neighbour, so that an
        aggregator that needs several models is refused. The default: if it does not gather."""
        return not self.gathers

    def message_limit(self, P: int, nodes: int) -> int:
        """The largest message that a node accepts, in bytes. The default is two models plus 64 KiB."""
        return 8 * P + 65536

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks that hold training data, ascending. The data is partitioned over these. The default is
        all."""
        return tuple(range(nodes))

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks whose failure stops the others. The default is none."""
        return ()

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks whose model is the algorithm's outcome. These are evaluated. The default is all."""
        return tuple(range(nodes))

    def reaches_all(self) -> bool:
        """Whether any node may send to any other, whatever the topology. The default is no."""
        return False

    def sends_messages(self) -> bool:
        """Whether its nodes send anything at all. The default is yes."""
        return True

    def unencoded(self, topology: TopologySchedule) -> str:
        """What it sends of its vectors without the codec (``exact``), in words: a run with a codec says so, since the codec,
        or an attack written as one, does nothing there. The default, "", is nothing."""
        return ""

    def sends_models(self) -> bool:
        """Whether it sends its models as :class:`~gossamer.Model`, for a codec to encode. The default is yes."""
        return True

    def sends_pieces(self) -> bool:
        """Whether it sends pieces of models, which only codecs that encode each value separately support. The
        default is no."""
        return False

    def ends_with_steps(self) -> bool:
        """Whether a round ends with local steps that are mixed only in a later round. Records then show models from after
        these steps (``evaluation.of: round``), unless they show the result of the last mixing (``mixed``). The default
        is no: a round ends with the mixing, or nothing is ever mixed."""
        return False

    def takes_back(self) -> bool:
        """Whether it cancels messages. The default is no."""
        return False


def participants(node: Node, purpose: str, r: int, candidates: Sequence[int], share: float) -> Sequence[int]:
    """The ranks that take part in a round, ascending, at least one. All nodes draw them from a shared
    generator, so that no message is needed."""
    count = max(int(share * len(candidates) + 1e-9), 1)  # 2/49 of 49 is 2
    if count == len(candidates):
        return candidates
    chosen = node.rng(purpose, r, shared=True).choice(candidates, count, replace=False)
    return sorted(int(rank) for rank in chosen)


MAX_NUMBER = 2**53
"""The largest number that a node accepts from a peer. Sums of such numbers can still be sent."""


def whole_number(value: object, minimum: int, name: str) -> int:
    """A number from a peer's message. ValueError unless it is a whole number from ``minimum`` to :data:`MAX_NUMBER`;
    an infinite or negative one would distort every later mean."""
    if type(value) is not int or not minimum <= value <= MAX_NUMBER:
        raise ValueError(
            f"{name} of a peer: got {value!r}; accepted: a whole number from {minimum} to {MAX_NUMBER}"
        )
    return value
