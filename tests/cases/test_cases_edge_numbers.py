"""Numbers at the edge, in each numeric field of each component and of the experiment: work, or one line before the run. (Issue
"Every input ends in work or in one line", section 11.)"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest

import gossamer
from gossamer import BadInput, Experiment
from gossamer.config import experiment as sections
from gossamer.config.registry import KINDS, Section, names
from gossamer.faults import Fault, FaultInterval
from gossamer.faults.fault import FaultPlan
from gossamer.learning.learning_rate import LearningRateSchedule
from gossamer.network import ComputeProfile, Conditions, Network
from gossamer.network.network import Path as NetworkPath
from gossamer.runtime.setup import prepare
from gossamer.selector import Selector

EDGES = (1e308, 1e-320, -1, math.nan, math.inf, 2**63)

BASE: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "least-squares", "features": 3, "samples": 40, "test_samples": 8},
    "algorithm": "d-psgd",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "batch_size": 4,
    "evaluation": {"every_rounds": 1},
    "stop": {"rounds": 2},
    "engine": {"name": "simulate", "trainer": "sequential"},
}
DIGITS = {"task": {"name": "digits", "model": "logistic", "samples": 80}}
FAULTY = {"gather": {"timeout_s": 1.0, "lost_peer": "skip"}, "failures": {"detection_s": 0.1}}
NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("algorithm", "d2"): {"exact_diffusion": True},
    ("algorithm", "epidemic-oracle"): {"degree": 2},
    ("algorithm", "epidemic-local"): {"degree": 2},
    ("algorithm", "relay-sum"): {"tree": "spanning"},
    ("task", "hub"): {"path": ".", "targets": "y", "image_size": [8, 8]},
    **{("task", name): {"path": "."} for name in ("celeba", "leaf-synthetic", "sent140", "reddit")},
    ("aggregator", "krum"): {"byzantine": 0},
    ("aggregator", "trimmed-mean"): {"count": 1},
    ("codec", "chain"): {"codecs": ["float16"]},
    ("codec", "top-k"): {"fraction": 0.5},
    ("codec", "random-k"): {"fraction": 0.5},
    ("codec", "threshold"): {"threshold": 0.1},
    ("codec", "round-robin"): {"blocks": 2},
    ("compute", "per-node"): {"seconds_per_step": [0.1, 0.1, 0.1, 0.1]},
    ("compute", "stragglers"): {"count": 1},
    ("compute", "slowdowns"): {
        "windows": [{"from_s": 0, "to_s": 1, "factor": 2}],
        "random": {"per_hour": 1, "mean_s": 1, "factor": 2},
    },
    ("fault", "crash"): {"nodes": [0], "at_s": 0.01},
    ("fault", "leave"): {"nodes": [0], "at_s": 0.01},
    ("fault", "join"): {"nodes": [0], "at_s": 0.01},
    ("fault", "churn"): {"mean_up_s": 1.0, "mean_down_s": 0.1},
    ("fault", "slow"): {"nodes": [0], "factor": 2},
    ("fault", "freeze"): {"nodes": [0], "at_s": 0.01, "for_s": 0.01},
    ("fault", "loss"): {"probability": 0.1},
    ("network", "stragglers"): {"count": 1, "bandwidth_mbps": 10},
    ("network", "matrix"): {"bandwidth_mbps": "aws-ten-regions"},
    ("network", "varying"): {"base": "uniform", "rate_changes": [{"at_s": 1, "factor": 0.5}]},
    ("optimizer", "*"): {"lr": 0.1},
    ("poison", "*"): {"at": {"rank": 0}},
    ("partition", "flower"): {"partitioner": "IidPartitioner"},
    ("partition", "dirichlet"): {"alpha": 1.0},
    ("partition", "sizes"): {"fractions": [0.25, 0.25, 0.25, 0.25]},
    ("schedule", "step"): {"every": 1},
    ("schedule", "multi-step"): {"milestones": [1]},
    ("schedule", "exponential"): {"factor": 0.5},
    ("schedule", "cosine"): {"rounds": 2},
    ("schedule", "linear"): {"rounds": 2},
    ("temperature", "cosine"): {"rounds": 2},
    ("temperature", "oscillating"): {"rounds": 2},
    ("poison", "second-task"): {"task": {"name": "digits", "samples": 20}},
    ("topology", "cyclon"): {"view": 2, "shuffle": 1},
    ("topology", "networkx"): {"generator": "complete_graph", "parameters": {"n": 4}},
    ("topology", "layers"): {"layers": {"near": "ring"}},
    ("topology", "random-links"): {"probability": 0.5},
    ("topology", "random-regular"): {"degree": 2},
    ("topology", "erdos-renyi"): {"p": 0.9},
    ("topology", "watts-strogatz"): {"degree": 2, "p": 0.1},
    ("topology", "barabasi-albert"): {"m": 1},
    ("topology", "stochastic-block"): {"sizes": [2, 2], "p_in": 1.0, "p_out": 1.0},
}
"""Parameters that a component needs, by kind and name."""


GRAPHML = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">
<node id="0"/><node id="1"/><node id="2"/><node id="3"/><edge source="0" target="1"/><edge source="1" target="2"/>
<edge source="2" target="3"/></graph></graphml>"""
KOLLAPS = """<experiment><services><service name="node" replicas="4"/></services><bridges><bridge name="hub"/></bridges><links>
<link origin="node" dest="hub" latency="1" upload="10Mbps" download="10Mbps"/></links></experiment>"""
NO_DATA = {
    ("topology", "cyclon"),  # for another algorithm
    ("poison", "tint"),  # for colour images
    ("poison", "text-trigger"),  # for text
    ("partition", "natural"),  # for owners
    ("partition", "flower"),  # needs a package
    *(
        ("model", name)
        for name in ("lenet5", "cnn6", "convnet", "vgg16-bn", "resnet18", "mobilenet", "vit", "lstm")
    ),
    *(
        ("model", name)
        for name in ("leaf-cnn", "celeba-cnn", "sent140-lstm", "next-word-lstm", "gpt2", "causal-lm")
    ),
    ("model", "matrix-factorization"),
    *(("task", name) for name in ("hub", "mnist", "fashion-mnist", "cifar10", "cifar100", "movielens")),
    *(("task", name) for name in ("femnist", "celeba", "leaf-synthetic", "sent140", "reddit", "shakespeare")),
}
"""Components that the experiment has no data for: only their fields are tried."""
FILES: dict[tuple[str, str], str] = {
    ("compute", "trace"): "node,seconds_per_step\na,0.1\n",
    ("network", "trace"): "time_s,rank,uplink_mbps,downlink_mbps\n0,*,10,10\n",
    ("topology", "graphml"): GRAPHML,
    ("network", "kollaps"): KOLLAPS,
    ("weights", "given"): 4 * "0.25 0.25 0.25 0.25\n",
    ("topology", "edge-list"): "0 1\n1 2\n2 3\n",
    ("topology", "adjacency"): "0 1 1 1\n1 0 1 1\n1 1 0 1\n1 1 1 0\n",
}
"""The file of a component that reads one."""


def spec_of(kind: str, name: str, folder: Path) -> dict[str, Any]:
    spec = {"name": name, **NEEDED.get((kind, "*"), {}), **NEEDED.get((kind, name), {})}
    if (text := FILES.get((kind, name))) is not None:
        (path := folder / f"{kind}-{name}.csv").write_text(text)
        spec["path"] = str(path)
    return spec


def placed(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """An experiment with a component."""
    match kind:
        case "codec" if spec["name"] in ("low-rank", "sign", "stc"):  # they encode differences
            return {**BASE, "algorithm": "choco-sgd", "codec": spec}
        case "fault":
            return {**BASE, **FAULTY, "faults": [spec]}
        case "model" if spec["name"] == "linear":  # for inputs with one axis
            return {**BASE, "task": {**BASE["task"], "model": spec}}
        case "model":
            return {**BASE, "task": {**DIGITS["task"], "model": spec}}
        case "poison":
            return {**BASE, **DIGITS, "poison": [spec]}
        case "schedule":
            return {**BASE, "optimizer": {"name": "sgd", "lr": 0.1, "schedule": spec}}
        case "temperature":
            return {**BASE, "topology": {"name": "ring", "weights": {"name": "centrality", "schedule": spec}}}
        case "weights":
            return {**BASE, "topology": {"name": "complete", "weights": spec}}
        case "partition":
            return {**BASE, **DIGITS, "partition": spec}
        case _:
            return {**BASE, kind: spec}


def types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from types_in(inner)


def numeric(model: type[Section], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numeric fields of a component, each with a place for a number: "field", "field.field" or "field.index"."""
    for field, info in model.model_fields.items():
        types = set(types_in(info.annotation)) | {get_origin(t) for t in types_in(info.annotation)}
        inner = next((t for t in types if isinstance(t, type) and issubclass(t, Section)), None)
        value = given.get(field)
        if inner is not None and isinstance(value, dict):
            yield from ((f"{field}.{more}", number) for more, number in numeric(inner, value))
        elif inner is not None and inner is not Selector and isinstance(value, list):
            yield from ((f"{field}.0.{more}", number) for more, number in numeric(inner, value[0]))
        elif inner is Selector or types & {int, float}:
            yield field, value
            if (
                inner is Selector or tuple in types or list in types
            ):  # a selector may be a number, or a list of ranks
                yield f"{field}.0", value


def with_value(given: Any, path: str, value: Any) -> Any:
    """A copy of a mapping or list with another value at a path."""
    first, _, rest = path.partition(".")
    if first.isdecimal():
        items = list(given) if isinstance(given, list | tuple) and given else [None]
        items[0] = with_value(items[0], rest, value) if rest else value
        return items
    given = given if isinstance(given, dict) else {}
    return {**given, first: with_value(given.get(first), rest, value) if rest else value}


def outcome(described: dict[str, Any], out: Path, *, work: bool = True) -> str:
    """Run an experiment. Returns "work", or the one line that refuses it; any other error is one of the test."""
    try:
        experiment = Experiment.of(described)
        if work:
            gossamer.run(experiment, out, command=["test"])
    except BadInput as error:
        return one_line(error)
    return "work"


def one_line(error: BadInput) -> str:
    """The line of an error that has only one."""
    assert len(error.problems) == 1, error.problems
    assert "\n" not in error.problems[0]
    return error.problems[0]


KINDS_TRIED = [kind for kind in KINDS if kind not in ("tracker", "wrapper")]


@pytest.mark.slow
@pytest.mark.timeout(900)  # thousands of short runs
@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_each_number_of_each_component_ends_in_work_or_in_one_line(kind: str, tmp_path: Path) -> None:
    failed = []
    for name, component in names(kind).items():
        spec = spec_of(kind, name, tmp_path)
        if (kind, name) not in NO_DATA and (line := outcome(placed(kind, spec), tmp_path)) != "work":
            failed.append(f"{name}: {line}")
        for path, _ in numeric(component, spec):
            for value in EDGES:
                try:
                    outcome(placed(kind, with_value(spec, path, value)), tmp_path)
                except Exception as error:  # noqa: BLE001 - all of them are shown together
                    failed.append(f"{name}.{path} = {value}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


SECTIONS = {
    "evaluation.timeline": {"to_s": 1.0},
    "stop": {"rounds": 2},
    "gather": {},
    "secure_aggregation": {},
    "failures": {},
    "checkpoint": {},
    "engine": {"name": "simulate"},
}


def test_each_number_of_the_experiment_ends_in_work_or_in_one_line(tmp_path: Path) -> None:
    models: dict[str, type[Section]] = {
        "evaluation.timeline": sections.Timeline,
        "stop": sections.Stop,
        "gather": sections.Gather,
        "secure_aggregation": sections.SecureAggregation,
        "failures": sections.Failures,
        "checkpoint": sections.Checkpoints,
        "engine": sections.Simulate,
        "evaluation": sections.Evaluation,
        "": Experiment,
    }
    tried = [(section, path) for section, model in models.items() for path, _ in numeric(model, {})]
    assert len(tried) > 20
    for section, path in tried:
        base = with_value(BASE, section, SECTIONS[section]) if section in SECTIONS else BASE
        for value in EDGES:
            outcome(with_value(base, f"{section}.{path}".strip("."), value), tmp_path)
    for path, _ in numeric(sections.Processes, {}):
        for value in EDGES:
            described = {**BASE, "engine": {"name": "processes", path: value}}
            outcome(described, tmp_path, work=False)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"optimizer": {"name": "sgd", "lr": 1e39}},
            "optimizer.lr: got 1e+39; accepted: less than or equal to 3.40282e+38",
        ),
        *(
            (
                {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5, **fields}},
                f"optimizer.{line}",
            )
            for fields, line in (
                ({"lr": 1e-46}, "lr: got 1e-46; accepted: at least 1.1754944e-38"),
                ({"clip_norm": 1e-320}, "clip_norm: got 1e-320; accepted: at least 1.1754944e-38"),
                ({"weight_decay": 1e-40}, "weight_decay: got 1e-40; accepted: 0, or at least 1.1754944e-38"),
                ({"momentum": 0.99999999}, "momentum: got 0.99999999; accepted: at most 0.9999999"),
                (
                    {"schedule": {"name": "exponential", "factor": 1e-46}},
                    "schedule.factor: got 1e-46; accepted: at least 1.1754944e-38",
                ),
            )
        ),
        ({"stop": {"time_s": 1e-10}}, "stop.time_s: got 1e-10; accepted: at least 1e-09"),
        (
            {"network": {"name": "uniform", "latency_s": 1e308}},
            "network.latency_s: got 1e+308; accepted: less than or",
        ),
        (
            {"network": {"name": "uniform", "bandwidth_mbps": 1e308}},
            "network.bandwidth_mbps: got 1e+308; accepted: less",
        ),
        ({"stop": {"time_s": 1e308}}, "stop.time_s: got 1e+308; accepted: less than or equal to 4e+09"),
        (
            {"gather": {"timeout_s": 1e308}},
            "gather.timeout_s: got 1e+308; accepted: less than or equal to 4e+09",
        ),
        (
            {"faults": [{"name": "crash", "nodes": [0], "at_s": 1e308}]},
            "faults.0.at_s: got 1e+308; accepted: less than or",
        ),
        (
            {"compute": {"name": "constant", "seconds_per_step": 1e308}},
            "compute.seconds_per_step: got 1e+308; accepted",
        ),
        (
            {
                "compute": {
                    "name": "stragglers",
                    "count": 1,
                    "factor": 1e9,
                    "base": {"name": "constant", "seconds_per_step": 1e6},
                }
            },
            "compute: 1e+15 s for the first step of node",
        ),
        (
            {
                "optimizer": {
                    "name": "sgd",
                    "lr": 1e30,
                    "schedule": {"name": "linear", "rounds": 2, "start": 1.0, "end": 1e20},
                }
            },
            "optimizer.schedule: linear makes the learning rate 5e+49 in round 1; accepted: finite numbers of float32",
        ),
        *(
            (
                {"task": {"name": "digits", "model": {"name": name, "layers": 100_000}}},
                "task.model.layers: got 100000; accepted: less than or equal to 1000",
            )
            for name in ("lstm", "gpt2")
        ),
    ],
)
def test_the_line_names_the_field_and_its_range(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as raised:
        prepare(Experiment.of({**BASE, **fields}))
    [problem] = raised.value.problems
    assert problem.startswith(line)


def test_the_smallest_and_largest_accepted_numbers_work(tmp_path: Path) -> None:
    """What the lines offer is itself a number that float32 holds."""
    smallest = 1.1754944e-38
    optimizer = {"name": "sgd", "lr": smallest, "clip_norm": smallest, "weight_decay": smallest}
    assert outcome({**BASE, "optimizer": {**optimizer, "momentum": 0.9999999}}, tmp_path) == "work"
    assert np.float32(smallest) >= np.finfo(np.float32).tiny
    assert np.float32(0.9999999) < 1


# --- values of own components


class OddProfile(ComputeProfile):
    """Steps whose durations are no durations: from the start, or later."""

    seconds_text: str
    from_step: int = 0

    def step_seconds(self, seed: int, rank: int, step: int) -> float:
        return float(self.seconds_text) if step >= self.from_step else 0.1


class OddSchedule(LearningRateSchedule):
    """A factor that is no number from some round on."""

    factor_text: str
    from_round: int = 0

    def factor_after_warmup(self, round: int) -> float:
        return float(self.factor_text) if round >= self.from_round else 1.0


class OddFault(Fault):
    """An interval that is none."""

    from_text: str
    to_text: str = "1.0"

    def plan(self, nodes: int, seed: int, field: str) -> FaultPlan:
        return FaultPlan([FaultInterval(float(self.from_text), float(self.to_text), "crash", 0)], (0,))


class OddConditions(Conditions):
    def __init__(self, rates: np.ndarray, latency_s: float) -> None:
        self.rates, self._latency_s = rates, latency_s

    def path(self, source: int, to: int) -> NetworkPath:
        return NetworkPath((source, len(self.rates) // 2 + to), self._latency_s)


class OddNetwork(Network):
    """Links with a rate or a latency that is none."""

    rate_text: str = "1e6"
    latency_text: str = "0.1"

    later_text: str = ""

    def conditions(self, nodes: int, seed: int) -> Conditions:
        return OddConditions(np.full(2 * nodes, float(self.rate_text)), float(self.latency_text))

    def loses(self, nodes: int, seed: int) -> bool:
        return False

    def changes(self, nodes: int, seed: int) -> Iterator[tuple[float, Conditions]]:
        if self.later_text:
            yield 0.015, OddConditions(np.full(2 * nodes, float(self.later_text)), 0.1)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        *(
            (
                {"compute": {"name": OddProfile, "seconds_text": text}},
                f"compute: {float(text)} seconds for 1 steps of node 0 from its step 0 on; accepted: a finite number, at least 0",
            )
            for text in ("nan", "inf", "-1")
        ),
        (
            {"compute": {"name": OddProfile, "seconds_text": "1e308"}},
            "compute: 1e+308 s for the first step of node 0; accepted",
        ),
        *(
            (
                {
                    "optimizer": {
                        "name": "sgd",
                        "lr": 0.1,
                        "schedule": {"name": OddSchedule, "factor_text": text, "from_round": 1},
                    }
                },
                "optimizer.schedule: test_cases_edge_numbers:OddSchedule makes the learning rate",
            )
            for text in ("nan", "inf", "1e308")
        ),
        *(
            (
                {"faults": [{"name": OddFault, "from_text": text}], **FAULTY},
                f"faults: crash from {float(text)} to 1.0 s; accepted",
            )
            for text in ("nan", "-1", "2")
        ),
        (
            {"network": {"name": OddNetwork, "rate_text": "nan"}},
            "network: nan bytes per second on a link from 0 s on",
        ),
        (
            {"network": {"name": OddNetwork, "rate_text": "-5"}},
            "network: -5.0 bytes per second on a link from 0 s on",
        ),
        *(
            (
                {"network": {"name": OddNetwork, "latency_text": text}},
                f"network: Path(links=(0, 7), latency_s={float(text)}",
            )
            for text in ("nan", "inf", "-1")
        ),
    ],
)
def test_values_of_own_components_are_checked_before_the_run(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as raised:
        prepare(Experiment.of({**BASE, **fields}))
    [problem] = raised.value.problems
    assert problem.startswith(line)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        *(
            (
                {"compute": {"name": OddProfile, "seconds_text": text, "from_step": 1}},
                f"compute: {float(text)} seconds for 1 steps of node 0 from its step 1 on",
            )
            for text in ("nan", "inf", "-1")
        ),
        (
            {"network": {"name": OddNetwork, "later_text": "nan"}},
            "network: nan bytes per second on a link from 0.015 s on; accepted: a number, at least 0",
        ),
    ],
)
def test_later_values_of_own_components_are_checked_where_they_enter(
    fields: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(gossamer.GossamerError) as raised:
        gossamer.run(Experiment.of({**BASE, **fields}), tmp_path, command=["test"])
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rounds_that_a_run_may_not_reach_are_not_looked_at_before_it() -> None:
    """Only time ends this run, perhaps in its first round."""
    schedule = {"name": OddSchedule, "factor_text": "inf", "from_round": 1}
    optimizer = {"name": "sgd", "lr": 0.1, "schedule": schedule}
    prepare(Experiment.of({**BASE, "optimizer": optimizer, "stop": {"time_s": 1.0}}))


@pytest.mark.parametrize("cohort", [True, False])
def test_steps_beyond_the_end_of_time_end_the_run_in_one_line(cohort: bool, tmp_path: Path) -> None:
    described = {
        **BASE,
        "compute": {"name": "constant", "seconds_per_step": 3e9},
        "engine": {"name": "simulate", "cohort": cohort},
    }
    with pytest.raises(
        gossamer.RunFailed, match=r"nothing happens in 4.6e\+09 s, the longest virtual time"
    ) as raised:
        gossamer.run(Experiment.of(described), tmp_path, command=["test"])
    assert "\n" not in str(raised.value)
