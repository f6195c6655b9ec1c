"""Tensor names and shapes of external checkpoints: one table per family, read in both directions.

A table maps an external module to native leaves of parameters. Leaves below `layers.` are stacked over layers; `{n}` is
the number of one layer. `LEAVES` has the conversion of each kind of leaf: Hugging Face stores a linear layer as
[out, in] with all heads in one axis, pe_lab as [in, out] with an axis for heads. GPT-NeoX fuses queries, keys and
values into one module, which is one entry of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
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
    """The conversion of a native leaf (without the axis over layers) from and to an external tensor."""

    external_shape: Callable[[tuple[int, ...]], tuple[int, ...]]  # from the native shape
    to_native: Callable[[Piece, tuple[int, ...]], Piece]  # the leaf, from the external tensor and the native shape
    to_external: Callable[[Piece], Piece]  # the inverse


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
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), _TO_HEADS),
    **dict.fromkeys(("attention.query_bias", "attention.key_bias", "attention.value_bias"), _PER_HEAD),
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), _MATRIX),
    "attention.out": _FROM_HEADS,
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
class TensorTable:
    """A family's modules and the leaves in their weights: one leaf, or several that are joined head by head.

    The tensor `MODULE.weight` holds the leaves that are listed, `MODULE.bias` their biases, if the model has any.
    """

    modules: Mapping[str, str | tuple[str, ...]]
    ignored: tuple[str, ...] = ()  # endings of tensors without weights: masks and tables of old files

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """The tensors of a model of this shape; `UnsupportedError` for leaves that the family has no name for."""
        shapes = leaf_shapes(model)
        found: list[Tensor] = []
        for kind, leaf_of in (("weight", str), ("bias", _bias)):
            for module, listed in self.modules.items():
                paths = tuple(leaf_of(path) for path in ((listed,) if isinstance(listed, str) else listed))
                if not all(path in shapes for path in paths):
                    continue
                for layer in range(model.layers) if paths[0].startswith(LAYERS) else [None]:
                    name = f"{module.format(n=layer)}.{kind}"
                    found.append(Tensor(name, paths, layer, tuple(shapes[path] for path in paths)))
        missing = sorted(set(shapes) - {path for tensor in found for path in tensor.paths})
        if missing:
            raise UnsupportedError(f"has no tensors for {', '.join(missing)}")
        return found


def _bias(weight: str) -> str:
    """The leaf of the bias that belongs to a weight."""
    norm = weight.removesuffix(".scale")
    return f"{norm}.bias" if norm != weight else f"{weight}_bias"


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


def leaf_paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted path, such as `layers.mlp.up`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


_LLAMA = TensorTable(
    {
        "model.embed_tokens": "token_embedder.embedding",
        "model.norm": "token_embedder.final_norm.scale",
        "lm_head": "token_embedder.unembedding",
        "model.layers.{n}.input_layernorm": "layers.attention_norm.scale",
        "model.layers.{n}.self_attn.q_proj": "layers.attention.query",
        "model.layers.{n}.self_attn.k_proj": "layers.attention.key",
        "model.layers.{n}.self_attn.v_proj": "layers.attention.value",
        "model.layers.{n}.self_attn.o_proj": "layers.attention.out",
        "model.layers.{n}.post_attention_layernorm": "layers.mlp_norm.scale",
        "model.layers.{n}.mlp.gate_proj": "layers.mlp.gate",
        "model.layers.{n}.mlp.up_proj": "layers.mlp.up",
        "model.layers.{n}.mlp.down_proj": "layers.mlp.down",
        "model.layers.{n}.self_attn.q_norm": "layers.attention.query_norm.scale",
        "model.layers.{n}.self_attn.k_norm": "layers.attention.key_norm.scale",
    },
    ignored=("rotary_emb.inv_freq",),
)

_NEOX = TensorTable(
    {
        "gpt_neox.embed_in": "token_embedder.embedding",
        "gpt_neox.final_layer_norm": "token_embedder.final_norm.scale",
        "embed_out": "token_embedder.unembedding",
        "gpt_neox.layers.{n}.input_layernorm": "layers.attention_norm.scale",
        "gpt_neox.layers.{n}.post_attention_layernorm": "layers.mlp_norm.scale",
        "gpt_neox.layers.{n}.attention.query_key_value": (
            "layers.attention.query",
            "layers.attention.key",
            "layers.attention.value",
        ),
        "gpt_neox.layers.{n}.attention.dense": "layers.attention.out",
        "gpt_neox.layers.{n}.mlp.dense_h_to_4h": "layers.mlp.up",
        "gpt_neox.layers.{n}.mlp.dense_4h_to_h": "layers.mlp.down",
    },
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)

# GGUF's llama family. Queries and keys have the interleaved layout: llama.cpp's converter permutes them.
GGUF_LLAMA = TensorTable(
    {
        "token_embd": "token_embedder.embedding",
        "output_norm": "token_embedder.final_norm.scale",
        "output": "token_embedder.unembedding",
        "blk.{n}.attn_norm": "layers.attention_norm.scale",
        "blk.{n}.attn_q": "layers.attention.query",
        "blk.{n}.attn_k": "layers.attention.key",
        "blk.{n}.attn_v": "layers.attention.value",
        "blk.{n}.attn_output": "layers.attention.out",
        "blk.{n}.ffn_norm": "layers.mlp_norm.scale",
        "blk.{n}.ffn_gate": "layers.mlp.gate",
        "blk.{n}.ffn_up": "layers.mlp.up",
        "blk.{n}.ffn_down": "layers.mlp.down",
    }
)

_EVERY_KEY = {
    "vocab_size": ("vocab_size", None),
    "layers": ("num_hidden_layers", None),
    "d_model": ("hidden_size", None),
    "d_ff": ("intermediate_size", None),
    "heads": ("num_attention_heads", None),
    "tie_embeddings": ("tie_word_embeddings", False),
}
_LLAMA_KEYS = _EVERY_KEY | {
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim", 0),  # 0: d_model / heads
    "norm_epsilon": ("rms_norm_eps", 1e-6),
}
_ATTENTION_BIAS = {"attention_bias": ("attention_bias", False), "output_bias": ("attention_bias", False)}
_MLP_BIAS = {"mlp_bias": ("mlp_bias", False)}
_TIED = {"tie_embeddings": ("tie_word_embeddings", True)}

_SEQUENTIAL = {"feed_forward": "", "parallel_block": False, "gated_mlp": True, "scale_embeddings": False}
_LLAMA_BLOCK = _SEQUENTIAL | {"norm": "rms", "activation": "silu"}
_NEOX_BLOCK = {"feed_forward": "", "gated_mlp": False, "scale_embeddings": False, "norm": "layer"}
_GEMMA_BLOCK = _SEQUENTIAL | {"norm": "rms_plus_one", "activation": "gelu_tanh", "scale_embeddings": True}


@dataclass(frozen=True)
class Family:
    """A family of external checkpoints, with transformers' defaults of the rotation and of the training length."""

    model_type: str  # this and the next: names in `config.json`
    architecture: str
    fixed: Mapping[str, Any]  # fields of `ModelConfig` with one value in all models of the family
    # Of `config.json`, for the other fields: (key, default or another key that has it). None: the key must be given.
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=lambda: _LLAMA_KEYS | _ATTENTION_BIAS | _MLP_BIAS)
    table: TensorTable = _LLAMA
    theta: float = 10000.0
    fraction: float = 1.0
    length: int = 2048
    windows: bool = False  # layers may have a sliding window
    bare_layers: bool = False  # single layers may be without encoding
    stock: bool = True  # transformers reads it without remote code

    @property
    def neox(self) -> bool:
        """Whether it has GPT-NeoX's names for the rotation, and heads that rotate in part."""
        return self.model_type == "gpt_neox"


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _LLAMA_BLOCK | {"qk_norm": "none"}),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _LLAMA_BLOCK | {"qk_norm": "none", "attention_bias": True, "output_bias": False, "mlp_bias": False},
            _LLAMA_KEYS,
            windows=True,
            length=32768,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _LLAMA_BLOCK | {"qk_norm": "head", "mlp_bias": False},
            _LLAMA_KEYS | _ATTENTION_BIAS | {"head_dim": ("head_dim", 128)},
            windows=True,
            length=32768,
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            _LLAMA_BLOCK | {"qk_norm": "none"},
            _LLAMA_KEYS | _ATTENTION_BIAS | _MLP_BIAS | _TIED,
            theta=2_000_000.0,
            windows=True,
            bare_layers=True,
            length=32768,
        ),
        Family(
            "gemma",
            "GemmaForCausalLM",
            _GEMMA_BLOCK | {"qk_norm": "none", "mlp_bias": False},
            _LLAMA_KEYS | _ATTENTION_BIAS | _TIED | {"head_dim": ("head_dim", 256)},
            length=8192,
        ),
        Family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            _NEOX_BLOCK | {"qk_norm": "none", "mlp_bias": True},
            _EVERY_KEY
            | {
                "kv_heads": ("num_attention_heads", None),
                "norm_epsilon": ("layer_norm_eps", 1e-5),
                "parallel_block": ("use_parallel_residual", True),
                "attention_bias": ("attention_bias", True),
                "output_bias": ("attention_bias", True),
            },
            _NEOX,
            fraction=0.25,
        ),
        # Its qk_norm is read from `attention_type`.
        Family("llama_drope", "DroPELlamaForCausalLM", _LLAMA_BLOCK, stock=False),
    )
}
