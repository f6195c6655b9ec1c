"""Attention in blocks, with memory linear in the length, forward and backward (Rabe & Staats 2021, Dao et al. 2022)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import (
    FLOOR,
    MASKED,
    RESIDUALS,
    AttentionInputs,
    Keys,
    OnlineSoftmax,
    PartialAttention,
    Queries,
    masked_logits,
    padded,
)
from pe_lab.errors import UnsupportedError
from pe_lab.positional import rotate, rotation_tables


def chunked_attention(query: Queries, key: Keys, value: Keys, inputs: AttentionInputs) -> Queries:
    """`reference_attention`, one [chunk, chunk] block of logits at a time; blocks without visible keys are skipped."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    out = _attend(q, k, v, inputs, False)[0]
    return out.transpose(0, 2, 1, 3).astype(query.dtype)


def chunked_key_block(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    inputs: AttentionInputs,
    *,
    layer: Int[Array, ""] | int | None = None,
    wide: bool = False,
) -> PartialAttention:
    """Attention to a block of keys, computed by XLA; arguments as in `kernels.tpu.tpu_key_block`.

    Keys beyond `used` take as much time as others. Rows with different `start` are computed one by one.
    """
    if inputs.noise is not None or inputs.diagonal_bias is not None:
        raise UnsupportedError("chunked attention to a block of keys has no noise and no diagonal bias.")
    if layer is not None:
        key, value = (jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in (key, value))
    if inputs.rotation is not None:
        positions = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
        cos, sin = rotation_tables(inputs.rotation.fixed_freq, inputs.rotation.gain, positions)
        heads = cos.shape[2]
        if heads not in (1, key.shape[1]):
            key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
        key = rotate(key.swapaxes(1, 2), cos, sin).swapaxes(1, 2)
        inputs = replace(inputs, rotation=None)
    if inputs.used is not None:
        value = jnp.where((jnp.arange(key.shape[2]) < inputs.used[:, None])[:, None, :, None], value, 0)
    if query.shape[0] == 1 or (inputs.start is None and inputs.used is None):
        return PartialAttention(*_attend(query, key, value, inputs, wide))

    def row(q: jax.Array, k: jax.Array, v: jax.Array, inputs: AttentionInputs) -> PartialAttention:
        one = replace(jax.tree.map(lambda x: x[None], inputs), slope=slope)
        out, logsumexp = _attend(q[None], k[None], v[None], one, wide)
        return PartialAttention(out[0], logsumexp[0])

    slope, inputs = inputs.slope, replace(inputs, slope=None)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])), inputs)
    return jax.vmap(row)(query, key, value, rows)


class _Blocks(NamedTuple):
    """The arrays, padded to whole blocks. Padding is never visible."""

    q: Float[Array, "B G M T K"]
    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S K"]
    inputs: AttentionInputs
    keys: int  # before padding
    queries_per_block: int
    keys_per_block: int

    def logits(self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Masked float32 logits [B, G, M, t, s] of query block i, `q`, against key block j, `k`."""
        inputs, t, s = self.inputs, self.queries_per_block, self.keys_per_block
        first = i * t - j * s if inputs.start is None else inputs.start[0] + i * t - j * s
        distance = first + jnp.arange(t)[:, None] - jnp.arange(s)[None, :]
        used = None
        if inputs.start is not None and self.keys < self.k.shape[2]:
            # Without `start`, padded keys are later than all queries.
            used = j * s + jnp.arange(s) < self.keys
        if inputs.used is not None:
            before_end = j * s + jnp.arange(s) < inputs.used[0]
            used = before_end if used is None else used & before_end
        block = inputs.of_tokens(lambda x: _part(x, i, t, 1), lambda x: _part(x, j, s, 1))
        return masked_logits(q, k, distance, block, used)

    def visible_keys(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The range of key blocks that contain visible keys of query block i."""
        start = 0 if self.inputs.start is None else self.inputs.start[0]
        t, s, count = self.queries_per_block, self.keys_per_block, self.k.shape[2] // self.keys_per_block
        last = start + (i + 1) * t - 1
        if self.inputs.used is not None:
            last = jnp.minimum(last, self.inputs.used[0] - 1)
        end = jnp.clip(last // s + 1, 0, count)
        if self.inputs.window is None:
            return jnp.zeros_like(end), end
        return jnp.clip((start + i * t - self.inputs.window + 1) // s, 0, end), end


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, inputs: AttentionInputs) -> _Blocks:
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    t, s = min(inputs.chunk, T), min(inputs.chunk, S)
    q = padded(q, 2, t).reshape(B, G, H // G, -1, K)
    inputs = inputs.of_tokens(lambda x: padded(x, 1, t), lambda x: padded(x, 1, s))
    return _Blocks(q, padded(k, 2, s), padded(v, 2, s), inputs, S, t, s)


def _part(x: jax.Array, index: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    inputs: AttentionInputs,
    wide: bool,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T"]]:
    """The output, in the dtype of q (`wide`: float32), and every query's logsumexp, which has no gradient."""
    B, H, T, K = q.shape
    blocks = _in_blocks(q, k, v, inputs)
    t, s, rows = blocks.queries_per_block, blocks.keys_per_block, blocks.q.shape[:3]

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_i = _part(blocks.q, i, t, 3)

        def key_block(j: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
            def weighted(weights: jax.Array) -> jax.Array:
                v_j = _part(blocks.v, j, s, 2)
                weights = weights.astype(v.dtype)
                return jnp.einsum("bgmts,bgsk->bgmtk", weights, v_j, preferred_element_type=jnp.float32)

            return softmax.add(blocks.logits(q_i, _part(blocks.k, j, s, 2), i, j), weighted)

        start = OnlineSoftmax(
            jnp.full((*rows, t), FLOOR, jnp.float32),
            jnp.zeros((*rows, t), jnp.float32),
            jnp.zeros((*rows, t, K), jnp.float32),
        )
        highest, total, out = jax.lax.fori_loop(*blocks.visible_keys(i), key_block, start)
        some = total > 0
        logsumexp = jnp.where(some, highest + jnp.log(jnp.where(some, total, 1)), MASKED)
        out = out / jnp.where(some, total, 1)[..., None]
        return out if wide else out.astype(q.dtype), logsumexp

    out, logsumexp = jax.lax.map(query_block, jnp.arange(blocks.q.shape[3] // t))  # [T/t, B, G, M, t, ...]
    out = jnp.moveaxis(out, 0, 3).reshape(B, H, -1, K)[:, :, :T]
    return out, jnp.moveaxis(logsumexp, 0, 3).reshape(B, H, -1)[:, :, :T]


def _forward_rule(q, k, v, inputs, wide):  # noqa: ANN001, ANN202
    out, logsumexp = checkpoint_name(_attend(q, k, v, inputs, wide), RESIDUALS)
    return (out, logsumexp), (q, k, v, inputs, out, logsumexp)


def _backward_rule(wide, saved, d):  # noqa: ANN001, ANN202
    q, k, v, inputs, out, logsumexp = saved
    d_out = d[0]
    # sum_s p_ts dp_ts = sum_k do_tk o_tk: the softmax's own term in its gradient.
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    d_q, d_k, d_v = chunked_gradient(q, k, v, inputs, logsumexp, inner, d_out)
    # The schedule is outside the gradient.
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), jax.tree.map(no_gradient, inputs)


def chunked_gradient(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    inputs: AttentionInputs,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
) -> tuple[Float[Array, "B H T K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """The gradients of queries, keys and values that come from one block of keys; float32.

    Args:
      q, k, v, inputs: as in `chunked_key_block`; all rows start at the same place.
      logsumexp: of the logits of all keys, of which this block is a part.
      inner: sum over channels of d_out times the output of the whole attention.
      d_out: gradient of that output.
    """
    B, H, T, K = q.shape
    S = k.shape[2]
    blocks = _in_blocks(q, k, v, inputs)
    t, s, rows = blocks.queries_per_block, blocks.keys_per_block, blocks.q.shape[:3]
    # Padded queries get weight 0: with a logsumexp of 0, their weights could overflow.
    logsumexp = jnp.pad(logsumexp, ((0, 0), (0, 0), (0, -T % t)), constant_values=-MASKED).reshape(*rows, -1)
    inner = padded(inner, 2, t).reshape(*rows, -1)
    d_out = padded(d_out, 2, t).reshape(blocks.q.shape)

    def query_block(d_kv: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q_i, d_out_i = _part(blocks.q, i, t, 3), _part(d_out, i, t, 3)
        logsumexp_i, inner_i = _part(logsumexp, i, t, 3), _part(inner, i, t, 3)

        def key_block(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = carry
            k_j, v_j = _part(blocks.k, j, s, 2), _part(blocks.v, j, s, 2)
            logits = blocks.logits(q_i, k_j, i, j)
            p = jnp.exp(logits - logsumexp_i[..., None])
            d_p = jnp.einsum("bgmtk,bgsk->bgmts", d_out_i, v_j, preferred_element_type=jnp.float32)
            d_logits = p * (d_p - inner_i[..., None])
            d_logits, p = d_logits.astype(q.dtype), p.astype(q.dtype)
            d_q += jnp.einsum("bgmts,bgsk->bgmtk", d_logits, k_j, preferred_element_type=jnp.float32)
            d_k_j = jnp.einsum("bgmts,bgmtk->bgsk", d_logits, q_i, preferred_element_type=jnp.float32)
            d_v_j = jnp.einsum("bgmts,bgmtk->bgsk", p, d_out_i, preferred_element_type=jnp.float32)
            at = (0, 0, j * s, 0)
            d_k = jax.lax.dynamic_update_slice(d_k, _part(d_k, j, s, 2) + d_k_j, at)
            d_v = jax.lax.dynamic_update_slice(d_v, _part(d_v, j, s, 2) + d_v_j, at)
            return d_q, d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), *d_kv)
        d_q, d_k, d_v = jax.lax.fori_loop(*blocks.visible_keys(i), key_block, start)
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
