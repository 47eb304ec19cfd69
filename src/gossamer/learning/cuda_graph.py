"""Functions of tensors as CUDA graphs, which launch all kernels of a function at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Recordings of one function: their maximum number, and the maximum bytes of all their inputs. (Each keeps its
# inputs and outputs, and large inputs take so long that launches do not matter.)
MAX_GRAPHS, MAX_BYTES = 16, 256 << 20

Tensors = tuple[Tensor, ...]


class Recorded:
    """A function of tensors on the current GPU, recorded at the second call with inputs of the same shapes. From then
    on its kernels are replayed: Python code in the function does not run again, and results are valid until the next
    call. A function that can't be recorded, because it reads a value or draws on the CPU, is called every time."""

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function, self._fails = function, False
        self._seen: set[Any] = set()  # shapes, strides and types of inputs
        self._recordings: dict[Any, _Recording] = {}
        self._bytes = 0  # of the recordings' inputs
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Tensors:
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        if key not in self._recordings and key in self._seen and not self._fails:
            self._record(key, inputs)
        self._seen.add(key)
        recording = self._recordings.get(key)
        return self._function(*inputs) if recording is None else recording.replay(inputs)

    def _record(self, key: Any, inputs: Tensors) -> None:
        size = sum(tensor.nbytes for tensor in inputs)
        if len(self._recordings) == MAX_GRAPHS or self._bytes + size > MAX_BYTES:
            return
        stream, generator = torch.cuda.current_stream(), torch.get_rng_state()
        try:
            recording = _Recording(self._function, inputs, self._pool)
            self._fails = not torch.equal(torch.get_rng_state(), generator)
        except RuntimeError:  # code that fails whenever it is called fails again in the call that follows
            self._fails = True
            torch.cuda.set_stream(stream)  # a recording that can't be ended does not restore it
            # In some versions of torch, only the end of a recording lets the GPU's generator draw again.
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=inputs[0].device)
        if self._fails:
            torch.set_rng_state(generator)  # the call that follows draws the same numbers
        else:
            self._recordings[key] = recording
            self._bytes += size


class _Recording:
    """The kernels of one call."""

    def __init__(self, function: Callable[..., Tensors], inputs: Tensors, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # The strides are kept, so that the same kernels are chosen as for the given inputs.
        self._inputs = [x.new_empty_strided(x.shape, x.stride()).copy_(x) for x in inputs]
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Tensors) -> Tensors:
        for recorded, value in zip(self._inputs, inputs, strict=True):
            recorded.copy_(value)
        self._graph.replay()
        return self._outputs
