"""The one door: any path or address a person gives, opened as a source or read as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from pe_lab.checkpoints import store
from pe_lab.checkpoints.gguf_file import GgufSource
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.checkpoints.native import NativeSource
from pe_lab.checkpoints.source import Source, place
from pe_lab.checkpoints.store import Checkpoint, new_id
from pe_lab.checkpoints.surgery import lineage_entry
from pe_lab.errors import UserError
from pe_lab.parallel import AxisRules
from pe_lab.positional import build_schedule


def is_external(path: str | Path) -> bool:
    """Whether a path means somebody else's checkpoint: `hf:`, `gguf:`, a .gguf file, or a Hugging Face directory."""
    text = str(path)
    if text.startswith(("hf:", "gguf:")) or text.endswith(".gguf"):
        return True
    directory = Path(text).expanduser()
    return (directory / "config.json").is_file()


def open_source(path: str | Path) -> Source:
    """Opens a checkpoint without reading its weights: one of ours, a Hugging Face directory, or a GGUF file.

    `hf:ORG/NAME` that is no directory is fetched from the hub, where `huggingface_hub` is installed and online.

    Raises:
      UserError: there is none, or it cannot be read; see the sources.
    """
    text = str(path)
    if not is_external(path):
        return NativeSource(path)
    if text.startswith("gguf:") or text.endswith(".gguf"):
        return GgufSource(Path(text.removeprefix("gguf:")).expanduser())
    name = text.removeprefix("hf:")
    directory = Path(name).expanduser()
    if not directory.is_dir():
        directory = _from_hub(name)
    return HuggingFaceSource(directory, f"hf:{name}")


def _from_hub(name: str) -> Path:
    """The files of a repository, fetched or found in the hub's cache."""
    by_hand = (
        "Place its files by hand: a directory with config.json, *.safetensors and the tokenizer's files, and give "
        "--from=hf:DIRECTORY."
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"There is no directory '{name}', and it is no repository ORG/NAME either. {by_hand}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"There is no directory '{name}', and huggingface_hub, which could fetch it, is not installed "
            f"(pip install huggingface_hub). {by_hand}"
        ) from None
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's, requests', and the system's
        raise UserError(f"'{name}' cannot be fetched from the hub ({store.first_line(error)}). {by_hand}") from None


def open_checkpoint(path: str | Path, *, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Checkpoint:
    """Reads the weights of any checkpoint and everything they are read with; not the optimizer.

    Args:
      path: ours (see `store.resolve`), `hf:DIR`, `hf:ORG/NAME`, `gguf:FILE`, or the plain path of one of these.
      mesh, rules: where the weights go; without them, onto the first device.

    Raises:
      UserError: no checkpoint there, or one that is damaged or that pe_lab cannot read.
    """
    if not is_external(path):
        return store.open_checkpoint(path, mesh=mesh, rules=rules)
    source = open_source(path)
    model, layers = source.model, source.layers
    schedule = build_schedule(layers, model.heads, model.kv_heads, model.head_dim)
    identity = new_id()
    metadata = {
        "id": identity,
        "phase": source.path.name,
        "step": 0,
        "tokens": 0,
        "training_length": source.training_length,
        "vocab_size": model.vocab_size,
        "lineage": [lineage_entry(f"read from {source.said}", identity, source.said, 0)],
    }
    params = place(source, mesh, rules)
    return Checkpoint(source.path, 0, params, model, layers, schedule, metadata, source.tokenizer)
