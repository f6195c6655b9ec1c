"""Attention with all logits at once and a hand-written gradient, for training on short sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pe_lab.attention.key_block import (
    MASKED,
    AttentionInputs,
    Keys,
    Outputs,
    PartialAttention,
    Queries,
    Values,
    capped,
    heads_of_groups,
    visible,
    with_sink,
)
from pe_lab.attention.reference import added_to_logits


def dense_attention(query: Queries, key: Keys, value: Values, inputs: AttentionInputs) -> Outputs:
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
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    bias = jnp.where(visible(distance, inputs), 0.0, MASKED)[:, None, None]
    added = added_to_logits(distance, 0, H, inputs)
    if added is not None:
        bias = bias + heads_of_groups(added, G)
    learned = inputs.distance_bias is not None or inputs.key_bias is not None or inputs.bias is not None
    out, logsumexp = _attend(q, k, v, bias, learned, inputs.soft_cap)
    part = PartialAttention(out.reshape(B, H, T, -1), logsumexp.reshape(B, H, T))
    return with_sink(part, inputs.sink, query.dtype).transpose(0, 2, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: Float[Array, "B G MT K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S V"],
    bias: Float[Array, "#B #G #M T S"],
    learned: bool,
    soft_cap: float | None,
) -> tuple[Float[Array, "B G MT V"], Float[Array, "B G MT"]]:
    """The output and the logsumexp; `learned`: the bias has a gradient."""
    return _forward_rule(q, k, v, bias, learned, soft_cap)[0]


def _forward_rule(q, k, v, bias, learned, soft_cap):  # noqa: ANN001, ANN202
    B, G, MT, _ = q.shape
    T, S = bias.shape[-2:]
    logits = capped(jnp.einsum("bgtk,bgsk->bgts", q, k, preferred_element_type=jnp.float32), soft_cap)
    logits = (logits.reshape(B, G, MT // T, T, S) + bias).reshape(B, G, MT, S)
    highest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(v.dtype)
    out = jnp.einsum("bgts,bgsk->bgtk", weights, v, preferred_element_type=jnp.float32) / total
    return (out, (highest + jnp.log(total))[..., 0]), (q, k, v, bias, weights, total, out)


def _backward_rule(learned, soft_cap, saved, d):  # noqa: ANN001, ANN202
    q, k, v, bias, weights, total, out = saved
    # With p = weights / total: d_v = p^T d_out and d_logits = p (d_out v^T - sum_k d_out out + d_logsumexp). d_out is
    # divided by total, because it is the smaller array.
    d_out = d[0] / total
    inner = (d_out * out).sum(-1, keepdims=True) - d[1][..., None] / total
    d_out = d_out.astype(v.dtype)
    d_weights = jnp.einsum("bgtk,bgsk->bgts", d_out, v, preferred_element_type=jnp.float32)
    d_logits = weights * (d_weights - inner)
    d_bias = _summed(d_logits, bias.shape) if learned else jnp.zeros_like(bias)
    if soft_cap is not None:
        product = jnp.einsum("bgtk,bgsk->bgts", q, k, preferred_element_type=jnp.float32)
        d_logits = d_logits * (1 - jnp.tanh(product / soft_cap) ** 2)
    d_logits = d_logits.astype(q.dtype)
    d_q = jnp.einsum("bgts,bgsk->bgtk", d_logits, k, preferred_element_type=jnp.float32)
    d_k = _transposed_product(d_logits, q)
    d_v = _transposed_product(weights, d_out)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias


def _summed(d_logits: Float[Array, "B G MT S"], shape: tuple[int, ...]) -> Float[Array, "#B #G #M T S"]:
    """The gradient of the logits, summed over the axes that a bias does not have."""
    B, G, MT, S = d_logits.shape
    d_logits = d_logits.astype(jnp.float32).reshape(B, G, -1, shape[-2], S)
    over = tuple(axis for axis in range(3) if shape[axis] == 1 and d_logits.shape[axis] > 1)
    return d_logits.sum(over, keepdims=True)


def _transposed_product(a: Float[Array, "B G T S"], b: Float[Array, "B G T K"]) -> Float[Array, "B G S K"]:
    """a^T b, computed as (b^T a)^T: only b and the result are transposed in memory."""
    b = jax.lax.optimization_barrier(b.transpose(0, 1, 3, 2))
    product = jnp.einsum("bgkt,bgts->bgks", b, a, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(product).transpose(0, 1, 3, 2)


_attend.defvjp(_forward_rule, _backward_rule)
