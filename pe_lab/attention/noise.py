"""DoPE-by-Gaussian: heads whose queries and keys are noise instead of what the layer projects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def replace_heads_by_noise(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    seeds: UInt32[Array, " H"],
    positions: Int[Array, "#B T"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"]]:
    """Heads with a seed other than 0 get Gaussian queries and keys (DoPE, eq. 36 and 37).

    The noise is as large as what is kept: its variance is that of the other heads' rotated components (of all heads,
    where none is kept). The paper takes it over the whole text; here it is taken token by token, so that a query
    knows nothing of later tokens, packed documents nothing of each other, and a cached decode equals a full pass.
    For the same reason the noise is a function of the head's seed and the token's position.
    """
    replaced = (seeds != 0)[:, None]
    kept = jnp.where(replaced.all(), jnp.ones_like(replaced), ~replaced)
    head_keys = jax.vmap(jax.random.key)(seeds)

    def noise(x: jax.Array, which: int) -> jax.Array:
        wide = x.astype(jnp.float32)
        count = kept.sum() * x.shape[-1]
        mean = (wide * kept).sum((-2, -1), keepdims=True) / count
        variance = (((wide - mean) ** 2) * kept).sum((-2, -1), keepdims=True) / count

        def draw(position: jax.Array, key: jax.Array) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, which), position), x.shape[-1:])

        drawn = jax.vmap(jax.vmap(jax.vmap(draw, (None, 0)), (0, None)), (0, None))(positions, head_keys)
        return jnp.where(replaced, jnp.sqrt(variance) * drawn, wide).astype(x.dtype)

    return noise(query, 0), noise(key, 1)
