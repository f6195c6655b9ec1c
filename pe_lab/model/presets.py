"""Shapes of published models, for the `config.model` of recipes.

A preset sets fields of `ModelConfig`, which define the decoder. The positional encoding is part of a phase; comments
give the base of the published one. Tests compare parameter counts with those of transformers.
"""

from __future__ import annotations

from typing import Any

from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import ConfigError, did_you_mean

TIED = dict(tie_embeddings=True, norm_epsilon=1e-5)
UNTIED = dict(tie_embeddings=False, norm_epsilon=1e-5)
QWEN = dict(tie_embeddings=True, norm_epsilon=1e-6)
GEMMA = QWEN | dict(norm="rms_plus_one", activation="gelu_tanh")
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
GEMMA_3 = GEMMA | dict(block="pre_post_norm", qk_norm="head", head_dim=256, attention_scale=256**-0.5)
OLMO = dict(tie_embeddings=False, norm_epsilon=1e-6, block="post_norm", qk_norm="flat")
PYTHIA = UNTIED | BIASES | dict(norm="layer", activation="gelu", gated_mlp=False, block="parallel")

PRESETS: dict[str, dict[str, Any]] = {
    # Llama-3.2-1B (meta-llama/Llama-3.2-1B, config.json), RoPE base 500,000. The vocabulary is the Pythia tokenizer's,
    # padded, as in section 4 of "Partial RoPE".
    "llama_1b": TIED | dict(vocab_size=50304, layers=16, d_model=2048, d_ff=8192, heads=32, kv_heads=8, head_dim=64),
    # Llama-3.1-8B (meta-llama/Llama-3.1-8B, config.json) with 36 layers instead of 32 and the Pythia tokenizer,
    # as in appendix B of "Partial RoPE". RoPE base 500,000.
    "llama_8b_36": UNTIED
    | dict(vocab_size=50304, layers=36, d_model=4096, d_ff=14336, heads=32, kv_heads=8, head_dim=128),
    # Llama 3.1 8B (meta-llama/Llama-3.1-8B, config.json). RoPE base 500,000, with llama3's scaling by 8 from 8,192
    # tokens.
    "llama3_1_8b": UNTIED
    | dict(vocab_size=128256, layers=32, d_model=4096, d_ff=14336, heads=32, kv_heads=8, head_dim=128),
    # Llama 2 7B (meta-llama/Llama-2-7b-hf, config.json), which DroPE recalibrates. RoPE base 10,000.
    "llama2_7b": UNTIED
    | dict(vocab_size=32000, layers=32, d_model=4096, d_ff=11008, heads=32, kv_heads=32, head_dim=128),
    # SmolLM-360M (HuggingFaceTB/SmolLM-360M, config.json; DroPE table 4). RoPE base 10,000.
    "smollm_360m": TIED | dict(vocab_size=49152, layers=32, d_model=960, d_ff=2560, heads=15, kv_heads=5, head_dim=64),
    # SmolLM-1.7B (HuggingFaceTB/SmolLM-1.7B, config.json), which DroPE recalibrates. RoPE base 10,000. SmolLM2-1.7B has
    # the same shape, and base 130,000.
    "smollm_1_7b": TIED
    | dict(vocab_size=49152, layers=24, d_model=2048, d_ff=8192, heads=32, kv_heads=32, head_dim=64),
    # SmolLM2-135M (HuggingFaceTB/SmolLM2-135M, config.json). RoPE base 100,000.
    "smollm2_135m": TIED | dict(vocab_size=49152, layers=30, d_model=576, d_ff=1536, heads=9, kv_heads=3, head_dim=64),
    # Qwen2-0.5B (Qwen/Qwen2-0.5B, config.json). RoPE base 1,000,000.
    "qwen2_0_5b": QWEN
    | dict(attention_bias=True)
    | dict(vocab_size=151936, layers=24, d_model=896, d_ff=4864, heads=14, kv_heads=2, head_dim=64),
    # DroPE's transformer from scratch (table 4): Qwen2-0.5B without its bias. RoPE base 1,000,000.
    "drope_494m": QWEN | dict(vocab_size=151936, layers=24, d_model=896, d_ff=4864, heads=14, kv_heads=2, head_dim=64),
    # Gemma 2B (google/gemma-2b, config.json), which "p-RoPE" trains from scratch (appendix C). RoPE base 10,000.
    "gemma_2b": GEMMA
    | dict(vocab_size=256000, layers=18, d_model=2048, d_ff=16384, heads=8, kv_heads=1, head_dim=256)
    | dict(embedding_multiplier=2048**0.5),
    # Gemma 3 1B (google/gemma-3-1b-pt, config.json). RoPE base 10,000 in windows of 512 tokens; 1,000,000 in every
    # sixth layer, which has none.
    "gemma3_1b": GEMMA_3
    | dict(vocab_size=262144, layers=26, d_model=1152, d_ff=6912, heads=4, kv_heads=1)
    | dict(embedding_multiplier=1152**0.5),
    # The language model of Gemma 3 4B (google/gemma-3-4b-pt, config.json: text_config). As the 1B, with windows of
    # 1024, and positions divided by 8 in layers without.
    "gemma3_4b": GEMMA_3
    | dict(vocab_size=262208, layers=34, d_model=2560, d_ff=10240, heads=8, kv_heads=4)
    | dict(embedding_multiplier=2560**0.5),
    # OLMo 2 1B (allenai/OLMo-2-0425-1B, config.json). RoPE base 500,000.
    "olmo2_1b": OLMO | dict(vocab_size=100352, layers=16, d_model=2048, d_ff=8192, heads=16, kv_heads=16, head_dim=128),
    # OLMo 3 7B (allenai/Olmo-3-1025-7B, config.json). RoPE base 500,000; windows of 4096 tokens in three layers of
    # four, and YaRN in the fourth.
    "olmo3_7b": OLMO
    | dict(vocab_size=100278, layers=32, d_model=4096, d_ff=11008, heads=32, kv_heads=32, head_dim=128),
    # Pythia-1B (EleutherAI/pythia-1b, config.json), the parallel block in the paper "Partial RoPE". PartialRope of
    # 0.25 of the channels, base 10,000.
    "pythia_1b": PYTHIA | dict(vocab_size=50304, layers=16, d_model=2048, d_ff=8192, heads=8, kv_heads=8, head_dim=256),
}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The fields of a preset with some of them changed: `config.model = preset("gemma_2b", remat="full")`.

    Raises:
      ConfigError: there is no such preset, or no such field (with the nearest right one).
    """
    if name not in PRESETS:
        raise ConfigError(f"There is no preset '{name}'. {did_you_mean(name, list(PRESETS))}")
    fields = PRESETS[name] | changes
    from_dict(ModelConfig, fields, f"preset '{name}'")
    return fields
