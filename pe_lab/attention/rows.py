"""Attention whose logits are replaced by a function of all logits of a query (`Encoding.logits`)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pe_lab.attention.key_block import AttentionInputs, Keys, Outputs, Queries, Values, padded
from pe_lab.attention.reference import attention_to_all


def attention_by_rows(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
    """`reference_attention`, one block of queries against all keys at a time.

    A block's logits are computed again for the gradient, so that memory is that of [chunk, T] logits.
    """
    B, T, H, K = query.shape
    chunk = min(inputs.chunk, T)
    rows = inputs.rows
    raw = None if rows is None else padded(rows.query, 1, chunk)
    padded_query = padded(query, 1, chunk)

    @jax.checkpoint
    def block(i: Int[Array, ""]) -> Queries:
        first = i * chunk
        part = jax.lax.dynamic_slice_in_dim(padded_query, first, chunk, axis=1)
        one = inputs.of_tokens(
            lambda x: jax.lax.dynamic_slice_in_dim(padded(x, 1, chunk), first, chunk, axis=1), lambda x: x
        )
        if rows is not None and raw is not None:
            one = replace(one, rows=replace(rows, query=jax.lax.dynamic_slice_in_dim(raw, first, chunk, axis=1)))
        return attention_to_all(part, key, value, one, first)

    out = jax.lax.map(block, jnp.arange(padded_query.shape[1] // chunk))  # [blocks, B, chunk, H, V]
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, H, value.shape[-1])[:, :T]
