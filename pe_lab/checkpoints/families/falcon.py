"""Falcon: 7B (one key head, parallel blocks with one norm), 40B (key heads by group, two norms)."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import (
    SHAPE,
    TIED,
    Config,
    Family,
    Key,
    heads_fill_the_model,
    times,
    whole,
)
from pe_lab.checkpoints.families.formats import OneRotation
from pe_lab.checkpoints.families.tensors import QKV, Fused, TensorTable
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError

_TENSORS = TensorTable(
    {
        "transformer.word_embeddings": "token_embedder.embedding",
        "transformer.ln_f": "token_embedder.final_norm.scale",
        "lm_head": "token_embedder.unembedding",
        "transformer.h.{n}.input_layernorm": "layers.attention_norm.scale",
        "transformer.h.{n}.self_attention.dense": "layers.attention.out",
        "transformer.h.{n}.mlp.dense_h_to_4h": "layers.mlp.up",
        "transformer.h.{n}.mlp.dense_4h_to_h": "layers.mlp.down",
    },
    ignored=("rotary_emb.inv_freq", "inv_freq"),
)
_NORMS = {
    "parallel": {
        "transformer.h.{n}.ln_attn": "layers.attention_norm.scale",
        "transformer.h.{n}.ln_mlp": "layers.mlp_norm.scale",
    },
    "parallel_one_norm": {},
    "pre_norm": {"transformer.h.{n}.post_attention_layernorm": "layers.mlp_norm.scale"},
}


def _tensors(model: ModelConfig) -> TensorTable:
    how = "groups" if _grouped(model) else "heads"
    fused = {"transformer.h.{n}.self_attention.query_key_value": Fused(QKV, how)}
    without = ["transformer.h.{n}.input_layernorm"] if model.block == "parallel" else []
    return _TENSORS.changed(fused | _NORMS[model.block], without=without)


def _grouped(model: ModelConfig) -> bool:
    return model.kv_heads != model.heads or model.block == "parallel"


def _block(config: Config) -> str:
    if not config.get("new_decoder_architecture"):
        return "parallel_one_norm" if config.get("parallel_attn", True) else "pre_norm"
    norms = config.get("num_ln_in_parallel_attn")
    if norms not in (None, 1, 2):
        raise CheckpointError(f"num_ln_in_parallel_attn is {norms!r}; it must be 1 or 2.")
    return "parallel_one_norm" if norms == 1 else "parallel"


def _kv_heads(config: Config) -> int:
    heads = whole(config, "num_attention_heads")
    if config.get("new_decoder_architecture"):
        return whole(config, "num_kv_heads", heads)
    return 1 if config.get("multi_query", True) else heads


def _holds(model: ModelConfig) -> list[str]:
    wrong = heads_fill_the_model(model)
    if model.block not in _NORMS:
        wrong.append(f"block is {model.block!r}, not {' or '.join(_NORMS)}")
    if len({model.attention_bias, model.output_bias, model.mlp_bias}) > 1:
        wrong.append("its bias is on all projections, or on none")
    if model.block == "pre_norm" and model.kv_heads not in (1, model.heads):
        wrong.append("sequential blocks have one key head, or as many as query heads")
    return wrong


def _write_new(model: ModelConfig) -> bool:
    """Whether a model is of the newer architecture: two norms, or several groups."""
    return model.block == "parallel" or (model.block == "parallel_one_norm" and 1 < model.kv_heads < model.heads)


_BIAS = Key("bias", False)
FAMILIES = (
    Family(
        "falcon",
        "FalconForCausalLM",
        OneRotation(),
        _tensors,
        {"norm": "layer", "gated_mlp": False},
        SHAPE
        | TIED
        | {
            "d_ff": Key("ffn_hidden_size", times("hidden_size", 4)),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
            "attention_bias": _BIAS,
            "output_bias": _BIAS,
            "mlp_bias": _BIAS,
        },
        reads={"block": _block, "kv_heads": _kv_heads},
        activation="activation",
        constants={"alibi": (False,)},  # that of the RW models is rounded to bfloat16
        holds=_holds,
        writes=lambda model: {
            "new_decoder_architecture": _write_new(model),
            "num_ln_in_parallel_attn": {"parallel": 2, "parallel_one_norm": 1}.get(model.block)
            if _write_new(model)
            else None,
            "parallel_attn": model.block != "pre_norm",
            "multi_query": model.kv_heads == 1,
            "num_kv_heads": model.kv_heads,
        },
    ),
)
