"""What nodes do with models besides training and evaluation, tried once before a run: an encoding by the codec, and the
aggregation of the fewest models that the graph gives to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.config import Experiment, Simulate
from gossamer.errors import BadInput
from gossamer.layers import CodedNode
from gossamer.learning.aggregators import Aggregation, Aggregator, check_shape, own_share
from gossamer.learning.guard import refusing
from gossamer.learning.mixing import Mix
from gossamer.learning.parameters import generators_restored
from gossamer.messages import freeze, wire_bytes
from gossamer.messages.tags import Message, Model, Part, Payload, Traffic
from gossamer.node.runtime import NodeRuntime
from gossamer.node.setup import Setup
from gossamer.randomness import generator
from gossamer.topology import TopologySchedule

ROUNDS, MAX_DEGREES = 16, 200_000
"""The first rounds of a changing graph, and the most degrees that are counted in them."""
TAG = ("trial",)


class FewestModels(NamedTuple):
    """The fewest models that an aggregator gets, with the node's own."""

    number: int
    rank: int
    round: int


def fewest_models(
    experiment: Experiment, topology: TopologySchedule, most_rounds: int = ROUNDS
) -> FewestModels | None:
    """The fewest models that the graph gives to a node, in the first rounds if it changes; None if that does not depend on
    the graph of the topology."""
    if experiment.algorithm.mixes_what_arrives() or experiment.algorithm.reaches_all() or topology.sampled:
        return None
    nodes = experiment.nodes
    certain = experiment.stop.rounds or ROUNDS
    rounds = 1 if topology.static else min(certain, most_rounds, MAX_DEGREES // nodes + 1)
    return min(
        FewestModels(1 + len(topology.neighbors(rank, round, "in")), rank, round)
        for round in range(rounds)
        for rank in range(nodes)
    )


def try_exchange(setup: Setup) -> None:
    """Let a node encode its model and another one decode it, and a node aggregate models. BadInput for a codec or an
    aggregator that fails, or that does not keep to what its base class says."""
    experiment, engine = setup.experiment, setup.experiment.engine
    if not setup.layers and setup.aggregator is None:
        return
    device = engine.device if isinstance(engine, Simulate) else "cpu"
    with generators_restored(device), torch.no_grad():
        model = Model(*(vector.to(device) for vector in setup.initial(0)))
        if experiment.middleware:
            _try_middleware(setup, model)
        if setup.encoded:
            _try_codec(setup, model)
        if setup.aggregator is not None:
            _try_aggregator(setup, model)


class _Still:
    """The engine of a node that neither sends nor waits: a codec has no reason to call what does nothing here."""

    presence, paced = None, False

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.traffic = self.counters = Traffic()

    def store(self, vector: Tensor) -> Tensor:
        return vector.detach().clone()

    def is_stored(self, tensor: Tensor) -> bool:
        return False

    def now(self) -> float:
        return 0.0

    def secret(self, n: int) -> bytes:
        return bytes(n)

    def _nothing(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    network_bytes = slot = spawn = timer = send = compute = mix = settle = event = finished = _nothing
    end_round = sign = verify = _nothing


def _try_middleware(setup: Setup, model: Model) -> None:
    host: Any = _Still()
    with refusing("middleware", "one that wraps a node"):
        for rank in {
            ranks[0] for name, ranks in setup.chosen.items() if name.startswith("middleware.") and ranks
        }:
            NodeRuntime(setup, rank, model, host)


def _try_codec(setup: Setup, model: Model) -> None:
    codec, algorithm = setup.experiment.codec, setup.experiment.algorithm
    assert codec is not None
    field = f"codec: {codec.name_of()}"
    with refusing(field, "a codec that takes the vectors of this run"):
        host: Any = _Still()
        sender, receiver = (NodeRuntime(setup, rank, model, host) for rank in (0, setup.experiment.nodes - 1))
        encoder, decoder = (node.layer(CodedNode).coder for node in (sender, receiver))
        sender.node.parameters = 1.01 * model.parameters  # codecs may send what has changed
        vector = sender.node.parameters
        before = vector.clone()
        if algorithm.sends_differences or algorithm.sends_pieces():
            coded: Any = encoder.compress(vector)[0]
            payload: Payload = Model(coded, model.buffers)
        else:
            payload = encoder.encode(Model(vector, model.buffers), TAG)
        if not torch.equal(before, vector):
            raise BadInput(
                f"{field}.encode writes into the vector that it is given; accepted: one that copies it"
            )
        payload = freeze(payload, host.is_stored)
        wire_bytes(TAG, payload)
        decoded: Any = decoder.decode(Message(0, TAG, payload, 0.0)).payload
        values = decoded.parameters.values if isinstance(decoded.parameters, Part) else decoded.parameters
        if values.dtype != torch.float32:
            raise BadInput(f"{field}.decode returns {values.dtype}; accepted: torch.float32")
        if not values.isfinite().all():
            raise BadInput(f"{field}.decode returns values that are not finite; accepted: finite ones")


def _try_aggregator(setup: Setup, model: Model) -> None:
    aggregator = setup.aggregator
    assert aggregator is not None
    fewest = fewest_models(setup.experiment, setup.topology)
    count = max(aggregator.least, 2) if fewest is None else fewest.number
    own: Any = model if setup.layout.buffer_size else model.parameters
    others = [own * 1.1, own * 1.2]  # more than two different ones would be no other case
    inbox: dict[int, Any] = {number: others[number % 2] for number in range(1, count)}
    before = [_whole(vector).clone() for vector in (own, *others)]
    step = Mix(own, inbox, dict.fromkeys(inbox, 1 / count), None, None, aggregator)
    models = f"{count} model{'s' * (count > 1)}, the node's own included"
    field = f"aggregator: {aggregator.name_of()}"
    with refusing(field, f"an aggregator that takes {models}, or more neighbours"):
        if aggregator.informed:
            mixed = _without_waiting(aggregator, step, setup.experiment.stop.rounds)
        else:
            mixed = _whole(aggregator.mix(step, model.parameters.new_empty))
    if not all(map(torch.equal, before, map(_whole, (own, *others)))):
        raise BadInput(
            f"{field} writes into the vectors that it is given; accepted: one that returns a new one"
        )
    if not mixed.isfinite().all():
        raise BadInput(f"{field} returns values that are not finite, given {models}; accepted: finite ones")


class _Alone(Aggregation):
    """An aggregation that nothing else is known of. Losses are 1, at once."""

    def __init__(self, step: Mix, rounds: int | None) -> None:
        self.rank, self.round, self.rounds, self.memory = 0, 0, rounds, {}
        self.ranks = tuple(sorted(step.inbox))
        self.weights = tuple(float(step.weights[rank]) for rank in self.ranks)
        self.self_weight = own_share(step)

    def rng(self, purpose: str, *counters: int) -> np.random.Generator:
        return generator(0, f"aggregator/{purpose}", 0, *counters)

    async def loss(self, model: Tensor, batch: int | Sequence[int] | Literal["full"] = "full") -> float:
        return 1.0


def _without_waiting(aggregator: Aggregator, step: Mix, rounds: int | None) -> Tensor:
    own = _whole(step.own)
    running = aggregator.aggregate_with(_Alone(step, rounds), own, aggregator.received(step.own, step.inbox))
    try:
        running.send(None)
    except StopIteration as end:
        mixed: Tensor = end.value
        check_shape(aggregator, mixed, own)
        return mixed
    running.close()
    raise ValueError("aggregate_with waits for something else than aggregation.loss")


def _whole(vector: Any) -> Tensor:
    """A model as one vector."""
    return vector.flatten() if isinstance(vector, Model) else vector
