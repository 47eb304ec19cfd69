"""Codecs: encoded vectors against NumPy, both engines, bytes, resumed runs, and invalid settings."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer
from gossamer import BadInput, Experiment, Message, Model, Node, NodeWrapper, Run, RunFailed
from gossamer.codecs import Chain, Codec, Float16, Identity, Quantize, RandomK, TopK, indices
from gossamer.codecs.quantize import _packed, _unpacked
from gossamer.config.registry import names
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Coded, Part, Payload
from gossamer.randomness import generator
from gossamer.runtime.simulate.mixing import MIN_LENGTH
from scenario import FEATURES, experiment, play

CODECS: dict[str, Any] = {
    "identity": "identity",
    "threshold": {"name": "threshold", "threshold": 0.5, "relative": True},
    "round-robin": {"name": "round-robin", "blocks": 3},
    "wavelet": {"name": "wavelet", "fraction": 0.5, "levels": 2},
    "jwins": {"name": "jwins", "levels": 2},
    "bfloat16": "bfloat16",
    "qsgd": {"name": "qsgd", "levels": 200, "contract": True},
    "quantize, by tensor": {"name": "quantize", "bits": 6, "block": "tensor", "rounding": "nearest"},
    "entropy": [{"name": "jwins", "levels": 2}, {"name": "quantize", "bits": 8, "block": 4}, "entropy"],
    "top-k": {"name": "top-k", "fraction": 0.5},
    "top-k, forgetful": {"name": "top-k", "fraction": 0.4, "accumulate": False},
    "random-k": {"name": "random-k", "fraction": 0.3},
    "random-k, common": {"name": "random-k", "fraction": 0.3, "support": "common"},
    "float16": "float16",
    "quantize": {"name": "quantize", "bits": 5},
    "quantize and entropy": [{"name": "quantize", "bits": 3}, "entropy"],
    "chain": [{"name": "top-k", "fraction": 0.5}, "identity", {"name": "quantize", "bits": 4}],
}
EVERY = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
P = 9


def described(codec: Any, rounds: int = 5, **more: Any) -> Experiment:
    """D-PSGD on least squares with nine parameters."""
    return Experiment.of(
        {
            "nodes": 4,
            "task": {"name": "least-squares", "features": P, "samples": 40, "test_samples": 5},
            "topology": "ring",
            "initial": "independent",
            "algorithm": "d-psgd",
            "codec": codec,
            "optimizer": {"name": "sgd", "lr": 0.1},
            "batch_size": "full",
            "evaluation": {"every_rounds": rounds},
            "stop": {"rounds": rounds},
            "engine": {"name": "simulate", "trainer": "sequential"},
            **more,
        }
    )


def bits(run: Run) -> Tensor:
    assert run.parameters is not None
    return run.parameters


def total(run: Run, column: str) -> int:
    last = run.metrics.filter(run.metrics["node"] >= 0, run.metrics["round"] == run.metrics["round"].max())
    return int(last[column].sum())


# --- one vector


def through(codec: Codec, vectors: list[Tensor], out: Path, nodes: int = 2) -> list[list[tuple[Any, Any]]]:
    """For each node and vector, the encoded payload and the decoded vector."""

    async def script(node: Node) -> Any:
        seen = []
        for r, vector in enumerate(vectors):
            payload = codec.encode(node, vector, r)
            seen.append((payload, codec.decode(node, node.rank, payload, lambda: node.parameters)))
        return seen

    values = play(out, script, nodes, codec=codec).values
    return [values[rank] for rank in range(nodes)]


def vectors(count: int) -> list[Tensor]:
    return list(torch.from_numpy(np.random.default_rng(3).normal(size=(count, FEATURES)).astype(np.float32)))


def test_top_k_sends_the_largest_changes_since_the_last_sending(tmp_path: Path) -> None:
    codec = TopK(fraction=0.34)
    given = vectors(6)
    [seen, _] = through(codec, given, tmp_path)
    start = bits(play(tmp_path / "start", _nothing, 2).run)[0].numpy()
    last = start.copy()
    for vector, (_, part) in zip(given, seen, strict=True):
        x = vector.numpy()
        [expected] = np.argsort(-np.abs(x - last))[:1]
        assert part.where.tolist() == [expected]
        assert part.values.tolist() == [x[expected]]
        assert part.size == FEATURES
        last = np.where(np.arange(FEATURES) == expected, x, last)


def test_top_k_without_accumulation_counts_changes_since_the_last_mixing(tmp_path: Path) -> None:
    """Changes by local steps count, changes by mixing do not, as in DecentralizePy's PartialModel."""
    moves = [
        torch.tensor([3.0, 2.0, 1.0]),
        torch.tensor([0.0, 1.0, 2.0]),
    ]  # changes by the local steps of both rounds

    async def script(node: Node) -> Any:
        sent = []
        for r, move in enumerate(moves):
            node.parameters = node.parameters + move
            node.send(1 - node.rank, node.model, r)
            sent.append((await node.receive(r)).payload.parameters.where.tolist())
            node.parameters = node.parameters + torch.tensor([0.0, 99.0, 0.0])  # mixed
            await node.end_round(r)
        return sent

    codec = {"name": "top-k", "fraction": 0.34, "accumulate": False}
    assert play(tmp_path, script, 2, codec=codec, stop={"rounds": 2}).values == {0: [[0], [2]], 1: [[0], [2]]}


async def _nothing(node: Node) -> None:
    pass


@pytest.mark.parametrize("support", ["own", "common"])
def test_random_k_draws_by_the_key_and_sends_no_indices(tmp_path: Path, support: Any) -> None:
    codec = RandomK(fraction=0.67, support=support)
    given = vectors(8)
    seen = through(codec, given, tmp_path)
    drawn = [[part.where.tolist() for _, part in row] for row in seen]
    assert (drawn[0] == drawn[1]) == (support == "common") == codec.common_support
    assert len({tuple(where) for where in drawn[0]}) > 1
    for vector, (payload, part) in zip(given, seen[0], strict=True):
        values, seed = payload
        where = np.sort(np.random.default_rng(seed).choice(FEATURES, 2, replace=False, shuffle=False))
        assert part.where.tolist() == where.tolist()
        assert part.values.tolist() == values.tolist() == vector[torch.from_numpy(where)].tolist()


@given(st.lists(st.floats(width=32), max_size=20))
def test_float16_matches_numpy_within_its_range(values: list[float]) -> None:
    x = np.array(values, dtype=np.float32)
    codec: Any = Float16()
    got = codec.decode(
        None, 0, codec.encode(None, torch.from_numpy(x), 0), lambda: torch.from_numpy(x)
    ).numpy()
    np.testing.assert_array_equal(got, np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("codec_bits", [2, 3, 8, 16])
def test_quantize_rounds_by_keyed_draws(tmp_path: Path, codec_bits: int) -> None:
    codec = Quantize(bits=codec_bits)
    given = [*vectors(20), torch.zeros(FEATURES), torch.tensor([1e38, -3e38, 0.0])]
    levels = 2 ** (codec_bits - 1) - 1
    [seen, _] = through(codec, given, tmp_path)
    for r, (vector, (payload, got)) in enumerate(zip(given, seen, strict=True)):
        x = vector.numpy()
        m = np.abs(x).max()
        u = generator(1, "algorithm/~codec/quantize", 0, r, r).random(FEATURES, dtype=np.float32)
        q = np.floor(levels * (x / m if m else x) + u).clip(-levels, levels)
        np.testing.assert_allclose(got.numpy(), m * (q / levels), rtol=1e-6)
        assert payload[0].numel() == math.ceil(FEATURES * codec_bits / 8)


def test_quantize_is_unbiased_and_keeps_non_finite_vectors(tmp_path: Path) -> None:
    vector = torch.tensor([0.3, -0.71, 1.0])
    [seen, _] = through(Quantize(bits=2), [vector] * 2000, tmp_path)
    mean = torch.stack([got for _, got in seen]).mean(0)
    torch.testing.assert_close(mean, vector, atol=0.05, rtol=0)
    [[(_, got)], _] = through(Quantize(bits=4), [torch.tensor([1.0, math.inf, 0.0])], tmp_path / "inf")
    assert got.isnan().all()


def test_each_vector_of_a_round_is_rounded_by_other_draws(tmp_path: Path) -> None:
    vector = torch.linspace(-1, 1, 100)
    codec = Quantize(bits=3)

    async def script(node: Node) -> Any:
        return [codec.encode(node, vector, 0)[0].tolist() for _ in range(2)]

    values = play(tmp_path, script, 2, codec=codec).values
    assert len({tuple(codes) for rank in range(2) for codes in values[rank]}) == 4


@given(st.integers(2, 16), st.data())
def test_packed_bits_round_trip(width: int, data: Any) -> None:
    """The low bytes come first, then the remaining bits."""
    codes = np.array(data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40)), dtype=np.uint16)
    packed = _packed(codes, width)
    low, rest = (codes.tolist(), width - 8) if width >= 8 else ([], width)
    as_text = "".join(f"{code >> (width - rest):0{rest}b}"[::-1] for code in codes) if rest else ""
    bits = [int(as_text[at : at + 8][::-1], 2) for at in range(0, len(as_text), 8)]
    assert packed.tolist() == [*(code & 255 for code in low), *bits]
    assert _unpacked(packed, width, len(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("codec_bits", [2, 8, 12])
def test_excessive_count_is_refused_before_unpacking(codec_bits: int, tmp_path: Path) -> None:
    codec = Quantize(bits=codec_bits)
    data = torch.zeros(15 << 20, dtype=torch.uint8)

    async def script(node: Node) -> Any:
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"values of a vector of {FEATURES}"):
                payload = [data, torch.ones(1), len(data) * 8 // codec_bits]
                codec.decode(node, 1, payload, lambda: node.parameters)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert play(tmp_path, script, 1, codec=codec).values[0] < 1 << 20


def test_chain_encodes_the_values_of_the_previous_codec(tmp_path: Path) -> None:
    chain = Chain(codecs=[{"name": "top-k", "fraction": 0.67}, "identity", "float16"])  # type: ignore[arg-type]
    given = [torch.tensor([10.0, 0.1, -20.0])]
    [[(payload, part)], _] = through(chain, given, tmp_path)
    assert isinstance(part, Part)
    assert part.where.tolist() == [0, 2]
    assert part.values.tolist() == [10.0, -20.0]
    assert part.values.dtype is torch.float32
    [[[half]], packed] = payload  # one nested list per codec
    assert half.dtype is torch.float16
    assert indices.unpacked(packed.numpy(), 2, 3).tolist() == [0, 2]


# --- runs


@pytest.mark.parametrize("name", ["top-k, forgetful", "random-k", "chain"])
def test_both_engines_give_the_same_bits_and_byte_counts(name: str, tmp_path: Path) -> None:
    simulated = gossamer.run(described(CODECS[name]), tmp_path / "simulated")
    real = gossamer.run(
        described(CODECS[name], engine={"name": "processes", "trainer": "sequential"}), tmp_path / "real"
    )
    assert torch.equal(bits(simulated), bits(real))
    assert total(simulated, "bytes_sent") == total(real, "bytes_sent") == total(real, "bytes_received")


@EVERY
def test_resumed_run_keeps_the_bits(codec: Any, tmp_path: Path) -> None:
    whole = gossamer.run(described(codec, 6), tmp_path / "whole")
    cut = gossamer.run(described(codec, 3, checkpoint={"every_rounds": 3}), tmp_path / "cut")
    resumed = gossamer.resume(cut.path, ["stop.rounds=6"])
    assert torch.equal(bits(whole), bits(resumed))


@pytest.mark.parametrize("codec", ["top-k", "jwins", "entropy"])
def test_bits_do_not_depend_on_the_number_of_workers(codec: str, tmp_path: Path) -> None:
    """Long vectors are decoded and mixed by several threads."""
    task = {"name": "least-squares", "features": MIN_LENGTH, "samples": 8, "test_samples": 1}
    runs = [
        gossamer.run(
            described(
                CODECS[codec],
                2,
                nodes=8,
                topology="complete",
                task=task,
                engine={"name": "simulate", "workers": workers},
            ),
            tmp_path / str(workers),
        )
        for workers in (1, 2, 5)
    ]
    assert torch.equal(bits(runs[0]), bits(runs[1]))
    assert torch.equal(bits(runs[0]), bits(runs[2]))


def test_gather_cancelled_while_decoding_leaves_the_messages(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        other = 1 - node.rank
        if node.rank == 1:
            await node.sleep(1)
            node.send(other, node.model, "m")
            return node.parameters
        gathering = node.spawn(node.gather([other], "m"))
        await node.sleep(1)
        await node.sleep(0)  # the message is delivered; decoding is about to run
        gathering.cancel()
        await node.sleep(0)
        return node.drain("m")[0].payload.parameters

    values = play(tmp_path, script, 2, codec="identity", initial="independent").values
    assert torch.equal(values[0], values[1])


def test_identity_codec_equals_no_codec(tmp_path: Path) -> None:
    plain = gossamer.run(described(None), tmp_path / "plain")
    identity = gossamer.run(described("identity"), tmp_path / "identity")
    assert torch.equal(bits(plain), bits(identity))
    assert total(plain, "bytes_sent") == total(identity, "bytes_sent")


def test_bytes_sent_are_those_of_encoded_payloads(tmp_path: Path) -> None:
    run = gossamer.run(described({"name": "top-k", "fraction": 0.34}, 5), tmp_path)
    payload = Model(Coded([torch.zeros(3), torch.zeros(12, dtype=torch.uint8)]))  # type: ignore[arg-type]
    assert total(run, "bytes_sent") == 4 * 2 * 5 * wire_bytes((0,), payload)


def test_missing_coordinates_take_the_values_of_the_receiver(tmp_path: Path) -> None:
    """Two nodes without training: the coordinate that moved most is averaged, the others stay."""

    async def script(node: Node) -> Any:
        node.parameters = torch.tensor([[0.0, 8.0, 1.0], [4.0, 0.0, 1.0]][node.rank]) + node.parameters
        before = node.parameters
        other = 1 - node.rank
        node.send(other, {"model": node.model, "n": node.rank}, "m")
        message = await node.receive("m")
        await node.mix({other: message.payload["model"]}, {other: 0.5})
        return before, message.payload, node.parameters

    values = play(tmp_path, script, 2, codec={"name": "top-k", "fraction": 0.34}).values
    for rank, coordinate in ((0, 0), (1, 1)):  # the coordinate that the other node sends
        before, payload, after = values[rank]
        theirs = values[1 - rank][0]
        assert isinstance(payload["model"].parameters, Part)
        assert payload["n"] == 1 - rank
        expected = before.clone()
        expected[coordinate] = (before[coordinate] + theirs[coordinate]) / 2
        torch.testing.assert_close(after, expected)
        torch.testing.assert_close(
            payload["model"].over(Model(before)).parameters[coordinate], theirs[coordinate]
        )


@pytest.mark.parametrize("absent", [False, True])
def test_missing_coordinates_are_renormalized_on_request(absent: bool, tmp_path: Path) -> None:
    """``gather.missing`` covers absent nodes and coordinates that a codec did not send."""

    async def script(node: Node) -> Any:
        node.parameters = torch.tensor([[0.0, 8.0, 1.0], [4.0, 0.0, 1.0]][node.rank])
        other = 1 - node.rank
        node.send(other, node.model, "m")
        theirs = (await node.receive("m")).payload
        before = node.parameters
        await node.mix({other: theirs}, {other: 0.25, 2: 0.25} if absent else {other: 0.25})
        return before, theirs.parameters, node.parameters

    codec = {"name": "random-k", "fraction": 0.34}
    for before, theirs, after in play(
        tmp_path, script, 2, codec=codec, gather={"missing": "renormalize"}
    ).values.values():
        [where] = theirs.where.tolist()
        own = 0.5 if absent else 0.75
        expected = before.clone()
        expected[where] = (own * before[where] + 0.25 * theirs.values[0]) / (own + 0.25)
        torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("codec", ["round-robin", "top-k", "threshold", "quantize"])
def test_sent_payload_does_not_change_with_the_vector(codec: str, tmp_path: Path) -> None:
    given = {"round-robin": {"name": "round-robin", "blocks": 1}, "top-k": {"name": "top-k", "fraction": 1.0}}
    given |= {
        "threshold": {"name": "threshold", "threshold": 0.0},
        "quantize": {"name": "quantize", "bits": 16},
    }

    async def script(node: Node) -> Any:
        vector = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
        node.send(1 - node.rank, Model(vector), "m")
        with torch.no_grad():
            vector.zero_()
        received = (await node.receive("m")).payload
        return received.over(Model(torch.zeros(3))).parameters

    for decoded in play(tmp_path, script, 2, codec=given[codec]).values.values():
        torch.testing.assert_close(decoded, torch.tensor([1.0, -2.0, 3.0]), atol=1e-3, rtol=0)


class Counting(Codec):
    """Counts its calls, and doubles what it sends."""

    number: int
    needs_static_graph: ClassVar[bool] = True

    def encode(self, node: Node, vector: Tensor, round: int) -> list[Payload]:
        _calls[self.number].append(("encode", node.rank, round))
        return [2 * vector]

    def decode(self, node: Node, source: int, payload: list[Payload], own: Callable[[], Tensor]) -> Tensor:
        _calls[self.number].append(("decode", source, node.round))
        return payload[0] / 2


_calls: dict[int, list[tuple[str, int, int]]] = {}


class Spy(NodeWrapper):
    """Records the payloads on the wire."""

    number: int

    def outgoing(self, node: Node, to: int, payload: Payload, tag: tuple[str | int, ...]) -> Payload:
        _payloads[self.number].append((node.rank, to, payload))
        return payload

    def incoming(self, node: Node, message: Message) -> Message | None:
        _payloads[self.number].append((message.source, node.rank, message.payload))
        return message


_payloads: dict[int, list[tuple[int, int, Any]]] = {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_is_encoded_once_and_shared_by_its_receivers(tmp_path: Path, wrapped: bool) -> None:
    number = len(_calls)
    _calls[number], _payloads[number] = [], []
    wrappers = [Spy(number=number)] if wrapped else []
    run = gossamer.run(
        described(Counting(number=number), 3, topology="complete", wrappers=wrappers), tmp_path
    )
    both = [(kind, rank, r) for kind in ("decode", "encode") for rank in range(4) for r in range(3)]
    trial = [("encode", 0, 0), ("decode", 0, 0)]
    assert _calls[number][:2] == trial
    assert sorted(_calls[number][2:]) == both
    torch.testing.assert_close(
        bits(run), bits(gossamer.run(described(None, 3, topology="complete"), tmp_path / "plain"))
    )
    for rank in range(4 if wrapped else 0):
        objects = {id(payload) for source, _, payload in _payloads[number] if source == rank}
        assert len(objects) == 3  # one per round, shared by the sender and its three receivers
        assert all(isinstance(p.parameters, Coded) for s, _, p in _payloads[number] if s == rank)


def test_model_sent_twice_in_a_round_is_encoded_once(tmp_path: Path) -> None:
    number = len(_calls)
    _calls[number] = []

    async def script(node: Node) -> None:
        for to in node.peers():
            node.send(to, node.model, "m")
            node.send(to, node.model, "exact", exact=True)
        node.parameters = node.parameters + 1
        node.broadcast(node.peers(), [node.model, -node.model], "more")

    play(tmp_path, script, 3, codec=Counting(number=number))
    after_the_trial = _calls[number][2:]
    assert [call for call in after_the_trial if call[1] == 0] == [("encode", 0, 0)] * 3


def test_bare_vectors_as_long_as_a_model_are_refused_with_a_codec(tmp_path: Path) -> None:
    async def script(node: Node) -> None:
        with pytest.raises(ValueError, match=r"node\.parameters is sent.*accepted with a codec: node\.model"):
            node.broadcast(node.peers(), node.parameters, "m")
        own = node.parameters + 1
        with pytest.raises(
            ValueError, match=rf"a vector of {len(own)} values is sent.*accepted.*Model\(vector\)"
        ):
            node.broadcast(node.peers(), {"momentum": own}, "m")
        node.broadcast(node.peers(), [own[:-1], own.long()], "n")
        node.broadcast(node.peers(), node.parameters, "m", exact=True)

    play(tmp_path, script, 2, codec="float16")


# --- encoding time

ENCODING: dict[str, Any] = {"name": "constant", "seconds_per_step": 1.0, "steps_per_encoding": 0.25}
AFTER_A_TENTH: dict[str, Any] = {"name": "uniform", "latency_s": 0.1}


@pytest.mark.parametrize(
    ("compute", "codec", "seconds", "algorithm"),
    [
        (ENCODING, "float16", 1.35, "d-psgd"),
        (ENCODING, "float16", 1.35, "choco-sgd"),
        ({**ENCODING, "steps_per_encoding": 0}, "float16", 1.1, "d-psgd"),
        (ENCODING, None, 1.1, "d-psgd"),
        (ENCODING, "identity", 1.1, "d-psgd"),  # identity takes no time
    ],
)
def test_encoding_takes_time_on_the_clock_of_the_node(
    compute: dict[str, Any], codec: Any, seconds: float, algorithm: str, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"topology": "complete", "algorithm": algorithm, "network": AFTER_A_TENTH}
    run = gossamer.run(described(codec, 3, compute=compute, **more), tmp_path)
    last = run.metrics.filter(run.metrics["node"] >= 0, run.metrics["round"] == 3)
    assert last["time_s"].to_list() == pytest.approx([3 * seconds] * 4)


def test_encoding_is_slowed_by_the_factor_of_a_straggler(tmp_path: Path) -> None:
    compute = {"name": "stragglers", "base": {"name": "constant", "seconds_per_step": 1.0}, "factor": 3}
    compute |= {"ranks": [2], "steps_per_encoding": 0.25}
    run = gossamer.run(
        described("float16", 3, compute=compute, network=AFTER_A_TENTH, topology="complete"), tmp_path
    )
    last = run.metrics.filter(run.metrics["node"] >= 0, run.metrics["round"] == 3)
    # The others wait for its messages, which arrive 0.1 s later.
    assert last["time_s"].to_list() == pytest.approx([11.35, 11.35, 11.25, 11.35])


def test_messages_leave_in_order_after_encoding(tmp_path: Path) -> None:
    """A node encodes and trains one after the other, in the order of the calls."""

    async def script(node: Node) -> Any:
        if node.rank == 1:
            received = [await node.receive() for _ in range(5)]
            return [(message.tag[0], round(node.now(), 6), round(message.sent_at, 6)) for message in received]
        node.send(1, 0, "exact, first")
        training = node.spawn(node.train())
        await node.sleep(0)
        node.send(1, node.model, "encoded")
        node.send(1, node.model, "again")  # already encoded
        cancelled = node.send(1, node.model, "cancelled")
        node.send(1, node.model, "exact, last", exact=True)
        assert not cancelled.done()
        assert cancelled.cancel()
        assert cancelled.done()
        await node.train()
        trained = node.now()
        node.parameters = 2 * node.parameters
        await node.send(1, node.model, "new")
        return training.done(), trained, node.now(), node.traffic.messages_cancelled

    values = play(tmp_path, script, 2, codec="float16", compute=ENCODING).values
    assert values[0] == (True, 2.25, 2.5, 1)
    assert [tag for tag, _, _ in values[1]] == ["exact, first", "encoded", "again", "exact, last", "new"]
    assert [sent_at for _, _, sent_at in values[1]] == [0.0, 1.25, 1.25, 1.25, 2.5]


def test_round_ends_when_its_messages_have_left(tmp_path: Path) -> None:
    async def script(node: Node) -> Any:
        if node.rank == 1:
            return (await node.receive("m")).sent_at
        node.send(1, node.model, "m")
        await node.end_round(0)
        return node.now()

    assert play(tmp_path, script, 2, codec="float16", compute=ENCODING).values == {0: 0.25, 1: 0.25}


@pytest.mark.parametrize("algorithm", ["d-psgd", "ad-psgd"])
def test_resumed_run_keeps_the_times_of_encoding(algorithm: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"algorithm": algorithm, "compute": ENCODING, "network": AFTER_A_TENTH}
    whole = gossamer.run(described("float16", 6, **more), tmp_path / "whole")
    cut = gossamer.run(described("float16", 3, checkpoint={"every_rounds": 3}, **more), tmp_path / "cut")
    resumed = gossamer.resume(cut.path, ["stop.rounds=6"])
    times = [run.metrics.filter(run.metrics["round"] == 6)["time_s"].to_list() for run in (whole, resumed)]
    if algorithm == "d-psgd":  # ad-psgd answers in a separate task, so its resumed run may differ
        assert times[0] == times[1]
    assert resumed.status == "done"


@pytest.mark.parametrize("fault", ["crash", "leave", "freeze"])
@pytest.mark.parametrize("at_s", [2.4, 3.55])
def test_run_continues_when_a_node_fails_while_encoding(fault: str, at_s: float, tmp_path: Path) -> None:
    """At both times the nodes are encoding, until 2.5 and 3.75 s."""
    times = {"crash": {"restart_after_s": 2.0}, "leave": {}, "freeze": {"for_s": 2.0}}
    faults = [{"name": fault, "nodes": [1], "at_s": at_s, **times[fault]}]
    more: dict[str, Any] = {"faults": faults, "gather": {"lost_peer": "skip"}, "compute": ENCODING}
    run = gossamer.run(described("float16", 6, algorithm="d-psgd", **more), tmp_path)
    assert run.status == "done"
    assert bits(run).isfinite().all()


def test_paced_processes_take_the_time_of_encoding(tmp_path: Path) -> None:
    compute = {"name": "constant", "seconds_per_step": 0.01, "steps_per_encoding": 20}
    engine = {"name": "processes", "trainer": "sequential", "pace": True}
    run = gossamer.run(described("float16", 3, compute=compute, engine=engine), tmp_path)
    assert run.metrics["time_s"].max() >= 3 * 0.21  # type: ignore[operator]


def test_only_the_outermost_profile_may_set_the_encoding_time(tmp_path: Path) -> None:
    compute = {"name": "stragglers", "base": ENCODING, "count": 1}
    with pytest.raises(
        BadInput, match=r"compute\.base.*a profile without steps_per_encoding, which the outermost one has"
    ):
        gossamer.run(described("float16", compute=compute), tmp_path)


DIFFERENCES: dict[str, Any] = {
    "sign": "sign",
    "stc": {"name": "stc", "fraction": 0.4},
    "low-rank": "low-rank",
}
"""Codecs for algorithms that send differences only. (``low-rank`` sends a vector as it is.)"""
TAKES_MODELS: list[dict[str, Any]] = [
    {"name": "d-psgd", "overlap": True},
    {"name": "epidemic-local", "degree": 2},
    {"name": "epidemic-oracle", "degree": 3},
    {"name": "gradient-tracking"},
    {"name": "d2"},
    {"name": "qg-momentum"},
    {"name": "topology-aware", "proximal": 0.1},
    {"name": "gossiped-centrality"},
    {"name": "influence-corrected"},
    {"name": "sgp"},
    {"name": "fedavg"},
    {"name": "ad-psgd"},
    {"name": "ad-psgd-artifact"},
    {"name": "swift"},
    {"name": "swift-artifact"},
    {"name": "divshare", "fraction": 1.0, "recipients": 2},
    {"name": "gossip-learning"},
    {"name": "gossip-learning-on-receipt", "period_s": 0.05},
]
TAKES_DIFFERENCES: list[dict[str, Any]] = [{"name": "choco-sgd"}, {"name": "deepsqueeze"}, {"name": "beer"}]
TAKES_PIECES: list[dict[str, Any]] = [
    {"name": "all-reduce"},
    {"name": "divshare", "fraction": 0.3, "recipients": 2},
]
ENCODES_PIECES = ("identity", "bfloat16", "qsgd", "float16", "quantize", "quantize and entropy")
TAKES_NONE: list[dict[str, Any]] = [
    {"name": "local"},
    {"name": "centralized"},
    {"name": "powergossip"},
    {"name": "relay-sum", "tree": "spanning"},
]
EIGHT: dict[str, Any] = {"nodes": 8, "topology": "complete"}


def test_every_algorithm_is_tested() -> None:
    takes = (*TAKES_MODELS, *TAKES_DIFFERENCES, *TAKES_PIECES, *TAKES_NONE)
    listed = {algorithm["name"] for algorithm in takes}
    assert listed == set(names("algorithm"))


def test_every_codec_is_tested() -> None:
    listed = {part.name_of() for codec in CODECS.values() for part in described(codec).codec.parts()}
    assert listed | DIFFERENCES.keys() | {"chain"} == set(names("codec"))


SOME = ("top-k", "jwins", "entropy", "sign")


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [
        pytest.param("processes", (*CODECS, *DIFFERENCES), marks=pytest.mark.slow, id="processes"),
        pytest.param("simulate", (*CODECS, *DIFFERENCES), marks=pytest.mark.slow, id="all-simulated"),
        pytest.param("simulate", SOME, id="some-simulated"),
    ],
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "algorithm", [*TAKES_MODELS, *TAKES_DIFFERENCES], ids=lambda algorithm: str(algorithm["name"])
)
def test_codecs_work_with_every_algorithm_that_sends_models(
    algorithm: dict[str, Any], engine: str, chosen: tuple[str, ...], tmp_path: Path
) -> None:
    engines: dict[str, Any] = {"simulate": {"name": "simulate", "trainer": "sequential"}}
    more = {**EIGHT, "algorithm": algorithm, "engine": engines.get(engine, engine)}
    plain = gossamer.run(described(None, 2, **more), tmp_path / "plain")
    for number, name in enumerate(chosen):
        codec = {**CODECS, **DIFFERENCES}[name]
        if name in DIFFERENCES and algorithm not in TAKES_DIFFERENCES:
            with pytest.raises(BadInput, match=f"codec: {name}, which encodes only differences"):
                gossamer.run(described(codec, 2, **more), tmp_path)
            continue
        run = gossamer.run(described(codec, 2, **more), tmp_path / str(number))
        assert run.status == "done"
        assert bits(run).isfinite().all()
        if engine == "simulate":  # asynchronous processes send varying numbers of messages
            same = total(run, "bytes_sent") == total(plain, "bytes_sent")
            assert same == (name == "identity" and algorithm not in TAKES_DIFFERENCES)


@pytest.mark.parametrize("engine", ["simulate", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", TAKES_PIECES, ids=lambda algorithm: str(algorithm["name"]))
def test_only_codecs_by_value_encode_pieces_of_models(
    algorithm: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    more = {**EIGHT, "algorithm": algorithm, "engine": engine}
    for name, codec in (CODECS | DIFFERENCES).items():
        if name not in ENCODES_PIECES:
            with pytest.raises(
                BadInput,
                match=r"codec: .*, which (takes whole models|encodes only differences).*; accepted: ",
            ):
                gossamer.run(described(codec, 2, **more), tmp_path)
            continue
        run = gossamer.run(described(codec, 2, **more), tmp_path / name)
        assert run.status == "done"
        assert bits(run).isfinite().all()
        if algorithm["name"] == "all-reduce":
            assert all(torch.equal(row, bits(run)[0]) for row in bits(run))


def test_all_reduce_encodes_segments_in_both_phases(tmp_path: Path) -> None:
    """Without training: a segment is the mean of the decoded values at its owner, rounded again."""
    still = {"optimizer": {"name": "sgd", "lr": 1e-30}, "algorithm": "all-reduce"}
    start = bits(
        gossamer.run(described(None, 1, **{**still, "algorithm": "local"}), tmp_path / "start")
    ).numpy()
    after = bits(gossamer.run(described("float16", 1, **still), tmp_path / "run")).numpy()
    whole = []
    for owner, columns in enumerate(np.array_split(np.arange(P), 4)):
        theirs = [
            x[columns].astype(np.float16 if rank != owner else np.float32) for rank, x in enumerate(start)
        ]
        whole.append(np.mean([values.astype(np.float64) for values in theirs], axis=0).astype(np.float16))
    np.testing.assert_allclose(after, [np.concatenate(whole)] * 4, rtol=2e-3, atol=1e-6)
    assert np.array_equal(after, after.astype(np.float16).astype(np.float32))


def test_fragment_is_encoded_once_for_all_its_recipients(tmp_path: Path) -> None:
    """Two rounds without training: in the second, all nodes have the fragments of the first."""
    number = len(_payloads)
    _payloads[number] = []
    algorithm = {"name": "divshare", "fraction": 0.5, "recipients": 3}
    still = {"optimizer": {"name": "sgd", "lr": 1e-30}, "algorithm": algorithm, "topology": "complete"}
    start = bits(
        gossamer.run(described(None, 1, **{**still, "algorithm": "local"}), tmp_path / "start")
    ).numpy()
    wrappers = [Spy(number=number)]
    run = gossamer.run(described("float16", 2, wrappers=wrappers, **still), tmp_path / "run")
    rounded = start.astype(np.float16).astype(np.float32)
    expected = (start - rounded + rounded.sum(axis=0)) / 4
    np.testing.assert_allclose(bits(run).numpy(), expected, rtol=1e-5, atol=1e-6)
    encoded = {id(payload.parameters) for source, _, payload in _payloads[number] if source == 0}
    assert len(encoded) == 2 * 2  # one per round and fragment


@pytest.mark.parametrize("algorithm", TAKES_NONE, ids=str)
@pytest.mark.parametrize("codec", ["top-k", "quantize"])
def test_algorithms_without_whole_models_refuse_codecs(
    algorithm: dict[str, Any], codec: str, tmp_path: Path
) -> None:
    with pytest.raises(
        BadInput, match=f"codec: {codec} for {algorithm['name']}, which sends no whole models"
    ):
        gossamer.run(described(CODECS[codec], **EIGHT, algorithm=algorithm), tmp_path)


# --- invalid settings


DIGITS: dict[str, Any] = {"task": "digits", "batch_size": 8}


@pytest.mark.parametrize(
    ("codec", "changes", "problem"),
    [
        ("zip", {}, "codec: unknown name 'zip'"),
        ({"name": "top-k"}, {}, r"codec\.fraction: missing"),
        ({"name": "quantize", "bits": 1}, {}, r"codec\.bits"),
        ({"name": "round-robin", "blocks": 10}, {}, r"codec\.blocks: 10 of 9 parameters; accepted: 1 to 9"),
        (
            {"name": "low-rank", "rank": 60},
            {"algorithm": "choco-sgd", **DIGITS},
            r"codec\.rank: got 60, which makes no matrix of the model smaller",
        ),
        (
            None,
            {"algorithm": {"name": "powergossip", "rank": 64}, **DIGITS},
            r"algorithm\.rank: got 64, which makes no matrix of the model smaller",
        ),
        ([], {}, "a list of codecs"),
        (
            ["identity", {"name": "top-k", "fraction": 0.5}],
            {},
            r"codec\.1: top-k after another codec; accepted: as the first",
        ),
        (
            [{"name": "top-k", "fraction": 0.5}, "low-rank"],
            {},
            r"codec\.1: low-rank after another codec; accepted: as the first",
        ),
        (
            ["jwins", {"name": "quantize", "block": "tensor"}],
            {},
            r"codec\.1: quantize after another codec; accepted: as the first",
        ),
        (
            ["float16", {"name": "quantize"}],
            {},
            r"codec\.0: float16 before another codec; accepted: as the last",
        ),
        (
            [{"name": "chain", "codecs": ["identity", "float16"]}, "identity"],
            {},
            r"codec\.1: float16 before another codec; accepted: as the last",
        ),
        (
            "float16",
            {"algorithm": {"name": "relay-sum", "tree": "spanning"}},
            "codec: float16 for relay-sum, which sends no whole models",
        ),
        ("jwins", {"algorithm": "divshare"}, "codec: jwins, which takes whole models, with divshare"),
        (
            {"name": "quantize", "block": "tensor"},
            {"algorithm": "all-reduce"},
            "quantize, which takes whole models",
        ),
        ("float16", {"algorithm": "local"}, "codec: float16 for local"),
    ],
)
def test_unsupported_use_of_a_codec_is_refused_before_the_run(
    codec: Any, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=problem):
        gossamer.run(described(codec, **changes), tmp_path)


class Picky(Identity):
    """Needs every message."""

    needs_every_message: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"network": {"name": "uniform", "loss": 0.1}, "gather": {"timeout_s": 1}}, "that lose messages"),
        ({"gather": {"timeout_s": 1}}, "gather.timeout_s, after which"),
        ({"algorithm": {"name": "divshare", "fraction": 1.0, "recipients": 2}}, "which cancels messages"),
    ],
)
def test_requirements_of_a_codec_are_checked(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=problem):
        gossamer.run(described([Picky()], **changes), tmp_path)
    assert gossamer.run(described([Picky()]), tmp_path).status == "done"
    changing = {"name": "random-regular", "degree": 2, "every_rounds": 1}
    with pytest.raises(BadInput, match="with a topology that changes"):
        gossamer.run(described(Counting(number=0), topology=changing), tmp_path)


@pytest.mark.parametrize(
    "payload",
    [
        [torch.zeros(2), torch.tensor([0, 7], dtype=torch.int32)],
        [torch.zeros(2), torch.tensor([0], dtype=torch.int32)],
        [torch.zeros(1, 1), torch.tensor([0], dtype=torch.int32)],
        [torch.zeros(1).double(), torch.tensor([0], dtype=torch.int32)],
        [torch.zeros(1)],
        "text",
        {"values": torch.zeros(1)},
        [{"values": torch.zeros(1)}, torch.tensor([0], dtype=torch.int32)],
        [[], torch.tensor([0], dtype=torch.int32)],
    ],
)
@pytest.mark.parametrize("codec", ["top-k", "chain"])
def test_undecodable_payload_is_an_error_that_names_its_sender(
    payload: Any, codec: str, tmp_path: Path
) -> None:
    async def script(node: Node) -> None:
        if node.rank:
            node.send(0, Model(Coded(payload)), "m", exact=True)  # type: ignore[arg-type]
        else:
            await node.receive("m")

    with pytest.raises(RunFailed, match=f"a model from node 1 that codec {codec} can't decode"):
        play(tmp_path, script, 2, codec=CODECS[codec])


def test_experiment_is_saved_with_its_codec() -> None:
    for codec in CODECS.values():
        saved = described(codec)
        again = Experiment.parse(saved.to_yaml())
        assert again.codec == saved.codec
        assert again.to_yaml() == saved.to_yaml()
    assert isinstance(experiment(_nothing).codec, type(None))
