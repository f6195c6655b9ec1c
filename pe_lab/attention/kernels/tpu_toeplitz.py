"""A bias by distance in the TPU kernels: Toeplitz blocks from a table, and sums of a block along its diagonals.

A block of logits has keys down and queries across, so that the distance at [k, q] is the block's first distance plus
q - k. A block is made from the part of the table that it needs, by rotations of lanes: by 8 rows at once, and a row of
a tile after another by powers of two. Each 128 rows of a block then are the same array, 128 lanes further.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

LANES = 128
SUBLANES = 8


def _up(n: int) -> int:
    return -(-n // LANES) * LANES


def width(queries: int, keys: int) -> int:
    """How many entries of a table a block fetches: those of its distances, and what aligning to 128 entries costs."""
    return _up(keys + queries) + LANES


def padded_table(
    table: Float[Array, "H D"], heads: int, queries: int, keys: int
) -> Float[Array, "groups parts heads 128"]:
    """A table in parts of 128 entries, as far as blocks fetch it: from distances below 0 to where entries are equal.

    A block can be fetched from any part on, because parts are not an axis of the tiles of the memory.
    """
    H, D = table.shape
    table = table.astype(jnp.float32)
    first = jnp.zeros((H, _up(queries + keys)), jnp.float32)  # of keys after their query, which are not visible
    last = jnp.broadcast_to(table[:, -1:], (H, _up(D) - D + width(queries, keys)))
    table = jnp.concatenate([first, table, last], axis=1)
    return table.reshape(H // heads, heads, -1, LANES).swapaxes(1, 2)


def place(first: Int[Array, ""], queries: int, keys: int) -> Any:
    """Where a block begins in the parts that it fetches; `first`: distance of its first query from its first key."""
    return jax.lax.rem(_begin(first, queries, keys), LANES)


def _begin(first: Int[Array, ""], queries: int, keys: int) -> Any:
    """The entry of a padded table `keys` before that of the first distance."""
    return jnp.maximum(first - keys + _up(queries + keys), 0)


def fetched(table: Float[Array, "groups parts heads 128"], queries: int, keys: int) -> tuple[Any, ...]:
    """The shape of the block of a padded table that a block of logits needs."""
    parts = width(queries, keys) // LANES
    return pl.Squeezed(), pl.Element(parts), pl.Element(table.shape[2]), pl.Element(LANES)


def part(table: Float[Array, "groups parts heads 128"], first: Int[Array, ""], queries: int, keys: int) -> Any:
    """The first of the parts that a block of logits needs; `first` as in `place`."""
    # Beyond the last part, all entries are the last one: the block's place in the part does not matter.
    last = table.shape[1] - width(queries, keys) // LANES
    return jnp.minimum(jax.lax.div(_begin(first, queries, keys), LANES), last)


def _rolled_by_row(x: Float[Array, "8 W"], left: bool) -> Float[Array, "8 W"]:
    """Line r of 8, rotated by r lanes."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((row & bit) != 0, pltpu.roll(x, x.shape[1] - bit if left else bit, 1), x)
    return x


def toeplitz(ref: Any, head: int, begin: Any, queries: int, keys: int) -> Float[Array, "keys queries"]:
    """The biases of a block from the fetched parts [parts, heads, 128] of the table; `begin` is its `place`."""
    parts = ref.shape[0]
    entries = jnp.concatenate([ref[n, head : head + 1, :] for n in range(parts)], axis=1)
    wide = parts * LANES
    x = pltpu.roll(jnp.broadcast_to(entries, (SUBLANES, wide)), jax.lax.rem(wide - begin, wide), 1)
    x = _rolled_by_row(x, left=False)
    x = jnp.concatenate([pltpu.roll(x, row, 1) if row else x for row in range(0, LANES, SUBLANES)], axis=0)
    # x[r, n] is entry n - r of the block.
    return jnp.concatenate([x[:, n : n + queries] for n in range(keys, 0, -LANES)], axis=0)


def diagonal_sums(block: Float[Array, "keys queries"]) -> Float[Array, "1 both"]:
    """The sums of a block along its diagonals: entry n is that of q - k = n - keys."""
    keys, queries = block.shape
    total = 0.0
    for n in range(0, keys, LANES):
        left, right = (jnp.zeros((LANES, size), jnp.float32) for size in (keys - n, n))
        total += jnp.concatenate([left, block[n : n + LANES], *([right] if n else [])], axis=1)
    wide, x = keys + queries, 0.0
    for row in range(0, LANES, SUBLANES):
        part = total[row : row + SUBLANES]
        x += pltpu.roll(part, wide - row, 1) if row else part
    return _rolled_by_row(x, left=True).sum(0, keepdims=True)
