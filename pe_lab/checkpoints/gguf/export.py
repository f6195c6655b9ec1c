"""A checkpoint of any format, written as a GGUF file for llama.cpp."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab.checkpoints.families import Family, Tensor
from pe_lab.checkpoints.forms import no_family
from pe_lab.checkpoints.gguf.architectures import ARCHITECTURES, FOUND, Architecture
from pe_lab.checkpoints.gguf.positions import LONG, SHORT, TABLES
from pe_lab.checkpoints.gguf.source import DESCRIPTION, GgufSource
from pe_lab.checkpoints.hf_config import description, express
from pe_lab.checkpoints.hf_export import (
    Export,
    cast,
    exported_layers,
    external,
    fixed_note,
    folding,
    named_family,
)
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError
from pe_lab.positional import Layout

# The suffixes of --to=gguf:FILE:KIND, and llama.cpp's name and number (general.file_type) of each.
KINDS = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
# Of the source's weights, without a suffix: the format that holds the same numbers.
DEFAULT_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
BLOCK = 32  # weights with one scale in Q8_0
NUMPY = {"F32": np.float32, "F16": np.float16}


@dataclass(frozen=True)
class GgufExport:
    """A planned export."""

    plan: Export
    kinds: tuple[str, ...]  # llama.cpp's name of the number format of each tensor of the plan
    file_type: int
    tables: Mapping[str, tuple[float, ...]]  # divisors of single pairs, by the name of their tensor without `.weight`
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(_bytes(tensor.shape, kind) for tensor, kind in zip(self.plan.tensors, self.kinds, strict=True))


def split_kind(target: str) -> tuple[str, str | None]:
    """FILE and the number format of `FILE[:q8_0|f16|bf16|f32]`; `ConfigError` for another suffix."""
    file, colon, kind = target.rpartition(":")
    if not colon or "/" in kind or kind.endswith(".gguf"):
        return target, None
    if kind not in KINDS:
        raise ConfigError(f"--to=gguf:{target} ends in ':{kind}'; the number formats are {', '.join(KINDS)}.")
    return file, kind


def plan_gguf(
    source: CheckpointSource,
    kind: str | None = None,
    family: str | None = None,
    length: int | None = None,
    max_length: int | None = None,
) -> GgufExport:
    """Plans the export of a model without reading its weights.

    Args:
      kind: one of `KINDS`; None is the one of the source's own numbers.
      family: one of `ARCHITECTURES`; None is the first that can express the model.
      length: tokens at which to fix encodings and scales that depend on the length.
      max_length: the longest sequence to declare, in tokens; None: what the encoding is meant for.

    Raises:
      UnsupportedError: llama.cpp computes the model in no architecture, or not in this one; with the reasons.
      ConfigError: an unknown family.
    """
    try:
        return _plan(source, kind or DEFAULT_KINDS[str(source.dtype)], family, length, max_length)
    except UnsupportedError as error:  # the functions below do not know the checkpoint
        raise UnsupportedError(f"{source.display_name}: {error}") from None


def _plan(
    source: CheckpointSource, kind: str, family: str | None, length: int | None, max_length: int | None
) -> GgufExport:
    layers, scales = exported_layers(source.layers, length)
    options = WriteOptions(source.training_length, max_length)

    def model_of(one: Family) -> ModelConfig:
        # A scale that the architecture does not know goes into the queries.
        return source.model if "attention_scale" in one.keys else dataclasses.replace(source.model, attention_scale=0.0)

    def chosen_family() -> Family:
        reasons = {}
        for each in ARCHITECTURES.values():
            try:
                express(each, model_of(each), layers, options)
                return each
            except UnsupportedError as error:
                reasons[each.model_type] = str(error)
        raise UnsupportedError(no_family("llama.cpp", reasons))

    chosen = chosen_family() if family is None else named_family(family, ARCHITECTURES)
    assert isinstance(chosen, Architecture)
    model = model_of(chosen)
    wanted, own = source.model.attention_scale or source.model.head_dim**-0.5, chosen.scale(model)
    if "attention_scale" not in chosen.keys and not math.isclose(wanted, own, rel_tol=1e-12):
        scales = tuple(scale * wanted / own for scale in scales)
    metadata = express(chosen, model, layers, options)
    metadata["attention"].setdefault("value_length", model.head_dim)
    tables = metadata.pop(TABLES, {})
    metadata.pop(FOUND, None)
    rotated = metadata.get("rope", {}).get("dimension_count", model.head_dim)
    layout = Layout(chosen.pairs, None if rotated >= model.head_dim else rotated)
    tensors = chosen.written_tensors(model, layers)
    plan = folding(Export(chosen, metadata, layers, tensors, layout, "float32", scales), model, length)
    notes = [*plan.notes, *fixed_note(source, layers, length), *([chosen.note] if chosen.note else [])]
    if chosen.output and model.tie_embeddings:
        embedding = next(one for one in plan.tensors if one.name == "token_embd.weight")
        plan = dataclasses.replace(plan, tensors=(*plan.tensors, dataclasses.replace(embedding, name="output.weight")))
        notes.append("The embedding is written twice: this architecture has no tied ones.")
    kinds = tuple(_kind(tensor, KINDS[kind][0]) for tensor in plan.tensors)
    if odd := sum(one == "F16" for one in kinds) if kind == "q8_0" else 0:
        notes.append(f"{odd} tensors whose rows are no multiple of {BLOCK} numbers are written as f16.")
    if LONG in tables and tables[LONG] != tables[SHORT]:
        notes.append(
            f"llama.cpp takes LongRoPE's long table for all tokens of a context (-c) of more than "
            f"{metadata['rope']['scaling']['original_context_length']:,}, and its short table otherwise."
        )
    return GgufExport(plan, kinds, KINDS[kind][1], tables, tuple(notes))


def _kind(tensor: Tensor, kind: str) -> str:
    """The number format of a tensor, as llama.cpp's converter chooses it."""
    if len(tensor.shape) == 1 or tensor.name.endswith("_norm.weight") or tensor.name == "position_embd.weight":
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % BLOCK else kind


def _bytes(shape: Sequence[int], kind: str) -> int:
    count = math.prod(shape)
    return count // BLOCK * (BLOCK + 2) if kind == "Q8_0" else count * (4 if kind == "F32" else 2)


def write_gguf(
    source: CheckpointSource,
    export: GgufExport,
    path: Path,
    name: str,
    tokenizer: Mapping[str, Any],
    done: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes a planned export of `source`, tensor by tensor, and calls `done` with the bytes of each.

    `name` is the model's, for `general.name`; `tokenizer` has the metadata of its tokenizer by their whole keys.

    Raises:
      UnsupportedError: a weight is too large for the number format; or gguf is not installed.
    """
    import gguf

    architecture = export.plan.family.model_type
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": export.file_type,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **{f"{architecture}.{key}": value for key, value in _flat(export.plan.config).items()},
        DESCRIPTION: json.dumps(description(export.plan.layers, source.training_length)),
        **tokenizer,
    }
    for key, value in fields.items():
        _add(writer, key, value)
    tables = {f"{one}.weight": np.float32(table) for one, table in export.tables.items()}
    for one, table in tables.items():
        writer.add_tensor_info(one, table.shape, table.dtype, table.nbytes)
    each = list(zip(export.plan.tensors, export.kinds, strict=True))
    for tensor, kind in each:
        size, known = _bytes(tensor.shape, kind), gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(NUMPY.get(kind, np.uint16)), size, known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for table in tables.values():
            writer.write_tensor_data(table)
        for tensor, kind in each:
            array = external(source, export.plan, tensor)
            writer.write_tensor_data(_encoded(array, kind, tensor.name))
            done(_bytes(tensor.shape, kind))
    finally:
        writer.close()


def _encoded(array: np.ndarray, kind: str, name: str) -> np.ndarray:
    """The numbers of a tensor in a format of GGUF."""
    import gguf

    if kind == "Q8_0":
        return gguf.quantize(cast(array, np.dtype(np.float32), name), gguf.GGMLQuantizationType.Q8_0)
    if kind == "BF16":
        import ml_dtypes

        return cast(array, np.dtype(ml_dtypes.bfloat16), name).view(np.uint16)
    return cast(array, np.dtype(NUMPY[kind]), name)


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return {key: value for key, value in found.items() if value is not None}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def check_written(path: Path, export: GgufExport) -> None:
    """`CheckpointError` unless the file reads as the model that was planned."""
    read = GgufSource(path)
    if read.layers != export.plan.layers:
        differs = next(n for n, (a, b) in enumerate(zip(read.layers, export.plan.layers, strict=True)) if a != b)
        raise CheckpointError(
            f"{path} was written, and reads as another model: layer {differs} has {read.layers[differs]}, not "
            f"{export.plan.layers[differs]}. Please report it."
        )
