"""A GGUF file, or the files of a split one, as a source; the `gguf` package dequantizes it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families.family import lookup
from pe_lab.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from pe_lab.checkpoints.gguf.positions import LONG, SHARED, SHORT, TABLES
from pe_lab.checkpoints.hf_config import as_described
from pe_lab.checkpoints.source import TensorSource, check_finite, listing
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, UserError, excerpt
from pe_lab.positional import Layout
from pe_lab.storage.gguf_format import GgufTensor, open_gguf

DESCRIPTION = "pe_lab.layers"  # a metadata key with pe_lab's own description of the layers, as JSON
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

# Metadata keys that change the computation, with the architectures' own ones excepted; False and 0 have no effect.
_REFUSED = (
    "attention.scale",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
)


class GgufSource(TensorSource):
    """A GGUF file; of a split model any of its files.

    Raises:
      CheckpointError: a file is damaged, missing, or has not exactly the tensors of the model, in their shapes.
      UnsupportedError: an architecture, or a value of its metadata, that pe_lab does not support.
    """

    def __init__(self, path: Path):
        self.path, fields, self._stored, has_tokenizer = _open(path)
        self.display_name = f"gguf:{self.path}"
        if has_tokenizer:  # a file may have weights alone
            self.tokenizer = self.display_name
        name = fields.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UnsupportedError(
                f"{path}: the architecture is {excerpt(repr(name), 60)}; pe_lab reads {', '.join(ARCHITECTURES)} from "
                "GGUF. A model of another one may have a Hugging Face directory."
            )
        self.family = ARCHITECTURES[name]
        own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
        try:
            self._check(own)
            tables = {one: self._table(one) for one in (SHARED, SHORT, LONG) if f"{one}.weight" in self._stored}
            config = self._config(own) | {TABLES: tables}
            self.model = _with_plain_scale(self.family, self.family.read_model(config))
            self.layers, self.training_length, rotated = self.family.positions.read(config, self.model)
            self._describe(fields.get(DESCRIPTION))
        except UserError as error:  # the functions called do not know the file
            kind = CheckpointError if isinstance(error, ConfigError) else type(error)
            raise kind(f"{path}: {error}") from None
        self._layout = Layout(self.family.pairs, rotated)
        shapes = {
            one: tensor.shape for one, tensor in self._stored.items() if one.removesuffix(".weight") not in tables
        }
        table = self.family.table(self.model)
        leftover = self.match(table, shapes, name, "its metadata")
        self.drop_neutral(
            leftover, table.neutral_tensors(self.model, [t for each in self._by_leaf.values() for t in each])
        )
        if leftover:
            raise CheckpointError(f"{path} has {listing(leftover)}, which pe_lab does not know.")
        # Quantized tensors become float32. Norms and biases are float32 beside weights of 16 bits.
        kinds = {tensor.kind for tensor in self._stored.values()} - {"F32"}
        plain = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}
        self.dtype = np.dtype(plain[kinds.pop()] if len(kinds) == 1 and kinds <= set(plain) else np.float32)

    def _check(self, own: Mapping[str, Any]) -> None:
        """`UnsupportedError` for metadata that the architecture's own keys do not read."""
        known = {key.name for key in self.family.keys.values()} | set(self.family.constants)
        if getattr(self.family.positions, "temperature", False):
            known |= {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}
        if getattr(self.family.positions, "windows", "none") != "none":
            known.add("attention.sliding_window")
        if own.get("expert_count"):
            raise UnsupportedError(f"it has a mixture of {own['expert_count']} experts, unknown to pe_lab.")
        for key in _REFUSED:
            if own.get(key) and key not in known:
                what = f"{key} is {excerpt(repr(own[key]), 60)}"
                raise UnsupportedError(f"{self.family.model_type}.{what}, which pe_lab does not support.")

    def _config(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The metadata as a config, with the size of the vocabulary."""
        embedding = self._stored.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError("it has no tensor 'token_embd.weight'.")
        if len(embedding.shape) != 2:
            raise CheckpointError("tensor 'token_embd.weight' is no matrix.")
        config: dict[str, Any] = {}
        for key, value in own.items():
            *above, last = key.split(".")
            inner = config
            for part in above:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise CheckpointError(f"its metadata have {part} both as a value and as a group of keys.")
            inner[last] = value
        if lookup(config, "attention.head_count") == 0:
            raise CheckpointError("attention.head_count is 0; it must be positive.")
        return self.family.inferred(config | {"vocab_size": embedding.shape[0]}, list(self._stored))

    def _table(self, name: str) -> tuple[float, ...]:
        whole = f"{name}.weight"
        return tuple(float(x) for x in check_finite(self._tensor(whole), whole, self.display_name).ravel())

    def _describe(self, text: Any) -> None:
        """Takes pe_lab's own description of the layers, where it is not contradicted."""
        try:
            described = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            return
        if isinstance(described, Mapping):
            self.layers, self.training_length = as_described(described, self.layers, self.model, self.training_length)

    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        import gguf

        stored = self._stored[name]
        # A tensor of one axis is stored as one row, in BF16 as bytes.
        data = stored.data if rows == slice(None) or len(stored.shape) == 1 else stored.data[rows]
        kind = stored.kind
        if kind == "BF16":
            return np.ascontiguousarray(data).view(ml_dtypes.bfloat16).reshape(-1, *stored.shape[1:])
        if kind in ("F32", "F16", "F64"):
            return np.array(data)
        try:
            return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is {kind}, which gguf cannot dequantize ({error})."
            ) from None


def _with_plain_scale(family: Architecture, model: ModelConfig) -> ModelConfig:
    """The model with the scale of its products, where no key of the architecture has it."""
    if "attention_scale" in family.keys or family.scale(model) == model.head_dim**-0.5:
        return model
    return dataclasses.replace(model, attention_scale=family.scale(model))


def _open(path: Path) -> tuple[Path, dict[str, Any], dict[str, GgufTensor], bool]:
    """The first file, the metadata and the tensors of a model, and whether it has a tokenizer; of all files of it."""

    def opened(file: Path) -> Any:
        # The vocabulary is read by the tokenizer only.
        return open_gguf(file, CheckpointError, lambda key: not key.startswith("tokenizer."))

    given = opened(path)
    count = _count(given.fields, "split.count")
    if not count:
        return path, given.fields, given.tensors, "tokenizer.ggml.tokens" in given.keys
    parts = SPLIT.fullmatch(path.name)
    if parts is None or int(parts[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files of a split model, whose names end in -00001-of-{count:05}.gguf and so on. "
            "Give them these names."
        )
    files = [path.with_name(f"{parts[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} files, of which {listing(missing)} are missing. Download them."
        )
    each = [given if file == path else opened(file) for file in files]
    tensors: dict[str, GgufTensor] = {}
    for n, (file, one) in enumerate(zip(files, each, strict=True)):
        number, of = _count(one.fields, "split.no", -1) + 1, _count(one.fields, "split.count")
        if (number, of) != (n + 1, count):
            raise CheckpointError(
                f"{file} says that it is file {number} of {of}, and its name says {n + 1} of {count}. "
                "Download it again."
            )
        if twice := sorted(tensors.keys() & one.tensors.keys()):
            raise CheckpointError(f"{file} has {listing(twice)}, which an earlier file has too. Download it again.")
        tensors |= one.tensors
    expected = _count(each[0].fields, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"the {count} files of {path} have {len(tensors)} tensors, and declare {expected}.")
    return files[0], each[0].fields, tensors, "tokenizer.ggml.tokens" in each[0].keys


def _count(fields: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A whole number of the metadata; the default where it is something else."""
    value = fields.get(key, default)
    return value if isinstance(value, int) else default
