# mypy: disable-error-code="override, assignment"
"""The rounds of a synchronous algorithm whose nodes do the same at the same instants, computed for all nodes at once.

The algorithm runs once, for all nodes, on a :class:`Cohort`: a node whose values are those of all nodes
(:mod:`gossamer.per_node`). Its calls return at once and move the virtual clock. :class:`Divergence` is raised where an
``if`` separates the nodes, where a call needs a node of its own, and where something fails. Then the cohort's work is
discarded, and the nodes run by themselves from the start."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from math import inf, isfinite
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from gossamer.config import Simulate
from gossamer.learning.computation import ComputationKind
from gossamer.learning.mixing import Missing, Mix, Sum, own_weight
from gossamer.learning.parameters import is_finite
from gossamer.messages.tags import Message, Model, Payload, Tag, Traffic, as_tag
from gossamer.network.compute import Constant
from gossamer.node import Node, NodeRuntime
from gossamer.node.expectations import Expectations
from gossamer.node.mailbox import Inbox
from gossamer.node.node import ROW_COLUMNS
from gossamer.per_node import Divergence, PerNode, of
from gossamer.randomness import SHARED, generator
from gossamer.runtime.setup import Setup
from gossamer.runtime.simulate.clock import MAX_PASSES, NEVER_NS, NS, to_ns
from gossamer.runtime.simulate.host import SimContext
from gossamer.runtime.simulate.links import Links

T = TypeVar("T")

_SCALARS = (int, float, str, np.generic, Tensor, type(None))
_ROUND = object()
"""The value that the algorithm's coroutine yields at the end of a round."""


def fits(setup: Setup, links: Links) -> bool:
    """Whether all nodes of a run may do the same at the same instants. Only latency, the same between all
    nodes, may delay messages."""
    experiment = setup.experiment
    stop, evaluation = experiment.stop, experiment.evaluation
    return (
        isinstance(experiment.engine, Simulate)
        and experiment.engine.cohort
        and vars(type(experiment.algorithm)).get("runs_as_cohort", False)
        and links.only_latency_ns is not None
        and type(setup.compute) is Constant
        and setup.aggregator is None
        and setup.layout.buffer_size == 0
        and all(len(part) for part in setup.parts)
        and stop.rounds is not None
        and stop.time_s is None
        and stop.target is None
        and stop.most_bytes(experiment.nodes) == inf
        and evaluation.of != "mixed"
        and evaluation.every_s is None
        and evaluation.timeline is None
        and experiment.gather.timeout_s is None
        and experiment.codec is None
        and experiment.secure_aggregation is None
        and not (setup.faults or experiment.wrappers or experiment.checkpoint.on or setup.topology.sampled)
    )


@dataclass(frozen=True, eq=False)
class _Broadcast:
    """A message of every node to some others."""

    sources: Sequence[list[int]]  # by rank: the senders to a node, ascending
    payload: Any
    sent_ns: int
    versions: list[tuple[Tensor, int]]


class _Inboxes(PerNode):
    """The gathered payloads of all nodes, one from each source. Dicts are made only if an algorithm looks into them.

    Attributes:
        sources: of each node, ascending.
        vectors: the payloads by rank, if they are vectors or models; else empty."""

    __slots__ = ("_dicts", "_payload", "sources", "vectors")

    def __init__(self, payload: Any, sources: Sequence[Sequence[int]], *, keys: bool) -> None:
        self._payload, self.sources, self.keys_of_dicts = payload, sources, keys
        vectors: Any = payload.parameters if type(payload) is Model else payload
        tensors = type(vectors) is PerNode and isinstance(vectors, Tensor)
        self.vectors: Sequence[Tensor] = vectors.each if tensors else ()
        self._dicts: list[Inbox] = []

    @property
    def each(self) -> Sequence[Any]:
        if not self._dicts:
            payloads = [of(self._payload, rank) for rank in range(len(self.sources))]
            self._dicts = [Inbox({rank: payloads[rank] for rank in ranks}) for ranks in self.sources]
        return self._dicts


class _Call:
    """A call of the cohort, made when it is awaited. The algorithm pauses after one that ends a round."""

    def __init__(self, cohort: Cohort, function: Callable[[], Any], *, ends_round: bool) -> None:
        self._cohort, self._function, self._ends_round = cohort, function, ends_round
        cohort.open_calls += 1

    def __await__(self) -> Generator[Any, None, Any]:
        self._cohort.open_calls -= 1
        self._cohort.count_turn()
        result = self._function()
        if self._ends_round:
            yield _ROUND
        return result


def _same_for_all(method: Callable[..., Any]) -> Any:
    """Make failures of a method a divergence, since an algorithm may catch other exceptions at one node only."""

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except Exception as error:
            raise Divergence from error

    return call


def _awaited(method: Callable[..., Any], *, ends_round: bool = False) -> Any:
    """Make a method awaitable."""
    function = _same_for_all(method)

    @wraps(method)
    def call(self: Cohort, *args: Any, **named: Any) -> _Call:
        return _Call(self, partial(function, self, *args, **named), ends_round=ends_round)

    return call


class _Rounds:
    """The iterator behind ``Cohort.rounds``."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._current: int | None = None

    def __aiter__(self) -> _Rounds:
        return self

    async def __anext__(self) -> int:
        if self._current is not None:
            await self._cohort.end_round(self._current)
        if self._cohort.finished:
            raise StopAsyncIteration
        self._current = self._cohort.round
        return self._current


class Cohort(Node):
    """All nodes of a run as one node.

    Attributes:
        now_ns: the virtual time, nanoseconds.
        open_calls: number of calls that have not been awaited."""

    def __init__(self, context: SimContext, nodes: Sequence[NodeRuntime]) -> None:
        setup = self._setup = context.setup
        self._context, self._nodes = context, nodes
        self._topology, self._optimizer = setup.topology, setup.experiment.optimizer
        count = self.size = len(nodes)
        self.layout = setup.layout.parameters
        self.lr: Any = self._optimizer.lr_at(0)
        self.state, self._columns = {}, dict[str, Any]()
        self.round = self.step = self.open_calls = 0
        self.now_ns = self._instant_ns = context.clock.now_ns
        self._turns = 0
        # Built-in algorithms make dicts of ranks, but never look up a number in one.
        self._keys = type(setup.experiment.algorithm).__module__.startswith("gossamer.algorithms.")
        self.rank = self._per_node(range(count))
        self.samples = self._per_node([len(part) for part in setup.parts])
        self.steps_per_epoch = self._per_node([node.own.steps_per_epoch for node in nodes])
        self.label_counts = None if setup.labels is None else self._per_node(list(setup.labels))
        self._vectors = self._per_node([node.own.parameters.vector for node in nodes])
        self._states: list[Any] = [None] * count  # of the optimizer
        self._reset = False
        self._losses: list[list[float]] = []  # of each call of train since the last update, by rank
        self._busy_ns = 0
        # Since the last update, by rank: bytes sent and received, messages sent and received; messages taken; the
        # sum of their ages and the largest one.
        self._traffic = np.zeros((4, count), dtype=np.int64)
        self._taken = np.zeros(count, dtype=np.int64)
        self._ages = np.stack([np.zeros(count), np.full(count, -inf)])
        self._sent: dict[tuple[str | int, ...], _Broadcast] = {}
        self._declares, self._expectations = False, Expectations(setup.layout.size, encoded=False)
        self._cached: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._protocol = setup.experiment.algorithm.run(self)

    # --- for the engine

    def advance(self) -> bool:
        """Compute the next round. Returns whether there was one; otherwise the algorithm has returned."""
        others, divergences, returned = asyncio.all_tasks(), Divergence.count, False
        try:
            if self._protocol.send(None) is not _ROUND:
                raise Divergence  # it awaits something of asyncio
        except StopIteration:
            returned = True
        except (Divergence, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise Divergence from error  # the node that fails is named when the nodes run by themselves
        finally:
            tasks = asyncio.all_tasks() - others
            for task in tasks:
                task.cancel()
        if tasks or Divergence.count > divergences or (returned and (self._sent or self.open_calls)):
            raise Divergence
        return not returned

    def close(self) -> None:
        """Abandon the algorithm where it is."""
        with suppress(Exception, Divergence):
            self._protocol.close()

    def count_turn(self) -> None:
        """Raise Divergence if the algorithm keeps calling without letting time pass. (For nodes that run by themselves,
        the clock detects it.)"""
        if self.now_ns > self._instant_ns:
            self._instant_ns, self._turns = self.now_ns, 0
        self._turns += 1
        if self._turns > MAX_PASSES:
            raise Divergence

    def update(self) -> None:
        """Copy the values that rows record to the nodes. Raises Divergence if a model is not finite, since nodes that
        run by themselves would end the run at another instant, nor if time ends, which the clock reports."""
        vectors = self._vectors.each
        if self.now_ns >= NEVER_NS or not all(map(is_finite, vectors)):
            raise Divergence
        context = self._context
        traffics, counts, ages = self._traffic.T.tolist(), self._taken.tolist(), self._ages.T.tolist()
        for rank, runtime in enumerate(self._nodes):
            node, state = runtime.node, runtime.own
            if state.parameters.vector is not vectors[rank]:
                state.parameters.write(vectors[rank])
            state.losses += [losses[rank] for losses in self._losses if losses[rank] == losses[rank]]
            node.round, node.step = self.round, self.step
            node.record(**of(self._columns, rank))
            sent_bytes, received_bytes, sent, received = traffics[rank]
            traffic = Traffic(sent_bytes, received_bytes, sent, received, messages_taken=counts[rank])
            context.links.count(rank, traffic)
            runtime.mailbox.note_ages(counts[rank], *ages[rank])
            context.compute.add_busy(rank, self._busy_ns)
        self._losses, self._columns, self._busy_ns = [], {}, 0
        self._traffic[:], self._taken[:], self._ages[0], self._ages[1] = 0, 0, 0.0, -inf

    def __getattr__(self, name: str) -> NoReturn:
        """Raise Divergence: any other call needs a node of its own."""
        raise Divergence

    # --- rounds

    def rounds(self) -> _Rounds:
        return _Rounds(self)

    @partial(_awaited, ends_round=True)
    def end_round(self, r: int) -> None:
        if self._sent or self.open_calls or r != self.round:
            raise Divergence  # a message is under way, nobody has awaited a call, or the round ends again
        self.round, optimizer = r + 1, self._optimizer
        if optimizer.schedule is not None:
            self.lr = optimizer.lr_at(self.round)
        self._reset |= optimizer.reset_every_round

    @property
    def finished(self) -> bool:
        last = self._setup.experiment.stop.rounds
        return last is not None and self.round >= last

    # --- the model

    def _per_node(self, values: Sequence[Any]) -> PerNode:
        return PerNode(values, keys=self._keys)

    @property
    def parameters(self) -> PerNode:
        return self._vectors

    @parameters.setter
    @_same_for_all
    def parameters(self, v: PerNode) -> None:
        self._vectors = self._per_node(self._rows(v))

    @property
    def model(self) -> Model:
        return Model(self.parameters)  # type: ignore[arg-type]

    @model.setter
    @_same_for_all
    def model(self, model: Model) -> None:
        if len(model.buffers):
            raise Divergence
        self.parameters = model.parameters

    @_same_for_all
    def _check_mixed(self, model: Model) -> None:
        """Keep nothing: runs whose records show the last mixing have no cohort."""
        self._rows(model.parameters)

    mixed = property(fset=_check_mixed)

    def _rows(self, vectors: Any) -> list[Tensor]:
        """Rows of the store with the nodes' vectors [P]."""
        rows = self._context.rows
        shapes = {(vector.shape, vector.dtype) for vector in vectors.each}
        if shapes != {((rows.length,), torch.float32)}:
            raise Divergence
        return list(map(rows.store, vectors.each))

    @_same_for_all
    def store(self, v: PerNode) -> PerNode:
        return self._per_node(self._rows(v))

    # --- computing

    @_awaited
    def train(self, steps: int = 1) -> PerNode:
        first, steps, jobs = self.step, operator.index(steps), []
        for rank, vector in enumerate(self._vectors.each):
            own, state = self._nodes[rank].own, self._states[rank]
            if self._reset or state is None:
                state = self._optimizer.init(vector)
            start = Model(vector, own.buffers.vector)
            jobs.append(own.train_job(start, first, steps, of(self.lr, rank), state))
        results = self._context.executor.execute(ComputationKind.TRAIN, jobs)
        duration_ns = to_ns(self._setup.compute.duration(0, 0, first, steps, 0.0))
        self.now_ns += duration_ns
        self._busy_ns += duration_ns
        self.step += steps
        self._vectors = self._per_node([result.model.parameters for result in results])
        self._states, self._reset = [result.state for result in results], False
        self._losses.append([result.loss for result in results])
        return self._per_node(self._losses[-1])

    def reset_optimizer(self) -> None:
        self._reset = True

    @_awaited
    def combine(
        self,
        own: Any,
        inbox: Any,
        weights: Any,
        *,
        self_weight: Any = None,
        missing: Missing | None = None,
        aggregate: bool = False,
        differences: bool = False,
    ) -> Any:
        whole = isinstance(own, Model)
        if (whole and len(own.buffers)) or (differences and (aggregate or self_weight is not None)):
            raise Divergence
        rows = self._rows(own.parameters if whole else own)
        mixed = self._per_node(self._mixed(rows, inbox, weights, self_weight, missing, differences))
        return Model(mixed) if whole else mixed  # type: ignore[arg-type]

    @_awaited
    def mix(
        self, inbox: Any, weights: Any, *, self_weight: Any = None, missing: Missing | None = None
    ) -> None:
        mixed = self._mixed(self._vectors.each, inbox, weights, self_weight, missing, differences=False)
        self._vectors = self._per_node(mixed)

    def _mixed(
        self,
        own: Sequence[Tensor],
        inbox: Any,
        weights: Any,
        self_weight: Any,
        missing: Missing | None,
        differences: bool,
    ) -> list[Tensor]:
        plain = self_weight is None and missing is None and type(weights) is PerNode
        if plain and type(inbox) is _Inboxes and inbox.vectors:
            key = weights, inbox.sources
            factors = self._once("factors", key, lambda: self._factors(*key))
            vectors, terms = inbox.vectors, zip(own, inbox.sources, factors, strict=True)
            if differences:
                sums = [Sum([vectors[j] for j in sources], of_row[1:], row) for row, sources, of_row in terms]
            else:
                sums = [Sum([row, *[vectors[j] for j in sources]], of_row) for row, sources, of_row in terms]
        else:
            sums = [
                self._sum(
                    vector, of(inbox, rank), of(weights, rank), of(self_weight, rank), missing, differences
                )
                for rank, vector in enumerate(own)
            ]
        return self._context.mixing.sums(sums)

    def _factors(self, weights: Any, sources: Sequence[Sequence[int]]) -> list[list[float]]:
        """The weights of each node's sum, its own first."""
        factors = []
        for rank, senders in enumerate(sources):
            shares = of(weights, rank)
            if len(shares) != len(senders):
                raise Divergence
            factors.append([own_weight(dict.fromkeys(senders), shares, None), *[shares[j] for j in senders]])
        return factors

    def _sum(
        self,
        own: Tensor,
        inbox: Any,
        weights: Any,
        self_weight: Any,
        missing: Missing | None,
        differences: bool,
    ) -> Sum:
        """One node's sum, of rows."""
        vectors = {rank: item.parameters if type(item) is Model else item for rank, item in inbox.items()}
        absent = self._setup.experiment.gather.missing
        terms = Mix(own, vectors, weights, self_weight, missing, None, absent, differences).terms()
        if terms is None or not all(map(self._context.rows.is_row, terms[0])):
            raise Divergence
        return Sum(*terms)

    # --- messages

    @_same_for_all
    def broadcast(self, to: Any, payload: Payload, tag: Tag, *, exact: bool = False) -> PerNode:
        name = as_tag(tag)
        if type(to) is not PerNode or name in self._sent:
            raise Divergence
        frozen, versions = self._frozen(payload)
        size, _ = self._context.links.measure(0, of(frozen, 0), name)  # all nodes' messages have this size
        receivers, sources = self._once("routes", (to,), lambda: self._routes(to))
        sent, received = (np.fromiter(map(len, ranks), np.int64) for ranks in (receivers, sources))
        self._traffic += [size * sent, size * received, sent, received]
        self._sent[name] = _Broadcast(sources, frozen, self.now_ns, versions)
        return self._per_node(receivers)

    def _frozen(self, payload: Payload) -> tuple[Payload, list[tuple[Tensor, int]]]:
        """The payload with vectors in the store, and their versions. Only the values of vectors and numbers
        may differ between nodes."""
        if type(payload) is Model:
            if len(payload.buffers):
                raise Divergence
            parameters, versions = self._frozen(payload.parameters)
            return Model(parameters), versions
        if type(payload) is dict:
            if not all(type(name) is str for name in payload):
                raise Divergence
            frozen, versions = {}, []
            for name, item in payload.items():
                frozen[name], item_versions = self._frozen(item)
                versions += item_versions
            return frozen, versions
        if type(payload) is PerNode and isinstance(payload, Tensor):
            vectors = self._rows(payload)
            if not all(map(is_finite, vectors)):
                raise Divergence
            return self._per_node(vectors), [(vector, vector._version) for vector in vectors]
        numbers = payload.each if type(payload) is PerNode else [payload]
        [kind] = set(map(type, numbers))
        # Whole numbers must be equal, since different ones may differ in size.
        if (
            kind not in (int, float)
            or (kind is int and len(set(numbers)) > 1)
            or not all(map(isfinite, numbers))
        ):
            raise Divergence
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

    @_awaited
    def gather(
        self, peers: Any, tag: Tag, *, at_least: int | None = None, timeout: float | None = None
    ) -> PerNode:
        name = as_tag(tag)
        matching = [other for other in self._sent if other[: len(name)] == name]
        if matching != [name] or type(peers) is not PerNode or at_least is not None or timeout is not None:
            raise Divergence
        sent = self._sent.pop(name)
        arrival_ns = sent.sent_ns + (self._context.links.only_latency_ns or 0)
        counts = np.fromiter(map(len, sent.sources), np.int64)
        if arrival_ns > self.now_ns and not counts.all():
            raise Divergence  # some nodes have nothing to wait for
        if any(list(ranks) != sources for ranks, sources in zip(peers.each, sent.sources, strict=True)):
            raise Divergence
        if any(vector._version != version for vector, version in sent.versions):
            raise Divergence
        if self._declares and not self._expected(name, sent):
            raise Divergence
        self.now_ns = max(self.now_ns, arrival_ns)
        age = self.now_ns / NS - sent.sent_ns / NS
        self._taken += counts
        self._ages[0] += counts * age
        self._ages[1] = np.where(counts > 0, np.maximum(self._ages[1], age), self._ages[1])
        return _Inboxes(sent.payload, sent.sources, keys=self._keys)

    def _expected(self, name: tuple[str | int, ...], sent: _Broadcast) -> bool:
        """Whether the messages are as the algorithm has declared them."""
        messages = (
            Message(rank, name, of(sent.payload, rank), sent.sent_ns / NS) for rank in range(self.size)
        )
        return all(self._expectations.fault(message) is None for message in messages)

    def spawn(self, coroutine: Any) -> NoReturn:
        """Raise Divergence: a node with several tasks has to run by itself."""
        if hasattr(coroutine, "close"):
            coroutine.close()
        raise Divergence

    @_same_for_all
    def expect(self, tag: Tag, *like: Payload, check: Any = None, exact: bool = False) -> None:
        self._declares = True
        self._expectations.declare(tag, of(like, 0), check, exact=exact)

    # --- the graph

    @_awaited
    def neighbors(self, r: int | None = None, direction: Any = "both", layer: str | None = None) -> PerNode:
        round = self.round if r is None else r

        def find() -> PerNode:
            ranks = range(self.size)
            return self._per_node([self._topology.neighbors(rank, round, direction, layer) for rank in ranks])

        graph = self._topology.graph(round)
        return find() if layer is not None else self._once(f"neighbors, {direction}", (graph,), find)

    @_same_for_all
    def mixing_weights(self, r: int | None = None) -> PerNode:
        round = self.round if r is None else r

        def find() -> PerNode:
            return self._per_node([self._topology.mixing_weights(rank, round) for rank in range(self.size)])

        if not self._topology.static_weights:
            return find()
        return self._once("weights", (self._topology.graph(round),), find)

    def _once(self, name: str, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The value that was last made under a name if it was made from the same (immutable) objects, otherwise a new
        one."""
        entry = self._cached.get(name)
        if entry is None or any(a is not b for a, b in zip(entry[0], key, strict=True)):
            entry = self._cached[name] = key, make()
        value: T = entry[1]
        return value

    @_same_for_all
    def topology(self, r: int | None = None) -> Any:
        return self._topology.graph(self.round if r is None else r)

    # --- time, randomness, records

    def now(self) -> float:
        return self.now_ns / NS

    @_same_for_all
    def record(self, **values: Any) -> None:
        prefixes = self._setup.set_prefixes
        if ROW_COLUMNS & values.keys() or any(name.startswith(prefixes) for name in values):
            raise Divergence
        for value in values.values():
            for item in value.each if type(value) is PerNode else [value]:
                if not isinstance(item, _SCALARS) or (isinstance(item, Tensor) and item.numel() != 1):
                    raise Divergence
        self._columns |= values

    @_awaited
    def sleep(self, seconds: float) -> None:
        self.now_ns += to_ns(float(seconds))

    @_same_for_all
    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        if not shared:
            raise Divergence
        return generator(self._setup.experiment.seed, f"algorithm/{purpose}", SHARED, *counters)
