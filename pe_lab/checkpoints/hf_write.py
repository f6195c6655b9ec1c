"""Exports any source as a Hugging Face directory for stock transformers: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families import FAMILIES, Family, Tensor
from pe_lab.checkpoints.hf_export import choose_family, exported_layers, write_config
from pe_lab.checkpoints.huggingface import INDEX, SINGLE
from pe_lab.checkpoints.source import Source
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.positional import Layer, Layout
from pe_lab.storage import write_json

SHARD_BYTES = 5 * 10**9  # as save_pretrained does
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Export:
    """A planned export.

    Attributes:
      family: the architecture.
      config: the content of `config.json`.
      layers: with the encodings that the architecture has.
      tensors: to write, in order.
      layout: of their heads.
      dtype: float32, bfloat16 or float16.
      scales: per layer, the factor to fold into its queries.
      folded: the leaves of a layer that are multiplied by its factor.
      notes: messages about folded scales and fixed encodings.
    """

    family: Family
    config: dict[str, Any]
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    layout: Layout
    dtype: str
    scales: tuple[float, ...]
    folded: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.tensors) * np.dtype(DTYPES[self.dtype]).itemsize


def plan_export(
    source: Source, family: str | None = None, dtype: str | None = None, length: int | None = None
) -> Export:
    """Plans the export of a model without reading its weights.

    Args:
      source: the model.
      family: one of `FAMILIES`; None is the first that can express the model.
      dtype: of the weights; None keeps the source's.
      length: tokens at which to fix encodings and scales that depend on the length.

    Raises:
      UnsupportedError: no family, or not this one, can express the model; names the nearest model that it can.
      ConfigError: an unknown family or dtype.
    """
    dtype = str(source.dtype) if dtype is None else dtype
    if dtype not in DTYPES:
        raise ConfigError(f"The weights would be written as {dtype}; give --dtype, one of {', '.join(DTYPES)}.")
    layers, scales = exported_layers(source.layers, length)
    if family is None:
        chosen = choose_family(source.model, layers)
    elif family in FAMILIES:
        chosen = FAMILIES[family]
    else:
        raise ConfigError(f"--family '{family}' is not known. {did_you_mean(family, list(FAMILIES))}")
    config, layout = write_config(chosen, source.model, layers, source.training_length, dtype)
    tensors = tuple(chosen.table.tensors(source.model))
    norm = source.model.qk_norm != "none"
    folded = ("attention.query_norm.scale",) if norm else ("attention.query", "attention.query_bias")
    notes = []
    changed = [n for n, scale in enumerate(scales) if scale != 1]
    if changed:
        where = "q_norm's weight" if norm else "q_proj (weight and bias)"
        values = sorted({round(scales[n], 6) for n in changed})
        notes.append(
            f"Logit scale {', '.join(f'{v:g}' for v in values)} folded into {where} of {len(changed)} layers"
            + (f" (its value at {length:,} tokens)." if length else ".")
        )
    if any(a.encoding != b.encoding for a, b in zip(layers, source.layers, strict=True)):
        notes.append(f"Encodings that depend on the length are written for {length:,} tokens.")
    return Export(chosen, config, layers, tensors, layout, dtype, scales, folded, tuple(notes))


def write_huggingface(
    source: Source, export: Export, directory: Path, done: Callable[[int], None] = lambda size: None
) -> None:
    """Writes `config.json` and the weights into a directory, one tensor at a time.

    Args:
      source: the model that `export` was planned for.
      export: see `plan_export`.
      directory: where to write; see `new_directory`.
      done: called with the number of bytes after each tensor.
    """
    write_json(directory / "config.json", export.config)
    shards = _shards(export)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)
    ]  # fmt: skip
    for name, tensors in zip(names, shards, strict=True):
        _write_shard(directory / name, source, export, tensors, done)
    if len(shards) > 1:
        where = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": export.size}, "weight_map": where}
        write_json(directory / INDEX, index)


def _shards(export: Export) -> list[list[Tensor]]:
    """The tensors in order, in files of at most `SHARD_BYTES` or one tensor."""
    shards: list[list[Tensor]] = [[]]
    size, itemsize = 0, np.dtype(DTYPES[export.dtype]).itemsize
    for tensor in export.tensors:
        needed = int(np.prod(tensor.shape)) * itemsize
        if size + needed > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += needed
    return shards


def _write_shard(
    path: Path, source: Source, export: Export, tensors: list[Tensor], done: Callable[[int], None]
) -> None:
    """Writes one safetensors file, tensor by tensor. The safetensors package needs all tensors in memory.

    The format: the header's length in 8 bytes, the header as JSON, padded to 8 bytes, and the tensors in its order.
    """
    kind = np.dtype(DTYPES[export.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + int(np.prod(tensor.shape)) * kind.itemsize
        header[tensor.name] = {
            "dtype": _NAMES[export.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            array = tensor.join(_leaves(source, export, tensor), export.layout)
            file.write(_cast(array, kind, tensor.name).tobytes())
            done(array.size * kind.itemsize)


def _leaves(source: Source, export: Export, tensor: Tensor) -> list[np.ndarray]:
    leaves = []
    for path in tensor.paths:
        leaf = source.read(path, tensor.layer)
        if tensor.layer is not None and path.removeprefix("layers.") in export.folded:
            scale = export.scales[tensor.layer]
            leaf = leaf if scale == 1 else leaf.astype(np.float32) * np.float32(scale)
        leaves.append(leaf)
    return leaves


def _cast(array: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    if array.dtype == kind:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(kind)
    if not np.isfinite(cast).all():
        raise UnsupportedError(
            f"tensor '{name}' does not fit into {kind.name}: some values become infinite. Choose bfloat16."
        )
    return cast


def token_ids(config: Mapping[str, Any], bos: int | None, eos: int | tuple[int, ...] | None) -> dict[str, Any]:
    """A `config.json` with the ids that begin and end a sequence, for generation."""
    ids = {"bos_token_id": bos, "eos_token_id": list(eos) if isinstance(eos, tuple) else eos}
    return {**config, **{key: value for key, value in ids.items() if value is not None}}
