"""Tasks (data, model, loss, metrics), partitions of their samples over the nodes, and poisons."""

from gossamer.tasks import leaf_models as leaf_models
from gossamer.tasks import models as models
from gossamer.tasks.hub import Hub
from gossamer.tasks.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from gossamer.tasks.leaf import CelebA, Femnist, LeafSynthetic, LeafTask, Reddit, Sent140
from gossamer.tasks.least_squares import LeastSquares
from gossamer.tasks.movielens import MovieLens
from gossamer.tasks.partition import IID, Dirichlet, Flower, Natural, Partition, Shards, Sizes, label_counts
from gossamer.tasks.poison import (
    HeldOutClass,
    LabelFlip,
    Patch,
    PermuteLabels,
    Poison,
    Rotate,
    SecondTask,
    TextTrigger,
    Tint,
    poisoned,
)
from gossamer.tasks.shakespeare import Shakespeare
from gossamer.tasks.synthetic import Synthetic
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

__all__ = ["CIFAR10", "CIFAR100", "CelebA", "Femnist", "LeafSynthetic", "LeafTask", "Reddit", "Sent140"]
__all__ += ["IID", "MNIST", "Digits", "Dirichlet", "ExpMean", "FashionMNIST"]
__all__ += ["Flower", "HeldOutClass", "Hub", "LabelFlip", "LeastSquares", "ModelSource", "MovieLens"]
__all__ += ["Natural", "Partition", "Patch", "PermuteLabels", "Poison", "RootMean", "Rotate", "SecondTask"]
__all__ += ["Shakespeare", "Shards", "Sizes", "Synthetic", "Task", "TaskSource", "TextTrigger", "Tint"]
__all__ += ["TinyMem", "accuracy", "label_counts", "load_task", "model_factory", "poisoned"]
