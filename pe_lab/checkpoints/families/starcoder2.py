"""StarCoder2: LayerNorms, biases, a plain MLP, a window on all layers or on none."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Family, Key, heads_fill_the_model
from pe_lab.checkpoints.families.formats import OneRotation, OneWindow
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys
from pe_lab.config import ModelConfig

_BIASES = ("attention_bias", "output_bias", "mlp_bias")


def _holds(model: ModelConfig) -> list[str]:
    equal = len({getattr(model, name) for name in _BIASES}) == 1
    return heads_fill_the_model(model) + ([] if equal else ["its bias is on all projections, or on none"])


FAMILIES = (
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        OneRotation(RopeKeys(length=4096), OneWindow()),
        LLAMA_TENSORS.changed(
            {"model.layers.{n}.mlp.c_fc": "layers.mlp.up", "model.layers.{n}.mlp.c_proj": "layers.mlp.down"},
            without=[f"model.layers.{{n}}.mlp.{x}_proj" for x in ("gate", "up", "down")],
        ),
        {"norm": "layer", "gated_mlp": False},
        LLAMA_KEYS
        | {name: Key("use_bias", True) for name in _BIASES}
        | {
            "kv_heads": Key("num_key_value_heads", 2),
            "norm_epsilon": Key("norm_epsilon", 1e-5),
            "tie_embeddings": Key("tie_word_embeddings", True),
        },
        holds=_holds,
    ),
)
