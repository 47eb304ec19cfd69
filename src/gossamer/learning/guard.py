"""Errors of the parts that a user writes (a model, a loss, an optimizer, a codec, ...), in one line that names the part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import BadInput, GossamerError, cause, is_own, place
from gossamer.tasks.metrics import IGNORED

FITTING = "parts that fit together"


@contextmanager
def naming(field: str, inputs: Any = None, **tensors: Any) -> Iterator[None]:
    """Add the part of the task and its tensor arguments to an error raised by torch."""
    try:
        yield
    except Exception as error:
        if is_own(error) or isinstance(error, GossamerError):
            raise
        message = " ".join(str(error).split())
        raise RuntimeError(f"{field}{given(inputs, **tensors)}: {type(error).__name__}: {message}") from error


@contextmanager
def refusing(
    field: str, accepted: str | Callable[[], str] = FITTING, inputs: Any = None, **tensors: Any
) -> Iterator[None]:
    """Before a run: refuse a part that raises an error, or a loss about which torch warns that shapes are broadcast. A
    BadInput from within names another part already."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"Using a (target|input) size", UserWarning)
            yield
    except GossamerError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise BadInput(
                f"{field}{given(inputs, **tensors)}: needs more memory than is free{place(error)}; accepted: what fits"
            ) from error
        problem = " ".join(str(error).split())
        if not problem.startswith(field):  # as those of naming() do
            problem = f"{field}{given(inputs, **tensors)}: {cause(error)}"
        if "; accepted: " not in problem:
            problem += f"; accepted: {accepted() if callable(accepted) else accepted}"
        raise BadInput(problem) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or the one from which it was raised, says that no memory is free."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and _is_out_of_memory(error.__cause__)


def given(inputs: Any = None, **tensors: Any) -> str:
    """The arguments of a part, for a message: ", given outputs (8, 3) of torch.float32 and targets (8,) of torch.int64"."""
    tensors |= inputs if isinstance(inputs, dict) else {"inputs": inputs}
    kinds = " and ".join(f"{name} {kind(value)}" for name, value in tensors.items() if value is not None)
    return f", given {kinds}" if kinds else ""


def kind(value: object) -> str:
    """What a value is, for a message: its shape and dtype, its type, and what is in it."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, dict):
        return f"dict with {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def fitting(outputs: Any, targets: Tensor, where: str) -> str:
    """What a loss or a metric that fails for these outputs and targets might accept. ``where`` the targets are."""
    if not isinstance(outputs, Tensor):
        return f"a loss and metrics that take what task.model returns, a {kind(outputs)}, or a model that returns one tensor"
    counted = targets[targets != IGNORED] if _whole(targets) else targets[:0]
    if outputs.dim() > 1 and (classes := outputs.shape[1]) > 1 and counted.numel():
        lowest, highest = int(counted.min()), int(counted.max())
        if lowest < 0 or highest >= classes:
            return (
                f"targets from 0 to {classes - 1}, for {classes} outputs of task.model; those in {where} are {lowest} to"
                f" {highest}"
            )
    if outputs.shape != targets.shape and outputs.numel() == targets.numel():
        shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
        return f"outputs and targets of one shape, in place of {shapes}, as from outputs.squeeze(1) or targets[:, None]"
    return FITTING


def _whole(targets: Tensor) -> bool:
    return not (targets.is_floating_point() or targets.is_complex())
