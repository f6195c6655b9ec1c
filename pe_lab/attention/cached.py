"""Causal attention of a few new tokens to those before them, whose keys and values a cache holds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pe_lab.attention.key_block import MASKED
from pe_lab.attention.layer_encoding import Row, encode_keys, encode_queries
from pe_lab.errors import UserError


class Past(NamedTuple):
    """A layer's part of a cache, as attention reads it.

    Attributes:
      key, value: [L, B, G, S, K]: the caches of L layers in one array, heads before slots, so that what one head reads
        lies together. Keys have H heads where they were rotated once per query head.
      layer: which of the L.
      positions: [B or 1, S] the position of the token in each slot; negative where there is none. Only this decides
        what is seen: whatever lies in an empty slot, NaN included, changes nothing.
      used: no slot from here on holds anything; blocks beyond are not computed.
      row: where keys were cached as they were projected, what rotates them on the way: cos and sin of every slot
        [B or 1, S, rows, R], and noise. None where they were cached rotated.
    """

    key: Float[Array, "L B heads S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int
    positions: Int[Array, "#B S"]
    used: Int[Array, ""]
    row: Row | None = None


class _Partial(NamedTuple):
    """A softmax under way: the highest logit so far, the sum of weights and of weighted values relative to it."""

    highest: Float[Array, "B G M C"]
    total: Float[Array, "B G M C"]
    out: Float[Array, "B G M C K"]


def cached_attention(
    query: Float[Array, "B C H K"],
    key: Float[Array, "B C heads K"],
    value: Float[Array, "B C G K"],
    past: Past,
    row: Row,
    *,
    positions: Int[Array, "#B C"],
    window: int | None = None,
    block: int = 512,
) -> Float[Array, "B C H K"]:
    """Attention of C new tokens of each row to the cached ones and, causally, to each other.

    What `attention` computes for the last C tokens of a text, with an online softmax over blocks of the cache (Milakov
    & Gimelshein 2018): memory follows the block, and time the text, not the capacity. Whether the new tokens lie in
    the cache already makes no difference, as long as `past.positions` does not name them. A row's tokens that are only
    padding come last, where none of its others sees them.

    Args:
      query, value: of the new tokens, not rotated, not scaled.
      key: of the new tokens, from `encode_keys`.
      past: what was cached before.
      row: this layer's part of the schedule, at the new tokens' positions.
      positions: of the new tokens: consecutive within a row, and above all that its cache holds.
      window: a query sees the last `window` tokens, itself included; None sees all.
      block: slots that are read at once.

    Returns:
      [B, C, H, K] in the dtype of `query`.
    """
    B, C, H, K = query.shape
    G = value.shape[2]
    if H % G:
        raise UserError(f"attention: {H} query heads do not divide into {G} key-value heads.")
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    q = (encode_queries(query, row, G, positions).astype(jnp.float32) * scale).astype(query.dtype)
    q = q.transpose(0, 2, 1, 3).reshape(B, G, H // G, C, K)
    slope = None if row.slope is None else row.slope.reshape(G, H // G, 1, 1)

    # The chunk itself comes first: every query sees at least its own key there, so no sum of weights is ever zero.
    distance = jnp.arange(C)[:, None] - jnp.arange(C)
    own = _logits(q, key.transpose(0, 2, 1, 3))
    if slope is not None:
        own -= slope * distance.astype(jnp.float32)
    if row.diagonal_bias is not None:
        own += (jnp.eye(C) * row.diagonal_bias[:, :, None])[:, None, None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    own = jnp.where(seen, own, MASKED)
    highest = own.max(-1)
    weights = jnp.exp(own - highest[..., None])
    start = _Partial(highest, weights.sum(-1), _weighted(weights, value.transpose(0, 2, 1, 3)))

    slots = past.key.shape[3]
    block = min(block, slots)

    def add_block(j: jax.Array, partial: _Partial) -> _Partial:
        # The last block of a cache that is no multiple of it begins earlier; what was seen already is masked.
        first = jnp.minimum(j * block, slots - block)
        at = jax.lax.dynamic_slice_in_dim(past.positions, first, block, axis=1)
        at = jnp.where(first + jnp.arange(block) >= j * block, at, -1)
        k, v = _block(past.key, past.layer, first, block), _block(past.value, past.layer, first, block)
        if past.row is not None:
            k = encode_keys(k.transpose(0, 2, 1, 3), _slots_of(past.row, first, block), H, at).transpose(0, 2, 1, 3)
        return _add(partial, q, k, v, at, positions, slope, window)

    result = jax.lax.fori_loop(0, (past.used + block - 1) // block, add_block, start)
    out = (result.out / result.total[..., None]).reshape(B, H, C, K).transpose(0, 2, 1, 3)
    return out.astype(query.dtype)


def _block(x: jax.Array, layer: jax.Array | int, first: jax.Array, block: int) -> Float[Array, "B heads S K"]:
    """One block of one layer's cache, without a copy of the layer's whole."""
    zero = jnp.zeros((), jnp.int32)
    sizes = (1, *x.shape[1:3], block, x.shape[4])
    return jax.lax.dynamic_slice(x, (jnp.asarray(layer, jnp.int32), zero, zero, first, zero), sizes)[0]


def _slots_of(row: Row, first: jax.Array, block: int) -> Row:
    """The part of the slots' rotations that one block needs."""
    if row.cos is None or row.sin is None:
        return row
    cos, sin = (jax.lax.dynamic_slice_in_dim(x, first, block, axis=1) for x in (row.cos, row.sin))
    return row._replace(cos=cos, sin=sin)


def _logits(q: Float[Array, "B G M C K"], k: Float[Array, "B heads S K"]) -> Float[Array, "B G M C S"]:
    B, G, M, C, K = q.shape
    # Query heads that share a key are so many more queries to the matrix product.
    q = q.reshape(B, k.shape[1], -1, K)
    logits = jnp.einsum("bgtk,bgsk->bgts", q, k, preferred_element_type=jnp.float32)
    return logits.reshape(B, G, M, C, k.shape[2])


def _weighted(weights: Float[Array, "B G M C S"], v: Float[Array, "B G S K"]) -> Float[Array, "B G M C K"]:
    B, G, M, C, S = weights.shape
    weights = weights.reshape(B, G, M * C, S).astype(v.dtype)
    out = jnp.einsum("bgts,bgsk->bgtk", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(B, G, M, C, v.shape[3])


def _add(
    partial: _Partial,
    q: Float[Array, "B G M C K"],
    k: Float[Array, "B heads S K"],
    v: Float[Array, "B G S K"],
    at: Int[Array, "#B S"],
    positions: Int[Array, "#B C"],
    slope: Float[Array, "G M 1 1"] | None,
    window: int | None,
) -> _Partial:
    """The softmax with one more block of keys, which stand at positions `at`."""
    distance = positions[:, :, None] - at[:, None, :]
    logits = _logits(q, k)
    if slope is not None:
        logits -= slope * distance[:, None, None].astype(jnp.float32)
    seen: Bool[Array, "#B C S"] = (at >= 0)[:, None] & (distance > 0)
    if window is not None:
        seen &= distance < window
    logits = jnp.where(seen[:, None, None], logits, MASKED)
    highest = jnp.maximum(partial.highest, logits.max(-1))
    # A masked logit is so far below the query's own that its weight is exactly zero. Zero times NaN would be NaN.
    weights, shrink = jnp.exp(logits - highest[..., None]), jnp.exp(partial.highest - highest)
    update = _weighted(weights, jnp.where((at >= 0)[:, None, :, None], v, 0))
    return _Partial(highest, partial.total * shrink + weights.sum(-1), partial.out * shrink[..., None] + update)
