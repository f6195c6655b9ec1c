"""An open checkpoint, and the metadata of one."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any

from pe_lab.checkpoints.locating import FORMAT
from pe_lab.config import ModelConfig, to_json
from pe_lab.model import Params
from pe_lab.positional import CANONICAL, Layer, Layout, sources
from pe_lab.storage import AnyPath


def new_id() -> str:
    """A unique name for a checkpoint."""
    return uuid.uuid4().hex[:12]


def metadata_of(
    model: ModelConfig, layers: tuple[Layer, ...], layout: Layout = CANONICAL, **more: Any
) -> dict[str, Any]:
    """The metadata of a checkpoint: its model, its encodings, the layout of its heads, and `more`.

    pe_lab writes the canonical layout; weights of another layout are permuted when a checkpoint is opened.
    """
    return {
        "format": FORMAT,
        "model": to_json(model),
        "layout": dataclasses.asdict(layout),
        "layers": to_json(layers),
        "encodings": sources(encoding for layer in layers for _, encoding in layer.acting()),
        **more,
    }


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: the weights, the encodings and the metadata.

    `metadata` has id, run, phase, step, training_length, config, config_hash, lineage, mixture, tokenizer, vocab_size
    and versions; that of a converted checkpoint has fewer keys. `tokenizer` is an argument of
    `data.tokenizers.load_tokenizer`, "" for a checkpoint without tokenizer.
    """

    path: AnyPath
    step: int
    params: Params
    model: ModelConfig
    layers: tuple[Layer, ...]
    metadata: dict[str, Any]
    tokenizer: str = ""

    @property
    def converted(self) -> bool:
        """Whether the weights were trained elsewhere, and no training config is known."""
        return "config" not in self.metadata
