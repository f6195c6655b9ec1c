"""Edits of a checkpoint, as pure functions; none of them touches its source."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pe_lab.checkpoints.store import DIRECTORY, Checkpoint, Store, metadata_of, new_id
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Params
from pe_lab.positional import Layer, label

NOTHING = "nothing changed"

# Fields of a model that decide the shapes or the meaning of its weights; the rest (dtype, remat ...) may change.
SHAPE_FIELDS = (
    "vocab_size",
    "layers",
    "d_model",
    "d_ff",
    "heads",
    "kv_heads",
    "head_dim",
    "qk_norm",
    "attention_bias",
    "output_bias",
    "mlp_bias",
    "norm",
    "activation",
    "gated_mlp",
    "parallel_block",
    "tie_embeddings",
    "scale_embeddings",
    "norm_epsilon",
)


def check_same_shape(parent: ModelConfig, child: ModelConfig, where: str, change_qk_norm: bool = False) -> None:
    """`UserError` naming every field in which a model cannot take over another's weights.

    With `change_qk_norm`, the QK-norm may differ: surgery will see to it.
    """
    differ = [
        f"{f} {getattr(parent, f)} -> {getattr(child, f)}"
        for f in SHAPE_FIELDS
        if getattr(parent, f) != getattr(child, f) and not (change_qk_norm and f == "qk_norm")
    ]
    if differ:
        advice = ""
        if any(text.startswith("qk_norm ") for text in differ):
            advice = " To add or remove a QK-norm, set the phase's own qk_norm."
        raise UserError(
            f"{where} is a model of another shape: {', '.join(differ)}. Set these fields of config.model to the "
            f"checkpoint's, or start from another checkpoint.{advice}"
        )


def change(before: Sequence[Layer], after: Sequence[Layer]) -> str:
    """What surgery did to the encodings, in words: `rope(base=10000) -> nope on layers 0-23`."""
    parts: list[tuple[str, list[int]]] = []
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        text = f"{label(old)} -> {label(new)}"
        if parts and parts[-1][0] == text and parts[-1][1][1] == n - 1:
            parts[-1][1][1] = n
        else:
            parts.append((text, [n, n]))
    spans = [f"{text} on layer{'s' if b > a else ''} {a}{f'-{b}' if b > a else ''}" for text, (a, b) in parts]
    return "; ".join(spans) or NOTHING


def lineage_entry(what: str, checkpoint_id: str, path: str, step: int) -> dict[str, Any]:
    """One line of a checkpoint's ancestry."""
    return {"id": checkpoint_id, "what": what, "path": path, "step": step}


def write_child(
    parent: Checkpoint,
    layers: tuple[Layer, ...],
    directory: str | Path,
    what: str,
    edited: tuple[ModelConfig, Params] | None = None,
    save_tokenizer: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a child of `parent` with other encodings and the same weights, or with `edited` ones; returns its path.

    It lies at `directory/checkpoints/0`, a phase's first checkpoint. The directory must not hold one already.
    `save_tokenizer` writes the tokenizer of a parent that is not ours into the directory it is given; a tokenizer
    that lies beside the parent is copied.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"'{directory}' is there and not empty. Surgery writes into a new directory; choose another --to."
        )
    model, params = edited or (parent.model, parent.params)
    child_id = new_id()
    facts = {
        k: parent.metadata[k]
        for k in ("run", "config", "config_hash", "mixture", "tokenizer", "vocab_size", "training_length", "versions")
        if k in parent.metadata
    }
    where = directory / DIRECTORY / "0"
    facts |= {
        "id": child_id,
        "phase": directory.name,
        "phase_index": 0,
        "step": 0,
        "tokens": parent.metadata.get("tokens", 0),
        "lineage": [*parent.metadata["lineage"], lineage_entry(what, child_id, str(where), 0)],
    }
    store = Store(directory / DIRECTORY)
    try:
        store.save(0, params, None, metadata_of(model, layers, **facts))
        store.wait()
    finally:
        store.close()
    if save_tokenizer is not None:
        save_tokenizer(directory / "tokenizer")
    elif parent.tokenizer.startswith("saved:"):
        shutil.copytree(parent.tokenizer.removeprefix("saved:"), directory / "tokenizer")
    return where
