"""A Hugging Face directory as a source: `config.json`, and weights in one or several safetensors files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.hf_config import read_config
from pe_lab.checkpoints.source import TensorSource, listing
from pe_lab.errors import CheckpointError
from pe_lab.storage import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class HuggingFaceSource(TensorSource):
    """See `Source`. Opening checks that the files have exactly the tensors of the model, in their shapes.

    Raises:
      CheckpointError: a file that is missing, truncated or not safetensors; tensors that are missing, left over or of
        another shape.
      UnsupportedError: an unknown architecture.
    """

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
        leftover = self.match(self.family.table, shapes, self.family.architecture, "config.json")
        self._check_leftover(leftover)
        kinds = {listed[tensor.name][2] for tensor in self._by_leaf.values()}
        unknown = kinds - set(DTYPES)
        if unknown:
            raise CheckpointError(
                f"{directory} has weights of type {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}."
            )
        self.dtype = np.dtype(DTYPES[kinds.pop()]) if len(kinds) == 1 else np.dtype(np.float32)
        self.tokenizer = f"hf:{directory}" if has_tokenizer(directory) else ""

    def _check_leftover(self, names: list[str]) -> None:
        """`CheckpointError` unless the tensors that no leaf has are a copy of the embedding, as in many tied models."""
        embedding = self._by_leaf["token_embedder.embedding", None].name
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
