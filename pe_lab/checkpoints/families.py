"""Tensor names and shapes of external checkpoints: one table per family, read in both directions.

A table maps an external tensor to native leaves of parameters. Leaves below `layers.` are stacked over layers; `{n}` is
the number of one layer. `LEAVES` has the conversion of each kind of leaf: Hugging Face stores a linear layer as
[out, in] with all heads in one axis, pe_lab as [in, out] with an axis for heads. GPT-NeoX fuses queries, keys and
values into one tensor, which is one line of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.model import Model
from pe_lab.positional import CANONICAL, Layout, from_canonical, to_canonical

LAYERS = "layers."  # leaves below it have a leading axis over layers; external tensors do not

Piece = Shaped[np.ndarray, "..."]


@dataclass(frozen=True)
class Leaf:
    """The conversion of a native leaf (without the axis over layers) from and to an external tensor.

    Attributes:
      external_shape: from the native shape.
      to_native: the leaf, from the external tensor and the native shape.
      to_external: the inverse.
    """

    external_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    to_native: Callable[[Piece, tuple[int, ...]], Piece]
    to_external: Callable[[Piece], Piece]


_SAME = Leaf(lambda s: s, lambda x, s: x, lambda x: x)
_MATRIX = Leaf(lambda s: (s[1], s[0]), lambda x, s: x.T, lambda x: x.T)  # [in, out] and [out, in]
_TO_HEADS = Leaf(  # [D, H, K] and [H K, D]
    lambda s: (s[1] * s[2], s[0]),
    lambda x, s: x.reshape(s[1], s[2], s[0]).transpose(2, 0, 1),
    lambda x: x.transpose(1, 2, 0).reshape(-1, x.shape[0]),
)
_FROM_HEADS = Leaf(  # [H, K, D] and [D, H K]
    lambda s: (s[2], s[0] * s[1]),
    lambda x, s: x.reshape(s[2], s[0], s[1]).transpose(1, 2, 0),
    lambda x: x.transpose(2, 0, 1).reshape(x.shape[2], -1),
)
_PER_HEAD = Leaf(lambda s: (s[0] * s[1],), lambda x, s: x.reshape(s), lambda x: x.reshape(-1))  # [H, K] and [H K]

LEAVES: dict[str, Leaf] = {
    "attention.query": _TO_HEADS,
    "attention.key": _TO_HEADS,
    "attention.value": _TO_HEADS,
    "attention.out": _FROM_HEADS,
    "attention.query_bias": _PER_HEAD,
    "attention.key_bias": _PER_HEAD,
    "attention.value_bias": _PER_HEAD,
    "mlp.gate": _MATRIX,
    "mlp.up": _MATRIX,
    "mlp.down": _MATRIX,
}
# Leaves whose last axis is the channels that a rotation pairs: a layout permutes these, and no others.
ROTATED = {f"attention.{side}{part}" for side in ("query", "key") for part in ("", "_bias", "_norm.scale")}


def canonical_leaf(path: str, leaf: Any, layout: Layout) -> Any:
    """A native leaf, or one layer of it, with the channels of `layout` in canonical order."""
    return to_canonical(leaf, layout) if path.removeprefix(LAYERS) in ROTATED else leaf


def _leaf(path: str, shape: tuple[int, ...]) -> Leaf:
    name = path.removeprefix(LAYERS)
    if name.endswith("_norm.scale") and len(shape) == 2:  # a QK-norm over all heads at once
        return _PER_HEAD
    return LEAVES.get(name, _SAME)


@dataclass(frozen=True)
class Table:
    """A family's tensors and the leaves in each: one, or several that are joined head by head."""

    names: Mapping[str, str | tuple[str, ...]]
    ignored: tuple[str, ...] = ()  # endings of tensors without weights: masks and tables of old files

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """The tensors of a model of this shape; `UnsupportedError` for leaves that the family has no name for."""
        shapes = leaf_shapes(model)
        found: list[Tensor] = []
        for name, paths in self.names.items():
            paths = (paths,) if isinstance(paths, str) else paths
            if not all(path in shapes for path in paths):
                continue
            count = model.layers if paths[0].startswith(LAYERS) else 1
            for n in range(count):
                layer = n if paths[0].startswith(LAYERS) else None
                found.append(Tensor(name.format(n=n), paths, layer, tuple(shapes[path] for path in paths)))
        missing = sorted(set(shapes) - {path for tensor in found for path in tensor.paths})
        if missing:
            raise UnsupportedError(f"has no tensors for {', '.join(missing)}")
        return found


@dataclass(frozen=True)
class Tensor:
    """One external tensor: its name, the leaves in it, its layer, and the leaves' shapes without axis over layers."""

    name: str
    paths: tuple[str, ...]
    layer: int | None
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        first = _leaf(self.paths[0], self.shapes[0]).external_shape(self.shapes[0])
        return (first[0] * len(self.paths), *first[1:])

    def split(self, array: Piece, path: str, layout: Layout = CANONICAL) -> Piece:
        """The native leaf `path` of the external tensor, with its channels in canonical order."""
        at = self.paths.index(path)
        shape = self.shapes[at]
        if len(self.paths) > 1:
            # The first axis is [head, part, channel] in GPT-NeoX's query_key_value; all parts have equally many heads.
            heads, channels = shape[-2:]
            array = array.reshape(heads, len(self.paths), channels, *array.shape[1:])[:, at]
            array = array.reshape(heads * channels, *array.shape[2:])
        return canonical_leaf(path, _leaf(path, shape).to_native(array, shape), layout)

    def join(self, leaves: Sequence[Piece], layout: Layout = CANONICAL) -> Piece:
        """The external tensor of native leaves in the order of `paths`; the inverse of `split`."""
        flat = []
        for path, shape, leaf in zip(self.paths, self.shapes, leaves, strict=True):
            leaf = from_canonical(leaf, layout) if path.removeprefix(LAYERS) in ROTATED else leaf
            flat.append(_leaf(path, shape).to_external(leaf))
        if len(flat) == 1:
            return np.ascontiguousarray(flat[0])
        heads, channels = self.shapes[0][-2:]
        parts = [x.reshape(heads, channels, *x.shape[1:]) for x in flat]
        return np.ascontiguousarray(np.stack(parts, axis=1).reshape(self.shape))


def leaf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every leaf of a model's parameters by its dotted path, with its shape without the axis over layers."""
    whole = leaf_paths(Model(model).shapes)
    return {path: tuple(leaf.shape[1:] if path.startswith(LAYERS) else leaf.shape) for path, leaf in whole.items()}


def leaf_paths(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The leaves of a tree with the structure of parameters, by dotted path."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaf_paths(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


@dataclass(frozen=True)
class Family:
    """A family of external checkpoints.

    Attributes:
      model_type, architecture: names in `config.json`.
      table: its tensors.
      fixed: fields of `ModelConfig` with one value in all models of the family.
      free: fields of `ModelConfig` that `config.json` sets, in addition to the sizes of every family.
      theta, fraction, length, tied: transformers' defaults for keys that `config.json` does not have.
      windows: layers may have a sliding window.
      bare_layers: single layers may be without encoding.
      stock: transformers reads it without remote code.
    """

    model_type: str
    architecture: str
    table: Table
    fixed: Mapping[str, Any]
    free: tuple[str, ...] = ()
    theta: float = 10000.0
    fraction: float = 1.0
    length: int = 2048
    tied: bool = False
    windows: bool = False
    bare_layers: bool = False
    stock: bool = True


_EMBEDDER = {
    "model.embed_tokens.weight": "token_embedder.embedding",
    "model.norm.weight": "token_embedder.final_norm.scale",
    "lm_head.weight": "token_embedder.unembedding",
}
_BLOCK = {
    "model.layers.{n}.input_layernorm.weight": "layers.attention_norm.scale",
    "model.layers.{n}.self_attn.q_proj.weight": "layers.attention.query",
    "model.layers.{n}.self_attn.k_proj.weight": "layers.attention.key",
    "model.layers.{n}.self_attn.v_proj.weight": "layers.attention.value",
    "model.layers.{n}.self_attn.o_proj.weight": "layers.attention.out",
    "model.layers.{n}.post_attention_layernorm.weight": "layers.mlp_norm.scale",
    "model.layers.{n}.mlp.gate_proj.weight": "layers.mlp.gate",
    "model.layers.{n}.mlp.up_proj.weight": "layers.mlp.up",
    "model.layers.{n}.mlp.down_proj.weight": "layers.mlp.down",
}
_QKV_BIAS = {
    "model.layers.{n}.self_attn.q_proj.bias": "layers.attention.query_bias",
    "model.layers.{n}.self_attn.k_proj.bias": "layers.attention.key_bias",
    "model.layers.{n}.self_attn.v_proj.bias": "layers.attention.value_bias",
}
_OUT_BIAS = {"model.layers.{n}.self_attn.o_proj.bias": "layers.attention.out_bias"}
_MLP_BIAS = {
    "model.layers.{n}.mlp.gate_proj.bias": "layers.mlp.gate_bias",
    "model.layers.{n}.mlp.up_proj.bias": "layers.mlp.up_bias",
    "model.layers.{n}.mlp.down_proj.bias": "layers.mlp.down_bias",
}
_QK_NORM = {
    "model.layers.{n}.self_attn.q_norm.weight": "layers.attention.query_norm.scale",
    "model.layers.{n}.self_attn.k_norm.weight": "layers.attention.key_norm.scale",
}
_LLAMA = _EMBEDDER | _BLOCK
_OLD_TABLES = ("rotary_emb.inv_freq",)

_NEOX = {
    "gpt_neox.embed_in.weight": "token_embedder.embedding",
    "gpt_neox.final_layer_norm.weight": "token_embedder.final_norm.scale",
    "gpt_neox.final_layer_norm.bias": "token_embedder.final_norm.bias",
    "embed_out.weight": "token_embedder.unembedding",
    "gpt_neox.layers.{n}.input_layernorm.weight": "layers.attention_norm.scale",
    "gpt_neox.layers.{n}.input_layernorm.bias": "layers.attention_norm.bias",
    "gpt_neox.layers.{n}.post_attention_layernorm.weight": "layers.mlp_norm.scale",
    "gpt_neox.layers.{n}.post_attention_layernorm.bias": "layers.mlp_norm.bias",
    "gpt_neox.layers.{n}.attention.query_key_value.weight": (
        "layers.attention.query",
        "layers.attention.key",
        "layers.attention.value",
    ),
    "gpt_neox.layers.{n}.attention.query_key_value.bias": (
        "layers.attention.query_bias",
        "layers.attention.key_bias",
        "layers.attention.value_bias",
    ),
    "gpt_neox.layers.{n}.attention.dense.weight": "layers.attention.out",
    "gpt_neox.layers.{n}.attention.dense.bias": "layers.attention.out_bias",
    "gpt_neox.layers.{n}.mlp.dense_h_to_4h.weight": "layers.mlp.up",
    "gpt_neox.layers.{n}.mlp.dense_h_to_4h.bias": "layers.mlp.up_bias",
    "gpt_neox.layers.{n}.mlp.dense_4h_to_h.weight": "layers.mlp.down",
    "gpt_neox.layers.{n}.mlp.dense_4h_to_h.bias": "layers.mlp.down_bias",
}

# GGUF's llama family. Queries and keys have the interleaved layout: llama.cpp's converter permutes them.
GGUF_LLAMA = Table(
    {
        "token_embd.weight": "token_embedder.embedding",
        "output_norm.weight": "token_embedder.final_norm.scale",
        "output.weight": "token_embedder.unembedding",
        "blk.{n}.attn_norm.weight": "layers.attention_norm.scale",
        "blk.{n}.attn_q.weight": "layers.attention.query",
        "blk.{n}.attn_k.weight": "layers.attention.key",
        "blk.{n}.attn_v.weight": "layers.attention.value",
        "blk.{n}.attn_output.weight": "layers.attention.out",
        "blk.{n}.attn_q.bias": "layers.attention.query_bias",
        "blk.{n}.attn_k.bias": "layers.attention.key_bias",
        "blk.{n}.attn_v.bias": "layers.attention.value_bias",
        "blk.{n}.attn_output.bias": "layers.attention.out_bias",
        "blk.{n}.ffn_norm.weight": "layers.mlp_norm.scale",
        "blk.{n}.ffn_gate.weight": "layers.mlp.gate",
        "blk.{n}.ffn_up.weight": "layers.mlp.up",
        "blk.{n}.ffn_down.weight": "layers.mlp.down",
        "blk.{n}.ffn_gate.bias": "layers.mlp.gate_bias",
        "blk.{n}.ffn_up.bias": "layers.mlp.up_bias",
        "blk.{n}.ffn_down.bias": "layers.mlp.down_bias",
    }
)

_SEQUENTIAL = {"parallel_block": False, "gated_mlp": True, "scale_embeddings": False}
_LLAMA_SHAPE = _SEQUENTIAL | {"norm": "rms", "activation": "silu", "qk_norm": "none"}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            Table(_LLAMA | _QKV_BIAS | _OUT_BIAS | _MLP_BIAS, _OLD_TABLES),
            _LLAMA_SHAPE,
            free=("attention_bias", "output_bias", "mlp_bias"),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            Table(_LLAMA | _QKV_BIAS, _OLD_TABLES),
            _LLAMA_SHAPE | {"attention_bias": True, "output_bias": False, "mlp_bias": False},
            windows=True,
            length=32768,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            Table(_LLAMA | _QKV_BIAS | _OUT_BIAS | _QK_NORM),
            _LLAMA_SHAPE | {"qk_norm": "head", "mlp_bias": False},
            free=("attention_bias", "output_bias"),
            windows=True,
            length=32768,
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            Table(_LLAMA | _QKV_BIAS | _OUT_BIAS | _MLP_BIAS),
            _LLAMA_SHAPE,
            free=("attention_bias", "output_bias", "mlp_bias"),
            theta=2_000_000.0,
            tied=True,
            windows=True,
            bare_layers=True,
            length=32768,
        ),
        Family(
            "gemma",
            "GemmaForCausalLM",
            Table(_LLAMA | _QKV_BIAS | _OUT_BIAS),
            _SEQUENTIAL
            | {
                "norm": "rms_plus_one",
                "activation": "gelu_tanh",
                "scale_embeddings": True,
                "qk_norm": "none",
                "mlp_bias": False,
            },
            free=("attention_bias", "output_bias"),
            tied=True,
            length=8192,
        ),
        Family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            Table(_NEOX, ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")),
            {"norm": "layer", "gated_mlp": False, "scale_embeddings": False, "qk_norm": "none", "mlp_bias": True},
            free=("attention_bias", "output_bias", "parallel_block", "activation"),
            fraction=0.25,
        ),
        Family(
            "llama_drope",
            "DroPELlamaForCausalLM",
            Table(_LLAMA | _QKV_BIAS | _OUT_BIAS | _MLP_BIAS | _QK_NORM, _OLD_TABLES),
            {key: value for key, value in _LLAMA_SHAPE.items() if key != "qk_norm"},
            free=("attention_bias", "output_bias", "mlp_bias", "qk_norm"),
            stock=False,
        ),
    )
}
