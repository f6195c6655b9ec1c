"""Writes preset_counts.json: how many parameters transformers counts in the shapes of pe_lab.model.PRESETS.

    python -m pip install transformers==5.23.0 torch==2.13.0
    python tests/data/make_preset_counts.py

The shapes are written out again, in the names of transformers and from the published config.json, so that a slip in
one of the two lists shows. Nothing is allocated: models are made on torch's meta device. Tied embeddings count once.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

OUT = Path(__file__).with_name("preset_counts.json")
NAMES = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def llama(*sizes: int | bool, **others: object) -> tuple[type, LlamaConfig]:
    return LlamaForCausalLM, LlamaConfig(**dict(zip(NAMES, sizes, strict=True)), **others)


MODELS = {
    "llama_1b": llama(50304, 16, 2048, 8192, 32, 8, True, head_dim=64),
    "llama_8b_36": llama(50304, 36, 4096, 14336, 32, 8, False),
    "llama3_1_8b": llama(128256, 32, 4096, 14336, 32, 8, False),
    "llama2_7b": llama(32000, 32, 4096, 11008, 32, 32, False),
    "smollm_360m": llama(49152, 32, 960, 2560, 15, 5, True),
    "smollm_1_7b": llama(49152, 24, 2048, 8192, 32, 32, True),
    "smollm2_135m": llama(49152, 30, 576, 1536, 9, 3, True),
    "qwen2_0_5b": (
        Qwen2ForCausalLM,
        Qwen2Config(**dict(zip(NAMES, (151936, 24, 896, 4864, 14, 2, True), strict=True))),
    ),
    # transformers' Qwen2 always has its bias, and its Llama has none.
    "drope_494m": llama(151936, 24, 896, 4864, 14, 2, True),
    "gemma_2b": (
        GemmaForCausalLM,
        GemmaConfig(**dict(zip(NAMES, (256000, 18, 2048, 16384, 8, 1, True), strict=True)), head_dim=256),
    ),
    "gemma3_1b": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**dict(zip(NAMES, (262144, 26, 1152, 6912, 4, 1, True), strict=True)), head_dim=256),
    ),
    "gemma3_4b": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**dict(zip(NAMES, (262208, 34, 2560, 10240, 8, 4, True), strict=True)), head_dim=256),
    ),
    "olmo2_1b": (
        Olmo2ForCausalLM,
        Olmo2Config(**dict(zip(NAMES, (100352, 16, 2048, 8192, 16, 16, False), strict=True))),
    ),
    "olmo3_7b": (
        Olmo3ForCausalLM,
        Olmo3Config(**dict(zip(NAMES, (100278, 32, 4096, 11008, 32, 32, False), strict=True))),
    ),
    "pythia_1b": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            vocab_size=50304,
            num_hidden_layers=16,
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=8,
        ),
    ),
}


def main() -> None:
    counts = {}
    for name, (model_class, config) in MODELS.items():
        with torch.device("meta"):
            model = model_class(config)
        counts[name] = {"vocab_size": config.vocab_size, "parameters": model.num_parameters()}
        print(f"{name}: {counts[name]['parameters']:,}")
    versions = {package: version(package) for package in ("transformers", "torch")}
    OUT.write_text(json.dumps({"versions": versions, "counts": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
