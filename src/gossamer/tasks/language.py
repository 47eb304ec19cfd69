"""Causal language models for tasks whose samples are tokens, and their loss and metrics.

Inputs are tokens [samples, length] of integers, targets the next tokens, of the same shape; -100 is not counted. A sample's
loss and accuracy are means over its counted tokens, and those of several samples are means over the samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from gossamer.config.registry import register
from gossamer.errors import BadInput
from gossamer.tasks.task import ExpMean, Metric, ModelSource

IGNORED = -100  # the target of a token that is not counted


@register("model", "gpt2")
class GPT2(ModelSource):
    """A GPT-2 with ReLU, without dropout and with random initial weights, as in TinyMem (Sakarvadia et al., 2025), computed
    with attention as plain products (``eager``). Needs the extra ``llm``."""

    layers: PositiveInt = 4
    width: PositiveInt = 128
    heads: PositiveInt = 4

    @model_validator(mode="after")
    def _divides(self) -> GPT2:
        if self.width % self.heads:
            raise ValueError(f"a width that is a multiple of heads, {self.heads}")
        return self

    def factory(self, data_root: Path | None, **facts: Any) -> Callable[[], nn.Module]:
        """See :meth:`ModelSource.factory`. ``shape`` begins with the length of the longest sequence, and ``classes`` is the
        number of tokens."""
        try:
            import transformers
        except ImportError:
            raise BadInput("no package 'transformers'; accepted: after pip install 'gossamer[llm]'") from None
        settings: dict[str, Any] = {
            "vocab_size": facts["classes"],
            "n_positions": facts["shape"][0],
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "activation_function": "relu",
            "initializer_range": 0.8 / self.width**0.5,
            "attn_implementation": "eager",
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        config = transformers.GPT2Config(**settings)
        return lambda: NextToken(transformers.GPT2LMHeadModel(config))


class NextToken(nn.Module):
    """The scores of each next token, by a causal language model of transformers. A token sees itself and those before it, so
    padding at the end changes nothing before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples length tokens"]:
        tokens = tokens.long()  # they are stored in fewer bytes
        # With a mask, transformers need not look at the values of the tokens.
        outputs = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        scores: Tensor = outputs.logits
        return scores


def _mean_of_counted(
    values: Float[Tensor, "samples length"], targets: Int[Tensor, "samples length"]
) -> Float[Tensor, ""]:
    counted = targets != IGNORED
    return (torch.where(counted, values, 0.0).sum(1) / counted.sum(1)).mean()


def token_loss(
    outputs: Float[Tensor, "samples length tokens"], targets: Int[Tensor, "samples length"]
) -> Float[Tensor, ""]:
    """Cross-entropy of the next tokens."""
    classes = torch.where(targets == IGNORED, 0, targets).long().unsqueeze(-1)
    return _mean_of_counted(-outputs.log_softmax(-1).gather(-1, classes).squeeze(-1), targets)


def token_accuracy(
    outputs: Float[Tensor, "samples length tokens"], targets: Int[Tensor, "samples length"]
) -> Float[Tensor, ""]:
    """Share of the tokens that have the highest score."""
    return _mean_of_counted((outputs.argmax(-1) == targets).float(), targets)


METRICS: dict[str, Metric] = {"accuracy": token_accuracy, "perplexity": ExpMean(token_loss)}
