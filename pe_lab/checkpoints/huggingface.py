"""A Hugging Face directory as a source: `config.json`, and weights in one safetensors file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from pe_lab.checkpoints.families import Tensor
from pe_lab.checkpoints.hf_config import read_config
from pe_lab.checkpoints.source import check_finite
from pe_lab.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class HuggingFaceSource:
    """See `Source`. Opening checks that every tensor the model needs is there, in its shape, and that no other is.

    Raises:
      UserError: a file that is missing, truncated or not safetensors; an unknown architecture; tensors that the
        family's table does not know, lacks, or has in another shape.
    """

    metadata: Mapping[str, Any] = {}

    def __init__(self, directory: Path, said: str | None = None):
        self.path, self.said = directory, said or f"hf:{directory}"
        config = read_json(directory / "config.json", "Give a directory as transformers' save_pretrained writes it.")
        listed = _tensors_of(directory)
        self._files = {name: file for name, (file, _, _) in listed.items()}
        described = read_config(config, list(listed), str(directory / "config.json"))
        self.family, self.model, self.layers = described.family, described.model, described.layers
        self.training_length, self._layout = described.training_length, described.layout
        self._tensors = self._match(listed)
        self._by_leaf = {(path, t.layer): t for t in self._tensors for path in t.paths}
        kinds = {listed[t.name][2] for t in self._tensors}
        unknown = kinds - set(DTYPES)
        if unknown:
            raise UserError(
                f"{directory} has weights of type {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}."
            )
        self.dtype = np.dtype(DTYPES[kinds.pop()]) if len(kinds) == 1 else np.dtype(np.float32)
        self.tokenizer = f"hf:{directory}" if has_tokenizer(directory) else ""
        self._last: tuple[str, np.ndarray] | None = None

    def _match(self, listed: Mapping[str, tuple[str, tuple[int, ...], str]]) -> list[Tensor]:
        """The family's tensors, each found in the files; `UserError` for what is missing, misshapen or left over."""
        try:
            tensors = self.family.table.tensors(self.model)
        except UserError as error:
            raise UserError(f"{self.path}: {self.family.model_type} {error}.") from None
        wanted = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in wanted if name not in listed]
        if missing:
            raise UserError(f"{self.path} lacks {_several(missing)}, which {self.family.architecture} has.")
        for name, tensor in wanted.items():
            if listed[name][1] != tensor.shape:
                raise UserError(
                    f"{self.path}: tensor '{name}' has shape {list(listed[name][1])}, and by config.json it should be "
                    f"{list(tensor.shape)}."
                )
        leftover = [
            name for name in listed if name not in wanted and not name.endswith(tuple(self.family.table.ignored))
        ]
        tied = [name for name in leftover if name in ("lm_head.weight", "embed_out.weight")]
        if tied and self.model.tie_embeddings:
            # Files of tied models often repeat the embedding. If it is another one, config.json is wrong.
            embedding = next(name for name in wanted if wanted[name].paths == ("token_embedder.embedding",))
            if not np.array_equal(self._tensor(tied[0]), self._tensor(embedding)):
                raise UserError(
                    f"{self.path}: config.json says tie_word_embeddings, and '{tied[0]}' differs from '{embedding}'. "
                    "Set tie_word_embeddings to false, or remove the tensor."
                )
            leftover.remove(tied[0])
        if leftover:
            raise UserError(
                f"{self.path} has {_several(leftover)}, which {self.family.architecture} does not know; leaving "
                "weights out would be another model."
            )
        return tensors

    def _tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        file = self.path / self._files[name]
        try:
            # Opened anew for each tensor: a file that stays open stays mapped, and counts as this process's memory.
            with safe_open(file, framework="np") as opened:
                return opened.get_tensor(name) if rows == slice(None) else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: tensor '{name}' cannot be read ({error}).") from error

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """See `Source`."""
        tensor = self._by_leaf[leaf, layer]
        if rows != slice(None):
            if tensor.paths != (leaf,) or layer is not None:
                raise ValueError(f"{leaf} cannot be read by rows")
            return check_finite(self._tensor(tensor.name, rows), tensor.name, self.said)
        if self._last is None or self._last[0] != tensor.name:
            # Kept for a fused tensor's other parts.
            self._last = tensor.name, check_finite(self._tensor(tensor.name), tensor.name, self.said)
        array = tensor.split(self._last[1], leaf, self._layout)
        if len(tensor.paths) == 1:
            self._last = None
        return array


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """A JSON object from a file; `UserError` otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no '{path}'. {advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read as JSON ({error}). {advice}") from None
    if not isinstance(value, dict):
        raise UserError(f"'{path}' holds no JSON object. {advice}")
    return value


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer lies in a Hugging Face directory."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every tensor of a directory by name: (file, shape, dtype); `UserError` where a file is absent or not whole."""
    if (directory / SINGLE).is_file():  # transformers, too, looks for it first
        return _open_all(directory, [SINGLE])
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX, "Download it again.")
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise UserError(f"{directory / INDEX} has no weight_map. Download it again.")
        absent = sorted({file for file in files.values() if not (directory / file).is_file()})
        if absent:
            raise UserError(f"{directory / INDEX} lists {_several(absent)}, not there. Download what is missing.")
        found = _open_all(directory, sorted(set(files.values())))
        misplaced = [name for name, file in files.items() if found.get(name, ("",))[0] != file]
        if misplaced:
            raise UserError(f"{directory / INDEX} lists {_several(misplaced)}, not in the files it names.")
        return found
    others = sorted(p.name for p in directory.glob("*.bin"))
    if others:
        raise UserError(
            f"{directory} has its weights in {others[0]}, a pickle. Save it as safetensors first: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
        )
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}.")


def _open_all(directory: Path, files: list[str]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every tensor of the files by name: (file, shape, dtype). Opening checks that a file is as long as it says."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in files:
        try:
            with safe_open(directory / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping, despite its looks
                    view = opened.get_slice(name)
                    found[name] = (file, tuple(view.get_shape()), str(view.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{directory / file} is truncated, or not safetensors ({error}). Download it again."
            ) from None
    return found


def _several(names: list[str]) -> str:
    """The first of many names, and how many more."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"'{name}'" for name in names[:8]) + more
