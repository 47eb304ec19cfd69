from __future__ import annotations

import logging
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.tasks import IID, Dirichlet, Natural, Partition, Shards, Sizes, Task, label_counts


def classification(labels, groups=None, classes=None) -> Task:
    y = torch.as_tensor(np.asarray(labels))
    x = torch.zeros(len(y), 1)
    return Task(
        model=lambda: nn.Linear(1, 2),
        train=(x, y),
        test=(x, y),
        loss=nn.functional.cross_entropy,
        groups=None if groups is None else torch.as_tensor(np.asarray(groups)),
        classes=classes,
    )


def regression(samples: int = 10) -> Task:
    data = torch.zeros(samples, 1), torch.zeros(samples, 1)
    return Task(model=lambda: nn.Linear(1, 1), train=data, test=data, loss=nn.functional.mse_loss)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


BALANCED = classification(np.repeat(np.arange(10), 5000))

labelled = st.lists(st.integers(0, 5), min_size=1, max_size=80)


def used_once(parts, samples) -> None:
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert min(map(len, parts)) >= 1


@settings(max_examples=60)
@given(labels=labelled, data=st.data(), seed=st.integers(0, 2**32))
def test_every_sample_is_used_exactly_once(labels, data, seed):
    nodes = data.draw(st.integers(1, len(labels)))
    per_node = data.draw(st.integers(1, len(labels) // nodes))
    alpha = data.draw(st.sampled_from([1e-6, 0.05, 1.0, 100.0]))
    owners = data.draw(st.permutations(range(len(labels))))  # at least as many owners as nodes
    groups = [owner % max(nodes, len(labels) // 2) for owner in owners]
    shares = np.full(nodes, 1 / nodes)
    task = classification(labels, groups)
    for partition in (
        IID(),
        Shards(per_node=per_node),
        Dirichlet(alpha=alpha, min_samples=per_node),
        Natural(),
        Sizes(fractions=tuple(shares)),
    ):
        parts = partition.assign(task, nodes, generator(seed))
        assert len(parts) == nodes
        used_once(parts, len(labels))


@pytest.mark.parametrize(
    "name", ["iid", {"name": "shards", "per_node": 3}, {"name": "dirichlet", "alpha": 0.3}]
)
def test_parts_depend_only_on_the_generator(name):
    partition = build("partition", name)
    one, again, other = (partition.assign(BALANCED, 20, generator(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_parts_have_even_sizes_and_label_shares():
    parts = IID().assign(BALANCED, 7, generator())
    assert set(map(len, parts)) == {50_000 // 7, 50_000 // 7 + 1}
    # Hypergeometric: mean n/10, variance n * 0.1 * 0.9 * (1 - n/N). Five standard deviations.
    n = 50_000 // 7
    bound = 5 * np.sqrt(n * 0.09 * (1 - 1 / 7))
    assert np.abs(label_counts(BALANCED, parts) - n / 10).max() < bound


@pytest.mark.parametrize(("nodes", "per_node"), [(16, 2), (100, 2), (96, 4), (7, 1)])
def test_shards_limit_labels_per_node(nodes, per_node):
    parts = Shards(per_node=per_node).assign(BALANCED, nodes, generator())
    used_once(parts, 50_000)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= per_node
    labels = (label_counts(BALANCED, parts) > 0).sum(axis=1)
    span = 2 if 50_000 / (nodes * per_node) <= 5000 else 3
    assert labels.max() <= span * per_node


def test_shards_that_divide_the_classes_have_one_label_each():
    parts = Shards(per_node=1).assign(BALANCED, 20, generator())
    counts = label_counts(BALANCED, parts)
    assert sorted(map(tuple, counts.tolist())) == sorted(
        tuple(2500 * (c == column) for column in range(10)) for c in range(10) for _ in range(2)
    )


@pytest.mark.parametrize(("nodes", "alpha"), [(256, 0.1), (1024, 0.1), (96, 0.05), (1024, 1e-9), (1024, 1e9)])
def test_dirichlet_is_fast_for_any_alpha(nodes, alpha):
    start = time.perf_counter()
    parts = Dirichlet(alpha=alpha).assign(BALANCED, nodes, generator())
    assert time.perf_counter() - start < 5  # about 20 ms on an idle core
    used_once(parts, 50_000)


def test_dirichlet_with_largest_min_samples_is_even():
    parts = Dirichlet(alpha=0.05, min_samples=48).assign(BALANCED, 1024, generator())
    used_once(parts, 50_000)
    assert min(map(len, parts)) == 48
    exact = Dirichlet(alpha=0.05, min_samples=50).assign(BALANCED, 1000, generator())
    assert {len(part) for part in exact} == {50}


def test_dirichlet_shares_have_theoretical_moments():
    # Marginals of the symmetric Dirichlet distribution: mean 1/K, variance (K - 1) / (K^2 (K alpha + 1)).
    nodes, alpha = 10, 0.5
    shares = np.concatenate(
        [
            label_counts(BALANCED, Dirichlet(alpha=alpha).assign(BALANCED, nodes, generator(seed))) / 5000
            for seed in range(40)
        ]
    )
    assert shares.mean() == pytest.approx(1 / nodes)
    assert shares.var() == pytest.approx((nodes - 1) / (nodes**2 * (nodes * alpha + 1)), rel=0.1)


def test_dirichlet_is_even_for_large_and_skewed_for_small_alpha():
    even = label_counts(BALANCED, Dirichlet(alpha=1e7).assign(BALANCED, 10, generator()))
    assert np.abs(even - 500).max() < 10
    skewed = label_counts(BALANCED, Dirichlet(alpha=1e-5).assign(BALANCED, 10, generator()))
    assert (skewed.max(axis=0) > 4980).all()


@settings(max_examples=30)
@given(labels=labelled, data=st.data(), seed=st.integers(0, 2**32))
def test_dirichlet_gives_every_node_min_samples(labels, data, seed):
    nodes = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(1, len(labels) // nodes))
    parts = Dirichlet(alpha=0.1, min_samples=minimum).assign(classification(labels), nodes, generator(seed))
    assert min(map(len, parts)) >= minimum


def test_natural_gives_node_i_the_ith_owner():
    task = classification([0] * 8, groups=[30, 10, 20, 10, 30, 30, 20, 10])
    parts = Natural().assign(task, 3, generator())
    assert [part.tolist() for part in parts] == [[1, 3, 7], [2, 6], [0, 4, 5]]


def test_natural_deals_whole_owners_evenly():
    owners = np.random.default_rng(5).permutation(np.repeat(np.arange(25), np.arange(1, 26)))
    parts = Natural().assign(classification(np.zeros(len(owners), np.int64), owners), 7, generator())
    held = [set(owners[part]) for part in parts]
    assert sorted(map(len, held)) == [3, 3, 3, 4, 4, 4, 4]
    assert sum(map(len, held)) == len(set.union(*held)) == 25


@settings(max_examples=40)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    scale=st.floats(0.5, 1.0),
    samples=st.integers(200, 400),  # every node gets at least one
)
def test_sizes_match_fractions_to_within_one_sample(weights, scale, samples):
    fractions = tuple(scale * w / sum(weights) for w in weights)
    parts = Sizes(fractions=fractions).assign(classification([0] * samples), len(fractions), generator())
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * samples) <= 1
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used)
    assert abs(len(used) - scale * samples) <= 1


def test_unused_samples_are_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="gossamer"):
        Sizes(fractions=(0.5, 0.25)).assign(classification([0] * 100), 2, generator())
    assert caplog.messages == ["partition sizes: 25 of 100 training samples are left out"]
    caplog.clear()
    IID().assign(classification([0] * 100), 3, generator())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("partition", "task", "nodes", "message"),
    [
        (
            IID(),
            regression(),
            11,
            "nodes: 11 for 10 samples; accepted: 1 to 10",
        ),
        (IID(), regression(), 0, "nodes: 0 for 10 samples; accepted: 1 to 10"),
        (Shards(), regression(), 2, "partition 'shards': the task's targets are not class numbers"),
        (Dirichlet(alpha=1), regression(), 2, "partition 'dirichlet': the task's targets are not class"),
        (
            Shards(per_node=6),
            classification([0] * 10),
            2,
            "partition.per_node: 6 for 2 nodes.* accepted: at most 5",
        ),
        (
            Dirichlet(alpha=1, min_samples=4),
            classification([0] * 10),
            3,
            "min_samples: 4 .* accepted: at most 3",
        ),
        (Natural(), regression(), 2, "partition 'natural': the task has no owner ids"),
        (
            Natural(),
            classification([0] * 4, [1, 1, 2, 2]),
            3,
            "nodes: 3 for 2 owners, with partition natural; accepted: at most 2",
        ),
        (Sizes(fractions=(0.5, 0.5)), regression(), 3, "partition.fractions: 2 for 3 nodes"),
        (
            Sizes(fractions=(0.99, 0.01)),
            regression(),
            2,
            "partition 'sizes': 2 parts for 2 nodes, the smallest of 0 samples",
        ),
    ],
)
def test_impossible_partitions_are_refused(partition, task, nodes, message):
    with pytest.raises(BadInput, match=message) as raised:
        partition.assign(task, nodes, generator())
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dirichlet", {}, "alpha"),
        ("dirichlet", {"alpha": 0}, "greater than or equal to 0.000000001"),
        ("dirichlet", {"alpha": float("nan")}, "alpha"),
        ("shards", {"per_node": 0}, "greater than 0"),
        (
            "sizes",
            {"fractions": [0.7, 0.4]},
            r"partition.fractions: .* accepted: a sum of at most 1 \(this is 1.1\)",
        ),
        ("sizes", {"fractions": [0.5, -0.1]}, "greater than 0"),
    ],
)
def test_bad_parameters_are_refused(name, parameters, message):
    with pytest.raises(BadInput, match=message):
        build("partition", {"name": name, **parameters})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [1, 2]], "samples that do not exist, or that two nodes have"),
        ([[0, 1], [2, 10]], "accepted: 0 to 9, each once"),
        ([[-1, 1], [2]], "accepted: 0 to 9, each once"),
        ([[0, 1]], "1 parts for 2 nodes, the smallest of 2 samples; accepted: one per node"),
        ([[0, 1], []], "2 parts for 2 nodes, the smallest of 0 samples"),
    ],
)
def test_a_users_partition_is_checked(parts, message):
    class Broken(Partition):
        def split(self, task, nodes, rng):
            return [np.array(part, np.int64) for part in parts]

    with pytest.raises(BadInput, match=message):
        Broken().assign(regression(), 2, generator())


def test_label_counts_are_per_node_and_class():
    task = classification([0, 2, 2, 1, 0, 2])
    parts = [np.array([0, 1, 2]), np.array([4, 5])]
    assert label_counts(task, parts).tolist() == [[1, 0, 2], [1, 0, 1]]
    named = classification([0, 2, 2, 1, 0, 2], classes=["a", "b", "c", "d"])
    assert label_counts(named, parts).tolist() == [[1, 0, 2, 0], [1, 0, 1, 0]]
    assert label_counts(regression(), parts) is None


# --- Flower's partitioners


def test_flower_partitioners_split_by_label_or_owner():
    pytest.importorskip("flwr_datasets")
    fields = {"name": "flower", "partitioner": "PathologicalPartitioner", "partition_by": "label"}
    partition = build("partition", {**fields, "num_classes_per_partition": 2})
    assert build("partition", partition.spec()) == partition
    task = classification(np.repeat(np.arange(4), 25), np.arange(100) % 5)
    parts = partition.assign(task, 6, generator())
    assert len(parts) == 6
    assert all(len(set(task.train[1][part].tolist())) <= 2 for part in parts)
    assert all(map(np.array_equal, parts, partition.assign(task, 6, generator())))
    by_owner = build("partition", {**fields, "partitioner": "NaturalIdPartitioner", "partition_by": "owner"})
    assert all(len(set((part % 5).tolist())) == 1 for part in by_owner.assign(task, 5, generator()))
    with pytest.raises(BadInput, match="partition 'flower': 5 parts for 4 nodes"):
        by_owner.assign(task, 4, generator())
    even = build("partition", {"name": "flower", "partitioner": "IidPartitioner", "personal_fraction": 0.5})
    assert [len(part) for part in even.assign(task, 4, generator())] == [25] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partitioner": "DirichletPartitoner"}, r"did you mean 'DirichletPartitioner'\?.*accepted: Cont"),
        ({"partitioner": "ShardPartitioner"}, "partition 'ShardPartitioner': TypeError: .*partition_by"),
        ({"partitioner": "ShardPartitioner", "partition_by": "colour"}, "partition 'ShardPartitioner': "),
    ],
)
def test_bad_flower_partitioner_is_refused(given, message):
    pytest.importorskip("flwr_datasets")
    with pytest.raises(BadInput, match=message):
        build("partition", {"name": "flower", **given}).assign(BALANCED, 4, generator())


def test_missing_flower_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(
        BadInput, match="no package 'flwr-datasets'; accepted: after pip install flwr-datasets"
    ):
        build("partition", {"name": "flower", "partitioner": "IidPartitioner"}).assign(
            BALANCED, 4, generator()
        )
