"""A node's model: snapshots that nobody writes into, and how results of computations get into it."""

from __future__ import annotations

from torch import Tensor

from gossamer.learning.optimizer import Optimizer, State
from gossamer.learning.trainer import TrainResult
from gossamer.messages.tags import Model
from gossamer.node.host import Host

Writes = tuple[int, int]
"""How often the parameters and the buffers were written."""


class Snapshot:
    """One vector of the model, which is replaced and never modified. Torch counts what is written in place, so that it is
    noticed if somebody does.

    Args:
        rank: the node.
        name: the vector's, as the node's users know it.
        vector: the first one.

    Attributes:
        vector: the newest one, to be told from others; :meth:`read` gives it to be used.
        writes: how often it was replaced.
    """

    __slots__ = ("_name", "_rank", "_version", "vector", "writes")

    def __init__(self, rank: int, name: str, vector: Tensor) -> None:
        self._rank, self._name = rank, name
        self.vector, self._version, self.writes = vector, vector._version, 0

    def read(self) -> Tensor:
        """The newest vector, whose values may not be written yet.

        Raises:
            RuntimeError: if it was modified in place.
        """
        if self.vector._version != self._version:
            raise RuntimeError(
                f"node {self._rank}: its {self._name} were modified in place; snapshots are immutable: compute a new"
                f" vector and assign it (node.{self._name} = v)"
            )
        return self.vector

    def write(self, vector: Tensor) -> None:
        """Another one takes its place, which nobody else will write to."""
        self.vector, self._version = vector, vector._version
        self.writes += 1


class OwnModel:
    """The model of one node, with the optimizer's state that goes with it.

    Args:
        rank: the node.
        initial: the model that it starts with.
        optimizer: makes its own state.
        host: stores parameters.

    Attributes:
        parameters: the flat parameter vector.
        buffers: the model's buffers.
        state: the optimizer's, as the last committed step left it; None is a fresh one.
        reset: whether the next step that is asked for starts with a fresh one.
    """

    def __init__(self, rank: int, initial: Model, optimizer: Optimizer, host: Host) -> None:
        self._optimizer, self._host = optimizer, host
        self.parameters = Snapshot(rank, "parameters", host.store(initial.parameters))
        self.buffers = Snapshot(rank, "buffers", initial.buffers.clone())
        self.state: State | None = None
        self.reset = False

    def snapshot(self) -> Model:
        """The model, for who does not read it now: its values may not be written yet."""
        return Model(self.parameters.read(), self.buffers.read())

    @property
    def writes(self) -> Writes:
        """How often it was written by now, which :meth:`commit` asks for."""
        return self.parameters.writes, self.buffers.writes

    def take_reset(self) -> bool:
        """Whether the step that is asked for now starts with a fresh state; the one after it doesn't."""
        reset, self.reset = self.reset, False
        return reset

    def state_for(self, start: Model, reset: bool) -> State:
        """The optimizer's state for steps from some model on."""
        if reset or self.state is None:
            return self._optimizer.init(start.parameters)
        return self.state

    def commit(self, result: TrainResult, start: Model, before: Writes) -> None:
        """Take a result: as it is, where nothing was written since it was asked for; else as an update.

        Args:
            result: what came of the steps.
            start: the model that they began with.
            before: what :attr:`writes` was then.
        """
        new, (writes, buffer_writes) = result.model, before
        self.parameters.read()  # which is refused if it was modified in place
        if self.parameters.writes == writes:
            self.parameters.write(new.parameters)
        else:
            self._host.settle(self.parameters.vector)
            moved: Tensor = self.parameters.vector + (new.parameters - start.parameters)
            self.parameters.write(self._host.store(moved))
        if self.buffers.writes == buffer_writes:
            self.buffers.write(new.buffers)
        else:
            self.buffers.write(self.buffers.read() + (new.buffers - start.buffers))
        self.state = result.state
