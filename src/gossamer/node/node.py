"""Node: all that an algorithm may do. The same under every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gossamer.errors import BadInput
from gossamer.learning.mixing import Missing, Mix
from gossamer.learning.parameters import Field
from gossamer.messages import freeze
from gossamer.messages.mailbox import Inbox
from gossamer.messages.tags import Message, Model, Payload, Sending, Tag, Traffic, as_tag, matches
from gossamer.node.checkpoint import Checkpoint
from gossamer.node.host import Host
from gossamer.node.learner import Learner
from gossamer.node.life import Life
from gossamer.node.model import OwnModel
from gossamer.node.reception import Reception
from gossamer.node.setup import NodeSetup
from gossamer.randomness import SHARED, generator
from gossamer.topology import Graph
from gossamer.topology.sampler import TAG as SAMPLER

T = TypeVar("T")

_RECORDED = (int, float, str, np.generic, np.ndarray, Tensor, list, tuple, Mapping)
"""What a row may hold."""


class Node:
    """One node, as its algorithm sees it.

    Attributes:
        rank: this node's number, from 0.
        size: number of nodes.
        samples: number of training samples that this node holds.
        label_counts: how many of them are of each class, int64 [classes]; None where the targets are not
            classes.
        layout: fields (name, start, shape) of the flat parameter vector.
        lr: learning rate of the steps to come. The optimizer's schedule, if it has one, sets it when a round ends; what
            an algorithm assigns lasts until then, without a schedule for ever.
        state: all that must outlive a round, by name; values are payloads.
        round: rounds completed.
        step: local steps asked for so far.
    """

    def __init__(self, setup: NodeSetup, host: Host) -> None:
        self.rank, self.size = setup.rank, setup.size
        self.samples = len(setup.samples)
        self.label_counts = setup.label_counts
        self.layout: tuple[Field, ...] = setup.layout.parameters
        self.lr = setup.optimizer.lr_at(0)
        self.state: dict[str, Payload] = {}
        self.round = 0
        self.step = 0
        self.columns: dict[str, Any] = {}
        self.losses: list[float] = []
        self._setup, self._host = setup, host
        self._own = OwnModel(setup.rank, setup.initial, setup.optimizer, host)
        self._learner = Learner(setup, host, self._own, lambda loss: self.losses.append(loss))
        self._index_sets: dict[str, Tensor] = {}
        self._reception = Reception(setup.rank, host, lambda: self.round, setup.lost_peer)
        self.ages = self._reception.ages
        self._sampler = setup.topology.sampler(self, host)
        self._receive_own = self._deliver_wrapped if setup.wrappers else self._reception.mailbox.deliver
        #: For engines: what takes in the engine's own messages, if something does.
        self.companion = None if setup.companion is None else setup.companion(self, host)
        plain = self._sampler is None and self.companion is None
        #: For engines: a message has arrived. What a wrapper raises is the node's failure.
        self.deliver = self._receive_own if plain else self._deliver_sorted
        self._life = Life(self._reception.mailbox.retire)

    # --- the model

    @property
    def parameters(self) -> Float[Tensor, " params"]:
        """The flat parameter vector, float32 [P]: an immutable snapshot. Assigning a vector is the only way
        to write."""
        snapshot = self._own.parameters.read()
        self._host.settle(snapshot)
        return snapshot

    @parameters.setter
    def parameters(self, v: Float[Tensor, " params"]) -> None:
        self._check_vector(v, "parameters", self._setup.layout.size)
        self._own.parameters.write(self._host.store(v))

    @property
    def buffers(self) -> Float[Tensor, " buffers"]:
        """The model's buffers (batch-norm statistics), float32 [B]: a snapshot; assigning is the only way to
        write."""
        return self._own.buffers.read()

    @buffers.setter
    def buffers(self, v: Float[Tensor, " buffers"]) -> None:
        self._check_vector(v, "buffers", self._setup.layout.buffer_size)
        self._own.buffers.write(v.detach().clone())

    @property
    def model(self) -> Model:
        """Parameters and buffers together: assignable, sendable, mixable."""
        return Model(self.parameters, self.buffers)

    @model.setter
    def model(self, model: Model) -> None:
        self.parameters, self.buffers = model

    def _check_vector(self, v: Tensor, what: str, length: int) -> None:
        if v.shape != (length,) or v.dtype != torch.float32:
            raise ValueError(
                f"node.{what}: got {v.dtype} of shape {tuple(v.shape)}; accepted: torch.float32 of shape"
                f" ({length},)"
            )

    # --- computing

    async def train(self, steps: int = 1) -> float:
        """Take local steps from the parameters as they are at the call.

        The result becomes visible at its due instant. If nothing wrote the parameters meanwhile it is
        assigned, else it is added as the update ``result - snapshot``. A node computes one thing at a time,
        first come first served. Cancelled, nothing of it is applied; the step counter has advanced.

        Args:
            steps: number of mini-batch steps.

        Returns:
            The mean training loss over the steps.
        """
        first = self.step
        self.step += steps
        return await self._learner.train(first, steps, self.lr)

    async def gradient(
        self,
        at: Float[Tensor, " params"] | Model | None = None,
        batch: int | Sequence[int] | Literal["full"] | None = None,
    ) -> Float[Tensor, " params"]:
        """The mean gradient of the loss over one batch.

        Args:
            at: where; None is the node's parameters at the call.
            batch: None is the node's next batch (the step counter advances); a number is that batch of the
                node's stream (``node.step - 1`` is the last one drawn); "full" is all of its samples; a
                sequence picks some of its samples, by their position from 0 to ``node.samples - 1``.

        Returns:
            A vector float32 [P].
        """
        model, step = self._as_model(at), self.step
        indices = self._learner.indices(step if batch is None else batch)
        if batch is None:
            self.step += 1
        return await self._learner.gradient(step, model, indices)

    async def apply(self, v: Float[Tensor, " params"]) -> None:
        """Take one optimizer step with a gradient [P] from the parameters as they are at the call; committed
        as in ``train``."""
        self._check_vector(v, "apply", self._setup.layout.size)
        await self._learner.apply(self.step, self.model, v.detach().clone(), self.lr)

    async def combine(
        self,
        own: Any,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
        aggregate: bool = False,
    ) -> Any:
        """``self_weight * own + sum_j weights[j] * inbox[j]`` in rank order; see
        :func:`gossamer.learning.mixing.combine`. What stands for who is missing, the experiment's ``gather.missing`` says
        where ``missing`` doesn't. ``self_weight`` None is one minus the sum of ``weights``; where it is given, nobody checks
        what all sum to. With ``aggregate``, own and inbox are models, and the experiment's aggregator combines them."""
        stands_in = missing or ("own" if len(inbox) == len(weights) else self._setup.missing)
        aggregator = self._setup.aggregator if aggregate else None
        mix = Mix(own, inbox, weights, self_weight, stands_in, self._index_sets, aggregator)
        return await self._host.mix(lambda: mix, lambda mixed: mixed, read=True)

    async def mix(
        self,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
    ) -> None:
        """Read the parameters, combine them with the inbox by the experiment's aggregator (the weighted mean, unless it
        names another one) and write the result, indivisibly.

        An inbox of :class:`Model` mixes parameters and buffers, any other the parameters only. ``missing`` and
        ``self_weight`` are as for :meth:`combine`.
        """
        stands_in = missing or ("own" if len(inbox) == len(weights) else self._setup.missing)
        whole = any(isinstance(payload, Model) for payload in inbox.values())

        def prepare() -> Mix:
            own = self.model if whole else self._own.parameters.read()
            aggregator = self._setup.aggregator
            return Mix(own, inbox, weights, self_weight, stands_in, self._index_sets, aggregator)

        def commit(mixed: Any) -> None:
            if whole:
                self._own.buffers.write(mixed.buffers)
                mixed = mixed.parameters
            self._own.parameters.write(mixed)

        await self._host.mix(prepare, commit, read=False)

    async def evaluate(
        self, v: Float[Tensor, " params"] | Model | None = None, on: str = "test"
    ) -> dict[str, float]:
        """Evaluate a model (None: the node's own): ``loss`` and the task's metrics, on the sample of one of the task's
        evaluation sets or on the node's training samples (``train``). It takes time on the node's clock (when simulated,
        a third of the steps that as many samples are), unlike the evaluation that the engine records.

        Raises:
            ValueError: for a name that is no evaluation set.
        """
        return await self._learner.evaluate(self.step, self._as_model(v), on)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state (momentum) before the next step that is asked for."""
        self._own.reset = True

    def _as_model(self, v: Tensor | Model | None) -> Model:
        if v is None or isinstance(v, Model):
            return v or self.model
        self._check_vector(v, "model", self._setup.layout.size)
        # The caller may go on to write its own vector; the store's vectors nobody writes.
        return Model(self._host.store(v), self.buffers)

    # --- talking

    def peers(self) -> tuple[int, ...]:
        """Every rank that this node may send to, ascending: all the others."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def send(self, to: int, payload: Payload, tag: Tag) -> Sending:
        """Queue a message, first in first out per node; what the payload holds is fixed at the call.

        Awaiting the result waits until at most one window (64 KiB) of the message is still unacknowledged;
        its ``cancel()`` takes the message back. To a peer known dead it returns at once and the message is
        counted as lost.

        Raises:
            ValueError: for a rank that is no peer, or a message above the algorithm's ``message_limit``.
            TypeError: for a payload or tag that can't travel.
        """
        self._check_peer(to)
        name = self._own_tag(tag)
        for wrapper in self._setup.wrappers:
            payload = wrapper.outgoing(self, to, payload, name)
        return self._host.send((to,), freeze(payload, self._host.is_stored), name)[0]

    def broadcast(self, to: Iterable[int], payload: Payload, tag: Tag) -> list[Sending]:
        """``send`` the same payload to several ranks, in ascending order."""
        ranks = sorted(to)
        if self._setup.wrappers:  # each receiver may get something else
            return [self.send(rank, payload, tag) for rank in ranks]
        if ranks and (ranks[0] < 0 or ranks[-1] >= self.size or self.rank in ranks):
            for rank in ranks:
                self._check_peer(rank)
        # (Its own parameters, by far the most frequent payload, lie in the store.)
        frozen = payload if payload is self._own.parameters.vector else freeze(payload, self._host.is_stored)
        return self._host.send(ranks, frozen, self._own_tag(tag))

    def _own_tag(self, tag: Tag) -> tuple[str | int, ...]:
        name = as_tag(tag)
        if self._sampler is not None and name[:1] == (SAMPLER,):
            raise ValueError(
                f"tag {tag!r}: {SAMPLER!r} is for the peer sampler; accepted: any other first part"
            )
        return name

    def _check_peer(self, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(
                f"node {self.rank}: send to rank {rank}; accepted: 0 to {self.size - 1} but itself"
            )

    async def receive(
        self,
        tag: Tag | None = None,
        source: int | None = None,
        timeout: float | None = None,
        *,
        keep_as: Tag | None = None,
    ) -> Message:
        """Take the oldest message whose tag begins with ``tag``, waiting for one if need be.

        Args:
            tag: a tag or the beginning of one; None is any.
            source: the sender; None is anyone.
            timeout: seconds to wait at most; a message delivered at that very instant still counts.
            keep_as: leave the message here for another task, under this tag in place of its own: as far as ages and
                counters go, it is taken by who takes it then.

        Raises:
            TimeoutError: if none came in time.
            PeerLost: if ``source`` is dead and left no message.
            ValueError: if ``keep_as`` begins with ``tag``, so that the message would come again and again.
        """
        prefix, kept = () if tag is None else as_tag(tag), None if keep_as is None else as_tag(keep_as)
        if kept is not None and matches(prefix, kept):
            raise ValueError(
                f"receive: keep_as {keep_as!r} begins with tag {tag!r}; accepted: one that does not"
            )
        return await self._reception.receive(prefix, source, timeout, kept)

    def drain(
        self, tag: Tag | None = None, source: int | None = None, *, newest: bool = False
    ) -> list[Message]:
        """Take every message that is here now and fits, oldest first; never waits.

        Args:
            tag: a tag or the beginning of one; None is any.
            source: the sender; None is anyone.
            newest: give only the newest of each sender and (whole) tag; the ones before it are counted as superseded.
        """
        return self._reception.drain(() if tag is None else as_tag(tag), source, newest=newest)

    async def gather(
        self, peers: Iterable[int], tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> Inbox:
        """Collect one message under a tag from each of some peers.

        Args:
            peers: whom to wait for.
            tag: the tag, or the beginning of it.
            at_least: go on as soon as this many are here (with all that are here by then).
            timeout: seconds after which to go on with what is here; None is the experiment's
                ``gather.timeout_s``.

        Returns:
            Rank -> payload in rank order; ``.missing`` names who did not send. What they send later under
            this tag is counted and dropped.

        Raises:
            PeerLost: if a peer is dead and the experiment's ``gather.lost_peer`` is "fail".
        """
        timeout = self._setup.gather_timeout_s if timeout is None else timeout
        return await self._reception.gather(set(peers), as_tag(tag), at_least, timeout)

    # --- the graph

    async def neighbors(
        self, r: int | None = None, direction: Literal["both", "in", "out"] = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        """Ranks of this node's neighbours in round ``r`` (None: the current one), ascending.

        For a directed graph the direction must be named: "in" (who sends to this node) or "out". Where neighbours are
        sampled, this is the node's view at the moment, and there is no "in".
        """
        if self._sampler is not None and layer is None:
            return self._sampler.neighbors(self._round(r), direction)
        return self._setup.topology.neighbors(self.rank, self._round(r), direction, layer)

    def mixing_weights(self, r: int | None = None) -> dict[int, float]:
        """Rank -> mixing weight of each (in-)neighbour in round ``r``, ascending; one minus their sum is the
        node's own.

        Raises:
            ValueError: where neighbours are sampled: nobody knows who will send to it.
        """
        self._check_graph("mixing_weights", "1 / (1 + n) for each of n models that have come in")
        return self._setup.topology.mixing_weights(self.rank, self._round(r))

    def topology(self, r: int | None = None) -> Graph:
        """The whole graph of round ``r``: an oracle, which no node of a real deployment has.

        Raises:
            ValueError: where neighbours are sampled: there is none.
        """
        self._check_graph("topology", 'neighbors(r, "out")')
        return self._setup.topology.graph(self._round(r))

    @property
    def view(self) -> tuple[int, ...] | None:
        """The ranks that a node with a peer sampler knows at the moment, ascending; None where there is a graph."""
        return None if self._sampler is None else self._sampler.view

    def _check_graph(self, call: str, instead: str) -> None:
        if self._sampler is not None:
            name = self._setup.topology.topology.name_of()
            raise ValueError(
                f"node.{call} on the topology {name}, whose graph no node knows; accepted there: {instead}"
            )

    def _round(self, r: int | None) -> int:
        return self.round if r is None else r

    # --- time, randomness, tasks, records

    def now(self) -> float:
        """Seconds since the run's start: virtual when simulated, real otherwise."""
        return self._host.now()

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds of the engine's time."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._host.timer(seconds, partial(_set, done))
        try:
            await done
        except asyncio.CancelledError:
            timer.cancel()
            raise

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        """A fresh generator for a key (experiment seed, purpose, this rank, counters): the same key draws the
        same again.

        Args:
            purpose: what is drawn.
            counters: what tells repeated draws apart, e.g. the round.
            shared: leave the rank out, so that all nodes draw the same.
        """
        return generator(self._setup.seed, f"algorithm/{purpose}", SHARED if shared else self.rank, *counters)

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: keyed when simulated, from the operating system when real."""
        return self._host.secret(n)

    def store(self, v: Float[Tensor, " params"]) -> Float[Tensor, " params"]:
        """An immutable copy of a vector [P]. It and its slices are sent without being copied again, however often."""
        self._check_vector(v, "store", self._setup.layout.size)
        return self._host.store(v)

    def index_set(self, name: str, indices: Int[Tensor, " k"]) -> None:
        """Register coordinates under a name, so that a :class:`Part` can name them instead of carrying them.

        Sender and receiver must register the same.
        """
        self._index_sets[name] = indices.detach().to(torch.int64, copy=True)

    def record(self, **values: float | int | str | bool | np.generic | Tensor) -> None:
        """Put values into columns of the node's next recorded row.

        Raises:
            TypeError: for a value that no record holds.
        """
        for name, value in values.items():
            if not isinstance(value, _RECORDED) and value is not None:
                raise TypeError(
                    f"node.record: {name}: got a {type(value).__name__}; accepted: numbers, text, None, lists, mappings"
                )
            # NumPy's and torch's scalars are recorded as the Python numbers that they stand for.
            self.columns[name] = value.item() if isinstance(value, np.generic | Tensor) else value

    def rounds(self) -> _Rounds:
        """``async for r in node.rounds()``: round numbers until the stop rule ends the run; rounds are
        recorded between."""
        return _Rounds(self)

    async def end_round(self, r: int) -> None:
        """What ``rounds()`` does between rounds: count round ``r`` as completed; record, evaluate and
        checkpoint if due."""
        self.round = r + 1
        if self._setup.optimizer.schedule is not None:
            self.lr = self._setup.optimizer.lr_at(self.round)
        if self._setup.optimizer.reset_every_round:
            self.reset_optimizer()
        if self._sampler is not None:
            self._sampler.round_ended(self.round)
        await self._host.end_round()

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages so far: as they are now, what is leaving counted as far as it is gone."""
        return self._host.traffic

    @property
    def finished(self) -> bool:
        """Whether the stop rule's number of rounds is reached."""
        return self._host.finished(self.round)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something beside: a task owned by this node, awaitable and cancellable.

        It starts when the spawning task next waits. It ends with the node at the latest: when ``run`` of
        every node has returned, tasks that are still there are cancelled. An exception in it, awaited or not,
        fails the node.
        """
        return self._life.spawn(coroutine)

    # --- for engines

    def _deliver_wrapped(self, message: Message) -> None:
        changed: Message | None = message
        try:
            for wrapper in reversed(self._setup.wrappers):
                if changed is not None:
                    changed = wrapper.incoming(self, changed)
        except Exception as error:  # noqa: BLE001 - an author's wrapper may raise anything
            self.fail(error)
            return
        if changed is not None:
            self._reception.mailbox.deliver(changed)

    def _deliver_sorted(self, message: Message) -> None:
        if self._sampler is not None and message.tag[:1] == (SAMPLER,):
            self._sampler.deliver(message)
            return
        try:
            if self.companion is not None and self.companion.takes(message):
                return
        except Exception as error:  # noqa: BLE001 - an author may have modified the model in place
            self.fail(error)
            return
        self._receive_own(message)

    def peer_lost(self) -> None:
        """For engines: ``host.lost`` has grown."""
        self._reception.mailbox.wake_all()
        if self.companion is not None:
            self.companion.peer_lost()

    def peer_found(self, rank: int, first: int, *, anew: bool = True) -> None:
        """For engines: a peer that was away is back; ``host.lost`` has it no more.

        Args:
            rank: the peer.
            first: the round from which on it takes part; in those before nobody waits for it.
            anew: whether it was started again, so that nothing that it owed will come.
        """
        self._reception.found(rank, first, anew=anew)

    def first_of(self, rank: int) -> int:
        """For engines: the round from which on a peer takes part, as far as was said (:meth:`peer_found`)."""
        return self._reception.first.get(rank, 0)

    def rejoin(self, first: int) -> None:
        """For engines: the node was taken for dead, or was; it takes part again from a round on. In the rounds before, if
        it is in one, it waits for nobody, since what the others sent meanwhile is lost."""
        self._reception.rejoin(first)

    def catch_up(self) -> None:
        """Go on with the round from which on this node takes part again, if it is in one before."""
        first = self._reception.first.get(self.rank, 0)
        if first > self.round:
            self.round = first
            if self._setup.optimizer.schedule is not None:
                self.lr = self._setup.optimizer.lr_at(self.round)

    def waiting(self) -> list[str]:
        """What this node's tasks wait for, in words."""
        return self._reception.mailbox.waiting()

    def owns(self, task: asyncio.Task[Any] | None) -> bool:
        """For engines: whether a task is one of this node's."""
        return self._life.owns(task)

    def fail(self, error: BaseException) -> None:
        """For engines: something of this node has failed; only the first failure counts."""
        self._life.fail(error)

    async def live(self, protocol: Coroutine[Any, Any, None]) -> None:
        """For engines: run the node's protocol until it returns; its first failure, in any of its tasks, is
        raised.

        Tasks that the protocol spawned go on until :meth:`end`.
        """
        beside = () if self._sampler is None else (self._sampler.run(),)
        await self._life.live(protocol, *beside)

    async def failure(self) -> BaseException:
        """For engines: wait for a task of this node to fail, after its protocol has returned."""
        return await self._life.failure()

    async def end(self) -> None:
        """For engines: cancel every task of this node and wait until it has ended."""
        await self._life.end()

    def checkpoint(self, **engine: Payload) -> Checkpoint:
        """For engines: all that this node needs to go on from here, at a round's end. Its vectors are shared, not copied,
        but for tensors in ``state`` that are not in the store, which the algorithm may write.

        Args:
            engine: what the engine keeps of the node beside.

        Raises:
            TypeError, ValueError: for something in ``state`` that is no payload.
        """
        try:
            state = freeze(self.state, self._host.is_stored)
        except (TypeError, ValueError) as error:
            raise type(error)(f"node.state: {error}") from None
        node = {
            "step": self.step,
            "lr": self.lr,
            "reset": self._own.reset,
            "index_sets": dict(self._index_sets),  # whose tensors are this node's own
            "columns": dict(self.columns),
            "losses": list(self.losses),
            **self._reception.saved(),
        }
        return Checkpoint(
            rank=self.rank,
            round=self.round,
            time_s=self.now(),
            model=self._own.snapshot(),
            optimizer=self._own.state,
            state=state,
            node=node,
            unread=self._reception.mailbox.unread(),
            engine=engine,
        )

    def restore(self, saved: Checkpoint) -> None:
        """For engines, before :meth:`live`: be the node that was saved. What was on its way to it is the engine's to deliver.

        Raises:
            BadInput: for the checkpoint of another node, or of another model.
        """
        layout = self._setup.layout
        shapes = [tuple(vector.shape) for vector in saved.model]
        if saved.rank != self.rank or shapes != [(layout.size,), (layout.buffer_size,)]:
            raise BadInput(
                f"checkpoint: of node {saved.rank}, with {shapes[0]} parameters and {shapes[1]} buffers; accepted: of node"
                f" {self.rank}, with ({layout.size},) and ({layout.buffer_size},)"
            )
        node = saved.node
        self.round, self.step, self.lr = saved.round, node["step"], node["lr"]
        self.model = saved.model
        self._own.state = None if saved.optimizer is None else dict(saved.optimizer)
        self._own.reset = node["reset"]
        self.state = freeze(dict(saved.state), lambda tensor: True)
        self._index_sets = dict(node["index_sets"])
        self.columns, self.losses = dict(node["columns"]), list(node["losses"])
        self._reception.restore(saved.unread, node)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Rounds:
    """The iterator behind ``Node.rounds``; an object rather than an async generator, which a break would
    leave to be finalised."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._current: int | None = None

    def __aiter__(self) -> _Rounds:
        return self

    def __iter__(self) -> NoReturn:
        raise TypeError("node.rounds() without async; accepted: async for r in node.rounds()")

    async def __anext__(self) -> int:
        if self._current is not None:
            await self._node.end_round(self._current)
        if self._node._reception.first:
            self._node.catch_up()
        if self._node.finished:
            raise StopAsyncIteration
        self._current = self._node.round
        return self._current
