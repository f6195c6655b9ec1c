"""Gemma 4 (text, dense): wider heads in layers without a window, whose values may be their keys; layers that attend to
the keys and values of earlier ones; an input of its own for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    TIED,
    Config,
    Family,
    Key,
    one_bias,
    or_null,
    whole,
)
from pe_lab.checkpoints.families.formats import FULL, SLIDING, RotationByType, WindowsByType, every, layer_types
from pe_lab.checkpoints.families.gemma import GEMMA_EMBEDDING, POST_NORM_TENSORS, embedding_is_scaled
from pe_lab.checkpoints.families.tensors import TensorTable
from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions
from pe_lab.config import LayerShape, ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.positional import Layer

_FULL, _SHARED, _SHARED_FULL = "full", "shared", "shared_full"  # names of shapes, beside that of the model
_ROTATIONS = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def _inferred(config: Config, names: Sequence[str]) -> Config:
    return config if config.get("rope_parameters") else {**config, "rope_parameters": _ROTATIONS}


def _windowed(config: Config, n: int) -> bool:
    """Whether layer n has a window in a file without `layer_types`."""
    return every(6)(config, n) and n + 1 < whole(config, "num_hidden_layers")


def _of_full_layers(config: Config, full: Sequence[int]) -> tuple[int, int]:
    """The channels and the key heads of layers without a window.

    Published files have a key for each; transformers 5.23 writes what single layers have instead.
    """
    channels, heads = whole(config, "global_head_dim", 512), whole(config, "num_key_value_heads")
    if config.get("attention_k_eq_v"):
        heads = whole(config, "num_global_key_value_heads", heads)
    layers = config.get("per_layer_config")
    if layers is None:
        return channels, heads
    same = isinstance(layers, Mapping) and len({str(one) for one in layers.values()}) <= 1
    own: Any = next(iter(layers.values()), {}) if same else None
    if (
        not isinstance(own, Mapping)
        or {*own} - {"head_dim", "num_key_value_heads"}
        or (own and {*layers} != {*map(str, full)})
    ):
        raise UnsupportedError(
            "per_layer_config gives layers other sizes than those without a window one head_dim and one "
            "num_key_value_heads, which pe_lab does not support."
        )
    return whole(own, "head_dim", whole(config, "head_dim", 256)), whole(
        own, "num_key_value_heads", whole(config, "num_key_value_heads")
    )


def _read_shapes(config: Config) -> tuple[LayerShape, ...]:
    count, shared = whole(config, "num_hidden_layers"), whole(config, "num_kv_shared_layers", 0)
    windowed = layer_types(config, count) or [_windowed(config, n) for n in range(count)]
    if windowed and windowed[-1]:
        raise CheckpointError(
            "the last of layer_types has a window, which transformers takes away from it. Name it full."
        )
    if whole(config, "hidden_size_per_layer_input", 256):
        vocabulary = whole(config, "vocab_size_per_layer_input", 262_144)
        if vocabulary != whole(config, "vocab_size"):
            raise UnsupportedError(
                f"vocab_size_per_layer_input is {vocabulary:,}, and vocab_size {config['vocab_size']:,}; pe_lab looks "
                "every token up in both embeddings."
            )
    full = [n for n in range(count) if not windowed[n]]
    channels, heads = _of_full_layers(config, full)
    d_ff = 2 * whole(config, "intermediate_size") if config.get("use_double_wide_mlp") else 0
    return _shapes(
        windowed, shared, channels, heads, bool(config.get("attention_k_eq_v")), d_ff,
        (whole(config, "head_dim", 256), whole(config, "num_key_value_heads")),
    )  # fmt: skip


def _shapes(
    windowed: Sequence[bool],
    shared: int,
    channels: int,
    heads: int,
    values_are_keys: bool,
    d_ff: int,
    of_windowed: tuple[int, int],
) -> tuple[LayerShape, ...]:
    """The shapes beside that of layers with a window: `channels` and `heads` without one, d_ff of the last `shared`."""
    first, found = len(windowed) - shared, []
    differs = values_are_keys or (channels, heads) != of_windowed
    for name, one in ((_SHARED, True), (_SHARED_FULL, False)):
        layers = tuple(n for n in range(first, len(windowed)) if windowed[n] == one)
        sources = [n for n in range(first) if windowed[n] == one]
        if layers and not sources:
            raise CheckpointError(f"num_kv_shared_layers is {shared}, and no other layer has layer {layers[0]}'s type.")
        if layers:
            sizes = {} if one or not differs else {"head_dim": channels, "kv_heads": heads}
            found.append(LayerShape(name, layers, **sizes, d_ff=d_ff, keys_of=sources[-1]))
    full = tuple(n for n in range(first) if not windowed[n])
    if full and differs:
        found.insert(0, LayerShape(_FULL, full, channels, heads, values_are_keys=values_are_keys))
    return tuple(found)


def _write_shapes(model: ModelConfig) -> dict[str, Any]:
    found = {shape.name: shape for shape in model.layer_shapes}
    full = found.get(_FULL, LayerShape(_FULL, ()))
    shared = [found[name] for name in (_SHARED, _SHARED_FULL) if name in found]
    heads = full.kv_heads or model.kv_heads
    return {
        "global_head_dim": full.head_dim or model.head_dim,
        "attention_k_eq_v": full.values_are_keys,
        "num_global_key_value_heads": heads if full.values_are_keys else None,
        "num_kv_shared_layers": sum(len(shape.layers) for shape in shared),
        "use_double_wide_mlp": any(shape.d_ff for shape in shared),
        "vocab_size_per_layer_input": model.vocab_size,
        "moe_intermediate_size": None,  # without the key, llama.cpp's converter ends
    }


def _holds(model: ModelConfig) -> list[str]:
    keys, without = _write_shapes(model), _full_layers(model)
    windowed = [n not in without for n in range(model.layers)]
    d_ff = 2 * model.d_ff if keys["use_double_wide_mlp"] else 0
    heads = keys["num_global_key_value_heads"] or model.kv_heads
    reasons = [*embedding_is_scaled(model), *one_bias(model)]
    try:
        expressed = _shapes(
            windowed, keys["num_kv_shared_layers"], keys["global_head_dim"], heads, keys["attention_k_eq_v"], d_ff,
            (model.head_dim, model.kv_heads),
        )  # fmt: skip
    except CheckpointError:
        expressed = ()
    if expressed != model.layer_shapes:
        reasons.append(f"its layers differ in shape by '{_FULL}', '{_SHARED}' and '{_SHARED_FULL}' alone, as Gemma 4's")
    return reasons


def _full_layers(model: ModelConfig) -> set[int]:
    """The layers without a window, as the shapes say."""
    return {n for shape in model.layer_shapes if shape.name in (_FULL, _SHARED_FULL) for n in shape.layers}


@dataclass(frozen=True)
class _Gemma4Positions(RotationByType):
    """The shape of a layer follows from its type, and so from its window."""

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        without, shapes = {n for n, layer in enumerate(layers) if layer.window is None}, _full_layers(model)
        if shapes and without != shapes:
            raise UnsupportedError(
                f"its layers without a window are those of another shape, {sorted(shapes)}, and here they are "
                f"{sorted(without)}."
            )
        if layers[-1].window is not None:
            raise UnsupportedError("its last layer has no window.")
        keys = super().write(layers, model, options)
        # Those of transformers 4, which has no Gemma 4.
        return {key: value for key, value in keys.items() if key not in ("rope_theta", "rope_scaling")}


def _tensors(model: ModelConfig) -> TensorTable:
    shared = [n for shape in model.layer_shapes if shape.keys_of >= 0 for n in shape.layers]
    unused = [f"model.layers.{n}.self_attn.{name}.weight" for n in shared for name in ("k_proj", "v_proj", "k_norm")]
    return POST_NORM_TENSORS.changed(
        {
            "model.embed_tokens_per_layer": "token_embedder.layer_inputs.embedding",
            "model.per_layer_model_projection": "token_embedder.layer_inputs.projection",
            "model.per_layer_projection_norm": "token_embedder.layer_inputs.norm.scale",
            "model.layers.{n}.per_layer_input_gate": "layers.layer_input.gate",
            "model.layers.{n}.per_layer_projection": "layers.layer_input.projection",
            "model.layers.{n}.post_per_layer_input_norm": "layers.layer_input.post_norm.scale",
        },
        parameters={"model.layers.{n}.layer_scalar": "layers.layer_scale"},
        ignored=(*POST_NORM_TENSORS.ignored, *unused),  # published files have them, and transformers ignores them too
    )


FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _Gemma4Positions(
            RopeKeys(1_000_000.0, length=131_072, proportional=True),
            RopeKeys(10_000.0, length=131_072, proportional=True),
            WindowsByType(512, _windowed),
        ),
        _tensors,
        {
            "activation": "gelu_tanh",
            "block": "pre_post_norm",
            "qk_norm": "head",
            "attention_scale": 1.0,
            "value_norm": True,
            "layer_scale": True,
        },
        LLAMA_KEYS
        | ATTENTION_BIAS
        | TIED
        | {
            "head_dim": Key("head_dim", 256),
            "logit_soft_cap": or_null("final_logit_softcapping"),
            "per_layer_input": Key("hidden_size_per_layer_input", 256),
        },
        reads=GEMMA_EMBEDDING | {"layer_shapes": _read_shapes},
        writes=_write_shapes,
        activation="hidden_activation",
        # "vision": tokens of images see those after them, and text does not.
        constants={"enable_moe_block": (False,), "use_bidirectional_attention": (None, "vision")},
        holds=_holds,
        inferred=_inferred,
    ),
)
