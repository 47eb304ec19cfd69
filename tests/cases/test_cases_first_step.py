"""Users' cases O01, O02, O03 and O10: the first step, an evaluation, an encoding and a mixing are tried before a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gossamer
from gossamer import BadInput, Codec, Experiment, Task
from gossamer.learning import Aggregator
from gossamer.learning.optimizer import SGD
from gossamer.node.setup import Setup
from gossamer.runtime.setup import prepare
from gossamer.tasks import OverSet

BASE: dict[str, Any] = {
    "nodes": 4,
    "task": {"name": "digits", "model": "logistic", "samples": 400},
    "topology": "ring",
    "algorithm": "d-psgd",
    "batch_size": 8,
    "optimizer": {"name": "sgd", "lr": 0.05},
    "evaluation": {"every_rounds": 1, "samples": 50},
    "stop": {"rounds": 2},
}


def described(**fields: Any) -> Experiment:
    return Experiment.of({**BASE, **fields})


def digits(model: str, **fields: Any) -> Experiment:
    return described(task={**BASE["task"], "model": f"{__name__}:{model}"}, **fields)


def refused(experiment: Experiment) -> str:
    """The one line with which an experiment is refused."""
    with pytest.raises(BadInput) as caught:
        prepare(experiment)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- O01: lazy layers, and code that is called before the run


def lazy_model(shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(classes))


def lazy_conv(shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes)
    )


def lazy_buffer(shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.LazyBatchNorm1d(affine=False))


def unreached(shape: Any, classes: int) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    module[1].spare = nn.LazyLinear(3)
    return module


@pytest.mark.parametrize(
    ("model", "parameters", "buffers"),
    # 64 x 16 + 16 and 16 x 10 + 10; 4 x 9 + 4, two of 4 channels and 144 x 10 + 10; 64 x 10 + 10. A batch norm has its means,
    # variances and a counter.
    [("lazy_model", 1210, 0), ("lazy_conv", 1498, 9), ("lazy_buffer", 650, 21)],
)
def test_lazy_layers_get_their_shapes(model: str, parameters: int, buffers: int) -> None:
    setup = prepare(digits(model))
    assert (setup.layout.size, setup.layout.buffer_size) == (parameters, buffers)
    for name in {field.name.split(".")[0] for field in setup.layout.buffers}:
        [variance] = [f for f in setup.layout.buffers if f.name == f"{name}.running_var"]
        assert (
            variance.of(setup.initial(0).buffers) == 1
        ).all()  # the call that gave the shapes did not count


def test_lazy_models_train_alike_in_both_engines_and_are_read_again(tmp_path: Path) -> None:
    engine = {"name": "simulate", "trainer": "sequential"}
    one = gossamer.run(digits("lazy_model", engine=engine), tmp_path)
    other = gossamer.run(
        digits("lazy_model", engine={"name": "processes", "trainer": "sequential"}), tmp_path
    )
    assert one.status == other.status == "done"
    assert one.parameters is not None
    assert other.parameters is not None
    assert torch.equal(one.parameters, other.parameters)
    assert one.module()[3].weight.shape == (10, 16)


def test_lazy_layer_that_no_call_reaches_is_refused() -> None:
    assert refused(digits("unreached")).startswith(
        "task.model: '1.spare.weight' has no shape yet, as in a lazy layer"
    )


class Plain(nn.Module):
    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.l = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.l(x.flatten(1))
        return outputs


class StateDict(Plain):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise KeyError("mine")


class Eval(Plain):
    def eval(self) -> Any:
        raise ZeroDivisionError


class Train(Plain):
    def train(self, mode: bool = True) -> Any:
        if mode:
            raise ZeroDivisionError
        return super().train(mode)


class OnlyTraining(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise OverflowError("too much")
        return super().forward(x)


class OnlyEvaluation(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise OverflowError("too much")
        return super().forward(x)


calls: list[int] = []


def third_call(shape: Any, classes: int) -> nn.Module:
    calls.append(1)
    if len(calls) >= 3:
        raise OSError("third call")
    return Plain(shape, classes)


def other_shapes(shape: Any, classes: int) -> nn.Module:
    calls.append(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8 * len(calls)), nn.Linear(8 * len(calls), classes))


ONE = Plain((1, 8, 8), 10)


def twice(shape: Any, classes: int) -> nn.Module:
    return ONE


def meta(shape: Any, classes: int) -> nn.Module:
    with torch.device("meta"):
        return Plain(shape, classes)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            "twice",
            "returns the same parameters twice; accepted: a function that returns a fresh nn.Module at each call",
        ),
        ("meta", "NotImplementedError: Cannot copy out of meta tensor"),
        ("StateDict", "KeyError: 'mine' (test_cases_first_step.py, line "),
        ("Eval", "ZeroDivisionError (test_cases_first_step.py, line "),
        ("Train", "ZeroDivisionError (test_cases_first_step.py, line "),
        ("third_call", "OSError: third call (test_cases_first_step.py, line "),
        ("other_shapes", "a later call returns a module with other parameters or buffers"),
        ("OnlyTraining", "of torch.float32: OverflowError: too much (test_cases_first_step.py, line "),
        (
            "OnlyEvaluation",
            "given inputs (24, 1, 8, 8) of torch.float32: OverflowError: too much (test_cases_first_step.py, ",
        ),
    ],
)
@pytest.mark.parametrize("trainer", ["auto", "sequential"])
def test_users_code_that_fails_before_the_run_is_named(model: str, problem: str, trainer: str) -> None:
    calls.clear()
    line = refused(digits(model, engine={"name": "simulate", "trainer": trainer}))
    assert line.startswith("task.model")
    assert problem in line
    assert "; accepted: " in line


# --- O02: several outputs, random numbers, control flow


X, Y = load_digits(return_X_y=True)
IMAGES = torch.tensor(X, dtype=torch.float32).view(-1, 1, 8, 8) / 16
LABELS = torch.tensor(Y)


def task(model: Callable[[], nn.Module], labels: Tensor = LABELS, **parts: Any) -> Task:
    """The digits with a model, and a test set that lacks what is behind its first 1,300 samples."""
    pair = IMAGES[:1300], labels[:1300]
    test = IMAGES[1300:], labels[1300:]
    return Task(**{"model": model, "train": pair, "test": test, "loss": F.cross_entropy, **parts})


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.z, self.out = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Any:
        h = self.h(x.flatten(1)).relu()
        return h, self.z(h), self.out(self.z(h))


class DictOut(Three):
    def forward(self, x: Tensor) -> Any:
        h, _, logits = super().forward(x)
        return {"logits": logits, "features": h}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mu, self.logvar, self.out = nn.Linear(64, 3), nn.Linear(64, 3), nn.Linear(3, 64)

    def forward(self, x: Tensor) -> Any:
        mu, logvar = self.mu(x.flatten(1)), self.logvar(x.flatten(1))
        return self.out(mu + torch.randn_like(mu) * (logvar / 2).exp()), mu, logvar


def elbo(outputs: Any, targets: Tensor) -> Tensor:
    reconstruction, mu, logvar = outputs
    error = (reconstruction - targets.flatten(1)).square().sum(1)
    return (error + 0.5 * (mu.square() + logvar.exp() - logvar - 1).sum(1)).mean()


def third_right(outputs: Any, targets: Tensor) -> Any:
    return float((outputs[2].argmax(1) == targets).float().mean())


def three() -> Task:
    return task(Three, loss=lambda o, y: F.cross_entropy(o[2], y), metrics={"accuracy": third_right})


def recall_of_three() -> Task:
    def recall(outputs: Any, targets: Tensor) -> Tensor:
        ones = targets == 1
        return (outputs[2].argmax(1)[ones] == 1).float().sum() / ones.sum().clamp(min=1)

    return task(Three, loss=lambda o, y: F.cross_entropy(o[2], y), metrics={"recall": recall})


def dictionary() -> Task:
    return task(DictOut)


def dictionary_in_set() -> Task:
    return task(
        DictOut,
        loss=lambda o, y: F.cross_entropy(o["logits"], y),
        metrics={"all": OverSet(lambda outputs, targets: 0.0)},
    )


def autoencoder() -> Task:
    pair = IMAGES[:400], IMAGES[:400]
    return task(
        VAE,
        train=pair,
        test=pair,
        loss=elbo,
        metrics={"error": lambda o, y: (o[0] - y.flatten(1)).square().mean()},
    )


def contrastive() -> Task:
    """A loss that is no mean, of a model with several outputs."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        _, z, logits = outputs
        return F.cross_entropy(logits, targets) + z.std(0, unbiased=False).mean()

    return task(Three, loss=loss)


class Branching(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


def own(task: str, **fields: Any) -> Experiment:
    return described(task=f"{__name__}:{task}", **fields)


@pytest.mark.parametrize("nodes", [4, 40])
def test_metrics_of_several_outputs_are_tried_and_right(tmp_path: Path, nodes: int) -> None:
    run = gossamer.run(own("three", nodes=nodes, stop={"rounds": 1}), tmp_path)
    assert run.status == "done"
    assert not any("can't be tried" in note for note in prepare(own("three")).notes())
    module = run.module(0)
    with torch.no_grad():
        outputs = module(IMAGES[1300:])[2]
    found = run.metrics.filter(run.metrics["node"] == 0, run.metrics["round"] == 1)["test_accuracy"].item()
    samples = prepare(own("three", evaluation={"every_rounds": 1, "samples": None})).task.test
    assert len(samples[1]) == 497
    right = (outputs.argmax(1) == LABELS[1300:]).float().mean().item()
    assert abs(found - right) < 0.15  # of 50 of these samples
    assert prepare(own("autoencoder", nodes=nodes)).trainer == "sequential"


def test_metric_of_several_outputs_that_is_no_mean_is_refused() -> None:
    line = refused(own("recall_of_three"))
    assert line.startswith("task.metrics.recall is no mean over samples: ")
    assert line.endswith(
        "; accepted: a mean over samples, or a model that returns one tensor, for a metric over a set"
    )


def test_loss_of_several_outputs_that_is_no_mean_is_named() -> None:
    [note] = [note for note in prepare(own("contrastive")).notes() if note.startswith("task.loss")]
    assert "is no mean over samples" in note
    assert (
        "task.model returns tuple of 3: recorded losses of an evaluation set are the means of its batches"
        in note
    )


def test_loss_that_takes_other_outputs_says_which_there_are() -> None:
    line = refused(own("dictionary"))
    assert line.startswith(
        "task.loss, given outputs dict with logits, features and targets (8,) of torch.int64: "
    )
    assert line.endswith(
        "; accepted: a loss and metrics that take what task.model returns, a dict with logits, features, or a model that"
        " returns one tensor"
    )
    assert "accepted with metrics over a set: a tensor whose first axis is the sample" in refused(
        own("dictionary_in_set")
    )


@pytest.mark.parametrize(
    ("experiment", "reason"),
    [
        (lambda **engine: own("autoencoder", **engine), "random operation"),
        (lambda **engine: digits("Branching", **engine), "data-dependent control flow"),
    ],
)
def test_batching_of_draws_and_branches_is_refused_before_the_run(experiment: Any, reason: str) -> None:
    line = refused(experiment(engine={"name": "simulate", "trainer": "batched"}))
    assert line.startswith(
        "engine.trainer: 'batched' can't take the steps of this task, for it raises RuntimeError: "
    )
    assert reason in line
    assert prepare(experiment(nodes=40)).trainer == "sequential"


# --- O03: batch norm and one sample


def normed(shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes)
    )


ONE_OF_400 = {"name": "sizes", "fractions": [0.5, 0.3, 0.1, 1 / 400]}


@pytest.mark.parametrize(
    ("fields", "node", "cure"),
    [
        (
            {"nodes": 40, "partition": {"name": "dirichlet", "alpha": 0.01}},
            None,
            "partition.min_samples of at least 2",
        ),
        ({"partition": ONE_OF_400}, 3, "at least 2 samples at node 3"),
        ({"partition": ONE_OF_400, "engine": "processes"}, 3, "at least 2 samples at node 3"),
        ({"partition": ONE_OF_400, "batch_size": "full"}, 3, "at least 2 samples at node 3"),
        ({"batch_size": 1}, None, "batch_size of at least 2"),
        (
            {"partition": {"name": "sizes", "fractions": [0.5, 0.3, 0.1, 2 / 400], "personal_fraction": 0.5}},
            3,
            "at least 2 samples at node 3",
        ),
        (
            {
                "partition": ONE_OF_400,
                "gather": {"lost_peer": "skip"},
                "faults": [{"name": "join", "nodes": [3], "at_s": 2}],
                "stop": {"rounds": 400},
            },
            3,
            "at least 2 samples at node 3",
        ),
    ],
)
def test_batch_norm_of_one_sample_is_refused_before_the_run(
    fields: dict[str, Any], node: int | None, cure: str
) -> None:
    line = refused(digits("normed", **fields))
    assert line.startswith(
        "task.model, given inputs (1, 1, 8, 8) of torch.float32: ValueError: Expected more than 1 value"
    )
    assert ", with a batch of 1 sample, as node " in line
    assert node is None or f"as node {node} has; " in line
    assert line.endswith(f"; accepted: {cure}, or a model and a loss that take 1 sample")


def test_batch_norm_trains_where_all_batches_have_two_samples() -> None:
    fields = {"nodes": 40, "partition": {"name": "dirichlet", "alpha": 0.01, "min_samples": 2}}
    setup = prepare(digits("normed", **fields))
    assert min(map(len, setup.parts)) == 2


def hard_negatives() -> Task:
    """A loss that compares each sample with the five hardest others, so that the smallest batch has six."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        distances = torch.cdist(outputs, outputs)
        return F.cross_entropy(outputs, targets) - distances.topk(6, dim=1).values.mean()

    return task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss=loss, test=(IMAGES[:100], LABELS[:100])
    )


@pytest.mark.parametrize("trainer", ["auto", "sequential"])
def test_loss_that_needs_more_samples_than_a_trial_is_tried_with_a_real_batch(trainer: str) -> None:
    engine = {"name": "simulate", "trainer": trainer}
    assert prepare(own("hard_negatives", batch_size=12, engine=engine)).trainer == "sequential"
    line = refused(own("hard_negatives", batch_size=4, engine=engine))
    assert line.startswith(
        "task.loss, given outputs (4, 10) of torch.float32 and targets (4,) of torch.int64: "
    )


def two_columns() -> Task:
    labels = torch.stack((LABELS, LABELS), 1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets[:, 0])

    def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    return task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        labels,
        loss=loss,
        metrics={"accuracy": accuracy},
    )


def test_two_columns_of_targets_do_not_pass_by_chance() -> None:
    line = refused(own("two_columns"))
    assert line.startswith(
        "task.metrics.accuracy, given outputs (24, 10) of torch.float32 and targets (24, 2) of torch.int64: "
    )


def squeezing(shape: Any, classes: int) -> nn.Module:
    class Squeezing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    return Squeezing(shape, classes)


def test_last_batch_of_an_evaluation_is_tried() -> None:
    """An evaluation of 101 samples has a batch of 100 and one of one."""
    assert prepare(digits("squeezing", evaluation={"every_rounds": 1, "samples": 100}))
    line = refused(digits("squeezing", evaluation={"every_rounds": 1, "samples": 101}))
    assert line.startswith(
        "task.metrics.accuracy, given outputs (10,) of torch.float32 and targets (1,) of torch.int64: "
    )


# --- O10: labels that the loss refuses


def linear(outputs: int = 10) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


def from_one() -> Task:
    """Labels 1 to 10, of which the test set lacks the highest."""
    labels = LABELS + 1
    known = labels[1300:] < 10
    return task(linear(), labels, test=(IMAGES[1300:][known], labels[1300:][known]))


def minus_one() -> Task:
    return task(linear(), torch.where(LABELS == 9, -1, LABELS))


def gaps(outputs: int) -> Task:
    kept = torch.isin(LABELS, torch.tensor([0, 2, 5]))
    pair = IMAGES[kept], LABELS[kept]
    return task(linear(outputs), train=pair, test=pair)


def gaps_of_3() -> Task:
    return gaps(3)


def gaps_of_6() -> Task:
    return gaps(6)


def unseen_labels() -> Task:
    """A test set of labels that the training set lacks."""
    return task(linear(5), train=(IMAGES[LABELS < 5], LABELS[LABELS < 5]))


def of_kind(dtype: torch.dtype) -> Task:
    return task(linear(), LABELS.to(dtype))


def of_int32() -> Task:
    return of_kind(torch.int32)


def of_uint8() -> Task:
    return of_kind(torch.uint8)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "from_one",
            "targets from 0 to 9, for 10 outputs of task.model; those in the training data are 1 to 10",
        ),
        (
            "minus_one",
            "targets from 0 to 9, for 10 outputs of task.model; those in the training data are -1 to 8",
        ),
        (
            "gaps_of_3",
            "targets from 0 to 2, for 3 outputs of task.model; those in the training data are 0 to 5",
        ),
        (
            "unseen_labels",
            "targets from 0 to 4, for 5 outputs of task.model; those in the evaluation set 'test' are 0 to 9",
        ),
        ("of_int32", "parts that fit together"),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"nodes": 40, "partition": {"name": "shards", "per_node": 1}},
        {"engine": {"name": "simulate", "trainer": "fused"}},
    ],
)
def test_labels_that_the_loss_refuses_are_named_before_the_run(
    name: str, problem: str, fields: dict[str, Any]
) -> None:
    line = refused(own(name, evaluation={"every_rounds": 1, "samples": None}, **fields))
    assert line.startswith("task.loss, given outputs (")
    assert line.endswith(f"; accepted: {problem}")


@pytest.mark.parametrize("name", ["gaps_of_6", "of_uint8"])
def test_labels_that_the_loss_takes_are_accepted(name: str) -> None:
    assert prepare(own(name)).trainer in ("fused", "sequential")


def ignored() -> Task:
    """Targets of -100, which the loss leaves out, are no labels."""
    return task(linear(), torch.where(LABELS == 9, -100, LABELS))


def test_ignored_targets_are_no_labels() -> None:
    assert any(note.startswith("task.loss is no mean") for note in prepare(own("ignored")).notes())


# --- siblings: encodings and mixings


class OfOneNode(Codec):
    """A codec of the user with one fault."""

    fault: str = "none"

    def encode(self, node: Any, vector: Tensor, round: int) -> Any:
        if self.fault == "raises":
            raise OverflowError("too long")
        if self.fault == "writes":
            vector.mul_(2)
        if self.fault == "object":
            return [object()]
        return [vector.double(), 1] if self.fault == "double" else [vector.clone(), 1]

    def decode(self, node: Any, source: int, payload: Any, own: Any) -> Any:
        if self.fault == "short":
            return payload[0][1:]
        return payload[0] / 0 if self.fault == "infinite" else payload[0]


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("raises", ": OverflowError: too long (test_cases_first_step.py, line "),
        ("writes", ".encode writes into the vector that it is given; accepted: one that copies it"),
        ("object", ": TypeError: "),
        (
            "double",
            ": ValueError: node.store: got torch.float64 of shape (650,); accepted: torch.float32 of shape (650,)",
        ),
        ("short", "can't decode: a vector of another length"),
        ("infinite", ".decode returns values that are not finite; accepted: finite ones"),
    ],
)
def test_codec_that_fails_is_refused_before_the_run(fault: str, problem: str) -> None:
    codec = {"name": f"{__name__}:OfOneNode", "fault": fault}
    line = refused(described(codec=codec))
    assert line.startswith(f"codec: {__name__}:OfOneNode")
    assert problem in line
    assert prepare(described(codec={**codec, "fault": "none"}))


class Own(Aggregator):
    """An aggregator of the user with one fault."""

    fault: str = "none"

    def aggregate(self, own: Tensor, vectors: Any, weights: Any, self_weight: float) -> Tensor:
        if self.fault == "writes":
            return own.mul_(self_weight)
        if self.fault == "stacks":
            return torch.stack(list(vectors)).mean(0)
        return own / 0 if self.fault == "infinite" else own.clone()


@pytest.mark.parametrize(
    ("fault", "fields", "problem"),
    [
        ("writes", {}, " writes into the vectors that it is given; accepted: one that returns a new one"),
        ("infinite", {}, " returns values that are not finite, given 3 models, the node's own included"),
        (
            "stacks",
            {"topology": {"name": "erdos-renyi", "p": 0.0, "allow_disconnected": True}},
            ": RuntimeError: stack expects a non-empty TensorList",
        ),
    ],
)
def test_aggregator_that_fails_is_refused_before_the_run(
    fault: str, fields: dict[str, Any], problem: str
) -> None:
    aggregator = {"name": f"{__name__}:Own", "fault": fault}
    line = refused(described(aggregator=aggregator, **fields))
    assert line.startswith(f"aggregator: {__name__}:Own{problem}")
    assert prepare(described(aggregator={**aggregator, "fault": "none"}, **fields))


@pytest.mark.parametrize(
    "aggregator",
    [{"name": "krum", "byzantine": 0}, {"name": "trimmed-mean", "count": 1}],
    ids=["krum", "trimmed-mean"],
)
def test_aggregators_get_enough_models_in_the_first_rounds_of_a_changing_graph(aggregator: Any) -> None:
    """O16: three models are needed. A random link of five is there in every tenth round."""
    graph = {"name": "random-links", "probability": 0.1}
    line = refused(described(nodes=6, topology=graph, aggregator=aggregator, stop={"rounds": 50}))
    assert f"aggregator: {aggregator['name']} takes at least 3 models, and node " in line
    assert re.search(
        r" in round \d+, its own included; accepted: more neighbours, or other parameters$", line
    )
    often = {"name": "random-links", "probability": 1.0}
    assert prepare(described(nodes=6, topology=often, aggregator=aggregator, stop={"rounds": 50}))


class Drawing(SGD):
    """An update that draws from all global generators but NumPy's."""

    def update(self, parameters: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        super().update(parameters, gradient + 1e-3 * torch.randn_like(gradient), state, lr)


def test_trials_leave_the_global_generators_alone() -> None:
    before: list[Any] = [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index,union-attr]
    setup: Setup = prepare(
        own("autoencoder", codec="float16", optimizer={"name": f"{__name__}:Drawing", "lr": 0.1})
    )
    assert setup.trainer == "sequential"
    after: list[Any] = [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index,union-attr]
    assert before == after
