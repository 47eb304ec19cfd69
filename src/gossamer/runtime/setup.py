"""Prepares an experiment for an engine: data, partition, topology, initial models. Rejects all bad input."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from time import monotonic
from typing import Any

import numpy as np
from jaxtyping import Int

from gossamer.codecs.sparsify import count_of
from gossamer.config import Experiment, Processes, Simulate
from gossamer.config.ranges import LONGEST_ACCEPTED_S
from gossamer.config.registry import Component, names
from gossamer.errors import BadInput, GossamerError, cause, listed
from gossamer.faults import Churn, FaultSchedule
from gossamer.fingerprint import fingerprint, names_own_code
from gossamer.layers import CodedNode, layers_of
from gossamer.learning import Mean
from gossamer.learning.batches import BatchStream
from gossamer.learning.evaluation_metrics import EvaluationMetrics
from gossamer.learning.gradient import MeanGradient
from gossamer.learning.guard import refusing
from gossamer.learning.parameters import Layout, with_maker
from gossamer.learning.proof import OneClassBatch, SmallestBatch, failure_of
from gossamer.learning.thread_pool import one_thread
from gossamer.learning.trainer import SequentialTrainer, choose_trainer
from gossamer.learning.trial import tried_metrics
from gossamer.network import ComputeProfile, Network
from gossamer.network.network import try_out as try_out_network
from gossamer.node import CheckContext
from gossamer.node.setup import Setup as Setup
from gossamer.randomness import generator
from gossamer.reads import noting, noting_opened
from gossamer.runtime.memory import (
    check_address_space,
    check_memory,
    check_model_size,
    check_outputs,
    check_record,
)
from gossamer.runtime.trial import ROUNDS, fewest_models, try_exchange
from gossamer.runtime.warm_start import warm_start
from gossamer.selector import chosen
from gossamer.tasks import Task, label_counts, load_task, poisoned
from gossamer.tasks.summary import summary
from gossamer.topology import TopologySchedule

log = logging.getLogger("gossamer")

_LONG_S = 2.0
"""How long a model may take to be made and tried before the set-up says how long it will take."""
_MAX_DEGREES = 10_000
"""The number of degrees of a changing graph that are looked at for an aggregator that needs several models."""
_PROCESS_S = 1e-3
"""The least time that a process needs to start and to take a step."""
_ONE_CLASS = 100
"""The first nodes whose first batches are looked at for one of a single class."""
_TRIED = 1000
"""The first nodes and rounds whose durations and learning rates are looked at before a run."""


def prepare(experiment: Experiment, trainer: str | None = None) -> Setup:
    """Load, partition and check everything that a run needs, before any work starts. ``trainer`` is the one that has proved
    itself in the process that decides for the run; None chooses one here. Raises BadInput, which names the field that can't
    be used."""
    # For so little work, several threads are slower than one, above all while other runs compute.
    listening = noting_opened() if names_own_code(experiment) else nullcontext()
    with noting() as read, listening, one_thread():
        setup = _prepared(experiment, trainer)
    return replace(setup, fingerprint=fingerprint(experiment, read))


def _prepared(experiment: Experiment, trainer: str | None) -> Setup:
    check_address_space()
    algorithm, nodes, seed = experiment.algorithm, experiment.nodes, experiment.seed
    _check_algorithm(algorithm)
    virtual = isinstance(experiment.engine, Simulate)  # only a simulation has to model frozen nodes
    try_out_network(experiment.network, nodes, seed)
    holders, outcomes = algorithm.data_ranks(nodes), algorithm.outcome_ranks(nodes)
    if not holders:
        raise BadInput(
            f"nodes: got {nodes}, which leaves {algorithm.name_of()} no node with data; accepted: more"
        )
    task = load_task(experiment.task, experiment.data_root, seed)
    data = summary(task)
    check_model_size(experiment, task)
    began = monotonic()
    task, maker = with_maker(task, seed)
    if (seconds := monotonic() - began) > _LONG_S:
        # Measured with up to 3,000 layers: the trials and the modules of the trainer take 7 to 14 times as long.
        log.info("making the model took %.0f s; the set-up may take ten times as long", seconds)
    layout, remarks = maker.layout, list[str]()
    start = warm_start(experiment, maker, remarks)
    check_memory(experiment, layout)
    parts: list[Int[np.ndarray, " _"]] = [np.empty(0, dtype=np.int64) for _ in range(nodes)]
    assigned = experiment.partition.assign(task, len(holders), generator(seed, "partition"))
    for rank, part in zip(holders, assigned, strict=True):
        parts[rank] = part
    parts, personal = experiment.partition.held_out(parts, seed)
    samples = [len(part) for part in parts]
    topology = TopologySchedule(experiment.topology, nodes, seed, samples)
    counted = label_counts(task, parts) if "label_counts" in topology.asked else None
    topology.give(samples=tuple(samples), label_counts=counted)
    topology.check()
    graph = None if topology.sampled else cache(lambda: topology.graph(0).to_networkx())
    choose = partial(chosen, nodes=nodes, seed=seed, graph=graph)
    faults = FaultSchedule(experiment.faults, nodes, seed, graph)
    network = faults.network(experiment.network, frozen=virtual)
    _check_network(experiment, network)
    _check_faults(experiment, faults)
    fields = {f"poison.{number}.at": poison.at for number, poison in enumerate(experiment.poison)}
    poisoned_ranks = {field: choose(selector, field=field) for field, selector in fields.items()}

    def other_task(component: Component) -> Task:
        other = load_task(component, experiment.data_root, seed)
        remarks.append(f"poison, {summary(other)['line']}")
        return other

    task, parts = poisoned(task, parts, experiment.poison, [*poisoned_ranks.values()], seed, other_task)
    if (remaining := [len(part) for part in parts]) != samples:
        topology = TopologySchedule(experiment.topology, nodes, seed, remaining)
        topology.give(samples=tuple(samples), label_counts=counted)
        topology.check()
    if topology.sampled and not algorithm.tolerates_sampling:
        named = _algorithms_with("tolerates_sampling")
        raise BadInput(f"topology: sampled, for {algorithm.name_of()}; accepted: a graph, or one of {named}")
    _check_stop(experiment, topology)
    profile = experiment.compute.for_nodes(nodes, seed)
    _check_durations(profile, nodes, seed)
    _check_churn(experiment, faults, profile, holders)
    compute = faults.compute(profile, frozen=virtual)
    _check_learning_rates(experiment)
    _check_codec(experiment, layout, topology, network, faults)
    _check_aggregator(experiment, topology)
    if experiment.secure_aggregation is not None:
        _check_secure_aggregation(experiment, topology, faults)
    name, trainer_note = (trainer, "") if trainer else _chosen_trainer(experiment, task, layout, parts)
    sets = tuple(task.tests)
    context = CheckContext(nodes, topology, experiment.optimizer, experiment.codec, layout, sets)
    algorithm.check(context)
    wrapped_ranks = {}
    for number, middleware in enumerate(experiment.middleware):
        middleware.check(context)
        field = f"middleware.{number}.at"
        wrapped_ranks[field] = choose(middleware.at, field=field)
    evaluated = _evaluated(experiment, outcomes)
    metrics, notes = _tried_metrics(experiment, task, personal, len(evaluated))
    _check_metric(experiment, metrics, sets, outcomes)
    check_record(experiment, len(evaluated), len(sets) * len(list(metrics.numbers())))
    layers = layers_of(
        experiment,
        [*wrapped_ranks.values()],
        sampled=topology.sampled,
        asks_neighbors=faults.asks_neighbors,
    )
    setup = Setup(
        experiment=experiment,
        task=task,
        parts=parts,
        personal=personal,
        labels=label_counts(task, parts),
        topology=topology,
        faults=faults,
        network=network,
        compute=compute,
        layout=layout,
        outcome_ranks=frozenset(outcomes),
        evaluated=frozenset(evaluated),
        message_limit=_message_limit(experiment, layout),
        trainer=name,
        trainer_note=trainer_note,
        data=data,
        metrics=metrics,
        remarks=[*remarks, *notes],
        poisoned=[*poisoned_ranks.values()],
        chosen={**poisoned_ranks, **faults.chosen, **wrapped_ranks},
        warm_start=start,
        layers=layers,
        encoded=CodedNode in layers,
    )
    if trainer is None:
        try_exchange(setup)
    return setup


def _chosen_trainer(
    experiment: Experiment, task: Task, layout: Layout, parts: Sequence[Int[np.ndarray, " _"]]
) -> tuple[str, str]:
    """The name of a trainer that has proved itself, and why "auto" did not take another one."""
    engine, batch, seed = experiment.engine, experiment.batch_size, experiment.seed
    size = max(task.samples // experiment.nodes if batch == "full" else batch, 1)
    device, batches = (engine.device, True) if isinstance(engine, Simulate) else ("cpu", False)
    rule = experiment.gradient
    tried = partial(
        failure_of, task=task, optimizer=experiment.optimizer, rule=rule, layout=layout, device=device
    )
    tried = partial(tried, batch=size, seed=seed, smallest=_smallest_batch(experiment, parts))
    tried = partial(tried, one_class=_one_class_batch(experiment, task, parts))
    if type(rule) is not MeanGradient:
        if engine.trainer not in ("auto", SequentialTrainer.name):
            problem = f"{engine.trainer!r} with the gradient {rule.name_of()}"
            raise BadInput(f"engine.trainer: {problem}; accepted: auto, sequential")
        tried(SequentialTrainer.name)
        return SequentialTrainer.name, f"the gradient {rule.name_of()}"
    try:
        with refusing("task.model"):
            name, note = choose_trainer(engine.trainer, task, device, size, experiment.nodes, batches)
    except BadInput:
        tried(SequentialTrainer.name)  # if a part of the task fails, this says more
        raise
    failure = tried(name)
    if failure is None:
        return name, note
    if engine.trainer != "auto":
        raise BadInput(f"engine.trainer: {name!r} {failure}; accepted: auto, sequential")
    return "sequential", "; ".join(filter(None, (note, f"not {name}: it {failure}")))


def _smallest_batch(experiment: Experiment, parts: Sequence[Int[np.ndarray, " _"]]) -> SmallestBatch | None:
    """The first batch of the node with the fewest samples; None if no node has any."""
    rank = min(
        (rank for rank, part in enumerate(parts) if len(part)),
        key=lambda rank: len(parts[rank]),
        default=None,
    )
    if rank is None:
        return None
    stream = BatchStream(experiment.seed, rank, parts[rank], experiment.batch_size)
    if stream.batch_size < len(parts[rank]):
        cure = "batch_size of at least {}"
    elif "min_samples" in type(experiment.partition).model_fields:
        cure = "partition.min_samples of at least {}"
    else:
        cure = f"at least {{}} samples at node {rank}"
    return SmallestBatch(rank, stream.batch(0).numpy(), cure)


def _one_class_batch(
    experiment: Experiment, task: Task, parts: Sequence[Int[np.ndarray, " _"]]
) -> OneClassBatch | None:
    """The first batch of one of the first nodes, if it has several samples of one class; None if there is none."""
    targets = task.train[1]
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        return None
    for rank, part in enumerate(parts[:_ONE_CLASS]):
        if len(part) > 1 and experiment.batch_size != 1:
            batch = BatchStream(experiment.seed, rank, part, experiment.batch_size).batch(0)
            if bool((targets[batch] == targets[batch[0]]).all()):
                return OneClassBatch(rank, batch.numpy())
    return None


def _check_algorithm(algorithm: Any) -> None:
    if not inspect.iscoroutinefunction(algorithm.run):
        problem = "run() is not async, or has a yield; accepted: async def run(self, node)"
        raise BadInput(f"algorithm: {algorithm.name_of()!r}: {problem}")


def _check_network(experiment: Experiment, network: Network) -> None:
    """Refuse message loss that the algorithm does not tolerate, or that would make its nodes wait forever."""
    algorithm, gather, name = experiment.algorithm, experiment.gather, experiment.algorithm.name_of()
    if algorithm.needs_every_message and (gather.timeout_s is not None or gather.lost_peer != "fail"):
        raise BadInput(f"gather: {name} needs every message; accepted: timeout_s: null and lost_peer: fail")
    if not network.loses(experiment.nodes, experiment.seed):
        return
    if algorithm.needs_every_message:
        field = "network" if experiment.network.loses(experiment.nodes, experiment.seed) else "faults"
        raise BadInput(f"{field}: {name} tolerates no message loss; accepted: {field} without loss")
    if algorithm.gathers and gather.timeout_s is None:
        raise BadInput("gather.timeout_s: null, although messages are lost; accepted: seconds")


def _check_durations(profile: ComputeProfile, nodes: int, seed: int) -> None:
    """Refuse a first step that has no duration, or one beyond the end of time. (Later ones are checked when they begin.)"""
    for rank in range(min(nodes, _TRIED)):
        try:
            seconds = profile.duration(seed, rank, 0, 1, 0.0)
        except GossamerError:
            raise
        except Exception as error:
            raise BadInput(f"compute: raised {cause(error)}, for the first step of node {rank}") from error
        if seconds > LONGEST_ACCEPTED_S:
            problem = f"{seconds:g} s for the first step of node {rank}"
            raise BadInput(f"compute: {problem}; accepted: at most {LONGEST_ACCEPTED_S:g} s")


def _check_churn(
    experiment: Experiment, faults: FaultSchedule, profile: ComputeProfile, holders: Sequence[int]
) -> None:
    """Refuse nodes that crash so often that none of their steps is ever completed, or that leave and return a thousand times
    while one is computed: a run that waits for them would not end."""
    engine, seed = experiment.engine, experiment.seed
    for number, fault in enumerate(experiment.faults):
        if not isinstance(fault, Churn) or fault.mean_up_s is None:
            continue
        field = f"faults.{number}"
        ranks = sorted({*faults.chosen[f"{field}.nodes"]} & {*holders})[:_TRIED]
        steps = {rank: profile.duration(seed, rank, 0, 1, 0.0) for rank in ranks}
        if isinstance(engine, Processes):
            steps = {
                rank: max(seconds if engine.pace else 0.0, _PROCESS_S) for rank, seconds in steps.items()
            }
        seconds, slowest = max(((seconds, rank) for rank, seconds in steps.items()), default=(0.0, 0))
        least = seconds / (20 if fault.by == "crash" else 1000)
        if fault.mean_up_s < least and fault.end_s - fault.from_s > least:
            problem = f"got {fault.mean_up_s:g}, while a step of node {slowest} takes {seconds:g} s"
            raise BadInput(f"{field}.mean_up_s: {problem}; accepted: at least {least:g}")


def _check_learning_rates(experiment: Experiment) -> None:
    """Refuse a schedule that takes the learning rate beyond float32 in one of the first rounds that the run has for certain.
    (Later ones are checked when they begin.)"""
    rounds = range(min(experiment.stop.rounds or 1, _TRIED))
    try:
        for round in rounds:
            experiment.optimizer.lr_at(round)
    except GossamerError:
        raise
    except Exception as error:
        raise BadInput(f"optimizer.schedule: raised {cause(error)}, for round {round}") from error


def _check_stop(experiment: Experiment, topology: TopologySchedule) -> None:
    """Refuse a run that only bytes end, although none are sent."""
    algorithm = experiment.algorithm
    if not experiment.stop.bytes_alone:
        return
    if not algorithm.sends_messages():
        silent = f"{algorithm.name_of()} sends nothing"
    elif experiment.nodes == 1:
        silent = "one node has no other to send to"
    elif (
        not topology.sampled
        and topology.static
        and not algorithm.reaches_all()
        and not topology.graph(0).arcs
    ):
        silent = "the topology has no edges to send over"
    else:
        return
    raise BadInput(f"stop: bytes alone end the run, and {silent}; accepted: rounds or time_s as well")


def _check_faults(experiment: Experiment, faults: FaultSchedule) -> None:
    """Refuse absences that the algorithm, or the policy for dead peers, can't handle."""
    algorithm, name = experiment.algorithm, experiment.algorithm.name_of()
    if not _may_be_absent(experiment, faults):
        return
    field = "faults: nodes that are away" if faults.affected else "engine.restart: always"
    if algorithm.needs_every_message:
        raise BadInput(f"{field}, for {name}; accepted: an algorithm that tolerates it (docs/faults.md)")
    if needed := sorted(faults.affected & set(algorithm.needed_ranks(experiment.nodes))):
        raise BadInput(f"faults: node {needed[0]} is away, but {name} needs it; accepted: others")
    if algorithm.gathers and experiment.gather.lost_peer == "fail":
        raise BadInput(f"gather.lost_peer: fail, with {field}; accepted: skip, wait")


def _may_be_absent(experiment: Experiment, faults: FaultSchedule) -> bool:
    """Whether nodes may be absent."""
    restarts = isinstance(experiment.engine, Processes) and experiment.engine.restart == "always"
    return bool(faults.affected) or restarts


def _algorithms_with(attribute: str) -> str:
    """The names of the algorithms with a true attribute."""
    return listed(sorted(n for n, kind in names("algorithm").items() if getattr(kind, attribute, False)))


def _check_aggregator(experiment: Experiment, topology: TopologySchedule) -> None:
    aggregator, algorithm = experiment.aggregator, experiment.algorithm
    name = f"aggregator: {aggregator.name_of()}"
    if type(aggregator) is Mean:
        return
    if not algorithm.mixes_models:
        raise BadInput(
            f"{name}, for {algorithm.name_of()}; accepted: mean, or one of {_algorithms_with('mixes_models')}"
        )
    if aggregator.least > 1 and algorithm.mixes_what_arrives():
        raise BadInput(
            f"{name} takes at least {aggregator.least} models, and {algorithm.name_of()} mixes those that have arrived,"
            " perhaps none; accepted: mean, median and others that take any number, or an algorithm that waits for its"
            " neighbours"
        )
    most_rounds = max(ROUNDS, _MAX_DEGREES // experiment.nodes) if aggregator.least > 1 else ROUNDS
    fewest = fewest_models(experiment, topology, most_rounds)
    if fewest is not None and fewest.number < aggregator.least:
        when = "" if topology.static else f" in round {fewest.round}"
        raise BadInput(
            f"{name} takes at least {aggregator.least} models, and node {fewest.rank} has {fewest.number}{when}, its own"
            " included; accepted: more neighbours, or other parameters"
        )


def _check_codec(
    experiment: Experiment,
    layout: Layout,
    topology: TopologySchedule,
    network: Network,
    faults: FaultSchedule,
) -> None:
    """Refuse a codec that has nothing to encode, or whose requirements are not met."""
    codec, algorithm = experiment.codec, experiment.algorithm
    if codec is None:
        return
    name, differences = algorithm.name_of(), algorithm.sends_differences
    if not algorithm.sends_models():
        raise BadInput(f"codec: {codec.name_of()} for {name}, which sends no whole models; accepted: null")
    loses = {
        "a network or faults that lose messages": network.loses(experiment.nodes, experiment.seed),
        "nodes that are away": _may_be_absent(experiment, faults),
        "gather.timeout_s, after which messages are dropped": experiment.gather.timeout_s is not None,
        f"{name}, which cancels messages": algorithm.takes_back(),
    }
    count = layout.size  # values that the next codec of a chain encodes
    for part in codec.parts():
        part.check(layout)
        named, refused = f"codec: {part.name_of()}", None
        if algorithm.sends_pieces() and part.comes_first:
            refused = f"which takes whole models, with {name}; accepted: codecs that encode value by value"
        elif differences and (instead := part.contracts_only_with(layout, count)) is not None:
            refused = f"whose error can exceed the difference itself; accepted: {instead}"
        elif part.only_differences and not differences:
            refused = (
                f"which encodes only differences of models; accepted: {_algorithms_with('sends_differences')}"
            )
        elif part.needs_static_graph and not topology.static:
            refused = "with a topology that changes; accepted: a static one"
        elif part.needs_every_message and any(loses.values()):
            causes = listed(text for text, lost in loses.items() if lost)
            refused = f"which needs every message, with {causes}; accepted: none of these"
        if refused is not None:
            raise BadInput(f"{named}, {refused}")
        count = count_of(getattr(part, "fraction", 1.0), count)  # sparsifiers have a fraction


def _check_secure_aggregation(
    experiment: Experiment, topology: TopologySchedule, faults: FaultSchedule
) -> None:
    """Refuse settings that don't work with sums of models, or would reveal a single model."""
    algorithm, codec, aggregator = experiment.algorithm, experiment.codec, experiment.aggregator
    ranks = range(experiment.nodes)
    if not algorithm.sums_suffice:
        refused = f"{algorithm.name_of()} needs more than sums; accepted: {_algorithms_with('sums_suffice')}"
    elif type(aggregator) is not Mean:
        refused = f"aggregator {aggregator.name_of()} needs single models; accepted: mean"
    elif codec is not None and not (codec.sparse and codec.common_support):
        refused = (
            f"codec {codec.name_of()} can't be summed; accepted: null, random-k or round-robin with"
            " support: common"
        )
    elif faults.asks_neighbors:
        refused = "a node that starts from a neighbor would get its model; accepted: faults without it"
    elif experiment.checkpoint.every_s is not None:
        refused = "checkpoints need a common round; accepted: checkpoint.every_rounds in place of every_s"
    elif any(len(topology.mixing_weights(rank, 0)) == 1 for rank in ranks):
        refused = "a node has one sender, whose model would be the sum; accepted: two or more"
    elif any(min(topology.mixing_weights(rank, 0).values(), default=1) <= 0 for rank in ranks):
        refused = "a weight is not positive; accepted: weights above 0"
    else:
        return
    raise BadInput(f"secure_aggregation: {refused}")


def _message_limit(experiment: Experiment, layout: Layout) -> int:
    limit: int = experiment.algorithm.message_limit(layout.size, experiment.nodes)
    if (secure := experiment.secure_aggregation) is None:
        return limit
    words = secure.ring_bits // 8 * (layout.size + layout.buffer_size)
    return max(limit, words + 65536 + 256 * experiment.nodes)  # room for the roster of all senders


def _tried_metrics(
    experiment: Experiment, task: Task, personal: list[Int[np.ndarray, " _"]], models: int
) -> tuple[EvaluationMetrics, list[str]]:
    """The task's metrics, and sentences about them, after a trial and a check of the memory that they need."""
    limit, largest = experiment.evaluation.samples, max(map(len, personal), default=0)

    def fits(on: str, sample_bytes: int) -> None:
        samples = min(len(task.tests[on][1]), limit or sys.maxsize)
        check_outputs(experiment, on, max(samples, largest), sample_bytes, models)

    return tried_metrics(task, experiment.seed, limit, fits, personal)


def _check_metric(
    experiment: Experiment, metrics: EvaluationMetrics, sets: tuple[str, ...], outcomes: tuple[int, ...]
) -> None:
    target = experiment.stop.target
    if target is None:
        return
    own = experiment.partition.personal_fraction is not None and experiment.evaluation.nodes != "average"
    recorded = [f"{name}_{column}" for name in (*sets, *["personal"] * own) for column in metrics.numbers()]
    accepted = ["train_loss", *(["consensus_distance"] if len(outcomes) > 1 else []), *recorded]
    if target.metric not in accepted:
        raise BadInput(f"stop.target.metric: got {target.metric!r}; accepted: {listed(accepted)}")


def _evaluated(experiment: Experiment, outcomes: tuple[int, ...]) -> tuple[int, ...]:
    chosen = experiment.evaluation.nodes
    if chosen == "all":
        return outcomes
    if chosen == "average":
        return ()
    if isinstance(chosen, int):
        rng = generator(experiment.seed, "evaluated")
        return tuple(rng.choice(outcomes, min(chosen, len(outcomes)), replace=False).tolist())
    if not (ranks := tuple(set(chosen) & set(outcomes))):
        raise BadInput(f"evaluation.nodes: none of {chosen} is evaluated; accepted: among {list(outcomes)}")
    return ranks
