"""EXAONE 4: norms after attention and MLP, QK-norm per head; with windows, layers without a window do not rotate."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Family, Key
from pe_lab.checkpoints.families.formats import RotatedWindows, WindowsByType, every
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys

FAMILIES = (
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        RotatedWindows(RopeKeys(), WindowsByType(4096, every(4, "sliding_window_pattern")), unless_windows=True),
        LLAMA_TENSORS.changed(
            {
                "model.layers.{n}.post_attention_layernorm": "layers.attention_post_norm.scale",
                "model.layers.{n}.post_feedforward_layernorm": "layers.mlp_post_norm.scale",
            },
            without=("model.layers.{n}.input_layernorm",),
        ),
        {"activation": "silu", "block": "post_norm", "qk_norm": "head"},
        LLAMA_KEYS | {"norm_epsilon": Key("rms_norm_eps", 1e-5)},
    ),
)
