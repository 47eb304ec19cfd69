"""The model that a record shows of a node (``evaluation.of``).

A round of a node begins when ``node.rounds()`` hands it out and ends when the algorithm's loop comes back for the
next. At an instant (of the time grid, or the end of a run by time, bytes, target or the user), a node that is
inside a round is shown with the model with which its last round ended, or, in its first round, with the model
with which that round began; a node outside of a round (before its first, after its loop, or in a protocol
without rounds) is shown as it is."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gossamer.messages import overwrite
from gossamer.messages.tags import Model, Payload
from gossamer.node.model import modified_in_place

if TYPE_CHECKING:
    from gossamer.node.checkpoint import Checkpoint
    from gossamer.node.runtime import NodeRuntime

ShownAt = Literal["round", "mixed", "instant"]
"""Which model is shown: that of the last completed round, of the last mixing, or of the instant."""

_numbers = count()


class CompleteModel(NamedTuple):
    """A model of a node, and when it was complete. Its values may not have been written yet, so a reader calls
    :meth:`Host.settle` first."""

    model: Model
    round: int  # completed rounds; of a mixed model, the round of the mixing, counted from 1
    step: int  # local steps requested by then
    time_s: float
    network_bytes: int | None  # bytes that all nodes had sent by then; None if only the coordinator knows
    number: int  # of the vectors: equal numbers mean equal models, within a process
    versions: tuple[int, int]  # torch's counts of in-place writes


class ShownModel:
    """Keeps the model that a record shows of one node, as a reference, not as a copy.

    Attributes:
        has_mixed: whether the node has mixed since its start; counted only for ``of: mixed``."""

    __slots__ = ("_complete", "_in_round", "_mixed", "_number", "_of", "_runtime", "_writes")

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime, self._of = runtime, runtime.setup.experiment.evaluation.of
        self._in_round = False
        self._complete: CompleteModel | None = None  # unused with "instant"
        self._mixed: CompleteModel | None = None
        self._writes, self._number = (-1, -1), -1  # of the node's own model when it was last seen

    @property
    def has_mixed(self) -> bool:
        return self._mixed is not None

    def begin_round(self) -> None:
        """A round is handed out to the algorithm."""
        if not self._in_round:
            self._keep_if_changed()
        self._in_round = True

    def end_round(self) -> None:
        """A round was completed, and counted. If the algorithm takes its rounds from ``node.rounds()``, the next one
        begins at once, whatever happens until it is handed out."""
        if self._of != "instant":
            self._complete = self._snapshot()

    def end_rounds(self) -> None:
        """There are no more rounds, or the protocol has returned, perhaps by leaving its loop in the middle of one."""
        self._in_round = False

    def mixed(self, model: Model) -> None:
        """The node has mixed models, with this result."""
        if self._of == "mixed":
            own, store = self._runtime.own, self._runtime.host.store
            buffers = model.buffers if len(model.buffers) else own.buffers.read()
            stored = Model(store(model.parameters), buffers)
            self._mixed = self._placed(stored, self._runtime.round + self._in_round, next(_numbers))

    def now(self) -> CompleteModel:
        """The model to show at this instant. RuntimeError if it was modified in place."""
        if self._of == "instant":
            return self.instant()
        if not self._in_round:
            self._keep_if_changed()
        shown = self._mixed or self._complete
        assert shown is not None, "a node in a round has a model with which the round began"
        for name, vector, version in zip(("parameters", "buffers"), shown.model, shown.versions, strict=True):
            if vector._version != version:
                raise modified_in_place(self._runtime.rank, name)
        return shown

    def instant(self) -> CompleteModel:
        """The node's model as it is."""
        return self._snapshot()

    def _keep_if_changed(self) -> None:
        if self._of != "instant" and (self._complete is None or self._complete.number != self._own_number()):
            self._complete = self._snapshot()

    def _own_number(self) -> int:
        own = self._runtime.own
        writes = own.parameters.writes, own.buffers.writes
        if writes != self._writes:
            self._writes, self._number = writes, next(_numbers)
        return self._number

    def _snapshot(self) -> CompleteModel:
        return self._placed(self._runtime.own.snapshot(), self._runtime.round, self._own_number())

    def _placed(self, model: Model, completed_rounds: int, number: int) -> CompleteModel:
        node, host = self._runtime.node, self._runtime.host
        versions = model.parameters._version, model.buffers._version
        return CompleteModel(
            model, completed_rounds, node.step, node.now(), host.network_bytes(), number, versions
        )

    # --- checkpoints

    def saved(self) -> Payload:
        """What a checkpoint keeps of the shown model. The vectors of the node itself are saved elsewhere."""
        if not self._in_round:
            self._keep_if_changed()
        return {
            "complete": None if self._complete is None else list(self._complete[1:5]),
            "mixed": None if self._mixed is None else [*self._mixed[1:5], *self._mixed.model],
        }

    def restore(self, saved: Any) -> None:
        """Show what the saved node showed; its own model has been restored. ``saved`` is None in a checkpoint of an older
        version."""
        if saved is None:
            return
        if self._of != "instant" and saved["complete"] is not None:
            self._complete = self._snapshot()._replace(**_place(saved["complete"]))
        if saved["mixed"] is not None:
            *place, parameters, buffers = saved["mixed"]
            model = Model(self._runtime.host.store(parameters), buffers)
            self._mixed = self._placed(model, 0, next(_numbers))._replace(**_place(place))

    def overwrite(self, saved: Any) -> None:
        """Give the vectors of the last mixing the saved values, in place."""
        if self._mixed is not None and saved is not None and saved["mixed"] is not None:
            overwrite(self._mixed.model, Model(*saved["mixed"][4:]))


def shown_in(saved: Checkpoint) -> Model:
    """The model that was shown of a node at the end of the round at which it was saved."""
    shown: Any = saved.node.get("shown")
    return saved.model if shown is None or shown["mixed"] is None else Model(*shown["mixed"][4:])


def _place(saved: list[Any]) -> dict[str, Any]:
    return dict(zip(CompleteModel._fields[1:5], saved, strict=True))
