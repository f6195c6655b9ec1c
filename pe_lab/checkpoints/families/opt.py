"""OPT: learned positions from row 2 on, LayerNorms, biases, ReLU. Its 350M, whose norms come after, is refused."""

from __future__ import annotations

from collections.abc import Sequence

from pe_lab.checkpoints.families.family import (
    SHAPE,
    TIED,
    Config,
    Family,
    Key,
    all_heads_have_keys,
    heads_fill_the_model,
)
from pe_lab.checkpoints.families.formats import LearnedTable
from pe_lab.checkpoints.families.tensors import TensorTable
from pe_lab.errors import UnsupportedError

_LAYER = "model.decoder.layers.{n}."


def _inferred(config: Config, names: Sequence[str]) -> Config:
    inner = config.get("word_embed_proj_dim")
    if inner not in (None, config.get("hidden_size")):
        raise UnsupportedError(
            f"word_embed_proj_dim is {inner!r} and hidden_size {config.get('hidden_size')!r}: pe_lab does not project "
            "embeddings."
        )
    return config


FAMILIES = (
    Family(
        "opt",
        "OPTForCausalLM",
        LearnedTable("max_position_embeddings", 2048, offset=2),
        TensorTable(
            {
                "model.decoder.embed_tokens": "token_embedder.embedding",
                "model.decoder.embed_positions": "layers.positional.learned_positions.table",
                "model.decoder.final_layer_norm": "token_embedder.final_norm.scale",
                "lm_head": "token_embedder.unembedding",
                f"{_LAYER}self_attn_layer_norm": "layers.attention_norm.scale",
                f"{_LAYER}self_attn.q_proj": "layers.attention.query",
                f"{_LAYER}self_attn.k_proj": "layers.attention.key",
                f"{_LAYER}self_attn.v_proj": "layers.attention.value",
                f"{_LAYER}self_attn.out_proj": "layers.attention.out",
                f"{_LAYER}final_layer_norm": "layers.mlp_norm.scale",
                f"{_LAYER}fc1": "layers.mlp.up",
                f"{_LAYER}fc2": "layers.mlp.down",
            }
        ),
        {
            "norm": "layer",
            "norm_epsilon": 1e-5,
            "gated_mlp": False,
            "attention_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        SHAPE | TIED | {"d_ff": Key("ffn_dim"), "kv_heads": Key("num_attention_heads")},
        writes=lambda model: {"word_embed_proj_dim": model.d_model},
        activation="activation_function",
        constants={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
        inferred=_inferred,
    ),
)
