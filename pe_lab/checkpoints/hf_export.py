"""Exports to Hugging Face directories: planned without weights, then written one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families import FAMILIES, Family, Tensor, block_leaf
from pe_lab.checkpoints.forms import choose_form
from pe_lab.checkpoints.hf_config import MISSING
from pe_lab.checkpoints.huggingface import DTYPES, INDEX, SINGLE
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.positional import NTK, DynamicNTK, DynamicYarn, Layer, Layout, LongRope, Yarn
from pe_lab.storage import write_json

SHARD_BYTES = 5 * 10**9  # as save_pretrained does


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
    folded: tuple[str, ...] = ()  # the leaves of a layer that are multiplied by its factor
    plus_one: bool = False  # they are scales of a norm that multiplies by 1 + w
    notes: tuple[str, ...] = ()  # why this family, and messages about folded scales and fixed encodings

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.bytes_of(tensor) for tensor in self.tensors)

    def bytes_of(self, tensor: Tensor) -> int:
        return math.prod(tensor.shape) * np.dtype(self.dtype).itemsize


def plan_export(
    source: CheckpointSource,
    family: str | None = None,
    dtype: str | None = None,
    length: int | None = None,
    max_length: int | None = None,
    runtimes: Sequence[str] = (),
) -> Export:
    """Plans the export of a model without reading its weights.

    Args:
      family: one of `FAMILIES`; None is chosen by `choose_form`.
      dtype: of the weights; None keeps the source's.
      length: tokens at which to fix encodings and scales that depend on the length.
      max_length: the longest sequence to declare, in tokens; None: what the encoding is meant for.
      runtimes: that must read it right, of `runtimes.RUNTIMES`; none: as many as can.

    Raises:
      UnsupportedError: no family, or not this one, can express the model, or not for all of the runtimes; names the
        nearest model that it can.
      ConfigError: an unknown family or dtype, or a `max_length` that would change the model.
    """
    dtype = str(source.dtype) if dtype is None else dtype
    if dtype not in DTYPES:
        raise ConfigError(f"The weights would be written as {dtype}; give --dtype, one of {', '.join(DTYPES)}.")
    chosen = None if family is None else named_family(family, FAMILIES)
    options = WriteOptions(source.training_length, max_length)
    try:
        layers, scales = exported_layers(source.layers, length)
        form, why = choose_form(source.model, layers, options, dtype, chosen, runtimes, source.origin)
        export = Export(form.family, form.config, layers, form.tensors, form.layout, dtype, scales)
        export = folding(export, source.model, length)
    except UnsupportedError as error:  # the functions above do not know the checkpoint
        raise UnsupportedError(f"{source.display_name}: {error}") from None
    notes = [why] if why else []
    return dataclasses.replace(export, notes=(*notes, *export.notes, *fixed_note(source, layers, length)))


def named_family(name: str, families: Mapping[str, Family]) -> Family:
    """The family that `--family` names; `ConfigError` if there is none."""
    if name in families:
        return families[name]
    # A name of another architecture is near to one of these by its letters alone.
    advice = f"It has {MISSING[name]}." if name in MISSING else did_you_mean(name, list(families))
    raise ConfigError(f"--family '{name}' is not known. {advice}")


def fixed_note(source: CheckpointSource, layers: Sequence[Layer], length: int | None) -> tuple[str, ...]:
    """The message about encodings that were fixed at a length."""
    if all(a.encoding == b.encoding for a, b in zip(layers, source.layers, strict=True)):
        return ()
    return (f"Encodings that depend on the length are written for {length:,} tokens.",)


def folding(export: Export, model: ModelConfig, length: int | None) -> Export:
    """The export with the leaves into which its scales are folded, and a note about them.

    Raises:
      UnsupportedError: the queries are clipped, so that no scale can be folded into them.
    """
    norm = model.qk_norm != "none"
    folded = ("attention.query_norm.scale",) if norm else ("attention.query", "attention.query_bias")
    changed = [scale for scale in export.scales if scale != 1]
    if not changed:
        return export
    if model.qkv_clip:
        raise UnsupportedError("logit scales cannot be folded into queries that are clipped (model.qkv_clip).")
    where = "q_norm's weight" if norm else "q_proj (weight and bias)"
    values = ", ".join(f"{value:g}" for value in sorted({round(scale, 6) for scale in changed}))
    at = f" (its value at {length:,} tokens)" if length else ""
    note = f"Logit scale {values} folded into {where} of {len(changed)} layers{at}."
    return dataclasses.replace(export, folded=folded, plus_one=norm and model.norm == "rms_plus_one", notes=(note,))


def write_huggingface(
    source: CheckpointSource, export: Export, directory: Path, done: Callable[[int], None] = lambda size: None
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
    path: Path, source: CheckpointSource, export: Export, tensors: list[Tensor], done: Callable[[int], None]
) -> None:
    """Writes one safetensors file, tensor by tensor; the safetensors package needs all tensors in memory."""
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
            array = external(source, export, tensor)
            if tensor.value is not None:  # a neutral -1e30 is the least number of float16
                limits = ml_dtypes.finfo(np.dtype(export.dtype))
                array = np.clip(array, float(limits.min), float(limits.max))
            file.write(cast(array, np.dtype(export.dtype), tensor.name).tobytes())
            done(export.bytes_of(tensor))


def external(source: CheckpointSource, export: Export, tensor: Tensor) -> np.ndarray:
    """A tensor of an export, with its layer's scale folded into it, in the number format of the source."""
    leaves = []
    for path in tensor.paths:
        leaf = source.read(path, tensor.index)
        if tensor.layer is not None and block_leaf(path) in export.folded:
            leaf = scaled(leaf, export.scales[tensor.layer], export.plus_one)
        leaves.append(leaf)
    return tensor.join(leaves, export.layout)


def scaled(leaf: np.ndarray, scale: float, plus_one: bool) -> np.ndarray:
    """A leaf of weights, or of a norm by 1 + w (`plus_one`), that computes `scale` times as much."""
    if scale == 1:
        return leaf
    leaf = leaf.astype(np.float32)
    return (leaf + 1) * np.float32(scale) - 1 if plus_one else leaf * np.float32(scale)


def cast(array: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    """The array in another number format; `UnsupportedError` if some values become infinite there."""
    with np.errstate(over="ignore"):
        found = array.astype(kind, copy=False)
    if not np.isfinite(found).all():
        wider = {"float16": "Choose bfloat16.", "bfloat16": "Choose float32."}
        advice = wider.get(kind.name, "Its logit scale is too large to be folded into it.")
        raise UnsupportedError(f"tensor '{name}' does not fit into {kind.name}: some values become infinite. {advice}")
    return found


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
                    "depends on the length n, as in no architecture of transformers or llama.cpp. Nearest: the scale "
                    "of one length, folded into the weights, which --length=TOKENS does."
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
