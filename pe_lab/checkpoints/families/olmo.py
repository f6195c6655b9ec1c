"""OLMo 2 and OLMo 3: norms after attention and MLP, QK-norm over all heads; then windows, and YaRN without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pe_lab.checkpoints.families.family import ATTENTION_BIAS, LLAMA_KEYS, Family, Key, heads_fill_the_model, one_bias
from pe_lab.checkpoints.families.formats import OneRotation, RotationByType, WindowsByType, every
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.positional import Layer

_TENSORS = LLAMA_TENSORS.changed(
    {
        "model.layers.{n}.post_attention_layernorm": "layers.attention_post_norm.scale",
        "model.layers.{n}.post_feedforward_layernorm": "layers.mlp_post_norm.scale",
    },
    without=("model.layers.{n}.input_layernorm",),
)
_FIXED = {"activation": "silu", "block": "post_norm", "qk_norm": "flat"}
_KEYS = LLAMA_KEYS | ATTENTION_BIAS | {"norm_epsilon": Key("rms_norm_eps", 1e-5)}


class _RotationOfOLMo2(OneRotation):
    """transformers 4 takes two keys of a scaling, `type` and `factor`, and refuses others than linear and dynamic."""

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        keys = super().write(layers, model, options)
        if (scaling := keys["rope_scaling"]) and scaling["rope_type"] in ("linear", "dynamic"):
            keys["rope_scaling"] = {"type": scaling["rope_type"], "factor": scaling["factor"]}
        return keys


def _holds(model: ModelConfig) -> list[str]:
    return heads_fill_the_model(model) + one_bias(model)


FAMILIES = (
    Family("olmo2", "Olmo2ForCausalLM", _RotationOfOLMo2(), _TENSORS, _FIXED, _KEYS, holds=_holds),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        RotationByType(RopeKeys(500_000.0), RopeKeys(500_000.0), WindowsByType(4096, every(4))),
        _TENSORS,
        _FIXED,
        _KEYS,
        holds=_holds,
    ),
)
