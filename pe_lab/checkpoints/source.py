"""Sources: checkpoints of any format, opened to be read one piece at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Shaped

from pe_lab.checkpoints.families import LAYERS, Tensor, TensorTable, canonical_leaf, leaf_paths
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError
from pe_lab.model import Model, Params
from pe_lab.parallel import AxisRules
from pe_lab.positional import Layer, Layout, layer_hooks
from pe_lab.storage import AnyPath

ROW_BYTES = 2**28  # of an embedding, read at once


class CheckpointSource(ABC):
    """An open checkpoint of any format."""

    path: AnyPath  # the file or directory
    display_name: str  # for messages, such as `hf:SmolLM-360M`
    model: ModelConfig  # its shape
    layers: tuple[Layer, ...]  # its encodings
    training_length: int  # tokens of a training window, before any scaling
    length_given: bool = True  # whether the checkpoint tells it, and not the default of its family
    dtype: np.dtype  # of its weights
    origin: str = ""  # the family of the external checkpoint that the weights come from; "": trained by pe_lab
    note: str = ""  # what an import leaves out
    tokenizer: str = ""  # an argument of `data.tokenizers.load_tokenizer`; "" if the checkpoint has no tokenizer
    metadata: Mapping[str, Any] = {}  # of a native checkpoint; empty for an external one

    @abstractmethod
    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """One leaf of one layer, or `rows` of one without layers; `CheckpointError` if it is damaged or not finite.

        `layer` is the place in the stack of the leaf: of an encoding's parameters, among the layers that have it.
        """

    def read_block(self, leaf: str, block: slice) -> Shaped[np.ndarray, "..."]:
        """One of the `blocks` of a leaf."""
        return self.read(leaf, block.start)[None] if leaf.startswith(LAYERS) else self.read(leaf, rows=block)


class TensorSource(CheckpointSource):
    """A checkpoint of external tensors. A subclass calls `match`, sets `_layout`, and reads a tensor by `_tensor`."""

    _layout: Layout
    _by_leaf: dict[tuple[str, int | None], list[Tensor]]  # several: one for each row of the leaf
    _last: tuple[str, np.ndarray] | None = None  # name and content of a tensor that holds several leaves

    def match(self, table: TensorTable, stored: Mapping[str, tuple[int, ...]], name: str, config: str) -> list[str]:
        """Finds the tensor of every leaf in a family's table, and returns the names of the tensors that are left over.

        `stored` has the shape of every tensor; `name` and `config` are of the family, and of what describes the model.

        Raises:
          CheckpointError: a tensor is missing, or has another shape than the model's.
        """
        tensors = table.tensors(self.model, self.layers)
        missing = [tensor.name for tensor in tensors if tensor.name not in stored]
        if missing:
            raise CheckpointError(f"{self.path} lacks {listing(missing)}, which {name} has.")
        for tensor in tensors:
            if stored[tensor.name] != tensor.shape:
                raise CheckpointError(
                    f"{self.path}: tensor '{tensor.name}' has shape {list(stored[tensor.name])}, and {config} gives "
                    f"{list(tensor.shape)}."
                )
        self._by_leaf = {}
        for tensor in tensors:
            for path in tensor.paths:
                self._by_leaf.setdefault((path, tensor.index), []).append(tensor)
        known = {tensor.name for tensor in tensors}
        return [name for name in stored if name not in known and not name.endswith(table.ignored)]

    def drop_neutral(self, names: list[str], neutral: Sequence[Tensor]) -> None:
        """Removes from names that are left over those of tensors that do nothing (`NeutralTensor`)."""
        for tensor in neutral:
            if tensor.name not in names:
                continue
            found = self._tensor(tensor.name)
            limits = ml_dtypes.finfo(found.dtype)
            written = np.clip(tensor.join([]), float(limits.min), float(limits.max)).astype(found.dtype)
            if np.array_equal(found, written):
                names.remove(tensor.name)

    @abstractmethod
    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or rows of it, in a number format that numpy has."""

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """See `CheckpointSource`."""
        tensor, *others = self._by_leaf[leaf, layer]
        if others:
            each = [check_finite(self._tensor(one.name), one.name, self.display_name) for one in (tensor, *others)]
            return canonical_leaf(leaf, np.stack(each), self._layout)
        if rows != slice(None):
            return tensor.weights(check_finite(self._tensor(tensor.name, rows), tensor.name, self.display_name), leaf)
        if self._last is None or self._last[0] != tensor.name:
            self._last = tensor.name, check_finite(self._tensor(tensor.name), tensor.name, self.display_name)
        array = tensor.split(self._last[1], leaf, self._layout)
        if len(tensor.paths) == 1:
            self._last = None
        return array


def check_finite(array: np.ndarray, name: str, where: str) -> np.ndarray:
    """The array; `CheckpointError` if it has NaN, infinity, or (in float64) values that float32 does not have."""
    if not (finite := np.isfinite(array)).all():
        raise CheckpointError(
            f"{where}: tensor '{name}' has {int((~finite).sum()):,} of {array.size:,} values that are NaN or infinite."
        )
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            bad = int((~np.isfinite(array.astype(np.float32))).sum())
        if bad:
            raise CheckpointError(
                f"{where}: tensor '{name}' has {bad:,} of {array.size:,} values beyond float32, in which pe_lab "
                "computes. Rescale the weights, or look for damage."
            )
    return array


def listing(names: Sequence[str]) -> str:
    """The first names of a list in quotes, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"'{name}'" for name in names[:8]) + more


def nested(flat: Mapping[str, Any]) -> Params:
    """The tree of leaves by dotted path; the inverse of `leaf_paths`."""
    return unflatten_dict(flat, sep=".")


def blocks(leaf: str, shape: tuple[int, ...], itemsize: int) -> list[slice]:
    """The first axis of a leaf in blocks: single layers, or rows of about `ROW_BYTES`."""
    step = 1 if leaf.startswith(LAYERS) else max(1, ROW_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def parameter_shardings(model: Model, mesh: Mesh | None, rules: AxisRules | None) -> Params:
    """The sharding of each parameter, without a mesh the first device; a `UserError` names one that does not divide."""
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda leaf: device, model.shapes)
    chosen = rules or AxisRules()

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> Sharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return chosen.sharding(mesh, axes, leaf.shape, f"parameter {name}")

    return jax.tree_util.tree_map_with_path(place, model.shapes, model.axes)


def place(source: CheckpointSource, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Params:
    """The parameters as float32 arrays on the first device, or sharded over a mesh, read one tensor at a time."""
    model = Model(source.model, hooks=layer_hooks(source.layers, source.model.heads))
    where = leaf_paths(parameter_shardings(model, mesh, rules))
    shapes = leaf_paths(model.shapes)
    return nested({path: _assemble(source, path, leaf.shape, where[path]) for path, leaf in shapes.items()})


def _assemble(source: CheckpointSource, path: str, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """One leaf on its devices. Replicas are read once: equal parts share one array on the host."""

    def bounds(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))

    local = {bounds(index) for index in sharding.addressable_devices_indices_map(shape).values()}
    parts = {part: np.empty([stop - start for start, stop in part], np.float32) for part in local}
    # Each piece is read once, however many parts overlap it.
    for block in blocks(path, shape, 4):
        piece = None
        for part, out in parts.items():
            start, stop = max(block.start, part[0][0]), min(block.stop, part[0][1])
            if start >= stop:
                continue
            if piece is None:
                piece = source.read_block(path, block)
            inner = tuple(slice(*bound) for bound in part[1:])
            here = slice(start - part[0][0], stop - part[0][0])
            out[here] = piece[(slice(start - block.start, stop - block.start), *inner)]
    return jnp.asarray(jax.make_array_from_callback(shape, sharding, lambda index: parts[bounds(index)]))
