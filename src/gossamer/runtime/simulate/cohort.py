# mypy: disable-error-code="override, assignment"
"""The rounds in which all nodes do the same at the same instants, computed for all nodes together.

The algorithm runs once, for all nodes, on a :class:`Cohort`: a node whose values are those of all nodes
(:mod:`per_node`). Its calls return at once and move the virtual clock. A round that does not fit, because an ``if``
separates the nodes, a call needs a node of its own, or something fails, is undone. From its beginning, the nodes
go on by themselves, as after a checkpoint. So a cohort only saves time: the record of a run is the same without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from gossamer.config import Experiment, Simulate
from gossamer.learning.computation import ComputationKind
from gossamer.learning.mixing import Missing, Mix, Sum, own_weight
from gossamer.learning.parameters import is_finite
from gossamer.messages.tags import Model, Payload, Tag, as_tag
from gossamer.network.compute import Constant
from gossamer.node import Node, NodeRuntime
from gossamer.node.mailbox import Inbox
from gossamer.per_node import Divergence, PerNode, of
from gossamer.randomness import SHARED, generator
from gossamer.runtime.recording import is_due
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import NS, to_ns
from gossamer.runtime.simulate.host import SimContext
from gossamer.runtime.simulate.links import Links

T = TypeVar("T")

_KEEPS = (bool, int, float, str, type(None), Tensor, PerNode)


def fits(setup: Setup, links: Links) -> bool:
    """Whether all nodes of a run may do the same at the same instants. Only latency, the same between all
    nodes, may delay messages."""
    experiment: Experiment = setup.experiment
    stop, evaluation = experiment.stop, experiment.evaluation
    return (
        isinstance(experiment.engine, Simulate)
        and experiment.engine.cohort
        and links.only_latency_ns is not None
        and type(setup.compute) is Constant
        and setup.aggregator is None
        and setup.layout.buffer_size == 0
        and all(len(part) for part in setup.parts)
        and stop.rounds is not None
        and stop.time_s is None
        and stop.target is None
        and stop.most_bytes(experiment.nodes) == inf
        and evaluation.every_s is None
        and evaluation.timeline is None
        and experiment.gather.timeout_s is None
        and experiment.codec is None
        and experiment.secure_aggregation is None
        and not (setup.faults or experiment.wrappers or experiment.checkpoint.on or setup.topology.sampled)
    )


@dataclass(eq=False)
class _State:
    """The nodes between two rounds, and what they have done since they were last brought up to date."""

    parameters: list[Tensor]
    optimizer: list[Any]
    lr: Any
    state: dict[str, Any]
    columns: dict[str, Any]
    now_ns: int
    round: int = 0
    step: int = 0
    reset: bool = False
    losses: list[list[float]] = field(default_factory=list)  # of each call of train, by rank
    busy_ns: int = 0
    # By rank: bytes sent and received, messages sent and received; messages taken; the sum of their ages and the largest.
    traffic: Any = None
    taken: Any = None
    ages: Any = None

    def copy(self) -> _State:
        copied: dict[str, Any] = {name: dict(getattr(self, name)) for name in ("state", "columns")}
        arrays = {name: getattr(self, name).copy() for name in ("traffic", "taken", "ages")}
        return replace(self, losses=list(self.losses), **copied, **arrays)


@dataclass(frozen=True, eq=False)
class _Broadcast:
    """A message of every node to some others."""

    sources: Sequence[Sequence[int]]  # by rank: those from which a node gets a message, ascending
    payload: Any
    sent_ns: int
    versions: list[tuple[Tensor, int]]


class _Inboxes(PerNode):
    """What the nodes have gathered: one payload of each source. Dicts are made only for an algorithm that looks into
    them.

    Attributes:
        sources: of each node, ascending.
        vectors: the payloads by rank, if they are vectors or models; else empty."""

    __slots__ = ("_made", "_payload", "sources", "vectors")

    def __init__(self, payload: Any, sources: Sequence[Sequence[int]]) -> None:
        self._payload, self.sources = payload, sources
        vectors: Any = payload.parameters if isinstance(payload, Model) else payload
        known = isinstance(vectors, PerNode) and isinstance(vectors.each[0], Tensor)
        self.vectors: Sequence[Tensor] = vectors.each if known else ()
        self._made: list[Inbox] = []

    @property
    def each(self) -> Sequence[Any]:
        if not self._made:
            payloads = [of(self._payload, rank) for rank in range(len(self.sources))]
            self._made = [Inbox({rank: payloads[rank] for rank in ranks}) for ranks in self.sources]
        return self._made


class _Call:
    """A call of the cohort, made when it is awaited. One that is never awaited is found at the end of the round."""

    def __init__(self, cohort: Cohort, function: Callable[[], Any]) -> None:
        self._cohort, self._function = cohort, function
        cohort.open_calls += 1

    def __await__(self) -> Generator[Any, None, Any]:
        self._cohort.open_calls -= 1
        return self._function()
        yield  # makes this a generator


def _call(method: Callable[..., Any]) -> Any:
    """Make a method awaitable."""
    return lambda self, *args, **named: _Call(self, partial(method, self, *args, **named))


class Cohort(Node):
    """All nodes of a run as one node. ``round_ended`` is called when all nodes have completed a round, with ``due``
    if they are recorded, and returns whether the run is over."""

    def __init__(
        self,
        context: SimContext,
        nodes: Sequence[NodeRuntime],
        round_ended: Callable[..., bool],
    ) -> None:
        setup = self._setup = context.setup
        self._context, self._nodes = context, nodes
        self._round_ended = round_ended
        self._topology, self._optimizer = setup.topology, setup.experiment.optimizer
        count = self.size = len(nodes)
        self.layout, self.rank = setup.layout.parameters, PerNode(range(count))
        self.samples = PerNode([len(part) for part in setup.parts])
        self.steps_per_epoch = PerNode([node.own.steps_per_epoch for node in nodes])
        self.label_counts = None if setup.labels is None else PerNode(list(setup.labels))
        self._all = _State(
            [node.own.parameters.vector for node in nodes],
            [node.own.state for node in nodes],
            nodes[0].node.lr,
            {},
            {},
            context.clock.now_ns,
            traffic=np.zeros((4, count), dtype=np.int64),
            taken=np.zeros(count, dtype=np.int64),
            ages=np.stack([np.zeros(count), np.full(count, -inf)]),
        )
        self._start = self._all.copy()
        self._in_round = False
        self.open_calls = 0
        self._sent: dict[tuple[str | int, ...], _Broadcast] = {}
        self._cached: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def advance(self) -> None:
        """Compute as many rounds as fit, and bring the nodes up to date. They go on from there."""
        protocol, others = self._setup.experiment.algorithm.run(self), asyncio.all_tasks()
        with (
            closing(protocol),
            suppress(Exception, Divergence),
        ):  # the nodes meet the same failure by themselves
            protocol.send(None)
        for task in asyncio.all_tasks() - others:  # asyncio's own, with which an algorithm leaves the cohort
            task.cancel()
        self._all = self._start
        self._update()

    def __getattr__(self, name: str) -> NoReturn:
        """Any other call needs a node of its own."""
        raise Divergence

    # --- rounds

    def rounds(self) -> Cohort:
        return self

    def __aiter__(self) -> Cohort:
        return self

    async def __anext__(self) -> int:
        if self._in_round:
            await self.end_round(self.round)
        self._in_round = True
        if self.finished:
            raise StopAsyncIteration
        return self.round

    @_call
    def end_round(self, r: int) -> None:
        now, optimizer = self._all, self._optimizer
        if self._sent or self.open_calls:
            raise Divergence  # messages under way, or a call that nobody has awaited
        now.round = r + 1
        if optimizer.schedule is not None:
            now.lr = optimizer.lr_at(now.round)
        now.reset |= optimizer.reset_every_round
        if any(not isinstance(value, _KEEPS) for value in now.state.values()):
            raise Divergence
        if due := is_due(self._setup, now.round):
            if not all(map(is_finite, now.parameters)):
                raise Divergence
            self._update()
        else:
            self._context.clock.now_ns = now.now_ns
        over = self._round_ended(due=due)
        self._start = now.copy()
        if over:
            raise Divergence

    def _update(self) -> None:
        """Bring the nodes up to date."""
        now, context = self._all, self._context
        context.clock.now_ns = now.now_ns
        traffics, counts, ages = now.traffic.T.tolist(), now.taken.tolist(), now.ages.T.tolist()
        for rank, runtime in enumerate(self._nodes):
            node, own = runtime.node, runtime.own
            if own.parameters.vector is not now.parameters[rank]:
                own.parameters.write(now.parameters[rank])
            own.state, own.reset = now.optimizer[rank], now.reset
            own.losses += [losses[rank] for losses in now.losses if losses[rank] == losses[rank]]
            node.round, node.step, node.lr = now.round, now.step, of(now.lr, rank)
            node.state = of(now.state, rank)
            node.record(**of(now.columns, rank))
            traffic, (sent_bytes, received_bytes, sent, received) = (
                context.links.counters(rank),
                traffics[rank],
            )
            traffic.bytes_sent += sent_bytes
            traffic.bytes_received += received_bytes
            traffic.messages_sent += sent
            traffic.messages_received += received
            runtime.mailbox.add_ages(counts[rank], *ages[rank])
            context.compute.add_busy(rank, now.busy_ns)
        now.losses, now.columns, now.busy_ns = [], {}, 0
        now.traffic[:], now.taken[:], now.ages[0], now.ages[1] = 0, 0, 0.0, -inf

    @property
    def round(self) -> int:
        return self._all.round

    @property
    def step(self) -> int:
        return self._all.step

    @property
    def finished(self) -> bool:
        last = self._setup.experiment.stop.rounds
        return last is not None and self._all.round >= last

    # --- the model

    @property
    def parameters(self) -> PerNode:
        return PerNode(self._all.parameters)

    @parameters.setter
    def parameters(self, v: PerNode) -> None:
        self._all.parameters = self._rows(v)

    @property
    def model(self) -> Model:
        return Model(self.parameters)  # type: ignore[arg-type]

    @model.setter
    def model(self, model: Model) -> None:
        self.parameters = model.parameters

    @property
    def lr(self) -> Any:
        return self._all.lr

    @lr.setter
    def lr(self, lr: Any) -> None:
        self._all.lr = lr

    @property
    def state(self) -> dict[str, Any]:
        return self._all.state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._all.state = state

    def _rows(self, vectors: Any) -> list[Tensor]:
        """Rows of the store with the nodes' vectors [P]."""
        rows = self._context.rows
        if not isinstance(vectors, PerNode):
            raise Divergence
        return [
            rows.store(vector) if vector.shape == (rows.length,) else _refuse() for vector in vectors.each
        ]

    def store(self, v: PerNode) -> PerNode:
        return PerNode(self._rows(v))

    # --- computing

    @_call
    def train(self, steps: int = 1) -> PerNode:
        now, first = self._all, self._all.step
        self._check_round()
        jobs, fresh = [], now.reset
        for rank, (node, vector) in enumerate(zip(self._nodes, now.parameters, strict=True)):
            state = now.optimizer[rank]
            if fresh or state is None:
                state = self._optimizer.init(vector)
            start = Model(vector, node.own.buffers.vector)
            jobs.append(node.own.train_job(start, first, steps, of(now.lr, rank), state))
        results = self._context.executor.execute(ComputationKind.TRAIN, jobs)
        duration_ns = to_ns(self._setup.compute.seconds(0, 0, first, steps, 0.0))
        now.now_ns, now.busy_ns, now.step = now.now_ns + duration_ns, now.busy_ns + duration_ns, first + steps
        now.parameters = [result.model.parameters for result in results]
        now.optimizer, now.reset = [result.state for result in results], False
        now.losses.append([result.loss for result in results])
        return PerNode(now.losses[-1])

    def reset_optimizer(self) -> None:
        self._all.reset = True

    @_call
    def combine(
        self,
        own: Any,
        inbox: Any,
        weights: Any,
        *,
        self_weight: Any = None,
        missing: Missing | None = None,
        aggregate: bool = False,
    ) -> Any:
        whole = isinstance(own, Model)
        mixed = PerNode(
            self._mixed(self._rows(own.parameters if whole else own), inbox, weights, self_weight, missing)
        )
        return Model(mixed) if whole else mixed  # type: ignore[arg-type]

    @_call
    def mix(
        self, inbox: Any, weights: Any, *, self_weight: Any = None, missing: Missing | None = None
    ) -> None:
        self._all.parameters = self._mixed(self._all.parameters, inbox, weights, self_weight, missing)

    def _mixed(
        self, own: list[Tensor], inbox: Any, weights: Any, self_weight: Any, missing: Missing | None
    ) -> list[Tensor]:
        self._check_round()
        if isinstance(inbox, _Inboxes) and inbox.vectors and self_weight is missing is None:
            factors = self._once(
                "factors", (weights, inbox.sources), lambda: self._factors(weights, inbox.sources)
            )
            vectors, terms = inbox.vectors, zip(own, inbox.sources, factors, strict=True)
            sums = [Sum([vector, *[vectors[j] for j in sources]], each) for vector, sources, each in terms]
        else:
            sums = [
                self._sum(vector, of(inbox, rank), of(weights, rank), of(self_weight, rank), missing)
                for rank, vector in enumerate(own)
            ]
        return self._context.mixing.sums(sums)

    def _factors(self, weights: Any, sources: Sequence[Sequence[int]]) -> list[list[float]]:
        """The weights of each node's sum, its own first."""
        found = []
        for rank, senders in enumerate(sources):
            given = of(weights, rank)
            if len(given) != len(senders):
                raise Divergence
            found.append([own_weight(dict.fromkeys(senders), given, None), *[given[j] for j in senders]])
        return found

    def _sum(self, own: Tensor, inbox: Any, weights: Any, self_weight: Any, missing: Missing | None) -> Sum:
        """One node's sum, of rows."""
        vectors = {rank: item.parameters if type(item) is Model else item for rank, item in inbox.items()}
        absent = self._setup.experiment.gather.missing
        terms = Mix(own, vectors, weights, self_weight, missing, None, absent).terms()
        if terms is None or not all(map(self._context.rows.is_row, terms[0])):
            raise Divergence
        return Sum(*terms)

    # --- messages

    def broadcast(self, to: Any, payload: Payload, tag: Tag, *, exact: bool = False) -> None:
        self._check_round()
        name, now = as_tag(tag), self._all
        if not isinstance(to, PerNode) or name in self._sent:
            raise Divergence
        frozen, versions = self._frozen(payload)
        size, _ = self._context.links.measure(0, of(frozen, 0), name)
        receivers, sources = self._once("routes", (to,), lambda: self._routes(to))
        sent, received = (np.fromiter(map(len, each), np.int64) for each in (receivers, sources))
        now.traffic += [size * sent, size * received, sent, received]
        self._sent[name] = _Broadcast(sources, frozen, now.now_ns, versions)

    def _frozen(self, payload: Payload) -> tuple[Payload, list[tuple[Tensor, int]]]:
        """The payload with vectors in the store, and their versions. Only the values of vectors and numbers
        may differ between nodes."""
        if isinstance(payload, Model):
            parameters, versions = self._frozen(payload.parameters)
            return Model(parameters), versions
        if isinstance(payload, dict):
            if not all(type(name) is str for name in payload):
                raise Divergence
            each = {name: self._frozen(item) for name, item in payload.items()}
            return {name: item for name, (item, _) in each.items()}, [
                v for _, (_, vs) in each.items() for v in vs
            ]
        if isinstance(payload, PerNode) and isinstance(payload.each[0], Tensor):
            vectors = self._rows(payload)
            if not all(map(is_finite, vectors)):
                raise Divergence
            return PerNode(vectors), [(vector, vector._version) for vector in vectors]
        numbers = payload.each if isinstance(payload, PerNode) else [payload]
        alike = all(type(number) is float for number in numbers) or numbers.count(numbers[0]) == len(numbers)
        if not alike or not all(type(number) in (int, float) and isfinite(number) for number in numbers):
            raise Divergence  # (different whole numbers may differ in size)
        return payload, []

    def _routes(self, to: PerNode) -> tuple[list[list[int]], list[list[int]]]:
        """Each node's receivers, ascending, and the nodes that send to it."""
        receivers = [sorted(ranks) for ranks in to.each]
        sources: list[list[int]] = [[] for _ in receivers]
        for source, ranks in enumerate(receivers):
            if (ranks and ranks[0] < 0) or len({source, *ranks}) <= len(ranks):
                raise Divergence
            for rank in ranks:
                sources[rank].append(source)
        return receivers, sources

    @_call
    def gather(
        self, peers: Any, tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> PerNode:
        self._check_round()
        sent, now = self._sent.pop(as_tag(tag), None), self._all
        if sent is None or not isinstance(peers, PerNode) or at_least is not None or timeout is not None:
            raise Divergence
        arrival_ns = sent.sent_ns + (self._context.links.only_latency_ns or 0)
        counts = np.fromiter(map(len, sent.sources), np.int64)
        wanted = peers.each
        if (arrival_ns > now.now_ns and not counts.all()) or any(
            list(ranks) != list(sources) for ranks, sources in zip(wanted, sent.sources, strict=True)
        ):
            raise Divergence
        if any(vector._version != version for vector, version in sent.versions):
            raise Divergence
        now.now_ns = max(now.now_ns, arrival_ns)
        age = now.now_ns / NS - sent.sent_ns / NS
        sums = np.array([sum([age] * count) for count in range(counts.max() + 1)])  # in the nodes' order
        now.taken += counts
        now.ages[0] += sums[counts]
        now.ages[1] = np.where(counts > 0, np.maximum(now.ages[1], age), now.ages[1])
        return _Inboxes(sent.payload, sent.sources)

    def spawn(self, coroutine: Any) -> NoReturn:
        """A node with several tasks goes on by itself."""
        if hasattr(coroutine, "close"):
            coroutine.close()
        raise Divergence

    def expect(self, *_: Any, **__: Any) -> None:
        """Nothing: the nodes declare it again when they go on by themselves."""

    # --- the graph

    @_call
    def neighbors(self, r: int | None = None, direction: Any = "both", layer: str | None = None) -> PerNode:
        round = self.round if r is None else r

        def find() -> PerNode:
            ranks = range(self.size)
            return PerNode([self._topology.neighbors(rank, round, direction, layer) for rank in ranks])

        graph = self._topology.graph(round)
        return find() if layer is not None else self._once(f"neighbors, {direction}", (graph,), find)

    def mixing_weights(self, r: int | None = None) -> PerNode:
        round = self.round if r is None else r

        def find() -> PerNode:
            return PerNode([self._topology.mixing_weights(rank, round) for rank in range(self.size)])

        if not self._topology.static_weights:
            return find()
        return self._once("weights", (self._topology.graph(round),), find)

    def _once(self, name: str, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The value that was last made under a name, if it was made from the same objects; else a new one."""
        known = self._cached.get(name)
        if known is None or any(a is not b for a, b in zip(known[0], key, strict=True)):
            known = self._cached[name] = key, make()
        found: T = known[1]
        return found

    def topology(self, r: int | None = None) -> Any:
        return self._topology.graph(self.round if r is None else r)

    # --- time, randomness, records

    def now(self) -> float:
        return self._all.now_ns / NS

    def record(self, **values: Any) -> None:
        self._all.columns |= values

    @_call
    def sleep(self, seconds: float) -> None:
        self._check_round()
        self._all.now_ns += to_ns(float(seconds))

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        if not shared:
            raise Divergence
        return generator(self._setup.experiment.seed, f"algorithm/{purpose}", SHARED, *counters)

    def _check_round(self) -> None:
        """What happens before the first round happens again when the nodes go on by themselves."""
        if not self._in_round:
            raise Divergence


def _refuse() -> NoReturn:
    raise Divergence
