"""Causal language models for tasks whose samples are tokens (a small GPT-2, and any causal model of
transformers, with or without LoRA), and their loss and metrics.

Inputs are integer tokens [samples, length]. Targets are the next tokens, of the same shape; -100 is ignored.
A sample's loss and accuracy are means over its counted tokens; those of several samples are means over the samples."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from gossamer.config import Section
from gossamer.config.ranges import Layers, PositiveFloat32
from gossamer.config.registry import register
from gossamer.errors import BadInput, cause
from gossamer.tasks.data import Source, package
from gossamer.tasks.metrics import IGNORED as IGNORED
from gossamer.tasks.task import ExpMean, Metric, ModelSource

LLM = "'gossamer[llm]'"  # what to install

# The files read from a model's folder. Weights are safetensors, so nothing is unpickled.
FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


class Lora(Section):
    """Low-rank adapters (LoRA; Hu et al., 2022): the weight W of a layer becomes W + (alpha / r) B A. Only A
    and B are trained, sent and mixed; W is frozen. B starts at zero."""

    r: PositiveInt = 8
    alpha: PositiveFloat32 = 16.0
    # Suffixes of the names of adapted layers; None is peft's default for the architecture.
    targets: tuple[str, ...] | None = None


class Tokenizer(Source, Section):
    """A tokenizer of transformers, from a folder or the hub."""


def pretrained(kind: str, source: Source, data_root: Path | None, field: str, **options: Any) -> Any:
    """Load a folder with a class of transformers, without network access and without running code from the folder."""
    folder, transformers = source.locate(data_root, "model", FILES), package("transformers", LLM)
    transformers.logging.disable_progress_bar()
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        return getattr(transformers, kind).from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many kinds of errors
        accepted = "what save_pretrained() writes, with safetensors"
        raise BadInput(f"{field}: {folder}: {cause(error)}; accepted: {accepted}") from error


class LanguageModel(ModelSource):
    """Base class of the causal language models of transformers, with attention computed as plain products
    (``eager``). ``shape`` begins with the length of the longest sequence, and ``classes`` is the number of
    tokens. Needs the extra ``llm``."""

    lora: Lora | None = None  # train only adapters; None trains the whole model

    def _adapted(self, create: Callable[[], nn.Module]) -> NextToken:
        model = create()
        if self.lora is not None:
            peft, targets = package("peft", LLM), self.lora.targets and list(self.lora.targets)
            transposed = any(type(layer).__name__ == "Conv1D" for layer in model.modules())
            options = {"r": self.lora.r, "lora_alpha": self.lora.alpha, "fan_in_fan_out": transposed}
            peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **options), model)
        return NextToken(model)


@register("model", "gpt2")
class GPT2(LanguageModel):
    """A GPT-2 with ReLU, without dropout and with random initial weights, as in TinyMem (Sakarvadia et al., 2025)."""

    layers: Layers = 4
    width: PositiveInt = 128
    heads: PositiveInt = 4

    @model_validator(mode="after")
    def _divides(self) -> GPT2:
        if self.width % self.heads:
            raise ValueError(f"a width that is a multiple of heads, {self.heads}")
        return self

    def factory(self, data_root: Path | None, **facts: Any) -> Callable[[], nn.Module]:
        transformers = package("transformers", LLM)
        config = transformers.GPT2Config(
            vocab_size=facts["classes"],
            n_positions=facts["shape"][0],
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function="relu",
            initializer_range=0.8 / self.width**0.5,
            attn_implementation="eager",
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        )
        return partial(self._adapted, partial(transformers.GPT2LMHeadModel, config))


@register("model", "causal-lm")
class CausalLM(Source, LanguageModel):
    """A pretrained causal language model of any architecture, from a folder written by ``save_pretrained()``
    (``path``) or the Hugging Face hub (``hub_id``). Text is tokenized with the model's own tokenizer."""

    def factory(self, data_root: Path | None, **facts: Any) -> Callable[[], nn.Module]:
        """A function that creates models. Adapted models share the frozen weights."""
        options = {"dtype": torch.float32, "attn_implementation": "eager", "use_safetensors": True}
        base = pretrained("AutoModelForCausalLM", self, data_root, "task.model", **options)
        for weight in base.parameters():
            weight.data = weight.data.clone()  # aligned memory, which a view of a file may lack
        tokens, context = facts["classes"], facts["shape"][0]
        positions = getattr(base.config, "max_position_embeddings", context)
        if base.config.vocab_size < tokens or positions < context:
            problem = f"{base.config.vocab_size} tokens and positions up to {positions}"
            raise BadInput(f"task.model: {problem}; accepted: at least {tokens} and {context}")
        shared = {} if self.lora is None else {id(weight): weight for weight in base.parameters()}
        return partial(self._adapted, lambda: deepcopy(base, dict(shared)))


class NextToken(nn.Module):
    """The scores of each next token from a causal language model of transformers. A token attends to itself
    and earlier tokens, so padding at the end does not affect the tokens before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Integer[Tensor, "samples length"]) -> Float[Tensor, "samples length tokens"]:
        tokens = tokens.long()  # they are stored in fewer bytes
        # With a mask, transformers does not need to inspect the tokens' values.
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
    """Fraction of the target tokens that have the highest score."""
    return _mean_of_counted((outputs.argmax(-1) == targets).float(), targets)


METRICS: dict[str, Metric] = {"accuracy": token_accuracy, "perplexity": ExpMean(token_loss)}
