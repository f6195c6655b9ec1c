"""GLM-4 (0414): norms before and after, half of the channels rotate in adjacent pairs, bias of queries and keys."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Family, Key
from pe_lab.checkpoints.families.formats import OneRotation
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS, Fused
from pe_lab.checkpoints.rope_parameters import RopeKeys

FAMILIES = (
    Family(
        "glm4",
        "Glm4ForCausalLM",
        OneRotation(RopeKeys(fraction=0.5, length=131_072, partial=True)),
        LLAMA_TENSORS.changed(
            {
                "model.layers.{n}.post_self_attn_layernorm": "layers.attention_post_norm.scale",
                "model.layers.{n}.post_mlp_layernorm": "layers.mlp_post_norm.scale",
                "model.layers.{n}.mlp.gate_up_proj": Fused(("layers.mlp.gate", "layers.mlp.up"), "rows"),
            },
            without=[f"model.layers.{{n}}.mlp.{x}_proj" for x in ("gate", "up")],
        ),
        {"activation": "silu", "block": "pre_post_norm"},
        LLAMA_KEYS
        | {
            "kv_heads": Key("num_key_value_heads", 2),
            "head_dim": Key("head_dim", 128),
            "norm_epsilon": Key("rms_norm_eps", 1.5625e-7),
            "attention_bias": Key("attention_bias", True),
        },
        pairs="interleaved",
    ),
)
