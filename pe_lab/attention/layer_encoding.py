"""A layer's row of the schedule, and what it makes of queries and keys: the one place where they are turned."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pe_lab.attention.key_block import Rotation
from pe_lab.attention.noise import KEYS, QUERIES, replace_heads_by_noise
from pe_lab.errors import UserError
from pe_lab.positional import rotate


class Row(NamedTuple):
    """One layer's row of the schedule, as attention wants it. None = absent from the compiled program.

    Attributes:
      cos, sin: [B or 1, T, 1 or G or H, R] float32, gain included (see `positional.rotation_tables`). With H rows, keys
        are rotated once per query head; with G, queries of a group share their key head's row.
      slope: [H] ALiBi's penalty per token.
      logit_scale: scalar factor on the logits.
      noise: [H] seeds of heads whose queries and keys are noise, 0 = none; needs cos and sin of H rows.
      noise_sigma: scalar standard deviation of the noise; None or 0 = that of the other heads' components.
      self_bias: [B or 1, T] added to the logit of a token with itself.
      rotation: what cos and sin are made of, for kernels that turn keys themselves; None where positions are not
        indices, or more than a rotation makes them (the notebook's).
    """

    cos: Float[Array, "B T rows R"] | None = None
    sin: Float[Array, "B T rows R"] | None = None
    slope: Float[Array, " H"] | None = None
    logit_scale: Float[Array, ""] | None = None
    noise: UInt32[Array, " H"] | None = None
    noise_sigma: Float[Array, ""] | None = None
    diagonal_bias: Float[Array, "#B T"] | None = None
    rotation: Rotation | None = None


def encode_queries(
    query: Float[Array, "B T H K"], row: Row, groups: int, positions: Int[Array, "#B T"] | None
) -> Float[Array, "B T H K"]:
    """Queries as they meet keys: rotated, or noise; `groups` counts the key heads, positions of None count from 0."""
    H = query.shape[2]
    if row.cos is not None and row.sin is not None:
        cos, sin = row.cos, row.sin
        _check_rows(cos.shape[2], groups, H)
        if cos.shape[2] not in (1, H):
            cos, sin = jnp.repeat(cos, H // groups, axis=2), jnp.repeat(sin, H // groups, axis=2)
        query = rotate(query, cos, sin)
    return query if row.noise is None else replace_heads_by_noise(query, row.noise, positions, QUERIES, row.noise_sigma)


def encode_keys(
    key: Float[Array, "B T G K"], row: Row, num_heads: int, positions: Int[Array, "#B T"] | None
) -> Float[Array, "B T heads K"]:
    """Keys as queries meet them: rotated, once per query head (then of H heads) where heads of a group differ."""
    G = key.shape[2]
    if row.cos is not None and row.sin is not None:
        _check_rows(row.cos.shape[2], G, num_heads)
        if row.cos.shape[2] == num_heads != G:
            key = jnp.repeat(key, num_heads // G, axis=2)
        key = rotate(key, row.cos, row.sin)
    if row.noise is None:
        return key
    if key.shape[2] != num_heads:
        raise UserError("attention: heads can only become noise where keys are rotated per query head.")
    return replace_heads_by_noise(key, row.noise, positions, KEYS, row.noise_sigma)


def _check_rows(rows: int, groups: int, num_heads: int) -> None:
    if rows not in (1, groups, num_heads):
        raise UserError(
            f"attention: {rows} rows of rotations fit neither {groups} key heads nor {num_heads} query heads."
        )
