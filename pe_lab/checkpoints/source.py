"""Sources: checkpoints of any format, opened to be read one piece at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Shaped

from pe_lab.checkpoints.families import LAYERS, leaf_paths
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError
from pe_lab.model import Model, Params
from pe_lab.parallel import AxisRules
from pe_lab.positional import Layer

ROW_BYTES = 2**28  # of an embedding, read at once


@runtime_checkable
class Source(Protocol):
    """An open checkpoint of any format.

    Attributes:
      path: the file or directory.
      display_name: for messages, such as `hf:SmolLM-360M`.
      model: its shape.
      layers: its encodings.
      training_length: tokens of a training window, before any scaling.
      dtype: of its weights.
      tokenizer: an argument of `data.tokenizers.load_tokenizer`; "" if the checkpoint has no tokenizer.
      metadata: of a native checkpoint; empty for an external one.
    """

    path: Path
    display_name: str
    model: ModelConfig
    layers: tuple[Layer, ...]
    training_length: int
    dtype: np.dtype
    tokenizer: str
    metadata: Mapping[str, Any]

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """One leaf of one layer; `rows` of the first axis of a leaf that is not stacked over layers.

        Raises:
          CheckpointError: it cannot be read, or has values that are not finite.
        """
        ...


def check_finite(array: np.ndarray, name: str, where: str) -> np.ndarray:
    """The array; `CheckpointError` if it has NaN or infinity."""
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise CheckpointError(
            f"{where}: tensor '{name}' has {bad:,} of {array.size:,} values that are NaN or infinite."
        )
    return array


def listing(names: Sequence[str]) -> str:
    """The first names of a list in quotes, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"'{name}'" for name in names[:8]) + more


def nested(flat: Mapping[str, Any]) -> Params:
    """The tree of leaves by dotted path; the inverse of `leaf_paths`."""
    tree: Params = {}
    for path, leaf in flat.items():
        *above, last = path.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def row_blocks(shape: tuple[int, ...], itemsize: int) -> list[slice]:
    """The rows of an array in blocks of about `ROW_BYTES`."""
    size = int(np.prod(shape[1:])) * itemsize
    step = max(1, ROW_BYTES // max(1, size))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def place(source: Source, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Params:
    """The parameters as float32 arrays on the first device, or sharded over a mesh.

    A process reads the parts of its own devices, one tensor at a time.
    """
    model = Model(source.model)
    axes = leaf_paths(model.axes)
    chosen = rules or AxisRules()
    placed = {}
    for path, leaf in leaf_paths(model.shapes).items():
        sharding: Sharding = SingleDeviceSharding(jax.local_devices()[0])
        if mesh is not None:
            sharding = chosen.sharding(mesh, axes[path], leaf.shape)
        placed[path] = _assemble(source, path, leaf.shape, sharding)
    return nested(placed)


def _assemble(source: Source, path: str, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """One leaf on its devices. Replicas are read once: equal parts share one array on the host."""

    def bounds(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))

    local = {bounds(index) for index in sharding.addressable_devices_indices_map(shape).values()}
    parts = {part: np.empty([stop - start for start, stop in part], np.float32) for part in local}
    # Each piece is read once, however many parts overlap it.
    layered = path.startswith(LAYERS)
    for block in [slice(n, n + 1) for n in range(shape[0])] if layered else row_blocks(shape, 4):
        piece = None
        for part, out in parts.items():
            start, stop = max(block.start, part[0][0]), min(block.stop, part[0][1])
            if start >= stop:
                continue
            if piece is None:
                piece = source.read(path, block.start)[None] if layered else source.read(path, rows=block)
            inner = tuple(slice(*bound) for bound in part[1:])
            here = slice(start - part[0][0], stop - part[0][0])
            out[here] = piece[(slice(start - block.start, stop - block.start), *inner)]
    return jnp.asarray(jax.make_array_from_callback(shape, sharding, lambda index: parts[bounds(index)]))
