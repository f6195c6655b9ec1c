"""Which blocks of keys a block of queries sees, and the reverse: ranges of blocks for the loops of kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Sections(NamedTuple):
    """Blocks from `begin` to `end` are visible in part; from `whole_from` to `whole_to`, all keys to all queries.

    The second range may reach out of the first.
    """

    begin: Any
    whole_from: Any
    whole_to: Any
    end: Any

    def stacked(self) -> Int[Array, "*axes 4"]:
        """One array, for a kernel."""
        return jnp.stack(jnp.broadcast_arrays(*self), -1).astype(jnp.int32)


def _before(token: Any, size: int) -> Any:
    return jax.lax.div(jnp.maximum(token, 0), size)


def key_sections(
    first_query: jax.Array | int, last_query: jax.Array | int, used: jax.Array | int, window: int | None, size: int
) -> Sections:
    """The blocks of `size` keys that queries see, by index, of which keys up to `used` are used."""
    before = functools.partial(_before, size=size)
    end = before(jnp.minimum(last_query + 1, used) + size - 1)
    begin = 0 if window is None else jnp.minimum(before(first_query - window + 1), end)
    whole_from = 0 if window is None else before(last_query - window + size)
    return Sections(begin, whole_from, before(jnp.minimum(first_query + 1, used)), end)


def query_sections(
    first_key: jax.Array | int, last_key: jax.Array | int, start: jax.Array | int, used: jax.Array | int,
    window: int | None, size: int, count: int,
) -> Sections:  # fmt: skip
    """Of `count` blocks of `size` queries, of which the first one has the index `start`, those that see these keys."""
    before = functools.partial(_before, size=size)
    begin, end = before(first_key - start), jnp.where(used > first_key, count, 0)
    whole_from, whole_to = before(last_key - start + size - 1), jnp.where(used > last_key, count, 0)
    if window is not None:
        end = jnp.minimum(end, before(last_key + window - start + size - 1))
        whole_to = jnp.minimum(whole_to, before(first_key + window - start))
    return Sections(jnp.minimum(begin, end), whole_from, whole_to, end)


def ends_of_blocks(ids: Int[Array, "B tokens"], size: int) -> tuple[Int[Array, "B blocks"], Int[Array, "B blocks"]]:
    """The smallest and the largest id in each block of tokens."""
    blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), mode="edge").reshape(len(ids), -1, size)
    return blocks.min(-1), blocks.max(-1)


def within_documents(
    sections: Sections,
    tiles: tuple[Int[Array, "B tiles"], Int[Array, "B tiles"]],
    blocks: tuple[Int[Array, "B blocks"], Int[Array, "B blocks"]],
    whole_at_begin: bool = False,
) -> Sections:
    """Sections [B, tiles] without blocks of other documents at their begin and end.

    Right for any ids of documents; nothing is left out between two blocks of the same document.

    Args:
      tiles, blocks: the smallest and the largest id of each.
      whole_at_begin: the whole blocks next to the first one are kept whole; by default those next to the last one.
    """
    begin, whole_from, whole_to, end = (jnp.broadcast_to(x, tiles[0].shape)[..., None] for x in sections)
    (low, high), (block_low, block_high) = (x[..., None] for x in tiles), (x[:, None] for x in blocks)
    at = jnp.arange(block_low.shape[-1])
    visible = (at >= begin) & (at < end) & (low <= block_high) & (block_low <= high)
    end = jnp.where(visible, at + 1, 0).max(-1, keepdims=True)
    begin = jnp.where(visible, at, end).min(-1, keepdims=True)
    other = (at >= whole_from) & (at < whole_to) & ~((low == high) & (block_low == low) & (block_high == low))
    if whole_at_begin:
        whole_to = jnp.where(other, at, whole_to).min(-1, keepdims=True)
    else:
        whole_from = jnp.where(other, at + 1, whole_from).max(-1, keepdims=True)
    return Sections(*(x[..., 0] for x in (begin, whole_from, whole_to, end)))
