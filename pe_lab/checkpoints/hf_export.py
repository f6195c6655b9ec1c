"""Writes `config.json` of Hugging Face: the architecture that can express a model, and its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pe_lab.checkpoints.families import FAMILIES, Family
from pe_lab.checkpoints.hf_config import EXTERNAL_ACTIVATIONS, PE_LAB_KEY
from pe_lab.checkpoints.rope_parameters import write_rope
from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.positional import (
    CANONICAL,
    NTK,
    DynamicNTK,
    DynamicYarn,
    Layer,
    Layout,
    LongRope,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
    to_json,
)


def write_config(
    family: Family, model: ModelConfig, layers: Sequence[Layer], training_length: int, dtype: str
) -> tuple[dict[str, Any], Layout]:
    """The `config.json` with which transformers 4 and 5 compute the same logits, and the layout of the heads.

    All logit scales must be 1, already folded into the weights (`exported_layers`).

    Raises:
      UnsupportedError: the family cannot express the model; names the nearest model that it can.
    """
    _check_shape(family, model)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "hidden_act": EXTERNAL_ACTIVATIONS[model.activation],
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        # Some families' defaults are ids of one vocabulary: SmolLM3's padding exceeds a smaller one, and torch refuses.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,  # transformers 4
        "dtype": dtype,  # transformers 5
    }
    neox = family.model_type == "gpt_neox"
    if neox:
        config |= {
            "layer_norm_eps": model.norm_epsilon,
            "use_parallel_residual": model.parallel_block,
            "attention_bias": model.attention_bias,
        }
    else:
        config |= {
            "rms_norm_eps": model.norm_epsilon,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
        }
        config |= {key: getattr(model, key) for key in ("attention_bias", "mlp_bias") if key in family.free}
    config |= _positions(family, model, layers, training_length, neox)
    kinds = list(dict.fromkeys(layers))
    config[PE_LAB_KEY] = {
        "kinds": [to_json(layer) for layer in kinds],
        "layers": [kinds.index(layer) for layer in layers],  # indices of kinds
        "training_length": training_length,
    }
    partial = next((layer.encoding for layer in layers if isinstance(layer.encoding, PartialRope)), None)
    # Otherwise the rotation is written as a table over the whole head.
    partial = partial if neox and config["rotary_pct"] != 1 else None
    layout = Layout("half", partial.rotated_channels(model.head_dim)) if partial else CANONICAL
    return config, layout


def _check_shape(family: Family, model: ModelConfig) -> None:
    wrong = [
        f"{key} is {getattr(model, key)!r}, not {value!r}"
        for key, value in family.fixed.items()
        if getattr(model, key) != value
    ]
    if family.model_type == "gpt_neox" and model.kv_heads != model.heads:
        wrong.append(f"kv_heads is {model.kv_heads}, not heads {model.heads}")
    if "output_bias" in family.free and model.attention_bias != model.output_bias:
        wrong.append("its bias is on queries, keys, values and output together, or on none")
    if family.model_type in ("gpt_neox", "qwen2") and model.head_dim * model.heads != model.d_model:
        wrong.append(f"head_dim is {model.head_dim}, not d_model / heads")
    if family.model_type == "llama" and model.d_model % model.heads:
        wrong.append(
            f"d_model is {model.d_model}, no multiple of its {model.heads} heads, which transformers 5 requires"
        )
    if family.model_type == "gpt_neox" and model.activation == "silu":
        wrong.append("activation is silu")
    if family.model_type == "llama_drope" and model.qk_norm not in ("none", "flat"):
        wrong.append(f"qk_norm is {model.qk_norm!r}, not flat")
    if wrong:
        raise UnsupportedError(f"{family.model_type} cannot hold this model: {'; '.join(wrong)}.")


def _positions(
    family: Family, model: ModelConfig, layers: Sequence[Layer], training_length: int, neox: bool
) -> dict[str, Any]:
    """The keys of the positional encoding."""
    for n, layer in enumerate(layers):
        if layer.heads:
            raise UnsupportedError(
                f"layer {n} has heads that differ ({len(layer.heads)} edits), which transformers cannot express. "
                "Nearest: the same layer with one encoding for all heads."
            )
        if layer.logit_scale != 1.0:
            raise ValueError(f"layer {n} has a logit scale; fold it into the weights first")
        if not isinstance(layer.encoding, Rope | PartialRope | NoPE):
            raise UnsupportedError(
                f"layer {n} has {type(layer.encoding).__name__}, which no architecture that pe_lab exports has. "
                "Nearest: rope, or no encoding (drop)."
            )
    keys: dict[str, Any] = {}
    windows = {layer.window for layer in layers}
    if windows != {None}:
        if not family.windows:
            raise UnsupportedError(
                f"{family.model_type} has no sliding windows. Nearest: --family=smollm3, or no windows."
            )
        sizes = windows - {None}
        if len(sizes) > 1:
            raise UnsupportedError(f"transformers has one window per model, and these layers have {sorted(sizes)}.")
        keys |= {
            "use_sliding_window": True,
            "sliding_window": sizes.pop(),
            "max_window_layers": model.layers,
            "layer_types": ["full_attention" if x.window is None else "sliding_attention" for x in layers],
        }
    elif family.windows:
        keys |= {"use_sliding_window": False, "layer_types": ["full_attention"] * model.layers}
    rotary = {layer.encoding for layer in layers if not isinstance(layer.encoding, NoPE)}
    if len(rotary) > 1:
        names = " and ".join(sorted(str(encoding) for encoding in rotary))
        raise UnsupportedError(f"transformers has one rotation per model, and these layers have {names}.")
    bare = [isinstance(layer.encoding, NoPE) for layer in layers]
    if family.model_type == "llama_drope":
        if rotary:
            raise UnsupportedError("llama_drope is a model without encoding; drop it, or choose another --family.")
        kind = "nope" if model.qk_norm == "none" else "qk_norm_nope"
        return {
            "attention_type": kind,
            "auto_map": {
                "AutoConfig": "drope.DroPELlamaConfig",
                "AutoModelForCausalLM": "drope.DroPELlamaForCausalLM",
            },
            "max_position_embeddings": training_length,
            "rope_theta": family.theta,
            "rope_scaling": None,
        }
    if family.bare_layers:
        keys["no_rope_layers"] = [int(not x) for x in bare]
        keys["no_rope_layer_interval"] = 4
        encoding = rotary.pop() if rotary else Rope(family.theta)
    elif rotary and any(bare):
        raise UnsupportedError(
            f"{family.model_type} rotates on all layers or on none, and here {sum(bare)} of {len(bare)} are without. "
            "Nearest: --family=smollm3, which sets it layer by layer (and has no QK-norm)."
        )
    else:
        encoding = rotary.pop() if rotary else NoPE()
    return keys | write_rope(encoding, model.head_dim, training_length, neox)


def choose_family(model: ModelConfig, layers: Sequence[Layer]) -> Family:
    """The first stock family that can express a model.

    Raises:
      UnsupportedError: none can; with the reason of each.
    """
    reasons = {}
    for family in FAMILIES.values():
        if family.stock:
            try:
                write_config(family, model, layers, 2048, "float32")
                return family
            except UnsupportedError as error:
                reasons[family.model_type] = str(error)
    # A family that holds the weights, and cannot express the encoding, is nearer than one that cannot hold them.
    near = {k: v for k, v in reasons.items() if "cannot hold this model" not in v} or reasons
    listed = "\n".join(f"  {name}: {reason}" for name, reason in near.items())
    advice = ""
    if model.qk_norm not in ("none", "head"):
        advice = "\nNearest: surgery --add-qk-norm=head, which Qwen3 has (--family=llama_drope needs DroPE's code)."
    raise UnsupportedError(f"No architecture of transformers can express this model:\n{listed}{advice}")


def exported_layers(layers: Sequence[Layer], length: int | None) -> tuple[tuple[Layer, ...], tuple[float, ...]]:
    """The layers without logit scales, and the scales to fold into the weights of the queries.

    Args:
      layers: of the model.
      length: tokens at which to fix scales and scalings that depend on the length; None keeps the scalings.

    Raises:
      UnsupportedError: a scale that depends on the length, and no length.
    """
    plain, scales = [], []
    for n, layer in enumerate(layers):
        scale = layer.logit_scale
        if not isinstance(scale, float | int):
            if length is None:
                raise UnsupportedError(
                    f"layer {n} scales its logits by 1 + {scale.coefficient:g} ln(n / {scale.original_length}), which "
                    "depends on the length n, as in no architecture of transformers. Nearest: the scale of one length, "
                    "folded into the weights, which --length=TOKENS does."
                )
            scale = scale.at(length)
        encoding = layer.encoding
        if length is not None:
            encoding = _at_length(encoding, length)
        plain.append(dataclasses.replace(layer, encoding=encoding, logit_scale=1.0))
        scales.append(float(scale))
    return tuple(plain), tuple(scales)


def _at_length(encoding: Any, length: int) -> Any:
    """The encoding with its scaling fixed at `length` tokens."""
    scaling = getattr(encoding, "scaling", None)
    if isinstance(scaling, DynamicNTK):
        growth = scaling.factor * max(1.0, length / scaling.original_length) - (scaling.factor - 1)
        return dataclasses.replace(encoding, scaling=NTK(growth) if growth > 1 else None)
    if isinstance(scaling, LongRope):
        table = scaling.long_factor if length > scaling.original_length else scaling.short_factor
        return dataclasses.replace(
            encoding, scaling=dataclasses.replace(scaling, short_factor=table, long_factor=table)
        )
    if isinstance(scaling, DynamicYarn):
        factor = max(1.0, length / scaling.original_length)
        yarn = Yarn(factor, **dataclasses.asdict(scaling))
        return dataclasses.replace(encoding, scaling=yarn if factor > 1 else None)
    return encoding
