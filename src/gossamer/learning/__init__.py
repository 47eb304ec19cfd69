"""Local learning: flat parameters, optimizers, batches, trainers, evaluation, mixing."""

from gossamer.learning.optimizer import SGD, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
