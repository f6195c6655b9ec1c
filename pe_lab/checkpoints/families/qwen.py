"""Qwen2 (bias of queries, keys and values) and Qwen3 (QK-norm per head), with windows on some of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    Config,
    Family,
    Key,
    heads_fill_the_model,
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
from pe_lab.checkpoints.rope_parameters import RopeKeys


@dataclass(frozen=True)
class SwitchedWindows(WindowFormat):
    """Windows by `layer_types`, or from layer `max_window_layers` on, if `use_sliding_window` is true."""

    def read(self, config: Config, count: int) -> Sizes:
        size = window_size(config.get("sliding_window", 4096))
        if not config.get("use_sliding_window") or size is None:
            return [None] * count
        first = whole(config, "max_window_layers", 28)
        sliding = layer_types(config, count) or [n >= first for n in range(count)]
        return [size if one else None for one in sliding]

    def write(self, windows: Sizes) -> dict[str, Any]:
        size = one_size(windows)
        keys: dict[str, Any] = {"use_sliding_window": size is not None, "layer_types": type_names(windows)}
        return keys | ({} if size is None else {"sliding_window": size, "max_window_layers": len(windows)})


_POSITIONS = OneRotation(RopeKeys(length=32768), SwitchedWindows())

FAMILIES = (
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _POSITIONS,
        LLAMA_TENSORS,
        {"activation": "silu", "attention_bias": True},
        LLAMA_KEYS,
        holds=heads_fill_the_model,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _POSITIONS,
        LLAMA_TENSORS,
        {"activation": "silu", "qk_norm": "head"},
        LLAMA_KEYS | ATTENTION_BIAS | {"head_dim": Key("head_dim", 128)},
        holds=one_bias,
    ),
)
