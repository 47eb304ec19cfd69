"""TinyMem: number sequences that follow a rule, written as digits, for a small language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from pydantic import Field, PositiveInt

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.randomness import generator
from gossamer.tasks.language import IGNORED, METRICS, token_loss
from gossamer.tasks.provenance import Provenance
from gossamer.tasks.task import ModelField, Pair, Task, TaskSource, model_factory

TOKENS = "0123456789^$ _"
"""The characters by token: digits are their own tokens; ^ starts a sequence, $ ends it, _ is padding."""

Factor = Annotated[int, Field(ge=1, le=2**31)]

PADDING = TOKENS.index("_")


@register("task", "tiny-mem")
class TinyMem(TaskSource):
    """TinyMem (Sakarvadia et al., "Topology-Aware Knowledge Propagation in Decentralized Learning", 2025):
    predict the next character of a number sequence. The data is generated. Needs the extra ``llm``.

    The sequence of start i and coefficient c is s_1 to s_length, where s_0 = i and s_(t+1) is ``c s_t`` or
    ``c + s_t``, modulo ``modulus``; it is written as ``^s_1 s_2 ...$``. The starts of each coefficient are 0
    to ``samples + test_samples`` - 1; the choice for testing is the same for every seed. Sequences repeat if
    there are more starts than the modulus: with the default numbers, which are those of the published code,
    nearly all test sequences also occur in the training set.

    Inputs are uint8 tokens [samples, context - 1], targets int16 next tokens. The groups are the numbers of
    the coefficients, which partitions by label use. The loss is cross-entropy, the metrics are ``accuracy``
    of the tokens and ``perplexity``."""

    rule: Literal["multiply", "sum"] = "multiply"
    coefficients: Annotated[tuple[Factor, ...], Field(min_length=1)] = (2, 4, 6, 8, 10)
    samples: PositiveInt = 32_000  # training sequences of each coefficient
    test_samples: PositiveInt = 1_000  # test sequences of each coefficient
    modulus: Annotated[int, Field(ge=2, le=2**31)] = 16_381
    length: PositiveInt = 20  # numbers in a sequence
    context: PositiveInt = 150  # tokens in a padded sequence
    count_padding: bool = False  # whether the loss and the metrics count padding, as in the published code
    model: ModelField = Field(default="gpt2", validate_default=True)

    def load(self, data_root: Path | None, seed: int) -> Task:
        longest = 1 + self.length * (len(str(self.modulus - 1)) + 1)
        if longest > self.context:
            raise BadInput(f"task.context: {self.context}; accepted: at least {longest}")
        order = generator(0, "tiny-mem-test-set").permutation(self.samples + self.test_samples)
        parts = np.sort(order[self.test_samples :]), np.sort(order[: self.test_samples])
        train, test = (
            self._pair(np.concatenate([self._tokens(c, starts) for c in self.coefficients]))
            for starts in parts
        )
        return Task(
            model=model_factory(self.model, data_root, shape=(self.context,), classes=len(TOKENS)),
            train=train,
            test=test,
            loss=token_loss,
            metrics=METRICS,
            groups=torch.arange(len(self.coefficients)).repeat_interleave(self.samples),
            provenance=Provenance("generated", "drawn from all starts, the same for every seed"),
        )

    def _tokens(
        self, coefficient: int, starts: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> UInt8[np.ndarray, "sequences context"]:
        terms = [starts]
        for _ in range(self.length):
            following = terms[-1] * coefficient if self.rule == "multiply" else terms[-1] + coefficient
            terms.append(following % self.modulus)
        rows = np.stack(terms[1:], axis=1).tolist()
        text = "".join(f"^{' '.join(map(str, row))}$".ljust(self.context, "_") for row in rows)
        token_of = np.zeros(128, np.uint8)
        token_of[np.frombuffer(TOKENS.encode(), np.uint8)] = np.arange(len(TOKENS))
        return token_of[np.frombuffer(text.encode(), np.uint8)].reshape(-1, self.context)

    def _pair(self, tokens: UInt8[np.ndarray, "sequences context"]) -> Pair:
        targets = tokens[:, 1:].astype(np.int16)
        if not self.count_padding:
            targets[targets == PADDING] = IGNORED
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets)
