"""Opens any checkpoint, native or external, as a source or with its weights."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import Checkpoint, new_id
from pe_lab.checkpoints.gguf_file import GgufSource
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.checkpoints.locating import first_line
from pe_lab.checkpoints.native import NativeSource
from pe_lab.checkpoints.source import Source, place
from pe_lab.checkpoints.surgery import lineage_entry
from pe_lab.errors import CheckpointError
from pe_lab.model import complete, least_parameters
from pe_lab.parallel import AxisRules, check_memory
from pe_lab.storage import AnyPath


def is_external(path: str | AnyPath) -> bool:
    """Whether a path names an external checkpoint: `hf:`, `gguf:`, a .gguf file, or a Hugging Face directory."""
    text = str(path)
    if text.startswith(("hf:", "gguf:")) or text.endswith(".gguf"):
        return True
    return (storage.path("the checkpoint", path) / "config.json").is_file()


def open_source(path: str | AnyPath) -> Source:
    """A checkpoint, native or external, opened without reading its weights.

    `hf:ORG/NAME` that is no directory is downloaded from the hub, if `huggingface_hub` is installed and online.

    Raises:
      CheckpointError: there is none, or it cannot be read; see the sources.
    """
    text = str(path)
    if not is_external(path):
        return NativeSource(path)
    if text.startswith("gguf:") or text.endswith(".gguf"):
        return GgufSource(storage.local_copy(storage.path("the checkpoint", text.removeprefix("gguf:"))))
    name = text.removeprefix("hf:")
    directory = storage.path("the checkpoint", name)
    return HuggingFaceSource(storage.local_copy(directory) if directory.is_dir() else _from_hub(name), f"hf:{name}")


def _from_hub(name: str) -> Path:
    """The directory of a repository's files, downloaded or in the hub's cache."""
    by_hand = (
        "Place its files by hand: a directory with config.json, *.safetensors and the tokenizer's files, and give "
        "--from=hf:DIRECTORY."
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"There is no directory '{name}', and it is no repository ORG/NAME. {by_hand}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"There is no directory '{name}', and huggingface_hub, which could download it, is not installed "
            f"(pip install huggingface_hub). {by_hand}"
        ) from None
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # of huggingface_hub, requests and the system
        raise CheckpointError(f"'{name}' cannot be downloaded from the hub ({first_line(error)}). {by_hand}") from None


def open_checkpoint(path: str | AnyPath, *, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Checkpoint:
    """A checkpoint with its weights, without the optimizer.

    Args:
      path: of a native checkpoint (see `store.resolve`), `hf:DIR`, `hf:ORG/NAME`, `gguf:FILE`, or their plain paths.
      mesh, rules: where to place the weights; None is the first device.

    Raises:
      CheckpointError: there is none, or it is damaged or not supported.
      UnsupportedError: its weights do not fit the memory of this machine and its devices.
    """
    source = open_source(path)
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    share = 1.0 if mesh is None else len(devices) / mesh.size
    needed = int(4 * least_parameters(complete(source.model)) * share)  # float32
    check_memory(needed, f"The model of '{source.display_name}'", devices)
    if isinstance(source, NativeSource):
        step, params, metadata = source.step, source.restore(mesh, rules), source.metadata
    else:
        entry = lineage_entry(f"read from {source.display_name}", new_id(), source.display_name, 0)
        metadata = {
            "id": entry["id"],
            "phase": source.path.name,
            "step": 0,
            "tokens": 0,
            "training_length": source.training_length,
            "vocab_size": source.model.vocab_size,
            "lineage": [entry],
        }
        step, params = 0, place(source, mesh, rules)
    return Checkpoint(source.path, step, params, source.model, source.layers, metadata, source.tokenizer)
