"""`config.json` of Hugging Face, read and written: a model's shape, its layers' encodings, its training length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pe_lab.checkpoints.families import FAMILIES, Family
from pe_lab.checkpoints.rope_parameters import read_rope, write_rope
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, UserError, excerpt
from pe_lab.model import complete
from pe_lab.positional import CANONICAL, Layer, Layout, NoPE, PartialRope, Rope, frequencies, from_json, to_json

PE_LAB_KEY = "pe_lab"  # of config.json, with pe_lab's own descriptions of the layers; transformers ignores it

_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "relu2": "relu2",
}
_EXTERNAL_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
_DROPE_NORMS = {"nope": "none", "qk_norm_nope": "flat"}  # qk_norm by `attention_type` of llama_drope
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
class HuggingFaceConfig:
    """The content of a `config.json`: the family of the tensors, the attributes of a source, the heads' layout."""

    family: Family
    model: ModelConfig
    layers: tuple[Layer, ...]
    layout: Layout
    training_length: int


def read_config(config: Mapping[str, Any], tensor_names: Sequence[str], where: str) -> HuggingFaceConfig:
    """Reads a `config.json` of transformers 4 or 5; `where` names it in messages.

    `tensor_names` tell whether a `llama_drope` without `attention_type` has a QK-norm.

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
        raise UnsupportedError(
            f"model_type is '{kind}', an architecture that pe_lab does not compute. It computes "
            f"{', '.join(FAMILIES)}; under one of these names the weights would be another model."
        )
    family = FAMILIES[kind]
    for key, harmless in _REFUSED.items():
        if config.get(key) not in harmless:
            raise UnsupportedError(f"{key} is {config[key]!r}, which pe_lab does not support.")
    model = _read_model(config, family, tensor_names)
    if kind == "llama_drope":
        length = _whole(config, "max_position_embeddings", family.length)
        scale = config.get("softmax_scale")
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0):
            raise CheckpointError(f"softmax_scale is {scale!r}; it must be a number above 0.")
        layer = Layer(NoPE(), logit_scale=1.0 if scale is None else float(scale) * model.head_dim**0.5)
        layers = (layer,) * model.layers
    else:
        encoding, length = read_rope(config, model.head_dim, family)
        layers = _read_layers(config, family, model, encoding)
    layout = CANONICAL
    partial = next((la.encoding for la in layers if isinstance(la.encoding, PartialRope)), None)
    if partial is not None:
        if not family.neox:
            raise CheckpointError(
                f"partial_rotary_factor is {partial.fraction:g}; transformers' {family.architecture} rotates whole "
                "heads, so the key has no meaning."
            )
        layout = Layout("half", partial.rotated_channels(model.head_dim))
    described = config.get(PE_LAB_KEY)
    if isinstance(described, Mapping):
        layers, length = _as_described(described, layers, model, length)
    return HuggingFaceConfig(family, model, layers, layout, length)


def _read_model(config: Mapping[str, Any], family: Family, tensor_names: Sequence[str]) -> ModelConfig:
    found: dict[str, Any] = {"dtype": "float32", **family.fixed}
    kinds = {field.name: type(field.default) for field in fields(ModelConfig)}
    for name, (key, default) in family.keys.items():
        default = config.get(default) if isinstance(default, str) else default
        if kinds[name] is bool:
            found[name] = bool(config.get(key, default))
        elif kinds[name] is int:
            found[name] = _whole(config, key, default)
        else:
            value = config.get(key, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise CheckpointError(f"{key} is {value!r}; it must be a small positive number.")
            found[name] = float(value)
    if family.model_type == "llama_drope":
        has = any(name.endswith("self_attn.q_norm.weight") for name in tensor_names)
        kind = config.get("attention_type", "qk_norm_nope" if has else "nope")
        if kind not in _DROPE_NORMS:
            raise CheckpointError(
                f"attention_type is '{kind}'; pe_lab reads {' and '.join(_DROPE_NORMS)}. The others store norms that "
                "they do not use."
            )
        found["qk_norm"] = _DROPE_NORMS[kind]
    fixed = family.fixed.get("activation")
    name = config.get("hidden_act") or _EXTERNAL_ACTIVATIONS[fixed or "gelu"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"hidden_act is '{name}', a function that pe_lab does not compute. It computes "
            f"{', '.join(sorted(_ACTIVATIONS))}; with one of these it would be another model."
        )
    activation = _ACTIVATIONS[name]
    if family.model_type == "gemma" and activation == "gelu":
        activation = "gelu_tanh"  # its first files have gelu for the approximation
    if fixed not in (None, activation):
        raise CheckpointError(f"hidden_act is '{name}', and {family.architecture} has {fixed}.")
    return complete(ModelConfig(**found | {"activation": activation}))


def _read_layers(config: Mapping[str, Any], family: Family, model: ModelConfig, encoding: Any) -> tuple[Layer, ...]:
    """The encodings and windows of all layers, of families whose layers may differ."""
    count = model.layers
    rotates = [True] * count
    if family.bare_layers:
        interval = _whole(config, "no_rope_layer_interval", 4)
        flags = config.get("no_rope_layers")
        if interval < 1 or not isinstance(flags, list | None):
            raise CheckpointError(f"no_rope_layers {flags!r} with interval {interval} is no pattern.")
        rotates = [(n + 1) % interval != 0 for n in range(count)] if flags is None else [bool(x) for x in flags]
        if len(rotates) < count:
            raise CheckpointError(f"no_rope_layers has {len(rotates)} entries for {count} layers.")
    windows: list[int | None] = [None] * count
    size = config.get("sliding_window", None if family.bare_layers else 4096)
    kinds = config.get("layer_types")
    # SmolLM3 masks the layers that layer_types names, whatever use_sliding_window is.
    if family.windows and size is not None and (config.get("use_sliding_window") or (family.bare_layers and kinds)):
        window = _whole({"sliding_window": size}, "sliding_window")
        if kinds is None and family.bare_layers:
            kinds = ["full_attention" if rotates[n] else "sliding_attention" for n in range(count)]
        elif kinds is None:
            first = _whole(config, "max_window_layers", 28)
            kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(count)]
        if not isinstance(kinds, list):
            shown = excerpt(repr(kinds), 60)
            raise CheckpointError(f"layer_types is {shown}; it must be a list with one word for each layer.")
        unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
        if unknown or len(kinds) != count:
            raise CheckpointError(f"layer_types has {len(kinds)} entries for {count} layers, and {unknown[:3]}.")
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return tuple(Layer(encoding if rotates[n] else NoPE(), windows[n]) for n in range(count))


def _as_described(
    described: Mapping[str, Any], layers: tuple[Layer, ...], model: ModelConfig, length: int
) -> tuple[tuple[Layer, ...], int]:
    """The layers and the training length of pe_lab's own key; of the others, if they were edited after the export."""
    try:
        kinds = [from_json(layer) for layer in described["kinds"]]
        named = tuple(kinds[n] for n in described["layers"])
        written = _whole(described, "training_length", length)
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


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        found = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(f"{key} {found}; it must be a whole number.")
    return value


def write_config(
    family: Family,
    model: ModelConfig,
    layers: Sequence[Layer],
    training_length: int,
    dtype: str,
    max_length: int | None = None,
) -> tuple[dict[str, Any], Layout]:
    """The `config.json` with which transformers 4 and 5 compute the same logits, and the layout of the heads.

    All logit scales must be 1, already folded into the weights. `max_length` is the longest sequence to declare, in
    tokens; None: what the encoding is meant for.

    Raises:
      UnsupportedError: the family cannot express the model; names the nearest model that it can.
      ConfigError: a `max_length` for an encoding whose scaling declares a length (PI, dynamic NTK, YaRN).
    """
    _check_shape(family, model)
    kinds = list(dict.fromkeys(layers))
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(model, field) for field, (key, _) in family.keys.items()},
        "hidden_act": _EXTERNAL_ACTIVATIONS[model.activation],
        "initializer_range": model.init_std,
        "use_cache": True,
        # Some families' defaults are ids of one vocabulary: SmolLM3's padding exceeds a smaller one, and torch refuses.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,  # transformers 4
        "dtype": dtype,  # transformers 5
        **_write_layers(family, model, layers, training_length, max_length),
        PE_LAB_KEY: {
            "kinds": [to_json(layer) for layer in kinds],
            "layers": [kinds.index(layer) for layer in layers],  # indices of kinds
            "training_length": training_length,
        },
    }
    partial = next((layer.encoding for layer in layers if isinstance(layer.encoding, PartialRope)), None)
    if partial is None or config.get("rotary_pct", 1) == 1:  # written as a table over the whole head
        return config, CANONICAL
    return config, Layout("half", partial.rotated_channels(model.head_dim))


def _check_shape(family: Family, model: ModelConfig) -> None:
    kind = family.model_type
    wrong = [
        f"{key} is {getattr(model, key)!r}, not {value!r}"
        for key, value in family.fixed.items()
        if getattr(model, key) != value
    ]
    if family.neox and model.kv_heads != model.heads:
        wrong.append(f"kv_heads is {model.kv_heads}, not heads {model.heads}")
    if "output_bias" in family.keys and model.attention_bias != model.output_bias:
        wrong.append("its bias is on queries, keys, values and output together, or on none")
    if kind in ("gpt_neox", "qwen2") and model.head_dim * model.heads != model.d_model:
        wrong.append(f"head_dim is {model.head_dim}, not d_model / heads")
    if kind == "llama" and model.d_model % model.heads:
        wrong.append(
            f"d_model is {model.d_model}, no multiple of its {model.heads} heads, which transformers 5 requires"
        )
    if family.neox and model.activation == "silu":
        wrong.append("activation is silu")
    if kind == "llama_drope" and model.qk_norm not in _DROPE_NORMS.values():
        wrong.append(f"qk_norm is {model.qk_norm!r}, not flat")
    if wrong:
        raise UnsupportedError(f"{kind} cannot hold this model: {'; '.join(wrong)}.")


def _write_layers(
    family: Family, model: ModelConfig, layers: Sequence[Layer], training_length: int, max_length: int | None
) -> dict[str, Any]:
    """The keys of the encodings and windows."""
    for n, layer in enumerate(layers):
        if layer.heads:
            raise UnsupportedError(
                f"layer {n} has heads that differ ({len(layer.heads)} edits), which transformers cannot express. "
                "Nearest: the same layer with one encoding for all heads."
            )
        if layer.extras:
            names = ", ".join(type(extra).__name__ for extra in layer.extras)
            raise UnsupportedError(
                f"layer {n} has {names} beside its encoding, which no architecture that pe_lab exports computes. "
                "Nearest: the same layer without extras."
            )
        if layer.logit_scale != 1.0:
            raise ValueError(f"layer {n} has a logit scale; fold it into the weights first")
        if not isinstance(layer.encoding, Rope | PartialRope | NoPE):
            raise UnsupportedError(
                f"layer {n} has {type(layer.encoding).__name__}, which no architecture that pe_lab exports has. "
                "Nearest: rope, or no encoding (drop)."
            )
    keys: dict[str, Any] = {}
    sizes = {layer.window for layer in layers} - {None}
    if sizes and not family.windows:
        raise UnsupportedError(f"{family.model_type} has no sliding windows. Nearest: --family=smollm3, or no windows.")
    if len(sizes) > 1:
        raise UnsupportedError(f"transformers has one window per model, and these layers have {sorted(sizes)}.")
    if family.windows:
        keys["use_sliding_window"] = bool(sizes)
        keys["layer_types"] = ["full_attention" if x.window is None else "sliding_attention" for x in layers]
    if sizes:
        keys |= {"sliding_window": sizes.pop(), "max_window_layers": model.layers}
    bare = [isinstance(layer.encoding, NoPE) for layer in layers]
    rotary = {layer.encoding for layer in layers if not isinstance(layer.encoding, NoPE)}
    if len(rotary) > 1:
        names = " and ".join(sorted(str(encoding) for encoding in rotary))
        raise UnsupportedError(f"transformers has one rotation per model, and these layers have {names}.")
    if family.model_type == "llama_drope":
        if rotary:
            raise UnsupportedError("llama_drope is a model without encoding; drop it, or choose another --family.")
        return {
            "attention_type": "nope" if model.qk_norm == "none" else "qk_norm_nope",
            "auto_map": {
                "AutoConfig": "drope.DroPELlamaConfig",
                "AutoModelForCausalLM": "drope.DroPELlamaForCausalLM",
            },
            "max_position_embeddings": max_length or training_length,
            "rope_theta": family.theta,
            "rope_scaling": None,
        }
    encoding = rotary.pop() if rotary else NoPE()
    if family.bare_layers:
        keys |= {"no_rope_layers": [int(not x) for x in bare], "no_rope_layer_interval": 4}
        encoding = Rope(family.theta) if all(bare) else encoding
    elif any(bare) and not all(bare):
        raise UnsupportedError(
            f"{family.model_type} rotates on all layers or on none, and here {sum(bare)} of {len(bare)} are without. "
            "Nearest: --family=smollm3, which sets it layer by layer (and has no QK-norm)."
        )
    return keys | write_rope(encoding, model.head_dim, training_length, family, max_length)
