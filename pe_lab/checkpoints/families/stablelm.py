"""StableLM 2: LayerNorms, a quarter of the channels rotates; its 12B has parallel blocks and a norm for each head."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Family, Key, heads_fill_the_model
from pe_lab.checkpoints.families.formats import OneRotation
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys
from pe_lab.config import ModelConfig

_BLOCKS = {False: "pre_norm", True: "parallel_one_norm"}
_NORMS = {False: "none", True: "layer_heads"}


def _holds(model: ModelConfig) -> list[str]:
    wrong = heads_fill_the_model(model)
    for name, known in (("block", _BLOCKS), ("qk_norm", _NORMS)):
        if getattr(model, name) not in known.values():
            wrong.append(f"{name} is {getattr(model, name)!r}, not {' or '.join(known.values())}")
    return wrong


FAMILIES = (
    Family(
        "stablelm",
        "StableLmForCausalLM",
        OneRotation(RopeKeys(fraction=0.25, length=4096, partial=True)),
        LLAMA_TENSORS.changed(
            {
                "model.layers.{n}.self_attn.q_layernorm.norms.{h}": "layers.attention.query_norm.scale",
                "model.layers.{n}.self_attn.k_layernorm.norms.{h}": "layers.attention.key_norm.scale",
            },
            without=[f"model.layers.{{n}}.self_attn.{x}_norm" for x in "qk"],
        ),
        {"activation": "silu", "norm": "layer"},
        LLAMA_KEYS
        | {
            "norm_epsilon": Key("layer_norm_eps", 1e-5),
            "attention_bias": Key("use_qkv_bias", False),
            "block": Key(
                "use_parallel_residual",
                False,
                read=lambda x: _BLOCKS[bool(x)],
                write=lambda value, model: value == _BLOCKS[True],
            ),
            "qk_norm": Key(
                "qk_layernorm", False, read=lambda x: _NORMS[bool(x)], write=lambda value, model: value == _NORMS[True]
            ),
        },
        holds=_holds,
    ),
)
