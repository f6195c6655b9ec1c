"""Tiny models of the families that people have, one for each way in which they differ; for make_hf_models.py.

FAMILIES[NAME] = (class of transformers without its ending, settings, dtype of the file); OFF[NAME] = {what is switched
off: the settings that do it}.
"""

VOCABULARY = 64
SLIDING, FULL = "sliding_attention", "full_attention"
TYPES = [SLIDING, SLIDING, FULL, SLIDING]
ALL_FULL = dict(layer_types=[FULL] * 4)
SHIFTED = dict(layer_types=[SLIDING, FULL, SLIDING, SLIDING])

SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHAPE = SIZES | dict(intermediate_size=48, num_key_value_heads=2, max_position_embeddings=256)
RMS = SHAPE | dict(rms_norm_eps=0.02, tie_word_embeddings=False)
FOUR = dict(num_hidden_layers=4, intermediate_size=32)
OLD = dict(vocab_size=VOCABULARY, n_layer=2, n_head=4, layer_norm_epsilon=0.02)
OLD |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def default(theta: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | more


def rope(theta: float, **more) -> dict:
    return {"rope_parameters": default(theta, **more)}


def by_type(full: dict, sliding: dict) -> dict:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
GEMMA3 = by_type(default(5000.0, rope_type="linear", factor=4.0), default(100.0))
P_ROPE = dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25)
GEMMA4 = by_type(P_ROPE, default(100.0)) | dict(head_dim=8, global_head_dim=16, sliding_window=8)
GEMMA4 |= dict(tie_word_embeddings=True, final_logit_softcapping=6.0)
PHI3 = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.25, 1.5, 1.5],
    long_factor=[1.0, 1.5, 2.5, 4.0],
    partial_rotary_factor=0.5,
)

FAMILIES = {
    "mistral": ("Mistral", RMS | rope(500.0) | dict(sliding_window=8), "float32"),
    "ministral3": (
        "Ministral3",
        RMS
        | dict(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
        | rope(100.0, **YARN, mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.3),
        "float16",
    ),
    "olmo2": ("Olmo2", RMS | rope(500.0), "float32"),
    "olmo3": (
        "Olmo3",
        RMS | FOUR | by_type(default(500.0, **YARN), default(500.0)) | dict(sliding_window=8, layer_types=TYPES),
        "float16",
    ),
    "gemma2": (
        "Gemma2",
        RMS
        | rope(500.0)
        | dict(head_dim=16, num_key_value_heads=1, sliding_window=8, layer_types=[SLIDING, FULL])
        | dict(tie_word_embeddings=True, query_pre_attn_scalar=5, attn_logit_softcapping=4.0)
        | dict(final_logit_softcapping=6.0),
        "float16",
    ),
    "gemma3": (
        "Gemma3",
        RMS
        | FOUR
        | GEMMA3
        | dict(head_dim=16, num_key_value_heads=1, sliding_window=8, layer_types=TYPES)
        | dict(tie_word_embeddings=True, query_pre_attn_scalar=20),
        "float16",
    ),
    "gemma4": (
        "Gemma4",
        RMS
        | FOUR
        | GEMMA4
        | dict(attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[SLIDING, FULL, SLIDING, FULL])
        | dict(hidden_size_per_layer_input=0),
        "float16",
    ),
    "gemma4_shared": (
        "Gemma4",
        RMS
        | FOUR
        | GEMMA4
        | dict(num_hidden_layers=5, layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL])
        | dict(num_kv_shared_layers=2, use_double_wide_mlp=True)
        | dict(hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCABULARY),
        "float16",
    ),
    "cohere2": (
        "Cohere2",
        SHAPE
        | FOUR
        | rope(500.0)
        | dict(sliding_window=8, layer_types=TYPES, logit_scale=0.25, layer_norm_eps=0.02, tie_word_embeddings=True),
        "float16",
    ),
    "exaone4": ("Exaone4", RMS | FOUR | rope(500.0) | dict(sliding_window=8, layer_types=TYPES), "float16"),
    "exaone4_full": (
        "Exaone4",
        RMS | rope(500.0) | dict(sliding_window=None, layer_types=[FULL] * 2, tie_word_embeddings=True),
        "float16",
    ),
    "granite": (
        "Granite",
        RMS
        | rope(500.0)
        | dict(embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0),
        "float32",
    ),
    "granite_swa": (
        "GraniteSWA",
        RMS
        | FOUR
        | rope(500.0)
        | dict(embedding_multiplier=3.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=4.0)
        | dict(sliding_window=8, layer_types=TYPES, layer_rope_theta=[500.0, 100.0, 0.0, 500.0]),
        "float16",
    ),
    "phi3": (
        "Phi3",
        RMS
        | dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=30)
        | dict(max_position_embeddings=64, original_max_position_embeddings=16)
        | rope(100.0, **PHI3),
        "float16",
    ),
    "starcoder2": ("Starcoder2", SHAPE | rope(500.0) | dict(sliding_window=8, norm_epsilon=0.02), "float16"),
    "stablelm": (
        "StableLm",
        SHAPE
        | rope(500.0, partial_rotary_factor=0.5)
        | dict(layer_norm_eps=0.02, use_qkv_bias=True, qk_layernorm=True),
        "float16",
    ),
    "stablelm_parallel": (
        "StableLm",
        SHAPE | rope(500.0, partial_rotary_factor=0.5) | dict(layer_norm_eps=0.02, use_parallel_residual=True),
        "float16",
    ),
    "gptj": ("GPTJ", OLD | dict(n_embd=32, n_inner=48, n_positions=64, rotary_dim=4), "float16"),
    "falcon_7b": (
        "Falcon",
        SIZES | rope(500.0) | dict(layer_norm_epsilon=0.02, ffn_hidden_size=48, max_position_embeddings=256),
        "float16",
    ),
    "falcon_40b": (
        "Falcon",
        SIZES
        | rope(500.0)
        | dict(layer_norm_epsilon=0.02, ffn_hidden_size=48, max_position_embeddings=256)
        | dict(new_decoder_architecture=True, num_kv_heads=2),
        "float16",
    ),
    "falcon_sequential": (
        "Falcon",
        SIZES
        | rope(500.0)
        | dict(layer_norm_epsilon=0.02, ffn_hidden_size=48, max_position_embeddings=256)
        | dict(multi_query=False, parallel_attn=False, bias=True),
        "float16",
    ),
    "glm4": (
        "Glm4",
        RMS | rope(500.0, partial_rotary_factor=0.5) | dict(head_dim=16, attention_bias=True),
        "float16",
    ),
    "mpt": (
        "Mpt",
        dict(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
        | dict(layer_norm_epsilon=0.02, attn_config=dict(clip_qkv=1.5, softmax_scale=0.5)),
        "float16",
    ),
    # Six heads: their slopes are those of eight, and of four.
    "bloom": ("Bloom", OLD | dict(hidden_size=36, n_head=6), "float16"),
    "gpt2": ("GPT2LMHead", OLD | dict(n_embd=32, n_inner=48, n_positions=64), "float16"),
    "opt": (
        "OPT",
        SIZES | dict(ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.02),
        "float16",
    ),
}

OFF = {
    "mistral": {"window": dict(sliding_window=None), "window of 7": dict(sliding_window=7)},
    "ministral3": {
        "mscale": {"rope_parameters": dict(mscale=None, mscale_all_dim=None)},
        "temperature": {"rope_parameters": dict(llama_4_scaling_beta=0.0)},
    },
    "olmo3": {"window": ALL_FULL, "which layer": SHIFTED, "yarn": by_type(default(500.0), default(500.0))},
    "gemma2": {
        "scale": dict(query_pre_attn_scalar=16),
        "cap of attention": dict(attn_logit_softcapping=None),
        "cap of logits": dict(final_logit_softcapping=None),
        "window": dict(layer_types=[FULL] * 2),
        "which layer": dict(layer_types=[FULL, SLIDING]),
    },
    "gemma3": {
        "scale": dict(query_pre_attn_scalar=16),
        "bases exchanged": by_type(default(100.0, rope_type="linear", factor=4.0), default(5000.0)),
        "linear": by_type(default(5000.0), default(100.0)),
        "linear on all": by_type(
            default(5000.0, rope_type="linear", factor=4.0), default(100.0, rope_type="linear", factor=4.0)
        ),
        "window": ALL_FULL,
        "which layer": SHIFTED,
    },
    "gemma4": {
        "cap of logits": dict(final_logit_softcapping=None),
        "p": by_type(P_ROPE | dict(partial_rotary_factor=0.5), default(100.0)),
        "bases": by_type(P_ROPE | dict(rope_theta=100.0), default(500.0)),
        "window": dict(sliding_window=16),
    },
    "gemma4_shared": {"window": dict(sliding_window=16), "p": by_type(P_ROPE | dict(factor=2.0), default(100.0))},
    "cohere2": {"logit scale": dict(logit_scale=1.0), "window": ALL_FULL, "which layer": SHIFTED},
    "exaone4": {"window": ALL_FULL, "which layer": SHIFTED, "rotation of all": dict(sliding_window=None) | ALL_FULL},
    "granite": {
        "embedding": dict(embedding_multiplier=1.0),
        "attention": dict(attention_multiplier=8**-0.5),
        "residual": dict(residual_multiplier=1.0),
        "logits": dict(logits_scaling=1.0),
    },
    "granite_swa": {
        "bases": dict(layer_rope_theta=[500.0] * 4),
        "no rotation": dict(layer_rope_theta=[500.0, 100.0, 500.0, 500.0]),
        "window": ALL_FULL,
        "which layer": SHIFTED,
    },
    "phi3": {
        "long factors": {"rope_parameters": dict(long_factor=PHI3["short_factor"])},
        "window": dict(sliding_window=None),
        "gain": dict(max_position_embeddings=16),
    },
    "starcoder2": {"window": dict(sliding_window=None)},
    "stablelm": {"part": {"rope_parameters": dict(partial_rotary_factor=1.0)}},
    "stablelm_parallel": {"part": {"rope_parameters": dict(partial_rotary_factor=1.0)}},
    "gptj": {"part": dict(rotary_dim=8)},
    "glm4": {"part": {"rope_parameters": dict(partial_rotary_factor=1.0)}},
    "mpt": {
        "clip": dict(attn_config=dict(clip_qkv=None, softmax_scale=0.5)),
        "scale": dict(attn_config=dict(clip_qkv=1.5, softmax_scale=None)),
    },
}
