"""Child checkpoints: the check of their shape, the description of their edits, their lineage, and writing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import Checkpoint, metadata_of, new_id
from pe_lab.checkpoints.locating import DIRECTORY
from pe_lab.checkpoints.store import Store
from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model, Params
from pe_lab.model.learned import carried
from pe_lab.positional import Layer, label, layer_hooks
from pe_lab.positional.codec import ranges
from pe_lab.storage import AnyPath, new_directory

NOTHING = "nothing changed"

# Fields of a model that change neither the shapes nor the meaning of its weights.
FREE_FIELDS = ("init_std", "dtype", "remat", "scan", "attention", "attention_chunk", "loss_chunks")


def check_same_shape(parent: ModelConfig, child: ModelConfig, where: str, change_qk_norm: bool = False) -> None:
    """`ConfigError` naming every field in which a model cannot take over another's weights.

    With `change_qk_norm` the QK-norm may differ: surgery changes it.
    """
    free = (*FREE_FIELDS, *(["qk_norm"] if change_qk_norm else []))
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in free]
    differ = [name for name in names if getattr(parent, name) != getattr(child, name)]
    if differ:
        advice = " To add or remove a QK-norm, set the phase's own qk_norm." if "qk_norm" in differ else ""
        listed = ", ".join(f"{name} {getattr(parent, name)} -> {getattr(child, name)}" for name in differ)
        raise ConfigError(
            f"{where} is a model of another shape: {listed}. Leave these fields of config.model out, and they are "
            f"the checkpoint's; or start from another checkpoint.{advice}"
        )


def change(before: Sequence[Layer], after: Sequence[Layer]) -> str:
    """A description of an edit of the encodings, such as `rope(base=10000) -> nope on layers 0-23`."""
    runs: list[tuple[str, list[int]]] = []
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        text = f"{label(old)} -> {label(new)}"
        if runs and runs[-1][0] == text and runs[-1][1][-1] == n - 1:
            runs[-1][1].append(n)
        else:
            runs.append((text, [n]))
    return "; ".join(f"{text} on layer{'s' * (len(at) > 1)} {ranges(at)}" for text, at in runs) or NOTHING


def lineage_entry(what: str, checkpoint_id: str, path: str, step: int) -> dict[str, Any]:
    """One entry of a checkpoint's lineage."""
    return {"id": checkpoint_id, "what": what, "path": path, "step": step}


def carried_parameters(parent: Checkpoint, layers: Sequence[Layer]) -> tuple[Params, str]:
    """The parent's parameters for these layers (see `model.learned.carried`), and what was done in words."""
    config = parent.model
    before, after = (layer_hooks(one, config.heads) for one in (parent.layers, layers))
    return carried(parent.params, before, after, Model(config).head_shape)


def with_layers(checkpoint: Checkpoint, layers: tuple[Layer, ...]) -> Checkpoint:
    """The checkpoint with the parameters that these layers need; itself if it has them."""
    params, _ = carried_parameters(checkpoint, layers)
    return checkpoint if params is checkpoint.params else dataclasses.replace(checkpoint, params=params, layers=layers)


def write_child(
    parent: Checkpoint,
    layers: tuple[Layer, ...],
    directory: str | AnyPath,
    what: str,
    save_tokenizer: Callable[[Path], None] | None = None,
) -> AnyPath:
    """Writes a child of `parent` with other encodings, and returns its path.

    The path is `directory/checkpoints/0`, a phase's first checkpoint. The directory must be new or empty; it appears
    whole, or not at all. Of two processes that write one directory the first to finish wins.

    Args:
      save_tokenizer: writes the tokenizer to a directory.

    Raises:
      ConfigError: the directory exists and is not empty, or it cannot be written.
    """
    directory = storage.path("--to", directory)
    metadata = {
        k: parent.metadata[k]
        for k in ("run", "config", "config_hash", "mixture", "tokenizer", "vocab_size", "training_length", "versions")
        if k in parent.metadata
    }
    where = directory / DIRECTORY / "0"
    entry = lineage_entry(what, new_id(), str(where), 0)
    metadata |= {
        "id": entry["id"],
        "phase": directory.name,
        "phase_index": 0,
        "step": 0,
        "tokens": parent.metadata.get("tokens", 0),
        "lineage": [*parent.metadata["lineage"], entry],
    }
    params, learned = carried_parameters(parent, layers)
    entry["what"] = "; ".join(filter(None, [what, learned]))
    with new_directory(directory) as building:
        store = Store(building / DIRECTORY)
        try:
            store.save(0, params, None, metadata_of(parent.model, layers, **metadata))
            store.wait()
        finally:
            store.close()
        if save_tokenizer is not None:
            save_tokenizer(building / "tokenizer")
    return where
