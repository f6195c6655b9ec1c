"""Attention with all logits at once and a hand-written gradient, for training on short sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pe_lab.attention.key_block import MASKED, AttentionInputs, Keys, Queries
from pe_lab.attention.reference import alibi, visible


def dense_attention(query: Queries, key: Keys, value: Keys, inputs: AttentionInputs) -> Queries:
    """The softmax over all logits at once; arguments as in `reference_attention`.

    Of [T, T] arrays, only the weights are kept for the gradient. JAX derives a gradient that transposes [T, T] arrays
    in memory; this one transposes [T, K] arrays. Outputs are divided by the sums of weights after the product with the
    values: K divisions a query instead of T.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    # Query heads of a group share their keys: the matrix products take them as more queries.
    q = query.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * T, K)
    k, v = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    bias = jnp.where(visible(T, inputs), 0.0, MASKED)[:, None, None]
    penalty = alibi(T, inputs, G)
    if penalty is not None:
        bias = bias - penalty
    if inputs.diagonal_bias is not None:
        bias = bias + (jnp.eye(T) * inputs.diagonal_bias[:, None])[:, None, None]
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
    # With p = weights / total: d_v = p^T d_out and d_logits = p (d_out v^T - sum_k d_out out). d_out is divided by
    # total, because it is the smaller array.
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
    """a^T b, computed as (b^T a)^T: only b and the result are transposed in memory."""
    b = jax.lax.optimization_barrier(b.transpose(0, 1, 3, 2))
    product = jnp.einsum("bgkt,bgts->bgks", b, a, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product).transpose(0, 1, 3, 2)


_attend.defvjp(_forward_rule, _backward_rule)
