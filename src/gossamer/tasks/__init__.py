"""Tasks (data, model, loss, metrics), partitions of their samples over the nodes, and poisons."""

from gossamer.tasks.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from gossamer.tasks.least_squares import LeastSquares
from gossamer.tasks.movielens import MovieLens
from gossamer.tasks.partition import IID, Dirichlet, Natural, Partition, Shards, Sizes, label_counts
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
from gossamer.tasks.task import ExpMean, RootMean, Task, TaskSource, accuracy, load_task
from gossamer.tasks.text import Text
from gossamer.tasks.tiny_mem import TinyMem

__all__ = ["CIFAR10", "CIFAR100", "IID", "Digits", "Dirichlet", "ExpMean", "FashionMNIST", "HeldOutClass"]
__all__ += ["MNIST", "LabelFlip", "LeastSquares", "MovieLens", "Natural", "Partition", "Patch"]
__all__ += ["PermuteLabels", "Poison", "RootMean", "Rotate", "SecondTask", "Shakespeare", "Shards", "Sizes"]
__all__ += ["Task", "TaskSource", "Text", "TextTrigger", "Tint", "TinyMem"]
__all__ += ["accuracy", "label_counts", "load_task", "poisoned"]
