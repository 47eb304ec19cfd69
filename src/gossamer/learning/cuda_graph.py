"""Functions of tensors as CUDA graphs, which launch all kernels of a function at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 16
"""Maximum number of recordings of a function, since each one keeps its memory."""

Tensors = tuple[Tensor, ...]


class Recorded:
    """A function of tensors on a GPU, recorded at the second call with inputs of the same shapes. From then on its
    kernels are replayed: Python code in the function does not run again, and results are valid until the next call. A
    function that can't be recorded, for example because it reads a value, is called every time."""

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function, self._fails = function, False
        self._seen: set[Any] = set()  # shapes and types of inputs
        self._recordings: dict[Any, _Recording] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensors:
        key = tuple((each.shape, each.dtype) for each in inputs)
        if key not in self._recordings and key in self._seen and not self._fails:
            self._record(key, inputs)
        self._seen.add(key)
        recording = self._recordings.get(key)
        return self._function(*inputs) if recording is None else recording.replay(inputs)

    def _record(self, key: Any, inputs: Tensors) -> None:
        if len(self._recordings) == MOST_GRAPHS:
            return
        stream = torch.cuda.current_stream()
        try:
            self._recordings[key] = _Recording(self._function, inputs, self._pool)
        except RuntimeError:  # also of code that fails whenever it is called, as the next call will
            self._fails = True
        finally:
            torch.cuda.set_stream(stream)


class _Recording:
    """The kernels of one call."""

    def __init__(self, function: Callable[..., Tensors], inputs: Tensors, pool: Any) -> None:
        self._graph, self._inputs = torch.cuda.CUDAGraph(), [each.clone() for each in inputs]
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Tensors) -> Tensors:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._outputs
