"""Granite 3 (multipliers) and GraniteSWA (a base per layer, of which 0 is no rotation; windows; sinks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    ATTENTION_MULTIPLIER,
    LLAMA_KEYS,
    MLP_BIAS,
    TIED,
    Config,
    Family,
    Key,
    PositionFormat,
    Positions,
    one_bias,
)
from pe_lab.checkpoints.families.formats import OneRotation, WindowsByType, check_layers
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS, NeutralTensor
from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions, one_rotation, read_rotation, write_rope
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError, excerpt
from pe_lab.positional import Layer, NoPE, Rope
from pe_lab.positional.schemes import LearnedSink

NO_SINK = -1e30  # a logit without weight
_ROPE = RopeKeys(length=8192)
_WINDOWS = WindowsByType(128, lambda config, n: n % 4 != 0)
_KEYS = (
    LLAMA_KEYS
    | ATTENTION_BIAS
    | MLP_BIAS
    | {
        "embedding_multiplier": Key("embedding_multiplier", 1.0),
        "residual_multiplier": Key("residual_multiplier", 1.0),
        "attention_scale": ATTENTION_MULTIPLIER,
        "logit_multiplier": Key(
            "logits_scaling", 1.0, read=lambda x: 1 / x, write=lambda value, model: _inverse(value)
        ),
    }
)


def _inverse(x: float) -> float:
    """1 / x, as a whole number where that is exact."""
    return round(1 / x) if 1 / round(1 / x) == x else 1 / x


@dataclass(frozen=True)
class _BaseByLayer(PositionFormat):
    """`layer_rope_theta` has the base of each layer, 0 for none. All other rope parameters are common."""

    def read(self, config: Config, model: ModelConfig) -> Positions:
        rope = one_rotation(config, _ROPE)
        bases = config.get("layer_rope_theta")
        if bases is None:
            bases = [rope.get("rope_theta", _ROPE.theta)] * model.layers
        if not isinstance(bases, list) or len(bases) != model.layers:
            shown = excerpt(repr(bases), 60)
            raise CheckpointError(
                f"layer_rope_theta is {shown}; it must have a base for each of {model.layers} layers."
            )
        windows, sink, length = _WINDOWS.read(config, model.layers), (LearnedSink(),), _ROPE.length
        layers = []
        for base, window in zip(bases, windows, strict=True):
            encoding, length = read_rotation({**rope, "rope_theta": base or 1e4}, config, model.head_dim, _ROPE)
            layers.append(Layer(encoding if base else NoPE(), window, extras=sink))
        return Positions(tuple(layers), length)

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers, (LearnedSink,))
        if len({bool(layer.extras) for layer in layers}) > 1:
            raise UnsupportedError("all of its layers have sinks, or none has.")
        written = {
            layer.encoding: write_rope(layer.encoding, model.head_dim, _ROPE, options)
            for layer in layers
            if not isinstance(layer.encoding, NoPE)
        } or {NoPE(): write_rope(Rope(), model.head_dim, _ROPE, options)}
        others = [{k: v for k, v in one["rope_parameters"].items() if k != "rope_theta"} for one in written.values()]
        if any(one != others[0] for one in others):
            names = " and ".join(sorted(map(str, written)))
            raise UnsupportedError(f"its layers differ in their base alone, and these have {names}.")
        bases = [0 if isinstance(x.encoding, NoPE) else written[x.encoding]["rope_theta"] for x in layers]
        common = next(iter(written.values()))
        windows = _WINDOWS.write([layer.window for layer in layers])
        # llama.cpp's converter has no_rope_layers for it.
        return common | windows | {"layer_rope_theta": bases, "no_rope_layers": [int(base != 0) for base in bases]}


FAMILIES = (
    Family(
        "granite", "GraniteForCausalLM", OneRotation(), LLAMA_TENSORS, {"activation": "silu"}, _KEYS, holds=one_bias
    ),
    Family(
        "granite_swa",
        "GraniteSWAForCausalLM",
        _BaseByLayer(),
        LLAMA_TENSORS.changed(
            parameters={"model.layers.{n}.self_attn.sinks": "layers.positional.sink.sink"},
            neutral=(NeutralTensor("model.layers.{n}.self_attn.sinks", lambda model: (model.heads,), NO_SINK),),
        ),
        {"activation": "silu"},
        _KEYS | TIED | {"norm_epsilon": Key("rms_norm_eps", 1e-5)},
        holds=one_bias,
    ),
)
