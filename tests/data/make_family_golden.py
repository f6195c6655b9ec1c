"""Writes llama_golden.npz and family_golden.npz: what small random decoders compute, as transformers computes it.

    python -m pip install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
    python tests/data/make_family_golden.py

Each model is stored as `NAME/weights/PARAMETER` under transformers' own names (float16: the weights are
rounded to it before they are used, so nothing is lost) and `NAME/logits` [B, T, V] float32; all of a file read the
same `tokens` [B, T]. Weights are drawn far wider than an initialization, so that every norm and bias is felt.
Logits are computed in float64 where transformers lets it (its norms and its softmax stay in float32).

OLMo 2 normalizes behind its branches, which our decoder does not: of it there is the attention alone, whose QK-norm is
over all heads at once, as `olmo2_attention/inputs` and `olmo2_attention/outputs` [B, T, D].
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding

HERE = Path(__file__).parent
BATCH, LENGTH = 2, 40
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    max_position_embeddings=256,
    attn_implementation="eager",
)
SHAPE = SIZES | dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The training length is short against LENGTH and the ramp falls within the 8 pairs: all of YaRN shows.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

LLAMA = {
    "llama_tied": (LlamaForCausalLM, LlamaConfig, SHAPE | dict(tie_word_embeddings=True, rope_parameters=ROPE)),
    "llama_untied": (
        LlamaForCausalLM,
        LlamaConfig,
        SHAPE | dict(tie_word_embeddings=False, head_dim=16, rope_parameters=ROPE | {"rope_theta": 500.0}),
    ),
    "llama_yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        SHAPE | dict(tie_word_embeddings=True, head_dim=16, max_position_embeddings=128, rope_parameters=YARN),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SHAPE | dict(tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        SHAPE | dict(tie_word_embeddings=False, head_dim=16, rope_parameters=ROPE),
    ),
}
FAMILIES = {
    "gemma": (
        GemmaForCausalLM,
        GemmaConfig,
        SHAPE
        | dict(
            num_key_value_heads=1,
            head_dim=16,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            rope_parameters=ROPE,
        ),
    ),
    # A quarter of 16 channels rotates: two pairs.
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        SIZES
        | dict(
            num_attention_heads=2,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
            use_parallel_residual=True,
            attention_bias=True,
            tie_word_embeddings=False,
            rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
        ),
    ),
}


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator, norm: float) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("bias"):
        return 0.5 * values
    if "norm" in name:
        return norm + 0.3 * values
    if "embed" in name or "lm_head" in name:
        return 0.3 * values
    return values / shape[1] ** 0.5


def fill(module: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws the weights of a module, puts them in, and returns them as they are stored."""
    norm = 0 if isinstance(module, GemmaForCausalLM) else 1  # Gemma's norms multiply by 1 + weight
    weights = {
        key: draw(key, tuple(value.shape), rng, norm).astype(np.float16) for key, value in module.named_parameters()
    }
    tensors = {key: torch.tensor(value, dtype=torch.float32) for key, value in weights.items()}
    module.load_state_dict(tensors, strict=False)
    return weights


def of_models(models: dict[str, tuple], rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = rng.integers(0, SIZES["vocab_size"], (BATCH, LENGTH))
    arrays = {"tokens": tokens.astype(np.int32)}
    for name, (model_class, config_class, settings) in models.items():
        model = model_class(config_class(**settings)).eval()
        weights = fill(model, rng)
        model.tie_weights()
        with torch.no_grad():
            logits = model.double()(torch.tensor(tokens)).logits
        arrays |= {f"{name}/weights/{key}": value for key, value in weights.items()}
        arrays[f"{name}/logits"] = logits.float().numpy()
        print(f"{name}: largest logit {np.abs(arrays[f'{name}/logits']).max():.2f}")
    return arrays


def of_olmo2_attention(rng: np.random.Generator) -> dict[str, np.ndarray]:
    config = Olmo2Config(**SHAPE | dict(attention_bias=False, rope_parameters=ROPE))
    attention, rotation = Olmo2Attention(config, layer_idx=0).eval(), Olmo2RotaryEmbedding(config)
    weights = fill(attention, rng)
    inputs = rng.standard_normal((BATCH, LENGTH, SIZES["hidden_size"])).astype(np.float32)
    hidden = torch.tensor(inputs).double()
    cos_sin = rotation(hidden, torch.arange(LENGTH)[None])
    future = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        outputs, _ = attention.double()(hidden, cos_sin, future)
    print(f"olmo2_attention: largest output {outputs.abs().max():.2f}")
    arrays = {f"olmo2_attention/weights/{key}": value for key, value in weights.items()}
    return arrays | {
        "olmo2_attention/inputs": inputs,
        "olmo2_attention/outputs": outputs.float().numpy(),
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    versions = {package: version(package) for package in ("transformers", "torch", "numpy")}
    np.savez_compressed(path, versions=json.dumps(versions), **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    write(HERE / "llama_golden.npz", of_models(LLAMA, np.random.default_rng(0)))
    rng = np.random.default_rng(1)
    write(HERE / "family_golden.npz", of_models(FAMILIES, rng) | of_olmo2_attention(rng))


if __name__ == "__main__":
    main()
