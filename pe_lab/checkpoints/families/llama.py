"""Llama: SmolLM, SmolLM2, Llama 2 and 3."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import ATTENTION_BIAS, LLAMA_KEYS, MLP_BIAS, Family, one_bias
from pe_lab.checkpoints.families.formats import OneRotation
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.config import ModelConfig


def _holds(model: ModelConfig) -> list[str]:
    if model.d_model % model.heads == 0:
        return one_bias(model)
    reason = f"d_model is {model.d_model}, no multiple of its {model.heads} heads, which transformers 5 requires"
    return [reason, *one_bias(model)]


FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        OneRotation(),
        LLAMA_TENSORS,
        {"activation": "silu"},
        LLAMA_KEYS | ATTENTION_BIAS | MLP_BIAS,
        holds=_holds,
    ),
)
