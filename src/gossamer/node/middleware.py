"""What acts around a node for any algorithm, such as an attack, a screening of models, privacy noise or accounting.

A :class:`Middleware` wraps nodes. A wrapped node is a :class:`NodeProxy`: it forwards every call to the node inside, and an
author overrides what should differ. The algorithm gets the outermost node.

Inside of all middlewares are the layers that gossamer adds itself (:mod:`gossamer.layers`): the peer sampler, the codec or
the masks of sums, and the wrappers of what is on the wire. So a middleware sees models that are not encoded yet, or are
decoded already."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.config.registry import Component
from gossamer.learning.mixing import Missing
from gossamer.messages.tags import (
    Coded,
    Message,
    Model,
    Part,
    Payload,
    PrivateTag,
    Sending,
    Tag,
    Traffic,
    as_tag,
)
from gossamer.node.expectations import Form
from gossamer.node.late import LateSending
from gossamer.node.mailbox import Inbox
from gossamer.node.node import Node
from gossamer.node.questions import Questions, Unanswered
from gossamer.node.setup import CheckContext
from gossamer.node.waiting import NodeTask
from gossamer.randomness import draws_of
from gossamer.selector import Selector
from gossamer.topology import Graph

if TYPE_CHECKING:
    pass

T = TypeVar("T")

MEMORIES = "~middleware"
"""Key in a node's state for the memories of its middlewares, by their places."""


class Layer(Node):
    """A node around another one, which acts on what passes between the calls of an algorithm and the engine.

    Every call is forwarded, but for those that send and take messages: these have one form here, in terms of what is
    overridden in a layer: :meth:`_send` and :meth:`_compress`.

    Attributes:
        node: the node inside."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.rank, self.size, self.samples = node.rank, node.size, node.samples
        self.steps_per_epoch, self.label_counts, self.layout = (
            node.steps_per_epoch,
            node.label_counts,
            node.layout,
        )
        self._runtime, self._setup, self._host = node._runtime, node._setup, node._host
        self._own, self._mailbox, self._has_buffers = node._own, node._mailbox, node._has_buffers
        self._questions = Questions(self, self._mailbox)

    # --- what a layer does by itself

    async def begin_round(self, r: int) -> None:
        """Awaited before each round of ``node.rounds()``, after the layers inside. It may send and receive messages."""

    def round_counted(self, rounds: int) -> None:
        """Called when the node has completed this number of rounds, before the round is recorded and checkpointed."""

    def arrived(self, message: Message) -> Message | None:
        """Called with each message that arrives, before any task can take it. Returns the message to put into the mailbox
        instead; None if there is none. An exception refuses the message."""
        return message

    def overwritten(self) -> None:
        """Called when the values of the node's vectors were overwritten by saved ones."""

    def background(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What runs beside the protocol until the run ends."""
        return ()

    # --- values that may change

    @property
    def lr(self) -> float:
        rate: float = self.node.lr
        return rate

    @lr.setter
    def lr(self, lr: float) -> None:
        self.node.lr = lr

    @property
    def state(self) -> dict[str, Payload]:
        return self.node.state

    @state.setter
    def state(self, state: dict[str, Payload]) -> None:
        self.node.state = state

    @property
    def round(self) -> int:
        return self.node.round

    @round.setter
    def round(self, rounds: int) -> None:
        self.node.round = rounds

    @property
    def step(self) -> int:
        return self.node.step

    @step.setter
    def step(self, step: int) -> None:
        self.node.step = step

    # --- the model

    @property
    def parameters(self) -> Float[Tensor, " params"]:
        return self.node.parameters

    @parameters.setter
    def parameters(self, v: Float[Tensor, " params"]) -> None:
        self.node.parameters = v

    @property
    def buffers(self) -> Float[Tensor, " buffers"]:
        return self.node.buffers

    @buffers.setter
    def buffers(self, v: Float[Tensor, " buffers"]) -> None:
        self.node.buffers = v

    @property
    def model(self) -> Model:
        return self.node.model

    @model.setter
    def model(self, model: Model) -> None:
        self.node.model = model

    def _set_mixed(self, model: Model) -> None:
        self.node.mixed = model

    mixed = property(fset=_set_mixed, doc=Node.mixed.__doc__)

    # --- computations

    async def train(self, steps: int = 1) -> float:
        return await self.node.train(steps)

    async def gradient(
        self,
        at: Float[Tensor, " params"] | Model | None = None,
        batch: int | Sequence[int] | Literal["full"] | None = None,
    ) -> Float[Tensor, " params"]:
        return await self.node.gradient(at, batch)

    async def apply(self, v: Float[Tensor, " params"]) -> None:
        await self.node.apply(v)

    async def combine(
        self,
        own: Any,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
        aggregate: bool = False,
        differences: bool = False,
    ) -> Any:
        return await self.node.combine(
            own,
            inbox,
            weights,
            self_weight=self_weight,
            missing=missing,
            aggregate=aggregate,
            differences=differences,
        )

    async def mix(
        self,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
    ) -> None:
        await self.node.mix(inbox, weights, self_weight=self_weight, missing=missing)

    async def evaluate(
        self, v: Float[Tensor, " params"] | Model | None = None, on: str = "test"
    ) -> dict[str, Any]:
        return await self.node.evaluate(v, on)

    def reset_optimizer(self) -> None:
        self.node.reset_optimizer()

    # --- messages

    def _send(
        self,
        ranks: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
        form: Form | None,
    ) -> list[Sending]:
        return self.node._send(ranks, payload, tag, exact, form)

    def _compress(self, v: Float[Tensor, " params"]) -> tuple[Any, Float[Tensor, " params"]]:
        return self.node._compress(v)

    def peers(self) -> tuple[int, ...]:
        return self.node.peers()

    def expect(
        self,
        tag: Tag,
        *like: Payload,
        check: Callable[[Message], Any] | None = None,
        exact: bool = False,
    ) -> None:
        self.node.expect(tag, *like, check=check, exact=exact)

    # --- the graph

    async def neighbors(
        self, r: int | None = None, direction: Literal["both", "in", "out"] = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        return await self.node.neighbors(r, direction, layer)

    def mixing_weights(self, r: int | None = None) -> dict[int, float]:
        return self.node.mixing_weights(r)

    def topology(self, r: int | None = None) -> Graph:
        return self.node.topology(r)

    @property
    def view(self) -> tuple[int, ...] | None:
        return self.node.view

    # --- time, randomness, tasks, records

    def now(self) -> float:
        return self.node.now()

    async def sleep(self, seconds: float) -> None:
        await self.node.sleep(seconds)

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        return self.node.rng(purpose, *counters, shared=shared)

    def secret(self, n: int) -> bytes:
        return self.node.secret(n)

    def store(self, v: Float[Tensor, " params"]) -> Float[Tensor, " params"]:
        return self.node.store(v)

    def record(self, **values: Any) -> None:
        self.node.record(**values)

    async def end_round(self, r: int) -> None:
        await self.node.end_round(r)

    @property
    def traffic(self) -> Traffic:
        return self.node.traffic

    @property
    def finished(self) -> bool:
        return self.node.finished

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        return self.node.spawn(coroutine)


class NodeProxy(Layer):
    """A node that forwards everything to the node inside, :attr:`node`. A middleware's :meth:`Middleware.wrap` returns one.

    Override the two hooks for every model that leaves (:meth:`outgoing`) and every message that is taken (:meth:`incoming`):
    no call of the algorithm goes around them. Override calls for what else should differ: ``train``, ``gradient``,
    ``apply``, ``mix``, ``combine``, ``broadcast`` (``send`` goes through it), ``gather``, ``receive``, ``drain``,
    :meth:`begin_round`, ``end_round``. What must wait does so in a call that is awaited, or in a task (``self.node.spawn``).

    Its own messages go to ``self.node``, under tags of :meth:`private_tag`: the middlewares and layers inside act on them,
    and the algorithm never takes them. Its own draws are those of :meth:`private_rng`, and what must outlive a round is in
    :attr:`memory`, which checkpoints keep."""

    _place = ""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # The vectors that :meth:`compress` has returned: they have passed :meth:`outgoing`.
        self._compressed = WeakTensorKeyDictionary()

    # --- hooks

    def outgoing(self, model: Model, to: tuple[int, ...], tag: tuple[str | int, ...]) -> Model:
        """Return the model to send instead of one that leaves, before it is encoded.

        It is called once for each model in a payload, whatever sends it, with ``exact=True`` too. A vector of P values, and a
        :class:`~gossamer.Part` of one, counts as a model without buffers. ``model.parameters`` may be a ``Part``.

        Args:
            model: what leaves. It must not be modified.
            to: the receivers, ascending; empty for a vector of ``node.compress``, which is a difference or a piece.
            tag: what it is about; empty likewise."""
        return model

    def incoming(self, message: Message) -> Message | None:
        """Return the message to take instead of one that is taken and is as expected, after it is decoded; None refuses it.

        It is called for messages of ``gather``, ``receive`` and ``drain``, for questions to the handler of ``answer``, and
        for answers. A refused message is counted as refused and, for ``gather``, its sender is in ``missing``. A refused
        question is not answered; for ``ask``, a refused answer is a TimeoutError."""
        return message

    # --- what belongs to the middleware

    def private_tag(self, *parts: str | int) -> PrivateTag:
        """A tag of this middleware: no other one, and no algorithm, sends or takes messages under it."""
        return PrivateTag((f"~{self._placed()}", *parts))

    def private_rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        """A new generator for the key (experiment seed, this middleware, purpose, this rank, counters), as :meth:`rng` is
        for the algorithm."""
        with draws_of(self._placed()):
            return self.node.rng(purpose, *counters, shared=shared)

    @property
    def memory(self) -> dict[str, Payload]:
        """What must outlive a round, by name. The values must be payloads."""
        memories: dict[str, dict[str, Payload]] = self.node.state.setdefault(MEMORIES, {})
        return memories.setdefault(self._placed(), {})

    def held_back(self) -> LateSending:
        """The handle of a message that this middleware sends later, for the caller of ``broadcast``; then pass what sending
        it has returned to its ``queued``."""
        return LateSending(self._host)

    def _placed(self) -> str:
        if not self._place:
            raise RuntimeError(
                f"{type(self).__name__}: its place among the middlewares is known after wrap()"
            )
        return self._place

    # --- models that leave

    def broadcast(
        self, to: Iterable[int], payload: Payload, tag: Tag, *, exact: bool = False
    ) -> list[Sending]:
        ranks = sorted(to)
        return self.node.broadcast(ranks, self._changed(payload, tuple(ranks), tag), tag, exact=exact)

    def compress(self, v: Float[Tensor, " params"]) -> tuple[Any, Float[Tensor, " params"]]:
        changed: Any = self.outgoing(Model(v, self.buffers[:0]), (), ()).parameters
        sent, decoded = self.node.compress(changed)
        if isinstance(sent, Tensor):  # there is no codec, so it is sent as it is
            self._compressed[sent] = None
        return sent, decoded

    async def _ask(
        self,
        peer: int,
        payload: Payload,
        tag: tuple[str | int, ...],
        timeout: float | None,
        keep_s: float | None,
        *,
        exact: bool,
    ) -> Message:
        payload = self._changed(payload, (peer,), tag)
        answer = await self.node._ask(peer, payload, tag, timeout, keep_s, exact=exact)
        taken = self._taken((answer,))
        if not taken:
            raise TimeoutError(f"node {self.rank}: a middleware refused the answer of node {peer}")
        return taken[0]

    def answer(
        self, tag: Tag, handler: Callable[[Message], Payload], *, exact: bool = False
    ) -> NodeTask[None]:
        def around(question: Message) -> Payload:
            taken = self._taken((question,))
            if not taken:
                raise Unanswered
            return self._changed(handler(taken[0]), (question.source,), ("answer", *question.tag[1:]))

        return self.node.answer(tag, around, exact=exact)

    def _changed(self, payload: Payload, to: tuple[int, ...], tag: Tag) -> Payload:
        if type(self).outgoing is NodeProxy.outgoing:
            return payload
        about = as_tag(tag)
        size = self._setup.layout.size

        def passes(vector: Any) -> bool:
            return isinstance(vector, Coded) or (isinstance(vector, Tensor) and vector in self._compressed)

        def over(item: Payload) -> Payload:
            if isinstance(item, Model):
                return item if passes(item.parameters) else self.outgoing(item, to, about)
            if isinstance(item, dict):
                return {key: over(value) for key, value in item.items()}
            if isinstance(item, list | tuple):
                return [over(value) for value in item]
            whole = isinstance(item, Tensor) and item.shape == (size,) and item.is_floating_point()
            if (whole or (isinstance(item, Part) and item.size == size)) and not passes(item):
                return self.outgoing(Model(item, torch.empty(0)), to, about).parameters
            return item

        return over(payload)

    # --- messages that are taken

    async def receive(
        self,
        tag: Tag | None = None,
        source: int | None = None,
        timeout: float | None = None,
        *,
        keep_as: Tag | None = None,
    ) -> Message:
        if keep_as is not None:  # whoever takes it under the new tag takes it from the middleware
            return await self.node.receive(tag, source, timeout, keep_as=keep_as)
        end_s = None if timeout is None else self.now() + timeout
        while True:
            left_s = None if end_s is None else max(end_s - self.now(), 0.0)
            if taken := self._taken((await self.node.receive(tag, source, left_s),)):
                return taken[0]

    def drain(
        self, tag: Tag | None = None, source: int | None = None, *, newest: bool = False
    ) -> list[Message]:
        return self._taken(self.node.drain(tag, source, newest=newest))

    async def gather(
        self, peers: Iterable[int], tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> Inbox:
        inbox = await self.node.gather(peers, tag, at_least=at_least, timeout=timeout)
        if type(self).incoming is NodeProxy.incoming:
            return inbox
        about = as_tag(tag)
        sent = {message.source: message for message in inbox.messages}
        # A payload that a middleware inside has put there was not sent by anybody: it is of this instant.
        messages = [sent.get(rank) or Message(rank, about, inbox[rank], self.now()) for rank in inbox]
        taken = self._taken(messages)
        payloads = {message.source: message.payload for message in taken}
        missing = {*inbox.missing, *(inbox.keys() - payloads.keys())}
        return Inbox(payloads, missing, inbox.unknown_tag, taken)

    def _late_answers(self) -> list[Message]:
        return self._taken(self.node._late_answers())

    async def _next_answer(self) -> Message | None:
        while (answer := await self.node._next_answer()) is not None:
            if taken := self._taken((answer,)):
                return taken[0]
        return None

    def _taken(self, messages: Sequence[Message]) -> list[Message]:
        """What remains of some messages, which the node inside has taken."""
        if type(self).incoming is NodeProxy.incoming:
            return [*messages]
        kept = []
        for message in messages:
            changed = self.incoming(message)
            if changed is None:
                counters = self._host.counters
                counters.messages_taken -= 1
                counters.messages_refused += 1
            else:
                kept.append(changed)
        return kept


class Middleware(Component):
    """Base class of middlewares, which an experiment lists under ``middleware``, the outermost first. ``at`` selects the
    nodes around which they act.

    A middleware is frozen, and all nodes share it. What belongs to a node is in its proxy; what must outlive a round is in
    :attr:`NodeProxy.memory`."""

    _state_goes_to: ClassVar[str] = "the proxy's memory, which checkpoints keep"

    at: Selector = Field(default="all", validate_default=True)  # the nodes around which it acts

    @abstractmethod
    def wrap(self, node: Node) -> Node:
        """Return the node around a selected node: a :class:`NodeProxy` of it, or the node itself to leave it as it is."""

    def check(self, context: CheckContext) -> None:
        """Raise BadInput, before the run, for an experiment in which this middleware can't work."""


def wrapped(node: Node, middleware: Middleware, place: str, ranks: frozenset[int]) -> Node:
    """A node with a middleware around it if it is among the ranks. TypeError if ``wrap`` returns something else."""
    if node.rank not in ranks:
        return node
    outer = middleware.wrap(node)
    inner: Any = outer
    while inner is not node:
        if not isinstance(inner, NodeProxy):
            got = type(inner).__name__
            raise TypeError(
                f"{type(middleware).__name__}.wrap returned a {got}; accepted: a NodeProxy of its node, or the node"
            )
        inner._place = place
        inner = inner.node
    return outer
