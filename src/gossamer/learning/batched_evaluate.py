"""Evaluation of many models at once: ``vmap`` of the measures over stacked parameters, all on the same samples.

The models are split into chunks that fit into a core's cache with their activations. One worker evaluates a chunk, so that
results do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.errors import cause
from gossamer.learning.batched import chunks, power_below
from gossamer.learning.capture import Captured, Function
from gossamer.learning.evaluate import Evaluator, Found, batches
from gossamer.learning.gradients import ForMany
from gossamer.learning.parameters import Layout, bare_module, named_buffers, named_parameters
from gossamer.learning.rows import Rows
from gossamer.messages.tags import Model

LIMITS = {"cpu": (8 << 20, 256), "gpu": (1 << 30, 8192)}
"""The most bytes of a chunk's models together with the largest tensor of their forward pass, and the most models."""
LEAST = 4
"""Models in a chunk, at least. If fewer fit, as with convolutions on a CPU, passes are bound by arithmetic or by memory, and
models are evaluated one at a time."""


class BatchedEvaluator:
    """Evaluates many models at once, on the samples and by the measures of an evaluator.

    Args:
        single: evaluates one model at a time.
        rows: the store of parameters.
        say: called with a message if many models can't be evaluated at once.
    """

    def __init__(self, single: Evaluator, rows: Rows, say: Callable[[str], None]) -> None:
        self._single, self._rows, self._say = single, rows, say
        self._means = Captured(lambda: single.workers.own(self._make_means))
        self._chunk: int | None = None  # not known yet
        self.sets = single.sets

    def test_each(self, models: Sequence[Model], on: str = "test") -> list[Found | Exception]:
        """As :meth:`Evaluator.test_each`."""
        if not models:
            return []
        try:
            if self._chunk is None:
                self._chunk = self._size(models[0])
            if self._chunk >= LEAST:
                cut = chunks([list(range(len(models)))], self._chunk)
                found = self._single.workers.map(lambda some: self._test([models[i] for i in some], on), cut)
                return [each for some in found for each in some]
        except Exception as error:  # noqa: BLE001 - the user's own, of any kind, or something that vmap can't run
            alone = self._single.test_each(models, on)
            if not any(isinstance(each, Exception) for each in alone):
                self._chunk = 1
                self._say(
                    f"evaluation: one model at a time (many can't be evaluated at once: {cause(error)})"
                )
            return alone
        return self._single.test_each(models, on)

    def forms(self) -> dict[str, int]:
        """As :meth:`Evaluator.forms`, of models evaluated together and one at a time."""
        together, alone = self._means.forms(), self._single.forms()
        return {form: together.get(form, 0) + alone.get(form, 0) for form in [*together, *alone]}

    def train(self, model: Model, samples: Int[np.ndarray, " n"]) -> Found:
        """As :meth:`Evaluator.train`."""
        return self._single.train(model, samples)

    def _size(self, model: Model) -> int:
        """The number of models like this one in a chunk."""
        largest = _Largest()  # type: ignore[no-untyped-call]
        means = self._make_means()
        with largest, torch.no_grad():
            means(*self._stack([model]), *next(batches(*self.sets["test"])))
        most_bytes, most = LIMITS["cpu" if torch.device(self._single.device).type == "cpu" else "gpu"]
        each = 4 * len(model.parameters) + largest.nbytes
        return power_below(min(max(most_bytes // each, 1), most))

    def _test(self, models: Sequence[Model], on: str) -> list[Found]:
        single = self._single
        parameters, buffers = self._stack(models)
        totals = torch.zeros(len(single.measures), len(models), dtype=torch.float64, device=single.device)
        with torch.no_grad():
            for x, y in batches(*self.sets[on]):
                given = parameters, buffers
                if not self._means.only_reads(*given, x, y):
                    given = parameters.clone(), buffers.clone()
                for total, mean in zip(totals, self._means(*given, x, y), strict=True):
                    total += mean.double() * len(x)
        return [single.results(column, len(self.sets[on][0])) for column in totals.T.tolist()]

    def _stack(self, models: Sequence[Model]) -> tuple[Tensor, Tensor]:
        """Parameters [models, P] and buffers [models, B] on the evaluator's device, to be read only."""
        device = self._single.device
        parameters = self._rows.stack([model.parameters for model in models])
        return parameters.to(device), torch.stack([model.buffers for model in models]).to(device)

    def _make_means(self) -> Function:
        """``(parameters [models, P], buffers [models, B], inputs, targets) -> each measure's means [models]``."""
        module = bare_module(self._single.task.model, self._single.device).eval()
        layout = Layout.of(module)
        measures = self._single.measures.values()

        def means(leaves: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
            with ForMany():
                outputs = functional_call(module, (leaves, buffers), (x,))
                return tuple(torch.as_tensor(measure(outputs, y)) for measure in measures)

        means_of: Any = vmap(means, in_dims=(0, 0, None, None))

        def means_of_all(parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            named = named_parameters(parameters, layout.parameters)
            # (Convolutions for many models at once are fastest with images as they are.)
            return tuple(means_of(named, named_buffers(buffers, layout, module), x.contiguous(), y))

        return means_of_all


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that is created."""

    nbytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for the recorder in gossamer.learning.capture

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in func._schema.returns):  # no view
            made = [value.nbytes for value in tree_leaves(result) if isinstance(value, Tensor)]
            self.nbytes = max([self.nbytes, *made])
        return result
