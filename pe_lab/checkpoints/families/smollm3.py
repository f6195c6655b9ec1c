"""SmolLM3: `no_rope_layers` says layer by layer which rotate, and `layer_types` which have a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    MLP_BIAS,
    TIED,
    Config,
    Family,
    one_bias,
    whole,
)
from pe_lab.checkpoints.families.formats import (
    OneRotation,
    Sizes,
    WindowFormat,
    layer_types,
    one_size,
    type_names,
    window_size,
)
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys, Rotary
from pe_lab.errors import CheckpointError
from pe_lab.positional import Rope

_THETA = 2_000_000.0


def _rotates(config: Config, count: int) -> list[bool]:
    interval, flags = whole(config, "no_rope_layer_interval", 4), config.get("no_rope_layers")
    if interval < 1 or not isinstance(flags, list | None):
        raise CheckpointError(f"no_rope_layers {flags!r} with interval {interval} is no pattern.")
    rotates = [(n + 1) % interval != 0 for n in range(count)] if flags is None else [bool(x) for x in flags]
    if len(rotates) < count:
        raise CheckpointError(f"no_rope_layers has {len(rotates)} entries for {count} layers.")
    return rotates[:count]


@dataclass(frozen=True)
class _SmolLM3Windows(WindowFormat):
    def read(self, config: Config, count: int) -> Sizes:
        size, named = window_size(config.get("sliding_window")), layer_types(config, count)
        # It masks the layers that layer_types names, whatever use_sliding_window is.
        if size is None or not (named or config.get("use_sliding_window")):
            return [None] * count
        sliding = named or [not rotates for rotates in _rotates(config, count)]
        return [size if one else None for one in sliding]

    def write(self, windows: Sizes) -> dict[str, Any]:
        size = one_size(windows)
        keys: dict[str, Any] = {"use_sliding_window": size is not None, "layer_types": type_names(windows)}
        return keys | ({} if size is None else {"sliding_window": size, "max_window_layers": len(windows)})


@dataclass(frozen=True)
class _RotationByFlag(OneRotation):
    def read_rotates(self, config: Config, windows: Sizes) -> list[bool]:
        return _rotates(config, len(windows))

    def write_rotates(self, rotates: Sequence[bool], windows: Sizes) -> dict[str, Any]:
        return {"no_rope_layers": [int(x) for x in rotates], "no_rope_layer_interval": 4}

    @property
    def without_rotation(self) -> Rotary:
        return Rope(_THETA)


FAMILIES = (
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _RotationByFlag(RopeKeys(_THETA, length=32768), _SmolLM3Windows()),
        LLAMA_TENSORS,
        {"activation": "silu"},
        LLAMA_KEYS | ATTENTION_BIAS | MLP_BIAS | TIED,
        holds=one_bias,
    ),
)
