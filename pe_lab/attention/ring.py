"""Attention on a mesh: kernels run on each device's part. Where sequences are sharded, keys travel around a ring, or
devices exchange tokens for heads."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import (
    MASKED,
    RESIDUALS,
    AttentionInputs,
    KeyBlockGradients,
    KeyRotation,
    Keys,
    Outputs,
    Pair,
    PartialAttention,
    Queries,
    Values,
    gradient_of_inputs,
    merge,
    with_sink,
)
from pe_lab.errors import UnsupportedError
from pe_lab.parallel import balanced_order, current_mesh, sharding_axes

if TYPE_CHECKING:
    from pe_lab.attention.dispatch import Implementation


class _RingSettings(NamedTuple):
    axis: str
    size: int
    pair: Pair


class _Visitor(NamedTuple):
    """The arrays that travel."""

    key: Float[Array, "B G T K"]
    value: Float[Array, "B G T K"]
    positions: Int[Array, "B T"] | None
    segments: Int[Array, "B T"] | None
    key_bias: Float[Array, "B H T"] | None


def ring_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G T K"],
    value: Float[Array, "B G T V"],
    inputs: AttentionInputs,
    *,
    axis: str,
    size: int,
    pair: Pair,
) -> Float[Array, "B H T V"]:
    """This device's part of causal attention, inside a `shard_map` over mesh axis `axis` of `size` devices.

    `query`, `key`, `value` and `inputs` are of this device's tokens, in `parallel.balanced_order`; queries and keys
    rotated, queries scaled.
    """
    sink, inputs = inputs.sink, replace(inputs, sink=None)
    return with_sink(_ring(query, key, value, inputs, _RingSettings(axis, size, pair)), sink, query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(
    query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs, static: _RingSettings
) -> PartialAttention:
    return _forward_rule(query, key, value, inputs, static)[0]


def _halves(x: jax.Array, axis: int) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _visible_pairs(
    inputs: AttentionInputs, visitor: _Visitor, static: _RingSettings, step: jax.Array, shape: tuple[int, ...]
) -> list[tuple[int, int, AttentionInputs]]:
    """The visible pairs of chunks at one step: chunk of queries, chunk of keys, and the inputs of this pair.

    At step s, device i attends to the keys of device i - s: chunks j and 2n - 1 - j. `shape` is that of the queries.
    """
    n, half = static.size, shape[2] // 2
    me = jax.lax.axis_index(static.axis)
    other = (me - step) % n
    starts = [(0, 0, (me - other) * half), (1, 0, (2 * n - 1 - me - other) * half), (1, 1, (other - me) * half)]
    inputs = replace(inputs, key_positions=visitor.positions, key_segments=visitor.segments, key_bias=visitor.key_bias)

    def pair(i: int, j: int, start: jax.Array) -> AttentionInputs:
        halves = inputs.of_tokens(lambda x: _halves(x, 1)[i], lambda x: _halves(x, 1)[j])
        return replace(halves, start=jnp.broadcast_to(start.astype(jnp.int32), shape[:1]))

    return [(i, j, pair(i, j, start)) for i, j, start in starts]


def _to_next_device(x: Any, static: _RingSettings) -> Any:
    n = static.size
    return jax.tree.map(lambda a: jax.lax.ppermute(a, static.axis, [(i, (i + 1) % n) for i in range(n)]), x)


def _forward_rule(query, key, value, inputs, static):  # noqa: ANN001, ANN202
    queries = _halves(query, 2)

    def visit(partials: list[PartialAttention], visitor: _Visitor, step: jax.Array) -> list[PartialAttention]:
        partials = list(partials)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, pair in _visible_pairs(inputs, visitor, static, step, query.shape):
            found = static.pair.partial(queries[i], keys[j], values[j], pair, wide=True)
            partials[i] = merge([partials[i], found])
        return partials

    def step(carry: Any, s: jax.Array) -> Any:
        partials, visitor = carry
        following = _to_next_device(visitor, static)
        return (visit(partials, visitor, s), following), None

    nothing = [
        PartialAttention(
            jnp.zeros((*q.shape[:3], value.shape[3]), jnp.float32), jnp.full(q.shape[:3], MASKED, jnp.float32)
        )
        for q in queries
    ]
    visitor = _Visitor(key, value, inputs.key_positions, inputs.key_segments, inputs.key_bias)
    (partials, visitor), _ = jax.lax.scan(step, (nothing, visitor), jnp.arange(static.size - 1))
    partials = visit(partials, visitor, jnp.asarray(static.size - 1))
    out, logsumexp = (jnp.concatenate(halves, 2) for halves in zip(*partials, strict=True))
    found = PartialAttention(*checkpoint_name((out.astype(query.dtype), logsumexp), RESIDUALS))
    return found, (query, key, value, inputs, *found)


def _backward_rule(static, saved, d):  # noqa: ANN001, ANN202
    query, key, value, inputs, out, logsumexp = saved
    inner = (d.out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d.logsumexp
    queries, logsumexps, inners, d_outs = (_halves(x, 2) for x in (query, logsumexp, inner, d.out))

    def step(carry: Any, s: jax.Array) -> Any:
        d_q, travelling, learned, visitor = carry
        d_q, (d_k, d_v, d_bias) = list(d_q), (list(x) for x in travelling)
        following = _to_next_device(visitor, static)
        keys, values = _halves(visitor.key, 2), _halves(visitor.value, 2)
        for i, j, pair in _visible_pairs(inputs, visitor, static, s, query.shape):
            saved = logsumexps[i], inners[i], d_outs[i]
            more = static.pair.gradient(queries[i], keys[j], values[j], pair, *saved)
            d_q[i], d_k[j], d_v[j] = d_q[i] + more.query, d_k[j] + more.key, d_v[j] + more.value
            if more.key_bias is not None:
                d_bias[j] = d_bias[j] + more.key_bias
            learned = jax.tree.map(jnp.add, learned, (more.slope, more.distance_bias, more.bias))
        # Gradients of keys and values travel with them, and are back on their own device after a whole round.
        travelling = _to_next_device((d_k, d_v, d_bias), static)
        return (d_q, travelling, learned, following), None

    zeros = lambda x: [jnp.zeros(half.shape, jnp.float32) for half in _halves(x, 2)]  # noqa: E731
    visitor = _Visitor(key, value, inputs.key_positions, inputs.key_segments, inputs.key_bias)
    travelling = (zeros(key), zeros(value), [] if inputs.key_bias is None else zeros(inputs.key_bias))
    learned = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (inputs.slope, inputs.distance_bias, inputs.bias))
    start = (zeros(query), travelling, learned, visitor)
    (d_q, travelling, learned, _), _ = jax.lax.scan(step, start, jnp.arange(static.size))
    d_q, d_k, d_v = (jnp.concatenate(x, 2) for x in (d_q, *travelling[:2]))
    d_bias = jnp.concatenate(travelling[2], 2) if travelling[2] else None
    slope, table, function = learned
    found = KeyBlockGradients(d_q, d_k, d_v, slope, table, d_bias, function)
    # Every device has a part of the gradient of what all share: `shard_map` adds them.
    return d_q.astype(query.dtype), d_k.astype(key.dtype), d_v.astype(value.dtype), gradient_of_inputs(inputs, found)


_ring.defvjp(_forward_rule, _backward_rule)


def on_mesh(
    implementation: Implementation,
    query: Queries,
    key: Keys,
    value: Values,
    inputs: AttentionInputs,
    exchanged: bool = False,
) -> Outputs:
    """Attention of whole sequences on the mesh that is being traced for; without a mesh, on one device.

    Arguments as in `reference_attention`. Rows and heads are independent, and each device computes its own. Where the
    length is sharded over several devices, they call `ring_attention`, or exchange tokens for heads (`exchanged`).
    """
    current = current_mesh()
    if current is None:
        return implementation.run(query, key, value, inputs)
    mesh, rules = current
    batch, length, heads, _ = rules.spec(("batch", "length", "heads", "head_dim"), query.shape, mesh, "queries")
    if exchanged:
        return _by_heads(implementation, query, key, value, inputs, (batch, length, heads))
    kv_heads = rules.spec(("batch", "length", "kv_heads", "head_dim"), key.shape, mesh, "keys")[2]
    if heads is not None and kv_heads is None:
        # Key heads that do not divide over the devices of `tensor` are repeated for each query head.
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    tokens = PartitionSpec(batch, length, heads, None)

    if heads is not None and mesh.shape[heads] > 1 and inputs.bias is not None:
        raise UnsupportedError(
            "attention: a bias that is a function of positions serves all heads at once, and this mesh shards them "
            f"over {mesh.shape[heads]} devices: use mesh.tensor=1, or a relative bias."
        )
    size = mesh.shape[length] if length is not None else 1
    pair = Pair(implementation.partial, implementation.gradient)

    def ring(query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        inputs = inputs.for_every_sequence(len(query))
        out = ring_attention(q, k, v, inputs, axis=length, size=size, pair=pair)
        return out.transpose(0, 2, 1, 3)

    return jax.shard_map(
        ring if size > 1 else implementation.run,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, input_specs(inputs, batch, length, heads)),
        out_specs=tokens,
        check_vma=False,
    )(query, key, value, inputs)


def _by_heads(
    implementation: Implementation, query: Queries, key: Keys, value: Values, inputs: AttentionInputs, axes: Any
) -> Outputs:
    """Attention in which each device computes some of the heads over the whole sequence (Ulysses, Jacobs et al. 2023).

    All-to-alls exchange tokens for heads before it, and back after it. `axes`: mesh axes of batch, length and heads.
    """
    mesh, _ = current_mesh()
    batch, length, heads = axes
    over = sharding_axes(mesh, heads, length)
    size, parts = mesh.shape[length], math.prod(mesh.shape[axis] for axis in over)
    # A key head that several devices need is repeated for each of them.
    repeats = parts // math.gcd(key.shape[2], parts)
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    order = balanced_order(2 * size, size)

    def chunks(x: jax.Array, places: Any) -> jax.Array:
        parts = jnp.split(x, 2 * size, axis=1)
        return jnp.concatenate([parts[i] for i in places], axis=1)

    in_order = functools.partial(chunks, places=np.argsort(order))

    def run(query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs) -> jax.Array:
        heads = (jax.lax.all_to_all(x, length, 2, 1, tiled=True) for x in (query, key, value))
        out = implementation.run(*map(in_order, heads), inputs.of_tokens(in_order, in_order))
        return jax.lax.all_to_all(chunks(out, order), length, 1, 2, tiled=True)

    tokens = PartitionSpec(batch, length, heads, None)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, input_specs(inputs, batch, None, over)),
        out_specs=tokens,
        check_vma=False,
    )(query, key, value, inputs)


def input_specs(inputs: AttentionInputs, batch: Any, length: Any, heads: Any) -> AttentionInputs:
    """How the inputs are sharded where sequences, tokens and heads are sharded over these mesh axes."""

    def of_rows(x: jax.Array) -> PartitionSpec:  # [B or 1] or [B or 1, T]
        return PartitionSpec(batch if x.shape[0] > 1 else None, *[length] * (x.ndim - 1))

    learned = ("slope", "rotation", "distance_bias", "key_bias", "bias", "sink")
    key_bias = inputs.key_bias

    rotation = None
    if inputs.rotation is not None:
        rotations = heads if inputs.rotation.fixed_freq.shape[0] > 1 else None
        rotation = KeyRotation(PartitionSpec(rotations, None, None), PartitionSpec(rotations, None))
    return replace(
        jax.tree.map(of_rows, replace(inputs, **dict.fromkeys(learned))),
        slope=None if inputs.slope is None else PartitionSpec(heads),
        distance_bias=None if inputs.distance_bias is None else PartitionSpec(heads, None),
        key_bias=None if key_bias is None else PartitionSpec(batch if key_bias.shape[0] > 1 else None, heads, length),
        bias=jax.tree.map(lambda _: PartitionSpec(), inputs.bias),
        sink=None if inputs.sink is None else PartitionSpec(heads),
        rotation=rotation,
    )
