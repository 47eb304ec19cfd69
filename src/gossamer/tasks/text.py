"""A text file for a language model."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from gossamer.config.registry import FilePath, register
from gossamer.errors import BadInput
from gossamer.tasks.language import METRICS, Source, token_loss, tokenized
from gossamer.tasks.task import ModelField, Task, TaskSource, model_factory


@register("task", "text")
class Text(TaskSource):
    """The next token of a text: a character with the model ``gpt2``, a token of the model's own with ``causal-lm``. Needs the
    extra ``llm``.

    The file is UTF-8, or that with gzip (``.gz``). It is divided into samples of ``context`` tokens that do not overlap, the
    first for training and the last for testing. Inputs are int32 tokens [samples, context], targets the tokens that follow.
    The loss is cross-entropy, the metrics are ``accuracy`` of the tokens and ``perplexity``."""

    path: FilePath
    context: PositiveInt = 64  # tokens in a sample
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9  # share of the samples that is for training
    model: ModelField = Field(default="gpt2", validate_default=True)

    def load(self, data_root: Path | None, seed: int) -> Task:
        """The task; see :meth:`TaskSource.load`. It does not depend on the seed."""
        try:
            with (gzip.open if self.path.suffix == ".gz" else open)(
                self.path, "rt", encoding="utf-8"
            ) as file:
                text = file.read()
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise BadInput(f"task.path: {self.path}: {error}; accepted: text in UTF-8 (.gz or not)") from None
        own = self.model if isinstance(self.model, Source) else None
        tokens, different = tokenized(text, own, data_root, "task.model")
        samples = (len(tokens) - 1) // self.context
        if samples < 2:
            least = 2 * self.context + 1
            raise BadInput(f"task.path: {self.path}: {len(tokens)} tokens; accepted: {least} or more")
        inputs, targets = (tokens[at : at + samples * self.context].view(samples, -1) for at in (0, 1))
        kept = min(max(round(self.train_fraction * samples), 1), samples - 1)
        return Task(
            model=model_factory(self.model, data_root, shape=(self.context,), classes=different),
            train=(inputs[:kept], targets[:kept]),
            test=(inputs[kept:], targets[kept:]),
            loss=token_loss,
            metrics=METRICS,
        )
