"""DoPE-by-Gaussian: heads whose projected queries and keys are replaced by noise."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

QUERIES, KEYS = 0, 1  # values of `which`


def replace_heads_by_noise(
    x: Float[Array, "B T H K"],
    seeds: UInt32[Array, " H"],
    positions: Int[Array, "#B T"] | None,
    which: int,
    sigma: Float[Array, ""] | None = None,
) -> Float[Array, "B T H K"]:
    """Replaces the queries or keys of heads with a seed other than 0 by Gaussian noise (DoPE, eq. 36 and 37).

    The variance of the noise is that of the other heads' rotated components (of all heads, if none is kept). The paper
    takes it over the whole sequence. Here it is taken token by token, and the noise is a function of the head's seed
    and the token's position: so a query does not depend on later tokens, packed documents are independent, and cached
    decoding equals a full pass.

    Args:
      x: queries or keys of every query head, rotated.
      seeds: 0 = the head is kept.
      positions: of the tokens; None counts from 0.
      which: QUERIES or KEYS; their noise differs.
      sigma: see `noise_size`.
    """
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    channels = jnp.arange(x.shape[-1], dtype=jnp.int32)
    noise = noise_size(x, seeds, sigma)[:, :, None, None] * gaussian(
        seeds[:, None], which, positions[:, :, None, None], channels
    )
    return jnp.where((seeds != 0)[:, None], noise, x.astype(jnp.float32)).astype(x.dtype)


def noise_size(
    x: Float[Array, "B T H K"], seeds: UInt32[Array, " H"], sigma: Float[Array, ""] | None = None
) -> Float[Array, "B T"]:
    """The standard deviation of each token's components over the heads that are kept, float32; `sigma` if above 0."""
    replaced = (seeds != 0)[:, None]
    kept = jnp.where(replaced.all(), jnp.ones_like(replaced), ~replaced)
    wide = x.astype(jnp.float32)
    count = kept.sum() * x.shape[-1]
    mean = (wide * kept).sum((-2, -1), keepdims=True) / count
    size = jnp.sqrt((((wide - mean) ** 2) * kept).sum((-2, -1)) / count)
    return size if sigma is None else jnp.where(sigma > 0, sigma, size)


def gaussian(seed: Any, which: int, position: Any, channel: Any) -> jax.Array:
    """A standard normal number for each seed, position and channel, which broadcast; float32.

    A hash of the three arguments and Box-Muller: a kernel computes the same numbers as XLA, for any block.
    """
    word = lambda x: jnp.asarray(x).astype(jnp.uint32)  # noqa: E731
    of_token = _mixed(_mixed(word(seed) + jnp.uint32(0x9E3779B9 * which & 0xFFFFFFFF)) + word(position))
    of_channel = _mixed(of_token ^ (word(channel) * jnp.uint32(0x9E3779B1)))
    first, second = _mixed(of_channel + jnp.uint32(0x7F4A7C15)), _mixed(of_channel + jnp.uint32(0xBF58476D))
    # 24 bits each, the precision of float32; the first number is in (0, 1], so that its logarithm is finite.
    unit = lambda x: (x >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24  # noqa: E731
    return jnp.sqrt(-2 * jnp.log(unit(first) + 2.0**-24)) * jnp.cos(2 * math.pi * unit(second))


def _mixed(x: jax.Array) -> jax.Array:
    """A pseudo-random permutation of the 32-bit words (Wellons 2018, `lowbias32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
