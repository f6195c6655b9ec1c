"""Attention by its formula: the standard that every other implementation is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.bias import extended, toeplitz_block
from pe_lab.attention.key_block import (
    MASKED,
    AttentionInputs,
    Keys,
    Outputs,
    Queries,
    Values,
    capped,
    heads_of_groups,
    visible,
)


def added_to_logits(
    distance: Int[Array, "T S"], first: Int[Array, ""] | int, num_heads: int, inputs: AttentionInputs
) -> Float[Array, "#B H #T S"] | None:
    """The sum of ALiBi's penalties and of all biases, for queries of which the first has the index `first`."""
    T, S = distance.shape
    terms = []
    if inputs.slope is not None or inputs.bias is not None:
        queries, keys = (first + jnp.arange(T))[None], jnp.arange(S)[None]
        if inputs.query_positions is not None and inputs.key_positions is not None:
            queries, keys = inputs.query_positions, inputs.key_positions
        if inputs.slope is not None:
            far = (queries[:, :, None] - keys[:, None, :]).astype(jnp.float32)
            terms.append(-inputs.slope[:, None, None] * far[:, None])
        if inputs.bias is not None:
            terms.append(inputs.bias.block(queries, keys, num_heads))
    if inputs.distance_bias is not None:
        terms.append(toeplitz_block(extended(inputs.distance_bias, T, S), jnp.asarray(first), T, S)[None])
    if inputs.key_bias is not None:
        terms.append(inputs.key_bias[:, :, None].astype(jnp.float32))
    return sum(terms) if terms else None


def reference_attention(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
    """softmax(q k^T - slope * distance + biases) v over visible keys, with [B, H, T, T] float32 logits.

    Args:
      query, key, value: of one sequence per row; queries and keys encoded, queries scaled.
      inputs: for queries and keys of the same tokens: without start, used and rotation.
    """
    return attention_to_all(query, key, value, inputs, 0)


def attention_to_all(
    query: Queries,
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    inputs: AttentionInputs,
    first: Int[Array, ""] | int,
) -> Outputs:
    """`reference_attention` of some queries, of which the first has the index `first`, to all keys."""
    B, T, H, K = query.shape
    S, G = key.shape[1:3]
    # Heads first: XLA on a CPU multiplies this layout fast, forward and backward.
    q = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    logits = jnp.einsum("bgmtk,bgsk->bgmts", q, k, preferred_element_type=jnp.float32)
    logits = capped(logits, inputs.soft_cap)
    distance = first + jnp.arange(T)[:, None] - jnp.arange(S)[None, :]
    added = added_to_logits(distance, first, H, inputs)
    if added is not None:
        logits += heads_of_groups(added, G)
    logits = jnp.where(visible(distance, inputs)[:, None, None], logits, MASKED)
    if inputs.logit_functions is not None:
        logits = inputs.logit_functions.apply(logits.reshape(B, H, T, S)).reshape(logits.shape)
    weights = softmax(logits, inputs.sink)
    out = jnp.einsum("bgmts,bgsk->bgmtk", weights.astype(value.dtype), v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1).astype(query.dtype)


def softmax(logits: Float[Array, "B G M T S"], sink: Float[Array, " H"] | None) -> Float[Array, "B G M T S"]:
    """The softmax over keys, with a logit per head more in its denominator."""
    if sink is None:
        return jax.nn.softmax(logits, axis=-1)
    column = jnp.broadcast_to(sink.astype(jnp.float32).reshape(*logits.shape[1:3], 1, 1), (*logits.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]
