"""Attention of new tokens to a KV cache that contains them already, by a kernel, on one device or on several.

`cached_attention` needs no kernel and serves every layer. This module is for devices with a kernel, and for caches
whose slots are sharded over the devices of a context axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import AttentionInputs, KeyBlockKernel, scaled
from pe_lab.attention.sharded import input_specs
from pe_lab.parallel import AxisRules, current_mesh
from pe_lab.positional import rotate, rotation_tables


class KVCache(NamedTuple):
    """The KV caches of L layers, and the index of the layer to attend to; slot s contains the token at position s."""

    key: Float[Array, "L B G S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int


def attend_to_cache(
    kernel: KeyBlockKernel, query: Float[Array, "B C H K"], cache: KVCache, inputs: AttentionInputs
) -> Float[Array, "B C H K"]:
    """Attention of C new tokens of each row to the visible slots.

    Args:
      kernel: `tpu_key_block`, `gpu_key_block` or `chunked_key_block`.
      query: rotated and scaled.
      cache: contains the new tokens.
      inputs: start [B], the slot of each row's first new token; used [B]; slope; window; and the rotation of keys that
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
      kernel: as in `attend_to_cache`.
      query: neither rotated nor scaled if `inputs` have a rotation, because devices count positions from their own
        first slot; else rotated.
      key, value: of the new tokens, as they are cached.
      cache: without the new tokens.
      scale: of the logits.
      inputs: as in `attend_to_cache`, without `used`; start is equal in all rows unless C is 1.

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
    """A range of slots after the new tokens that belong into it are written; the first one belongs to slot `start`."""
    B, C = new.shape[:2]
    S = cache.shape[3]
    if C == 1:
        at, rows = jnp.clip(start, 0, S - 1), jnp.arange(B)
        here = ((start >= 0) & (start < S))[:, None, None]
        return cache.at[layer, rows, :, at].set(jnp.where(here, new[:, 0], cache[layer, rows, :, at]))
    token = jnp.arange(S) - start[:, None]
    taken = jnp.take_along_axis(new, jnp.clip(token, 0, C - 1)[:, :, None, None], axis=1).swapaxes(1, 2)
    here = ((token >= 0) & (token < C))[:, None, :, None]
    before = jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(cache, jnp.where(here, taken, before), layer, 0)


def _specs(mesh: Mesh, rules: AxisRules, cache: KVCache, slots: str | None = None) -> tuple[KVCache, Any, Any]:
    """How a cache is sharded, and the mesh axes of its rows and heads.

    If the key heads do not divide over `tensor`, every device has all key heads and all queries.
    """
    spec = rules.spec(("layers", "batch", "kv_heads", None, "head_dim"), cache.key.shape, mesh, "the cache")
    of_keys = PartitionSpec(spec[0], spec[1], spec[2], slots, None)
    return KVCache(of_keys, of_keys, PartitionSpec()), spec[1], spec[2]
