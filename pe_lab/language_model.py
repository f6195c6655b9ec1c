"""A language model in the hand: weights and the positional encoding they are read with, which may be changed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.checkpoints import Checkpoint, open_checkpoint
from pe_lab.checkpoints.store import tokenizer_directory
from pe_lab.checkpoints.surgery import change, drop, write_child
from pe_lab.config import ModelConfig, UserError
from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.model import Model
from pe_lab.parallel import hide_absent_tpu
from pe_lab.positional import Layer, Schedule, build_schedule, describe, layers

Tokens = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array


@functools.cache
def _compiled(config: ModelConfig) -> tuple[Any, Any]:
    # One compilation serves every model of one shape under every schedule of one structure.
    model = Model(config)
    return jax.jit(model.apply), jax.jit(model.token_loss)


@dataclass(frozen=True)
class LanguageModel:
    """Weights with a schedule. Nothing changes in place: `with_positional` gives another one on the same weights."""

    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    schedule: Schedule
    tokenizer: Tokenizer | None = None

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model

    @property
    def training_length(self) -> int:
        """Tokens per window in training."""
        return int(self.checkpoint.metadata["training_length"])

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        """Token ids of a text; `UserError` where the checkpoint came without its tokenizer."""
        if self.tokenizer is None:
            raise UserError(f"'{self.checkpoint.path}' came without a tokenizer; pass token ids instead of text.")
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def _rows(self, tokens: Tokens) -> Int[np.ndarray, "B T"]:
        try:
            ids = self.encode(tokens) if isinstance(tokens, str) else np.asarray(tokens)
        except ValueError as error:  # rows of different lengths
            raise UserError(f"tokens are no array of ids: {error}") from None
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"tokens are of type {ids.dtype}; ids are whole numbers.")
        if ids.ndim not in (1, 2) or ids.size == 0:
            raise UserError(f"tokens have shape {ids.shape}; give a text, [T] or [B, T] ids, at least one.")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise UserError(
                f"tokens range from {ids.min()} to {ids.max()}; the vocabulary has {self.config.vocab_size}."
            )
        return np.atleast_2d(ids).astype(np.int32)

    def logits(self, tokens: Tokens) -> Float[Array, "B T V"]:
        """Next-token logits, float32, of a text, of ids [T] (a batch of one), or of [B, T]."""
        return _compiled(self.config)[0](self.checkpoint.params, self._rows(tokens), None, None, self.schedule)

    def loss_by_position(self, tokens: Tokens) -> Float[np.ndarray, "B targets"]:
        """Nats paid for each token but the first, given those before it."""
        rows = self._rows(tokens)
        if rows.shape[1] < 2:
            raise UserError("loss_by_position needs at least two tokens: the first one is given.")
        batch = {"tokens": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])}
        return np.asarray(_compiled(self.config)[1](self.checkpoint.params, batch, self.schedule))

    def with_positional(self, description: Any, logit_scale: float | None = None) -> LanguageModel:
        """The same weights under another encoding: an encoding, a text, a `Layer`, or one per layer of a pattern.

        `logit_scale` is DroPE's beta, on every layer.
        """
        described = layers(description, self.config.layers)
        if logit_scale is not None:
            described = tuple(dataclasses.replace(layer, logit_scale=logit_scale) for layer in described)
        config = self.config
        schedule = build_schedule(described, config.heads, config.kv_heads, config.head_dim).generalize()
        return dataclasses.replace(self, layers=described, schedule=schedule)

    def drop_positional(self, chosen: Sequence[int] | None = None) -> LanguageModel:
        """No positional encoding on all layers, or on the chosen ones (DroPE's drop, before any recalibration)."""
        return self.with_positional(drop(self.layers, chosen))

    def describe(self) -> str:
        """The schedule as a table."""
        return describe(self.schedule, self.layers)

    def save(self, directory: str | Path) -> Path:
        """Writes a child checkpoint into a new directory; training can start from it (`init_from`)."""
        what = change(self.checkpoint.layers, self.layers)
        return write_child(self.checkpoint, self.layers, directory, what)


def load(path: str | Path) -> LanguageModel:
    """Opens a checkpoint of ours: a run (its last phase), a phase, or one step.

    Raises:
      UserError: no checkpoint there, or a damaged one.
    """
    hide_absent_tpu()
    checkpoint = open_checkpoint(path)
    directory = tokenizer_directory(checkpoint.path)
    tokenizer = load_saved_tokenizer(directory) if directory else None
    # Generalized, as `with_positional` gives it: switching encodings then compiles nothing.
    return LanguageModel(checkpoint, checkpoint.layers, checkpoint.schedule.generalize(), tokenizer)
