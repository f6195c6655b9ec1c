"""Shapes of published models, for the `config.model` of recipes.

A preset sets fields of `ModelConfig`, which define the decoder. The positional encoding is part of a phase; comments
give the base of the published one. Tests compare parameter counts with those of transformers.
"""

from __future__ import annotations

from typing import Any

from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import ConfigError, did_you_mean

# The columns of the table.
_FIELDS = ["vocab_size", "layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "tie_embeddings", "norm_epsilon"]
_SHAPES = {
    # Llama-3.2-1B (meta-llama/Llama-3.2-1B, config.json), RoPE base 500,000. The vocabulary is the Pythia tokenizer's,
    # padded, as in section 4 of "Partial RoPE".
    "llama_1b": (50304, 16, 2048, 8192, 32, 8, 64, True, 1e-5),
    # Llama-3.1-8B (meta-llama/Llama-3.1-8B, config.json) with 36 layers instead of 32 and the Pythia tokenizer,
    # as in appendix B of "Partial RoPE". RoPE base 500,000.
    "llama_8b_36": (50304, 36, 4096, 14336, 32, 8, 128, False, 1e-5),
    # Llama 2 7B (meta-llama/Llama-2-7b-hf, config.json), which DroPE recalibrates. RoPE base 10,000.
    "llama2_7b": (32000, 32, 4096, 11008, 32, 32, 128, False, 1e-5),
    # SmolLM-360M (HuggingFaceTB/SmolLM-360M, config.json; DroPE table 4). RoPE base 10,000.
    "smollm_360m": (49152, 32, 960, 2560, 15, 5, 64, True, 1e-5),
    # SmolLM-1.7B (HuggingFaceTB/SmolLM-1.7B, config.json), which DroPE recalibrates. RoPE base 10,000.
    "smollm_1_7b": (49152, 24, 2048, 8192, 32, 32, 64, True, 1e-5),
    # SmolLM2-135M (HuggingFaceTB/SmolLM2-135M, config.json). RoPE base 100,000.
    "smollm2_135m": (49152, 30, 576, 1536, 9, 3, 64, True, 1e-5),
    # Qwen2-0.5B (Qwen/Qwen2-0.5B, config.json). RoPE base 1,000,000.
    "qwen2_0_5b": (151936, 24, 896, 4864, 14, 2, 64, True, 1e-6),
    # DroPE's transformer from scratch (table 4): Qwen2-0.5B without its bias. RoPE base 1,000,000.
    "drope_494m": (151936, 24, 896, 4864, 14, 2, 64, True, 1e-6),
    # Gemma 2B (google/gemma-2b, config.json), which "p-RoPE" trains from scratch (appendix C). RoPE base 10,000.
    "gemma_2b": (256000, 18, 2048, 16384, 8, 1, 256, True, 1e-6),
    # Pythia-1B (EleutherAI/pythia-1b, config.json), the parallel block in the paper "Partial RoPE". PartialRope of
    # 0.25 of the channels, base 10,000.
    "pythia_1b": (50304, 16, 2048, 8192, 8, 8, 256, False, 1e-5),
}
# Their other fields.
_OTHERS = {
    "qwen2_0_5b": dict(attention_bias=True),
    "drope_494m": dict(attention_bias=False),
    "gemma_2b": dict(norm="rms_plus_one", activation="gelu_tanh", scale_embeddings=True),
    "pythia_1b": dict(
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        activation="gelu",
        gated_mlp=False,
        parallel_block=True,
    ),
}

PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, shape, strict=True)) | _OTHERS.get(name, {}) for name, shape in _SHAPES.items()
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
