"""Cohere 2 (Command R7B): a parallel block with one LayerNorm, adjacent pairs, no rotation in layers without window."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    TIED,
    Family,
    Key,
    heads_fill_the_model,
    one_bias,
)
from pe_lab.checkpoints.families.formats import RotatedWindows, WindowsByType, every
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys

FAMILIES = (
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        RotatedWindows(RopeKeys(length=8192), WindowsByType(4096, every(4, "sliding_window_pattern"))),
        LLAMA_TENSORS.changed(without=("model.layers.{n}.post_attention_layernorm",)),
        {"activation": "silu", "block": "parallel_one_norm", "norm": "layer_no_bias"},
        LLAMA_KEYS
        | ATTENTION_BIAS
        | TIED
        | {"norm_epsilon": Key("layer_norm_eps", 1e-5), "logit_multiplier": Key("logit_scale", 0.0625)},
        writes=lambda model: {"rotary_pct": 1.0},  # llama.cpp's converter asks for it
        holds=lambda model: heads_fill_the_model(model) + one_bias(model),
        pairs="interleaved",
    ),
)
