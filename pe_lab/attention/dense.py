"""The reference's result with a gradient of its own: what short windows train with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import MASKED
from pe_lab.attention.reference import visible


def dense_attention(
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
    """The reference's softmax over all logits at once; of [T, T] arrays the gradient keeps only the weights.

    Where the reference's gradient, derived by JAX, turns [T, T] arrays over in memory to multiply them, this one
    turns over the [T, K] arrays they are multiplied with. And rows are divided by their sums after the product
    with the values, not before: K divisions instead of T.
    """
    if soft_cap is not None:
        raise NotImplementedError("dense attention has no soft cap.")
    B, T, H, K = query.shape
    G = key.shape[2]
    q = (query.astype(jnp.float32) * scale).astype(query.dtype)
    # Query heads of a group share their keys: to the matrix products they are so many more queries.
    q = q.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * T, K)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    index = jnp.arange(T)
    bias = jnp.where(visible(index, index, segments, segments, window), 0.0, MASKED)[:, None, None]
    if slope is not None:
        positions = index[None] if positions is None else positions
        distance = (positions[:, :, None] - positions[:, None, :]).astype(jnp.float32)
        bias = bias - slope.reshape(G, H // G, 1, 1) * distance[:, None, None]
    if diagonal_bias is not None:
        bias = bias + (jnp.eye(T) * diagonal_bias[:, None])[:, None, None]
    out = _attend(q, k, v, bias)
    return out.reshape(B, G, H // G, T, K).transpose(0, 3, 1, 2, 4).reshape(B, T, H, K).astype(query.dtype)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B G MT K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    bias: Float[Array, "#B #G #M T S"],
) -> Float[Array, "B G MT K"]:
    return _forward_rule(q, k, v, bias)[0]


def _forward_rule(q, k, v, bias):  # noqa: ANN001, ANN202
    B, G, MT, _ = q.shape
    T, S = bias.shape[-2:]
    logits = jnp.einsum("bgtk,bgsk->bgts", q, k, preferred_element_type=jnp.float32)
    logits = (logits.reshape(B, G, MT // T, T, S) + bias).reshape(B, G, MT, S)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(v.dtype)
    out = jnp.einsum("bgts,bgsk->bgtk", weights, v, preferred_element_type=jnp.float32) / total
    return out, (q, k, v, bias, weights, total, out)


def _backward_rule(saved, d_out):  # noqa: ANN001, ANN202
    q, k, v, bias, weights, total, out = saved
    # With p = weights / total: d_v = p^T d_out and d_logits = p (d_out v^T - sum_k d_out out). The division goes
    # into d_out, which is small.
    d_out = d_out / total
    inner = (d_out * out).sum(-1, keepdims=True)
    d_out = d_out.astype(v.dtype)
    d_weights = jnp.einsum("bgtk,bgsk->bgts", d_out, v, preferred_element_type=jnp.float32)
    d_logits = (weights * (d_weights - inner)).astype(q.dtype)
    d_q = jnp.einsum("bgts,bgsk->bgtk", d_logits, k, preferred_element_type=jnp.float32)
    d_k = _transposed_product(d_logits, q)
    d_v = _transposed_product(weights, d_out)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), jnp.zeros_like(bias)


def _transposed_product(a: Float[Array, "B G T S"], b: Float[Array, "B G T K"]) -> Float[Array, "B G S K"]:
    """a^T b, as (b^T a)^T: what is laid out anew is b and the result."""
    b = jax.lax.optimization_barrier(b.transpose(0, 1, 3, 2))
    product = jnp.einsum("bgkt,bgts->bgks", b, a, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product).transpose(0, 1, 3, 2)


_attend.defvjp(_forward_rule, _backward_rule)
