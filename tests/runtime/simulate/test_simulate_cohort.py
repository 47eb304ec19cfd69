"""Cohorts: a run that computes its rounds for all nodes at once has the same record as one that runs each node by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gossamer
from gossamer import Algorithm, Experiment, Node, RunFailed
from gossamer.algorithms.sgp import SGP
from gossamer.messages.tags import Model, Payload
from gossamer.per_node import Divergence, PerNode, of
from gossamer.runtime.simulate.cohort import Cohort

DIGITS = {"name": "digits", "model": {"name": "mlp", "hidden": [7]}}
BASE: dict[str, Any] = {
    "seed": 5,
    "nodes": 8,
    "task": DIGITS,
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "topology": {"name": "random-regular", "degree": 3},
    "algorithm": {"name": "d-psgd", "local_steps": 2},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "batch_size": 8,
    "evaluation": {"every_rounds": 2, "samples": 50},
    "stop": {"rounds": 5},
    "engine": {"name": "simulate", "trainer": "sequential"},
}


@pytest.fixture(autouse=True)
def _shapes_unchecked(shapes_unchecked: None) -> None:
    """A cohort passes an algorithm the vectors of all nodes in place of one."""


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rounds that each cohort completed, to the end or until its nodes diverged."""
    rounds: list[int] = []
    close = Cohort.close

    def counted(self: Cohort) -> None:
        close(self)
        rounds.append(self.round)

    monkeypatch.setattr(Cohort, "close", counted)
    yield rounds


def both(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """The records of a run with cohorts and of one without."""
    return record(folder / "with", True, changes), record(folder / "without", False, changes)


def record(folder: Path, cohort: bool, changes: dict[str, Any]) -> dict[str, Any]:
    described = {**BASE, **changes, "engine": {**BASE["engine"], "cohort": cohort}}
    failure = None
    try:
        run = gossamer.run(Experiment.of(described), folder)
    except RunFailed as error:
        failure, run = str(error), gossamer.load_run(error.folder or folder)
    contents: dict[str, Any] = {
        "failure": failure,
        "status": run.status,
        "outcome": run.outcome,
        "time_s": run.figures.get("time_s"),
    }
    contents["metrics"] = repr(run.metrics.drop("wall_s").to_dicts())  # (NaN is not equal to itself)
    contents["events"] = run.events.drop("wall_s", strict=False).to_dicts()
    contents["models"] = None if failure else run.parameters.numpy().tobytes()
    return contents


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="d-psgd"),
        pytest.param({"algorithm": {"name": "sgp", "local_steps": 2}}, id="sgp"),
        pytest.param(
            {"algorithm": {"name": "sgp"}, "topology": {"name": "one-peer-exponential"}}, id="sgp, directed"
        ),
        pytest.param({"algorithm": {"name": "gradient-tracking"}}, id="gradient-tracking"),
        pytest.param({"algorithm": {"name": "gradient-tracking", "variant": "diging"}}, id="diging"),
        pytest.param({"algorithm": {"name": "d2", "exact_diffusion": True}}, id="d2"),
        pytest.param({"algorithm": {"name": "epidemic-oracle", "degree": 3}}, id="epidemic"),
        pytest.param({"algorithm": {"name": "local"}}, id="local"),
        pytest.param({"topology": {"name": "barabasi-albert", "m": 2}}, id="degrees that differ"),
        pytest.param(
            {"topology": {"name": "random-regular", "degree": 3, "every_rounds": 1}}, id="graphs that change"
        ),
        pytest.param({"network": {"name": "uniform", "latency_s": 0.003}}, id="latency"),
        pytest.param(
            {"optimizer": {"name": "adam", "lr": 0.01, "schedule": {"name": "cosine", "rounds": 5}}},
            id="adam",
        ),
        pytest.param(
            {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "reset_every_round": True}}, id="reset"
        ),
        pytest.param({"evaluation": {"every_rounds": None}}, id="nothing recorded between"),
        pytest.param(
            {"evaluation": {"every_rounds": 1, "nodes": "average"}, "initial": "independent"},
            id="average model",
        ),
        pytest.param(
            {"task": {"name": "least-squares", "features": 5, "samples": 80}, "partition": "iid"},
            id="least squares",
        ),
    ],
)
def test_record_with_cohorts_equals_record_without(
    tmp_path: Path, advanced: list[int], changes: dict[str, Any]
) -> None:
    together, alone = both(tmp_path, **changes)
    assert together == alone
    assert advanced == [5]


def test_float_sums_round_the_same_with_cohorts(
    tmp_path: Path, advanced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push-sum weight is the sum of ten shares of 0.1: 1 - 1.1e-16 if they are added one by one."""
    add = SGP._add

    async def recorded(self: SGP, node: Node, inbox: Mapping[int, Payload]) -> None:
        await add(self, node, inbox)
        node.record(weight=node.state["weight"])

    monkeypatch.setattr(SGP, "_add", recorded)
    topology = {"name": "random-regular", "degree": 9}
    together, alone = both(tmp_path, algorithm="sgp", nodes=12, topology=topology)
    assert together == alone
    assert advanced == [5]


class Odd(Algorithm):
    """D-PSGD that deviates in round 3 as ``way`` says."""

    runs_as_cohort: ClassVar[bool] = True
    way: str

    async def run(self, node: Node) -> None:
        if self.way == "sends before the first round":
            node.broadcast(await node.neighbors(0), 1.0, tag="hello")
            await node.gather(await node.neighbors(0), tag="hello")
        node.state.setdefault("kept", {"rounds": []} if self.way == "keeps a list" else 0)
        total, before = 0.0 * node.parameters, node.step
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            if r == 3:
                await self._odd(node)
            inbox = await node.gather(peers, tag=r)
            await node.mix(inbox, node.mixing_weights(r))
            node.record(mean=node.parameters.mean())
            if self.way == "keeps a list":
                node.state["kept"]["rounds"].append(r)
            total = total + node.parameters
        if self.way == "ends with the mean of its models":
            node.parameters = total / (node.step - before)
        if self.way == "fails in the end":
            raise ArithmeticError("nothing adds up")

    async def _odd(self, node: Node) -> None:
        match self.way:
            case "branches by rank" if node.rank % 2:
                await node.sleep(0.5)
            case "branches by value" if node.parameters.sum() * 1e5 % 2 > 1:
                node.parameters = node.parameters * 0.5
            case "fails":
                raise ArithmeticError("nothing adds up")
            case "fails at one node" if node.rank == 2:
                raise ArithmeticError("nothing adds up")
            case "writes in place":
                node.parameters.add_(1.0)
            case "writes in place by an operator":
                v = node.parameters
                v += 1.0
            case "writes into a slice":
                node.parameters[:2] = 0.0
            case "awaits nothing":
                node.train()  # type: ignore[unused-coroutine]
            case "leaves a message":
                node.broadcast(await node.neighbors(3), 2.0, tag="left")
            case "spawns":
                await node.spawn(node.sleep(0.1))
            case "has a task of its own":
                await asyncio.create_task(_nap(node))
            case "draws by node":
                await node.sleep(node.rng("nap").random())
            case "prints":
                str(node.rank)
            case "uses torch":
                node.parameters = torch.clamp(node.parameters, -1, 1) + 2 * node.parameters.sign() / 100
            case "reads its loss":
                node.record(loss=await node.train())
            case "refuses":
                node.expect(3, node.model, check=lambda message: message.source != 1)
            case "expects":
                node.expect(3, node.model, check=lambda message: message.source < node.size)
            case "expects something else":
                node.expect(3, 1.0)
            case "records what is no value":
                node.record(odd=object())  # type: ignore[arg-type]
            case "diverges":
                node.parameters = node.parameters * float("inf")


class Script(Algorithm):
    """D-PSGD that runs the script ``does`` in each round, before it mixes."""

    runs_as_cohort: ClassVar[bool] = True
    does: str

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            inbox = await node.gather(peers, tag=r)
            weights = node.mixing_weights(r)
            exec(
                SCRIPTS[self.does],
                globals(),
                scope := {"node": node, "inbox": inbox, "weights": weights, "r": r, "peers": peers},
            )
            await node.mix(inbox, scope["weights"])


SCRIPTS = {
    "looks its rank up": "if node.rank in {0, 1}: node.parameters = node.parameters * 0.5",
    "looks its rank up in a dict": "node.lr = {0: 0.5}.get(node.rank, 0.1)",
    "has its rank in a set": "node.record(x=len({node.rank % 2, 0}))",
    "hashes its rank": "node.record(x=hash((node.rank, r)) % 97)",
    "catches a missing key": """
try:
    inbox[0]
    node.record(x=1)
except KeyError:
    node.record(x=0)
""",
    "catches a division by zero": """
try:
    node.record(x=1 / node.rank)
except ZeroDivisionError:
    node.record(x=0)
""",
    "catches everything": """
try:
    node.record(x=float(node.rank))
except:
    node.record(x=-1.0)
""",
    "finds nothing": "node.record(x=inbox.get(0) is None)",
    "compares": "node.record(x=(node.rank > 3) is True)",
    "powers in place": "v = 1.0 * node.parameters; w = v; v **= 2; node.parameters = w * 0.01 + node.parameters",
    "is in place inside": "torch.nn.functional.relu(node.parameters, inplace=True)",
    "is in place by position": "torch.nn.functional.relu(node.parameters, True)",
    "assigns doubles": "node.parameters = node.parameters.double()",
    "writes its rank": "node.record(x=str(list(peers)))",
    "represents its rank": "node.record(x=f'{node.rank!r}')",
    "records a vector": "node.record(x=node.parameters)",
    "is cancelled": "raise asyncio.CancelledError",
    "makes weights of its own": "weights = {j: w * 0.5 for j, w in weights.items()}",
    "asks for a type": "node.record(x=isinstance(node.parameters, torch.Tensor))",
    "detaches": "node.parameters = node.parameters.detach().clone() * 0.9",
    "uses shapes": "node.parameters = node.parameters + torch.ones(node.parameters.shape[0]) * 0.001",
}


@pytest.mark.parametrize("does", SCRIPTS)
def test_python_constructs_do_not_hide_node_differences(tmp_path: Path, does: str) -> None:
    together, alone = both(tmp_path, algorithm={"name": f"{__name__}:Script", "does": does})
    assert together == alone


class Loops(Algorithm):
    """Loops and messages that few algorithms have."""

    runs_as_cohort: ClassVar[bool] = True
    way: str

    async def run(self, node: Node) -> None:
        kept = None
        async for r in node.rounds():
            await self._round(node, r)
            if self.way == "loops twice" and r == 2:
                break
            if self.way == "ends a round itself":
                await node.end_round(r)
            if self.way == "changes its weights":
                kept = kept or dict(node.mixing_weights(r).items())
                for j in kept:
                    kept[j] = kept[j] * 0.8
                await node.mix(await self._talk(node, ("more", r)), kept)
            if self.way == "has tags of several parts":
                peers = await node.neighbors(r)
                node.broadcast(peers, 1.0, tag=("a", r, "x"))
                node.broadcast(peers, 2.0, tag=("a", r))
                node.record(x=sum((await node.gather(peers, tag=("a", r))).values()))
                await node.gather(peers, tag=("a", r))
            if self.way == "trains an epoch":
                await node.train(node.steps_per_epoch)
            if self.way == "sends doubles":
                peers = await node.neighbors(r)
                node.broadcast(peers, node.parameters.double(), tag=("d", r))
                await node.gather(peers, tag=("d", r))
            if self.way == "sends ranks":
                peers = await node.neighbors(r)
                node.broadcast(peers, 100 * node.rank, tag=("d", r))
                await node.gather(peers, tag=("d", r))
        if self.way == "loops twice":
            async for r in node.rounds():
                await self._round(node, r)

    async def _round(self, node: Node, r: int) -> None:
        await node.train()
        await node.mix(await self._talk(node, r), node.mixing_weights(r))

    async def _talk(self, node: Node, tag: Any) -> Any:
        peers = await node.neighbors()
        node.broadcast(peers, node.model, tag=tag)
        return await node.gather(peers, tag=tag)


@pytest.mark.parametrize(
    "way",
    [
        "loops twice",
        "ends a round itself",
        "changes its weights",
        "has tags of several parts",
        "trains an epoch",
        "sends doubles",
        "sends ranks",
    ],
)
def test_unusual_loops_and_messages_record_the_same(tmp_path: Path, way: str) -> None:
    together, alone = both(tmp_path, algorithm={"name": f"{__name__}:Loops", "way": way})
    assert together == alone


def test_epochs_of_equal_partitions_run_as_a_cohort(tmp_path: Path, advanced: list[int]) -> None:
    algorithm = {"name": f"{__name__}:Loops", "way": "trains an epoch"}
    together, alone = both(tmp_path, algorithm=algorithm, partition="iid")
    assert together == alone
    assert advanced == [5]


def test_node_methods_missing_from_cohort_are_the_known_ones() -> None:
    missing = {name for name in vars(Node) if not name.startswith("_") and name not in vars(Cohort)}
    # These need a node's runtime, mailbox or host, which a cohort lacks.
    assert missing == {
        *("answer", "apply", "ask", "buffers", "compress", "drain", "drain_answers", "evaluate", "gradient"),
        *("next_answer", "peers", "receive", "secret", "send", "traffic", "view"),
    }


async def _nap(node: Node) -> None:
    await node.sleep(0.1)


@pytest.mark.parametrize(
    ("way", "rounds"),
    [
        ("nothing", 5),
        ("uses torch", 5),
        ("reads its loss", 5),
        ("keeps a list", 5),
        ("ends with the mean of its models", 5),
        ("fails in the end", 5),
        ("sends before the first round", 5),
        ("branches by rank", 3),
        ("branches by value", 3),
        ("fails", 3),
        ("fails at one node", 3),
        ("writes in place", 3),
        ("writes in place by an operator", 3),
        ("writes into a slice", 3),
        ("awaits nothing", 3),
        ("leaves a message", 3),
        ("spawns", 3),
        ("has a task of its own", 3),
        ("draws by node", 3),
        ("prints", 3),
        ("refuses", 3),
        ("expects", 5),
        ("expects something else", 3),
        ("records what is no value", 3),
        ("diverges", 4),
    ],
)
def test_cohort_runs_until_nodes_diverge(tmp_path: Path, advanced: list[int], way: str, rounds: int) -> None:
    together, alone = both(tmp_path, algorithm={"name": f"{__name__}:Odd", "way": way})
    assert together == alone
    assert advanced == [rounds]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"network": {"name": "uniform", "bandwidth_mbps": 10}}, id="bandwidth"),
        pytest.param({"network": {"name": "uniform", "latency_s": 0.01, "jitter_s": 0.005}}, id="jitter"),
        pytest.param({"compute": {"name": "log-normal"}}, id="step times"),
        pytest.param({"codec": {"name": "top-k", "fraction": 0.1}}, id="codec"),
        pytest.param({"stop": {"rounds": 5, "time_s": 0.05}}, id="time"),
        pytest.param(
            {"faults": [{"name": "crash", "nodes": [1], "at_s": 0.03}], "gather": {"lost_peer": "skip"}},
            id="faults",
        ),
    ],
)
def test_no_cohort_forms_where_nodes_differ(
    tmp_path: Path, advanced: list[int], changes: dict[str, Any]
) -> None:
    record(tmp_path, True, changes)
    assert advanced == []


# --- values of all nodes


def test_per_node_operations_apply_to_each_node() -> None:
    vectors = PerNode([torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0])])
    numbers = PerNode([1, 2])
    assert of(2 * vectors - numbers, 1).tolist() == [4.0, -10.0]
    assert of(vectors / numbers, 1).tolist() == [1.5, -2.0]
    assert of(torch.maximum(vectors, torch.zeros(2)), 1).tolist() == [3.0, 0.0]
    assert of(torch.ones(2) * vectors, 0).tolist() == [1.0, 2.0]
    assert of(abs(vectors).sum(), 1) == 7.0
    assert of(-numbers, 1) == -2
    assert of(Model(vectors), 1).parameters is vectors.each[1]  # type: ignore[arg-type]
    assert [of(item, 1) for item in PerNode([[1, 2], [3, 4]])] == [3, 4]
    assert isinstance(vectors, torch.Tensor)
    assert isinstance(vectors, PerNode)
    assert not isinstance(numbers, torch.Tensor)
    assert torch.zeros(vectors.shape[0]).tolist() == [0.0, 0.0]
    inbox = PerNode([{1: 0.5}, {0: 0.25}], keys=True)
    assert of({rank: inbox[rank] for rank in inbox}, 1) == {0: 0.25}
    assert len(inbox) == 1
    assert bool(numbers > 0)


@pytest.mark.parametrize(
    "parting",
    [
        lambda x: bool(x > 1),
        lambda x: float(x),
        lambda x: int(x),
        lambda x: [0, 1, 2][x],
        lambda x: len(PerNode([[1], [1, 2]])),
        lambda x: list(PerNode([[1], [1, 2]])),
        lambda x: x.anything,
        lambda x: f"{x}",
        lambda x: 1 in PerNode([[1], [2]]),
        lambda x: PerNode([torch.ones(1)] * 2).add_(1),
        lambda x: torch.add(PerNode([torch.ones(1)] * 2), 1, out=torch.ones(1)),
        lambda x: torch.ones(2).numpy() * PerNode([1.0, 2.0]),
        lambda x: torch.bernoulli(PerNode([torch.ones(1)] * 2), generator=torch.Generator()),
        lambda x: isinstance(PerNode([1, "a"]), int),
    ],
)
def test_diverging_operation_raises_divergence(parting: Any) -> None:
    with pytest.raises(Divergence):
        parting(PerNode([1, 2]))
