"""The interface of an engine to one node: a clock, links, computation, storage and a recorder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from gossamer.messages.tags import Payload, Sending, Traffic

if TYPE_CHECKING:
    from gossamer.learning.computation import Computation
    from gossamer.learning.mixing import Mix


@runtime_checkable
class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Don't make the call."""


@runtime_checkable
class Host(Protocol):
    """One node's side of an engine. A node knows its engine only through this."""

    lost: set[int]
    """Ranks known to be dead."""

    @property
    def traffic(self) -> Traffic:
        """A copy of what the node has sent and received by now."""

    @property
    def counters(self) -> Traffic:
        """The same to add to; bytes that are leaving may be missing."""

    def now(self) -> float:
        """Seconds since the run's start: virtual or real."""

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Timer:
        """Call after some seconds, and after every delivery of that instant. The algorithm does not wait for calls in the
        background."""

    def store(self, vector: Tensor) -> Tensor:
        """An immutable vector of these values; the same object if it is one already."""

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is (a view of) an immutable vector of the store."""

    def fresh(self, length: int) -> Tensor:
        """A new, writable vector float32 [length], aligned to 64 bytes."""

    def send(self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...]) -> list[Sending]:
        """Queue a message to each of some ranks, in this order. The payload is frozen
        (:func:`gossamer.messages.freeze`) and will not change."""

    def compute(self, computation: Computation) -> Awaitable[Any]:
        """Run a computation; gives what its ``commit`` returned. Cancelling the await cancels the
        computation."""

    def mix(self, prepare: Callable[[], Mix], commit: Callable[[Any], Any], *, read: bool) -> Awaitable[Any]:
        """When all else of this instant is done, prepare a mixing step, run it, and commit the result; gives what
        ``commit`` returned. Unless ``read``, the result may be written as late as :meth:`settle`."""

    def settle(self, vector: Tensor) -> None:
        """Write a vector that is about to be read, if it is not written yet."""

    def finished(self, rounds: int) -> bool:
        """Whether a node that has completed this many rounds is at its end."""

    def end_round(self) -> Awaitable[None]:
        """Record, evaluate and checkpoint as the experiment says, after a round was counted."""

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: keyed when simulated, from the operating system when real."""
