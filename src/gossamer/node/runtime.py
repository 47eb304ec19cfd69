"""NodeRuntime: the engine's interface to one node. It runs the node's tasks, delivers its messages and saves
it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from gossamer.errors import BadInput, GossamerError, cause
from gossamer.learning.parameters import is_finite
from gossamer.messages import freeze, overwrite
from gossamer.messages.tags import Message, Model, Payload
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.expectations import Expectations
from gossamer.node.host import Host
from gossamer.node.mailbox import Mailbox, MalformedMessage
from gossamer.node.middleware import Layer
from gossamer.node.model import OwnModel
from gossamer.node.node import Node
from gossamer.node.setup import Setup
from gossamer.node.shown import ShownModel
from gossamer.node.waiting import NONE, NodeTask, Slot, all_ended, resolve

T = TypeVar("T")
L = TypeVar("L", bound=Layer)


class NodeRuntime:
    """One node, with everything that its engine calls. The algorithm gets only :attr:`node`.

    Attributes:
        rank: the node's number.
        node: the node as its algorithm sees it.
        own: its model and its computations.
        shown: the model that a record shows.
        mailbox: the messages that no task has taken yet.
        expectations: the payloads that the node expects from its peers.
        columns: values for the node's next recorded row.
        layers: what acts around the node, from the engine to the algorithm (:attr:`Setup.layers`).
        services: handlers of messages that are neither the algorithm's nor on their way through the layers, by the first part
            of their tags.
        tasks: the tasks of this node that have not ended.
        counts_rounds: whether the algorithm has begun to count its rounds.
        deliver: called with each message that has arrived. An exception in a wrapper fails the node."""

    __slots__ = (
        *("_background", "_diverged", "_failed", "_failed_round", "_main", "_news", "_over"),
        *("columns", "counts_rounds", "deliver", "expectations", "host", "layers", "mailbox"),
        *("node", "own", "rank", "services", "setup", "shown", "tasks"),
    )

    def __init__(self, setup: Setup, rank: int, initial: Model, host: Host) -> None:
        self.setup, self.rank, self.host = setup, rank, host
        self.columns: dict[str, Any] = {}
        self.counts_rounds = False
        self.own = OwnModel(setup, rank, initial, host)
        self.expectations = Expectations(setup.layout.size, encoded=setup.encoded)
        self.mailbox = Mailbox(setup, rank, host, lambda: self.node.round, self.expectations)
        self.services: dict[str | int, Callable[[Message], None]] = {}
        self.layers: list[Layer] = []
        # A node needs the attributes above, and those below need the node.
        inside = self.node = Node(self)
        self.shown = ShownModel(self)
        for wrap in reversed(setup.layers):
            self.node = wrap(self.node)
        outer: Any = self.node
        while outer is not inside:
            self.layers.insert(0, outer)
            outer = outer.node
        special = self.services or any(type(layer).arrived is not Layer.arrived for layer in self.layers)
        self.deliver = self._deliver if special else self.mailbox.deliver
        self.tasks: set[NodeTask[Any]] = set()
        self._background: frozenset[NodeTask[Any]] = NONE  # tasks that the protocol did not start
        self._main: NodeTask[None] | None = None  # runs the protocol
        self._news: Slot | None = None  # waits for the end of the protocol, or for a failure
        self._failed: BaseException | None = None
        self._failed_round = 0
        self._over = False  # whether the protocol has returned
        self._diverged = False

    def layer(self, kind: type[L]) -> L:
        """The layer of a kind. LookupError if the node has none."""
        for layer in self.layers:
            if isinstance(layer, kind):
                return layer
        raise LookupError(f"node {self.rank} has no {kind.__name__}")

    @property
    def round(self) -> int:
        return self.node.round

    @property
    def model(self) -> Model:
        """The node's parameters and buffers."""
        return self.node.model

    # --- messages

    def _deliver(self, message: Message) -> None:
        """Pass a message to its service, or through the layers to the mailbox."""
        changed = message
        try:
            if (service := self.services.get(message.tag[0] if message.tag else "")) is not None:
                service(message)
                return
            for layer in self.layers:
                passed = layer.arrived(changed)
                if passed is None:
                    return
                changed = passed
        except Exception as error:  # noqa: BLE001 - of any kind, since the payload is untrusted
            self.host.counters.messages_refused += 1
            try:
                self.mailbox.refuse(message.source, message.tag, cause(error))
            except MalformedMessage as refused:
                self.fail(refused)
            return
        self.mailbox.deliver(changed if changed is message else replace(changed, form=[]))

    # --- models that are not finite

    def look_for_divergence(self) -> bool:
        """Whether the node's model has non-finite values. The first time is recorded as an event."""
        if all(map(is_finite, self.model)):
            return False
        if not self._diverged:
            self._diverged = True
            self.host.event(
                "diverged", f"the model of node {self.rank} is not finite after {self.round} rounds"
            )
        return True

    def waiting(self) -> list[str]:
        """A description of each wait of the node's tasks. The last one names the messages that no task waits for, since
        their tag may be a mistake."""
        waits, unread = [str(waiter) for waiter in self.mailbox.waiters], self.mailbox.unread()
        return [*waits[:-1], f"{waits[-1]} (unread: {unread})"] if waits and unread else waits

    # --- nodes that are away

    def peer_found(self, rank: int, first: int, *, restarted: bool = True) -> None:
        """Note that a peer is back and takes part from round ``first`` on; no node waits for it in earlier
        rounds. If it was restarted, its outstanding messages will not arrive. The rank may be this node's
        own: it then waits for no peer in earlier rounds, since the messages sent in the meantime are lost."""
        if restarted:
            self.mailbox.forget_late({rank})
        self.mailbox.first[rank] = first
        self.mailbox.wake_all()

    def catch_up(self) -> None:
        """Skip to the first round in which this node takes part again, if it is in an earlier one."""
        node, first = self.node, self.mailbox.first_round(self.rank)
        if first > node.round:
            node.round = first
            if self.setup.experiment.optimizer.schedule is not None:
                node.lr = self.setup.experiment.optimizer.lr_at(node.round)

    # --- tasks

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        return self._spawn(coroutine, self._ended)

    def adopt(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        """Spawn a coroutine that was given to a function of asyncio, such as ``gather``. Its exception goes to who waits for
        the task, as asyncio promises, and fails the node only if nobody does."""
        return self._spawn(coroutine, self._adopted_ended)

    def _spawn(self, coroutine: Coroutine[Any, Any, T], ended: Callable[[Any], None]) -> NodeTask[T]:
        token = _RUNNING.set(self)  # a task has the context in which it was spawned
        try:
            task = self.host.spawn(coroutine)
        finally:
            _RUNNING.reset(token)
        self.tasks.add(task)
        task.add_done_callback(ended)
        return task

    def _ended(self, task: NodeTask[Any]) -> None:
        self._forget(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
        if task is self._main:
            self._tell()

    def _adopted_ended(self, task: Any) -> None:
        if task.watched:
            self._forget(task)
        else:
            self._ended(task)

    def _forget(self, task: NodeTask[Any]) -> None:
        self.tasks.discard(task)
        self._retire_if_over()

    def _tell(self) -> None:
        """Wake :meth:`live` or :meth:`failure`."""
        if self._news is not None:
            resolve(self._news)

    def fail(self, error: BaseException) -> None:
        """Record a failure of this node. Only the first one counts."""
        if self._failed is None:
            self._failed, self._failed_round = error, self.round
            self._tell()

    @property
    def failure_round(self) -> int:
        """The round in which this node failed. Its other tasks continue until they are cancelled, and may end
        that round."""
        return self.round if self._failed is None else self._failed_round

    async def live(self, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the node's protocol until it returns. The first failure in any of its tasks is raised. Tasks
        that the protocol spawned continue until :meth:`end`."""
        if self._failed is not None:  # by a message that arrived before the start
            raise self._failed
        for layer in self.layers:
            self._background |= {*map(self.spawn, layer.background())}
        self._main = main = self.spawn(self._run(protocol))
        self._news = self.host.slot()
        await self._news
        if self._failed is not None:
            raise self._failed
        if main.cancelled():
            raise GossamerError("CancelledError: it awaited a task that was cancelled")
        main.result()
        self.shown.end_rounds()
        self._over = True
        self._retire_if_over()

    async def _run(self, protocol: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await protocol()
        self.own.check()  # before other nodes notice a modified model

    def _retire_if_over(self) -> None:
        if self._over and self.tasks <= self._background:
            self.mailbox.retire()

    async def failure(self) -> BaseException:
        """Wait for a task of this node to fail, after its protocol has returned."""
        if self._failed is None:
            self._news = self.host.slot()
            await self._news
        assert self._failed is not None
        return self._failed

    async def end(self) -> None:
        """Cancel every task of this node and wait until it has ended."""
        while self.tasks:
            tasks = list(self.tasks)
            for task in tasks:
                task.cancel()
            await all_ended(self.host.slot, tasks)
            # A task that had ended already is forgotten here, before its callbacks run.
            self.tasks.difference_update(tasks)

    # --- checkpoints

    def checkpoint(self, **engine: Payload) -> Checkpoint:
        """Everything that this node needs to continue from the end of this round, and the engine's own values
        about it. Vectors are shared, not copied, except tensors in ``state`` outside the store, which the
        algorithm may write. TypeError or ValueError for a value in ``state`` that is not a payload."""
        node, state = self.node, {}
        for name, value in self.node.state.items():
            try:
                state[name] = freeze(value, self.host.is_stored)
            except (TypeError, ValueError) as error:
                raise type(error)(f"node.state[{name!r}]: {error}") from None
        saved = {
            "step": node.step,
            "lr": node.lr,
            "reset": self.own.reset,
            "diverged": self._diverged,
            "columns": dict(self.columns),
            "losses": torch.tensor(self.own.losses, dtype=torch.float64),
            "shown": self.shown.saved(),
            **self.mailbox.saved(),
        }
        return Checkpoint(
            rank=self.rank,
            round=node.round,
            time_s=node.now(),
            model=self.own.snapshot(),
            optimizer=self.own.state,
            state=state,
            node=saved,
            unread=self.mailbox.messages,
            engine=engine,
        )

    def restore(self, saved: Checkpoint, *, again: bool = False) -> None:
        """Become the saved node. Call it before :meth:`live`. BadInput for the checkpoint of another node or
        model. The engine delivers the messages that were in flight to the node. With ``again``, the node's
        counters were not reset to those of the checkpoint, so they include its messages already."""
        node, layout = self.node, self.setup.layout
        shapes = [tuple(vector.shape) for vector in saved.model]
        if saved.rank != self.rank or shapes != [(layout.size,), (layout.buffer_size,)]:
            raise BadInput(
                f"checkpoint: of node {saved.rank}, with {shapes[0]} parameters and {shapes[1]} buffers; accepted: of node"
                f" {self.rank}, with ({layout.size},) and ({layout.buffer_size},)"
            )
        node.round, node.step = saved.round, saved.node["step"]
        node.model, node.state = saved.model, _thawed(saved)
        self._take_over(saved)
        self.shown.restore(saved.node.get("shown"))
        self.mailbox.restore(saved.unread, saved.node, again=again)

    def overwrite(self, saved: Checkpoint, sent: Mapping[int, int]) -> None:
        """Overwrite this node's values with the saved ones, once it has done the same work. ``sent`` has the
        number of messages that each source had sent before it was saved. LookupError if the node has taken
        other steps or has other messages."""
        if self.node.step != saved.node["step"]:
            raise LookupError(f"node {self.rank} has taken {self.node.step} steps, not {saved.node['step']}")
        overwrite(self.own.snapshot(), saved.model)
        self.shown.overwrite(saved.node.get("shown"))
        for layer in self.layers:
            layer.overwritten()
        overwrite(self.node.state, _thawed(saved))
        self._take_over(saved)
        self.mailbox.overwrite(saved.unread, sent)

    def _take_over(self, saved: Checkpoint) -> None:
        self.node.lr, self.own.reset = saved.node["lr"], saved.node["reset"]
        self._diverged = saved.node["diverged"]
        self.own.state = None if saved.optimizer is None else dict(saved.optimizer)
        self.columns, self.own.losses = dict(saved.node["columns"]), saved.node["losses"].tolist()


def _thawed(saved: Checkpoint) -> dict[str, Payload]:
    """A copy of the saved ``node.state`` with new containers."""
    state: dict[str, Payload] = freeze(dict(saved.state), lambda tensor: True)
    return state


def running_node() -> NodeRuntime | None:
    """The node whose task runs, if one does."""
    return _RUNNING.get()


_RUNNING: ContextVar[NodeRuntime | None] = ContextVar("running", default=None)
_UNAWAITED = rf"coroutine '{Node.__name__}\.\w+' was never awaited"


@contextmanager
def unawaited_calls_fail() -> Iterator[None]:
    """Within this context, a node fails if one of its tasks drops a coroutine of :class:`Node` without
    awaiting it; Python itself only warns."""

    def show(message: Warning | str, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        node = _RUNNING.get() if re.fullmatch(_UNAWAITED, str(message)) else None
        if node is None:
            shown(message, category, filename, lineno, *rest)
        else:
            node.fail(GossamerError(f"{message} ({Path(filename).name}, line {lineno})"))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNAWAITED, RuntimeWarning)
        shown = warnings.showwarning
        warnings.showwarning = show  # type: ignore[assignment]
        yield
