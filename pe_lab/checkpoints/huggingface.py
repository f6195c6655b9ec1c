"""A Hugging Face directory, `config.json` and safetensors, as a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from pe_lab.checkpoints.families import Tensor
from pe_lab.checkpoints.hf_config import PE_LAB_KEY, TEXT_PREFIX, read_config, text_part
from pe_lab.checkpoints.rope_parameters import LENGTH_KEYS
from pe_lab.checkpoints.source import TensorSource, listing
from pe_lab.errors import CheckpointError
from pe_lab.storage import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READ_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of an export, with safetensors' names


class HuggingFaceSource(TensorSource):
    """A Hugging Face directory. `CheckpointError` if it has not exactly the tensors of the model, in their shapes."""

    def __init__(self, directory: Path, display_name: str | None = None):
        self.path, self.display_name = directory, display_name or f"hf:{directory}"
        advice = "Give a directory as transformers' save_pretrained writes it."
        config = read_json(directory / "config.json", advice, CheckpointError)
        listed = _tensors_of(directory)
        self._stored = {name: (file, name) for name, (file, _, _) in listed.items()}
        if (text := text_part(config)) is not None:
            names = {_text_name(name): name for name in listed if name.startswith((TEXT_PREFIX, "lm_head."))}
            self.note = f"The text alone: {len(listed) - len(names)} tensors of images and sound are left out."
            self._stored = {name: self._stored[stored] for name, stored in names.items()}
            config, listed = text, {name: listed[stored] for name, stored in names.items()}
        read = read_config(config, list(listed), str(directory / "config.json"))
        self.family, self.model, self.layers = read.family, read.model, read.layers
        self.origin = self.family.model_type
        self.training_length, self._layout = read.training_length, read.layout
        self.length_given = any(key in config for key in (*LENGTH_KEYS, PE_LAB_KEY))
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
        self.drop_neutral(names, neutral)
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

        file, name = self.path / self._stored[name][0], self._stored[name][1]
        try:
            # Opened for each tensor: an open file stays mapped, and counts as memory of this process.
            with safe_open(file, framework="np") as opened:
                return opened.get_tensor(name) if rows == slice(None) else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: tensor '{name}' cannot be read ({error}).") from error


def _text_name(name: str) -> str:
    """The name that a tensor of the text in a model with other parts has in a model of text."""
    return f"model.{name.removeprefix(TEXT_PREFIX)}" if name.startswith(TEXT_PREFIX) else name


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
