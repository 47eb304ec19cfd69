"""Middlewares: what acts around a node, for any algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import (
    BadInput,
    Experiment,
    Inbox,
    Message,
    Middleware,
    Model,
    Node,
    NodeProxy,
    RunFailed,
    resume,
    run,
)
from gossamer.config.registry import names
from scenario import FEATURES, play

SEEN: list[tuple[Any, ...]] = []


class Noting(NodeProxy):
    """Notes every model that leaves and every message that is taken, and adds a number to the models."""

    def __init__(self, node: Node, name: str, adds: float) -> None:
        super().__init__(node)
        self.name, self.adds = name, adds

    def outgoing(self, model: Model, to: tuple[int, ...], tag: tuple[str | int, ...]) -> Model:
        SEEN.append((self.name, "out", self.rank, to, tag))
        return Model(model.parameters + self.adds, model.buffers)

    def incoming(self, message: Message) -> Message | None:
        SEEN.append((self.name, "in", self.rank, message.source, message.tag))
        return message


class Notes(Middleware):
    label: str = "a"
    adds: float = 0.0

    def wrap(self, node: Node) -> Node:
        return Noting(node, self.label, self.adds)


class Refusing(NodeProxy):
    """Refuses what comes from node 1, and the payload 13."""

    def incoming(self, message: Message) -> Message | None:
        return None if message.source == 1 or message.payload == 13 else message


class Refuses(Middleware):
    def wrap(self, node: Node) -> Node:
        return Refusing(node)


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


def vector(value: float) -> torch.Tensor:
    return torch.full((FEATURES,), float(value))


# --- forwarding


def test_a_proxy_forwards_every_call_of_a_node() -> None:
    """A call that a proxy inherits from Node would act on the wrong node, unless it goes through others that are forwarded."""
    through_others = {"send", "ask", "drain_answers", "next_answer", "rounds", "compress"}
    public = {name for name in vars(Node) if not name.startswith("_")}
    inherited = {name for name in public if getattr(NodeProxy, name) is getattr(Node, name)}
    assert inherited <= through_others
    for name in public - through_others - {"mixed"}:
        call = getattr(Node, name)
        if callable(call):
            assert inspect.signature(call) == inspect.signature(getattr(NodeProxy, name)), name


def test_values_of_a_proxy_are_those_of_the_node_inside(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.lr, node.parameters = 0.25, vector(node.rank)
        node.state["x"] = 1
        inside = node.node  # type: ignore[attr-defined]
        await node.train()
        assert (node.samples, node.size, node.layout) == (inside.samples, 2, inside.layout)
        assert (inside.lr, inside.step, inside.state["x"]) == (0.25, 1, 1)
        async for _ in node.rounds():
            pass
        return torch.equal(inside.parameters, node.parameters), inside.round, node.round

    assert play(tmp_path, script, 2, middleware=[Notes()]).values == {0: (True, 1, 1), 1: (True, 1, 1)}


# --- models that leave, messages that are taken


def test_every_call_that_sends_or_takes_passes_the_hooks(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 1:
            node.answer("q", lambda question: [question.payload[0], Model(vector(7))])
            taken = [await node.receive("one")]
            await node.sleep(1)
            taken += node.drain("many")
            inbox = await node.gather([0], "all")
            return [message.payload for message in taken], dict(inbox)
        node.send(1, Model(vector(1)), "one", exact=True)
        node.broadcast([1], {"a": Model(vector(2)), "b": [3, vector(4)]}, ("many", 5))
        node.broadcast([1], [vector(6)[:2], "text"], "all")  # no model
        return await node.ask(1, [Model(vector(0))], ("q", 1))

    values = play(tmp_path, script, 2, middleware=[Notes(adds=0.5)]).values
    (one, many), inbox = values[1]
    assert one.parameters.tolist() == [1.5] * 3
    assert (many["a"].parameters.tolist(), many["b"][1].tolist()) == ([2.5] * 3, [4.5] * 3)
    assert inbox[0][0].tolist() == [6, 6]
    question, answer = values[0]
    assert (question.parameters.tolist(), answer.parameters.tolist()) == ([1.0] * 3, [7.5] * 3)
    out = [entry[2:] for entry in SEEN if entry[1] == "out"]
    assert out == [
        (0, (1,), ("one",)),
        *[(0, (1,), ("many", 5))] * 2,
        (0, (1,), ("q", 1)),
        *[(1, (0,), ("answer", 1))] * 2,  # the question in the answer is a model that leaves too
    ]
    into = [entry[2:] for entry in SEEN if entry[1] == "in"]
    assert sorted(into) == sorted(
        [(1, 0, ("one",)), (1, 0, ("q", 1)), (0, 1, ("answer", 1)), (1, 0, ("many", 5)), (1, 0, ("all",))]
    )


def test_outer_middlewares_act_first_on_what_leaves_and_last_on_what_comes(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.broadcast(node.peers(), Model(vector(1)), "x")
        inbox = await node.gather(node.peers(), "x")
        return inbox[1 - node.rank].parameters.tolist()

    layers = [Notes(label="outer", adds=1), Notes(label="inner", adds=10)]
    values = play(tmp_path, script, 2, middleware=layers, codec={"name": "float16"}).values
    assert values == {0: [12.0] * 3, 1: [12.0] * 3}
    of_node_0 = [entry[:2] for entry in SEEN if entry[2] == 0]
    assert of_node_0 == [("outer", "out"), ("inner", "out"), ("inner", "in"), ("outer", "in")]


def test_refused_messages_are_missing_and_counted(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank:
            node.answer("q", lambda question: 1)
            node.broadcast([0], node.rank, "x")
            node.send(0, 13 if node.rank == 2 else 5, "y")
            node.send(0, 9, "y")
            await node.sleep(5)
            return None
        inbox = await node.gather([1, 2, 3], "x")
        first = await node.receive("y", 2)
        await node.sleep(1)
        rest = [(message.source, message.payload) for message in node.drain("y")]
        with pytest.raises(TimeoutError, match="refused the answer of node 1"):
            await node.ask(1, None, "q", timeout=3)
        counted = node.traffic
        return (
            dict(inbox),
            inbox.missing,
            first.payload,
            rest,
            counted.messages_taken,
            counted.messages_refused,
        )

    inbox, missing, first, rest, taken, refused = play(
        tmp_path, script, 4, middleware=[Refuses(at=[0])]
    ).values[0]
    assert (inbox, missing, first, rest) == ({2: 2, 3: 3}, (1,), 9, [(3, 5), (3, 9)])
    assert (taken, refused) == (5, 5)  # refused: "x" of 1, 13 of 2, two "y" of 1, the answer


class AsFar(NodeProxy):
    def incoming(self, message: Message) -> Message | None:
        whole = message.payload.over(self.model)
        return Message(message.source, message.tag, whole, message.sent_at)


class WholeModels(Middleware):
    """Fills sparse models with the node's own values."""

    def wrap(self, node: Node) -> Node:
        return AsFar(node)


def test_incoming_models_are_decoded(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        node.parameters = torch.tensor([float(node.rank), 5.0 + node.rank, 2.0])
        node.broadcast(node.peers(), node.model, "x")
        inbox = await node.gather(node.peers(), "x")
        return inbox[1 - node.rank].parameters.tolist()

    codec = {"name": "top-k", "fraction": 0.34}
    values = play(tmp_path, script, 2, middleware=[WholeModels()], codec=codec).values
    # Of three values, the largest change is sent: that of the second one. The others are the receiver's own.
    assert values == {0: [0.0, 6.0, 2.0], 1: [1.0, 5.0, 2.0]}


# --- what belongs to a middleware


class Counting(NodeProxy):
    """Adds the number of rounds so far, and a keyed draw, to the parameters at each end of a round."""

    async def end_round(self, r: int) -> None:
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        draw = float(self.private_rng("noise", r).random())
        self.node.parameters = self.node.parameters + self.memory["rounds"] * draw
        self.node.record(
            own=self.memory["rounds"], draw=draw, algorithms=float(self.rng("noise", r).random())
        )
        await super().end_round(r)


class Counts(Middleware):
    def wrap(self, node: Node) -> Node:
        return Counting(node)


def described(rounds: int, **fields: Any) -> Experiment:
    return Experiment.of(
        {
            "name": "t",
            "nodes": 4,
            "task": {"name": "least-squares", "features": FEATURES, "samples": 32},
            "algorithm": "d-psgd",
            "stop": {"rounds": rounds},
            **fields,
        }
    )


def test_memory_outlives_a_resume_and_draws_are_the_middlewares_own(tmp_path: Path) -> None:
    layers = [Counts(), Counts()]
    whole = run(described(4, middleware=layers), tmp_path / "a")
    half = run(described(2, middleware=layers, checkpoint={"every_rounds": 2}), tmp_path / "b")
    resumed = resume(half.path, ["stop.rounds=4"])
    ours, theirs = (r.metrics.filter(r.metrics["round"] == 4).sort("node") for r in (whole, resumed))
    assert theirs.drop_nulls("own")["own"].to_list() == [4] * 4
    assert ours["test_loss"].to_list() == theirs["test_loss"].to_list()
    draws = whole.metrics.drop_nulls("draw")
    assert (draws["draw"] != draws["algorithms"]).all()
    assert draws["draw"].n_unique() == len(draws)


def test_private_messages_are_never_the_algorithms(tmp_path: Path) -> None:
    class Whispering(NodeProxy):
        async def begin_round(self, r: int) -> None:
            self.node.broadcast(self.node.peers(), r, self.private_tag("hello", r))
            self.heard = await self.node.gather(self.node.peers(), self.private_tag("hello", r))
            self.node.broadcast(self.node.peers(), r, self.private_tag("never taken", r))

    class Whispers(Middleware):
        def wrap(self, node: Node) -> Node:
            return Whispering(node)

    async def script(node: Node) -> Any:
        drained = []
        async for _ in node.rounds():
            await node.sleep(1)
            node.send(1 - node.rank, "mine", "x")
            drained += [(await node.receive()).payload]
            drained += node.drain()
        with pytest.raises(ValueError, match="such tags are private"):
            node.send(1 - node.rank, 1, ("~x", 1))
        return drained, dict(node.heard)  # type: ignore[attr-defined]

    values = play(tmp_path, script, 2, middleware=[Whispers()], stop={"rounds": 2}).values
    assert values == {0: (["mine", "mine"], {1: 1}), 1: (["mine", "mine"], {0: 1})}


# --- an attack in which nodes collude


class Colluding(NodeProxy):
    """ALIE (Baruch et al., 2019): the colluders send mean - z * deviation of the honest models that they have heard of."""

    def __init__(self, node: Node, at: tuple[int, ...], z: float) -> None:
        super().__init__(node)
        self._at, self._others, self._z = set(at), [rank for rank in at if rank != node.rank], z
        self._held: dict[Any, Any] = {}

    def broadcast(self, to: Iterable[int], payload: Any, tag: Any, *, exact: bool = False) -> Any:
        if not isinstance(payload, Model):
            return super().broadcast(to, payload, tag, exact=exact)
        handles = {rank: self.held_back() for rank in sorted(to)}
        self._held[tag] = handles
        return list(handles.values())

    async def gather(self, peers: Iterable[int], tag: Any, **options: Any) -> Inbox:
        if tag not in self._held:
            return await super().gather(peers, tag, **options)
        honest = await super().gather([rank for rank in peers if rank not in self._at], tag, **options)
        heard = {rank: model.parameters for rank, model in honest.items()}
        about = self.private_tag("heard", self.round)
        self.node.broadcast(self._others, [[*heard], [*heard.values()]], about, exact=True)
        for ranks, vectors in (await self.node.gather(self._others, about)).values():
            heard |= dict(zip(ranks, vectors, strict=True))
        known = torch.stack([heard[rank] for rank in sorted(heard)])
        self._release(tag, Model(known.mean(0) - self._z * known.std(0, unbiased=False)))
        also = await super().gather([rank for rank in peers if rank in self._at], tag, **options)
        return Inbox(
            {**honest, **also}, (*honest.missing, *also.missing), None, (*honest.messages, *also.messages)
        )

    async def end_round(self, r: int) -> None:
        for tag in list(self._held):
            self._release(tag, self.node.model)
        await super().end_round(r)

    def _release(self, tag: Any, model: Model) -> None:
        for rank, handle in self._held.pop(tag).items():
            handle.queued(self.node.send(rank, model, tag))


class Alie(Middleware):
    z: float = 1.5

    def wrap(self, node: Node) -> Node:
        return Colluding(node, self.at.ranks or (), self.z)


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
def test_colluders_hold_their_models_back_until_they_know_the_honest_ones(
    tmp_path: Path, engine: str
) -> None:
    """Nodes 1 and 3 of a ring of five collude. Honest steps are computed in NumPy from the recorded start of each round."""
    models: dict[str, Any] = {}
    for name, layers in (("attacked", [Alie(at=[1, 3])]), ("honest", [])):
        recorded = run(
            described(
                1,
                nodes=5,
                middleware=layers,
                engine={"name": engine, "trainer": "sequential"},
                topology="ring",
            ),
            tmp_path / name,
        )
        assert recorded.setup["chosen"] == ({"middleware.0.at": [1, 3]} if layers else {})
        models[name] = recorded.parameters.double().numpy()
    stepped = models_after_a_step(tmp_path)
    mean, deviation = stepped[[0, 2, 4]].mean(0), stepped[[0, 2, 4]].std(0)
    sent = stepped.copy()
    sent[[1, 3]] = mean - 1.5 * deviation
    for rank in range(5):
        own, others = stepped[rank], [sent[(rank - 1) % 5], sent[(rank + 1) % 5]]
        np.testing.assert_allclose(models["attacked"][rank], (own + sum(others)) / 3, atol=1e-6)
    assert np.abs(models["attacked"] - models["honest"]).max() > 1e-3


def models_after_a_step(out: Path) -> np.ndarray:
    """The models of the five nodes after their local step, which "local" does not mix."""
    recorded = run(
        described(1, nodes=5, algorithm="local", topology="ring", engine={"trainer": "sequential"}),
        out / "local",
    )
    return np.asarray(recorded.parameters.double().numpy())


# --- every algorithm


@pytest.mark.parametrize("algorithm", sorted(names("algorithm")))
def test_no_algorithm_goes_around_the_hooks(tmp_path: Path, algorithm: str) -> None:
    """As many messages pass the hook as nodes have taken, and each algorithm that sends models sends changed ones."""
    fields: dict[str, Any] = {"algorithm": algorithm, "middleware": [Notes(adds=0.5)]}
    if algorithm in ("sgp", "push-sum"):
        fields["topology"] = {"name": "exponential"}
    try:
        attacked = run(described(2, **fields), tmp_path / "a")
    except BadInput as error:
        pytest.skip(str(error))
    plain = run(described(2, **{**fields, "middleware": []}), tmp_path / "b")
    into = [entry for entry in SEEN if entry[1] == "in"]
    assert len(into) == attacked.figures["totals"]["messages_taken"]
    if attacked.figures["totals"]["messages_taken"]:
        assert any(entry[1] == "out" for entry in SEEN)
        ours, theirs = (r.parameters for r in (attacked, plain))
        assert not torch.equal(ours, theirs)


# --- refused


class NoProxy(Middleware):
    def wrap(self, node: Node) -> Node:
        return 3  # type: ignore[return-value]


def test_what_is_no_proxy_is_refused(tmp_path: Path) -> None:
    with pytest.raises((BadInput, RunFailed, TypeError), match=r"wrap returned a int; accepted: a NodeProxy"):
        run(described(1, middleware=[NoProxy()]), tmp_path)
