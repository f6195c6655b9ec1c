"""Biases on blocks of logits: functions of positions, and tables by distance with their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pe_lab.errors import ConfigError
from pe_lab.positional import LayerHooks
from pe_lab.positional.hooks import call_for_array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PositionBias:
    """The sum of the `bias` hooks of a layer. A pytree: `hooks` are static, `params` are theirs."""

    params: tuple[Any, ...]
    hooks: tuple[LayerHooks, ...] = field(metadata={"static": True})

    def block(
        self, query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"], num_heads: int
    ) -> Float[Array, "#B H T S"]:
        """The bias of a block of queries and keys, float32.

        Raises:
          ConfigError: a hook returned another shape; names its encoding.
        """

        def of_row(queries: jax.Array, keys: jax.Array) -> jax.Array:
            total = jnp.zeros((), jnp.float32)
            for (encoding, _, heads), params in zip(self.hooks, self.params, strict=True):
                found = call_for_array(encoding, "bias", params, queries, keys)
                wanted = (num_heads, *queries.shape, *keys.shape)
                if found.shape not in (wanted, (1, *wanted[1:])):
                    raise ConfigError(
                        f"{type(encoding).__name__}.bias returned shape {list(found.shape)} for {wanted[1]} queries "
                        f"and {wanted[2]} keys; it must return [H, T, S], which is {list(wanted)}, or [1, T, S]."
                    )
                total = total + on_heads(found.astype(jnp.float32), heads, num_heads)
            return jnp.broadcast_to(total, (num_heads, *queries.shape, *keys.shape))

        if query_positions.shape[0] == key_positions.shape[0] == 1:
            return of_row(query_positions[0], key_positions[0])[None]
        in_axes = tuple(None if x.shape[0] == 1 else 0 for x in (query_positions, key_positions))
        queries, keys = (x[0] if x.shape[0] == 1 else x for x in (query_positions, key_positions))
        return jax.vmap(of_row, in_axes)(queries, keys)


def chosen_heads(heads: tuple[int, ...], num_heads: int) -> Bool[np.ndarray, " H"]:
    """Which heads are meant; () is all."""
    return np.isin(np.arange(num_heads), heads) if heads else np.ones(num_heads, bool)


def on_heads(x: Float[Array, " H *axes"], heads: tuple[int, ...], num_heads: int) -> Float[Array, " H *axes"]:
    """`x` on the given heads, and 0 on the others; () is all heads."""
    if not heads:
        return x
    return jnp.where(chosen_heads(heads, num_heads).reshape(-1, *[1] * (x.ndim - 1)), x, 0)


# A table by distance [H, D] is extended on both sides, so that a block of logits takes one slice of it: distances below
# 0, which the causal mask hides, and those of D and more, which have its last entry.


def extended(table: Float[Array, "H D"], t: int, s: int) -> Float[Array, "H extended"]:
    """A table by distance, for `toeplitz_block`s of at most t queries and s keys."""
    return jnp.pad(table.astype(jnp.float32), ((0, 0), (t + s, t + s)), mode="edge")


def _place(extended: jax.Array, first: jax.Array, t: int, s: int) -> jax.Array:
    """Where the slice of a block starts; all slices beyond the table are equal."""
    return jnp.clip(first + t + 1, 0, extended.shape[1] - (t + s - 1))


def _toeplitz(part: Float[Array, "H distances"], t: int, s: int) -> Float[Array, "H t s"]:
    """Entry [a, b] is part[a - b + s - 1]: every row is the row before, shifted by one.

    A flat array that repeats with period L, cut into rows of L - 1, shifts each row by one. This is a copy, where
    indexing would be a gather.
    """
    H, period = part.shape[0], t + s
    backward = jnp.pad(part[:, ::-1], ((0, 0), (0, 1)))
    backward = jnp.roll(backward, -(t - 1), axis=1)
    flat = jnp.broadcast_to(backward[:, None], (H, t, period)).reshape(H, t * period)
    return flat[:, : t * (period - 1)].reshape(H, t, period - 1)[:, :, :s]


def toeplitz_block(
    extended: Float[Array, "H extended"], first: Int[Array, ""], t: int, s: int
) -> Float[Array, "H t s"]:
    """The bias of t queries and s keys; the first query is `first` tokens after the first key."""
    part = jax.lax.dynamic_slice_in_dim(extended, _place(extended, first, t, s), t + s - 1, axis=1)
    return _toeplitz(part, t, s)


def add_diagonal_sums(
    sums: Float[Array, "H extended"], d_logits: Float[Array, "H t s"], first: Int[Array, ""]
) -> Float[Array, "H extended"]:
    """`sums` plus the sums over a block's diagonals: the gradient of `toeplitz_block`."""
    H, t, s = d_logits.shape
    shape = jax.ShapeDtypeStruct((H, t + s - 1), jnp.float32)
    (diagonals,) = jax.linear_transpose(lambda part: _toeplitz(part, t, s), shape)(d_logits.astype(jnp.float32))
    at = _place(sums, first, t, s)
    before = jax.lax.dynamic_slice_in_dim(sums, at, t + s - 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(sums, before + diagonals, at, axis=1)


def table_gradient(sums: Float[Array, "H extended"], t: int, s: int) -> Float[Array, "H D"]:
    """The gradient of the table, from that of its extension."""
    inner, beyond = sums[:, t + s : sums.shape[1] - (t + s)], sums[:, sums.shape[1] - (t + s) :]
    return inner.at[:, -1].add(beyond.sum(1))


class Diagonals(NamedTuple):
    """The diagonals of square blocks of logits whose sums are the gradient of a table by distance.

    All blocks of diagonal n have the distances n * side + row - column.

    Attributes:
      side: of a block.
      entries: of the table, but the last.
      needed: entries that any query can need.
      count: diagonals that are summed.
      first: [1] the number of the first one.
    """

    side: int
    entries: int
    needed: int
    count: int
    first: Int[Array, " 1"]

    def table(self, sums: Float[Array, "H count distances"]) -> Float[Array, "H entries"]:
        """Entries of a table from the sums of each diagonal by row - column, from 1 - side to side - 1."""
        side = self.side
        sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0)))  # and of -side, which is 0
        # The negative distances of a block are those of the block before.
        total = sums[..., side:] + jnp.pad(sums[:, 1:, :side], ((0, 0), (0, 1), (0, 0)))
        total = jnp.concatenate([sums[:, 0, :side], total.reshape(len(sums), -1)], axis=1)
        every = max(self.count, -(-(self.needed - 1 + side) // side))
        zeros = jnp.zeros((len(sums), (every + 1) * side), jnp.float32)
        total = jax.lax.dynamic_update_slice(zeros, total, (0, self.first[0] * side))[:, side:]
        total = total[:, : self.needed]
        return jnp.pad(total, ((0, 0), (0, self.entries - self.needed)))


def diagonals(
    entries: int, queries: int, keys: int, side: int, window: int | None, start: Int[Array, "#B"] | None
) -> Diagonals:
    """The diagonals for a table of so many entries beside the last; `start` is the index of the first query."""
    needed = entries if window is None else min(entries, window)
    needed = min(needed, queries) if start is None else needed
    count, first = -(-(needed - 1 + side) // side) if needed else 0, jnp.zeros(1, jnp.int32)
    if start is not None and start.shape[0] == 1:
        # All sequences have distances from start - keys + 1 to start + queries - 1.
        every, count = count, min(count, -(-(keys + queries) // side) + 2)
        first = jnp.clip((start.astype(jnp.int32) - keys) // side, 0, every - count)
    return Diagonals(side, entries, needed, count, first)
