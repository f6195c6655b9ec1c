"""Attention as one would write it on a blackboard: the yardstick of every other implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pe_lab.attention.key_block import MASKED


def visible(
    query_index: Int[Array, " T"],
    key_index: Int[Array, " S"],
    query_segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    window: int | None,
) -> Bool[Array, "B_or_1 T S"]:
    """Which key a query may see: not later, within the window, in the same segment. Indices count tokens in the row."""
    distance = query_index[:, None] - key_index[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    mask = mask[None]
    if query_segments is not None and key_segments is not None:
        mask = mask & (query_segments[:, :, None] == key_segments[:, None, :])
    return mask


def reference_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    *,
    slope: Float[Array, " H"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
    window: int | None,
    diagonal_bias: Float[Array, "#B T"] | None = None,
    soft_cap: float | None = None,
    chunk: int = 0,
) -> Float[Array, "B T H K"]:
    """softmax(scale * q k^T - slope * distance + self_bias) v over visible keys, all [B, H, T, T] logits in float32.

    A soft cap is put on scale * q k^T, before anything is added.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    # Heads first: what XLA on a CPU multiplies fast, forward and backward alike.
    q = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    q = (q.astype(jnp.float32) * scale).astype(query.dtype)
    logits = jnp.einsum("bgmtk,bgsk->bgmts", q, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    index = jnp.arange(T)
    if slope is not None:
        positions = index[None] if positions is None else positions
        distance = (positions[:, :, None] - positions[:, None, :]).astype(jnp.float32)
        logits -= slope.reshape(G, H // G, 1, 1) * distance[:, None, None]
    if diagonal_bias is not None:
        logits += (jnp.eye(T) * diagonal_bias[:, None])[:, None, None]
    mask = visible(index, index, segments, segments, window)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, MASKED), axis=-1)
    out = jnp.einsum("bgmts,bgsk->bgmtk", weights.astype(value.dtype), v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K).astype(query.dtype)
