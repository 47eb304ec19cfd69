from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import gossamer
from gossamer import Experiment
from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.learning.evaluate import Evaluator
from gossamer.learning.optimizer import SGD
from gossamer.learning.parameters import Layout, initial_model
from gossamer.learning.rows import Rows
from gossamer.learning.trainer import BatchedTrainer, GradientJob, SequentialTrainer
from gossamer.messages.tags import Model
from gossamer.randomness import generator
from gossamer.tasks import MovieLens, Natural, Task
from gossamer.tasks.models import MatrixFactorization

ROOT = os.environ.get("GOSSAMER_DATA_ROOT")
real = pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no real data sets")

SMALL = "movielens/ml-latest-small/ratings.csv"
HUNDRED = "movielens/ml-100k/u.data"
HEADER = "userId,movieId,rating,timestamp"


def factors(**parameters: object) -> dict[str, object]:
    return {"name": "matrix-factorization", **parameters}


def write(root: Path, text: str | bytes, file: str = SMALL) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def drawn(users: int = 12, films: int = 30, per_user: int = 10) -> list[tuple[int, int, float]]:
    """Ratings from the mildness of users and the quality of films, with gaps between ids, in random order."""
    rng = np.random.default_rng(1)
    mildness, quality = rng.normal(size=users), rng.normal(size=films)
    ratings = []
    for user in range(users):
        for film in rng.choice(films, per_user, replace=False):
            stars = np.clip(np.round(2 * (3 + mildness[user] + quality[film])) / 2, 0.5, 5)
            ratings.append((3 * user + 2, 7 * int(film) + 1, float(stars)))
    rng.shuffle(ratings)
    return [(int(user), int(film), float(stars)) for user, film, stars in ratings]


@pytest.fixture
def root(tmp_path):
    lines = [HEADER, *(f"{user},{film},{stars},964982703" for user, film, stars in drawn())]
    write(tmp_path, "\n".join(lines) + "\n")
    return tmp_path


def refused(root: Path | None, release: str = "latest-small") -> str:
    with pytest.raises(BadInput) as raised:
        MovieLens(release=release).load(root, 1)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_users_and_films_are_numbered_in_order_of_ids(root):
    task = MovieLens().load(root, 1)
    rated = drawn()
    users, films = sorted({user for user, _, _ in rated}), sorted({film for _, film, _ in rated})
    (x, y), (x_test, y_test) = task.train, task.test
    assert x.dtype == torch.int64
    assert y.dtype == torch.float32
    numbered = [
        (users[user], films[film], stars)
        for pairs, targets in ((x, y), (x_test, y_test))
        for (user, film), stars in zip(pairs.tolist(), targets.tolist(), strict=True)
    ]
    assert sorted(numbered) == sorted(rated)
    assert [users[user] for user in x[:, 0].tolist()] == task.groups.tolist()
    assert task.labels() is None


def test_ratings_of_users_are_split_independently_of_seed(root):
    one, other = (MovieLens().load(root, seed) for seed in (1, 2))
    assert one.train[0][:, 0].bincount().tolist() == [7] * 12
    assert one.test[0][:, 0].bincount().tolist() == [3] * 12
    assert torch.equal(one.train[0], other.train[0])
    half = MovieLens(train_fraction=0.5).load(root, 1)
    assert half.train[0][:, 0].bincount().tolist() == [5] * 12


def test_release_100k_is_read(tmp_path):
    write(
        tmp_path, "196\t242\t3\t881250949\n186\t302\t5\t891717742\n196\t302\t1\t1\n186\t242\t2\t1\n", HUNDRED
    )
    task = MovieLens(release="100k").load(tmp_path, 1)
    pairs = torch.cat([task.train[0], task.test[0]]).tolist()
    assert sorted(pairs) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    stars = {
        tuple(pair): float(star)
        for x, y in (task.train, task.test)
        for pair, star in zip(x.tolist(), y, strict=True)
    }
    assert stars == {(1, 0): 3.0, (0, 1): 5.0, (1, 1): 1.0, (0, 0): 2.0}


def test_columns_are_found_by_name_with_windows_line_ends(tmp_path):
    write(tmp_path, "rating,userId,movieId\r\n4.0,1,10\r\n0.5,1,20\r\n")
    task = MovieLens().load(tmp_path, 1)
    assert sorted(torch.cat([task.train[1], task.test[1]]).tolist()) == [0.5, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n1,1,4.0,5\n1,2,good,5\n", r"line 3 \(userId 1, movieId 2, rating good\)"),
        (f"{HEADER}\n1,1,4.0,5\n1,2\n", "accepted: GroupLens's file, with whole ids and ratings"),
        (f"{HEADER}\n1,1,4.3,5\n", "ratings from 0.5 to 5 in steps of 0.5"),
        (f"{HEADER}\n1,1,nan,5\n", "ratings from 0.5 to 5"),
        (f"{HEADER}\n1,1,0.0,5\n", "ratings from 0.5 to 5"),
        (f"{HEADER}\n1,1,5.5,5\n", "ratings from 0.5 to 5"),
        (f"{HEADER}\n1,1.5,5.0,5\n", r"line 2 \(userId 1, movieId 1.5, rating 5.0\)"),
        ("userId,movieId,stars\n1,1,4.0\n", "can't be read .*rating"),
        (f"{HEADER}\n", "no ratings"),
        ("", "can't be read"),
        (b"userId,movieId,rating\n1,1,\xff\n", "can't be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = write(tmp_path, text)
    error = refused(tmp_path)
    assert error.startswith(f"data_root: {path}")
    assert re.search(message, error)


def test_a_bad_line_of_100k_is_named(tmp_path):
    path = write(tmp_path, "1\t1\t4\t5\n1\t2\t3.5\t5\n", HUNDRED)
    error = refused(tmp_path, "100k")
    assert error.startswith(f"data_root: {path}: line 2 (userId 1, movieId 2, rating 3.5); accepted: ")
    assert error.endswith("ratings from 1 to 5 in steps of 1")


def test_missing_file_names_its_download_address(tmp_path):
    for root in (None, tmp_path, tmp_path / "nowhere"):
        error = refused(root)
        assert error.startswith(f"data_root: {root or 'null'}")
        assert SMALL in error
        assert "https://files.grouplens.org/datasets/movielens/ml-latest-small.zip" in error
    assert "movielens/ml-100k.zip" in refused(tmp_path, "100k")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"release": "1m"}, "release"),
        ({"model": factors(dimensions=0)}, "dimensions"),
        ({"train_fraction": 1.0}, "train_fraction"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(BadInput, match=message):
        build("task", {"name": "movielens", **parameters})


@pytest.mark.parametrize("mean", [None, 3.4])
def test_prediction_is_product_of_factors_plus_biases(mean):
    torch.manual_seed(1)
    model = MatrixFactorization(5, 7, mean or 0.0, 3, biased=mean is not None)
    assert sum(p.numel() for p in model.parameters()) == 12 * 3 + (0 if mean is None else 12)
    for factors in (model.user_factors.weight, model.item_factors.weight):
        assert factors.abs().max() <= 0.05
    pairs = torch.tensor([[0, 6], [4, 0], [4, 6], [4, 6]])
    if mean is not None:
        torch.testing.assert_close(model(pairs), torch.full((4,), mean), atol=0.01, rtol=0)
        torch.nn.init.normal_(model.user_bias.weight)
        torch.nn.init.normal_(model.item_bias.weight)
    values = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    expected = []
    for user, item in pairs.tolist():
        rating = values["user_factors.weight"][user] @ values["item_factors.weight"][item]
        if mean is not None:
            rating += mean + values["user_bias.weight"][user, 0] + values["item_bias.weight"][item, 0]
        expected.append(rating)
    np.testing.assert_allclose(model(pairs).detach().numpy(), expected, rtol=1e-5, atol=1e-7)


def test_factors_are_initialized_uniformly():
    torch.manual_seed(2)
    weight = MatrixFactorization(1000, 10, 0.0, biased=False).user_factors.weight
    # The uniform distribution has standard deviation 0.05 / sqrt(3); the tolerance is five standard errors.
    assert weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert abs(weight.mean().item()) < 0.001


def wild(task: Task, seed: int = 3) -> Model:
    """A model whose ratings are far outside the scale."""
    model = initial_model(task.model, seed)
    return Model(30 * model.parameters, model.buffers)


@pytest.mark.parametrize("biased", [True, False])
def test_metrics_are_over_all_test_ratings(tmp_path, biased):
    """Over several batches, the last one smaller; roots are of the mean over all ratings."""
    lines = [HEADER, *(f"{u},{f},{s},1" for u, f, s in drawn(users=40, films=50, per_user=20))]
    write(tmp_path, "\n".join(lines))
    task = MovieLens(model=factors(biased=biased)).load(tmp_path, 1)
    pairs, stars = task.test
    assert len(stars) == 240
    model = wild(task)
    module = task.model()
    for field, parameter in zip(Layout.of(module).parameters, module.parameters(), strict=True):
        parameter.data.copy_(field.of(model.parameters))
    raw = module(pairs).detach().double().numpy()
    clipped, targets = np.clip(raw, 0.5, 5), stars.double().numpy()
    assert np.abs(raw - clipped).max() > 1
    metrics = Evaluator(task, 1).test(model)
    assert metrics == pytest.approx(
        {
            "loss": np.mean((raw - targets) ** 2),
            "rmse": np.sqrt(np.mean((clipped - targets) ** 2)),
            "mae": np.mean(np.abs(clipped - targets)),
            "rmse_unclipped": np.sqrt(np.mean((raw - targets) ** 2)),
            "accuracy": np.mean(np.round(2 * clipped) / 2 == targets),
        },
        rel=1e-5,
    )
    assert 0 < metrics["accuracy"] < 1


def gradient(task: Task, parameters: torch.Tensor, batch: torch.Tensor) -> np.ndarray:
    """The gradient of the mean squared error, in closed form."""
    module = task.model()
    fields = Layout.of(module).parameters
    value = {field.name: field.of(parameters).double().numpy() for field in fields}
    total = {name: np.zeros_like(array) for name, array in value.items()}
    for (user, film), star in zip(task.train[0][batch].tolist(), task.train[1][batch].tolist(), strict=True):
        p, q = value["user_factors.weight"][user], value["item_factors.weight"][film]
        error = p @ q - star
        if module.biased:
            error += module.mean + value["user_bias.weight"][user, 0] + value["item_bias.weight"][film, 0]
        error *= 2 / len(batch)
        total["user_factors.weight"][user] += error * q
        total["item_factors.weight"][film] += error * p
        if module.biased:
            total["user_bias.weight"][user, 0] += error
            total["item_bias.weight"][film, 0] += error
    return np.concatenate([total[field.name].ravel() for field in fields])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [SequentialTrainer, BatchedTrainer])
def test_both_trainers_match_closed_form_gradient(root, kind, biased):
    """With users and films that occur more than once in a batch, as in whole shards of a user."""
    task = MovieLens(model=factors(biased=biased, dimensions=4)).load(root, 1)
    models = [initial_model(task.model, seed) for seed in range(4)]
    trainer = kind(task, SGD(lr=0.1), Rows(len(models[0].parameters)))
    rng = np.random.default_rng(0)
    for _ in range(3):
        batches = [torch.from_numpy(rng.choice(84, 20, replace=False)) for _ in models]
        jobs = [GradientJob(model, batch, 0) for model, batch in zip(models, batches, strict=True)]
        for computed, model, batch in zip(trainer.gradient(jobs), models, batches, strict=True):
            expected = gradient(task, model.parameters, batch)
            np.testing.assert_allclose(computed.numpy(), expected, rtol=1e-4, atol=1e-6)
            assert np.count_nonzero(expected) < len(expected)


def played(root: Path, out: Path, **changes: object) -> dict[int, float]:
    """The mean test RMSE of the nodes, by round."""
    settings = {
        "nodes": 4,
        "data_root": str(root),
        "task": {"name": "movielens", "model": factors(dimensions=4)},
        "partition": "natural",
        "topology": "ring",
        "algorithm": {"name": "d-psgd", "local_steps": 5},
        "optimizer": {"name": "sgd", "lr": 0.3},
        "evaluation": {"every_rounds": 10},
        "stop": {"rounds": 30},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    run = gossamer.run(Experiment.of({**settings, **changes}), out)
    rows = run.metrics.filter(pl.col("node") >= 0)
    return dict(rows.group_by("round").agg(pl.col("test_rmse").mean()).iter_rows())


@pytest.mark.parametrize("trainer", ["sequential", "batched"])
def test_run_with_users_as_owners_learns(root, tmp_path, trainer):
    rmse = played(root, tmp_path / "runs", engine={"name": "simulate", "trainer": trainer})
    assert sorted(rmse) == [0, 10, 20, 30]
    assert rmse[30] < 0.95 * rmse[0]


def test_rmse_target_is_met_from_above(root, tmp_path):
    (start,) = played(
        root, tmp_path / "runs", stop={"rounds": 1, "target": {"metric": "test_rmse", "value": 9}}
    ).values()
    rmse = played(
        root, tmp_path / "runs", stop={"rounds": 30, "target": {"metric": "test_rmse", "value": 0.99 * start}}
    )
    assert rmse[max(rmse)] <= 0.99 * start < rmse[0]


@pytest.mark.data
@real
def test_real_ratings_have_published_sizes():
    task = MovieLens(model=factors(biased=False)).load(Path(ROOT), 1)
    assert sum(p.numel() for p in task.model().parameters()) == 206_680
    assert len(task.train[0]) + len(task.test[0]) == 100_836
    assert task.samples / 100_836 == pytest.approx(0.7, abs=1e-3)
    assert len(task.groups.unique()) == 610
    assert sum(p.numel() for p in MovieLens().load(Path(ROOT), 1).model().parameters()) == 217_014
    parts = Natural().assign(task, 60, generator(1, "partition"))
    owners = [set(task.groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 610
    assert {len(some) for some in owners} == {10, 11}


@pytest.mark.data
@real
def test_real_ratings_are_predicted_better_than_by_a_constant(tmp_path):
    stars = MovieLens().load(Path(ROOT), 1).test[1]
    constant = stars.std(correction=0).item()
    assert constant == pytest.approx(1.05, abs=0.01)
    rmse = played(
        Path(ROOT),
        tmp_path,
        task={"name": "movielens"},
        algorithm={"name": "d-psgd", "local_steps": 50},
        optimizer={"name": "sgd", "lr": 2},
        batch_size=64,
        evaluation={"every_rounds": 8, "samples": None},
        stop={"rounds": 8},
    )
    assert rmse[8] < 0.93 < constant


def test_the_loss_is_torchs_mean_squared_error(root):
    outputs, targets = torch.tensor([9.0, -1.0, 3.0]), torch.tensor([5.0, 0.5, 3.5])
    assert MovieLens().load(root, 1).loss(outputs, targets) == F.mse_loss(outputs, targets)
