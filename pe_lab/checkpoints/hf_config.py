"""Reads `config.json` of Hugging Face: the model's shape, the encodings of its layers, its training length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_lab.checkpoints.families import FAMILIES, Family
from pe_lab.checkpoints.rope_parameters import read_rope
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError, UserError, did_you_mean
from pe_lab.model import complete
from pe_lab.positional import CANONICAL, Layer, Layout, NoPE, PartialRope, Rope, frequencies, from_json

PE_LAB_KEY = "pe_lab"  # of config.json, with pe_lab's own descriptions of the layers; transformers ignores it

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
EXTERNAL_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# Keys that no family supports, with the values that have no effect.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "num_local_experts": (None, 0, 1),
}


@dataclass(frozen=True)
class Described:
    """The content of a `config.json`.

    Attributes:
      family: of its tensors.
      model: its shape.
      layers: its encodings.
      layout: of its heads' channels.
      training_length: tokens of a training window, before any scaling.
    """

    family: Family
    model: ModelConfig
    layers: tuple[Layer, ...]
    layout: Layout
    training_length: int


def read_config(config: Mapping[str, Any], tensor_names: Sequence[str], where: str) -> Described:
    """Reads a `config.json` of transformers 4 or 5.

    Args:
      config: its content.
      tensor_names: of the checkpoint; they tell whether a `llama_drope` without `attention_type` has a QK-norm.
      where: the file, for messages.

    Raises:
      UnsupportedError: an architecture without a table, or a value that pe_lab does not support.
      CheckpointError: a key that is missing or contradicts another.
    """
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        hint = did_you_mean(kind, list(FAMILIES))
        raise UnsupportedError(f"{where}: model_type is '{kind}', which pe_lab has no table for. {hint}")
    family = FAMILIES[kind]
    if config.get("max_position_embeddings") is None:
        config = {**config, "max_position_embeddings": family.length}
    for key, harmless in _REFUSED.items():
        if config.get(key) not in harmless:
            raise UnsupportedError(f"{where}: {key} is {config[key]!r}, which pe_lab does not support.")
    model = _model(config, family, tensor_names, where)
    if kind == "llama_drope":
        length = _whole(config, "max_position_embeddings", where)
        scale = config.get("softmax_scale")
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0):
            raise CheckpointError(f"{where}: softmax_scale is {scale!r}; it must be a number above 0.")
        layers = (
            Layer(NoPE(), logit_scale=1.0 if scale is None else float(scale) * model.head_dim**0.5),
        ) * model.layers
    else:
        neox = kind == "gpt_neox"
        encoding, length = read_rope(config, model.head_dim, family.theta, where, family.fraction, neox)
        layers = _layers(config, family, model, encoding, where)
    layout = CANONICAL
    partial = next((la.encoding for la in layers if isinstance(la.encoding, PartialRope)), None)
    if partial is not None:
        if kind != "gpt_neox":
            raise CheckpointError(
                f"{where}: partial_rotary_factor is {partial.fraction:g}; transformers' {family.architecture} rotates "
                "whole heads, so the key has no meaning."
            )
        layout = Layout("half", partial.rotated_channels(model.head_dim))
    described = config.get(PE_LAB_KEY)
    if isinstance(described, Mapping):
        layers, length = _as_described(described, layers, model, length)
    return Described(family, model, layers, layout, length)


def _model(config: Mapping[str, Any], family: Family, tensor_names: Sequence[str], where: str) -> ModelConfig:
    def whole(key: str, default: int | None = None) -> int:
        return _whole(config, key, where, default)

    def epsilon(key: str, default: float) -> float:
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise CheckpointError(f"{where}: {key} is {value!r}; it must be a small positive number.")
        return float(value)

    heads = whole("num_attention_heads")
    fields: dict[str, Any] = dict(
        vocab_size=whole("vocab_size"),
        layers=whole("num_hidden_layers"),
        d_model=whole("hidden_size"),
        d_ff=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", {"gemma": 256, "qwen3": 128}.get(family.model_type, 0)),
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        norm_epsilon=epsilon("rms_norm_eps", 1e-6),
        dtype="float32",
    )
    if family.model_type == "gpt_neox":
        fields["norm_epsilon"] = epsilon("layer_norm_eps", 1e-5)
        fields["parallel_block"] = bool(config.get("use_parallel_residual", True))
        fields["kv_heads"] = heads
    fields |= dict(family.fixed)
    if "attention_bias" in family.free:
        fields["attention_bias"] = bool(config.get("attention_bias", family.model_type == "gpt_neox"))
        fields["output_bias"] = fields["attention_bias"]
    if "mlp_bias" in family.free:
        fields["mlp_bias"] = bool(config.get("mlp_bias", False))
    if "qk_norm" in family.free:
        fields["qk_norm"] = _drope_norm(config, tensor_names, where)
    name = config.get("hidden_act") or EXTERNAL_ACTIVATIONS[fields.get("activation", "gelu")]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedError(f"{where}: hidden_act is '{name}'. {did_you_mean(str(name), list(_ACTIVATIONS))}")
    activation = _ACTIVATIONS[name]
    if family.model_type == "gemma" and activation == "gelu":
        activation = "gelu_tanh"  # its first files have gelu for the approximation
    if "activation" in family.fixed and activation != family.fixed["activation"]:
        raise CheckpointError(
            f"{where}: hidden_act is '{name}', and {family.architecture} has {family.fixed['activation']}."
        )
    fields["activation"] = activation
    try:
        return complete(ModelConfig(**fields))
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None


def _drope_norm(config: Mapping[str, Any], tensor_names: Sequence[str], where: str) -> str:
    """The QK-norm of a DroPE checkpoint, by `attention_type`, or if that is absent by its tensors."""
    has = any(name.endswith("self_attn.q_norm.weight") for name in tensor_names)
    kind = config.get("attention_type", "qk_norm_nope" if has else "nope")
    kinds = {"nope": "none", "qk_norm_nope": "flat"}
    if kind not in kinds:
        raise CheckpointError(
            f"{where}: attention_type is '{kind}'; pe_lab reads {' and '.join(kinds)}. The others store "
            "norms that they do not use."
        )
    return kinds[kind]


def _layers(
    config: Mapping[str, Any], family: Family, model: ModelConfig, encoding: Any, where: str
) -> tuple[Layer, ...]:
    """The encodings and windows of all layers, of families whose layers may differ."""
    count = model.layers
    rotates = [True] * count
    if family.bare_layers:
        interval = _whole(config, "no_rope_layer_interval", where, 4)
        flags = config.get("no_rope_layers")
        if interval < 1 or not isinstance(flags, list | None):
            raise CheckpointError(f"{where}: no_rope_layers {flags!r} with interval {interval} is no pattern.")
        rotates = [(n + 1) % interval != 0 for n in range(count)] if flags is None else [bool(x) for x in flags]
        if len(rotates) < count:
            raise CheckpointError(f"{where}: no_rope_layers has {len(rotates)} entries for {count} layers.")
    windows: list[int | None] = [None] * count
    size = config.get("sliding_window", None if family.bare_layers else 4096)
    kinds = config.get("layer_types")
    # SmolLM3 masks the layers that layer_types names, whatever use_sliding_window is.
    if family.windows and size is not None and (config.get("use_sliding_window") or (family.bare_layers and kinds)):
        window = _whole({"sliding_window": size}, "sliding_window", where)
        if kinds is None and family.bare_layers:
            kinds = ["full_attention" if rotates[n] else "sliding_attention" for n in range(count)]
        elif kinds is None:
            first = _whole(config, "max_window_layers", where, 28)
            kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(count)]
        unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
        if unknown or len(kinds) != count:
            raise CheckpointError(f"{where}: layer_types has {len(kinds)} entries for {count} layers, and {unknown}.")
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return tuple(Layer(encoding if rotates[n] else NoPE(), windows[n]) for n in range(count))


def _as_described(
    described: Mapping[str, Any], layers: tuple[Layer, ...], model: ModelConfig, length: int
) -> tuple[tuple[Layer, ...], int]:
    """The layers and the training length of pe_lab's own key, if it agrees with the other keys.

    If it does not, the other keys were edited after the export, and they count.
    """
    try:
        kinds = [from_json(layer) for layer in described["kinds"]]
        named = tuple(kinds[n] for n in described["layers"])
        written = _whole(described, "training_length", PE_LAB_KEY, length)
        if len(named) != len(layers) or written < 1:
            return layers, length
        for a, b in set(zip(named, layers, strict=True)):
            # An export writes no more than a rotation and a window.
            if a != Layer(a.encoding, b.window, b.logit_scale) or not isinstance(a.encoding, Rope | PartialRope | NoPE):
                return layers, length
            for n in (None, 4 * length):
                pairs = zip(
                    frequencies(a.encoding, model.head_dim, n), frequencies(b.encoding, model.head_dim, n), strict=True
                )
                if not all(np.allclose(x, y, rtol=1e-6, atol=1e-20) for x, y in pairs):
                    return layers, length
    except (UserError, KeyError, IndexError, TypeError):
        return layers, length
    return named, written


def _whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        found = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(f"{where}: {key} {found}; it must be a whole number.")
    return value
