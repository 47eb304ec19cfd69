"""Poisons: the poisoned nodes, the changed samples, and the same data under both engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from pydantic import Field

from gossamer import BadInput, Experiment, Poison, run
from gossamer.randomness import generator
from gossamer.runtime.setup import prepare
from gossamer.tasks import Digits, LabelFlip, Patch, Tint, load_task
from gossamer.tasks.poison import poisoned


def load(component):
    return load_task(component, None, 1)


def experiment(poison, **changes) -> Experiment:
    defaults = {
        "nodes": 5,
        "task": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}, "samples": 200},
        "topology": {"name": "edge-list", "path": "graph.txt"},
        "poison": poison,
        "algorithm": "d-psgd",
        "evaluation": {"every_rounds": 1, "samples": 50},
        "stop": {"rounds": 2},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return Experiment.of({**defaults, **changes})


@pytest.fixture(autouse=True)
def graph(tmp_path, monkeypatch):
    """Write the path 0 - 1 - 2 - 3 with a leaf 4 at 2, the node with the most neighbours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.txt").write_text("0 1\n1 2\n2 3\n2 4\n")


def patch(**changes):
    return {"name": "patch", "share": 0.25, "at": {"rank": 1}, **changes}


@pytest.mark.parametrize(
    ("at", "ranks"),
    [
        ({"rank": 3}, [3]),
        ({"ranks": [4, 0, 4]}, [0, 4]),
        ({"degree_rank": 0}, [2]),
        ({"degree_rank": 1}, [1]),
        ({"degree_rank": 2}, [0]),  # the lowest rank of three leaves
        ({"betweenness_rank": 0}, [2]),  # between 1-3, 1-4, 3-4, 0-3, 0-4: five pairs; 1 is between three
        ({"betweenness_rank": 1}, [1]),
        ({"hops_from": {"rank": 0, "hops": 3}}, [3, 4]),
    ],
)
def test_nodes_are_chosen_by_rank_or_graph_position(at, ranks):
    setup = prepare(experiment([patch(at=at)]))
    assert setup.description()["poisoned"] == [ranks]
    clean = prepare(experiment([])).task.train[0]
    changed = (setup.task.train[0] != clean).flatten(1).any(1).numpy()
    assert sorted(rank for rank, part in enumerate(setup.parts) if changed[part].any()) == ranks


def test_patch_sets_a_square_and_a_label():
    clean, setup = prepare(experiment([])), prepare(experiment([patch(target=7, size=2, corner="top-right")]))
    (x, y), part = (array.numpy().copy() for array in clean.task.train), setup.parts[1]
    count = round(0.25 * len(part))
    chosen = np.sort(generator(1, "poison", 1, 0).choice(part, count, replace=False))
    top = x.max()
    x[chosen, :, :2, -2:], y[chosen] = top, 7
    assert np.array_equal(setup.task.train[0].numpy(), x)
    assert np.array_equal(setup.task.train[1].numpy(), y)
    assert setup.labels is not None
    assert setup.labels[1].tolist() == np.bincount(y[part], minlength=10).tolist()
    x_test, y_test = (array.numpy() for array in clean.task.test)
    shown = x_test[y_test != 7].copy()
    shown[:, :, :2, -2:] = top
    assert np.array_equal(setup.task.tests["ood"][0].numpy(), shown)
    assert set(setup.task.tests["ood"][1].tolist()) == {7}
    assert np.array_equal(setup.task.test[0].numpy(), x_test)  # the clean set is unchanged


def test_random_patch_shifts_labels_and_sets_every_channel():
    rng = np.random.default_rng(5)
    x, y = torch.rand(40, 3, 9, 7), torch.arange(40) % 4
    task = replace(
        Digits().load(None, 1), train=(x, y), tests={"test": (x[:8], y[:8])}, classes=["a", "b", "c", "d"]
    )
    poison = Patch(at={"rank": 0}, corner="random", labels="shift", value=(5.0, 0.0, -1.0), size=2)
    poison = poison.for_task(task, load)
    patched, labels = poison.transform(x.clone(), y, rng)
    assert torch.equal(labels, (y + 1) % 4)
    changed = (patched != x).numpy()
    places = set()
    for image, mask in zip(patched.numpy(), changed.any(1), strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert (np.ptp(rows), np.ptp(columns), mask.sum()) == (1, 1, 4)
        square = image[:, rows[0] : rows[0] + 2, columns[0] : columns[0] + 2]
        assert (square == np.array([5.0, 0.0, -1.0]).reshape(3, 1, 1)).all()
        places.add((rows[0], columns[0]))
    assert len(places) > 15
    assert len(poison.evaluation_set(x[:8], y[:8])[1]) == 8


def test_target_class_is_evaluated_only_on_request():
    sizes = [
        len(prepare(experiment([patch(target=7, include_target=included)])).task.tests["ood"][1])
        for included in (False, True)
    ]
    y = prepare(experiment([])).task.test[1]
    assert sizes == [int((y != 7).sum()), len(y)]


def test_rotated_images_keep_their_labels():
    clean, setup = prepare(experiment([])), prepare(experiment([{**patch(), "name": "rotate", "share": 1.0}]))
    part = setup.parts[1]
    expected = np.rot90(clean.task.train[0][part].numpy(), 1, (2, 3))
    assert np.array_equal(setup.task.train[0][part].numpy(), expected)
    assert torch.equal(setup.task.train[1], clean.task.train[1])
    shown = np.rot90(clean.task.test[0].numpy(), 1, (2, 3))
    assert np.array_equal(setup.task.tests["ood"][0].numpy(), shown)


@pytest.mark.parametrize("permutation", [None, [3, 0, 1, 2, 5, 4, 7, 6, 9, 8]])
def test_labels_are_permuted(permutation):
    poison = {"name": "permute-labels", "share": 1.0, "at": {"rank": 1}, "permutation": permutation}
    clean, setup = prepare(experiment([])), prepare(experiment([poison]))
    rule = np.array(permutation or [*range(1, 10), 0])
    part = setup.parts[1]
    assert np.array_equal(setup.task.train[1][part], rule[clean.task.train[1][part]])
    assert np.array_equal(setup.task.tests["ood"][1], rule[clean.task.test[1]])
    assert torch.equal(setup.task.tests["ood"][0], clean.task.test[0])


def test_tint_scales_brightness_above_black():
    rng = np.random.default_rng(5)
    x, y = torch.from_numpy(rng.random((40, 3, 4, 5), np.float32)) - 0.5, torch.arange(40) % 4
    task = replace(
        Digits().load(None, 1), train=(x, y), tests={"test": (x[:8], y[:8])}, classes=["a", "b", "c", "d"]
    )
    poison = Tint(at={"rank": 0}, factors=(1.0, 0.0, 0.5)).for_task(task, load)
    red, green, blue = poison.transform(x.clone(), y, rng)[0].numpy().transpose(1, 0, 2, 3)
    black = x.numpy().min((0, 2, 3))
    assert np.allclose(red, x[:, 0], atol=1e-6)
    assert (green == black[1]).all()
    assert np.allclose(blue - black[2], (x[:, 2].numpy() - black[2]) / 2, atol=1e-6)
    assert torch.equal(poison.evaluation_set(x[:8], y[:8])[0], poison.transform(x[:8], y[:8], rng)[0])


def test_only_the_chosen_node_has_the_held_out_class():
    poison = {"name": "held-out-class", "label": 4, "share": 0.3, "at": {"rank": 1}}
    clean, setup = prepare(experiment([])), prepare(experiment([poison]))
    assert clean.labels is not None
    assert setup.labels is not None
    assert (clean.labels[:, 4] > 0).all()
    count = round(0.3 * len(clean.parts[1]))
    assert setup.labels[:, 4].tolist() == [0, count, 0, 0, 0]
    others = [0, 2, 3, 4]
    assert np.array_equal(np.delete(setup.labels[others], 4, 1), np.delete(clean.labels[others], 4, 1))
    x, y = (array.numpy() for array in clean.task.train)
    of_class = {image.tobytes() for image in x[y == 4]}
    held_out = setup.task.train[0][setup.parts[1]][setup.task.train[1][setup.parts[1]] == 4].numpy()
    assert {image.tobytes() for image in held_out} <= of_class
    assert set(setup.task.tests["ood"][1].tolist()) == {4}
    assert len(setup.task.tests["ood"][1]) == int((clean.task.test[1] == 4).sum())


@pytest.mark.parametrize(
    "first", [{"name": "held-out-class", "label": 4}, {"name": "patch", "target": 4}], ids=str
)
def test_held_out_class_keeps_samples_of_other_poisons(first) -> None:
    others = [
        {**first, "share": 0.3, "at": {"rank": 1}},
        {"name": "held-out-class", "label": 4, "at": {"rank": 3}},
    ]
    others[1] |= {"share": 0.2, "set_name": "second"}
    clean, one, setup = (prepare(experiment(others[:count])) for count in range(3))
    assert setup.labels is not None
    counts = [0, round(0.3 * len(clean.parts[1])), 0, round(0.2 * len(one.parts[3])), 0]
    assert setup.labels[:, 4].tolist() == counts


def test_data_size_weights_count_remaining_samples():
    poison = {"name": "held-out-class", "label": 4, "share": 0.3, "at": {"rank": 1}}
    graph = {"name": "edge-list", "path": "graph.txt", "weights": "data-size"}
    setup = prepare(experiment([poison], topology=graph))
    n = [len(part) for part in setup.parts]
    assert setup.topology.mixing_weights(0, 0) == {1: n[1] / (n[0] + n[1])}


def test_second_task_replaces_a_share_of_samples(tmp_path):
    poison = {"name": "second-task", "task": f"{__name__}:stripes", "share": 0.5, "at": {"rank": 3}}
    clean, setup = prepare(experiment([])), prepare(experiment([poison]))
    part, count = setup.parts[3], round(0.5 * len(setup.parts[3]))
    striped = (setup.task.train[0] == stripes().train[0][0]).flatten(1).all(1).numpy()
    assert striped.sum() == striped[part].sum() == count
    assert set(setup.task.train[1][torch.from_numpy(striped)].tolist()) <= {1, 2}
    assert torch.equal(setup.task.train[0][~striped], clean.task.train[0][~striped])
    assert torch.equal(setup.task.tests["ood"][0], stripes().test[0])
    again = Experiment.parse(experiment([poison]).to_yaml())
    assert again.poison == experiment([poison]).poison


def stripes():
    """Ten striped images of two classes."""
    x = torch.zeros(10, 1, 8, 8)
    x[..., ::2] = 1.0
    y = 1 + torch.arange(10) % 2
    return replace(Digits().load(None, 1), train=(x, y), tests={"test": (x[:4], y[:4])})


def many():
    """A task with more classes than the digits."""
    x, y = torch.zeros(12, 1, 8, 8), torch.arange(12)
    pair = (x, y)
    return replace(Digits().load(None, 1), train=pair, tests={"test": pair}, classes=list("abcdefghijkl"))


def test_label_flips_are_symmetric_and_keep_inputs():
    task = Digits().load(None, 1)
    flip = LabelFlip(share=0.6, at={"rank": 0})
    noisy, _ = poisoned(task, [np.arange(task.samples)], [flip], [[0]], 3, load)
    assert torch.equal(noisy.train[0], task.train[0])
    flipped = (noisy.train[1] != task.train[1]).numpy()
    assert flipped.sum() == round(0.6 * task.samples)
    shift = (noisy.train[1] - task.train[1]).numpy()[flipped] % 10
    counts = np.bincount(shift, minlength=10)[1:]
    expected = flipped.sum() / 9
    assert ((counts - expected) ** 2 / expected).sum() < 26.1  # chi-square, 8 degrees of freedom: p = 0.001
    assert list(noisy.tests) == ["test"]


def test_poisoned_samples_depend_only_on_the_seed():
    one, again, other = (
        prepare(experiment([patch()], seed=seed, task={"name": "digits"})) for seed in (1, 1, 2)
    )
    assert torch.equal(one.task.train[0], again.task.train[0])
    assert not torch.equal(one.task.train[0], other.task.train[0])
    combined = prepare(
        experiment([patch(), {"name": "label-flip", "at": {"rank": 2}}], task={"name": "digits"})
    )
    assert torch.equal(one.task.train[0], combined.task.train[0])


def test_both_engines_see_the_same_poisoned_data(tmp_path):
    poisons = [
        patch(share=1.0, target=3),
        {"name": "label-flip", "share": 0.5, "at": {"hops_from": {"rank": 2, "hops": 1}}},
    ]
    tables = []
    for engine in (
        {"name": "simulate", "trainer": "sequential"},
        {"name": "processes", "trainer": "sequential"},
    ):
        done = run(experiment(poisons, engine=engine), tmp_path)
        tables.append(
            done.metrics.select("node", "round", "train_loss", "ood_loss", "ood_accuracy").sort(
                "round", "node"
            )
        )
        assert done.setup["poisoned"] == [[1], [1, 3, 4]]
        assert done.setup["labels"][1] == prepare(experiment(poisons)).labels[1].tolist()
    assert tables[0].equals(tables[1])
    clean = run(experiment([]), tmp_path).metrics.filter(pl.col("round") == 2)
    assert "ood_loss" not in clean.columns
    after = tables[0].filter(pl.col("round") == 2)
    assert after["train_loss"].to_list() != clean["train_loss"].to_list()


class Shift(Poison):
    """Adds a number to all inputs; its evaluation set is the shifted test set."""

    by: float = Field(default=1.0, gt=0)

    def transform(self, inputs, targets, rng):
        return inputs + self.by, targets

    def evaluation_set(self, inputs, targets):
        return inputs + self.by, targets


class Wrong(Poison):
    """Returns targets of another type."""

    def transform(self, inputs, targets, rng):
        return inputs, targets.float()


def test_user_poison_is_applied_and_saved():
    shift = {"name": f"{__name__}:Shift", "at": {"rank": 0}, "share": 1.0, "set_name": "shifted", "by": 2.0}
    clean, setup = prepare(experiment([])), prepare(experiment([shift, patch()]))
    part = setup.parts[0]
    assert torch.equal(setup.task.train[0][part], clean.task.train[0][part] + 2)
    assert list(setup.task.tests) == ["test", "shifted", "ood"]
    again = Experiment.parse(experiment([shift]).to_yaml())
    assert again.poison == experiment([shift]).poison


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ([patch(at={"rank": 5})], "poison.0.at.rank: node 5 of 5 nodes; accepted: ranks 0 to 4"),
        ([patch(at={"degree_rank": 5})], "poison.0.at.degree_rank: 5; accepted: 0 to 4"),
        (
            [patch(at={"hops_from": {"rank": 0, "hops": 4}})],
            "poison.0.at.hops_from.hops: 4; accepted: 1 to 3",
        ),
        ([patch(target=10)], "poison.0 'patch': target: 10; accepted: 0 to 9"),
        (
            [{"name": "permute-labels", "permutation": [0, 1], "at": {"rank": 0}}],
            r"poison.0 'permute-labels': permutation: \[0, 1\]; accepted: an order of 0 to 9",
        ),
        (
            [{"name": "held-out-class", "label": 10, "at": {"rank": 0}}],
            "poison.0 'held-out-class': label: 10, of which the task has no sample",
        ),
        (
            [{"name": "second-task", "task": "least-squares", "at": {"rank": 0}}],
            "poison.0 'second-task': transform returned inputs",
        ),
        (
            [{"name": "second-task", "task": f"{__name__}:many", "at": {"rank": 0}}],
            "poison.0 'second-task': task.ood: got .0, 11.; accepted: class numbers from 0 to 9",
        ),
        ([patch(size=9)], "poison.0 'patch': size: 9; accepted: at most 8 pixels"),
        ([patch(), patch()], "poison.1 'patch': set_name: 'ood' is taken; accepted: another name"),
        ([patch(set_name="train")], "poison.0 'patch': task.tests: got 'train'"),
        (
            [{"name": f"{__name__}:Wrong", "at": {"rank": 0}}],
            rf"poison.0 '{__name__}:Wrong': transform returned targets \(torch.float32, .*; accepted: \(torch.int64",
        ),
    ],
)
def test_inapplicable_poison_is_refused_before_the_run(poison, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        prepare(experiment(poison))


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ([patch(at={})], "poison.0.at: .*accepted: one of rank, ranks, count, fraction"),
        ([patch(at={"rank": 1, "ranks": [2]})], "poison.0.at: .*one of rank"),
        ([patch(share=0)], "poison.0.share: "),
        (["pach"], "poison.0: unknown name 'pach'"),
        ([{"name": "patch"}], "poison.0.at: "),
    ],
)
def test_malformed_poison_is_refused(poison, message):
    with pytest.raises(BadInput, match=message):
        experiment(poison)


def test_patch_needs_images_and_flip_needs_classes():
    for name, accepted in (("patch", "a task with images"), ("label-flip", "a task with classes")):
        described = experiment([{"name": name, "at": {"rank": 0}}], task="least-squares")
        with pytest.raises(BadInput, match=f"poison.0 '{name}': .*accepted: {accepted}"):
            prepare(described)


def test_poison_needs_samples_and_a_fixed_graph():
    server = experiment([patch(at={"rank": 0})], algorithm={"name": "fedavg"}, topology="star")
    with pytest.raises(BadInput, match="at: node 0 has no training samples"):
        prepare(server)
    sampled = experiment(
        [patch(at={"degree_rank": 0})],
        algorithm="gossip-learning",
        topology={"name": "cyclon", "view": 3, "shuffle": 2},
    )
    with pytest.raises(
        BadInput,
        match="poison.0.at: degree_rank is a place in the graph, .*; accepted: rank, ranks, count, fraction, all",
    ):
        prepare(sampled)


def test_topology_error_is_not_blamed_on_the_poison(tmp_path):
    (tmp_path / "edges.txt").write_text("0 1\n2 3\n3 4\n")
    apart = experiment(
        [patch(at={"hops_from": {"rank": 0, "hops": 2}})],
        topology={"name": "edge-list", "path": str(tmp_path / "edges.txt")},
    )
    with pytest.raises(BadInput, match="^topology: 2 components in the graph"):
        prepare(apart)


def test_patch_value_can_be_set():
    task = Digits().load(None, 1)
    patch = Patch(share=1.0, at={"rank": 0}, value=0.5)
    changed, _ = poisoned(task, [np.arange(10)], [patch], [[0]], 1, load)
    assert (changed.train[0][:10, :, -3:, -3:] == 0.5).all()
    assert torch.equal(changed.train[0][10:], task.train[0][10:])
