"""`config.json` of Hugging Face, read and written: a model's shape, its layers' encodings, its training length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_lab.checkpoints.families import FAMILIES, Family
from pe_lab.checkpoints.families.family import whole
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, UserError
from pe_lab.model.shape import layer_heads
from pe_lab.positional import Layer, Layout, NoPE, PartialRope, Rope, frequencies, from_json, to_json

PE_LAB_KEY = "pe_lab"  # of config.json, with pe_lab's own descriptions of the layers; transformers ignores it

# Architectures that people have, and what pe_lab lacks for them.
MISSING = {
    **dict.fromkeys(
        ("gpt_oss", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "phimoe", "ernie4_5_moe", "glm4_moe"),
        "experts",
    ),
    "llama4_text": "experts, and attention in chunks",
    "llama4": "experts, images, and attention in chunks",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"), "multi-head latent attention"),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "bamba", "qwen3_next", "falcon_mamba"), "layers without attention"),
    **dict.fromkeys(("gemma3", "mllama", "llava", "qwen2_vl", "qwen3_vl", "mistral3"), "images beside the text"),
    "gemma3n_text": "predictions of several residual streams (AltUp), and sparse activations",
}

# Models of text, images and sound, and the family of their text. It is read alone: it computes the same logits of text.
TEXT_PARTS = {"gemma4": "gemma4_text"}
TEXT_PREFIX = "model.language_model."  # of the tensors of that part, which are `model.` in a file of text alone


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the text in that of a model with other parts; None: it is a model of text.

    Raises:
      CheckpointError: it has none.
    """
    kind = str(config.get("model_type", ""))
    if kind not in TEXT_PARTS:
        return None
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"model_type is '{kind}', and there is no text_config.")
    whole_model = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**whole_model, **text, "model_type": TEXT_PARTS[kind]}


@dataclass(frozen=True)
class HuggingFaceConfig:
    """The content of a `config.json`: the family of the tensors, the attributes of a source, the heads' layout."""

    family: Family
    model: ModelConfig
    layers: tuple[Layer, ...]
    layout: Layout
    training_length: int


def read_config(config: Mapping[str, Any], tensor_names: Sequence[str], where: str) -> HuggingFaceConfig:
    """Reads a `config.json` of transformers 4 or 5; `where` names it in messages.

    `tensor_names` tell what older files leave out (see `Family.inferred`).

    Raises:
      UnsupportedError: an architecture without a table, or a value that pe_lab does not support.
      CheckpointError: a key that is missing or contradicts another.
    """
    try:
        return _read(config, tensor_names)
    except UserError as error:  # the functions below do not know the file
        kind = CheckpointError if isinstance(error, ConfigError) else type(error)
        raise kind(f"{where}: {error}") from None


def _read(config: Mapping[str, Any], tensor_names: Sequence[str]) -> HuggingFaceConfig:
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        lacks = f": it has {MISSING[kind]}" if kind in MISSING else ""
        raise UnsupportedError(
            f"model_type is '{kind}', an architecture that pe_lab does not compute{lacks}. It computes "
            f"{', '.join(FAMILIES)}; under one of these names the weights would be another model."
        )
    family = FAMILIES[kind]
    config = family.inferred(config, tensor_names)
    model = family.read_model(config)
    layers, length, rotated = family.positions.read(config, model)
    described = config.get(PE_LAB_KEY)
    if isinstance(described, Mapping):
        layers, length = as_described(described, layers, model, length)
    return HuggingFaceConfig(family, model, layers, Layout(family.pairs, rotated), length)


def as_described(
    described: Mapping[str, Any], layers: tuple[Layer, ...], model: ModelConfig, length: int
) -> tuple[tuple[Layer, ...], int]:
    """The layers and the training length of pe_lab's own key; of the others, if they were edited after the export."""
    try:
        kinds = [from_json(layer) for layer in described["kinds"]]
        named = tuple(kinds[n] for n in described["layers"])
        written = whole(described, "training_length", length)
        if len(named) != len(layers) or written < 1:
            return layers, length
        widths = [one.head_dim for one in layer_heads(model) or [model] * len(layers)]
        for a, b, width in set(zip(named, layers, widths, strict=True)):
            # An export writes no more than an encoding, a window and the extras of its architecture.
            if a != Layer(a.encoding, b.window, b.logit_scale, extras=a.extras) or a.extras not in ((), b.extras):
                return layers, length
            if a.encoding == b.encoding:
                continue
            if not isinstance(a.encoding, Rope | PartialRope | NoPE):
                return layers, length
            for n in (None, 4 * length):
                pairs = zip(frequencies(a.encoding, width, n), frequencies(b.encoding, width, n), strict=True)
                if not all(np.allclose(x, y, rtol=1e-6, atol=1e-20) for x, y in pairs):
                    return layers, length
    except (UserError, KeyError, IndexError, TypeError):
        return layers, length
    return named, written


def write_config(
    family: Family,
    model: ModelConfig,
    layers: Sequence[Layer],
    options: WriteOptions,
    dtype: str,
) -> tuple[dict[str, Any], Layout]:
    """The `config.json` with which transformers 4 and 5 compute the same logits, and the layout of the heads.

    All logit scales must be 1, already folded into the weights.

    Raises:
      UnsupportedError: the family cannot express the model.
      ConfigError: a `max_length` for an encoding whose scaling declares a length (PI, dynamic NTK, YaRN).
    """
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "initializer_range": model.init_std,
        "use_cache": True,
        # Some families' defaults are ids of one vocabulary: SmolLM3's padding exceeds a smaller one, and torch refuses.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,  # transformers 4
        "dtype": dtype,  # transformers 5
        **express(family, model, layers, options),
    }
    read = family.positions.read(config, model)
    config[PE_LAB_KEY] = description(layers, options.training_length)
    return config, Layout(family.pairs, read.rotated)


def express(family: Family, model: ModelConfig, layers: Sequence[Layer], options: WriteOptions) -> dict[str, Any]:
    """The keys of a family's config for the shape and the layers; raises as `write_config`."""
    shape = family.write_model(model)
    try:
        positions = family.positions.write(layers, model, options)
    except UnsupportedError as error:
        raise UnsupportedError(f"{family.model_type} cannot express these layers: {error}") from None
    return merged(shape, positions)


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two configs as one; of a key that both have as a set of keys, all of these."""
    both = {
        key: merged(config[key], more[key])
        for key in config
        if isinstance(more.get(key), Mapping) and isinstance(config[key], Mapping)
    }
    return {**config, **more, **both}


def description(layers: Sequence[Layer], training_length: int) -> dict[str, Any]:
    """pe_lab's own description of the layers, which `as_described` reads."""
    kinds = list(dict.fromkeys(layers))
    return {
        "kinds": [to_json(layer) for layer in kinds],
        "layers": [kinds.index(layer) for layer in layers],  # indices of kinds
        "training_length": training_length,
    }
