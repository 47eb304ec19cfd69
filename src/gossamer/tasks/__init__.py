"""Tasks (data, model, loss, metrics), partitions of their samples over the nodes, and poisons."""

from gossamer.tasks.images import CIFAR10 as CIFAR10
from gossamer.tasks.images import MNIST as MNIST
from gossamer.tasks.images import Digits as Digits
from gossamer.tasks.images import FashionMNIST as FashionMNIST
from gossamer.tasks.least_squares import LeastSquares as LeastSquares
from gossamer.tasks.movielens import MovieLens as MovieLens
from gossamer.tasks.partition import IID as IID
from gossamer.tasks.partition import Dirichlet as Dirichlet
from gossamer.tasks.partition import Natural as Natural
from gossamer.tasks.partition import Partition as Partition
from gossamer.tasks.partition import Shards as Shards
from gossamer.tasks.partition import Sizes as Sizes
from gossamer.tasks.partition import label_counts as label_counts
from gossamer.tasks.poison import LabelFlip as LabelFlip
from gossamer.tasks.poison import Patch as Patch
from gossamer.tasks.poison import Poison as Poison
from gossamer.tasks.poison import poisoned as poisoned
from gossamer.tasks.shakespeare import Shakespeare as Shakespeare
from gossamer.tasks.task import RootMean as RootMean
from gossamer.tasks.task import Task as Task
from gossamer.tasks.task import TaskSource as TaskSource
from gossamer.tasks.task import accuracy as accuracy
from gossamer.tasks.task import load_task as load_task
