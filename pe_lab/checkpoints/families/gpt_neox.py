"""GPT-NeoX (Pythia): parallel blocks, LayerNorms, biases, queries, keys and values in one tensor, partial rotation."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import (
    SHAPE,
    Family,
    Key,
    all_heads_have_keys,
    heads_fill_the_model,
    one_bias,
)
from pe_lab.checkpoints.families.formats import OneRotation
from pe_lab.checkpoints.families.tensors import QKV, Fused, TensorTable
from pe_lab.checkpoints.rope_parameters import RopeKeys
from pe_lab.config import ModelConfig

_TENSORS = TensorTable(
    {
        "gpt_neox.embed_in": "token_embedder.embedding",
        "gpt_neox.final_layer_norm": "token_embedder.final_norm.scale",
        "embed_out": "token_embedder.unembedding",
        "gpt_neox.layers.{n}.input_layernorm": "layers.attention_norm.scale",
        "gpt_neox.layers.{n}.post_attention_layernorm": "layers.mlp_norm.scale",
        "gpt_neox.layers.{n}.attention.query_key_value": Fused(QKV, "heads"),
        "gpt_neox.layers.{n}.attention.dense": "layers.attention.out",
        "gpt_neox.layers.{n}.mlp.dense_h_to_4h": "layers.mlp.up",
        "gpt_neox.layers.{n}.mlp.dense_4h_to_h": "layers.mlp.down",
    },
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
_BLOCKS = {True: "parallel", False: "pre_norm"}


def _holds(model: ModelConfig) -> list[str]:
    known = (
        [] if model.block in _BLOCKS.values() else [f"block is {model.block!r}, not {' or '.join(_BLOCKS.values())}"]
    )
    known += ["activation is silu"] if model.activation == "silu" else []
    return known + all_heads_have_keys(model) + heads_fill_the_model(model) + one_bias(model)


FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        OneRotation(
            RopeKeys(fraction=0.25, partial=True, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        ),
        _TENSORS,
        {"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        SHAPE
        | {
            "kv_heads": Key("num_attention_heads"),
            "norm_epsilon": Key("layer_norm_eps", 1e-5),
            "block": Key(
                "use_parallel_residual",
                True,
                read=lambda x: _BLOCKS[bool(x)],
                write=lambda value, model: value == "parallel",
            ),
            "attention_bias": Key("attention_bias", True),
            "output_bias": Key("attention_bias", True),
        },
        holds=_holds,
    ),
)
