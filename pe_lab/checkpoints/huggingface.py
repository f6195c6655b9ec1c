"""Hugging Face directories, `config.json` and safetensors: read as a source, and written for stock transformers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families import FAMILIES, LAYERS, Family, Tensor
from pe_lab.checkpoints.hf_config import MISSING, read_config, write_config
from pe_lab.checkpoints.source import CheckpointSource, TensorSource, listing
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean
from pe_lab.positional import NTK, DynamicNTK, DynamicYarn, Layer, Layout, LongRope, Yarn
from pe_lab.storage import read_json, write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9  # as save_pretrained does
# Of the families that can express a model, those that most runtimes read come first.
_FIRST = ("llama", "qwen2", "qwen3", "smollm3", "gpt_neox")
READ_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of an export, with safetensors' names


class HuggingFaceSource(TensorSource):
    """A Hugging Face directory. `CheckpointError` if it has not exactly the tensors of the model, in their shapes."""

    def __init__(self, directory: Path, display_name: str | None = None):
        self.path, self.display_name = directory, display_name or f"hf:{directory}"
        advice = "Give a directory as transformers' save_pretrained writes it."
        config = read_json(directory / "config.json", advice, CheckpointError)
        listed = _tensors_of(directory)
        self._files = {name: file for name, (file, _, _) in listed.items()}
        read = read_config(config, list(listed), str(directory / "config.json"))
        self.family, self.model, self.layers = read.family, read.model, read.layers
        self.training_length, self._layout = read.training_length, read.layout
        shapes = {name: shape for name, (_, shape, _) in listed.items()}
        table = self.family.table(self.model)
        leftover = self.match(table, shapes, self.family.architecture, "config.json")
        tensors = [tensor for each in self._by_leaf.values() for tensor in each]
        self._check_leftover(leftover, table.neutral_tensors(self.model, tensors))
        kinds = {listed[tensor.name][2] for tensor in tensors}
        unknown = kinds - set(READ_DTYPES)
        if unknown:
            raise CheckpointError(
                f"{directory} has weights of type {', '.join(sorted(unknown))}; known: {', '.join(READ_DTYPES)}."
            )
        self.dtype = np.dtype(READ_DTYPES[kinds.pop()]) if len(kinds) == 1 else np.dtype(np.float32)
        has_tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
        self.tokenizer = f"hf:{directory}" if has_tokenizer else ""

    def _check_leftover(self, names: list[str], neutral: Sequence[Tensor]) -> None:
        """`CheckpointError` for tensors that no leaf has.

        Those are known: a copy of the embedding, as in many tied models, and tensors that do nothing (`NeutralTensor`).
        """
        for tensor in neutral:
            if tensor.name not in names:
                continue
            found = self._tensor(tensor.name)
            written = np.clip(tensor.join([]), *_range(found.dtype)).astype(found.dtype)
            if np.array_equal(found, written):
                names.remove(tensor.name)
        embedding = self._by_leaf["token_embedder.embedding", None][0].name
        for head in ("lm_head.weight", "embed_out.weight"):
            if head not in names or not self.model.tie_embeddings:
                continue
            if not np.array_equal(self._tensor(head), self._tensor(embedding)):
                raise CheckpointError(
                    f"{self.path}: config.json has tie_word_embeddings, and '{head}' differs from '{embedding}'. "
                    "Set tie_word_embeddings to false, or remove the tensor."
                )
            names.remove(head)
        if names:
            raise CheckpointError(
                f"{self.path} has {listing(names)}, which {self.family.architecture} does not know; without these "
                "weights it would be another model."
            )

    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        file = self.path / self._files[name]
        try:
            # Opened for each tensor: an open file stays mapped, and counts as memory of this process.
            with safe_open(file, framework="np") as opened:
                return opened.get_tensor(name) if rows == slice(None) else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: tensor '{name}' cannot be read ({error}).") from error


def _tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """(file, shape, dtype) of every tensor of a directory; `CheckpointError` for a missing or truncated file."""
    if (directory / SINGLE).is_file():  # the first choice of transformers, too
        return _open_all(directory, [SINGLE])
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX, "Download it again.", CheckpointError)
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{directory / INDEX} has no weight_map. Download it again.")
        outside = sorted({file for file in files.values() if Path(file).is_absolute() or ".." in Path(file).parts})
        if outside:
            raise CheckpointError(
                f"{directory / INDEX} lists {listing(outside)}, which lie outside of its directory. Put the files "
                "beside it, and name them without a directory."
            )
        absent = sorted({file for file in files.values() if not (directory / file).is_file()})
        if absent:
            raise CheckpointError(f"{directory / INDEX} lists {listing(absent)}, which do not exist. Download them.")
        found = _open_all(directory, sorted(set(files.values())))
        misplaced = [name for name, file in files.items() if found.get(name, ("",))[0] != file]
        if misplaced:
            raise CheckpointError(f"{directory / INDEX} lists {listing(misplaced)}, which are in other files.")
        return found
    others = sorted(p.name for p in directory.glob("*.bin"))
    if others:
        raise CheckpointError(
            f"{directory} has its weights in {others[0]}, a pickle. Save it as safetensors first: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}.")


def _open_all(directory: Path, files: list[str]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """(file, shape, dtype) of every tensor of the files. Opening a file checks its length."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in files:
        try:
            with safe_open(directory / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    view = opened.get_slice(name)
                    found[name] = (file, tuple(view.get_shape()), str(view.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory / file} is truncated, or not safetensors ({error}). Download it again."
            ) from None
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Export


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
    plus_one: bool  # they are scales of a norm that multiplies by 1 + w
    notes: tuple[str, ...]  # messages about folded scales and fixed encodings

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
) -> Export:
    """Plans the export of a model without reading its weights.

    Args:
      family: one of `FAMILIES`; None is the first that can express the model.
      dtype: of the weights; None keeps the source's.
      length: tokens at which to fix encodings and scales that depend on the length.
      max_length: the longest sequence to declare, in tokens; None: what the encoding is meant for.

    Raises:
      UnsupportedError: no family, or not this one, can express the model; names the nearest model that it can.
      ConfigError: an unknown family or dtype, or a `max_length` that would change the model.
    """
    try:
        return _plan(source, family, dtype, length, max_length)
    except UnsupportedError as error:  # the functions below do not know the checkpoint
        raise UnsupportedError(f"{source.display_name}: {error}") from None


def _plan(
    source: CheckpointSource, family: str | None, dtype: str | None, length: int | None, max_length: int | None
) -> Export:
    dtype = str(source.dtype) if dtype is None else dtype
    if dtype not in DTYPES:
        raise ConfigError(f"The weights would be written as {dtype}; give --dtype, one of {', '.join(DTYPES)}.")
    layers, scales = exported_layers(source.layers, length)
    if family is None:
        chosen = choose_family(source.model, layers)
    elif family in FAMILIES:
        chosen = FAMILIES[family]
    else:
        # A name of another architecture is near to one of these by its letters alone.
        advice = f"It has {MISSING[family]}." if family in MISSING else did_you_mean(family, list(FAMILIES))
        raise ConfigError(f"--family '{family}' is not known. {advice}")
    config, layout = write_config(chosen, source.model, layers, source.training_length, dtype, max_length)
    try:
        table = chosen.table(source.model)
        tensors = tuple(table.tensors(source.model, layers))
    except UnsupportedError as error:
        raise UnsupportedError(f"{chosen.architecture} {error}.") from None
    norm = source.model.qk_norm != "none"
    folded = ("attention.query_norm.scale",) if norm else ("attention.query", "attention.query_bias")
    notes = []
    plus_one = norm and source.model.norm == "rms_plus_one"
    changed = [n for n, scale in enumerate(scales) if scale != 1]
    if changed and source.model.qkv_clip:
        raise UnsupportedError("logit scales cannot be folded into queries that are clipped (model.qkv_clip).")
    if changed:
        where = "q_norm's weight" if norm else "q_proj (weight and bias)"
        values = sorted({round(scales[n], 6) for n in changed})
        notes.append(
            f"Logit scale {', '.join(f'{v:g}' for v in values)} folded into {where} of {len(changed)} layers"
            + (f" (its value at {length:,} tokens)." if length else ".")
        )
    if any(a.encoding != b.encoding for a, b in zip(layers, source.layers, strict=True)):
        notes.append(f"Encodings that depend on the length are written for {length:,} tokens.")
    tensors += tuple(table.neutral_tensors(source.model, tensors))
    return Export(chosen, config, layers, tensors, layout, dtype, scales, folded, plus_one, tuple(notes))


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
            leaves = []
            for path in tensor.paths:
                leaf = source.read(path, tensor.index)
                if tensor.layer is not None and path.removeprefix(LAYERS) in export.folded:
                    leaf = _times(leaf, export.scales[tensor.layer], export.plus_one)
                leaves.append(leaf)
            array = tensor.join(leaves, export.layout)
            if tensor.value is not None:
                array = np.clip(array, *_range(export.dtype))
            file.write(_cast(array, np.dtype(export.dtype), tensor.name).tobytes())
            done(export.bytes_of(tensor))


def _times(leaf: np.ndarray, scale: float, plus_one: bool) -> np.ndarray:
    """A leaf of weights, or of a norm by 1 + w (`plus_one`), that computes `scale` times as much."""
    if scale == 1:
        return leaf
    leaf = leaf.astype(np.float32)
    return (leaf + 1) * np.float32(scale) - 1 if plus_one else leaf * np.float32(scale)


def _range(dtype: Any) -> tuple[float, float]:
    """The least and the largest number of a dtype: a neutral -1e30 is the least number of float16."""
    found = ml_dtypes.finfo(np.dtype(dtype))
    return float(found.min), float(found.max)


def _cast(array: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(kind, copy=False)
    if not np.isfinite(cast).all():
        wider = {"float16": "Choose bfloat16.", "bfloat16": "Choose float32."}
        advice = wider.get(kind.name, "Its logit scale is too large to be folded into it.")
        raise UnsupportedError(f"tensor '{name}' does not fit into {kind.name}: some values become infinite. {advice}")
    return cast


def _rank(family: Family) -> int:
    return _FIRST.index(family.model_type) if family.model_type in _FIRST else len(_FIRST)


def choose_family(model: ModelConfig, layers: Sequence[Layer]) -> Family:
    """The first stock family that can express a model. Raises `UnsupportedError`: none can; with the reason of each."""
    reasons = {}
    for family in sorted(FAMILIES.values(), key=_rank):
        if family.stock:
            try:
                write_config(family, model, layers, 2048, "float32")
                return family
            except UnsupportedError as error:
                reasons[family.model_type] = str(error)
    # A family that holds the weights, and cannot express the encoding, is nearer than one that cannot hold them; of
    # those, the nearest are those of fewest differences.
    near = {k: v for k, v in reasons.items() if "cannot hold this model" not in v}
    near = near or dict(sorted(reasons.items(), key=lambda item: item[1].count(";"))[:4])
    by_reason: dict[str, list[str]] = {}
    for name, reason in near.items():
        by_reason.setdefault(reason.split(": ", 1)[1], []).append(name)
    listed = "\n".join(f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items())
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
