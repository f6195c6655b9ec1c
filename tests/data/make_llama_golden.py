"""Writes llama_golden.npz: the logits of small random decoders, as transformers computes them.

    python -m pip install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
    python tests/data/make_llama_golden.py

Each model is stored as `NAME/weights/PARAMETER` under transformers' own names (float16: the weights are
rounded to it before they are used, so nothing is lost) and `NAME/logits` [B, T, V] float32; all read the same
`tokens` [B, T]. Weights are drawn far wider than an initialization, so that every norm and bias is felt.
Logits are computed in float64 where transformers lets it (its norms and its softmax stay in float32).
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

OUT = Path(__file__).with_name("llama_golden.npz")
BATCH, LENGTH = 2, 40
SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The training length is short against LENGTH and the ramp falls within the 8 pairs: all of YaRN shows.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

MODELS = {
    "llama_tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True, rope_parameters=ROPE)),
    "llama_untied": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(tie_word_embeddings=False, head_dim=16, rope_parameters=ROPE | {"rope_theta": 500.0}),
    ),
    "llama_yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(tie_word_embeddings=True, head_dim=16, max_position_embeddings=128, rope_parameters=YARN),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(tie_word_embeddings=False, head_dim=16, rope_parameters=ROPE),
    ),
}


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.3 * values
    if name.endswith("bias"):
        return 0.5 * values
    if "embed" in name or "lm_head" in name:
        return 0.3 * values
    return values / shape[1] ** 0.5


def main() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SHAPE["vocab_size"], (BATCH, LENGTH))
    arrays = {"tokens": tokens.astype(np.int32)}
    for name, (model_class, config_class, settings) in MODELS.items():
        model = model_class(config_class(**SHAPE | settings)).eval()
        weights = {
            key: draw(key, tuple(value.shape), rng).astype(np.float16) for key, value in model.named_parameters()
        }
        tensors = {key: torch.tensor(value, dtype=torch.float32) for key, value in weights.items()}
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        with torch.no_grad():
            logits = model.double()(torch.tensor(tokens)).logits
        arrays |= {f"{name}/weights/{key}": value for key, value in weights.items()}
        arrays[f"{name}/logits"] = logits.float().numpy()
    versions = {package: version(package) for package in ("transformers", "torch", "numpy")}
    np.savez_compressed(OUT, versions=json.dumps(versions), **arrays)
    print(
        f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB; largest logit",
        *(f"{name} {np.abs(arrays[f'{name}/logits']).max():.2f}" for name in MODELS),
    )


if __name__ == "__main__":
    main()
