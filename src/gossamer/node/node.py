"""Node: the interface between an algorithm and the system. It is the same under every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gossamer.learning.mixing import Missing, Mix, check_arguments
from gossamer.learning.parameters import Field
from gossamer.messages import freeze
from gossamer.messages.tags import Message, Model, Payload, Sending, Tag, Traffic, given_tag, matches
from gossamer.node.aggregation import aggregated, mix_informed
from gossamer.node.expectations import Form
from gossamer.node.late import LateSending
from gossamer.node.mailbox import Inbox
from gossamer.node.questions import Questions
from gossamer.node.waiting import NodeTask, resolve
from gossamer.randomness import SHARED, node_generator
from gossamer.topology import Graph

if TYPE_CHECKING:
    from gossamer.node.runtime import NodeRuntime

T = TypeVar("T")

ROW_COLUMNS = {field.name for field in fields(Traffic)} | {
    *("node", "round", "step", "time_s", "wall_s", "model_age_s", "network_bytes", "moment"),
    *("train_loss", "test_loss", "consensus_distance"),
    *("staleness_s", "staleness_max_s", "idle_share", "uplink_share", "downlink_share"),
}
_RECORDED = (int, float, str, np.generic, np.ndarray, Tensor, list, tuple, Mapping, type(None))


class Node:
    """One node, as its algorithm sees it.

    Attributes:
        rank: this node's number, from 0.
        size: number of nodes.
        samples: number of training samples that this node holds.
        steps_per_epoch: number of local steps in one pass over the node's samples.
        label_counts: number of the node's samples in each class, int64 [classes]; None if the targets are not
            classes.
        layout: fields (name, start, shape) of the flat parameter vector.
        lr: learning rate of the next steps. The optimizer's schedule, if any, sets it at the end of each
            round. A value that an algorithm assigns holds until then, or permanently without a schedule.
        state: everything that must outlive a round, by name. The values must be payloads.
        round: number of completed rounds.
        step: number of local steps requested so far."""

    def __init__(self, runtime: NodeRuntime) -> None:
        setup = runtime.setup
        self.rank, self.size = runtime.rank, setup.experiment.nodes
        self.samples = len(setup.parts[self.rank])
        self.steps_per_epoch = runtime.own.steps_per_epoch
        self.label_counts = None if setup.labels is None else setup.labels[self.rank]
        self.layout: tuple[Field, ...] = setup.layout.parameters
        self.lr = setup.experiment.optimizer.lr_at(0)
        self.state: dict[str, Payload] = {}
        self.round = 0
        self.step = 0
        self._runtime, self._setup, self._host = runtime, setup, runtime.host
        self._own, self._mailbox = runtime.own, runtime.mailbox
        self._has_buffers = setup.layout.buffer_size > 0
        self._questions = Questions(self, self._mailbox)

    # --- the model

    @property
    def parameters(self) -> Float[Tensor, " params"]:
        """The flat parameter vector, float32 [P]: an immutable snapshot. Assigning a vector is the only way to write."""
        snapshot = self._own.parameters.read()
        self._host.settle(snapshot)
        return snapshot

    @parameters.setter
    def parameters(self, v: Float[Tensor, " params"]) -> None:
        self._check_vector(v, "parameters", self._setup.layout.size)
        self._own.parameters.write(self._host.store(v))

    @property
    def buffers(self) -> Float[Tensor, " buffers"]:
        """The model's buffers (batch-norm statistics), float32 [B]: a snapshot; assigning is the only way to write."""
        return self._own.buffers.read()

    @buffers.setter
    def buffers(self, v: Float[Tensor, " buffers"]) -> None:
        self._check_vector(v, "buffers", self._setup.layout.buffer_size)
        self._own.buffers.write(v.detach().clone())

    @property
    def model(self) -> Model:
        """Parameters and buffers together: what nodes send, mix and assign. Assigning a model that has only
        some of the parameters (from a sparsifying codec) sets those and keeps the others."""
        return Model(self.parameters, self._own.buffers.read())

    @model.setter
    def model(self, model: Model) -> None:
        if type(model.parameters) is not Tensor:
            model = model.over(self.model)
        self.parameters = model.parameters
        if self._has_buffers or len(model.buffers):
            self.buffers = model.buffers

    def _set_mixed(self, model: Model) -> None:
        self._check_vector(model.parameters, "mixed", self._setup.layout.size)
        self._runtime.shown.mixed(model)

    mixed = property(
        fset=_set_mixed,
        doc="""Assign the result of a mixing that is done by assignment, without :meth:`mix` or an aggregating
        :meth:`combine`. Records show it with ``evaluation.of: mixed``. It can only be assigned.""",
    )

    def _check_vector(self, v: Tensor, name: str, length: int) -> None:
        if v.shape != (length,) or v.dtype != torch.float32:
            actual = f"{v.dtype} of shape {tuple(v.shape)}"
            raise ValueError(f"node.{name}: got {actual}; accepted: torch.float32 of shape ({length},)")

    # --- computations

    async def train(self, steps: int = 1) -> float:
        """Take mini-batch steps from the parameters as of the call. Returns the mean training loss over the
        steps.

        The result is applied when the computation ends. It is assigned if nothing has written the parameters
        since the call; otherwise the update ``result - snapshot`` is added. A node computes one thing at a
        time, in the order of the calls. A cancelled call applies nothing, but the step counter stays
        advanced."""
        first = self.step
        self.step += steps
        return await self._own.train(first, steps, self.lr)

    async def gradient(
        self,
        at: Float[Tensor, " params"] | Model | None = None,
        batch: int | Sequence[int] | Literal["full"] | None = None,
    ) -> Float[Tensor, " params"]:
        """The mean gradient of the loss over one batch, a vector float32 [P].

        Args:
            at: the point at which the gradient is taken. None is the node's parameters as of the call.
            batch: None is the node's next batch, and advances the step counter. A number is that batch of the
                node's stream (``node.step - 1`` is the last one drawn). "full" is all of the node's samples.
                A sequence selects samples by position, from 0 to ``node.samples - 1``."""
        model, step = self._as_model(at), self.step
        indices = self._own.indices(step if batch is None else batch)
        if batch is None:
            self.step += 1
        return await self._own.gradient(step, model, indices)

    async def apply(self, v: Float[Tensor, " params"]) -> None:
        """Take one optimizer step with a gradient [P] from the parameters as of the call. The result is
        applied as in ``train``."""
        self._check_vector(v, "apply", self._setup.layout.size)
        await self._own.apply(self.step, self.round, self.model, v.detach().clone(), self.lr)

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
        """``self_weight * own + sum_j weights[j] * inbox[j]`` in rank order; see
        :func:`gossamer.learning.mixing.combine`.

        Args:
            own: a vector of any length, or a :class:`Model`; integer vectors are summed in the ring of their dtype.
            inbox: rank -> a vector, a :class:`Part` of one or a :class:`Model`.
            weights: rank -> weight.
            self_weight: weight of ``own``. None is one minus the sum of ``weights``, which is negative if that
                is above one.
            missing: what replaces values that did not arrive, from absent ranks or at coordinates that a part
                lacks. None is the experiment's ``gather.missing``.
            aggregate: whether the experiment's aggregator combines the models in ``own`` and ``inbox``.
            differences: return ``sum_j weights[j] * (inbox[j] - own)``, which is what mixing would add to ``own``. Each
                difference is formed before it is summed: an algorithm that adds the result to a correction in every
                round needs this, since the rounding of ``combine(...) - own`` is in proportion to ``own`` and would
                stay in the correction. Not with ``self_weight`` or ``aggregate``.

        Returns:
            A vector or a model, of the same type as ``own``.

        Raises:
            ValueError: for a rank without a weight, other lengths, or arguments that ``differences`` excludes.
            TypeError: for arguments of other kinds, such as in another order."""
        self._own.check()
        check_arguments("combine", inbox, weights, own)
        if differences and (aggregate or self_weight is not None):
            raise ValueError("combine: differences with aggregate or self_weight; accepted: neither of them")
        whole, setup = isinstance(own, Model), self._setup
        inbox = self._mailbox.fitting(inbox, own)
        if not (whole and len(own.buffers)):
            own, inbox = own.parameters if whole else own, _parameters(inbox)
        aggregator = setup.aggregator if aggregate else None
        if aggregator is not None and aggregator.informed:
            mixed: Any = await aggregated(self, aggregator, own, inbox, weights, self_weight)
            self._runtime.shown.mixed(mixed if isinstance(mixed, Model) else Model(mixed))
            return Model(mixed) if whole and not isinstance(mixed, Model) else mixed
        terms = own, inbox, weights, self_weight, missing, aggregator, setup.experiment.gather.missing
        mixed = await self._host.mix(Mix(*terms, differences), read=True)
        if aggregate:
            self._runtime.shown.mixed(mixed if isinstance(mixed, Model) else Model(mixed))
        return Model(mixed) if whole and not isinstance(mixed, Model) else mixed

    async def mix(
        self,
        inbox: Mapping[int, Payload],
        weights: Mapping[int, float],
        *,
        self_weight: float | None = None,
        missing: Missing | None = None,
    ) -> None:
        """Combine the parameters with the inbox by the experiment's aggregator (the weighted mean by default)
        and write the result, in one atomic step.

        An inbox of :class:`Model` mixes the buffers too, if there are any. ``missing`` and ``self_weight``
        are as in :meth:`combine`."""
        self._own.check()
        check_arguments("mix", inbox, weights)
        inbox = self._mailbox.fitting(inbox)
        whole = self._has_buffers and any(isinstance(payload, Model) for payload in inbox.values())
        if not whole:
            inbox = _parameters(inbox)
        setup = self._setup
        if setup.aggregator is not None and setup.aggregator.informed:
            await mix_informed(self, setup.aggregator, inbox, weights, self_weight, whole=whole)
            return
        terms = inbox, weights, self_weight, missing, setup.aggregator, setup.experiment.gather.missing
        await self._host.mix(_MixOwn(None, *terms, node=self, whole=whole), read=False)

    async def evaluate(
        self, v: Float[Tensor, " params"] | Model | None = None, on: str = "test"
    ) -> dict[str, Any]:
        """Evaluate a model (None: the node's own) on one of the task's evaluation sets, subsampled as the
        experiment says, or on the node's training samples (``train``). Returns ``loss`` and the task's
        metrics (numbers, but for metrics that return lists or None). Unlike the evaluation that the engine records,
        it takes time on the node's clock: in a simulation, a third of a step for each batch of samples. ValueError
        for an unknown evaluation set."""
        return await self._own.evaluate(self.step, self._as_model(v), on)

    def reset_optimizer(self) -> None:
        """Clear the optimizer's state (such as momentum) before the next requested step."""
        self._own.reset = True

    def _as_model(self, v: Tensor | Model | None) -> Model:
        self._own.check()
        if v is None or isinstance(v, Model):
            return v or self.model
        self._check_vector(v, "model", self._setup.layout.size)
        # The caller may modify its own vector later; vectors in the store are never modified.
        return Model(self._host.store(v), self.buffers)

    # --- messages

    def peers(self) -> tuple[int, ...]:
        """The ranks of all other nodes, ascending. This node may send to any of them."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def send(self, to: int, payload: Payload, tag: Tag, *, exact: bool = False) -> Sending:
        """Queue a message. Each node's queue is first in, first out. The payload is fixed at the call.

        Awaiting the result waits until at most one window (64 KiB) of the message is unacknowledged. Its
        ``done()`` tells whether that is so, and its ``cancel()`` cancels the message. A message to a peer
        known to be dead is counted as lost. If encoding takes time (``steps_per_encoding`` of the compute
        profile), the message is queued once it is encoded, and later messages and computations of this node
        wait for it.

        Args:
            to: the receiver's rank.
            payload: the content. The experiment's codec encodes every :class:`Model` in it, and nothing else.
                Send ``node.model``, or mark your own vector as ``Model(vector)``. Vectors at different places in
                a payload, or under different tags (numbers in a tag do not count), are different streams: a
                codec remembers each by itself.
            tag: what it is about.
            exact: do not encode models. Use it for differences and sums of models. A codec, an attack written as
                one included, then does nothing; name such messages in the algorithm's ``unencoded``.

        Raises:
            ValueError: for a rank that is not a peer, a message larger than the algorithm's ``message_limit``, a
                model that the codec can't encode, or the node's 17th stream of models.
            TypeError: for a payload or tag that can't be sent."""
        return self.broadcast((to,), payload, tag, exact=exact)[0]

    def broadcast(
        self, to: Iterable[int], payload: Payload, tag: Tag, *, exact: bool = False
    ) -> list[Sending]:
        """Send the same payload to several ranks, in ascending order. It is encoded once. See
        :meth:`send`."""
        ranks = sorted(to)
        if ranks and (ranks[0] < 0 or ranks[-1] >= self.size or self.rank in ranks):
            accepted = f"0 to {self.size - 1}, except its own rank"
            raise ValueError(f"node {self.rank}: send to ranks {ranks}; accepted: {accepted}")
        tag = given_tag(tag)
        runtime = self._runtime
        form = runtime.expectations.sent(tag, payload)
        if form is None and self._setup.experiment.stop.diverged == "end" and runtime.look_for_divergence():
            return [self._withhold() for _ in ranks]
        return self._send(ranks, payload, tag, exact, form) if ranks else []

    def _send(
        self,
        ranks: Sequence[int],
        payload: Payload,
        tag: tuple[str | int, ...],
        exact: bool,
        form: Form | None,
    ) -> list[Sending]:
        """Queue a payload as it is. What acts on all messages of a node, such as a codec, changes it before. ``form`` is that
        of the payload, if it is known and the payload has no non-finite values."""
        own = self._own.parameters.vector
        # (The node's own parameters, by far the most frequent payload, are in the store.)
        if payload is not own and not (
            type(payload) is Model and payload.parameters is own and not self._has_buffers
        ):
            payload = freeze(payload, self._host.is_stored)
        return self._host.send(ranks, payload, tag, form)

    def _withhold(self) -> Sending:
        """A message that is cancelled before it is queued."""
        sending = LateSending(self._host)
        sending.cancel()
        return sending

    def compress(self, v: Float[Tensor, " params"]) -> tuple[Any, Float[Tensor, " params"]]:
        """Encode a difference of models or a piece of a model with the experiment's codec, without sending
        it. For algorithms with ``sends_differences`` or ``sends_pieces``.

        Args:
            v: the difference, float32 [P], or the piece, float32 [n].

        Returns:
            The vector to send, as ``Model(sent, node.buffers)``, and the vector that receivers decode from
            it. Without a codec, both are ``v``."""
        algorithm = self._setup.experiment.algorithm
        if not (algorithm.sends_differences or algorithm.sends_pieces()):
            raise ValueError("node.compress: accepted with sends_differences = True, or with sends_pieces()")
        self._check_vector(v, "compress", len(v) if algorithm.sends_pieces() else self._setup.layout.size)
        return self._compress(v)

    def _compress(self, v: Float[Tensor, " params"]) -> tuple[Any, Float[Tensor, " params"]]:
        """What :meth:`compress` returns. A codec replaces it."""
        return v, v

    async def receive(
        self,
        tag: Tag | None = None,
        source: int | None = None,
        timeout: float | None = None,
        *,
        keep_as: Tag | None = None,
    ) -> Message:
        """Take the oldest message whose tag begins with ``tag``, and wait for one if there is none.

        Args:
            tag: a tag or a prefix of one; None is any tag.
            source: the sender; None is any.
            timeout: maximum wait in seconds. A message delivered at exactly that time still counts.
            keep_as: keep the message in the mailbox for another task, under this tag instead of its own. Ages
                and counters include the message when that task takes it.

        Raises:
            TimeoutError: if no message arrived in time.
            PeerLost: if ``source`` is dead and left no message.
            ValueError: if ``keep_as`` begins with ``tag``: the same message would be returned again."""
        self._own.check()
        prefix, kept = () if tag is None else given_tag(tag), None if keep_as is None else given_tag(keep_as)
        if kept is not None and matches(prefix, kept):
            raise ValueError(f"keep_as {keep_as!r} begins with tag {tag!r}; accepted: one that does not")
        return await self._mailbox.receive(prefix, source, timeout, kept)

    def drain(
        self, tag: Tag | None = None, source: int | None = None, *, newest: bool = False
    ) -> list[Message]:
        """Take every matching message that has arrived, oldest first, without waiting. Arguments are as in
        :meth:`receive`. ``newest`` returns only the newest message of each sender and complete tag; the older
        ones are counted as superseded."""
        return self._mailbox.drain(() if tag is None else given_tag(tag), source, newest=newest)

    async def gather(
        self, peers: Iterable[int], tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> Inbox:
        """Collect one message under a tag from each of some peers.

        Args:
            peers: the ranks to wait for.
            tag: the tag, or a prefix of it.
            at_least: return as soon as this many messages have arrived. The result has all that have arrived
                by then.
            timeout: seconds after which to return with the messages that have arrived. None is the
                experiment's ``gather.timeout_s``.

        Returns:
            Rank -> payload in rank order. Its ``missing`` lists the ranks that sent nothing or a malformed
            message (:meth:`expect`). If messages of these ranks under this tag arrive later, they are counted
            and dropped. PeerLost if a peer is dead and the experiment's ``gather.lost_peer`` is "fail"."""
        self._own.check()
        timeout = self._setup.experiment.gather.timeout_s if timeout is None else timeout
        return await self._mailbox.gather(set(peers), given_tag(tag), at_least, timeout)

    def expect(
        self,
        tag: Tag,
        *like: Payload,
        check: Callable[[Message], Any] | None = None,
        exact: bool = False,
    ) -> None:
        """Declare what peers send under tags that begin with ``tag``. A number in the tag stands for any
        number. ``gather.malformed`` determines what happens to other messages. Without a declaration, a node
        expects payloads of the forms that it has itself sent under the tag: the same kinds, keys, dtypes and
        shapes. It accepts anything under a tag that it has not used. Non-finite values are always refused.

        Args:
            tag: a tag or a prefix of one. The longest matching declaration applies.
            like: payloads of the accepted forms. Without any, all forms are accepted.
            check: called with each decoded message of such a form. It refuses the message by returning False
                or raising.
            exact: whether models arrive unencoded, as in :meth:`send`."""
        self._runtime.expectations.declare(tag, like, check, exact=exact)

    # --- questions and answers

    async def ask(
        self,
        peer: int,
        payload: Payload,
        tag: Tag,
        timeout: float | None = None,
        *,
        keep_s: float | None = None,
        exact: bool = False,
    ) -> Payload:
        """Send a question to a peer that answers such questions (:meth:`answer`), and wait for the answer.
        Returns its payload.

        The answer to a question (tag, ...) has the tag ("answer", ...). The parts after the first, such as
        the round, distinguish the open questions between two nodes. An answer without an open question is
        counted as late and dropped.

        Args:
            peer: the rank to ask.
            payload: the question.
            tag: what it is about.
            timeout: maximum wait in seconds; None sets no limit.
            keep_s: seconds after the question for which :meth:`next_answer` waits for the answer. An answer
                that arrives after ``timeout`` is kept for that method and for :meth:`drain_answers`. None: a
                late answer is counted and dropped.
            exact: as in :meth:`send`.

        Raises:
            TimeoutError: if no answer arrived in time.
            PeerLost: if the peer is dead.
            ValueError: if a question to this peer with the same tag is still open."""
        self._own.check()
        return (await self._ask(peer, payload, given_tag(tag), timeout, keep_s, exact=exact)).payload

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
        """The answer as a message."""
        return await self._questions.ask(peer, payload, tag, timeout, keep_s, exact=exact)

    def answer(
        self, tag: Tag, handler: Callable[[Message], Payload], *, exact: bool = False
    ) -> NodeTask[None]:
        """Answer every question whose tag begins with ``tag``, in a task of this node, until the run ends.
        ``handler`` returns the answer to a question; no other task of the node runs meanwhile. ``exact`` is
        as in :meth:`send`."""
        return self.spawn(self._questions.serve(given_tag(tag), handler, exact))

    def drain_answers(self) -> list[Payload]:
        """Take the answers that arrived too late for their :meth:`ask`, oldest first, without waiting."""
        return [answer.payload for answer in self._late_answers()]

    def _late_answers(self) -> list[Message]:
        """The messages of :meth:`drain_answers`."""
        return self._questions.drain()

    async def next_answer(self) -> Payload | None:
        """Wait for the answer to the oldest open question. None if no question is open."""
        self._own.check()
        answer = await self._next_answer()
        return None if answer is None else answer.payload

    async def _next_answer(self) -> Message | None:
        """The message of :meth:`next_answer`."""
        return await self._questions.next()

    # --- the graph

    async def neighbors(
        self, r: int | None = None, direction: Literal["both", "in", "out"] = "both", layer: str | None = None
    ) -> tuple[int, ...]:
        """Ranks of this node's neighbours in round ``r`` (None: the current one), ascending. A directed graph
        requires a direction: "in" (nodes that send to this one) or "out". If neighbours are sampled, this is
        the node's current view, and only "out" is accepted."""
        return self._setup.topology.neighbors(self.rank, self._round(r), direction, layer)

    def mixing_weights(self, r: int | None = None) -> dict[int, float]:
        """Rank -> mixing weight of each (in-)neighbour in round ``r``, ascending; one minus their sum is the
        node's own. ValueError if neighbours are sampled: the in-neighbours are unknown."""
        return self._setup.topology.mixing_weights(self.rank, self._round(r))

    def topology(self, r: int | None = None) -> Graph:
        """The whole graph of round ``r``. This is an oracle: no node of a real deployment knows the graph.
        ValueError if neighbours are sampled, because there is no global graph."""
        return self._setup.topology.graph(self._round(r))

    @property
    def view(self) -> tuple[int, ...] | None:
        """The ranks in the peer sampler's current view, ascending; None for a topology with a graph."""
        return None

    def _round(self, r: int | None) -> int:
        return self.round if r is None else r

    # --- time, randomness, tasks, records

    def now(self) -> float:
        """Seconds since the run's start: virtual when simulated, real otherwise."""
        return self._host.now()

    async def sleep(self, seconds: float) -> None:
        """Sleep for some seconds of the engine's clock."""
        self._own.check()
        done = self._host.slot()
        timer = self._host.timer(seconds, partial(resolve, done))
        try:
            await done
        except asyncio.CancelledError:
            timer.cancel()
            raise

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        """A new generator for the key (experiment seed, purpose, this rank, counters). The same key always
        gives the same draws. Counters, e.g. the round, distinguish repeated draws. ``shared`` leaves the rank
        out of the key, so that all nodes draw the same numbers. A wrapper and a codec of your own have keys of
        their own: they never draw the numbers of the algorithm, or of each other."""
        rank = SHARED if shared else self.rank
        return node_generator(self._setup.experiment.seed, purpose, rank, *counters)

    def secret(self, n: int) -> bytes:
        """n bytes that no other node knows: from the operating system, or, in a simulation, from a generator keyed by the
        experiment's seed. So two equal simulations have equal secrets, and they are secret only within the simulation."""
        return self._host.secret(n)

    def store(self, v: Float[Tensor, " params"]) -> Float[Tensor, " params"]:
        """An immutable copy of a vector [P]. It and its slices can be sent any number of times without
        another copy."""
        self._check_vector(v, "store", self._setup.layout.size)
        return self._host.store(v)

    def record(self, **values: float | int | str | bool | np.generic | Tensor) -> None:
        """Put values into columns of the node's next recorded row. TypeError for a value that can't be
        recorded, ValueError for a name that is no identifier, or that of a column that every row has, or that begins with an
        evaluation set's name and ``_``, as the columns of its metrics do."""
        if fixed := ROW_COLUMNS & values.keys():
            raise ValueError(f"node.record: {min(fixed)}: every row has this column; accepted: another name")
        for name, value in values.items():
            if name.startswith(self._setup.set_prefixes):
                raise ValueError(
                    f"node.record: {name}: metrics of an evaluation set have such names; accepted: another one"
                )
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(f"node.record: {name!r}; accepted: an identifier: letters, digits and _")
            if not isinstance(value, _RECORDED):
                kind = type(value).__name__
                raise TypeError(
                    f"node.record: {name}: got a {kind}; accepted: numbers, text, None, lists, mappings"
                )
            # NumPy and torch scalars are recorded as Python numbers.
            recorded = value.item() if isinstance(value, np.generic | Tensor) else value
            if isinstance(recorded, int) and not -(2**63) <= recorded < 2**63:
                got = f"a whole number of {recorded.bit_length()} bits"
                raise ValueError(f"node.record: {name}: got {got}; accepted: those of 64 bits, with a sign")
            self._runtime.columns[name] = recorded

    def rounds(self) -> AsyncRounds:
        """``async for r in node.rounds()``: the round numbers, until the stop rule ends the run. Each round
        is recorded when it ends."""
        self._runtime.counts_rounds = True
        return AsyncRounds(self)

    async def end_round(self, r: int) -> None:
        """Complete round ``r``: count it, and record, evaluate and checkpoint if due."""
        self._runtime.counts_rounds = True
        self._own.check()
        if self._own.encoding is not None:
            await self._own.encoded()
        self.round, optimizer = r + 1, self._setup.experiment.optimizer
        if optimizer.schedule is not None:
            self.lr = optimizer.lr_at(self.round)
        if optimizer.reset_every_round:
            self.reset_optimizer()
        for layer in self._runtime.layers:
            layer.round_counted(self.round)
        self._runtime.shown.end_round()
        await self._host.end_round()

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages so far. A message in transmission counts with the part that has been sent."""
        return self._host.traffic

    @property
    def finished(self) -> bool:
        """Whether this node has completed the number of rounds in the stop rule."""
        return self._host.finished(self.round)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> NodeTask[T]:
        """Run a coroutine concurrently: a task owned by this node, awaitable and cancellable. It starts when
        the spawning task next waits. Tasks that still run when ``run`` of every node has returned are
        cancelled. An exception in a task, awaited or not, fails the node."""
        return self._runtime.spawn(coroutine)


@dataclass(eq=False, kw_only=True)
class _MixOwn(Mix):
    """A mixing step that reads and replaces the node's own model, including its buffers if ``whole``."""

    node: Node
    whole: bool

    def prepare(self) -> None:
        self.own = self.node.model if self.whole else self.node._own.parameters.read()

    def commit(self, result: Any) -> None:
        own = self.node._own
        if self.whole:
            own.buffers.write(result.buffers)
            result = result.parameters
        own.parameters.write(result)
        self.node._runtime.shown.mixed(own.snapshot())


def _parameters(inbox: Mapping[int, Payload]) -> dict[int, Payload]:
    """A copy of the inbox with each model replaced by its parameters."""
    if Model not in {*map(type, inbox.values())}:
        return dict(inbox)
    return {rank: item.parameters if type(item) is Model else item for rank, item in inbox.items()}


class AsyncRounds:
    """The iterator behind ``Node.rounds``. An async generator would remain unfinalised after a ``break``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._current: int | None = None

    def __aiter__(self) -> AsyncRounds:
        return self

    async def __anext__(self) -> int:
        node, runtime = self._node, self._node._runtime
        if self._current is not None:
            await node.end_round(self._current)
        runtime.catch_up()
        if node.finished:
            runtime.shown.end_rounds()
            raise StopAsyncIteration
        self._current = node.round
        for layer in runtime.layers:
            await layer.begin_round(self._current)
        runtime.shown.begin_round()
        return self._current
