"""Tensor names and shapes of external checkpoints: one table per family, read in both directions.

A table maps an external module to native leaves of parameters. Leaves below `layers.` are stacked over layers; `{n}` is
the number of one layer. `LEAVES` has the conversion of each kind of leaf: Hugging Face stores a linear layer as
[out, in] with all heads in one axis, pe_lab as [in, out] with an axis for heads. Modules that hold several leaves
(`Fused`) are one entry of a table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.model import Model, complete
from pe_lab.model.learned import learned_encodings
from pe_lab.model.shape import stacks
from pe_lab.positional import CANONICAL, Layer, Layout, from_canonical, layer_hooks, to_canonical

LAYERS = "layers."  # leaves below it have a leading axis over layers; external tensors do not
SHAPES = "layers.shapes."  # of layers that differ in shape, by its name: stacked over the layers of that shape
POSITIONAL = "layers.positional."  # of encodings, by name: stacked over the layers that have them

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
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down", "layer_input.gate", "layer_input.projection"), _MATRIX),
    "attention.out": _FROM_HEADS,
}
# Leaves whose last axis is the channels that a rotation pairs: a layout permutes these, and no others.
ROTATED = {f"attention.{side}{part}" for side in ("query", "key") for part in ("", "_bias", "_norm.scale")}


def block_leaf(path: str) -> str:
    """The name of a leaf within its layer: `attention.query` of `layers.` and of `layers.shapes.NAME.`."""
    return path.removeprefix(LAYERS) if not path.startswith(SHAPES) else path.split(".", 3)[3]


def canonical_leaf(path: str, leaf: Any, layout: Layout) -> Any:
    """A native leaf, or one layer of it, with the channels of `layout` in canonical order."""
    return to_canonical(leaf, layout) if block_leaf(path) in ROTATED else leaf


def _leaf(path: str, shape: tuple[int, ...]) -> Leaf:
    name = block_leaf(path)
    if name.endswith("_norm.scale") and len(shape) == 2:  # a QK-norm over all heads at once
        return _PER_HEAD
    return LEAVES.get(name, _SAME)


@dataclass(frozen=True)
class Fused:
    """Several leaves in one module, side by side in its outputs.

    `how`: `rows`: one leaf after another; `heads`: [head, leaf, channel], of leaves with equally many heads; `groups`:
    queries, keys and values, of each key head its query heads, the key and the value.
    """

    paths: tuple[str, ...]
    how: Literal["rows", "heads", "groups"]


@dataclass(frozen=True)
class NeutralTensor:
    """A tensor that an architecture always has, and the value at which it does nothing, for models without its leaf."""

    name: str  # with {n}
    shape: Callable[[ModelConfig], tuple[int, ...]]
    value: float


@dataclass(frozen=True)
class TensorTable:
    """A family's modules and the leaves in their weights.

    The tensor `MODULE.weight` holds the leaves that are listed, `MODULE.bias` their biases, if the model has any.

    Attributes:
      modules: the leaf or leaves of each; a module whose name has `{h}` holds one head's row of a leaf.
      parameters: the leaves of tensors that are no module's weight, by their whole names.
      transposed: matrices of layers are [in, out] (GPT-2's Conv1D).
      neutral: tensors to write for models that lack their leaves.
      ignored: endings of tensors without weights: masks and tables of old files.
      plus_one: norms that multiply by 1 + w are stored as 1 + w (GGUF).
      head_norms: norms of single heads keep their axis of heads (GGUF's stablelm).
    """

    modules: Mapping[str, str | Fused]
    parameters: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    neutral: tuple[NeutralTensor, ...] = ()
    ignored: tuple[str, ...] = ()
    plus_one: bool = False
    head_norms: bool = False

    def changed(
        self, modules: Mapping[str, str | Fused] | None = None, without: Sequence[str] = (), **fields: Any
    ) -> TensorTable:
        """This table with other leaves in some modules, and without others; for a family that differs in few names."""
        kept = {name: leaf for name, leaf in self.modules.items() if name not in without}
        return dataclasses.replace(self, modules=kept | dict(modules or {}), **fields)

    def tensors(self, model: ModelConfig, layers: Sequence[Layer] = ()) -> list[Tensor]:
        """The tensors of a model of this shape; `UnsupportedError` for leaves that the family has no name for.

        `layers` tell the parameters of encodings; without them, there are none.
        """
        shapes = leaf_shapes(model, layers)
        found: list[Tensor] = []
        entries: list[tuple[str, str | Fused, Callable[[str], str]]] = []
        for kind, leaf_of in (("weight", str), ("bias", _bias)):
            entries += [(f"{module}.{kind}", leaf, leaf_of) for module, leaf in self.modules.items()]
        entries += [(name, leaf, str) for name, leaf in self.parameters.items()]
        names = [stack.name for stack in stacks(complete(model))]
        for (name, leaf, leaf_of), shape in itertools.product(entries, names):
            listed, how = (leaf.paths, leaf.how) if isinstance(leaf, Fused) else ((leaf,), None)
            paths = tuple(_of_shape(leaf_of(path), shape) for path in listed)
            if not all(path in shapes for path in paths) or (shape != names[0] and not paths[0].startswith(SHAPES)):
                continue
            of_leaves, (_, at) = tuple(shapes[path].shape for path in paths), shapes[paths[0]]
            heads = range(of_leaves[0][0]) if "{h}" in name else [None]
            for index, layer in enumerate(at) if at is not None else [(None, None)]:
                for head in heads:
                    own = name.format(n=layer, h=head)
                    more = {"plus_one": self.plus_one, "head_norms": self.head_norms}
                    found.append(Tensor(own, paths, index, layer, of_leaves, how, self.transposed, head, **more))
        missing = sorted(set(shapes) - {path for tensor in found for path in tensor.paths})
        if missing:
            raise UnsupportedError(f"has no tensors for {', '.join(missing)}")
        return found

    def neutral_tensors(self, model: ModelConfig, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The neutral tensors that are not among the model's `tensors`."""
        known = {tensor.name for tensor in tensors}
        every = [
            Tensor(one.name.format(n=n), (), None, n, (one.shape(model),), value=one.value)
            for one in self.neutral
            for n in range(model.layers)
        ]
        return [tensor for tensor in every if tensor.name not in known]


def _of_shape(path: str, shape: str) -> str:
    """The leaf of layers of a shape; ""  is the one shape of all layers."""
    if not shape or not path.startswith(LAYERS) or path.startswith(POSITIONAL):
        return path
    return f"{SHAPES}{shape}.{path.removeprefix(LAYERS)}"


def _bias(weight: str) -> str:
    """The leaf of the bias that belongs to a weight."""
    norm = weight.removesuffix(".scale")
    return f"{norm}.bias" if norm != weight else f"{weight}_bias"


@dataclass(frozen=True)
class Tensor:
    """One external tensor.

    Attributes:
      name: in the file.
      paths: the leaves in it.
      index, layer: its place in the stack of its leaves, and the number of that layer; None: of no layer.
      shapes: of the leaves, without an axis over layers.
      how: the leaves are joined (see `Fused`); None: it is one leaf.
      transposed: a matrix is [in, out].
      row: of the leaf's first axis, which this tensor holds; None: it holds the leaf.
      value: of all elements of a neutral tensor, which holds no leaf.
      plus_one, head_norms: see `TensorTable`.
    """

    name: str
    paths: tuple[str, ...]
    index: int | None
    layer: int | None
    shapes: tuple[tuple[int, ...], ...]
    how: str | None = None
    transposed: bool = False
    row: int | None = None
    value: float | None = None
    plus_one: bool = False
    head_norms: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        if self.value is not None:
            return self.shapes[0]
        if self.row is not None:
            return self.shapes[0][1:]
        each = self._external_shapes()
        whole = (sum(shape[0] for shape in each), *each[0][1:])
        return whole[::-1] if self._is_transposed(whole) else whole

    def split(self, array: Piece, path: str, layout: Layout = CANONICAL) -> Piece:
        """The native leaf `path` of the external tensor, with its channels in canonical order; not for one `row`."""
        at = self.paths.index(path)
        shape = self.shapes[at]
        array = array.T if self._is_transposed(array.shape) else array
        if self.how is not None:
            array = self._part(array, at)
        return canonical_leaf(path, self._leaf(path, shape).to_native(self.weights(array, path), shape), layout)

    def weights(self, array: Piece, path: str) -> Piece:
        """The external values of a leaf, or of rows of it, without the 1 that norms may be stored with."""
        return array.astype(np.float32) - 1 if self.plus_one and path.endswith("norm.scale") else array

    def join(self, leaves: Sequence[Piece], layout: Layout = CANONICAL) -> Piece:
        """The external tensor of native leaves in the order of `paths`; the inverse of `split`."""
        if self.value is not None:
            return np.full(self.shape, self.value, np.float32)
        flat = []
        for path, shape, leaf in zip(self.paths, self.shapes, leaves, strict=True):
            leaf = from_canonical(leaf, layout) if block_leaf(path) in ROTATED else leaf
            if self.plus_one and path.endswith("norm.scale"):
                leaf = leaf.astype(np.float32) + 1
            flat.append(leaf[self.row] if self.row is not None else self._leaf(path, shape).to_external(leaf))
        whole = flat[0] if self.how is None else self._joined(flat)
        return np.ascontiguousarray(whole.T if self._is_transposed(whole.shape) else whole)

    def _external_shapes(self) -> list[tuple[int, ...]]:
        parts = zip(self.paths, self.shapes, strict=True)
        return [self._leaf(path, shape).external_shape(shape) for path, shape in parts]

    def _leaf(self, path: str, shape: tuple[int, ...]) -> Leaf:
        return _SAME if self.head_norms and path.endswith("_norm.scale") else _leaf(path, shape)

    def _is_transposed(self, shape: tuple[int, ...]) -> bool:
        return self.transposed and len(shape) == 2 and _leaf(self.paths[0], self.shapes[0]) is not _SAME

    def _part(self, array: Piece, at: int) -> Piece:
        """The rows of one leaf, in its own order."""
        if self.how == "rows":
            rows = [shape[0] for shape in self._external_shapes()]
            start = sum(rows[:at])
            return array[start : start + rows[at]]
        _, channels = self.shapes[at][-2:]
        if self.how == "heads":
            part = array.reshape(-1, len(self.paths), channels, *array.shape[1:])[:, at]
        else:
            groups = self.shapes[1][-2]
            grouped = array.reshape(groups, -1, channels, *array.shape[1:])
            part = grouped[:, :-2] if at == 0 else grouped[:, at - 3]
        return part.reshape(-1, *array.shape[1:])

    def _joined(self, flat: Sequence[Piece]) -> Piece:
        if self.how == "rows":
            return np.concatenate(flat)
        heads = self.shapes[0][-2] if self.how == "heads" else self.shapes[1][-2]
        channels = self.shapes[0][-1]
        parts = [x.reshape(heads, -1, channels, *x.shape[1:]) for x in flat]
        return np.concatenate(parts, axis=1).reshape(-1, *flat[0].shape[1:])


class LeafShape(NamedTuple):
    """The shape of a leaf without its axis over layers, and the layers that it is stacked over; None: it is not."""

    shape: tuple[int, ...]
    layers: tuple[int, ...] | None


def leaf_shapes(model: ModelConfig, layers: Sequence[Layer] = ()) -> Mapping[str, LeafShape]:
    """Every leaf of a model's parameters by its dotted path; of encodings, those of `layers`."""
    return _leaf_shapes(model, tuple(layers))


@functools.lru_cache(maxsize=256)  # every family that is tried for a model asks for them
def _leaf_shapes(model: ModelConfig, layers: tuple[Layer, ...]) -> Mapping[str, LeafShape]:
    hooks = layer_hooks(layers, model.heads)
    having = {name: at for name, (_, at) in learned_encodings(hooks).items()}
    of_shapes = {stack.name: stack.layers for stack in stacks(complete(model))}

    def of(path: str, shape: tuple[int, ...]) -> LeafShape:
        if path.startswith(POSITIONAL):
            return LeafShape(shape[1:], having[path.removeprefix(POSITIONAL).split(".")[0]])
        if path.startswith(SHAPES):
            return LeafShape(shape[1:], of_shapes[path.removeprefix(SHAPES).split(".")[0]])
        return LeafShape(shape[1:], tuple(range(model.layers))) if path.startswith(LAYERS) else LeafShape(shape, None)

    whole = leaf_paths(Model(model, hooks=hooks).shapes)
    return MappingProxyType({path: of(path, tuple(leaf.shape)) for path, leaf in whole.items()})


def leaf_paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted path, such as `layers.mlp.up`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


LLAMA_TENSORS = TensorTable(
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
QKV = ("layers.attention.query", "layers.attention.key", "layers.attention.value")
