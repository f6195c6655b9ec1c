"""The architectures of llama.cpp that pe_lab reads and writes: tensors, metadata keys, what each does with positions.

Facts of llama.cpp's loaders and graphs (src/llama-model.cpp, src/models/*.cpp of 2026-10). A GGUF's metadata, without
the architecture's name before each key, are the config of a family (`families.Family`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families import Config, Family, Fused, TensorTable
from pe_lab.checkpoints.families.family import (
    Key,
    all_heads_have_keys,
    heads_fill_the_model,
    or_null,
    same_as,
    whole,
)
from pe_lab.checkpoints.families.formats import AlibiOnAll, LearnedTable
from pe_lab.checkpoints.families.gemma import embedding_is_scaled
from pe_lab.checkpoints.families.gemma4 import holds_shapes, shared_layers
from pe_lab.checkpoints.families.granite import NO_SINK
from pe_lab.checkpoints.families.tensors import QKV, NeutralTensor
from pe_lab.checkpoints.gguf.gemma4 import (
    Gemma4GgufPositions,
    read_d_ff,
    read_head_dim,
    read_kv_heads,
    read_shapes,
)
from pe_lab.checkpoints.gguf.positions import GgufPositions, stored
from pe_lab.config import ModelConfig
from pe_lab.positional.schemes import LearnedSink

FOUND = "tensors"  # a key for what the names of a file's tensors tell: which biases there are, and an output matrix

TENSORS = TensorTable(
    {
        "token_embd": "token_embedder.embedding",
        "output_norm": "token_embedder.final_norm.scale",
        "output": "token_embedder.unembedding",
        "blk.{n}.attn_norm": "layers.attention_norm.scale",
        "blk.{n}.attn_q": "layers.attention.query",
        "blk.{n}.attn_k": "layers.attention.key",
        "blk.{n}.attn_v": "layers.attention.value",
        "blk.{n}.attn_output": "layers.attention.out",
        "blk.{n}.attn_q_norm": "layers.attention.query_norm.scale",
        "blk.{n}.attn_k_norm": "layers.attention.key_norm.scale",
        "blk.{n}.post_attention_norm": "layers.attention_post_norm.scale",
        "blk.{n}.ffn_norm": "layers.mlp_norm.scale",
        "blk.{n}.ffn_gate": "layers.mlp.gate",
        "blk.{n}.ffn_up": "layers.mlp.up",
        "blk.{n}.ffn_down": "layers.mlp.down",
        "blk.{n}.post_ffw_norm": "layers.mlp_post_norm.scale",
    },
    parameters={"position_embd.weight": "layers.positional.learned_positions.table"},
)
_PLUS_ONE = TENSORS.changed(plus_one=True)
_FUSED_QKV = TENSORS.changed(
    {"blk.{n}.attn_qkv": Fused(QKV, "rows"), "token_embd_norm": "token_embedder.embedding_norm.scale"},
    without=[f"blk.{{n}}.attn_{x}" for x in "qkv"],
)
_GATE_UP = {"blk.{n}.ffn_up": Fused(("layers.mlp.gate", "layers.mlp.up"), "rows")}


def _zeros(*biases: tuple[str, Callable[[ModelConfig], int]]) -> tuple[NeutralTensor, ...]:
    """Biases that an architecture always has."""
    return tuple(
        NeutralTensor(f"blk.{{n}}.{name}.bias", lambda model, size=size: (size(model),), 0.0) for name, size in biases
    )


def _falcon(model: ModelConfig) -> TensorTable:
    """With two norms, the second is that of attention."""
    if model.block == "parallel":
        norms = {"blk.{n}.attn_norm_2": "layers.attention_norm.scale", "blk.{n}.attn_norm": "layers.mlp_norm.scale"}
        return _FUSED_QKV.changed(norms, without=("blk.{n}.ffn_norm",))
    return _FUSED_QKV


def _gemma4(model: ModelConfig) -> TensorTable:
    unused = [f"blk.{n}.{name}.weight" for n in shared_layers(model) for name in ("attn_k", "attn_v", "attn_k_norm")]
    return TENSORS.changed(
        {
            "per_layer_token_embd": "token_embedder.layer_inputs.embedding",
            "per_layer_model_proj": "token_embedder.layer_inputs.projection",
            "per_layer_proj_norm": "token_embedder.layer_inputs.norm.scale",
            "blk.{n}.inp_gate": "layers.layer_input.gate",
            "blk.{n}.proj": "layers.layer_input.projection",
            "blk.{n}.post_norm": "layers.layer_input.post_norm.scale",
        },
        parameters={"blk.{n}.layer_output_scale.weight": "layers.layer_scale"},
        ignored=tuple(unused),
    )


@dataclass(frozen=True)
class Architecture(Family):
    """An architecture of llama.cpp: a family whose config is a GGUF's metadata.

    Attributes:
      scale: the factor on products of queries and keys, where no key has it.
      output: a file must have `output.weight`, also where the model's embeddings are tied.
      note: what llama.cpp computes less exactly than the model.
    """

    scale: Callable[[ModelConfig], float] = lambda model: model.head_dim**-0.5
    output: bool = False
    note: str = ""


_KEYS = re.compile(r"blk\.(\d{1,9})\.attn_k\.weight")


def _found(config: Config, names: Sequence[str]) -> Config:
    """The metadata and what the names of tensors tell."""

    present = frozenset(names)

    def has(*tensors: str) -> bool:
        return not present.isdisjoint(tensors)

    return {
        "vocab_size": None,
        **config,
        FOUND: {
            "tied": not has("output.weight"),
            "attention": has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
            "output": has("blk.0.attn_output.bias"),
            "mlp": has("blk.0.ffn_up.bias"),
            "mlp_norm": has("blk.0.ffn_norm.weight"),
            "second_norm": has("blk.0.attn_norm_2.weight"),
            "qk_norm": has("blk.0.attn_q_norm.weight"),
            "without_values": [
                int(found[1])
                for found in map(_KEYS.fullmatch, names)
                if found and not has(f"blk.{found[1]}.attn_v.weight")
            ],
        },
    }


def _stored(x: Any) -> Any:
    return stored(x) if isinstance(x, float) else x


def _inverse(x: Any) -> Any:
    return 1 / stored(x) if isinstance(x, int | float) and x else x


_SHAPE = {
    "vocab_size": Key("vocab_size"),
    "layers": Key("block_count"),
    "d_model": Key("embedding_length"),
    "d_ff": Key("feed_forward_length"),
    "heads": Key("attention.head_count"),
    "kv_heads": Key("attention.head_count_kv", same_as("attention.head_count")),
    "head_dim": Key("attention.key_length", 0),
    "tie_embeddings": Key(f"{FOUND}.tied"),
}
_RMS = _SHAPE | {"norm_epsilon": Key("attention.layer_norm_rms_epsilon", 1e-5, read=_stored)}
_LAYER = _SHAPE | {"norm_epsilon": Key("attention.layer_norm_epsilon", 1e-5, read=_stored)}
_QKV_BIAS = {"attention_bias": Key(f"{FOUND}.attention")}
_OUTPUT_BIAS = {"output_bias": Key(f"{FOUND}.output")}
_BIASES = _QKV_BIAS | _OUTPUT_BIAS | {"mlp_bias": Key(f"{FOUND}.mlp")}
_ALL_BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
_GRANITE = {
    "embedding_multiplier": Key("embedding_scale", 1.0, read=_stored),
    "residual_multiplier": Key("residual_scale", 1.0, read=_stored),
    "attention_scale": or_null("attention.scale"),
    "logit_multiplier": Key("logit_scale", 1.0, read=_inverse, write=lambda value, model: 1 / value),
}
_GEMMA = {"norm": "rms_plus_one", "activation": "gelu_tanh", "tie_embeddings": True}
_CAPS = {
    "attention_soft_cap": Key("attn_logit_softcapping", 50.0),
    "logit_soft_cap": Key("final_logit_softcapping", 30.0),
}
_ROOT = {"embedding_multiplier": lambda config: whole(config, "embedding_length") ** 0.5}
_TABLE = "On CPUs llama.cpp reads GELU from a table of 16 bits: differences of a logit of about 1e-3."
_TANH = f"llama.cpp computes GELU by its tanh approximation. {_TABLE}"
_LLAMA = GgufPositions(tables="all")


def _caps_hold(model: ModelConfig) -> list[str]:
    missing = [name for name in ("attention_soft_cap", "logit_soft_cap") if not getattr(model, name)]
    return embedding_is_scaled(model) + [f"{name} is 0, and it has both" for name in missing]


def _large(layers: int) -> Callable[[ModelConfig], float]:
    """The scale of Gemma's products: that of a head, but for the 27B, which it knows by its number of layers."""
    return lambda model: (model.d_model // model.heads if model.layers == layers else model.head_dim) ** -0.5


def _architecture(name: str, positions: Any, tensors: Any, fixed: dict[str, Any], keys: dict[str, Key], **more: Any):
    """An architecture whose activation has no key."""
    fixed = {"activation": "silu", **fixed}
    return Architecture(name, name, positions, tensors, fixed, keys, activation="", inferred=_found, **more)


_LAYER_NORM = {"norm": "layer", "gated_mlp": False}
_HEADS = {"holds": heads_fill_the_model}
ARCHITECTURES: dict[str, Architecture] = {
    one.model_type: one
    for one in (
        _architecture("qwen2", GgufPositions(32768), TENSORS, {"attention_bias": True}, _RMS, **_HEADS),
        _architecture("llama", _LLAMA, TENSORS, {}, _RMS | _BIASES, pairs="interleaved"),
        _architecture("qwen3", GgufPositions(32768), TENSORS, {"qk_norm": "head"}, _RMS | _QKV_BIAS | _OUTPUT_BIAS),
        _architecture(
            "smollm3", GgufPositions(unrotated="fourth"), TENSORS, {}, _RMS | _QKV_BIAS, pairs="interleaved"
        ),
        _architecture("granite", _LLAMA, TENSORS, {}, _RMS | _BIASES | _GRANITE, pairs="interleaved"),
        _architecture(
            "granite_swa",
            GgufPositions(tables="all", windows="yes", unrotated="rope_pattern", extras=(LearnedSink(),)),
            TENSORS.changed(
                parameters={"blk.{n}.attn_sinks.weight": "layers.positional.sink.sink"},
                neutral=(NeutralTensor("blk.{n}.attn_sinks.weight", lambda model: (model.heads,), NO_SINK),),
            ),
            {},
            _RMS | _BIASES | _GRANITE,
            pairs="interleaved",
            note="Needs a llama.cpp that has granite_swa (the one measured is of 2026-10).",
        ),
        _architecture(
            "mistral3",
            GgufPositions(tables="all", betas=True, temperature=True),
            TENSORS,
            {},
            _RMS | _BIASES,
            pairs="interleaved",
        ),
        _architecture(
            "gemma",
            GgufPositions(8192),
            _PLUS_ONE,
            _GEMMA,
            _RMS | _QKV_BIAS,
            reads=_ROOT,
            note=_TABLE,
            holds=embedding_is_scaled,
        ),
        _architecture(
            "gemma2",
            GgufPositions(8192, windows="yes", pattern=2, sliding="base"),
            _PLUS_ONE,
            _GEMMA | {"block": "pre_post_norm"},
            _RMS | _QKV_BIAS | _CAPS,
            reads=_ROOT,
            note=_TABLE,
            holds=_caps_hold,
            scale=_large(46),
        ),
        _architecture(
            "gemma3",
            GgufPositions(131_072, windows="yes", pattern=6, sliding="plain_base"),
            _PLUS_ONE,
            {"norm": "rms_plus_one", "activation": "gelu_tanh", "block": "pre_post_norm", "qk_norm": "head"},
            _RMS | _QKV_BIAS | {"logit_soft_cap": or_null("final_logit_softcapping")},
            reads=_ROOT,
            note=_TABLE,
            holds=embedding_is_scaled,
            scale=_large(62),
        ),
        _architecture(
            "gemma4",
            Gemma4GgufPositions(131_072, tables="all", windows="yes", sliding="plain_base"),
            _gemma4,
            {
                "activation": "gelu_tanh", "block": "pre_post_norm", "qk_norm": "head", "value_norm": True,
                "layer_scale": True,
            },
            {name: key for name, key in _RMS.items() if name not in ("d_ff", "kv_heads", "head_dim")}
            | {
                "logit_soft_cap": or_null("final_logit_softcapping"),
                "per_layer_input": Key("embedding_length_per_layer_input", 0),
            },
            reads=_ROOT
            | {
                "d_ff": read_d_ff, "kv_heads": read_kv_heads, "head_dim": read_head_dim, "layer_shapes": read_shapes,
            },
            note=_TABLE,
            holds=holds_shapes,
            scale=lambda model: 1.0,
        ),
        _architecture(
            "olmo2",
            GgufPositions(windows="yes", pattern=4, sliding="plain"),
            TENSORS,
            {"block": "post_norm", "qk_norm": "flat"},
            _RMS | _QKV_BIAS,
            output=True,
            **_HEADS,
        ),
        _architecture(
            "exaone4",
            GgufPositions(tables="all", windows="yes", pattern=4, unrotated="full_if_windows", window_layers=64),
            TENSORS,
            {"block": "post_norm", "qk_norm": "head"},
            _RMS | _QKV_BIAS,
            **_HEADS,
        ),
        _architecture(
            "cohere2",
            GgufPositions(8192, windows="yes", pattern=4, unrotated="full"),
            TENSORS,
            {"block": "parallel_one_norm", "norm": "layer_no_bias", "tie_embeddings": True},
            {
                name: key
                for name, key in (_LAYER | _QKV_BIAS).items()
                if name != "tie_embeddings"
            } | {"logit_multiplier": Key("logit_scale", 1.0, read=_stored)},
            pairs="interleaved",
            **_HEADS,
        ),
        _architecture(
            "glm4",
            GgufPositions(131_072, partial=True),
            TENSORS.changed(_GATE_UP, without=("blk.{n}.ffn_gate",)),
            {"block": "pre_post_norm"},
            _RMS | _QKV_BIAS,
            pairs="interleaved",
        ),
        _architecture(
            "phi3",
            GgufPositions(4096, partial=True, tables="two", windows="ignored"),
            _FUSED_QKV.changed(_GATE_UP, without=("blk.{n}.ffn_gate",)),
            {},
            _RMS,
            **_HEADS,
        ),
        _architecture(
            "stablelm",
            GgufPositions(4096, partial=True),
            TENSORS.changed(head_norms=True),
            {"norm": "layer"},
            _LAYER
            | _QKV_BIAS
            | {
                "block": Key(f"{FOUND}.mlp_norm", read=lambda x: "pre_norm" if x else "parallel_one_norm"),
                "qk_norm": Key(f"{FOUND}.qk_norm", read=lambda x: "layer_heads" if x else "none"),
            },
            output=True,
            holds=lambda model: heads_fill_the_model(model)
            + ([] if model.block in ("pre_norm", "parallel_one_norm") else [f"block is {model.block!r}"])
            + ([] if model.qk_norm in ("none", "layer_heads") else [f"qk_norm is {model.qk_norm!r}"]),
        ),
        _architecture(
            "gptneox",
            GgufPositions(partial=True),
            _FUSED_QKV.changed(
                neutral=_zeros(
                    ("attn_qkv", lambda model: 3 * model.d_model), ("attn_output", lambda model: model.d_model)
                )
            ),
            _LAYER_NORM | {"activation": "gelu", "mlp_bias": True},
            _LAYER
            | _QKV_BIAS
            | _OUTPUT_BIAS
            | {
                "block": Key(
                    "use_parallel_residual",
                    True,
                    read=lambda x: "parallel" if x else "pre_norm",
                    write=lambda value, model: value == "parallel",
                )
            },
            output=True,
            note=_TANH,
            holds=lambda model: heads_fill_the_model(model)
            + all_heads_have_keys(model)
            + ([] if model.block in ("pre_norm", "parallel") else [f"block is {model.block!r}"]),
        ),
        _architecture(
            "falcon",
            GgufPositions(),
            _falcon,
            _LAYER_NORM | {"activation": "gelu"},
            _LAYER | {"block": Key(f"{FOUND}.second_norm", read=lambda x: "parallel" if x else "parallel_one_norm")},
            note=_TANH,
            holds=lambda model: heads_fill_the_model(model)
            + ([] if model.block in ("parallel", "parallel_one_norm") else [f"block is {model.block!r}"]),
        ),
        _architecture(
            "starcoder2",
            GgufPositions(4096),
            TENSORS.changed(
                neutral=_zeros(
                    ("attn_output", lambda model: model.d_model),
                    ("ffn_up", lambda model: model.d_ff),
                    ("ffn_down", lambda model: model.d_model),
                )
            ),
            _LAYER_NORM | {"activation": "gelu_tanh"},
            _LAYER | _BIASES,
            note=_TABLE,
            **_HEADS,
        ),
        _architecture(
            "gpt2",
            LearnedTable("context_length", 1024),
            _FUSED_QKV,
            _LAYER_NORM | _ALL_BIASES | {"activation": "gelu_tanh"},
            _LAYER,
            note=_TABLE,
            holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
        ),
        _architecture(
            "bloom",
            AlibiOnAll("context_length", 2048),
            _FUSED_QKV,
            _LAYER_NORM | _ALL_BIASES | {"activation": "gelu_tanh", "embedding_norm": True},
            _LAYER,
            note=_TABLE,
            holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
        ),
        _architecture(
            "mpt",
            AlibiOnAll("context_length", 2048),
            _FUSED_QKV,
            {"norm": "layer_no_bias", "gated_mlp": False, "activation": "gelu"},
            _LAYER | {"qkv_clip": or_null("attention.clamp_kqv")},
            note=_TANH,
            constants={"attention.max_alibi_bias": (8.0,)},
            holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
        ),
    )
}  # fmt: skip
