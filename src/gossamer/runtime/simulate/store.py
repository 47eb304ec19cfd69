"""Where the vectors of a simulation are kept."""

from __future__ import annotations

import torch

from gossamer.runtime.setup import Setup

VECTORS_A_NODE = 3
"""Before and after a step, and what is mixed."""
FILLED = 0.8
"""The share of a GPU's free memory that the store may take; the rest is for what trainers compute."""


def store_device(device: str, setup: Setup) -> str:
    """Where vectors are kept: with the trainer if all of them fit there, else in host memory."""
    if device == "cpu":
        return device
    vector = torch.zeros(setup.layout.size)
    state = sum(value.numel() for value in setup.experiment.optimizer.init(vector).values())
    needed = 4 * setup.experiment.nodes * (VECTORS_A_NODE * setup.layout.size + 2 * state)
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed <= FILLED * free else "cpu"
