"""GPT-J: a parallel block with one LayerNorm, adjacent pairs of the first `rotary_dim` channels, a bias of the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.families.family import (
    Config,
    Family,
    Key,
    PositionFormat,
    Positions,
    all_heads_have_keys,
    heads_fill_the_model,
    times,
    whole,
)
from pe_lab.checkpoints.families.formats import check_layers, single_rotation
from pe_lab.checkpoints.families.tensors import TensorTable
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.positional import Layer, PartialRope, Rope


@dataclass(frozen=True)
class _RotaryDimension(PositionFormat):
    """RoPE of base 10,000 on `rotary_dim` channels: there is no key of a base or a scaling."""

    def read(self, config: Config, model: ModelConfig) -> Positions:
        length, channels = whole(config, "n_positions", 2048), config.get("rotary_dim", 64)
        channels = model.head_dim if channels is None else channels
        if not isinstance(channels, int) or channels % 2 or not 2 <= channels <= model.head_dim:
            raise CheckpointError(f"rotary_dim is {channels!r}; it must be even, and at most {model.head_dim}.")
        if channels == model.head_dim:
            return Positions((Layer(Rope()),) * model.layers, length)
        layer = Layer(PartialRope(10000.0, channels / model.head_dim))
        return Positions((layer,) * model.layers, length, channels)

    def write(self, layers: Sequence[Layer], model: ModelConfig, options: WriteOptions) -> dict[str, Any]:
        check_layers(layers)
        if any(layer.window for layer in layers):
            raise UnsupportedError("it has no sliding windows.")
        encoding = single_rotation(layers)
        if encoding == Rope():
            channels = model.head_dim
        elif isinstance(encoding, PartialRope) and encoding == PartialRope(10000.0, encoding.fraction):
            channels = encoding.rotated_channels(model.head_dim)
        else:
            raise UnsupportedError(f"it has RoPE of base 10,000 on all layers and no scaling, and here is {encoding}.")
        if any(layer.encoding != encoding for layer in layers):
            raise UnsupportedError("it rotates on all layers.")
        return {"rotary_dim": channels, "n_positions": options.max_length or options.training_length}


FAMILIES = (
    Family(
        "gptj",
        "GPTJForCausalLM",
        _RotaryDimension(),
        TensorTable(
            {
                "transformer.wte": "token_embedder.embedding",
                "transformer.ln_f": "token_embedder.final_norm.scale",
                "lm_head": "token_embedder.unembedding",
                "transformer.h.{n}.ln_1": "layers.attention_norm.scale",
                "transformer.h.{n}.attn.q_proj": "layers.attention.query",
                "transformer.h.{n}.attn.k_proj": "layers.attention.key",
                "transformer.h.{n}.attn.v_proj": "layers.attention.value",
                "transformer.h.{n}.attn.out_proj": "layers.attention.out",
                "transformer.h.{n}.mlp.fc_in": "layers.mlp.up",
                "transformer.h.{n}.mlp.fc_out": "layers.mlp.down",
            },
            ignored=("attn.bias", "attn.masked_bias", "attn.embed_positions"),
        ),
        {
            "block": "parallel_one_norm",
            "norm": "layer",
            "gated_mlp": False,
            "mlp_bias": True,
            "unembedding_bias": True,
        },
        {
            "vocab_size": Key("vocab_size"),
            "layers": Key("n_layer"),
            "d_model": Key("n_embd"),
            "d_ff": Key("n_inner", times("n_embd", 4)),
            "heads": Key("n_head"),
            "kv_heads": Key("n_head"),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
            "tie_embeddings": Key("tie_word_embeddings", False),
        },
        activation="activation_function",
        holds=lambda model: all_heads_have_keys(model) + heads_fill_the_model(model),
        pairs="interleaved",
    ),
)
