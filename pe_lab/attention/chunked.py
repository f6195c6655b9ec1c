"""Attention in blocks, with memory linear in the length, forward and backward (Rabe & Staats 2021, Dao et al. 2022)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import FLOOR, MASKED, Partial, Side
from pe_lab.positional import rotate, rotation_tables


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
    diagonal_bias: Float[Array, "#B T"] | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
) -> Float[Array, "B T H K"]:
    """The reference's result, one [chunk, chunk] block of logits at a time; blocks nobody sees are skipped."""
    q = (query.astype(jnp.float32) * scale).astype(query.dtype)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, key, value))
    beside = _Beside(None, None, slope, positions, positions, segments, segments, diagonal_bias)
    out = _attend(q, k, v, beside, _Static(window, soft_cap, chunk))[0]
    return out.transpose(0, 2, 1, 3).astype(query.dtype)


def chunked_span(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    side: Side,
    *,
    layer: Int[Array, ""] | int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    wide: bool = False,
    chunk: int = 512,
) -> Partial:
    """Attention of queries, turned and scaled already, to a span of keys; rows may start at different places.

    Keys of a row that are not there cost their time all the same, and rows that start apart are computed one by one.
    """
    if side.noise is not None:
        raise NotImplementedError("chunked spans take keys whose noise is drawn already.")
    static = _Static(window, soft_cap, chunk, wide)
    if layer is not None:
        key, value = (jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in (key, value))
    if side.rotation is not None:
        positions = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
        cos, sin = rotation_tables(side.rotation.fixed_freq, side.rotation.gain, positions)
        heads = cos.shape[2]
        if heads not in (1, key.shape[1]):
            key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
        key = rotate(key.swapaxes(1, 2), cos, sin).swapaxes(1, 2)
        side = side._replace(rotation=None)
    if side.used is not None:
        value = jnp.where((jnp.arange(key.shape[2]) < side.used[:, None])[:, None, :, None], value, 0)
    if query.shape[0] == 1 or (side.start is None and side.used is None):
        return Partial(*_attend(query, key, value, _of(side), static))

    def row(q: jax.Array, k: jax.Array, v: jax.Array, beside: Side) -> Partial:
        beside = jax.tree.map(lambda x: x[None], beside)._replace(slope=side.slope)
        out, logsumexp = _attend(q[None], k[None], v[None], _of(beside), static)
        return Partial(out[0], logsumexp[0])

    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])), side._replace(slope=None))
    return jax.vmap(row)(query, key, value, rows)


def chunked_span_gradient(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    side: Side,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """What a span adds to the gradients of queries, keys and values; float32.

    Args:
      log_sum: of the logits of all keys, those of this span being a part.
      inner: sum over channels of d_out times the output of the whole attention.
    """
    return _gradients(query, key, value, _of(side), logsumexp, inner, d_out, _Static(window, soft_cap, chunk))


class _Beside(NamedTuple):
    """What blocks need beside q, k and v. None = absent."""

    start: Int[Array, ""] | None
    used: Int[Array, ""] | None
    slope: Float[Array, " H"] | None
    query_positions: Int[Array, "#B T"] | None
    key_positions: Int[Array, "#B S"] | None
    query_segments: Int[Array, "B T"] | None
    key_segments: Int[Array, "B S"] | None
    diagonal_bias: Float[Array, "#B T"] | None = None


class _Static(NamedTuple):
    window: int | None
    soft_cap: float | None
    chunk: int
    wide: bool = False  # the output in float32


def _of(side: Side) -> _Beside:
    """A side of which one row says where all start."""
    start, used = (None if x is None else x[0] for x in (side.start, side.used))
    return _Beside(
        start, used, side.slope, side.query_positions, side.key_positions, side.query_segments, side.key_segments
    )


class _Blocks(NamedTuple):
    """The arrays cut evenly: the last block is padded with tokens that nobody sees."""

    q: Float[Array, "B G M T K"]
    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S K"]
    beside: _Beside
    keys: int  # before padding
    of_queries: int  # tokens in a block
    of_keys: int


def _cut(q: jax.Array, k: jax.Array, v: jax.Array, beside: _Beside, chunk: int) -> _Blocks:
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    t, s = min(chunk, T), min(chunk, S)
    q = _padded(q, 2, t).reshape(B, G, H // G, -1, K)
    beside = beside._replace(
        slope=None if beside.slope is None else beside.slope.reshape(G, H // G),
        query_positions=_padded(beside.query_positions, 1, t),
        key_positions=_padded(beside.key_positions, 1, s),
        query_segments=_padded(beside.query_segments, 1, t),
        key_segments=_padded(beside.key_segments, 1, s),
        diagonal_bias=_padded(beside.diagonal_bias, 1, t),
    )
    return _Blocks(q, _padded(k, 2, s), _padded(v, 2, s), beside, S, t, s)


def _padded(x: jax.Array | None, axis: int, block: int) -> jax.Array | None:
    if x is None or x.shape[axis] % block == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[axis] % block if i == axis else 0) for i in range(x.ndim)])


def _part(x: jax.Array, index: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _block_logits(
    q: jax.Array, k: jax.Array, blocks: _Blocks, i: jax.Array, j: jax.Array, static: _Static
) -> tuple[Float[Array, "B G M T S"], Float[Array, "B G M T S"] | None]:
    """Masked float32 logits of query block i against key block j, and the soft cap's derivative. q and k are blocks."""
    beside, t, s = blocks.beside, blocks.of_queries, blocks.of_keys
    logits = jnp.einsum("bgmtk,bgsk->bgmts", q, k, preferred_element_type=jnp.float32)
    slope_of_cap = None
    if static.soft_cap is not None:
        tanh = jnp.tanh(logits / static.soft_cap)
        logits, slope_of_cap = static.soft_cap * tanh, 1 - tanh**2
    first = i * t - j * s if beside.start is None else beside.start + i * t - j * s
    distance = first + jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
    if beside.slope is not None:
        far = distance[None]
        if beside.query_positions is not None and beside.key_positions is not None:
            at_q, at_k = _part(beside.query_positions, i, t, 1), _part(beside.key_positions, j, s, 1)
            far = at_q[:, :, None] - at_k[:, None, :]
        logits -= beside.slope[:, :, None, None] * far[:, None, None].astype(jnp.float32)
    if beside.diagonal_bias is not None:
        own = _part(beside.diagonal_bias, i, t, 1)
        logits += jnp.where(distance == 0, own[:, :, None], 0)[:, None, None]
    mask = (distance >= 0)[None] if static.window is None else ((distance >= 0) & (distance < static.window))[None]
    if beside.start is not None and blocks.keys < blocks.k.shape[2]:
        # Within a text, padded keys are later than all queries. Elsewhere they are not.
        mask = mask & (j * s + jnp.arange(s) < blocks.keys)
    if beside.used is not None:
        mask = mask & (j * s + jnp.arange(s) < beside.used)
    if beside.query_segments is not None and beside.key_segments is not None:
        in_q, in_k = _part(beside.query_segments, i, t, 1), _part(beside.key_segments, j, s, 1)
        mask = mask & (in_q[:, :, None] == in_k[:, None, :])
    return jnp.where(mask[:, None, None], logits, MASKED), slope_of_cap


def _key_blocks(i: jax.Array, blocks: _Blocks, static: _Static) -> tuple[jax.Array, jax.Array]:
    """The range of key blocks that query block i sees any of."""
    start = 0 if blocks.beside.start is None else blocks.beside.start
    t, s, count = blocks.of_queries, blocks.of_keys, blocks.k.shape[2] // blocks.of_keys
    last = start + (i + 1) * t - 1
    if blocks.beside.used is not None:
        last = jnp.minimum(last, blocks.beside.used - 1)
    end = jnp.clip(last // s + 1, 0, count)
    if static.window is None:
        return jnp.zeros_like(end), end
    return jnp.clip((start + i * t - static.window + 1) // s, 0, end), end


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    beside: _Beside,
    static: _Static,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T"]]:
    """The output, in the dtype of q, and the log-sum-exp of every query's logits. The latter has no gradient."""
    B, H, T, K = q.shape
    blocks = _cut(q, k, v, beside, static.chunk)
    t, s, rows = blocks.of_queries, blocks.of_keys, blocks.q.shape[:3]

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_i = _part(blocks.q, i, t, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = carry
            logits, _ = _block_logits(q_i, _part(blocks.k, j, s, 2), blocks, i, j, static)
            new_highest = jnp.maximum(highest, logits.max(-1))
            weights = jnp.exp(logits - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            update = jnp.einsum(
                "bgmts,bgsk->bgmtk",
                weights.astype(v.dtype),
                _part(blocks.v, j, s, 2),
                preferred_element_type=jnp.float32,
            )
            return new_highest, total * shrink + weights.sum(-1), out * shrink[..., None] + update

        start = (
            jnp.full((*rows, t), FLOOR, jnp.float32),
            jnp.zeros((*rows, t), jnp.float32),
            jnp.zeros((*rows, t, K), jnp.float32),
        )
        highest, total, out = jax.lax.fori_loop(*_key_blocks(i, blocks, static), key_block, start)
        some = total > 0
        logsumexp = jnp.where(some, highest + jnp.log(jnp.where(some, total, 1)), MASKED)
        out = out / jnp.where(some, total, 1)[..., None]
        return out if static.wide else out.astype(q.dtype), logsumexp

    out, logsumexp = jax.lax.map(query_block, jnp.arange(blocks.q.shape[3] // t))  # [T/t, B, G, M, t, ...]
    out = jnp.moveaxis(out, 0, 3).reshape(B, H, -1, K)[:, :, :T]
    return out, jnp.moveaxis(logsumexp, 0, 3).reshape(B, H, -1)[:, :, :T]


def _forward_rule(q, k, v, beside, static):  # noqa: ANN001, ANN202
    out, logsumexp = _attend(q, k, v, beside, static)
    return (out, logsumexp), (q, k, v, beside, out, logsumexp)


def _backward_rule(static, saved, d):  # noqa: ANN001, ANN202
    q, k, v, beside, out, logsumexp = saved
    d_out = d[0]
    # sum_s p_ts dp_ts = sum_k do_tk o_tk: the softmax's own term in its gradient.
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    d_q, d_k, d_v = _gradients(q, k, v, beside, logsumexp, inner, d_out, static)
    # The schedule is outside the gradient: nothing flows to what is beside.
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), jax.tree.map(no_gradient, beside)


def _gradients(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    beside: _Beside,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
    static: _Static,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    B, H, T, K = q.shape
    S = k.shape[2]
    blocks = _cut(q, k, v, beside, static.chunk)
    t, s, rows = blocks.of_queries, blocks.of_keys, blocks.q.shape[:3]
    # Padded queries are given no weight: with a log-sum-exp of 0 theirs could overflow.
    logsumexp = jnp.pad(logsumexp, ((0, 0), (0, 0), (0, -T % t)), constant_values=-MASKED).reshape(*rows, -1)
    inner = _padded(inner, 2, t).reshape(*rows, -1)
    d_out = _padded(d_out, 2, t).reshape(blocks.q.shape)

    def query_block(d_kv: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q_i, d_out_i = _part(blocks.q, i, t, 3), _part(d_out, i, t, 3)
        log_sum_i, inner_i = _part(logsumexp, i, t, 3), _part(inner, i, t, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = carry
            k_j, v_j = _part(blocks.k, j, s, 2), _part(blocks.v, j, s, 2)
            logits, slope_of_cap = _block_logits(q_i, k_j, blocks, i, j, static)
            p = jnp.exp(logits - log_sum_i[..., None])
            d_p = jnp.einsum("bgmtk,bgsk->bgmts", d_out_i, v_j, preferred_element_type=jnp.float32)
            d_logits = p * (d_p - inner_i[..., None])
            if slope_of_cap is not None:
                d_logits *= slope_of_cap
            d_logits, p = d_logits.astype(q.dtype), p.astype(q.dtype)
            d_q += jnp.einsum("bgmts,bgsk->bgmtk", d_logits, k_j, preferred_element_type=jnp.float32)
            d_k_j = jnp.einsum("bgmts,bgmtk->bgsk", d_logits, q_i, preferred_element_type=jnp.float32)
            d_v_j = jnp.einsum("bgmts,bgmtk->bgsk", p, d_out_i, preferred_element_type=jnp.float32)
            at = (0, 0, j * s, 0)
            d_k = jax.lax.dynamic_update_slice(d_k, _part(d_k, j, s, 2) + d_k_j, at)
            d_v = jax.lax.dynamic_update_slice(d_v, _part(d_v, j, s, 2) + d_v_j, at)
            return d_q, d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), *d_kv)
        d_q, d_k, d_v = jax.lax.fori_loop(*_key_blocks(i, blocks, static), key_block, start)
        return (d_k, d_v), d_q

    zeros = (jnp.zeros(blocks.k.shape, jnp.float32), jnp.zeros(blocks.v.shape, jnp.float32))
    (d_k, d_v), d_q = jax.lax.scan(query_block, zeros, jnp.arange(blocks.q.shape[3] // t))
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(B, H, -1, K)[:, :, :T]
    return d_q, d_k[:, :, :S], d_v[:, :, :S]


def no_gradient(x: jax.Array) -> jax.Array | np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


_attend.defvjp(_forward_rule, _backward_rule)
