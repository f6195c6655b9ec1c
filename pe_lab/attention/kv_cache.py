"""Causal attention of a few new tokens to the earlier tokens in a KV cache, computed by XLA."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.attention.hooks import position_bias, sink
from pe_lab.attention.key_block import (
    MASKED,
    AttentionInputs,
    KeyBlockKernel,
    LogitFunctions,
    OnlineSoftmax,
    PartialAttention,
    capped,
    heads_of_groups,
    scaled,
    with_sink,
)
from pe_lab.attention.layer_encoding import LayerEncoding, check_heads, encode_keys, encode_queries
from pe_lab.attention.reference import softmax
from pe_lab.attention.ring import input_specs
from pe_lab.parallel import AxisRules, current_mesh
from pe_lab.positional import rotate, rotation_tables


class CacheView(NamedTuple):
    """One layer's part of a KV cache, with the positions of its tokens.

    Attributes:
      key, value: [L, B, G, S, K]: the caches of L layers in one array, heads before slots, so that the keys of one head
        are contiguous. Keys have H heads if they were rotated once per query head.
      layer: the index of the layer.
      positions: [B or 1, S] the position of the token in each slot; negative for an empty slot. Visibility depends on
        positions only: the content of an empty slot, even NaN, changes nothing.
      used: all slots from this index on are empty; their blocks are not computed.
      key_bias: [L, B, H, S, 1] the key bias of every slot.
      encoding: rotations of every slot, cos and sin [B or 1, S, rotations, R], if the cached keys are not
        rotated. None if they are.
    """

    key: Float[Array, "L B heads S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int
    positions: Int[Array, "#B S"]
    used: Int[Array, ""]
    encoding: LayerEncoding | None = None
    key_bias: Float[Array, "L B H S 1"] | None = None


def cached_attention(
    query: Float[Array, "B C H K"],
    key: Float[Array, "B C heads K"],
    value: Float[Array, "B C G V"],
    cache: CacheView,
    encoding: LayerEncoding,
    *,
    positions: Int[Array, "#B C"],
    window: int | None = None,
    block: int = 512,
    key_bias: Float[Array, "B H C"] | None = None,
    functions: LogitFunctions | None = None,
) -> Float[Array, "B C H V"]:
    """Attention of C new tokens of each sequence to the cached tokens and, causally, to each other.

    The result is that of `attention` for the last C tokens of a sequence. An online softmax runs over blocks of the
    cache: memory is linear in the block, and time in the length of the sequence, not in the capacity. The new tokens
    may be in the cache already, if `cache.positions` does not list them. Padding tokens of a sequence come last, where
    causality hides them.

    Args:
      query, value: of the new tokens, not rotated, not scaled; after `hooks.encode`.
      key: of the new tokens, from `encode_keys`.
      cache: the earlier tokens.
      encoding: of this layer, at the new tokens' positions.
      positions: of the new tokens: consecutive within a sequence, and higher than all positions in its cache.
      window: a query sees the last `window` tokens, itself included; None sees all.
      block: slots per block.
      key_bias: of the new tokens.
      functions: of all logits of the new tokens.

    Returns:
      [B, C, H, K] in the dtype of `query`.
    """
    B, C, H, _ = query.shape
    G, K = value.shape[2:]
    check_heads(H, G)
    hooks = encoding.hooks
    q = scaled(encode_queries(query, encoding, G), encoding.scale(K))
    q = q.transpose(0, 2, 1, 3).reshape(B, G, H // G, C, -1)
    slope = None if encoding.slope is None else encoding.slope.reshape(G, H // G, 1, 1)
    function, of_sink = position_bias(hooks), sink(hooks, H)

    def masked(
        logits: jax.Array, at: jax.Array, of_keys: jax.Array | None, distance: jax.Array, seen: jax.Array
    ) -> jax.Array:
        """Logits from products with keys at these positions, and everything that is added; MASKED where not `seen`."""
        logits = capped(logits, encoding.soft_cap)
        if function is not None:
            logits += heads_of_groups(function.block(positions, at, H), G)
        if of_keys is not None:
            logits += heads_of_groups(of_keys, G)[:, :, :, None].astype(jnp.float32)
        if slope is not None:
            logits -= slope * distance[:, None, None].astype(jnp.float32)
        if window is not None:
            seen = seen & (distance < window)
        return jnp.where(seen[:, None, None], logits, MASKED)

    def earlier(first: jax.Array, block: int, empty: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The logits and the values of a block of slots, of which `empty` are left out."""
        at = jax.lax.dynamic_slice_in_dim(cache.positions, first, block, axis=1)
        at = at if empty is None else jnp.where(empty, -1, at)
        k, v = _block(cache.key, cache.layer, first, block), _block(cache.value, cache.layer, first, block)
        if cache.encoding is not None:
            rotations = cache.encoding.cos, cache.encoding.sin
            part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=block, axis=1)
            of_block = LayerEncoding(*jax.tree.map(part, rotations))
            k = encode_keys(k.transpose(0, 2, 1, 3), of_block, H).transpose(0, 2, 1, 3)
        of_slots = None if cache.key_bias is None else _block(cache.key_bias, cache.layer, first, block)[..., 0]
        distance = positions[:, :, None] - at[:, None, :]
        logits = masked(_logits(q, k), at, of_slots, distance, (at >= 0)[:, None] & (distance > 0))
        # A masked logit is so far below the query's own that its weight is exactly 0. But 0 times NaN would be NaN.
        return logits, jnp.where((at >= 0)[:, None, :, None], v, 0)

    slots, new_values = cache.key.shape[3], value.transpose(0, 2, 1, 3)
    distance = (jnp.arange(C)[:, None] - jnp.arange(C))[None]
    own = masked(_logits(q, key.transpose(0, 2, 1, 3)), positions, key_bias, distance, distance >= 0)
    if functions is not None:
        logits, v = earlier(jnp.zeros((), jnp.int32), slots)
        logits = jnp.concatenate([logits, own], -1).reshape(B, H, C, -1)
        # A function may depend on the order of keys: those of a ring of slots are not in the order of positions.
        order = jnp.argsort(jnp.broadcast_to(cache.positions, (B, slots)), axis=1)
        order = jnp.concatenate([order, jnp.broadcast_to(slots + jnp.arange(C), (B, C))], 1)
        logits = functions.apply(jnp.take_along_axis(logits, order[:, None, None], axis=-1))
        weights = softmax(logits.reshape(B, G, H // G, C, -1), of_sink)
        v = jnp.concatenate([jnp.broadcast_to(v, (B, *v.shape[1:])), new_values], 2)
        out = _weighted(weights, jnp.take_along_axis(v, order[:, None, :, None], axis=2))
        return out.reshape(B, H, C, -1).transpose(0, 2, 1, 3).astype(query.dtype)

    # The new tokens come first: every query sees its own key there, so that no sum of weights is ever zero.
    highest = own.max(-1)
    weights = jnp.exp(own - highest[..., None])
    start = OnlineSoftmax(highest, weights.sum(-1), _weighted(weights, new_values))
    block = min(block, slots)

    def add_block(j: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        # If blocks do not divide the cache, the last one begins earlier, without the slots of the block before.
        first = jnp.minimum(j * block, slots - block)
        logits, v = earlier(first, block, first + jnp.arange(block) < j * block)
        return softmax.add(logits, lambda weights: _weighted(weights, v))

    result = jax.lax.fori_loop(0, (cache.used + block - 1) // block, add_block, start)
    out = (result.out / result.total[..., None]).reshape(B, H, C, K)
    logsumexp = (result.highest + jnp.log(result.total)).reshape(B, H, C)
    return with_sink(PartialAttention(out, logsumexp), of_sink, query.dtype).transpose(0, 2, 1, 3)


def _block(x: jax.Array, layer: jax.Array | int, first: jax.Array, block: int) -> Float[Array, "B heads S K"]:
    """One block of one layer's cache, without a copy of the whole layer."""
    zero = jnp.zeros((), jnp.int32)
    sizes = (1, *x.shape[1:3], block, x.shape[4])
    return jax.lax.dynamic_slice(x, (jnp.asarray(layer, jnp.int32), zero, zero, first, zero), sizes)[0]


def _logits(q: Float[Array, "B G M C K"], k: Float[Array, "B heads S K"]) -> Float[Array, "B G M C S"]:
    B, G, M, C, K = q.shape
    # Query heads that share a key are more queries to the matrix product.
    q = q.reshape(B, k.shape[1], -1, K)
    logits = jnp.einsum("bgtk,bgsk->bgts", q, k, preferred_element_type=jnp.float32)
    return logits.reshape(B, G, M, C, k.shape[2])


def _weighted(weights: Float[Array, "B G M C S"], v: Float[Array, "B G S V"]) -> Float[Array, "B G M C V"]:
    B, G, M, C, S = weights.shape
    weights = weights.reshape(B, G, M * C, S).astype(v.dtype)
    out = jnp.einsum("bgts,bgsk->bgtk", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(B, G, M, C, v.shape[3])


class KVCache(NamedTuple):
    """The KV caches of L layers, and the index of the layer to attend to; slot s contains the token at position s."""

    key: Float[Array, "L B G S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int


def attend_to_cache(
    kernel: KeyBlockKernel, query: Float[Array, "B C H K"], cache: KVCache, inputs: AttentionInputs
) -> Float[Array, "B C H K"]:
    """Attention of C new tokens of each sequence to the visible slots.

    Args:
      kernel: `tpu_key_block`, `gpu_key_block` or `chunked_key_block`.
      query: rotated and scaled.
      cache: contains the new tokens.
      inputs: start [B], the slot of each first new token; used [B]; slope; window; and the rotation of keys that
        are cached unrotated.
    """

    def part(q: jax.Array, cache: KVCache, inputs: AttentionInputs) -> Float[Array, "B H C K"]:
        return kernel(q, cache.key, cache.value, inputs, layer=cache.layer).out

    current, q = current_mesh(), query.swapaxes(1, 2)
    if current is None or current[0].size == 1:
        return part(q, cache, inputs).swapaxes(1, 2)
    of_cache, batch, heads = _specs(*current, cache)
    out = jax.shard_map(
        part,
        mesh=current[0],
        in_specs=(PartitionSpec(batch, heads, None, None), of_cache, input_specs(inputs, batch, None, heads)),
        out_specs=PartitionSpec(batch, heads, None, None),
        check_vma=False,
    )(q, cache, inputs)
    return out.swapaxes(1, 2)


def write_and_attend(
    kernel: KeyBlockKernel,
    query: Float[Array, "B C H K"],
    key: Float[Array, "B C G K"],
    value: Float[Array, "B C G K"],
    cache: KVCache,
    scale: Float[Array, ""],
    inputs: AttentionInputs,
) -> tuple[Float[Array, "B C H K"], Float[Array, "L B G S K"], Float[Array, "L B G S K"]]:
    """Writes new tokens into a cache whose slots are sharded over the mesh's context axis, and attends to it.

    Each device holds a contiguous range of slots, writes the new tokens that belong there, and attends to its own
    range; the partial results are merged by their logsumexp. No part of the cache moves between devices.

    Args:
      kernel, inputs: as in `attend_to_cache`, without `used`; start is equal in all sequences unless C is 1.
      query: not scaled; not rotated if `inputs` have a rotation, because devices count positions from their own slots.
      key, value: of the new tokens, as they are cached.
      cache: without the new tokens.
      scale: of the logits.

    Returns:
      The attention, and the new keys and values of the cache.
    """
    current = current_mesh()
    assert current is not None
    mesh, rules = current
    axis, C = rules.slots, query.shape[1]
    of_cache, batch, heads = _specs(mesh, rules, cache, slots=axis)
    of_new = PartitionSpec(batch, None, heads, None)

    def part(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, scale: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        start = inputs.start - jax.lax.axis_index(axis) * cache.key.shape[3]
        cache = cache._replace(
            key=_written(cache.key, cache.layer, k, start), value=_written(cache.value, cache.layer, v, start)
        )
        if inputs.rotation is not None:
            cos, sin = rotation_tables(*inputs.rotation, start[:, None] + jnp.arange(C, dtype=jnp.int32))
            repeats = q.shape[2] // cos.shape[2] if cos.shape[2] > 1 else 1
            q = rotate(q, *(jnp.repeat(x, repeats, axis=2) for x in (cos, sin)))
        q = scaled(q, scale).swapaxes(1, 2)
        inputs = replace(inputs, start=start, used=jnp.maximum(start + C, 0))
        found = kernel(q, cache.key, cache.value, inputs, layer=cache.layer, wide=True)
        highest = jax.lax.pmax(found.logsumexp, axis)
        weight = jnp.exp(found.logsumexp - highest)[..., None]
        total = jax.lax.psum(weight, axis)
        out = jax.lax.psum(weight * found.out.astype(jnp.float32), axis) / total
        return out.astype(q.dtype), cache.key, cache.value

    out, new_key, new_value = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(of_new, of_new, of_new, of_cache, PartitionSpec(), input_specs(inputs, batch, None, heads)),
        out_specs=(PartitionSpec(batch, heads, None, None), of_cache.key, of_cache.value),
        check_vma=False,
    )(query, key, value, cache, scale, inputs)
    return out.swapaxes(1, 2), new_key, new_value


def _written(
    cache: Float[Array, "L B G S K"], layer: jax.Array | int, new: Float[Array, "B C G K"], start: Int[Array, " B"]
) -> Float[Array, "L B G S K"]:
    """The cache with the new tokens that belong into its slots; the first one belongs to slot `start`."""
    B, C = new.shape[:2]
    S = cache.shape[3]
    if C == 1:
        at, sequences = jnp.clip(start, 0, S - 1), jnp.arange(B)
        here = ((start >= 0) & (start < S))[:, None, None]
        return cache.at[layer, sequences, :, at].set(jnp.where(here, new[:, 0], cache[layer, sequences, :, at]))
    token = jnp.arange(S) - start[:, None]
    taken = jnp.take_along_axis(new, jnp.clip(token, 0, C - 1)[:, :, None, None], axis=1).swapaxes(1, 2)
    here = ((token >= 0) & (token < C))[:, None, :, None]
    before = jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(cache, jnp.where(here, taken, before), layer, 0)


def _specs(mesh: Mesh, rules: AxisRules, cache: KVCache, slots: str | None = None) -> tuple[KVCache, Any, Any]:
    """How a cache is sharded, and the mesh axes of its sequences and heads.

    If the key heads do not divide over `tensor`, every device has all key heads and all queries.
    """
    spec = rules.spec(("layers", "batch", "kv_heads", None, "head_dim"), cache.key.shape, mesh, "the cache")
    of_keys = PartitionSpec(spec[0], spec[1], spec[2], slots, None)
    return KVCache(of_keys, of_keys, PartitionSpec()), spec[1], spec[2]
