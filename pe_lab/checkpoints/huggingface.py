"""A Hugging Face directory as a source: `config.json`, and weights in one or several safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from pe_lab.checkpoints.families import Tensor
from pe_lab.checkpoints.hf_config import read_config
from pe_lab.checkpoints.source import check_finite, listing
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.storage import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class HuggingFaceSource:
    """See `Source`. Opening checks that the files have exactly the tensors of the model, in their shapes.

    Raises:
      CheckpointError: a file that is missing, truncated or not safetensors; tensors that are missing, left over or of
        another shape.
      UnsupportedError: an unknown architecture.
    """

    metadata: Mapping[str, Any] = {}

    def __init__(self, directory: Path, display_name: str | None = None):
        self.path, self.display_name = directory, display_name or f"hf:{directory}"
        advice = "Give a directory as transformers' save_pretrained writes it."
        config = read_json(directory / "config.json", advice, CheckpointError)
        listed = _tensors_of(directory)
        self._files = {name: file for name, (file, _, _) in listed.items()}
        read = read_config(config, list(listed), str(directory / "config.json"))
        self.family, self.model, self.layers = read.family, read.model, read.layers
        self.training_length, self._layout = read.training_length, read.layout
        self._tensors = self._match(listed)
        self._by_leaf = {(path, t.layer): t for t in self._tensors for path in t.paths}
        kinds = {listed[t.name][2] for t in self._tensors}
        unknown = kinds - set(DTYPES)
        if unknown:
            raise CheckpointError(
                f"{directory} has weights of type {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}."
            )
        self.dtype = np.dtype(DTYPES[kinds.pop()]) if len(kinds) == 1 else np.dtype(np.float32)
        self.tokenizer = f"hf:{directory}" if has_tokenizer(directory) else ""
        self._last: tuple[str, np.ndarray] | None = None

    def _match(self, listed: Mapping[str, tuple[str, tuple[int, ...], str]]) -> list[Tensor]:
        """The family's tensors; `CheckpointError` for tensors that are missing, left over or of another shape."""
        try:
            tensors = self.family.table.tensors(self.model)
        except UnsupportedError as error:
            raise CheckpointError(f"{self.path}: {self.family.model_type} {error}.") from None
        wanted = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in wanted if name not in listed]
        if missing:
            raise CheckpointError(f"{self.path} lacks {listing(missing)}, which {self.family.architecture} has.")
        for name, tensor in wanted.items():
            if listed[name][1] != tensor.shape:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' has shape {list(listed[name][1])}, and config.json gives "
                    f"{list(tensor.shape)}."
                )
        leftover = [
            name for name in listed if name not in wanted and not name.endswith(tuple(self.family.table.ignored))
        ]
        tied = [name for name in leftover if name in ("lm_head.weight", "embed_out.weight")]
        if tied and self.model.tie_embeddings:
            # Files of tied models often repeat the embedding. If the copy differs, config.json is wrong.
            embedding = next(name for name in wanted if wanted[name].paths == ("token_embedder.embedding",))
            if not np.array_equal(self._tensor(tied[0]), self._tensor(embedding)):
                raise CheckpointError(
                    f"{self.path}: config.json has tie_word_embeddings, and '{tied[0]}' differs from '{embedding}'. "
                    "Set tie_word_embeddings to false, or remove the tensor."
                )
            leftover.remove(tied[0])
        if leftover:
            raise CheckpointError(
                f"{self.path} has {listing(leftover)}, which {self.family.architecture} does not know; without "
                "these weights it would be another model."
            )
        return tensors

    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        file = self.path / self._files[name]
        try:
            # Opened for each tensor: an open file stays mapped, and counts as memory of this process.
            with safe_open(file, framework="np") as opened:
                return opened.get_tensor(name) if rows == slice(None) else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: tensor '{name}' cannot be read ({error}).") from error

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """See `Source`."""
        tensor = self._by_leaf[leaf, layer]
        if rows != slice(None):
            if tensor.paths != (leaf,) or layer is not None:
                raise ValueError(f"{leaf} cannot be read by rows")
            return check_finite(self._tensor(tensor.name, rows), tensor.name, self.display_name)
        if self._last is None or self._last[0] != tensor.name:
            # Kept for the other leaves of a fused tensor.
            self._last = tensor.name, check_finite(self._tensor(tensor.name), tensor.name, self.display_name)
        array = tensor.split(self._last[1], leaf, self._layout)
        if len(tensor.paths) == 1:
            self._last = None
        return array


def has_tokenizer(directory: Path) -> bool:
    """Whether a Hugging Face directory has a tokenizer."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """(file, shape, dtype) of every tensor of a directory; `CheckpointError` for a missing or truncated file."""
    if (directory / SINGLE).is_file():  # the first choice of transformers, too
        return _open_all(directory, [SINGLE])
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX, "Download it again.", CheckpointError)
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{directory / INDEX} has no weight_map. Download it again.")
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
