"""Gemma, Gemma 2 and Gemma 3 (text): scaled embeddings, norms by 1 + w, then soft caps, windows and two bases."""

from __future__ import annotations

import math

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    EXTERNAL_ACTIVATIONS,
    LLAMA_KEYS,
    TIED,
    Family,
    Key,
    one_bias,
    or_null,
    whole,
)
from pe_lab.checkpoints.families.formats import OneRotation, RotationByType, WindowsByType, every
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys
from pe_lab.config import ModelConfig

_BLOCK = {"norm": "rms_plus_one", "activation": "gelu_tanh"}
_KEYS = LLAMA_KEYS | ATTENTION_BIAS | TIED | {"head_dim": Key("head_dim", 256)}


def embedding_is_scaled(model: ModelConfig) -> list[str]:
    """A reason why a family whose embeddings are multiplied by sqrt(d_model) cannot hold a model."""
    root = model.d_model**0.5
    if model.embedding_multiplier == root:
        return []
    return [f"embedding_multiplier is {model.embedding_multiplier:g}, not sqrt(d_model), {root:g}"]


def _holds(model: ModelConfig) -> list[str]:
    return [*embedding_is_scaled(model), *one_bias(model)]


def _write_scale(value: float, model: ModelConfig) -> float:
    """The number whose power -1/2 is the scale of products; a whole one where that is exact, as in published files."""
    number = value**-2 if value else float(model.head_dim)
    return round(number) if round(number) ** -0.5 == (value or model.head_dim**-0.5) else number


_SCALE = {"attention_scale": Key("query_pre_attn_scalar", 256, read=lambda x: x**-0.5, write=_write_scale)}
GEMMA_EMBEDDING = {"embedding_multiplier": lambda config: math.sqrt(whole(config, "hidden_size"))}
POST_NORM_TENSORS = LLAMA_TENSORS.changed(
    {
        "model.layers.{n}.post_attention_layernorm": "layers.attention_post_norm.scale",
        "model.layers.{n}.pre_feedforward_layernorm": "layers.mlp_norm.scale",
        "model.layers.{n}.post_feedforward_layernorm": "layers.mlp_post_norm.scale",
    }
)


def _caps(attention: float, logits: float) -> dict[str, Key]:
    """The keys of both soft caps, with the values of files without them."""
    return {
        "attention_soft_cap": or_null("attn_logit_softcapping", attention),
        "logit_soft_cap": or_null("final_logit_softcapping", logits),
    }


FAMILIES = (
    Family(
        "gemma",
        "GemmaForCausalLM",
        OneRotation(RopeKeys(length=8192)),
        LLAMA_TENSORS,
        _BLOCK,
        _KEYS,
        reads=GEMMA_EMBEDDING,
        activations={"gelu": "gelu_tanh"},  # its first files have gelu for the approximation
        holds=_holds,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        OneRotation(RopeKeys(length=8192), WindowsByType(4096, every(2))),
        POST_NORM_TENSORS,
        _BLOCK | {"block": "pre_post_norm"},
        _KEYS | _SCALE | _caps(50.0, 30.0),
        reads=GEMMA_EMBEDDING,
        activation="hidden_activation",
        writes=lambda model: {"hidden_act": EXTERNAL_ACTIVATIONS[model.activation]},  # SGLang asks for it
        holds=_holds,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        RotationByType(
            RopeKeys(1_000_000.0, length=131_072),
            RopeKeys(10_000.0, length=131_072),
            WindowsByType(4096, every(6, "sliding_window_pattern")),
            local_key="rope_local_base_freq",
        ),
        POST_NORM_TENSORS,
        _BLOCK | {"block": "pre_post_norm", "qk_norm": "head"},
        _KEYS | _SCALE | _caps(0.0, 0.0),
        reads=GEMMA_EMBEDDING,
        activation="hidden_activation",
        holds=_holds,
    ),
)
