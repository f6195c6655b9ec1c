"""EXAONE 4: norms after attention and MLP, QK-norm per head; with windows, layers without a window do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Family, Key
from pe_lab.checkpoints.families.formats import RotatedWindows, Sizes, WindowsByType, every
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import RopeKeys


@dataclass(frozen=True)
class _WindowsByLetter(WindowsByType):
    """As `WindowsByType`, and the pattern in letters (LLLG), as in published files; SGLang reads it alone."""

    def write(self, windows: Sizes) -> dict[str, Any]:
        letters = "".join("G" if size is None else "L" for size in windows)
        period = next(n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters)).startswith(letters))
        return super().write(windows) | {"sliding_window_pattern": letters[:period]}


FAMILIES = (
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        RotatedWindows(RopeKeys(), _WindowsByLetter(4096, every(4, "sliding_window_pattern")), unless_windows=True),
        LLAMA_TENSORS.changed(
            {
                "model.layers.{n}.post_attention_layernorm": "layers.attention_post_norm.scale",
                "model.layers.{n}.post_feedforward_layernorm": "layers.mlp_post_norm.scale",
            },
            without=("model.layers.{n}.input_layernorm",),
        ),
        {"activation": "silu", "block": "post_norm", "qk_norm": "head"},
        LLAMA_KEYS | {"norm_epsilon": Key("rms_norm_eps", 1e-5)},
    ),
)
