"""Several evaluation sets: rows, summaries and targets of each, under both engines."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import nn

from gossamer import Algorithm, BadInput, Experiment, Sweep, Task, run, run_sweep
from gossamer.results.finals import final_summary
from gossamer.results.tidy import metric_names
from gossamer.tasks import accuracy
from synthetic_run import summary

NODES = 3


def blobs(sets: int = 2) -> Task:
    """Two classes on a line; the set ``ood`` has them swapped."""
    rng = np.random.default_rng(1)

    def draw(samples: int, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = rng.integers(0, 2, samples)
        x = sign * (2 * y - 1)[:, None] + 0.1 * rng.standard_normal((samples, 1))
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    train, test, ood = draw(60, 1), draw(40, 1), draw(50, -1)
    return Task(
        model=lambda: nn.Linear(1, 2),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        tests={"ood": ood} if sets > 1 else None,
    )


class Judge(Algorithm):
    """Trains, and evaluates its model on each set."""

    async def run(self, node):
        async for _ in node.rounds():
            await node.train(2)
            metrics = await node.evaluate(on="ood")
            node.record(own_ood=metrics["accuracy"])


class Lost(Algorithm):
    """Evaluates on a set that does not exist."""

    async def run(self, node):
        async for _ in node.rounds():
            await node.evaluate(on="od")


def experiment(**changes) -> Experiment:
    defaults = {
        "nodes": NODES,
        "task": f"{__name__}:blobs",
        "algorithm": "d-psgd",
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 0.5},
        "evaluation": {"every_rounds": 2, "samples": 30},
        "stop": {"rounds": 4},
        "engine": {"name": "simulate", "trainer": "sequential"},
    }
    return Experiment.of({**defaults, **changes})


COLUMNS = ["test_loss", "test_accuracy", "ood_loss", "ood_accuracy"]


@pytest.mark.parametrize("nodes", ["all", "average"])
def test_both_engines_record_all_sets_with_the_same_bits(tmp_path, nodes):
    tables = []
    for engine in (
        {"name": "simulate", "trainer": "sequential"},
        {"name": "processes", "trainer": "sequential"},
    ):
        done = run(
            experiment(engine=engine, evaluation={"every_rounds": 2, "nodes": nodes, "samples": 30}), tmp_path
        )
        tables.append(done.metrics.select("node", "round", *COLUMNS).sort("round", "node"))
    assert tables[0].equals(tables[1])
    recorded = tables[0].drop_nulls()
    assert set(recorded["node"]) == ({-1} if nodes == "average" else set(range(NODES)))
    end = recorded.filter(pl.col("round") == 4)
    assert (end["test_accuracy"] == 1).all()
    assert (end["ood_accuracy"] == 0).all()


def test_columns_of_main_set_do_not_depend_on_further_sets(tmp_path):
    many, one = (
        run(experiment(task={"name": f"{__name__}:blobs", "sets": sets}), tmp_path).metrics for sets in (2, 1)
    )
    assert "ood_loss" not in one.columns
    kept = [name for name in one.columns if name != "wall_s"]
    assert many.select(kept).equals(one.select(kept))
    assert [name for name in many.columns if name not in one.columns] == ["ood_accuracy", "ood_loss"]


def test_an_algorithm_evaluates_on_a_set_by_name(tmp_path):
    done = run(experiment(algorithm=f"{__name__}:Judge"), tmp_path)
    assert done.metrics.filter(pl.col("round") == 4)["own_ood"].max() < 0.5
    with pytest.raises(Exception, match=r"evaluate\(on='od'\): accepted: test, ood, train"):
        run(experiment(algorithm=f"{__name__}:Lost"), tmp_path)


def test_targets_summaries_and_tables_cover_every_set(tmp_path, cli):
    falling = experiment(stop={"rounds": 40, "target": {"metric": "ood_loss", "value": 0.2}})
    assert run(falling, tmp_path).metrics["round"].max() == 40  # on this set, the loss only rises
    rising = experiment(stop={"rounds": 40, "target": {"metric": "test_accuracy", "value": 0.9}})
    done = run(rising, tmp_path / "one")
    assert done.metrics["round"].max() < 40
    assert metric_names(done)[:4] == ["test_accuracy", "ood_accuracy", "test_loss", "ood_loss"]
    assert final_summary(done).metrics["ood_accuracy"].mean == 0
    assert summary(done, "ood_accuracy")["count"].to_list()[-1] == NODES
    code, out, _ = cli("report", str(done.path), "--time-to", "ood_loss=100", "--json")
    reached = [row["known"] for row in json.loads(out)["table"] if row["measure"].startswith("time_s to")]
    assert (code, reached) == (0, [1])
    with pytest.raises(
        BadInput, match="stop.target.metric: got 'odd_loss'; accepted: .*ood_accuracy, ood_loss"
    ):
        run(experiment(stop={"rounds": 4, "target": {"metric": "odd_loss", "value": 1}}), tmp_path)


def test_a_sweep_has_the_columns_of_every_set(tmp_path):
    base = experiment().model_dump(mode="json")
    sweep = Sweep.of(
        {"name": "sets", "base": {k: v for k, v in base.items() if k not in ("name", "seed")}}, out=tmp_path
    )
    run_sweep(sweep, jobs=1)
    assert {"ood_accuracy", "best_ood_accuracy", "ood_loss"} <= set(sweep.results().columns)
    assert sweep.summary("ood_accuracy")["mean"].to_list() == [0]
