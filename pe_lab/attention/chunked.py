"""Attention in blocks, with memory linear in the length, forward and backward (Rabe & Staats 2021, Dao et al. 2022)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention.reference import MASKED


class _Side(NamedTuple):
    """What blocks need beside q, k and v. None = absent."""

    slope: Float[Array, "G M"] | None
    positions: Int[Array, "B T"] | None
    segments: Int[Array, "B T"] | None
    self_bias: Float[Array, "B T"] | None


def chunked_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    *,
    slope: Float[Array, " H"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
    window: int | None,
    self_bias: Float[Array, "#B T"] | None = None,
    chunk: int = 512,
) -> Float[Array, "B T H K"]:
    """The reference's result, one [chunk, chunk] block of logits at a time; blocks nobody sees are skipped.

    Any length is served: the last block is padded with tokens later than all others, which causality hides.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    chunk = min(chunk, T)
    pad = -T % chunk
    q = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    q = (q.astype(jnp.float32) * scale).astype(query.dtype)
    if pad:
        q = jnp.pad(q, ((0, 0),) * 3 + ((0, pad), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
        positions = None if positions is None else jnp.pad(positions, ((0, 0), (0, pad)), mode="edge")
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, pad)))
        self_bias = None if self_bias is None else jnp.pad(self_bias, ((0, 0), (0, pad)))
    side = _Side(None if slope is None else slope.reshape(G, H // G), positions, segments, self_bias)
    out = _blocked(q, k, v, side, window, chunk)[:, :, :, :T]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K).astype(query.dtype)


def _block(x: jax.Array, index: jax.Array, chunk: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis)


def _block_logits(
    q: jax.Array, k: jax.Array, side: _Side, i: jax.Array, j: jax.Array, window: int | None, chunk: int
) -> Float[Array, "B G M C C"]:
    """Masked float32 logits of query block i against key block j; q and k are those blocks."""
    logits = jnp.einsum("bgmtk,bgsk->bgmts", q, k, preferred_element_type=jnp.float32)
    if side.slope is not None and side.positions is not None:
        at_q, at_k = _block(side.positions, i, chunk, 1), _block(side.positions, j, chunk, 1)
        distance = (at_q[:, :, None] - at_k[:, None, :]).astype(jnp.float32)
        logits -= side.slope[:, :, None, None] * distance[:, None, None]
    distance = (i - j) * chunk + jnp.arange(chunk)[:, None] - jnp.arange(chunk)[None, :]
    if side.self_bias is not None:
        own = _block(side.self_bias, i, chunk, 1)
        logits += jnp.where(distance == 0, own[:, :, None], 0)[:, None, None]
    mask = (distance >= 0)[None] if window is None else ((distance >= 0) & (distance < window))[None]
    if side.segments is not None:
        in_q, in_k = _block(side.segments, i, chunk, 1), _block(side.segments, j, chunk, 1)
        mask = mask & (in_q[:, :, None] == in_k[:, None, :])
    return jnp.where(mask[:, None, None], logits, MASKED)


def _first_key_block(i: jax.Array, window: int | None, chunk: int) -> jax.Array:
    return jnp.zeros_like(i) if window is None else jnp.maximum(0, (i * chunk - window + 1) // chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocked(
    q: Float[Array, "B G M T K"],
    k: Float[Array, "B G T K"],
    v: Float[Array, "B G T K"],
    side: _Side,
    window: int | None,
    chunk: int,
) -> Float[Array, "B G M T K"]:
    return _forward(q, k, v, side, window, chunk)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, side: _Side, window: int | None, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every query's logits [B, G, M, T]."""
    B, G, M, T, K = q.shape

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_i = _block(q, i, chunk, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = carry
            logits = _block_logits(q_i, _block(k, j, chunk, 2), side, i, j, window, chunk)
            new_highest = jnp.maximum(highest, logits.max(-1))
            # A row that has seen no visible key yet adds ones here; the first visible key (at the latest the token
            # itself, in the last block) scales them to exactly zero.
            weights = jnp.exp(logits - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            update = jnp.einsum(
                "bgmts,bgsk->bgmtk",
                weights.astype(v.dtype),
                _block(v, j, chunk, 2),
                preferred_element_type=jnp.float32,
            )
            return new_highest, total * shrink + weights.sum(-1), out * shrink[..., None] + update

        start = (
            jnp.full((B, G, M, chunk), MASKED, jnp.float32),
            jnp.zeros((B, G, M, chunk), jnp.float32),
            jnp.zeros((B, G, M, chunk, K), jnp.float32),
        )
        highest, total, out = jax.lax.fori_loop(_first_key_block(i, window, chunk), i + 1, key_block, start)
        return (out / total[..., None]).astype(q.dtype), highest + jnp.log(total)

    out, log_sum = jax.lax.map(query_block, jnp.arange(T // chunk))  # [T/C, B, G, M, C, ...]
    return jnp.moveaxis(out, 0, 3).reshape(q.shape), jnp.moveaxis(log_sum, 0, 3).reshape(q.shape[:-1])


def _forward_rule(q, k, v, side, window, chunk):  # noqa: ANN001, ANN202
    out, log_sum = _forward(q, k, v, side, window, chunk)
    return out, (q, k, v, side, out, log_sum)


def _backward_rule(window, chunk, saved, d_out):  # noqa: ANN001, ANN202
    q, k, v, side, out, log_sum = saved
    T = q.shape[3]
    # sum_s p_ts dp_ts = sum_k do_tk o_tk: the softmax's own term in its gradient.
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def query_block(d_kv: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q_i, d_out_i = _block(q, i, chunk, 3), _block(d_out, i, chunk, 3)
        log_sum_i, inner_i = _block(log_sum, i, chunk, 3), _block(inner, i, chunk, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = carry
            k_j, v_j = _block(k, j, chunk, 2), _block(v, j, chunk, 2)
            p = jnp.exp(_block_logits(q_i, k_j, side, i, j, window, chunk) - log_sum_i[..., None])
            d_p = jnp.einsum("bgmtk,bgsk->bgmts", d_out_i, v_j, preferred_element_type=jnp.float32)
            d_logits = (p * (d_p - inner_i[..., None])).astype(q.dtype)
            p = p.astype(q.dtype)
            d_q += jnp.einsum("bgmts,bgsk->bgmtk", d_logits, k_j, preferred_element_type=jnp.float32)
            d_k_j = jnp.einsum("bgmts,bgmtk->bgsk", d_logits, q_i, preferred_element_type=jnp.float32)
            d_v_j = jnp.einsum("bgmts,bgmtk->bgsk", p, d_out_i, preferred_element_type=jnp.float32)
            at = (0, 0, j * chunk, 0)
            d_k = jax.lax.dynamic_update_slice(d_k, _block(d_k, j, chunk, 2) + d_k_j, at)
            d_v = jax.lax.dynamic_update_slice(d_v, _block(d_v, j, chunk, 2) + d_v_j, at)
            return d_q, d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), *d_kv)
        d_q, d_k, d_v = jax.lax.fori_loop(_first_key_block(i, window, chunk), i + 1, key_block, start)
        return (d_k, d_v), d_q.astype(q.dtype)

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = jax.lax.scan(query_block, zeros, jnp.arange(T // chunk))
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(q.shape)
    # The schedule is outside the gradient: nothing flows to `side`.
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), jax.tree.map(_no_gradient, side)


def _no_gradient(x: jax.Array) -> jax.Array | np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


_blocked.defvjp(_forward_rule, _backward_rule)
