"""Local learning: flat parameters, optimizers, batches, trainers, evaluation, mixing."""

from gossamer.learning import optimizer as _optimizers

__all__: list[str] = []
del _optimizers
