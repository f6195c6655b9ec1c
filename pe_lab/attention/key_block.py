"""Attention of a span of queries to a span of keys: what a kernel is asked for, what it gives back, and merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

MASKED = -1e30  # the logit of what is not seen: finite, so that a block without any visible key stays a number
FLOOR = -5e29  # where running maxima begin: above MASKED, so that what is not seen has a weight of exactly zero


class Rotation(NamedTuple):
    """What turns keys inside a kernel: frequencies in fixed point and amplitudes, in 1, G or H rows.

    Rotations are relative: a kernel may count positions from any origin, and takes the index of a key in its span.
    """

    fixed_freq: UInt32[Array, "rows R 2"]
    gain: Float[Array, "rows R"]


class Noise(NamedTuple):
    """Query heads whose keys a kernel replaces by Gaussian noise (DoPE); their queries are noise already.

    Attributes:
      seeds: of each query head; 0 = none.
      size: [B, S] the standard deviation of a key's noise.
    """

    seeds: UInt32[Array, " H"]
    size: Float[Array, "B S"]


class Side(NamedTuple):
    """What stands beside queries, keys and values. None = absent from the compiled program.

    Attributes:
      start: the index of a row's first query, counted from its key 0; negative where its keys are later. None: 0.
      used: keys of a row from this index on are not there, whatever they hold. None: all are.
      slope: [H] ALiBi's penalty per token.
      query_positions, key_positions: what ALiBi's distances are between; None: the indices.
      query_segments, key_segments: document of each token; a query sees keys of its own only.
      rotation: keys come as they were projected, and are to be turned to their index; queries are turned already.
      noise: keys that are to be noise, a function of their index; only where each query head turns keys its own way.
    """

    start: Int[Array, " B"] | None = None
    used: Int[Array, " B"] | None = None
    slope: Float[Array, " H"] | None = None
    query_positions: Int[Array, "B T"] | None = None
    key_positions: Int[Array, "B S"] | None = None
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    rotation: Rotation | None = None
    noise: Noise | None = None


class Partial(NamedTuple):
    """Attention to some of the keys, and what is needed to merge it with attention to others.

    Attributes:
      out: what the keys seen here add up to, divided by their own sum of weights; 0 where none is seen.
      log_sum: log of the sum over visible keys of exp(logit), float32; MASKED where none is seen.
    """

    out: Float[Array, "B H T K"]
    logsumexp: Float[Array, "B H T"]


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention to all keys from attention to disjoint parts of them (Dao 2023, flash-decoding); `out` in float32."""
    logsumexps = jnp.stack([part.logsumexp for part in parts])
    highest = logsumexps.max(0)
    weights = jnp.exp(logsumexps - highest)
    total = weights.sum(0)
    out = sum(w[..., None] * part.out.astype(jnp.float32) for w, part in zip(weights, parts, strict=True))
    # Where no part sees a key all weights are 1 and all outputs 0; the log-sum-exp must not rise by log(parts).
    logsumexp = jnp.where(highest > FLOOR, highest + jnp.log(total), MASKED)
    return Partial(out / total[..., None], logsumexp)
