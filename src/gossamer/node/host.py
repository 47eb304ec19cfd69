"""The interface of one node to its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from gossamer.messages.tags import Payload, Sending, Traffic
from gossamer.node.expectations import Form
from gossamer.node.waiting import NodeTask, Slot

if TYPE_CHECKING:
    from gossamer.learning.computation import Computation
    from gossamer.learning.mixing import InboxJob

T = TypeVar("T")


@runtime_checkable
class Timer(Protocol):
    """A call scheduled for later."""

    def cancel(self) -> None: ...


@runtime_checkable
class Waiter(Protocol):
    """A waiter for messages of some nodes. When woken, it checks again whether there is something to wait
    for."""

    def wake(self) -> None: ...


@runtime_checkable
class Presence(Protocol):
    """The presence of all nodes in a simulation with faults."""

    def first(self, rank: int, peer: int) -> int:
        """The first round in which a node waits for a peer after one of the two was away. For the node
        itself, the first round in which it takes part again."""

    def watch(self, rank: int, waiter: Waiter, peers: Iterable[int]) -> None:
        """Start watching some peers: the waiter is woken when one of them is lost or comes back."""

    def unwatch(self, waiter: Waiter, peers: Iterable[int]) -> None:
        """Stop watching them."""

    def remember(self, rank: int, peers: Iterable[int]) -> None:
        """Note that a node keeps information about peers that becomes invalid when they restart."""


@runtime_checkable
class Counters(Protocol):
    """The counters (:class:`~gossamer.messages.tags.Traffic`) that a node itself increases."""

    messages_cancelled: int
    messages_late: int
    messages_superseded: int
    messages_taken: int
    messages_refused: int


@runtime_checkable
class Host(Protocol):
    """One node's interface to its engine, and the only one.

    Attributes:
        presence: tracks the presence of nodes and wakes waiters. None if the engine itself notifies each
            node.
        paced: whether computations take the time given by the compute profile."""

    presence: Presence | None
    paced: bool

    @property
    def lost(self) -> Set[int]:
        """The ranks known to be dead."""

    @property
    def traffic(self) -> Traffic:
        """A copy of the node's traffic counters up to now."""

    @property
    def counters(self) -> Counters:
        """The live counters that the node increases."""

    def network_bytes(self) -> int | None:
        """Bytes that all nodes have sent up to now; None if only the coordinator knows."""

    def now(self) -> float:
        """Seconds since the run's start: virtual or real."""

    def slot(self) -> Slot:
        """A new place for a result that one task waits for."""

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        """Run a coroutine as a task of its own. It starts when the running task next waits."""

    def timer(self, seconds: float, call: Callable[[], None], *, background: bool = False) -> Timer:
        """Schedule a call after some seconds, and after every delivery of that instant. A background call
        does not keep the run alive."""

    def store(self, vector: Tensor) -> Tensor:
        """An immutable vector with these values; the same object if it is already in the store."""

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is (a view of) an immutable vector of the store."""

    def send(
        self, to: Sequence[int], payload: Payload, tag: tuple[str | int, ...], form: Form | None = None
    ) -> list[Sending]:
        """Queue a message to each of some ranks, in the given order. The payload is frozen
        (:func:`gossamer.messages.freeze`) and will not change. ``form`` is its form, if that is known
        (:class:`~gossamer.node.expectations.Expectations`) and all values are finite: receivers in the same process need
        not look again."""

    def compute(self, computation: Computation) -> Awaitable[Any]:
        """Run a computation, and return the value of its ``commit``. Cancelling the await cancels the
        computation."""

    def mix(self, step: InboxJob, *, read: bool) -> Awaitable[Any]:
        """Once everything else of this instant is done, prepare and run a mixing step, commit the result, and
        return the value of its ``commit``. Unless ``read``, writing the result may be deferred until
        :meth:`settle`."""

    def settle(self, vector: Tensor) -> None:
        """Write a vector's deferred values, if any, before it is read."""

    def event(self, kind: str, text: str) -> None:
        """Record an event of the node. "diverged" ends the run, depending on ``stop.diverged``."""

    def finished(self, rounds: int) -> bool:
        """Whether a node is finished after this number of rounds."""

    def end_round(self) -> Awaitable[None]:
        """Record, evaluate and checkpoint as the experiment specifies, after a round was counted."""

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: from a keyed generator in a simulation, from the operating system
        otherwise."""

    def sign(self, data: bytes) -> bytes:
        """This rank's signature of the data; empty if nodes have no keys of their own."""

    def verify(self, rank: int, data: bytes, signature: bytes) -> bool:
        """Whether this is a rank's signature of the data."""
