"""DivShare: its fragments, and the algorithm against a NumPy model with dropped queues, replaced fragments and late
messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
import torch
from delays import FEATURES, Array, Sent, Wires, World, experiment, play
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import gossamer
from gossamer import Algorithm, BadInput, Experiment, Node
from gossamer.algorithms.divshare import Fragments, assign_fragments
from gossamer.learning.parameters import Field
from gossamer.messages import wire_bytes
from gossamer.messages.tags import Model

# --- fragments


def partition(seed: int, sizes: Sequence[int], parts: int) -> list[NDArray[np.int64]]:
    """Each fragment's coordinates."""
    assignment = assign_fragments(seed, tuple(sizes), parts, torch.device("cpu"))
    return [part.numpy() for part in assignment.order.split(assignment.sizes)]


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_fragments_partition_each_tensor(seed: int, sizes: list[int], parts: int) -> None:
    fragments = [part.tolist() for part in partition(seed, sizes, parts)]
    assert sorted(p for part in fragments for p in part) == list(range(sum(sizes)))
    assert all(part == sorted(part) for part in fragments)
    start = 0
    for size in sizes:
        counts = [sum(start <= p < start + size for p in part) for part in fragments]
        assert counts == [size // parts] * (parts - 1) + [size - size // parts * (parts - 1)]
        start += size


def test_partition_depends_on_the_seed() -> None:
    one, other = (partition(seed, (100,), 4)[0].tolist() for seed in (1, 2))
    assert one != other
    assert one != list(range(25))


GN_LENET = (2400, 32, 32, 32, 25600, 32, 32, 32, 51200, 64, 64, 64, 10240, 10)
"""Lengths of the tensors of DivShare's model for CIFAR-10: 89,834 parameters."""


@pytest.mark.parametrize(("parts", "ratio"), [(10, 1.003), (20, 1.021), (100, 1.485)])
def test_last_fragment_of_the_published_model_is_larger(parts: int, ratio: float) -> None:
    """The ratios are those measured with the published code."""
    assert sum(GN_LENET) == 89_834
    sizes = [len(part) for part in partition(0, GN_LENET, parts)]
    assert len(set(sizes[:-1])) == 1
    assert sizes[-1] / sizes[0] == pytest.approx(ratio, abs=6e-4)


_cut: dict[int, list[Any]] = {}


class Cutter(Algorithm):
    """Records the fragments that a node cuts its model into."""

    number: int
    parts: int

    async def run(self, node: Node) -> None:
        fragments = Fragments(node, self.parts)
        payloads = fragments.cut(node.model)
        indices = fragments.parameters.order.split(fragments.parameters.sizes)
        _cut[self.number].append((node.parameters, payloads, indices))


def cut(tmp_path: Path, parts: int, **task: Any) -> list[Any]:
    number = len(_cut)
    _cut[number] = []
    gossamer.run(
        Experiment.of(
            {
                "nodes": 3,
                "task": {"name": "digits", "model": {"name": "mlp", "hidden": [7]}, **task},
                "algorithm": Cutter(number=number, parts=parts),
                "initial": "independent",
                "evaluation": {"every_rounds": None},
                "stop": {"rounds": 1},
                "engine": {"name": "simulate", "trainer": "sequential"},
            }
        ),
        tmp_path,
    )
    return _cut[number]


def test_fragments_agree_on_all_nodes_and_hold_the_whole_model(tmp_path: Path) -> None:
    seen = cut(tmp_path, 5)
    assert len(seen) == 3
    for model, payloads, indices in seen:
        assert all(torch.equal(one, other) for one, other in zip(indices, seen[0][2], strict=True))
        assert list(payloads) == list(range(5))
        again = torch.full_like(model, np.nan)
        for c, (values, _) in payloads.items():
            again[indices[c]] = values
        assert torch.equal(again, model)


@given(
    st.integers(0, 2**31), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 6), st.data()
)
def test_mean_covers_the_values_received_of_each_coordinate(
    seed: int, sizes: list[int], parts: int, data: st.DataObject
) -> None:
    rng, n = np.random.default_rng(seed), sum(sizes)
    fragments = partition(seed, sizes, parts)
    own = rng.standard_normal(n).astype(np.float32)
    values, present = [own], [np.ones(n)]
    heard = []
    for c in data.draw(st.lists(st.integers(0, parts - 1), max_size=10)):
        whole = rng.standard_normal(n).astype(np.float32)
        heard.append((c, torch.from_numpy(whole[fragments[c]])))
        values.append(whole)
        present.append(np.isin(np.arange(n), fragments[c]).astype(float))
    mean = assign_fragments(seed, tuple(sizes), parts, torch.device("cpu")).mean(torch.from_numpy(own), heard)
    np.testing.assert_allclose(
        mean.numpy(), np.average(values, axis=0, weights=present), rtol=1e-5, atol=1e-6
    )


def test_empty_fragments_are_not_sent(tmp_path: Path) -> None:
    """No tensor of this model has 600 values, so the last of 600 fragments holds them all."""
    [(model, payloads, indices), *_] = cut(tmp_path, 600)
    assert list(payloads) == [599]
    assert torch.equal(payloads[599].parameters, model[indices[599]])


def test_fragments_without_parameters_carry_buffers() -> None:
    """The last of five fragments has all three parameters of the one tensor; each has two of ten buffers."""
    node = mock.Mock(spec=Node, buffers=torch.arange(10.0), layout=[Field("w", 0, torch.Size([3]))])
    node.parameters = torch.zeros(3)
    node.rng.return_value = np.random.default_rng(3)
    node.store = lambda v: v
    sent = Fragments(node, 5).cut(Model(torch.ones(3), node.buffers))
    assert [len(payload.parameters) for payload in sent.values()] == [0, 0, 0, 0, 3]
    assert torch.cat([payload.buffers for payload in sent.values()]).sort().values.equal(node.buffers)


# --- the protocol

SECONDS = [[1.013, 1.711], [2.087], [1.409, 1.201, 2.593], [1.499], [0.8007]]
LATENCY = [[0.0517 + 0.0371 * ((3 * i + 5 * j) % 7) + 0.0013 * i for j in range(5)] for i in range(5)]
RATES = [900.0, 350.0, 5000.0, 120.0, 90.0]
"""Bytes per second: a message of about 90 bytes takes from a fiftieth of a second to a whole one."""


def fragments_of(described: Experiment, parts: int) -> list[NDArray[np.int64]]:
    """The partition that all nodes draw from their shared key."""
    from gossamer.randomness import generator

    seed = int(generator(described.seed, "algorithm/fragments").integers(2**63))
    return partition(seed, (FEATURES,), parts)


def model(
    described: Experiment,
    sent: Sent,
    until: float,
    *,
    parts: int,
    drop: bool = True,
    rates: list[float] = RATES,
    steps: int = 1,
) -> tuple[Array, dict[str, int]]:
    """DivShare as a network of processes, in the order of its authors' code; ``sent`` gives the drawn recipients and
    their order. Also returns the number of events of each kind, so that a test can check that they occurred."""
    world, seen = World(described), Counter[str]()
    fragments = fragments_of(described, parts)
    sizes = [wire_bytes(("fragment", c), torch.zeros(len(part))) for c, part in enumerate(fragments)]
    wires = Wires(world, rates)
    clocks = [count() for _ in SECONDS]
    inbox: list[dict[tuple[int, int], tuple[int, Array]]] = [{} for _ in SECONDS]
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, tag, to, r in sent:
        pairs.setdefault((source, r), []).append((int(tag[1]), to))

    def deliver(i: int, j: int, c: int, r: int, values: Array) -> None:
        seen["replaced"] += (i, c) in inbox[j]
        inbox[j][i, c] = (r, values)
        seen["late"] += r < started[i]

    started = [0] * len(SECONDS)

    def node(i: int) -> Iterator[float]:
        for r in count():
            yield sum(SECONDS[i][next(clocks[i]) % len(SECONDS[i])] for _ in range(steps))
            started[i] = r
            x = world.learners[i].descend(world.X[i], steps)
            if drop:
                seen["dropped"] += wires.drop(i)
            for c, j in pairs.get((i, r), []):
                values = x[fragments[c]]
                wires.send(
                    i,
                    j,
                    sizes[c],
                    LATENCY[i][j],
                    lambda j=j, c=c, r=r, values=values: deliver(i, j, c, r, values),
                )
            total, number = x.copy(), np.ones(FEATURES)
            for (_, c), (_, values) in inbox[i].items():
                total[fragments[c]] += values
                number[fragments[c]] += 1
            seen["mixed"] += len(inbox[i])
            inbox[i].clear()
            world.X[i] = total / number

    for i in range(len(SECONDS)):
        world.start(node(i))
    return world.run(until), seen


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"fraction": 0.25}, {"parts": 4}),
        ({"fraction": 0.3, "recipients": 2, "local_steps": 2}, {"parts": 3, "steps": 2}),
        ({"fraction": 0.25, "queue": "keep"}, {"parts": 4, "drop": False}),
        ({"fraction": 1, "recipients": 2}, {"parts": 1}),
        ({"fraction": 0.6, "queue": "keep"}, {"parts": 1, "drop": False}),
    ],
    ids=str,
)
def test_models_match_numpy(tmp_path: Path, options: dict[str, Any], reference: dict[str, Any]) -> None:
    algorithm = {"name": "divshare", **options}
    described = experiment(algorithm, SECONDS, LATENCY, RATES, stop={"time_s": 17.3})
    run, sent = play(described, tmp_path)
    expected, seen = model(described, sent, 17.3, **reference)
    assert run.parameters is not None
    np.testing.assert_allclose(run.parameters.numpy(), expected, rtol=1e-5, atol=1e-5)
    # All cases occurred, and they matter.
    drop = reference.get("drop", True)
    assert seen["mixed"] > 20
    assert (seen["dropped"] > 10) == drop
    assert seen["replaced"] > 0
    # A whole model that has left before the queue is dropped has also arrived before that.
    assert (seen["late"] > 0) == (options["fraction"] < 1)
    other, _ = model(described, sent, 17.3, **{**reference, "drop": not drop})
    assert np.abs(expected - other).max() > 1e-3


def test_recipients_are_drawn_for_each_fragment_and_round(tmp_path: Path) -> None:
    """Each fragment and round has J distinct recipients, and all pairs are in random order."""
    described = experiment({"name": "divshare", "fraction": 0.25}, SECONDS, LATENCY, stop={"rounds": 40})
    _, sent = play(described, tmp_path)
    J = math.ceil(math.log2(5))
    orders, sets = set(), set()
    counts: Counter[int] = Counter()
    for r in range(40):
        pairs = [(int(tag[1]), to) for source, tag, to, at in sent if (source, at) == (2, r)]
        assert Counter(c for c, _ in pairs) == dict.fromkeys(range(4), J)
        assert len(set(pairs)) == 4 * J
        assert all(to != 2 for _, to in pairs)
        orders.add(tuple(c for c, _ in pairs))
        sets |= {(r, frozenset(to for c, to in pairs if c == fragment)) for fragment in range(4)}
        counts.update(to for _, to in pairs)
    assert len(orders) > 35
    assert len({recipients for _, recipients in sets}) == 4  # all choices of 3 of the 4 others
    # Each of 4 others with probability 3/4 in 160 draws: 120, standard deviation 5.5.
    assert all(abs(counts[to] - 120) < 28 for to in (0, 1, 3, 4))


def test_recipients_may_be_drawn_from_the_neighbours(tmp_path: Path) -> None:
    algorithm = {"name": "divshare", "fraction": 0.25, "recipients": 3, "recipients_from": "neighbors"}
    described = experiment(algorithm, SECONDS, LATENCY, topology="star", stop={"rounds": 3})
    _, sent = play(described, tmp_path)
    assert {to for source, _, to, _ in sent if source > 0} == {0}
    assert len([1 for source, _, _, at in sent if (source, at) == (0, 0)]) == 4 * 3
    assert len([1 for source, _, _, at in sent if (source, at) == (1, 0)]) == 4 * 1


def test_kept_queue_is_limited_by_the_backlog(tmp_path: Path) -> None:
    """A node with 90 bytes per second and 0.8 s per round waits for its uplink if it may keep two rounds' messages."""
    rounds = {}
    for backlog in (2, None):
        algorithm = {"name": "divshare", "fraction": 1, "queue": "keep", "backlog": backlog}
        run, sent = play(experiment(algorithm, SECONDS, LATENCY, RATES, stop={"time_s": 60.0}), tmp_path)
        rounds[backlog] = run.metrics.filter(node=4)["round"].max()
        [last] = run.metrics.filter(node=4, round=rounds[backlog]).to_dicts()
        queued = len([1 for source, *_ in sent if source == 4]) - last["messages_sent"]
        assert (queued <= 3 * (backlog + 1)) if backlog else (queued > 100)
    size = wire_bytes(("fragment", 0), torch.zeros(FEATURES))
    assert rounds[None] == 74
    assert rounds[2] == pytest.approx(60.0 * 90 / (3 * size), abs=4)


def test_received_share_is_recorded(tmp_path: Path) -> None:
    """Nodes are equally fast and links unlimited, so all J C fragments arrive: the mean share is 1."""
    algorithm = {"name": "divshare", "fraction": 0.25, "recipients": 2}
    described = experiment(
        algorithm, [[1.0]] * 5, [[0.1] * 5] * 5, evaluation={"every_rounds": 1}, stop={"rounds": 6}
    )
    run, _ = play(described, tmp_path)
    rows = run.metrics.filter(run.metrics["node"] >= 0, run.metrics["round"] > 0)
    shares = (
        rows.group_by("round").agg(pl.col("received_share").mean()).sort("round")["received_share"].to_list()
    )
    assert shares == pytest.approx([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_cancelled_messages_are_counted(tmp_path: Path) -> None:
    algorithm = {"name": "divshare", "fraction": 0.25}
    described = experiment(algorithm, SECONDS, LATENCY, RATES, stop={"time_s": 17.3})
    run, sent = play(described, tmp_path)
    _, seen = model(described, sent, 17.3, parts=4)
    last = run.metrics.filter(run.metrics["node"] >= 0).sort("node", "round").group_by("node").last()
    assert last["messages_cancelled"].sum() == seen["dropped"] > 10


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"recipients": 5}, r"algorithm\.recipients: 5 for 5 nodes; accepted: 1 to 4, or null"),
        ({"recipients": 0}, r"algorithm\.recipients"),
        ({"fraction": 0}, r"algorithm\.fraction"),
        ({"fraction": 1.2}, r"algorithm\.fraction"),
        ({"queue": "flush"}, r"algorithm\.queue"),
        ({"recipients_from": "some"}, r"algorithm\.recipients_from"),
        ({"backlog": 2}, r'algorithm\.backlog: 2 with queue "drop"; accepted: null, or "keep"'),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, algorithm: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        play(experiment({"name": "divshare", **algorithm}, SECONDS, LATENCY, stop={"rounds": 1}), tmp_path)
