"""Phi-3 and Phi-4-mini: queries, keys and values in one tensor, LongRoPE's two tables, partial rotation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Config, Family, Key, Positions, heads_fill_the_model
from pe_lab.checkpoints.families.formats import OneRotation, OneWindow
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS, QKV, Fused
from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.positional import Layer, NoPE


@dataclass(frozen=True)
class _LongRopeTables(OneRotation):
    def read(self, config: Config, model: ModelConfig) -> Positions:
        # Its files call LongRoPE su, yarn or longrope.
        names = ("rope_scaling", "rope_parameters")
        renamed = {name: _renamed(config[name]) for name in names if isinstance(config.get(name), dict)}
        return super().read({"original_max_position_embeddings": 4096, **config, **renamed}, model)

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        if all(isinstance(layer.encoding, NoPE) for layer in layers):
            options = replace(options, tables=True)
        keys = super().write(layers, model, options)
        rope, longest = keys["rope_parameters"], keys["max_position_embeddings"]
        if rope["rope_type"] not in ("default", "longrope"):
            raise UnsupportedError(
                f"it has no scaling but LongRoPE's two tables, and here it is '{rope['rope_type']}'."
            )
        original = rope.get("original_max_position_embeddings", longest)
        keys["original_max_position_embeddings"] = original
        if rope["rope_type"] == "longrope":
            growth = max(1.0, longest / original)
            gain = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
            if abs(rope["attention_factor"] - gain) > 1e-6:
                raise UnsupportedError(
                    f"its attention factor follows from its lengths: {gain:g}, not {rope['attention_factor']:g}."
                )
            # transformers 4 takes these three keys and no others.
            tables = {name: rope[name] for name in ("short_factor", "long_factor")}
            keys["rope_scaling"] = {"type": "longrope", **tables}
        return keys


def _renamed(rope: dict) -> dict:
    kind = rope.get("rope_type") or rope.get("type")
    return rope | {"rope_type": "longrope"} if kind in ("su", "yarn") else rope


FAMILIES = (
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _LongRopeTables(RopeKeys(length=4096, partial=True), OneWindow()),
        LLAMA_TENSORS.changed(
            {
                "model.layers.{n}.self_attn.qkv_proj": Fused(QKV, "rows"),
                "model.layers.{n}.mlp.gate_up_proj": Fused(("layers.mlp.gate", "layers.mlp.up"), "rows"),
            },
            without=[f"model.layers.{{n}}.self_attn.{x}_proj" for x in "qkv"]
            + [f"model.layers.{{n}}.mlp.{x}_proj" for x in ("gate", "up")],
        ),
        {"activation": "silu"},
        LLAMA_KEYS | {"norm_epsilon": Key("rms_norm_eps", 1e-5)},
        holds=heads_fill_the_model,
    ),
)
