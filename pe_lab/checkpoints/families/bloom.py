"""BLOOM: ALiBi, a norm of the embedding, LayerNorms, biases, queries, keys and values in one tensor by head."""

from __future__ import annotations

from pe_lab.checkpoints.families.family import (
    TIED,
    Family,
    Key,
    all_heads_have_keys,
    four_times,
    heads_fill_the_model,
    whole,
)
from pe_lab.checkpoints.families.formats import AlibiOnAll
from pe_lab.checkpoints.families.tensors import QKV, Fused, TensorTable

FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        AlibiOnAll("seq_length", 2048),
        TensorTable(
            {
                "transformer.word_embeddings": "token_embedder.embedding",
                "transformer.word_embeddings_layernorm": "token_embedder.embedding_norm.scale",
                "transformer.ln_f": "token_embedder.final_norm.scale",
                "lm_head": "token_embedder.unembedding",
                "transformer.h.{n}.input_layernorm": "layers.attention_norm.scale",
                "transformer.h.{n}.self_attention.query_key_value": Fused(QKV, "heads"),
                "transformer.h.{n}.self_attention.dense": "layers.attention.out",
                "transformer.h.{n}.post_attention_layernorm": "layers.mlp_norm.scale",
                "transformer.h.{n}.mlp.dense_h_to_4h": "layers.mlp.up",
                "transformer.h.{n}.mlp.dense_4h_to_h": "layers.mlp.down",
            }
        ),
        {
            "norm": "layer",
            "gated_mlp": False,
            "activation": "gelu_tanh",
            "embedding_norm": True,
            "attention_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        TIED
        | {
            "vocab_size": Key("vocab_size"),
            "layers": Key("n_layer"),
            "d_model": Key("hidden_size"),
            "heads": Key("n_head"),
            "kv_heads": Key("n_head"),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
        },
        reads={"d_ff": lambda config: 4 * whole(config, "hidden_size")},
        activation="",
        constants={"apply_residual_connection_post_layernorm": (False,)},
        holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model) + four_times(model),
    ),
)
