"""The base of algorithms: the protocol that one node follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from gossamer.config.registry import Component
from gossamer.learning.optimizer import Optimizer
from gossamer.messages.tags import Model, Sending
from gossamer.node import Node
from gossamer.topology import TopologySchedule


class Algorithm(Component):
    """One node's protocol: ordinary async Python over flat vectors.

    An algorithm object is frozen and shared by all nodes; its fields are its parameters in the experiment
    file. What a node must remember from round to round is in ``node.state``.

    Attributes:
        gathers: whether it waits for its neighbours with :meth:`Node.gather`, as is the default; where messages can be
            lost it needs ``gather.timeout_s`` then.
        tolerates_loss: whether it may run on a network that loses messages, as is the default.
        tolerates_sampling: whether it may run where neighbours are sampled (``cyclon``): it asks for out-neighbours only, and
            neither for weights nor for the graph. Not the default.
        mixes_models: whether it takes weighted means of whole models, with :meth:`Node.mix` or with :meth:`Node.combine` and
            ``aggregate``, so that the experiment may name another ``aggregator``. Not the default.
        tolerates_absence: whether nodes may crash, leave, join and come back while it runs, as is the default.
    """

    gathers: ClassVar[bool] = True
    tolerates_loss: ClassVar[bool] = True
    tolerates_sampling: ClassVar[bool] = False
    mixes_models: ClassVar[bool] = False
    tolerates_absence: ClassVar[bool] = True
    _state_goes_to: ClassVar[str] = "local variables of run(), or node.state, which checkpoints keep"

    @abstractmethod
    async def run(self, node: Node) -> None:
        """What one node does, until its stop rule ends ``node.rounds()``."""

    def check(self, topology: TopologySchedule, optimizer: Optimizer) -> None:
        """Refuse what the algorithm can't be used with, before any work starts. The default accepts everything.

        Raises:
            BadInput: naming the field, its value and what is accepted.
        """

    def message_limit(self, P: int, nodes: int) -> int:
        """The largest message that a node accepts, in bytes: the default allows two models and 64 KiB."""
        return 8 * P + 65536

    def data_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks that hold training data, ascending; the partition is over these. The default is all."""
        return tuple(range(nodes))

    def needed_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks without which the others can't go on. The default is none."""
        return ()

    def reaches_all(self) -> bool:
        """Whether a node may come to talk to every other one, whatever the topology is. The default is that it does not."""
        return False

    def outcome_ranks(self, nodes: int) -> tuple[int, ...]:
        """Ranks whose model is the algorithm's outcome: the ones that are evaluated. The default is all."""
        return tuple(range(nodes))


def shared_model(node: Node) -> Tensor | Model:
    """What a node sends as its model: the parameters, and the buffers beside them where the model has any."""
    return node.model if len(node.buffers) else node.parameters


def set_shared_model(node: Node, model: Tensor | Model) -> None:
    """Make what :func:`shared_model` gives somewhere a node's own."""
    if isinstance(model, Model):
        node.model = model
    else:
        node.parameters = model


def each(function: Callable[..., Tensor], *models: Tensor | Model) -> Tensor | Model:
    """A function of vectors, of the parameters and, beside them, of the buffers where the models have any."""
    if isinstance(models[0], Model):
        return Model(*(function(*halves) for halves in zip(*models, strict=True)))
    return function(*models)


async def left(*sendings: Sending) -> None:
    """Wait until messages have left (all but one window of each): to be awaited, or spawned and asked whether it is done."""
    for sending in sendings:
        await sending
