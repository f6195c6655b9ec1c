"""The memory of one chip to evaluate a sequence of many tokens, estimated from shapes or compiled."""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.evaluation.scoring.forward import CHUNK_ELSEWHERE
from pe_lab.model import Model
from pe_lab.model.cache import cache_bytes, cache_bytes_per_token
from pe_lab.model.loss import LOGITS
from pe_lab.parallel import AxisRules, padded_length, use_mesh
from pe_lab.planning.compiled_memory import Compiled, analyze
from pe_lab.positional import LayerStructure, Schedule


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes per chip of one sequence, without the weights.

    Attributes:
      cache: the KV cache of the whole sequence, on all chips together.
      at_once: activations of one pass, with the sequence sharded over the chips.
      in_chunks: the KV cache and the activations of one chunk, on one chip.
      decoding: the KV cache, sharded over the chips.
    """

    cache: int
    at_once: int
    in_chunks: int
    decoding: int


def weight_bytes(model: Model, shards: int) -> int:
    """Bytes of the weights of a chip in an evaluation, sharded over `shards`: float32, and a copy in bfloat16.

    The compiler casts the weights of all layers before it scans over them.
    """
    width = np.dtype(model.config.dtype).itemsize
    return model.num_parameters * (4 + (width if width < 4 else 0)) // shards


def sequence_memory(
    model: Model, structure: Sequence[LayerStructure], length: int, chips: int, shards: int = 1
) -> SequenceMemory:
    """The estimated memory of one sequence of `length` tokens on `chips` chips, with weights over `shards` of them."""
    config = model.config
    width = np.dtype(config.dtype).itemsize
    cache = cache_bytes(config, structure, length)
    parts = chips // shards
    here = padded_length(length, parts) // parts

    def activations(tokens: int, shards: int = 1) -> int:
        # The residual stream, its norm and a branch's output; queries, keys and values before and after rotation,
        # and the attention output; gate, up and their product. XLA frees one branch before it begins the other.
        attended = (3 * config.heads + 4 * config.kv_heads) * config.head_dim
        hidden = (3 if config.gated_mlp else 2) * config.d_ff
        logits = min(LOGITS, tokens * config.vocab_size // shards) * 4 * 2
        return tokens * width * (3 * config.d_model + max(attended, hidden) // shards) + logits

    # Ring attention holds two slices of a layer's keys and values: the current one, and the one being received.
    ring = 2 * here * cache_bytes_per_token(config) // shards if parts > 1 else 0
    in_chunks = cache + activations(min(CHUNK_ELSEWHERE, length))
    return SequenceMemory(cache, activations(here, shards) + ring, in_chunks, -(-cache // chips))


def longest(
    model: Model, structure: Sequence[LayerStructure], chips: int, available: int, mode: str, shards: int = 1
) -> int:
    """The largest length, a multiple of 1024, whose `mode` (a field of `SequenceMemory`) fits `available` bytes."""

    def needed(multiple: int) -> int:
        return getattr(sequence_memory(model, structure, multiple * 1024, chips, shards), mode)

    return 1024 * bisect.bisect_right(range(1, 2**30 // 1024 + 1), available, key=needed)


def compile_evaluation(model: Model, schedule: Schedule, length: int, mesh: Mesh) -> Compiled:
    """Compiles the pass that computes the losses of one sequence, sharded over the context axis of `mesh`.

    Weights are sharded over its tensor axis.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    evaluated = Model(dataclasses.replace(model.config, remat="none"), backward=False, hooks=schedule.hooks)

    def losses(params, tokens, targets, schedule):  # noqa: ANN001, ANN202
        with use_mesh(mesh, AxisRules()):
            return evaluated.token_loss(params, {"tokens": tokens, "targets": targets}, schedule)

    replicated = NamedSharding(mesh, PartitionSpec())

    def shape(x: Any, sharding: NamedSharding = replicated) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=replicated)
    start = time.perf_counter()
    shardings = parameter_shardings(evaluated, mesh, AxisRules())
    params, arrays = jax.tree.map(shape, evaluated.shapes, shardings), jax.tree.map(shape, schedule)
    lowered = jax.jit(losses).lower(params, tokens, tokens, arrays)
    return analyze(lowered, start)
