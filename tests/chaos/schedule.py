"""Schedules: an experiment, and its disturbances with their times. A schedule is a function of its seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from string import Template
from typing import Any

import yaml

from gossamer import Experiment
from gossamer.config.registry import names

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "d-psgd": ("keeps averages", {}),
    "d-psgd, overlapped": ("keeps", {"algorithm": {"name": "d-psgd", "overlap": True}}),
    "d2": ("keeps", {"algorithm": {"name": "d2", "exact_diffusion": True}}),
    "gradient-tracking": ("keeps", {}),
    "all-reduce": ("keeps averages", {}),
    "relay-sum": ("", {"algorithm": {"name": "relay-sum", "tree": "spanning"}}),
    "fedavg": ("averages deaf", {"algorithm": {"name": "fedavg", "client_fraction": 0.7}}),
    "sgp": ("", {}),
    "epidemic-local": ("averages", {"algorithm": {"name": "epidemic-local", "degree": 2}}),
    "epidemic-oracle": ("averages", {"algorithm": {"name": "epidemic-oracle", "degree": 2}}),
    "choco-sgd": ("keeps", {"codec": {"name": "top-k", "fraction": 0.5}}),
    "deepsqueeze": ("keeps", {"codec": {"name": "top-k", "fraction": 0.5}}),
    "local": ("keeps averages", {}),
    "gossip-learning": ("averages", {}),
    "ad-psgd": ("keeps averages", {"algorithm": {"name": "ad-psgd", "timeout_s": 0.3}}),
    "swift": ("averages", {}),
    "divshare": ("averages", {"algorithm": {"name": "divshare", "fraction": 0.5, "recipients": 2}}),
}
"""By name: properties, and fields of the experiment (the algorithm has this name unless they say otherwise). Without
training, ``keeps``: the mean of all models stays if every message arrives; ``averages``: models stay between the initial
ones despite losses. ``deaf``: a node must receive the message that the rounds are over."""
KINDS = names("algorithm")
CRASH, FREEZE = (
    "crash, nodes: [$rank], at_s: $at, restart_after_s: $for, restart_from: $of",
    "freeze, nodes: [$rank], at_s: $at, for_s: $for",
)
FAULTS = (
    CRASH,
    FREEZE,
    "crash, nodes: [$rank], at_s: $at",
    "crash, nodes: $some, at_round: $round, restart_after_s: $for",
    "leave, nodes: [$rank], at_s: $at",
    "join, nodes: [$rank], at_s: $at, start_from: $model",
    "churn, nodes: $some, mean_up_s: 0.4, mean_down_s: 0.2, by: $by, to_s: $to",
    "slow, nodes: $some, factor: 3.0, from_s: $at, to_s: $to",
)
LOSSES = (
    "partition, groups: [$some], from_s: $at, to_s: $to",
    "loss, probability: $probability, from_s: $at, to_s: $to",
)
CUT_PAIRS = (
    "loss, probability: 1.0, links: [[$rank, $other]], from_s: $at, to_s: $to",
    "loss, probability: 1.0, links: [[$rank, $other], [$other, $rank]], from_s: $at, to_s: $to",
)
"""Entries of ``faults``, which both engines apply."""
OUTSIDE = {"kill": CRASH, "stop": FREEZE}
"""What is done to a real process from outside, and the fault that represents it in a simulation."""
HARMLESS = ("cut", "replay", "stranger", "disk stalls")
"""Done to real processes, too, as is "disk full", but without effect on the results of a synchronous algorithm."""
STEP_S, TICK_S = 0.1, 0.2


@dataclass(frozen=True)
class Disturbance:
    """A ``fault`` that the engine applies, or an action on real processes from ``outside``: on the node ``rank``, ``at_s``
    seconds after the start, for ``for_s`` seconds."""

    fault: Mapping[str, Any] | None
    outside: str | None
    at_s: float
    for_s: float
    rank: int


@dataclass(frozen=True)
class Schedule:
    """One experiment under disturbances.

    Attributes:
        name: of the algorithm, see :data:`ALGORITHMS`.
        fields: of the experiment, except its engine and faults.
        repeated: whether the simulation runs twice.
        stopped_at: the number of rows after which the run is stopped and resumed; None is never."""

    seed: int
    name: str
    fields: Mapping[str, Any]
    disturbances: tuple[Disturbance, ...]
    repeated: bool
    stopped_at: int | None

    def __str__(self) -> str:
        values = {**asdict(self), "disturbances": [asdict(item) for item in self.disturbances]}
        return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=10**6)).strip()

    def experiment(self, engine: str) -> Experiment:
        """The experiment for an engine; actions from outside are faults in a simulation only."""
        simulated = engine == "simulate"
        faults = [item.fault for item in self.disturbances if item.fault and (simulated or not item.outside)]
        killed = any(item.outside == "kill" for item in self.disturbances)
        real = {"trainer": "sequential", "pace": True, "restart": "always" if killed else "never"}
        options = {"name": engine, **({"trainer": "sequential", "workers": 1} if simulated else real)}
        # Real nodes that a busy machine holds up must not be taken for dead.
        failures = {"detection_s": 0.3 if simulated else 5.0}
        return Experiment.of({**self.fields, "faults": faults, "failures": failures, "engine": options})

    def has_property(self, name: str) -> bool:
        """Whether :data:`ALGORITHMS` gives the algorithm this property."""
        return name in ALGORITHMS[self.name][0].split()

    @property
    def synchronous(self) -> bool:
        """Whether nodes wait for each other, and all complete the same rounds."""
        return bool(KINDS[self.name.partition(",")[0]].gathers and "rounds" in self.fields["stop"])

    @property
    def kinds(self) -> set[str]:
        """The names of the faults."""
        return {item.fault["name"] for item in self.disturbances if item.fault}

    @property
    def lossless(self) -> bool:
        """Whether every message arrives, and every receiver waits for it."""
        return self.kinds <= {"slow"} and not self.fields["gather"]["timeout_s"]

    @property
    def frozen(self) -> bool:
        """Whether nothing is learned: only mixing changes models."""
        return bool(self.fields["optimizer"]["lr"] < 1e-20)


def draw(seed: int) -> Schedule:
    """The schedule of a seed. Every choice is drawn with its own key, and so depends on no other."""

    def rng(purpose: str) -> Random:
        return Random(f"{seed} {purpose}")

    def one_of(purpose: str, *values: Any) -> Any:
        return rng(purpose).choice(values)

    name = one_of("algorithm", *ALGORITHMS)
    kind = KINDS[name.partition(",")[0]]
    nodes, rounds = one_of("nodes", 3, 4, 5, 6), one_of("rounds", 3, 4, 5, 6, 7)
    number = one_of("number", 0, 0, 1, 2, 3, 4) if not kind.needs_every_message else 0
    losing = bool(number) and "deaf" not in ALGORITHMS[name][0] and one_of("losing", True, False)
    faults = (*FAULTS, *FAULTS, *LOSSES * losing, *LOSSES * losing, *OUTSIDE)
    needed = kind.model_construct().needed_ranks(nodes)
    away = [rank for rank in range(nodes) if rank not in needed]
    disturbances = [_drawn(rng(f"fault {k}"), faults, away, rounds * STEP_S) for k in range(number)]
    if losing and one_of("pairs", True, False):
        disturbances.append(_drawn(rng("pair"), CUT_PAIRS, away, rounds * STEP_S))
    if one_of("outside", True, False):
        disturbances.append(
            _drawn(rng("from outside"), ("disk full", *HARMLESS), range(nodes), rounds * STEP_S)
        )
    saved = one_of("checkpoint", None, 1, 2)
    stopped = bool(saved) and not number and one_of("stopped", True, False)
    stop = {"rounds": rounds} if stopped or one_of("stop", 1, 1, 1, 0) else {"time_s": rounds * STEP_S}
    fields: dict[str, Any] = {
        "name": "chaos",
        "seed": seed,
        "nodes": nodes,
        "task": {"name": "least-squares", "features": 4, "samples": 4 * nodes, "test_samples": 4},
        "topology": one_of("topology", "ring", "complete", "star"),
        "algorithm": name,
        "optimizer": {"name": "sgd", "lr": one_of("lr", 1e-30, 0.05)},
        "batch_size": "full",
        "initial": "independent",
        "compute": {
            "name": "per-node",
            "seconds_per_step": [one_of(f"step {rank}", 0.05, 0.1, 0.11, 0.15) for rank in range(nodes)],
        },
        "network": {
            "name": "uniform",
            "latency_s": one_of("latency", 0.0, 0.01, 0.06),
            "bandwidth_mbps": one_of("bandwidth", None, None, 0.1),
            "sharing": one_of("sharing", "fifo", "fair"),
            "loss": one_of("loss", 0.0, 0.1, 0.4) if losing else 0.0,
        },
        "gather": {
            "timeout_s": 0.25 if losing else None,
            "lost_peer": one_of("lost peer", "skip", "wait") if losing else "skip" if number else "fail",
        },
        "evaluation": {"every_rounds": 1, "every_s": TICK_S, "nodes": 1},
        "checkpoint": {"every_rounds": saved},
        "stop": stop,
        **ALGORITHMS[name][1],
    }
    rows = rng("stopped at").randrange(nodes + 1, nodes * rounds) if stopped else None
    return Schedule(seed, name, fields, tuple(disturbances), rng("repeated").random() < 0.1, rows)


def _drawn(rng: Random, choices: Sequence[str], ranks: Sequence[int], length_s: float) -> Disturbance:
    """One of these faults or actions from outside, at a random time."""
    chosen, some = rng.choice(choices), sorted(rng.sample(ranks, rng.randint(1, len(ranks))))
    at_s, for_s = (round(rng.uniform(0.01, length_s), 2) for _ in range(2))
    values = {"rank": some[0], "some": some, "at": at_s, "for": for_s, "to": round(at_s + for_s, 2)}
    values |= {
        "round": rng.randint(1, 3),
        "probability": rng.choice([0.3, 1.0]),
        "by": rng.choice(["crash", "leave"]),
    }
    values |= {"of": rng.choice(["checkpoint", "initial"]), "model": rng.choice(["initial", "neighbor"])}
    values["other"] = rng.choice([rank for rank in ranks if rank != some[0]] or [int(some[0] == 0)])
    text = chosen if "," in chosen else OUTSIDE.get(chosen)
    fault = text and yaml.safe_load("{name: " + Template(text).substitute(values) + "}")
    return Disturbance(fault, None if "," in chosen else chosen, at_s, for_s, some[0])
