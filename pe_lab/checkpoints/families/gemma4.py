"""Gemma 4 (text, dense): wider heads in layers without a window, whose values may be their keys; layers that attend to
the keys and values of earlier ones; an input of its own for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    types = OfTypes(channels, heads, bool(config.get("attention_k_eq_v")), shared, d_ff)
    return types.shapes(windowed, whole(config, "head_dim", 256), whole(config, "num_key_value_heads"))


class OfTypes(NamedTuple):
    """The shapes of layers of Gemma 4, beside that of layers with a window.

    Attributes:
      channels, kv_heads, values_are_keys: of layers without a window.
      shared: so many layers at the end attend to the keys of the last layer before them that is of their type.
      d_ff: the width of their feed-forwards; 0: that of the others.
    """

    channels: int
    kv_heads: int
    values_are_keys: bool
    shared: int
    d_ff: int

    @classmethod
    def of(cls, model: ModelConfig) -> OfTypes:
        """Those of a model, as far as they are those of Gemma 4 (`holds_shapes`)."""
        found = {shape.name: shape for shape in model.layer_shapes}
        full = found.get(_FULL) or found.get(_SHARED_FULL) or LayerShape(_FULL, ())
        shared = [found[name] for name in (_SHARED, _SHARED_FULL) if name in found]
        return cls(
            full.head_dim or model.head_dim,
            full.kv_heads or model.kv_heads,
            full.values_are_keys,
            sum(len(shape.layers) for shape in shared),
            max((shape.d_ff for shape in shared), default=0),
        )

    def shapes(self, windowed: Sequence[bool], head_dim: int, kv_heads: int) -> tuple[LayerShape, ...]:
        """`model.layer_shapes`; `head_dim` and `kv_heads` are of layers with a window."""
        first, found = len(windowed) - self.shared, []
        differs = self.values_are_keys or (self.channels, self.kv_heads) != (head_dim, kv_heads)
        for name, one in ((_SHARED, True), (_SHARED_FULL, False)):
            layers = tuple(n for n in range(first, len(windowed)) if windowed[n] == one)
            sources = [n for n in range(first) if windowed[n] == one]
            if layers and not sources:
                raise CheckpointError(
                    f"num_kv_shared_layers (in GGUF shared_kv_layers) is {self.shared}, and no other layer has layer "
                    f"{layers[0]}'s type."
                )
            if layers:
                sizes = {} if one or not differs else {"head_dim": self.channels, "kv_heads": self.kv_heads}
                found.append(LayerShape(name, layers, **sizes, d_ff=self.d_ff, keys_of=sources[-1]))
        full = tuple(n for n in range(first) if not windowed[n])
        if full and differs:
            own = LayerShape(_FULL, full, self.channels, self.kv_heads, values_are_keys=self.values_are_keys)
            found.insert(0, own)
        return tuple(found)


def _write_shapes(model: ModelConfig) -> dict[str, Any]:
    types = OfTypes.of(model)
    return {
        "global_head_dim": types.channels,
        "attention_k_eq_v": types.values_are_keys,
        "num_global_key_value_heads": types.kv_heads if types.values_are_keys else None,
        "num_kv_shared_layers": types.shared,
        "use_double_wide_mlp": bool(types.d_ff),
        "vocab_size_per_layer_input": model.vocab_size,
        "moe_intermediate_size": None,  # without the key, llama.cpp's converter ends
    }


def _holds(model: ModelConfig) -> list[str]:
    types = OfTypes.of(model)
    reasons = [*holds_shapes(model), *one_bias(model)]
    if types.d_ff not in (0, 2 * model.d_ff):
        reasons.append(f"d_ff of layers that share keys is {types.d_ff:,}, not {2 * model.d_ff:,}")
    if not types.values_are_keys and types.kv_heads != model.kv_heads:
        reasons.append("layers without a window have as many key heads as the others, unless their values are keys")
    return reasons


def holds_shapes(model: ModelConfig) -> list[str]:
    """Reasons why the layers of a model do not differ as those of Gemma 4, or its embedding."""
    without = _full_layers(model)
    windowed = [n not in without for n in range(model.layers)]
    try:
        expressed = OfTypes.of(model).shapes(windowed, model.head_dim, model.kv_heads)
    except CheckpointError:
        expressed = ()
    reasons = embedding_is_scaled(model)
    if expressed != model.layer_shapes:
        reasons.append(f"its layers differ in shape by '{_FULL}', '{_SHARED}' and '{_SHARED_FULL}' alone, as Gemma 4's")
    return reasons


def _full_layers(model: ModelConfig) -> set[int]:
    """The layers without a window, as the shapes say."""
    return {n for shape in model.layer_shapes if shape.name in (_FULL, _SHARED_FULL) for n in shape.layers}


def check_types(layers: Sequence[Layer], model: ModelConfig) -> None:
    """`UnsupportedError` where layers with a window have the shape of those without one, or the reverse."""
    without, shapes = {n for n, layer in enumerate(layers) if layer.window is None}, _full_layers(model)
    if shapes and without != shapes:
        raise UnsupportedError(
            f"its layers without a window are those of another shape, {sorted(shapes)}, and here they are "
            f"{sorted(without)}."
        )


@dataclass(frozen=True)
class _Gemma4Positions(RotationByType):
    """The shape of a layer follows from its type, and so from its window."""

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_types(layers, model)
        if layers[-1].window is not None:
            raise UnsupportedError("its last layer has no window.")
        keys = super().write(layers, model, options)
        tables = [one for one in keys["rope_parameters"].values() if one["rope_type"] == "longrope"]
        if tables and model.layer_shapes:
            raise UnsupportedError(
                "transformers fails on tables (longrope) where layers differ in head size. Nearest: p-RoPE, PI, a "
                "larger base, YaRN to a whole length."
            )
        # Those of transformers 4, which has no Gemma 4.
        return {key: value for key, value in keys.items() if key not in ("rope_theta", "rope_scaling")}


def _tensors(model: ModelConfig) -> TensorTable:
    names = [f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    unused = [f"model.layers.{n}.{name}" for n in shared_layers(model) for name in names]
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
        ignored=(*POST_NORM_TENSORS.ignored, *unused),
    )


def shared_layers(model: ModelConfig) -> list[int]:
    """The layers that attend to other layers' keys. Published files have keys for them, which do nothing."""
    return [n for shape in model.layer_shapes if shape.keys_of >= 0 for n in shape.layers]


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
