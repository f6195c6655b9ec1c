"""DroPE's own layout: a Llama without encoding, whose QK-norm is flat; its code is not part of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    ATTENTION_BIAS,
    LLAMA_KEYS,
    MLP_BIAS,
    Config,
    Family,
    Key,
    PositionFormat,
    Positions,
    whole,
)
from pe_lab.checkpoints.families.formats import check_layers
from pe_lab.checkpoints.families.tensors import LLAMA_TENSORS
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.positional import Layer, NoPE

_NORMS = {"nope": "none", "qk_norm_nope": "flat"}  # qk_norm by `attention_type`
_KINDS = {norm: kind for kind, norm in _NORMS.items()}
_LENGTH = 2048


def _read_norm(kind: Any) -> str:
    if kind not in _NORMS:
        raise CheckpointError(
            f"attention_type is '{kind}'; pe_lab reads {' and '.join(_NORMS)}. The others store norms that they do not "
            "use."
        )
    return _NORMS[kind]


@dataclass(frozen=True)
class _NoEncoding(PositionFormat):
    def read(self, config: Config, model: ModelConfig) -> Positions:
        scale = config.get("softmax_scale")
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0):
            raise CheckpointError(f"softmax_scale is {scale!r}; it must be a number above 0.")
        layer = Layer(NoPE(), logit_scale=1.0 if scale is None else float(scale) * model.head_dim**0.5)
        return Positions((layer,) * model.layers, whole(config, "max_position_embeddings", _LENGTH))

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers)
        if any(layer.window for layer in layers):
            raise UnsupportedError("it has no sliding windows.")
        if any(not isinstance(layer.encoding, NoPE) for layer in layers):
            raise UnsupportedError("it is a model without encoding: drop it, or choose another --family.")
        return {
            "auto_map": {
                "AutoConfig": "drope.DroPELlamaConfig",
                "AutoModelForCausalLM": "drope.DroPELlamaForCausalLM",
            },
            "max_position_embeddings": options.max_length or options.training_length,
            "rope_theta": 10000.0,
            "rope_scaling": None,
        }


def _inferred(config: Config, names: Sequence[str]) -> Config:
    has = any(name.endswith("self_attn.q_norm.weight") for name in names)
    return {"attention_type": "qk_norm_nope" if has else "nope", **config}


def _holds(model: ModelConfig) -> list[str]:
    return [] if model.qk_norm in _NORMS.values() else [f"qk_norm is {model.qk_norm!r}, not flat"]


FAMILIES = (
    Family(
        "llama_drope",
        "DroPELlamaForCausalLM",
        _NoEncoding(),
        LLAMA_TENSORS,
        {"activation": "silu"},
        LLAMA_KEYS
        | ATTENTION_BIAS
        | MLP_BIAS
        | {"qk_norm": Key("attention_type", read=_read_norm, write=lambda value, model: _KINDS[value])},
        holds=_holds,
        inferred=_inferred,
        stock=False,
    ),
)
