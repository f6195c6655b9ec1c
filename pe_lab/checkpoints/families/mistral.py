"""Mistral (one window on all layers) and Ministral 3 (YaRN with mscale, and Llama 4's temperature)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Config, Family, Key, Positions
from pe_lab.checkpoints.families.formats import OneRotation, OneWindow, check_layers
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions, one_rotation
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.positional import Layer
from pe_lab.positional.schemes import Llama4Temperature

_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
# transformers' values of a file without rope parameters.
_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    _LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


@dataclass(frozen=True)
class _WithTemperature(OneRotation):
    """A temperature by position on all layers, whose numbers are among the rope parameters."""

    def read(self, config: Config, model: ModelConfig) -> Positions:
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config = {**config, "rope_parameters": _DEFAULT}
        rope = one_rotation(config, self.rope)
        missing = [key for key in (_BETA, _LENGTH) if rope.get(key) is None]
        if missing:
            raise CheckpointError(
                f"the rope parameters lack {' and '.join(missing)}, without which transformers fails."
            )
        extra = Llama4Temperature(float(rope[_BETA]), int(rope[_LENGTH]), offset=0)
        layers, length, rotated = super().read(config, model)
        return Positions(tuple(replace(layer, extras=(extra,)) for layer in layers), length, rotated)

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers, (Llama4Temperature,))
        extras = {layer.extras for layer in layers}
        if len(extras) > 1 or len(next(iter(extras))) > 1:
            raise UnsupportedError("all of its layers have one temperature.")
        (temperature,) = next(iter(extras)) or (Llama4Temperature(0.0, options.training_length, offset=0),)
        keys = super().write([replace(layer, extras=()) for layer in layers], model, options)
        original = keys["rope_parameters"].setdefault(_LENGTH, temperature.floor_scale)
        if temperature.offset or original != temperature.floor_scale:
            raise UnsupportedError(
                f"its temperature rises at multiples of the original length, {original:,} tokens; here it is "
                f"{temperature}."
            )
        keys["rope_parameters"][_BETA] = temperature.attn_scale
        keys["rope_scaling"] = {k: v for k, v in keys["rope_parameters"].items() if k != "rope_theta"}
        return keys


FAMILIES = (
    Family(
        "mistral",
        "MistralForCausalLM",
        OneRotation(RopeKeys(length=131_072), OneWindow(4096)),
        LLAMA_TENSORS,
        {"activation": "silu"},
        LLAMA_KEYS | {"kv_heads": Key("num_key_value_heads", 8)},
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        _WithTemperature(RopeKeys(1_000_000.0, length=262_144), OneWindow()),
        LLAMA_TENSORS,
        {"activation": "silu"},
        LLAMA_KEYS
        | {
            "kv_heads": Key("num_key_value_heads", 8),
            "head_dim": Key("head_dim", 128),
            "norm_epsilon": Key("rms_norm_eps", 1e-5),
        },
    ),
)
