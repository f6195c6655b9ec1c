"""Exports any source as a Hugging Face directory for stock transformers: config.json and safetensors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.checkpoints.families import FAMILIES, LAYERS, Family, Tensor
from pe_lab.checkpoints.hf_config import write_config
from pe_lab.checkpoints.huggingface import INDEX, SINGLE
from pe_lab.checkpoints.source import Source
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.positional import NTK, DynamicNTK, DynamicYarn, Layer, Layout, LongRope, Yarn
from pe_lab.storage import write_json

SHARD_BYTES = 5 * 10**9  # as save_pretrained does
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # with safetensors' names


@dataclass(frozen=True)
class Export:
    """A planned export."""

    family: Family
    config: dict[str, Any]  # the content of `config.json`
    layers: tuple[Layer, ...]  # with the encodings that the architecture has
    tensors: tuple[Tensor, ...]  # to write, in order
    layout: Layout  # of their heads
    dtype: str  # one of `DTYPES`
    scales: tuple[float, ...]  # per layer, the factor to fold into its queries
    folded: tuple[str, ...]  # the leaves of a layer that are multiplied by its factor
    notes: tuple[str, ...]  # messages about folded scales and fixed encodings

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.bytes_of(tensor) for tensor in self.tensors)

    def bytes_of(self, tensor: Tensor) -> int:
        return math.prod(tensor.shape) * np.dtype(self.dtype).itemsize


def plan_export(
    source: Source,
    family: str | None = None,
    dtype: str | None = None,
    length: int | None = None,
    max_length: int | None = None,
) -> Export:
    """Plans the export of a model without reading its weights.

    Args:
      source: the model.
      family: one of `FAMILIES`; None is the first that can express the model.
      dtype: of the weights; None keeps the source's.
      length: tokens at which to fix encodings and scales that depend on the length.
      max_length: the longest sequence to declare, in tokens; None: what the encoding is meant for.

    Raises:
      UnsupportedError: no family, or not this one, can express the model; names the checkpoint, and the nearest model
        that it can.
      ConfigError: an unknown family or dtype, or a `max_length` that would change the model.
    """
    try:
        return _plan(source, family, dtype, length, max_length)
    except UnsupportedError as error:  # the functions below do not know the checkpoint
        raise UnsupportedError(f"{source.display_name}: {error}") from None


def _plan(source: Source, family: str | None, dtype: str | None, length: int | None, max_length: int | None) -> Export:
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
    config, layout = write_config(chosen, source.model, layers, source.training_length, dtype, max_length)
    try:
        tensors = tuple(chosen.table.tensors(source.model))
    except UnsupportedError as error:
        raise UnsupportedError(f"{chosen.architecture} {error}.") from None
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
    """Writes a planned export of `source` into a directory, and calls `done` with the bytes of each tensor."""
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
    size = 0
    for tensor in export.tensors:
        needed = export.bytes_of(tensor)
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + export.bytes_of(tensor)
        header[tensor.name] = {
            "dtype": DTYPES[export.dtype],
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
            file.write(_cast(array, np.dtype(export.dtype), tensor.name).tobytes())
            done(export.bytes_of(tensor))


def _leaves(source: Source, export: Export, tensor: Tensor) -> list[np.ndarray]:
    leaves = []
    for path in tensor.paths:
        leaf = source.read(path, tensor.layer)
        if tensor.layer is not None and path.removeprefix(LAYERS) in export.folded:
            scale = export.scales[tensor.layer]
            leaf = leaf if scale == 1 else leaf.astype(np.float32) * np.float32(scale)
        leaves.append(leaf)
    return leaves


def _cast(array: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(kind, copy=False)
    if not np.isfinite(cast).all():
        wider = {"float16": "Choose bfloat16.", "bfloat16": "Choose float32."}
        advice = wider.get(kind.name, "Its logit scale is too large to be folded into it.")
        raise UnsupportedError(f"tensor '{name}' does not fit into {kind.name}: some values become infinite. {advice}")
    return cast


def choose_family(model: ModelConfig, layers: Sequence[Layer]) -> Family:
    """The first stock family that can express a model.

    Raises:
      UnsupportedError: none can; with the reason of each.
    """
    reasons = {}
    for family in FAMILIES.values():
        if family.stock:
            try:
                write_config(family, model, layers, 2048, "float32")
                return family
            except UnsupportedError as error:
                reasons[family.model_type] = str(error)
    # A family that holds the weights, and cannot express the encoding, is nearer than one that cannot hold them.
    near = {k: v for k, v in reasons.items() if "cannot hold this model" not in v} or reasons
    listed = "\n".join(f"  {name}: {reason}" for name, reason in near.items())
    advice = ""
    if model.qk_norm not in ("none", "head"):
        advice = "\nNearest: surgery --add-qk-norm=head, which Qwen3 has (--family=llama_drope needs DroPE's code)."
    raise UnsupportedError(f"No architecture of transformers can express this model:\n{listed}{advice}")


def exported_layers(layers: Sequence[Layer], length: int | None) -> tuple[tuple[Layer, ...], tuple[float, ...]]:
    """The layers without logit scales, and the scales to fold into the weights of the queries.

    Scales and scalings that depend on the length are fixed at `length` tokens; None keeps such scalings, and raises an
    `UnsupportedError` for such a scale.
    """
    plain, scales = [], []
    for n, layer in enumerate(layers):
        scale = layer.logit_scale
        if not isinstance(scale, float | int):
            if length is None:
                raise UnsupportedError(
                    f"layer {n} scales its logits by 1 + {scale.coefficient:g} ln(n / {scale.original_length}), which "
                    "depends on the length n, as in no architecture of transformers. Nearest: the scale of one length, "
                    "folded into the weights, which --length=TOKENS does."
                )
            scale = scale.at(length)
        encoding = layer.encoding if length is None else _at_length(layer.encoding, length)
        plain.append(dataclasses.replace(layer, encoding=encoding, logit_scale=1.0))
        scales.append(float(scale))
    return tuple(plain), tuple(scales)


def _at_length(encoding: Any, length: int) -> Any:
    """The encoding with its scaling fixed at `length` tokens."""
    scaling = getattr(encoding, "scaling", None)
    if isinstance(scaling, DynamicNTK):
        growth = scaling.factor * max(1.0, length / scaling.original_length) - (scaling.factor - 1)
        return dataclasses.replace(encoding, scaling=NTK(growth) if growth > 1 else None)
    if isinstance(scaling, LongRope):
        table = scaling.long_factor if length > scaling.original_length else scaling.short_factor
        return dataclasses.replace(
            encoding, scaling=dataclasses.replace(scaling, short_factor=table, long_factor=table)
        )
    if isinstance(scaling, DynamicYarn):
        factor = max(1.0, length / scaling.original_length)
        yarn = Yarn(factor, **dataclasses.asdict(scaling))
        return dataclasses.replace(encoding, scaling=yarn if factor > 1 else None)
    return encoding
