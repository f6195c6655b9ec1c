"""Attention of a sequence sharded over several devices: keys and values travel around a ring (Liu et al. 2023).

Every device keeps its queries, in `parallel.balanced_order`: an early and a late chunk of the sequence. Keys and values
travel, with the positions and segments that masks need. Of the four pairs of a device's two chunks of queries and a
visitor's two chunks of keys, one is never visible, one always, and two depend on which device holds the later tokens:
all devices have equal work. The results are merged by their logsumexp. Devices send the next keys while they
attend to the present ones.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pe_lab.attention.chunked import chunked_gradient, no_gradient
from pe_lab.attention.key_block import MASKED, RESIDUALS, AttentionInputs, KeyBlockKernel, PartialAttention, merge


class _Static(NamedTuple):
    axis: str
    size: int
    partial: KeyBlockKernel


class _Visitor(NamedTuple):
    """The arrays that travel."""

    key: Float[Array, "B G T K"]
    value: Float[Array, "B G T K"]
    positions: Int[Array, "B T"] | None
    segments: Int[Array, "B T"] | None


def ring_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T K"],
    inputs: AttentionInputs,
    *,
    axis: str,
    size: int,
    partial: KeyBlockKernel,
) -> Float[Array, "B H T K"]:
    """This device's part of causal attention, inside a `shard_map` over mesh axis `axis` of `size` devices.

    Args:
      query, key, value: this device's tokens, in `parallel.balanced_order`; queries and keys rotated, queries scaled.
      inputs: of these tokens: slope, positions, segments, window, and the chunk of the gradient (`chunked_gradient`).
      axis, size: of the mesh.
      partial: computes attention to a block of keys.
    """
    return _ring(query, key, value, inputs, _Static(axis, size, partial))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs, static: _Static) -> jax.Array:
    return _forward(query, key, value, inputs, static).out.astype(query.dtype)


def _halves(x: jax.Array, axis: int) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _visible_pairs(
    inputs: AttentionInputs, visitor: _Visitor, static: _Static, step: jax.Array, shape: tuple[int, ...]
) -> list[tuple[int, int, AttentionInputs]]:
    """The visible pairs of chunks at one step: chunk of queries, chunk of keys, and the inputs of this pair.

    At step s, device i attends to the keys of device i - s: chunks j and 2n - 1 - j. `shape` is that of the queries.
    """
    n, half = static.size, shape[2] // 2
    me = jax.lax.axis_index(static.axis)
    other = (me - step) % n
    starts = [(0, 0, (me - other) * half), (1, 0, (2 * n - 1 - me - other) * half), (1, 1, (other - me) * half)]
    inputs = replace(inputs, key_positions=visitor.positions, key_segments=visitor.segments)

    def pair(i: int, j: int, start: jax.Array) -> AttentionInputs:
        halves = inputs.of_tokens(lambda x: _halves(x, 1)[i], lambda x: _halves(x, 1)[j])
        return replace(halves, start=jnp.broadcast_to(start.astype(jnp.int32), shape[:1]))

    return [(i, j, pair(i, j, start)) for i, j, start in starts]


def _to_next_device(x: Any, static: _Static) -> Any:
    n = static.size
    return jax.tree.map(lambda a: jax.lax.ppermute(a, static.axis, [(i, (i + 1) % n) for i in range(n)]), x)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs, static: _Static
) -> PartialAttention:
    queries = _halves(query, 2)

    def visit(partials: list[PartialAttention], visitor: _Visitor, step: jax.Array) -> list[PartialAttention]:
        partials = list(partials)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, pair in _visible_pairs(inputs, visitor, static, step, query.shape):
            found = static.partial(queries[i], keys[j], values[j], pair, wide=True)
            partials[i] = merge([partials[i], found])
        return partials

    def step(carry: Any, s: jax.Array) -> Any:
        partials, visitor = carry
        following = _to_next_device(visitor, static)
        return (visit(partials, visitor, s), following), None

    nothing = [
        PartialAttention(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], MASKED, jnp.float32)) for q in queries
    ]
    visitor = _Visitor(key, value, inputs.key_positions, inputs.key_segments)
    (partials, visitor), _ = jax.lax.scan(step, (nothing, visitor), jnp.arange(static.size - 1))
    partials = visit(partials, visitor, jnp.asarray(static.size - 1))
    return PartialAttention(
        jnp.concatenate([p.out for p in partials], 2), jnp.concatenate([p.logsumexp for p in partials], 2)
    )


def _forward_rule(query, key, value, inputs, static):  # noqa: ANN001, ANN202
    out, logsumexp = _forward(query, key, value, inputs, static)
    out, logsumexp = checkpoint_name((out.astype(query.dtype), logsumexp), RESIDUALS)
    return out, (query, key, value, inputs, out, logsumexp)


def _backward_rule(static, saved, d_out):  # noqa: ANN001, ANN202
    query, key, value, inputs, out, logsumexp = saved
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    queries, logsumexps, inners, d_outs = (_halves(x, 2) for x in (query, logsumexp, inner, d_out))

    def step(carry: Any, s: jax.Array) -> Any:
        d_q, d_k, d_v, visitor = carry
        d_q, d_k, d_v = list(d_q), list(d_k), list(d_v)
        following = _to_next_device(visitor, static)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, pair in _visible_pairs(inputs, visitor, static, s, query.shape):
            saved = logsumexps[i], inners[i], d_outs[i]
            more = chunked_gradient(queries[i], keys[j], values[j], pair, *saved)
            d_q[i], d_k[j], d_v[j] = d_q[i] + more[0], d_k[j] + more[1], d_v[j] + more[2]
        # Gradients of keys and values travel with them, and are back on their own device after a whole round.
        d_k, d_v = _to_next_device((d_k, d_v), static)
        return (d_q, d_k, d_v, following), None

    zeros = lambda x: [jnp.zeros(half.shape, jnp.float32) for half in _halves(x, 2)]  # noqa: E731
    visitor = _Visitor(key, value, inputs.key_positions, inputs.key_segments)
    start = (zeros(query), zeros(key), zeros(value), visitor)
    (d_q, d_k, d_v, _), _ = jax.lax.scan(step, start, jnp.arange(static.size))
    d_q, d_k, d_v = (jnp.concatenate(x, 2) for x in (d_q, d_k, d_v))
    return (
        d_q.astype(query.dtype), d_k.astype(key.dtype), d_v.astype(value.dtype), jax.tree.map(no_gradient, inputs)
    )  # fmt: skip


_ring.defvjp(_forward_rule, _backward_rule)
