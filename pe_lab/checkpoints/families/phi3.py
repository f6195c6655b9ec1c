"""Phi-3 and Phi-4-mini: queries, keys and values in one tensor, LongRoPE's two tables, partial rotation."""

from __future__ import annotations

from dataclasses import dataclass

from pe_lab.checkpoints.families.family import LLAMA_KEYS, Config, Family, Key, Positions, heads_fill_the_model
from pe_lab.checkpoints.families.formats import OneRotation, OneWindow
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS, QKV, Fused
from pe_lab.checkpoints.rope_parameters import RopeKeys
from pe_lab.config import ModelConfig


@dataclass(frozen=True)
class _Positions(OneRotation):
    def read(self, config: Config, model: ModelConfig) -> Positions:
        # Its files call LongRoPE su, yarn or longrope.
        names = ("rope_scaling", "rope_parameters")
        renamed = {name: _renamed(config[name]) for name in names if isinstance(config.get(name), dict)}
        return super().read({"original_max_position_embeddings": 4096, **config, **renamed}, model)


def _renamed(rope: dict) -> dict:
    kind = rope.get("rope_type") or rope.get("type")
    return rope | {"rope_type": "longrope"} if kind in ("su", "yarn") else rope


FAMILIES = (
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _Positions(RopeKeys(length=4096, partial=True), OneWindow()),
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
