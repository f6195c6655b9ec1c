"""Attention of a text that lies on several devices: keys and values go round a ring (Liu et al. 2023).

Every device keeps its queries, in `parallel.balanced_order`: an early and a late chunk of the text. Keys and values
travel, with whatever masks need of them. Of the four pairs of a device's two chunks of queries and a visitor's two of
keys, one is never visible, one always, and two depend on which device is further on: all devices have as much to do.
Partial results are merged by their log-sum-exp. The next keys are on their way while those that are here are attended
to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.chunked import chunked_span_gradient, no_gradient
from pe_lab.attention.key_block import MASKED, Partial, Side, merge


class RingSide(NamedTuple):
    """What stands beside this device's queries and keys. None = absent."""

    slope: Float[Array, " H"] | None = None
    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None


class _Static(NamedTuple):
    axis: str
    size: int
    span: Callable[..., Partial]
    window: int | None
    soft_cap: float | None
    chunk: int


class _Visitor(NamedTuple):
    """What goes round."""

    key: Float[Array, "B G T K"]
    value: Float[Array, "B G T K"]
    positions: Int[Array, "B T"] | None
    segments: Int[Array, "B T"] | None


def ring_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T K"],
    side: RingSide,
    *,
    axis: str,
    size: int,
    span: Callable[..., Partial],
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
) -> Float[Array, "B H T K"]:
    """This device's part of causal attention, inside a `shard_map` over mesh axis `axis` of `size` devices.

    Args:
      query, key, value: this device's tokens, in `parallel.balanced_order`; queries and keys turned, queries scaled.
      side: as it goes with them.
      span: attention to a span of keys, such as `chunked_span` or a kernel.
      window, soft_cap: as in `attention`.
      chunk: block of the gradient, which is `chunked_span_gradient`'s.
    """
    return _ring(query, key, value, side, _Static(axis, size, span, window, soft_cap, chunk))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(query: jax.Array, key: jax.Array, value: jax.Array, side: RingSide, static: _Static) -> jax.Array:
    return _forward(query, key, value, side, static).out.astype(query.dtype)


def _halves(x: Any, axis: int) -> list[Any]:
    return [None, None] if x is None else list(jnp.split(x, 2, axis))


def _pairs(static: _Static, step: jax.Array, length: int) -> list[tuple[int, int, jax.Array]]:
    """(chunk of queries, chunk of keys, where the first query stands counted from the first key) of visible pairs.

    At step s, device i is visited by what device i - s holds: chunks j and 2n - 1 - j.
    """
    n, half = static.size, length // 2
    me = jax.lax.axis_index(static.axis)
    other = (me - step) % n
    return [
        (0, 0, (me - other) * half),
        (1, 0, (2 * n - 1 - me - other) * half),
        (1, 1, (other - me) * half),
    ]


def _part(side: RingSide, visitor: _Visitor, of_query: int, of_key: int, start: jax.Array, rows: int) -> Side:
    query_positions, key_positions = _halves(side.positions, 1)[of_query], _halves(visitor.positions, 1)[of_key]
    query_segments, key_segments = _halves(side.segments, 1)[of_query], _halves(visitor.segments, 1)[of_key]
    return Side(
        start=jnp.broadcast_to(start.astype(jnp.int32), (rows,)),
        slope=side.slope,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=query_segments,
        key_segments=key_segments,
    )


def _onward(x: Any, static: _Static) -> Any:
    """To the next device of the ring."""
    n = static.size
    return jax.tree.map(lambda a: jax.lax.ppermute(a, static.axis, [(i, (i + 1) % n) for i in range(n)]), x)


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, side: RingSide, static: _Static) -> Partial:
    rows, length = query.shape[0], query.shape[2]
    queries = _halves(query, 2)
    settings = dict(window=static.window, soft_cap=static.soft_cap, wide=True)

    def visit(partials: list[Partial], visitor: _Visitor, step: jax.Array) -> list[Partial]:
        partials = list(partials)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, start in _pairs(static, step, length):
            part = _part(side, visitor, i, j, start, rows)
            partials[i] = merge([partials[i], static.span(queries[i], keys[j], values[j], part, **settings)])
        return partials

    def step(carry: Any, s: jax.Array) -> Any:
        partials, visitor = carry
        following = _onward(visitor, static)
        return (visit(partials, visitor, s), following), None

    nothing = [Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], MASKED, jnp.float32)) for q in queries]
    visitor = _Visitor(key, value, side.positions, side.segments)
    (partials, visitor), _ = jax.lax.scan(step, (nothing, visitor), jnp.arange(static.size - 1))
    partials = visit(partials, visitor, jnp.asarray(static.size - 1))
    return Partial(jnp.concatenate([p.out for p in partials], 2), jnp.concatenate([p.logsumexp for p in partials], 2))


def _forward_rule(query, key, value, side, static):  # noqa: ANN001, ANN202
    out, logsumexp = _forward(query, key, value, side, static)
    out = out.astype(query.dtype)
    return out, (query, key, value, side, out, logsumexp)


def _backward_rule(static, saved, d_out):  # noqa: ANN001, ANN202
    query, key, value, side, out, logsumexp = saved
    rows, length = query.shape[0], query.shape[2]
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    queries, logsumexps, inners, d_outs = (_halves(x, 2) for x in (query, logsumexp, inner, d_out))

    def step(carry: Any, s: jax.Array) -> Any:
        d_q, d_k, d_v, visitor = carry
        d_q, d_k, d_v = list(d_q), list(d_k), list(d_v)
        following = _onward(visitor, static)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, start in _pairs(static, s, length):
            more = chunked_span_gradient(
                queries[i],
                keys[j],
                values[j],
                _part(side, visitor, i, j, start, rows),
                logsumexps[i],
                inners[i],
                d_outs[i],
                window=static.window,
                soft_cap=static.soft_cap,
                chunk=static.chunk,
            )
            d_q[i], d_k[j], d_v[j] = d_q[i] + more[0], d_k[j] + more[1], d_v[j] + more[2]
        # Gradients of keys and values travel with them, and are home after a whole round.
        d_k, d_v = _onward((d_k, d_v), static)
        return (d_q, d_k, d_v, following), None

    zeros = lambda x: [jnp.zeros(half.shape, jnp.float32) for half in _halves(x, 2)]  # noqa: E731
    visitor = _Visitor(key, value, side.positions, side.segments)
    start = (zeros(query), zeros(key), zeros(value), visitor)
    (d_q, d_k, d_v, _), _ = jax.lax.scan(step, start, jnp.arange(static.size))
    d_q, d_k, d_v = (jnp.concatenate(x, 2) for x in (d_q, d_k, d_v))
    d_side = jax.tree.map(no_gradient, side)
    return d_q.astype(query.dtype), d_k.astype(key.dtype), d_v.astype(value.dtype), d_side


_ring.defvjp(_forward_rule, _backward_rule)
