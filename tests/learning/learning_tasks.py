"""Small tasks of each kind of model, for the tests of trainers and evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor, nn

from gossamer.learning.parameters import ModuleMaker, initial_model
from gossamer.messages.tags import Model
from gossamer.tasks.models import MLP, GNLeNet
from gossamer.tasks.task import Task, accuracy

SHAPE = (1, 8, 8)
CLASSES = 4


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(108, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, CLASSES))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, CLASSES))
    module[1].requires_grad_(False)
    module[3].bias.requires_grad_(False)
    return module


MODELS = {
    "logistic": lambda: MLP(SHAPE, CLASSES),
    "mlp": lambda: MLP(SHAPE, CLASSES, (12,)),
    "gn-lenet": lambda: GNLeNet(SHAPE, CLASSES),
    "batch norm": normed,
    "dropout": dropping,
    "frozen": ModuleMaker(frozen, 0),
}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def images(model: str, samples: int = 60, test_samples: int = 230) -> Task:
    """Random images with random labels."""
    rng = torch.Generator().manual_seed(3)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, *SHAPE, generator=rng)
        return inputs, torch.randint(CLASSES, (count,), generator=rng)

    return Task(MODELS[model], draw(samples), draw(test_samples), cross_entropy, {"accuracy": accuracy})


def start(task: Task, seed: int) -> Model:
    return initial_model(task.model, seed)
