"""Several models in a round, and parts of models: each stream has its own memory, and no vector is sent as if there were
no codec."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from gossamer import Algorithm, Codec, Experiment, Model, Node, NodeWrapper, Part, Run, run
from gossamer.codecs import Float16, Quantize, TopK, Wavelet
from gossamer.codecs.coder import Coder
from gossamer.errors import BadInput, RunFailed
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Coded, Message, Payload
from gossamer.randomness import generator
from gossamer.runtime.setup import prepare

SETTINGS: dict[str, Any] = {
    "nodes": 4,
    "seed": 5,
    "task": {"name": "least-squares", "features": 40, "samples": 80, "test_samples": 10},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "topology": "ring",
    "algorithm": "d-psgd",
    "evaluation": {"every_rounds": 2, "samples": 1},
    "engine": {"name": "simulate", "trainer": "sequential"},
    "stop": {"rounds": 8},
}
P = 40


def play(out: Path, **changes: Any) -> Run:
    return run(Experiment.of({**SETTINGS, **changes}), out)


def parameters(done: Run) -> Tensor:
    assert done.parameters is not None
    return done.parameters


class WithUnused(Algorithm):
    """D-PSGD that also sends a vector that nobody uses."""

    unused: bool = True
    together: bool = False

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            extra = Model(torch.full((P,), 3.0 + r))
            payload = [node.model, extra] if self.together else node.model
            node.broadcast(peers, payload, tag=f"x{r}")
            if self.unused and not self.together:
                node.broadcast(peers, extra, tag=("b", r))
                await node.gather(peers, tag=("b", r))
            inbox = await node.gather(peers, tag=f"x{r}")
            models = {rank: item[0] if self.together else item for rank, item in inbox.items()}
            await node.mix(models, node.mixing_weights(r))


CODECS: list[Any] = [
    {"name": "top-k", "fraction": 0.1},
    {"name": "top-k", "fraction": 0.1, "accumulate": False},
    {"name": "top-k", "fraction": 0.1, "accumulate": "decentralizepy"},
    {"name": "threshold", "threshold": 0.01},
    {"name": "wavelet", "fraction": 0.1, "levels": 2},
    {"name": "jwins", "levels": 2},
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_unused_second_model_changes_no_bit(tmp_path: Path, codec: Any) -> None:
    name = f"{__name__}:WithUnused"
    alone = parameters(play(tmp_path, codec=codec, algorithm={"name": name, "unused": False}))
    tagged = parameters(play(tmp_path, codec=codec, algorithm={"name": name}))
    placed = parameters(play(tmp_path, codec=codec, algorithm={"name": name, "together": True}))
    assert torch.equal(alone, tagged)
    assert torch.equal(alone, placed)


class Lone:
    """The part of a node that a coder uses."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.round = rank, 0
        self.state: dict[str, Any] = {}
        self.parameters = torch.linspace(-1, 1, P)
        self.layout = prepare(Experiment.of(SETTINGS)).layout.parameters

    def store(self, v: Tensor) -> Tensor:
        return v.clone()

    def rng(self, purpose: str, *counters: int, shared: bool = False) -> np.random.Generator:
        return generator(1, purpose, self.rank, *counters)


def coder(codec: Codec, rank: int = 0) -> tuple[Coder, Any]:
    node: Any = Lone(rank)
    return Coder(codec, node), node


def received(sender: Coder, receiver: Coder, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
    return receiver.decode(Message(0, tag, sender.encode(payload, tag), 0.0)).payload


def numpy_top(changes: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(changes), kind="stable")[:k])


def test_second_stream_follows_its_own_rule() -> None:
    """Against NumPy: y of the second stream starts at 0, and y[S] <- v[S]."""
    rng = np.random.default_rng(2)
    (sender, node), (receiver, _) = coder(TopK(fraction=0.1)), coder(TopK(fraction=0.1), 1)
    y = np.zeros(P, np.float32)
    for r in range(12):
        node.round, node.parameters = r, torch.from_numpy(rng.normal(size=P).astype(np.float32))
        received(sender, receiver, Model(node.parameters), ("x", r))
        v = rng.normal(size=P).astype(np.float32)
        part = received(sender, receiver, Model(torch.from_numpy(v)), (f"direction{r}",)).parameters
        chosen = numpy_top(v - y, 4)
        assert part.where.tolist() == chosen.tolist()
        assert part.values.tolist() == v[chosen].tolist()
        y[chosen] = v[chosen]


@pytest.mark.parametrize("rule", [True, False, "decentralizepy"])
@pytest.mark.parametrize("wavelet", [False, True])
def test_accumulation_follows_its_rule(rule: Any, wavelet: bool) -> None:
    """Against NumPy, in the form of DecentralizePy's code: A is the accumulated change, cleared at S when x[S] is sent. Its
    own rule adds the whole change of the round after that, ours what the round has changed after the sending."""
    rng = np.random.default_rng(3)
    codec: Any = (
        Wavelet(fraction=0.1, levels=2, accumulate=rule) if wavelet else TopK(fraction=0.1, accumulate=rule)
    )
    sender, node = coder(codec)
    forward = codec.forward

    def transformed(v: np.ndarray) -> np.ndarray:
        return np.asarray(forward(torch.from_numpy(v.astype(np.float32))).numpy(), np.float64)

    after = node.parameters.double().numpy()  # the model after the last mixing
    A, repeated = np.zeros_like(transformed(after)), 0
    before_last: list[int] = []
    for r in range(15):
        trained = after + rng.normal(size=P) * np.linspace(0.1, 3, P)
        node.round, node.parameters = r, torch.from_numpy(trained.astype(np.float32))
        payload = sender.encode(Model(node.parameters), ("x", r)).parameters.payload
        change = transformed(trained) - transformed(after) + A
        chosen = numpy_top(change, round(0.1 * len(change)))
        values = payload[0].numpy()
        np.testing.assert_allclose(values, transformed(trained)[chosen], rtol=1e-5, atol=1e-6)
        repeated += len(set(before_last) & set(chosen.tolist()))
        before_last = chosen.tolist()
        mixed = trained + rng.normal(size=P) * 0.05
        if rule == "decentralizepy":
            A[chosen] = 0
            A += transformed(mixed) - transformed(after)
        elif rule:
            A += transformed(mixed) - transformed(after)
            A[chosen] = transformed(mixed)[chosen] - transformed(trained)[chosen]
        after = mixed
        node.parameters = torch.from_numpy(mixed.astype(np.float32))
        sender.end_round()
    if rule == "decentralizepy":
        assert repeated > 0, "no coordinate was sent twice in a row, which proves little"


def test_wavelets_of_a_second_stream_are_completed_by_its_own_vector() -> None:
    """A receiver lacks coefficients of a direction: it has its own direction for them, not its model."""
    codec = Wavelet(fraction=0.2, levels=2)
    (sender, _), (receiver, other) = coder(codec), coder(codec, 1)
    theirs, own = torch.linspace(5, 6, P), torch.linspace(-3, 3, P).square()
    for each, node, v in [(sender, sender.node, theirs), (receiver, other, own)]:
        each.encode(Model(node.parameters), ("x", 0))
        payload = each.encode(Model(v), ("direction", 0))
        message = payload if v is theirs else None
        if message is not None:
            kept = message
    got = receiver.decode(Message(0, ("direction", 0), kept, 0.0)).payload.parameters
    change, mine = codec.forward(theirs).numpy(), codec.forward(own).numpy()
    chosen = numpy_top(change, round(0.2 * len(change)))
    expected = mine.copy()
    expected[chosen] = change[chosen]
    np.testing.assert_allclose(codec.forward(got).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_second_stream_of_the_model_starts_as_the_first() -> None:
    sender, node = coder(TopK(fraction=0.1))
    node.parameters = node.parameters + 0.0
    moved = node.parameters.clone()
    moved[[7, 9, 20, 33]] += 5.0
    sender.encode(Model(node.parameters), ("anchor", 0))
    node.parameters = moved
    payload = sender.encode(Model(moved), ("model", 0)).parameters.payload
    assert payload[0].tolist() == moved[[7, 9, 20, 33]].tolist()


def test_streams_survive_a_resumed_node() -> None:
    """All that streams need is in the node's state, and an old state, which knows of one, goes on."""
    sender, node = coder(TopK(fraction=0.1))
    x, v = torch.randn(P, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 2, P)
    for payload, tag in [(x, ("x", 0)), (v, ("v", 0))]:
        sender.encode(Model(payload), tag)
    again, twin = coder(TopK(fraction=0.1))
    twin.state = deepcopy(node.state)
    for its in (node, twin):
        its.round = 1
    for later, tag in [(v + 1, ("v", 1)), (x * 2, ("x", 1))]:
        one, other = (each.encode(Model(later.clone()), tag).parameters.payload for each in (sender, again))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    old, third = coder(TopK(fraction=0.1))
    third.state = {"~codec": {"top-k": {"last": x.clone()}}}
    chosen = numpy_top((v - x).numpy(), 4)
    assert old.encode(Model(v), ("x", 1)).parameters.payload[0].tolist() == v[chosen].tolist()


class Remembers(Codec):
    """Sends a counter, and decodes to the sum of all counters received in the stream."""

    final = True
    decodes_alike = False

    def begin(self, node: Node) -> None:
        self.memory(node)["sent"] = 0

    def encode(self, node: Node, vector: Tensor, round: int) -> list[Payload]:
        memory = self.memory(node)
        memory["sent"] += 1
        return [torch.zeros(1), memory["sent"]]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Any) -> Tensor:
        memory = self.memory(node)
        memory[str(source)] = memory.get(str(source), 0) + payload[1]
        return torch.full((P,), float(memory[str(source)]))


def test_memory_of_decoding_is_kept_by_stream_whoever_sends_first() -> None:
    (sender, _), (receiver, other) = coder(Remembers()), coder(Remembers(), 1)
    vector = torch.ones(P)

    def value(tag: tuple[str | int, ...]) -> float:
        sender.forget()
        return float(received(sender, receiver, Model(vector), tag).parameters[0])

    assert [value(("a", 0)), value(("b", 0))] == [1, 1]
    receiver.encode(Model(vector), ("b", 0))  # the receiver's first stream is the sender's second
    assert [value(("a", 1)), value(("b", 1)), value(("b", 2))] == [3, 3, 6]
    assert other.state["~codec"][Remembers().name_of()]["sent"] == 1


class ManyStreams(Algorithm):
    streams: int = 16

    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            for k in range(self.streams):
                node.broadcast(await node.neighbors(r), Model(node.parameters + k), tag=("x" * (k + 1), r, k))


def test_seventeenth_stream_is_refused(tmp_path: Path) -> None:
    algorithm = {"name": f"{__name__}:ManyStreams"}
    changes: dict[str, Any] = {"codec": {"name": "top-k", "fraction": 0.1}, "stop": {"rounds": 3}}
    play(tmp_path, algorithm=algorithm, **changes)
    with pytest.raises(
        RunFailed, match="more than 16 streams, the next one as x{17}/#/#; accepted with a codec"
    ):
        play(tmp_path, algorithm={**algorithm, "streams": 17}, **changes)


@pytest.mark.parametrize("codec", ["float16", {"name": "quantize", "bits": 8}])
def test_any_number_of_streams_is_sent_by_codecs_without_memory_of_them(tmp_path: Path, codec: Any) -> None:
    algorithm = {"name": f"{__name__}:ManyStreams", "streams": 20}
    play(tmp_path, algorithm=algorithm, codec=codec, stop={"rounds": 2})


def test_vectors_of_several_streams_get_different_noise() -> None:
    sender, _ = coder(Quantize(bits=4))
    one, other = (
        sender.encode(Model(torch.linspace(0, 1, P).clone()), tag).parameters.payload[0]
        for tag in [("x", 0), ("v", 0)]
    )
    assert not torch.equal(one, other)


# --- parts


@pytest.mark.parametrize("where", [[3, 5, 30], [30, 3, 5]])
def test_values_of_a_part_are_encoded(where: Sequence[int]) -> None:
    (sender, _), (receiver, _) = coder(Float16()), coder(Float16(), 1)
    values = torch.tensor([0.1, 1 / 3, -7.7])
    coded = sender.encode(Model(Part(values, torch.tensor(where), P)), ("x", 0))
    assert type(coded.parameters) is Coded
    part = receiver.decode(Message(0, ("x", 0), coded, 0.0)).payload.parameters
    assert part.where.tolist() == list(where)
    assert part.size == P
    assert part.values.tolist() == values.half().float().tolist()


class SendsParts(Algorithm):
    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            await node.train()
            peers = await node.neighbors(r)
            where = torch.arange(r % 2, P, 2)
            node.broadcast(peers, Model(Part(node.parameters[where], where, P)), tag=r)
            await node.mix(await node.gather(peers, tag=r), node.mixing_weights(r))


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_parts_travel_with_their_encoded_values(tmp_path: Path, engine: str) -> None:
    algorithm, stop = f"{__name__}:SendsParts", {"rounds": 2}
    plain = play(tmp_path, algorithm=algorithm, stop=stop)
    coded = play(tmp_path, algorithm=algorithm, stop=stop, codec="float16", engine=engine)
    assert not torch.equal(parameters(plain), parameters(coded))
    torch.testing.assert_close(parameters(plain), parameters(coded), rtol=1e-2, atol=1e-2)
    payload = {
        "values": [torch.zeros(20, dtype=torch.float16)],
        "where": torch.zeros(20, dtype=torch.uint8),
        "size": P,
    }
    message = wire_bytes((0,), Model(Coded(payload)))  # type: ignore[arg-type]
    rows = coded.metrics.filter((pl.col("round") == 2) & (pl.col("node") >= 0))
    assert rows["bytes_sent"].sum() == 4 * 2 * 2 * message


@pytest.mark.parametrize(
    "codec", [{"name": "top-k", "fraction": 0.1}, {"name": "quantize", "block": "tensor"}], ids=str
)
def test_part_that_a_codec_cannot_encode_is_refused(tmp_path: Path, codec: Any) -> None:
    with pytest.raises(
        RunFailed, match="a Part of a model is sent, but codec .* takes whole models; accepted"
    ):
        play(tmp_path, algorithm=f"{__name__}:SendsParts", codec=codec)


@pytest.mark.parametrize(
    "payload",
    [
        {"values": [torch.ones(2, dtype=torch.float16)], "where": torch.tensor([0, P]), "size": P},
        {"values": [torch.ones(2, dtype=torch.float16)], "where": torch.tensor([0]), "size": P},
        {"values": [torch.ones(1, dtype=torch.float16)], "where": torch.tensor([0]), "size": P + 1},
        {"values": [torch.ones(1, dtype=torch.float16)], "size": P},
        {"values": 3},
    ],
    ids=["outside", "too few", "another length", "no coordinates", "no values"],
)
def test_malformed_part_is_refused(payload: Any) -> None:
    receiver, _ = coder(Float16(), 1)
    with pytest.raises(ValueError, match="a model from node 0 that codec float16 can't decode"):
        receiver.decode(Message(0, ("x", 0), Model(Coded(payload)), 0.0))  # type: ignore[arg-type]


# --- what a codec does not see, and draws


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"algorithm": "ad-psgd"},
            "ad-psgd sends the answers of passive nodes, which are halves of differences, without",
        ),
        ({"algorithm": "gradient-tracking"}, "gradient-tracking sends its directions without the codec"),
        (
            {
                "algorithm": "choco-sgd",
                "topology": {"name": "random-regular", "degree": 2, "every_rounds": 1},
            },
            "choco-sgd sends the replicas for new neighbours without the codec",
        ),
        ({"algorithm": "choco-sgd"}, None),
        ({"algorithm": "d-psgd"}, None),
        ({"algorithm": "ad-psgd", "codec": None}, None),
    ],
    ids=str,
)
def test_run_says_what_the_codec_does_not_encode(changes: dict[str, Any], line: str | None) -> None:
    notes = prepare(Experiment.of({**SETTINGS, "codec": "float16", **changes})).notes()
    said = [note for note in notes if "without the codec" in note]
    assert len(said) == (line is not None)
    assert line is None or said[0].startswith(line)


drawn: dict[str, list[float]] = {}


def draw(node: Node, who: str) -> None:
    drawn.setdefault(who, []).append(float(node.rng("noise", 0).random()))


class Draws(NodeWrapper):
    number: int

    async def before_round(self, node: Node, r: int) -> None:
        draw(node, f"wrapper {self.number}")

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        draw(node, f"wrapper {self.number}")
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        draw(node, f"wrapper {self.number}")
        return message


class DrawingCodec(Codec):
    def begin(self, node: Node) -> None:
        draw(node, "codec")

    def encode(self, node: Node, vector: Tensor, round: int) -> list[Payload]:
        draw(node, "codec")
        return [vector + 0]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Any) -> Tensor:
        draw(node, "codec")
        return payload[0]  # type: ignore[no-any-return]


class DrawingAlgorithm(Algorithm):
    async def run(self, node: Node) -> None:
        async for r in node.rounds():
            draw(node, "algorithm")
            peers = await node.neighbors(r)
            node.broadcast(peers, node.model, tag=r)
            await node.gather(peers, tag=r)
            draw(node, "algorithm")


def test_wrappers_codec_and_algorithm_draw_different_numbers(tmp_path: Path) -> None:
    drawn.clear()
    play(
        tmp_path,
        nodes=2,
        algorithm=f"{__name__}:DrawingAlgorithm",
        wrappers=[{"name": f"{__name__}:Draws", "number": k} for k in range(2)],
        codec=[{"name": f"{__name__}:DrawingCodec"}, {"name": "quantize", "rounding": "stochastic"}],
        stop={"rounds": 1},
    )
    kinds = {who: set(values) for who, values in drawn.items()}
    assert kinds.keys() == {"algorithm", "wrapper 0", "wrapper 1", "codec"}
    assert [len(values) for values in kinds.values()] == [
        2
    ] * 4  # one for each node, whoever calls and however often
    assert len(set.union(*kinds.values())) == 8
    expected = {float(generator(5, "algorithm/noise", rank, 0).random()) for rank in range(2)}
    assert kinds["algorithm"] == expected


# --- bytes that are never sent


class Silent(Algorithm):
    async def run(self, node: Node) -> None:
        async for _ in node.rounds():
            await node.sleep(0.01)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"algorithm": "local"}, "local sends nothing"),
        ({"algorithm": "centralized"}, "centralized sends nothing"),
        ({"nodes": 1, "topology": "complete"}, "one node has no other to send to"),
        (
            {"topology": {"name": "erdos-renyi", "p": 0.0, "allow_disconnected": True}},
            "the topology has no edges to send over",
        ),
    ],
    ids=str,
)
def test_bytes_alone_do_not_end_a_run_without_messages(changes: dict[str, Any], why: str) -> None:
    for stop in ({"bytes": 1000}, {"bytes_per_node": 10}):
        with pytest.raises(
            BadInput, match=f"stop: bytes alone end the run, and {why}; accepted: rounds or time_s"
        ):
            prepare(Experiment.of({**SETTINGS, **changes, "stop": stop}))
    prepare(Experiment.of({**SETTINGS, **changes, "stop": {"bytes": 1000, "rounds": 2}}))


def test_own_algorithm_that_sends_nothing_ends_with_a_word(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no node has sent a byte in 1000 rounds, and stop has bytes alone"):
        play(tmp_path, algorithm=f"{__name__}:Silent", stop={"bytes": 1000})
