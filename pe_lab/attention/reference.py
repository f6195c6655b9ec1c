"""Attention by its formula: the standard that every other implementation is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pe_lab.attention.key_block import MASKED, AttentionInputs, Keys, Queries


def visible(length: int, inputs: AttentionInputs) -> Bool[Array, "#B T T"]:
    """Which keys each query of a sequence sees: none that is later, out of the window or in another segment."""
    index = jnp.arange(length)
    distance = index[:, None] - index[None, :]
    mask = distance >= 0
    if inputs.window is not None:
        mask &= distance < inputs.window
    mask = mask[None]
    if inputs.query_segments is not None and inputs.key_segments is not None:
        mask = mask & (inputs.query_segments[:, :, None] == inputs.key_segments[:, None, :])
    return mask


def alibi(length: int, inputs: AttentionInputs, kv_heads: int) -> Float[Array, "#B G M T T"] | None:
    """ALiBi's penalties, slope times distance; None without slopes."""
    if inputs.slope is None:
        return None
    positions = jnp.arange(length)[None] if inputs.query_positions is None else inputs.query_positions
    distance = (positions[:, :, None] - positions[:, None, :]).astype(jnp.float32)
    return inputs.slope.reshape(kv_heads, -1, 1, 1) * distance[:, None, None]


def reference_attention(query: Queries, key: Keys, value: Keys, inputs: AttentionInputs) -> Queries:
    """softmax(q k^T - slope * distance + diagonal_bias) v over visible keys, with [B, H, T, T] float32 logits.

    Args:
      query, key, value: of one sequence per row; queries and keys encoded, queries scaled.
      inputs: for queries and keys of the same tokens: without start, used, rotation and noise.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    # Heads first: XLA on a CPU multiplies this layout fast, forward and backward.
    q = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    logits = jnp.einsum("bgmtk,bgsk->bgmts", q, k, preferred_element_type=jnp.float32)
    penalty = alibi(T, inputs, G)
    if penalty is not None:
        logits -= penalty
    if inputs.diagonal_bias is not None:
        logits += (jnp.eye(T) * inputs.diagonal_bias[:, None])[:, None, None]
    mask = visible(T, inputs)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, MASKED), axis=-1)
    out = jnp.einsum("bgmts,bgsk->bgmtk", weights.astype(value.dtype), v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K).astype(query.dtype)
