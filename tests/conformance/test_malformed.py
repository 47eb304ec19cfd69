"""A live peer with valid keys that sends malformed messages: the others go on without them, and report it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import gossamer
from gossamer import Experiment, Model, Node, NodeWrapper, Part, Run, RunFailed
from gossamer.algorithms import Algorithm
from gossamer.messages.tags import Coded, Payload
from gossamer.node.mailbox import MAX_UNREAD
from gossamer.runtime.processes.fork_server import Listen
from worker_fleet import TOKEN, Fleet, free_port

P = 5
NAN, INF = float("nan"), float("inf")


def malformed() -> dict[str, Payload]:
    """Payloads that no algorithm expects, by kind; instances of ``Model`` are invalid models."""
    return {
        "nothing": None,
        "number": 7,
        "not a number": NAN,
        "text": "model",
        "bytes": b"model",
        "list": [1, [2.0, None]],
        "dict": {"model": 1},
        "vector": torch.zeros(P),
        "model of NaN": Model(torch.full((P,), NAN)),
        "model with an infinity": Model(torch.tensor([0.0, 0.0, -INF, 0.0, 0.0])),
        "short model": Model(torch.zeros(P - 1)),
        "long model": Model(torch.zeros(P + 1)),
        "empty model": Model(torch.zeros(0)),
        "double model": Model(torch.zeros(P, dtype=torch.float64)),
        "integer model": Model(torch.zeros(P, dtype=torch.int64)),
        "model with buffers": Model(torch.zeros(P), torch.zeros(2)),
        "part of NaN": Model(Part(torch.full((1,), NAN), torch.tensor([0]), P)),  # type: ignore[arg-type]
        "part of a longer model": Model(Part(torch.zeros(1), torch.tensor([P]), P + 1)),  # type: ignore[arg-type]
        "what no codec makes": Model(Coded("text")),  # type: ignore[arg-type]
        "wrong indices": Model(Coded([torch.zeros(2), torch.tensor([0, 99], dtype=torch.int32)])),  # type: ignore[arg-type]
        "encoded NaN": Model(Coded([torch.full((2,), NAN), b""])),  # type: ignore[arg-type]
    }


KINDS = list(malformed())
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"algorithm": "d-psgd"},
    "questions": {"algorithm": {"name": "ad-psgd", "timeout_s": 0.3}},
    "push": {"algorithm": "gossip-learning"},
    "latest": {"algorithm": "swift"},
    "fragments": {"algorithm": {"name": "divshare", "fraction": 0.5, "recipients": 3}},
    "segments": {"algorithm": "all-reduce"},
    "server": {"algorithm": "fedavg"},
    "codec": {"algorithm": "d-psgd", "codec": {"name": "top-k", "fraction": 0.4}},
    "differences": {"algorithm": {"name": "deepsqueeze"}, "codec": {"name": "top-k", "fraction": 0.4}},
    "secure": {
        "algorithm": "d-psgd",
        "secure_aggregation": {"drop_outs": "recover"},
        "gather": {"malformed": "drop", "lost_peer": "skip", "timeout_s": 0.5},
    },
}
BAD = {"questions": 2}
"""The rank of the malformed peer if not 3. (Rank 2 asks, and rank 3 answers.)"""


class Malformed(NodeWrapper):
    """A node whose messages are malformed from a round on: of one kind, or of all kinds in turn."""

    rank: int = 3
    kind: str | None = None
    since: int = 2

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        if node.rank != self.rank or node.round < self.since:
            return payload
        kind = self.kind or KINDS[(node.round + to) % len(KINDS)]
        wrong = malformed()[kind]
        wraps_model = isinstance(payload, dict) and "model" in payload and isinstance(wrong, Model)
        return {**payload, "model": wrong} if wraps_model else wrong


def described(setting: str, engine: str = "simulate", *, rounds: int = 8, **changes: Any) -> Experiment:
    options = {"pace": True} if engine == "processes" else {"trainer": "sequential"}
    fields: dict[str, Any] = {
        "nodes": 4,
        "task": {"name": "least-squares", "features": P, "samples": 80, "test_samples": 20},
        "topology": "complete",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "compute": {"name": "constant", "seconds_per_step": 0.01},
        "network": {"name": "uniform", "latency_s": 0.001},
        "gather": {"malformed": "drop", "lost_peer": "skip"},
        "evaluation": {"every_rounds": 4},
        "stop": {"rounds": rounds},
        "engine": {"name": engine, **options},
        **SETTINGS[setting],
    }
    return Experiment.of({**fields, **changes})


def honest(run: Run, bad: int = 3) -> torch.Tensor:
    """The models of all nodes but one."""
    assert run.parameters is not None
    return torch.cat([run.parameters[:bad], run.parameters[bad + 1 :]])


def refusals(run: Run) -> pl.DataFrame:
    return run.events.filter(pl.col("event") == "malformed")


def some(setting: str, kind: str) -> Any:
    """The synchronous algorithm meets every kind, each other one a fifth of them; the rest is slow."""
    turn = (list(SETTINGS).index(setting) + KINDS.index(kind)) % 5
    return pytest.param(
        setting, kind, marks=[] if setting == "synchronous" or turn == 0 else pytest.mark.slow
    )


@pytest.mark.parametrize(("setting", "kind"), [some(setting, kind) for setting in SETTINGS for kind in KINDS])
def test_others_go_on_without_a_malformed_message(setting: str, kind: str, tmp_path: Path) -> None:
    bad = BAD.get(setting, 3)
    run = gossamer.run(described(setting, wrappers=[Malformed(rank=bad, kind=kind)]), tmp_path)
    assert run.status == "done"
    assert honest(run, bad).isfinite().all()
    refused = refusals(run)
    assert len(refused) > 0
    assert bad not in refused["node"]
    for row in refused.to_dicts():
        assert row["detail"].startswith(f"node {row['node']} refuses a message of node {bad} under tag ")
    if setting != "questions":  # whose passive nodes may end before the last question
        counts = run.metrics.group_by("node").agg(pl.col("messages_refused").max())
        assert set(counts.filter(pl.col("messages_refused") > 0)["node"]) >= set(refused["node"])


@pytest.mark.parametrize("setting", ["synchronous", "codec"])
def test_malformed_message_is_refused_once(setting: str, tmp_path: Path) -> None:
    gather = {"malformed": "drop", "lost_peer": "skip"}
    wrapper = Malformed(kind="model of NaN", since=2)
    run = gossamer.run(described(setting, rounds=8, gather=gather, wrappers=[wrapper]), tmp_path)
    counts = run.metrics.filter(pl.col("round") == 8, pl.col("node") >= 0)
    assert dict(counts.select("node", "messages_refused").iter_rows()) == {0: 6, 1: 6, 2: 6, 3: 0}


@pytest.mark.parametrize(
    "setting", ["synchronous", "questions", "codec", pytest.param("secure", marks=pytest.mark.slow)]
)
def test_processes_go_on_without_malformed_messages(setting: str, tmp_path: Path) -> None:
    """Every kind in one run, which loses only the messages of the peer, not the peer."""
    bad, rounds = BAD.get(setting, 3), 2 + len(KINDS)
    experiment = described(setting, "processes", rounds=rounds, wrappers=[Malformed(rank=bad)])
    run = gossamer.run(experiment, tmp_path)
    assert run.status == "done"
    assert honest(run, bad).isfinite().all()
    refused = refusals(run)
    assert set(refused["node"]) <= {0, 1, 2, 3} - {bad}
    assert refused.group_by("node").len()["len"].max() == 8  # further ones are only counted
    if setting == "synchronous":
        last = run.metrics.filter(pl.col("round") == rounds, pl.col("node").is_in([0, 1, 2]))
        assert set(last["messages_refused"]) == {len(KINDS)}


def test_both_engines_agree_despite_a_malformed_peer(tmp_path: Path) -> None:
    models = []
    for engine in ("simulate", "processes"):
        experiment = described("synchronous", engine, wrappers=[Malformed(kind="model of NaN")])
        models.append(honest(gossamer.run(experiment, tmp_path / engine)))
    assert torch.equal(*models)


def test_nan_of_one_node_reaches_no_other(tmp_path: Path) -> None:
    """The others end as if the node had crashed after its honest rounds."""
    nan = gossamer.run(described("synchronous", wrappers=[Malformed(kind="model of NaN")]), tmp_path)
    crash = {"name": "crash", "nodes": [3], "at_round": 2}
    gone = gossamer.run(described("synchronous", faults=[crash], failures={"detection_s": 0.01}), tmp_path)
    torch.testing.assert_close(honest(nan), honest(gone))


@pytest.mark.parametrize("gather", [{}, {"malformed": "fail", "lost_peer": "skip"}])
def test_malformed_message_ends_the_run_by_default(gather: dict[str, str], tmp_path: Path) -> None:
    message = r"node \d refuses a message of node 3 under tag 2: nothing; accepted: a model of 5 parameters"
    with pytest.raises(RunFailed, match=message):
        gossamer.run(described("synchronous", gather=gather, wrappers=[Malformed(kind="nothing")]), tmp_path)


class Listens(Algorithm):
    """Node 3 sends, and the others mix what they get, without a message or a declaration of their own."""

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            if node.rank == 3:
                node.broadcast([0, 1, 2], node.parameters, tag=("word", r))
            else:
                await node.mix(await node.gather([3], tag=("word", r)), {3: 0.5})


MIXABLE = ("vector", "model with buffers", "double model")
UNMIXABLE = [kind for kind in KINDS if "encoded" not in kind and kind not in MIXABLE]


@pytest.mark.parametrize("kind", [kind for kind in UNMIXABLE if "NaN" not in kind])
def test_what_can_not_be_mixed_is_the_fault_of_its_sender(kind: str, tmp_path: Path) -> None:
    """Not of the author, although nothing said what the messages are."""
    changes: dict[str, Any] = {"algorithm": Listens(), "wrappers": [Malformed(kind=kind)]}
    run = gossamer.run(described("synchronous", **changes), tmp_path / "drop")
    assert run.status == "done"
    counts = run.metrics.filter(pl.col("round") == 8, pl.col("node") >= 0)
    assert dict(counts.select("node", "messages_refused").iter_rows()) == {0: 6, 1: 6, 2: 6, 3: 0}
    message = r"node \d refuses a message of node 3 under tag \('word', 2\): "
    with pytest.raises(RunFailed, match=message):
        gossamer.run(described("synchronous", gather={}, **changes), tmp_path / "fail")


class Steps(NodeWrapper):
    """A node that sends malformed messages in one step of the agreement on masks."""

    step: str
    kind: str

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        matches = node.rank == 3 and node.round >= 1 and tag[:2] == ("~secure", self.step)
        return malformed()[self.kind] if matches else payload


@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "vector",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("number", "list", "dict", "bytes")),
    ],
)
@pytest.mark.parametrize("step", ["keys", "roster", "shares", "relay", "survivors", "unmask"])
def test_secure_aggregation_survives_malformed_steps(step: str, kind: str, tmp_path: Path) -> None:
    # (The timeout: other nodes do not wait for withheld messages.)
    gather = {"malformed": "drop", "lost_peer": "skip", "timeout_s": 0.5}
    wrappers = [Steps(step=step, kind=kind)]
    run = gossamer.run(described("secure", gather=gather, wrappers=wrappers), tmp_path)
    assert run.status == "done"
    assert honest(run).isfinite().all()
    if kind != "nothing" or step not in (
        "roster",
        "shares",
        "relay",
    ):  # in these steps, nothing means that there is no sum
        assert "of node 3 under tag" in refusals(run)["detail"][0]


# --- floods


class Flood(NodeWrapper):
    """A node that sends malformed messages in its first rounds, in addition to honest ones, under current, future and
    unused tags."""

    frames: int
    rounds: int

    async def before_round(self, node: Node, r: int) -> None:
        if node.rank != 3 or r >= self.rounds:
            return
        payloads = list(malformed().values())
        for number in range(self.frames // self.rounds):
            tag: Any = [r, r + 1, (r, "more"), 10**6 + number][number % 4]
            node.send(number % 3, payloads[number % len(payloads)], tag)


def flooded(
    frames: int, engine: str, out: Path, *, rounds: int = 20, step_s: float = 0.01, **more: Any
) -> Run:
    """A run of 20 rounds; in the first ``rounds`` of them a node sends malformed messages."""
    experiment = described(
        "synchronous",
        engine,
        rounds=20,
        compute={"name": "constant", "seconds_per_step": step_s},
        gather={"malformed": "drop", "lost_peer": "skip"},
        wrappers=[Flood(frames=frames, rounds=rounds)],
    )
    run = gossamer.run(experiment, out, **more)
    assert run.status == "done"
    assert honest(run).isfinite().all()
    assert set(refusals(run)["node"]) == {0, 1, 2}
    assert refusals(run)["detail"].str.contains("of node 3 under tag").all()
    return run


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_honest_nodes_finish_under_a_flood(engine: str, tmp_path: Path) -> None:
    flooded(1_000, engine, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_50_000_malformed_frames_do_no_harm(tmp_path: Path) -> None:
    """Between workers, where nodes have keys."""
    fleet = Fleet(tmp_path)
    try:
        port = free_port()
        for _ in range(2):
            fleet.start(f"127.0.0.1:{port}", slots=2)
        listen = Listen(f"127.0.0.1:{port}", TOKEN, 2)
        run = flooded(50_000, "processes", tmp_path, rounds=2, step_s=2.0, listen=listen)
    finally:
        fleet.close()
    # Most of the frames were never taken: beyond a limit they are dropped on arrival.
    counts = run.metrics.group_by("node").agg(pl.col("messages_received", "messages_refused").max())
    honest_nodes = counts.filter(pl.col("node").is_between(0, 2))
    assert honest_nodes["messages_received"].sum() > 50_000
    waiting = honest_nodes["messages_received"] - honest_nodes["messages_refused"]
    assert waiting.max() < 2 * MAX_UNREAD + 100  # type: ignore[operator]
    assert set(run.events.filter(pl.col("event") == "unread")["node"]) == {0, 1, 2}


class EmptyLists(NodeWrapper):
    """A node that sends messages of empty lists, which take 64 times their size in memory, under tags that nobody reads."""

    async def before_round(self, node: Node, r: int) -> None:
        if node.rank == 3 and r == 0:
            for number in range(36):
                node.send(number % 3, [[]] * 60_000, ("nobody", number))
                await node.sleep(0.01)  # it still answers


@pytest.mark.slow
@pytest.mark.timeout(300)  # encoding a million lists
def test_empty_lists_do_not_wait_for_ever(tmp_path: Path) -> None:
    """A receiver counts the values in what has come over the wire."""
    run = gossamer.run(described("synchronous", "processes", rounds=3, wrappers=[EmptyLists()]), tmp_path)
    assert run.status == "done"
    unread = run.events.filter(event="unread")
    assert set(unread["node"]) == {0, 1, 2}
    assert unread["detail"].str.contains(r"of node 3: .* under tag \('nobody', \d+\)$").all()
    counts = run.metrics.group_by("node").agg(pl.col("messages_refused").max()).filter(pl.col("node") >= 0)
    assert {node: count > 3 for node, count in counts.iter_rows()} == {0: True, 1: True, 2: True, 3: False}
