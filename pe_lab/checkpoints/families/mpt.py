"""MPT: ALiBi, LayerNorms without bias, queries, keys and values in one tensor, bounded by `clip_qkv`."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import (
    TIED,
    Family,
    Key,
    all_heads_have_keys,
    four_times,
    heads_fill_the_model,
    or_null,
    whole,
)
from pe_lab.checkpoints.families.formats import AlibiOnAll
from pe_lab.checkpoints.families.tensors import QKV, Fused, TensorTable

FAMILIES = (
    Family(
        "mpt",
        "MptForCausalLM",
        AlibiOnAll("max_seq_len", 2048),
        TensorTable(
            {
                "transformer.wte": "token_embedder.embedding",
                "transformer.norm_f": "token_embedder.final_norm.scale",
                "lm_head": "token_embedder.unembedding",
                "transformer.blocks.{n}.norm_1": "layers.attention_norm.scale",
                "transformer.blocks.{n}.norm_2": "layers.mlp_norm.scale",
                "transformer.blocks.{n}.attn.Wqkv": Fused(QKV, "rows"),
                "transformer.blocks.{n}.attn.out_proj": "layers.attention.out",
                "transformer.blocks.{n}.ffn.up_proj": "layers.mlp.up",
                "transformer.blocks.{n}.ffn.down_proj": "layers.mlp.down",
            }
        ),
        {"norm": "layer_no_bias", "gated_mlp": False, "activation": "gelu"},
        TIED
        | {
            "vocab_size": Key("vocab_size"),
            "layers": Key("n_layers"),
            "d_model": Key("d_model"),
            "heads": Key("n_heads"),
            "kv_heads": Key("n_heads"),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
            "attention_scale": or_null("attn_config.softmax_scale"),
            "qkv_clip": or_null("attn_config.clip_qkv"),
        },
        reads={"d_ff": lambda config: 4 * whole(config, "d_model")},
        activation="",
        constants={
            "expansion_ratio": (4,),
            "attn_config.attn_type": ("multihead_attention",),
            "attn_config.alibi": (True,),
            "attn_config.alibi_bias_max": (8,),
            "attn_config.prefix_lm": (False,),
            "attn_config.qk_ln": (False,),
            "no_bias": (True,),
            "logit_scale": (None,),
        },
        holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model) + four_times(model),
    ),
)
