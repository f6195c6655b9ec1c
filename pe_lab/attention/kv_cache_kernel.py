"""Attention of new tokens to a KV cache that contains them already, by a kernel, on one device or on several.

`cached_attention` needs no kernel and serves every layer. This module is for devices with a kernel, and for caches
whose slots are sharded over the devices of a context axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import AttentionInputs, KeyBlockKernel, Rotation, scaled
from pe_lab.attention.sharded import rotation_spec
from pe_lab.parallel import AxisRules, current_mesh
from pe_lab.positional import rotate, rotation_tables


class KVCache(NamedTuple):
    """The KV caches of L layers, and the layer to attend to.

    Attributes:
      key, value: [L, B, G, S, K]; slot s contains the token at position s.
      layer: the index of the layer.
      rotation: rotates keys that are cached unrotated; None if they are cached rotated.
    """

    key: Float[Array, "L B G S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int
    rotation: Rotation | None = None


def attend_to_cache(
    kernel: KeyBlockKernel,
    query: Float[Array, "B C H K"],
    cache: KVCache,
    scale: Float[Array, ""],
    slope: Float[Array, " H"] | None,
    start: Int[Array, " B"],
    used: Int[Array, " B"],
    *,
    window: int | None = None,
) -> Float[Array, "B C H K"]:
    """Attention of C new tokens of each row to the visible slots below `used`.

    Args:
      kernel: `tpu_key_block`, `gpu_key_block` or `chunked_key_block`.
      query: rotated; not scaled.
      cache: contains the new tokens.
      scale: of the logits.
      slope: ALiBi's.
      start: the slot of each row's first new token.
      used: slots of each row from this index on are ignored.
      window: as in `attention`.
    """
    current = current_mesh()
    q = scaled(query, scale).swapaxes(1, 2)

    def part(
        q: jax.Array, cache: KVCache, slope: jax.Array | None, start: jax.Array, used: jax.Array
    ) -> Float[Array, "B H C K"]:
        inputs = AttentionInputs(start=start, used=used, slope=slope, rotation=cache.rotation, window=window)
        return kernel(q, cache.key, cache.value, inputs, layer=cache.layer).out

    if current is None or current[0].size == 1:
        return part(q, cache, slope, start, used).swapaxes(1, 2)
    specs = _Specs(*current, cache)
    out = jax.shard_map(
        part,
        mesh=current[0],
        in_specs=(specs.queries, specs.cache, specs.slope(slope), specs.rows, specs.rows),
        out_specs=specs.queries,
        check_vma=False,
    )(q, cache, slope, start, used)
    return out.swapaxes(1, 2)


def write_and_attend(
    kernel: KeyBlockKernel,
    query: Float[Array, "B C H K"],
    key: Float[Array, "B C G K"],
    value: Float[Array, "B C G K"],
    cache: KVCache,
    scale: Float[Array, ""],
    slope: Float[Array, " H"] | None,
    start: Int[Array, " B"],
    *,
    window: int | None = None,
) -> tuple[Float[Array, "B C H K"], Float[Array, "L B G S K"], Float[Array, "L B G S K"]]:
    """Writes new tokens into a cache whose slots are sharded over the mesh's context axis, and attends to it.

    Each device holds a contiguous range of slots, writes the new tokens that belong there, and attends to its own
    range; the partial results are merged by their logsumexp. No part of the cache moves between devices.

    Args:
      kernel, scale, slope, window: as in `attend_to_cache`.
      query: neither rotated nor scaled if `cache.rotation` is given, because devices count positions from their own
        first slot; else rotated.
      key, value: of the new tokens, as they are cached.
      cache: without the new tokens.
      start: position of each row's first new token; equal in all rows unless C is 1.

    Returns:
      The attention, and the new keys and values of the cache.
    """
    current = current_mesh()
    assert current is not None
    mesh, rules = current
    axis = rules.slots
    specs = _Specs(mesh, rules, cache, slots=axis)
    C = query.shape[1]

    def part(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, scale: jax.Array, slope: jax.Array | None,
        start: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        first = jax.lax.axis_index(axis) * cache.key.shape[3]
        start = start - first
        cache = cache._replace(
            key=_written(cache.key, cache.layer, k, start), value=_written(cache.value, cache.layer, v, start)
        )
        if cache.rotation is not None:
            cos, sin = rotation_tables(*cache.rotation, start[:, None] + jnp.arange(C, dtype=jnp.int32))
            repeats = q.shape[2] // cos.shape[2] if cos.shape[2] > 1 else 1
            q = rotate(q, *(jnp.repeat(x, repeats, axis=2) for x in (cos, sin)))
        q = scaled(q, scale).swapaxes(1, 2)
        inputs = AttentionInputs(
            start=start, used=jnp.maximum(start + C, 0), slope=slope, rotation=cache.rotation, window=window
        )
        found = kernel(q, cache.key, cache.value, inputs, layer=cache.layer, wide=True)
        highest = jax.lax.pmax(found.logsumexp, axis)
        weight = jnp.exp(found.logsumexp - highest)[..., None]
        total = jax.lax.psum(weight, axis)
        out = jax.lax.psum(weight * found.out.astype(jnp.float32), axis) / total
        return out.astype(q.dtype), cache.key, cache.value

    out, new_key, new_value = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs.new, specs.new, specs.new, specs.cache, PartitionSpec(), specs.slope(slope), specs.rows),
        out_specs=(specs.queries, specs.cache.key, specs.cache.value),
        check_vma=False,
    )(query, key, value, cache, scale, slope, start)
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


class _Specs:
    """Partition specs of a cache and of the arrays that attend to it."""

    def __init__(self, mesh: Mesh, rules: AxisRules, cache: KVCache, slots: str | None = None):
        spec = rules.spec(("layers", "batch", "kv_heads", None, "head_dim"), cache.key.shape, mesh, "the cache")
        # If the key heads do not divide over `tensor`, every device has all key heads and all queries.
        batch, self._heads = spec[1], spec[2]
        of_keys = PartitionSpec(spec[0], batch, self._heads, slots, None)
        self.cache = KVCache(of_keys, of_keys, PartitionSpec(), rotation_spec(cache.rotation, self._heads))
        self.queries = PartitionSpec(batch, self._heads, None, None)
        self.new = PartitionSpec(batch, None, self._heads, None)
        self.rows = PartitionSpec(batch)

    def slope(self, slope: jax.Array | None) -> PartitionSpec | None:
        return None if slope is None else PartitionSpec(self._heads)
