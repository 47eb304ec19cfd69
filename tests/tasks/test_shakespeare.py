from __future__ import annotations

import os
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
from gossamer.tasks import Shakespeare, Task
from gossamer.tasks.leaf import CLASSES, LENGTH
from gossamer.tasks.leaf import TEXT_CHARACTERS as CHARACTERS
from gossamer.tasks.models import CharacterLSTM

ROOT = os.environ.get("GOSSAMER_DATA_ROOT")
real = pytest.mark.skipif(ROOT is None, reason="GOSSAMER_DATA_ROOT is not set: no real data sets")

SMALL = {"name": "lstm", "hidden": 6, "layers": 2, "embedding": 3}
WORDS = "to be or not to be, that is the question: whether 'tis nobler in the mind to suffer "


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "cache"))


def spoken(role: int, samples: int) -> list[tuple[str, str, str]]:
    """Windows of the text of a role, one every eight characters."""
    text = (WORDS[3 * role :] + WORDS) * 20
    name = f"play/ROLE {role}"
    return [(name, text[8 * k : 8 * k + LENGTH], text[8 * k + LENGTH]) for k in range(samples)]


def write(root: Path, rows: list[tuple[object, object, object]]) -> Path:
    folder = root / "hub" / "flwrlabs" / "shakespeare" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame(rows, schema=["character_id", "x", "y"], orient="row")
    frame.write_parquet(folder / "train-00000.parquet")
    return root


@pytest.fixture
def root(tmp_path, cache):
    return write(tmp_path, [*spoken(1, 30), *spoken(0, 20), *spoken(2, 10)])


def refused(root: Path) -> str:
    with pytest.raises(BadInput) as raised:
        Shakespeare().load(root, 1)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def text(numbers: torch.Tensor) -> str:
    return "".join(CHARACTERS[number] for number in numbers.tolist())


def test_samples_are_texts_and_next_characters_by_role(root):
    task = Shakespeare().load(root, 1)
    (x, y), (x_test, y_test) = task.train, task.test
    assert x.dtype == torch.uint8
    assert y.dtype == torch.int64
    # The first four fifths of each role are for training; owners are numbered by name.
    assert task.groups.tolist() == [1] * 24 + [0] * 16 + [2] * 8
    trained, tested = [], []
    for role, samples in ((1, 30), (0, 20), (2, 10)):
        rows = spoken(role, samples)
        trained += rows[: samples * 4 // 5]
        tested += rows[samples * 4 // 5 :]
    for (inputs, targets), rows in (((x, y), trained), ((x_test, y_test), tested)):
        assert [text(row) for row in inputs] == [row[1] for row in rows]
        assert text(targets) == "".join(row[2] for row in rows)


def test_data_are_the_same_from_cache_and_for_every_seed(root):
    one, again = (Shakespeare().load(root, seed) for seed in (1, 2))
    assert torch.equal(one.train[0], again.train[0])
    assert torch.equal(one.groups, again.groups)
    write(root, spoken(1, 10))
    assert len(Shakespeare().load(root, 1).train[0]) == 8


def test_unknown_characters_share_one_number_after_those_of_leaf(tmp_path, cache):
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert len(CLASSES) == len(set(CLASSES)) == 81
    strange = "$é\u00ff\u0100\U0001f600"
    write(tmp_path, [("a", CHARACTERS, "}"), ("a", strange + WORDS[: LENGTH - 5], "$")])
    task = Shakespeare().load(tmp_path, 1)
    assert task.train[0].tolist() == [list(range(80))]
    assert task.train[1].tolist() == [79]
    assert task.test[0][0, :5].tolist() == [80] * 5
    assert text(task.test[0][0, 5:]) == WORDS[: LENGTH - 5]
    assert task.test[1].tolist() == [80]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            ("a", "short", "x"),
            "column 'x', row 2 of data/train-00000.parquet: a text of 5 characters; accepted: 80",
        ),
        (
            ("a", WORDS[:LENGTH], ""),
            "column 'y', row 2 of data/train-00000.parquet: a text of 0 characters; accepted: 1",
        ),
        (("a", None, "x"), "column 'x': 1 values are missing (the first in row 2 of data/train-00000"),
        (
            (None, WORDS[:LENGTH], "x"),
            "column 'character_id': 1 values are missing (the first in row 2 of data/",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, cache, row, message):
    write(tmp_path, [*spoken(0, 1), row])
    error = refused(tmp_path)
    assert str(tmp_path) in error
    assert message in error


def test_missing_or_non_text_column_is_refused(tmp_path, cache):
    folder = write(tmp_path, spoken(0, 2)) / "hub" / "flwrlabs" / "shakespeare" / "data"
    pl.DataFrame({"x": [1, 2], "y": ["a", "b"]}).write_parquet(folder / "train-00000.parquet")
    assert "no column 'character_id'; accepted: the whole data set" in refused(tmp_path)
    write(tmp_path, [("a", 1, "b")])
    assert "column 'x': Int64; accepted: text" in refused(tmp_path)


def test_missing_data_root_or_bad_size_is_refused(tmp_path):
    assert "is not a folder" in refused(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="hidden"):
        build("task", {"name": "shakespeare", "model": {"name": "lstm", "hidden": 0}})


def test_parameter_count_matches_the_layers():
    def count(characters: int, embedding: int, hidden: int, layers: int) -> int:
        widths = [embedding, *[hidden] * layers]
        lstm = sum(4 * hidden * (width + hidden + 2) for width in widths[:-1])
        return characters * embedding + lstm + (hidden + 1) * characters

    for shape in ((81, 8, 256, 2), (5, 3, 4, 1)):
        characters, embedding, hidden, layers = shape
        model = CharacterLSTM(characters, embedding, hidden, layers)
        assert sum(p.numel() for p in model.parameters()) == count(*shape)
    assert count(81, 8, 256, 2) == 820_185


def test_model_matches_the_lstm_recurrence():
    """Two layers step by step, in double precision, with the gate order of torch."""
    torch.manual_seed(1)
    model = CharacterLSTM(7, 3, 4, 2)
    value = {name: v.detach().double() for name, v in model.named_parameters()}
    texts = torch.randint(7, (2, 9)).to(torch.uint8)
    steps = [value["embedding.weight"][texts[:, t].long()] for t in range(9)]
    for layer in (0, 1):
        h = c = torch.zeros(2, 4, dtype=torch.float64)
        outputs = []
        for x in steps:
            gates = x @ value[f"lstm.weight_ih_l{layer}"].T + value[f"lstm.bias_ih_l{layer}"]
            gates += h @ value[f"lstm.weight_hh_l{layer}"].T + value[f"lstm.bias_hh_l{layer}"]
            enter, forget, cell, leave = gates.chunk(4, 1)
            c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
            h = leave.sigmoid() * c.tanh()
            outputs.append(h)
        steps = outputs
    expected = steps[-1] @ value["head.0.weight"].T + value["head.0.bias"]
    torch.testing.assert_close(model(texts), expected.float(), atol=1e-6, rtol=1e-5)


def test_sequential_trainer_matches_autograd(root):
    """For alternating models, each often enough for its step to be recorded."""
    task = Shakespeare(model=SMALL).load(root, 1)
    trainer = SequentialTrainer(task, SGD(lr=0.1), Rows(Layout.of(task.model()).size))
    module = task.model()
    for turn in range(4):
        for seed in (1, 2):
            model, batch = initial_model(task.model, seed), torch.arange(turn, turn + 9)
            for field, parameter in zip(Layout.of(module).parameters, module.parameters(), strict=True):
                parameter.data.copy_(field.of(model.parameters))
            loss = F.cross_entropy(module(task.train[0][batch]), task.train[1][batch])
            expected = torch.autograd.grad(loss, list(module.parameters()))
            [gradient] = trainer.gradient([GradientJob(model, batch, 0)])
            torch.testing.assert_close(
                gradient, torch.cat([g.flatten() for g in expected]), atol=1e-7, rtol=1e-5
            )
            assert gradient.count_nonzero() > len(gradient) / 2


def test_evaluator_matches_the_module(root):
    task = Shakespeare(model=SMALL).load(root, 1)
    model = initial_model(task.model, 1)
    torch.manual_seed(1)
    module = task.model()
    with torch.no_grad():
        scores = module(task.test[0])
    evaluator = Evaluator(task, 1)
    for _ in range(3):
        metrics = evaluator.test(model)
        assert metrics["loss"] == pytest.approx(F.cross_entropy(scores, task.test[1]).item(), rel=1e-5)
        assert metrics["accuracy"] == pytest.approx((scores.argmax(1) == task.test[1]).double().mean().item())


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_the_batched_trainer_refuses_recurrent_layers(layer):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    data = torch.zeros(4, 5, 2), torch.zeros(4, 5, 3)
    task = Task(model=Model, train=data, test=data, loss=F.mse_loss)
    message = rf"engine.trainer: 'batched' can't take a step of {layer.__name__} layers .*; accepted: sequential, auto"
    with pytest.raises(BadInput, match=message):
        BatchedTrainer(task, SGD(lr=0.1), Rows(Layout.of(Model()).size))


def test_auto_trainer_is_sequential_and_learns(root, tmp_path):
    experiment = Experiment.of(
        {
            "nodes": 3,
            "data_root": str(root),
            "task": {"name": "shakespeare", "model": {"name": "lstm", "hidden": 16}},
            "partition": "natural",
            "topology": "complete",
            "algorithm": {"name": "d-psgd", "local_steps": 3},
            "optimizer": {"name": "adam", "lr": 0.03},
            "evaluation": {"every_rounds": 20},
            "stop": {"rounds": 20},
        }
    )
    run = gossamer.run(experiment, tmp_path / "runs")
    assert run.experiment["engine"]["trainer"] == "sequential"
    losses = run.metrics.filter(run.metrics["node"] == 0)["test_loss"].to_list()
    assert losses[0] == pytest.approx(np.log(81), rel=0.1)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.data
@real
def test_real_plays_have_expected_sizes():
    task = Shakespeare().load(Path(ROOT), 1)
    assert task.train[0].shape[1] == LENGTH
    assert len(task.test[0]) / (task.samples + len(task.test[0])) == pytest.approx(0.2, abs=0.001)
    roles = task.groups.unique()
    assert len(roles) >= 100
    assert task.train[1].bincount().argmax() == CHARACTERS.index(" ")
    # Almost all characters are in the table.
    assert (task.train[0] == 80).double().mean() < 1e-4
    assert task.model()(task.test[0][:2]).shape == (2, 81)
