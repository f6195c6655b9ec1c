"""What reading a long text needs of a chip's memory: by arithmetic, or as the compiler lays it out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.config import ModelConfig
from pe_lab.evaluation.scoring.forward import CHUNK_ELSEWHERE, LOGITS
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, padded_length, use_mesh
from pe_lab.planning.step_memory import Compiled, analyze
from pe_lab.positional import LayerStructure, Schedule


@dataclass(frozen=True)
class LongText:
    """Bytes that one text of `length` tokens needs, beside the weights, of each chip.

    Attributes:
      length: in tokens.
      cache: keys and values of all layers, of the whole text, on all chips together.
      at_once: activations of one pass, the text cut over the chips.
      in_chunks: the cache, and the activations of one chunk, on one chip.
      decoding: the cache, cut over the chips.
    """

    length: int
    cache: int
    at_once: int
    in_chunks: int
    decoding: int


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of a token on one layer: 2 G K numbers in the compute dtype."""
    return 2 * config.kv_heads * config.head_dim * np.dtype(config.dtype).itemsize


def cache_bytes(config: ModelConfig, structure: Sequence[LayerStructure], length: int) -> int:
    """Keys and values of one text; a layer with a window keeps no more than that many tokens."""
    kept = sum(length if one.window is None else min(length, one.window) for one in structure)
    return kept * cache_bytes_per_token(config)


def weight_bytes(model: Model, dtype: str) -> int:
    """Parameters, whole, as they are kept for evaluation."""
    return model.num_parameters * np.dtype(dtype).itemsize


def long_text(model: Model, structure: Sequence[LayerStructure], length: int, chips: int) -> LongText:
    """The arithmetic of one text over `chips` chips."""
    config = model.config
    width = np.dtype(config.dtype).itemsize
    cache = cache_bytes(config, structure, length)
    here = padded_length(length, chips) // chips

    def activations(tokens: int) -> int:
        # The stream, its norm and a branch's result; queries, keys and values, as projected and as turned, and the
        # attention's output; gate, up and their product. XLA frees the one branch before it begins the other.
        attended = (3 * config.heads + 4 * config.kv_heads) * config.head_dim
        hidden = (3 if config.gated_mlp else 2) * config.d_ff
        logits = min(LOGITS, tokens * config.vocab_size) * 4 * 2
        return tokens * width * (3 * config.d_model + max(attended, hidden)) + logits

    # Round a ring go keys and values of one layer: those that are here, and those on their way.
    visiting = 2 * here * cache_bytes_per_token(config) if chips > 1 else 0
    in_chunks = cache + activations(min(CHUNK_ELSEWHERE, length))
    return LongText(length, cache, activations(here) + visiting, in_chunks, -(-cache // chips))


def longest(model: Model, structure: Sequence[LayerStructure], chips: int, room: int, way: str) -> int:
    """The longest text, in whole kibi-tokens, whose `way` ("at_once", "in_chunks", "decoding") fits into `room`."""
    low, high = 0, 2**30 // 1024
    while low < high:
        middle = (low + high + 1) // 2
        fits = getattr(long_text(model, structure, middle * 1024, chips), way) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * 1024


def compile_long_text(model: Model, schedule: Schedule, length: int, mesh: Mesh) -> Compiled:
    """Compiles the pass that gives the losses of one text, cut over the context axis of `mesh`.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    config = model.config
    chunks = [n for n in range(1, config.vocab_size + 1) if config.vocab_size % n == 0]
    here = padded_length(length, mesh.shape["context"]) // mesh.shape["context"]
    enough = next(n for n in chunks if here * config.vocab_size // n <= LOGITS or n == config.vocab_size)
    read = Model(dataclasses.replace(config, remat="none", loss_chunks=max(enough, config.loss_chunks)), backward=False)

    def losses(params, tokens, targets, schedule):  # noqa: ANN001, ANN202
        with use_mesh(mesh, AxisRules()):
            return read.token_loss(params, {"tokens": tokens, "targets": targets}, schedule)

    everywhere = NamedSharding(mesh, PartitionSpec())

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    text = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=everywhere)
    start = time.perf_counter()
    lowered = jax.jit(losses).lower(jax.tree.map(shape, read.shapes), text, text, jax.tree.map(shape, schedule))
    return analyze(lowered, start)
