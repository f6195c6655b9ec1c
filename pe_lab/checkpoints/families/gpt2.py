"""GPT-2: learned positions, LayerNorms, biases, matrices as [in, out], queries, keys and values in one."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import TIED, Family, Key, all_heads_have_keys, heads_fill_the_model, times
from pe_lab.checkpoints.families.formats import LearnedTable
from pe_lab.checkpoints.families.tensors import QKV, Fused, TensorTable

FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        LearnedTable("n_positions", 1024, copies=("n_ctx",)),
        TensorTable(
            {
                "transformer.wte": "token_embedder.embedding",
                "transformer.wpe": "layers.positional.learned_positions.table",
                "transformer.ln_f": "token_embedder.final_norm.scale",
                "lm_head": "token_embedder.unembedding",
                "transformer.h.{n}.ln_1": "layers.attention_norm.scale",
                "transformer.h.{n}.attn.c_attn": Fused(QKV, "rows"),
                "transformer.h.{n}.attn.c_proj": "layers.attention.out",
                "transformer.h.{n}.ln_2": "layers.mlp_norm.scale",
                "transformer.h.{n}.mlp.c_fc": "layers.mlp.up",
                "transformer.h.{n}.mlp.c_proj": "layers.mlp.down",
            },
            transposed=True,
            ignored=("attn.bias", "attn.masked_bias"),
        ),
        {"norm": "layer", "gated_mlp": False, "attention_bias": True, "output_bias": True, "mlp_bias": True},
        TIED
        | {
            "vocab_size": Key("vocab_size"),
            "layers": Key("n_layer"),
            "d_model": Key("n_embd"),
            "d_ff": Key("n_inner", times("n_embd", 4)),
            "heads": Key("n_head"),
            "kv_heads": Key("n_head"),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
        },
        activation="activation_function",
        constants={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
    ),
)
