"""Tasks (data, model, loss, metrics), partitions of their samples over the nodes, and poisons."""

from gossamer.tasks import models as models
from gossamer.tasks.hub import Hub
from gossamer.tasks.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from gossamer.tasks.leaf import Shakespeare
from gossamer.tasks.metrics import ClassAccuracy, Confusion, MacroF1, OverSet
from gossamer.tasks.movielens import MovieLens
from gossamer.tasks.partition import IID, Dirichlet, Natural, Partition, Shards, Sizes, label_counts
from gossamer.tasks.poison import LabelFlip, Patch, Poison, TextTrigger, Tint, poisoned
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.synthetic import LeastSquares, Synthetic
from gossamer.tasks.task import (
    ExpMean,
    ModelSource,
    RootMean,
    Task,
    TaskSource,
    accuracy,
    load_task,
    model_factory,
)
from gossamer.tasks.tiny_mem import TinyMem

__all__ = ["CIFAR10", "CIFAR100", "IID", "MNIST", "ClassAccuracy", "Confusion", "Digits", "Dirichlet"]
__all__ += ["ExpMean", "FashionMNIST", "Hub", "MacroF1", "OverSet"]
__all__ += [
    "LabelFlip",
    "LeastSquares",
    "ModelSource",
    "MovieLens",
    "Natural",
    "Partition",
    "Patch",
    "Poison",
    "Provenance",
]
__all__ += ["RootMean", "Shakespeare", "Shards", "Sizes", "Synthetic", "Task", "TaskSource", "TextTrigger"]
__all__ += ["Tint", "TinyMem", "accuracy", "label_counts", "load_task", "model_factory", "poisoned"]
