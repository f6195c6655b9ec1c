"""Attention of new tokens to a cache that holds them already, by a span's kernel, on one device or on several.

`cached_attention` needs no kernel, and serves everything; this is for where there is one, and for caches whose slots
lie on the devices of a context axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import Partial, Rotation, Side
from pe_lab.parallel import AxisRules, current_mesh
from pe_lab.positional import rotate, rotation_tables

Span = Callable[..., Partial]


class Stored(NamedTuple):
    """The caches of L layers, of which one is attended to.

    Attributes:
      key, value: [L, B, G, S, K]; slot s holds the token at position s.
      layer: which of the L.
      rotation: what turns keys that were cached as they were projected; None where they are turned.
    """

    key: Float[Array, "L B G S K"]
    value: Float[Array, "L B G S K"]
    layer: Int[Array, ""] | int
    rotation: Rotation | None = None


def attend_to_cache(
    span: Span,
    query: Float[Array, "B C H K"],
    stored: Stored,
    scale: Float[Array, ""],
    slope: Float[Array, " H"] | None,
    start: Int[Array, " B"],
    used: Int[Array, " B"],
    *,
    window: int | None = None,
) -> Float[Array, "B C H K"]:
    """What C new tokens of each row, the first at slot `start`, take from the slots below `used` that they may see.

    Args:
      span: `tpu_span`, `gpu_span` or `chunked_span`.
      query: turned; not scaled.
      scale: of the logits.
      slope: ALiBi's.
      start, used: of each row.
      window: as in `attention`.
    """
    current = current_mesh()
    q = (query.astype(jnp.float32) * scale).astype(query.dtype).swapaxes(1, 2)

    def part(
        q: jax.Array, stored: Stored, slope: jax.Array | None, start: jax.Array, used: jax.Array
    ) -> Float[Array, "B H C K"]:
        side = Side(start=start, used=used, slope=slope, rotation=stored.rotation)
        return span(q, stored.key, stored.value, side, layer=stored.layer, window=window).out

    if current is None or current[0].size == 1:
        return part(q, stored, slope, start, used).swapaxes(1, 2)
    cut = _Cut(*current, stored)
    out = jax.shard_map(
        part,
        mesh=current[0],
        in_specs=(cut.queries, cut.stored, cut.slope(slope), cut.rows, cut.rows),
        out_specs=cut.queries,
        check_vma=False,
    )(q, stored, slope, start, used)
    return out.swapaxes(1, 2)


def write_and_attend(
    span: Span,
    query: Float[Array, "B C H K"],
    key: Float[Array, "B C G K"],
    value: Float[Array, "B C G K"],
    stored: Stored,
    scale: Float[Array, ""],
    slope: Float[Array, " H"] | None,
    start: Int[Array, " B"],
    *,
    window: int | None = None,
) -> tuple[Float[Array, "B C H K"], Float[Array, "L B G S K"], Float[Array, "L B G S K"]]:
    """The same, with the cache's slots cut over the mesh's context axis, and the new tokens written into them.

    Each device holds a contiguous range of slots, writes those of the new tokens that fall into it, and attends to its
    own; what all of them find is merged by log-sum-exp. Nothing of the cache moves.

    Args:
      query: neither turned nor scaled where `stored.rotation` is given, for devices count positions from their own
        first slot; else turned.
      key, value: of the new tokens, as the cache holds them.
      start: position of each row's first new token; alike in all rows unless C is 1.
    """
    current = current_mesh()
    assert current is not None
    mesh, rules = current
    axis = rules.slots
    cut = _Cut(mesh, rules, stored, slots=axis)
    C = query.shape[1]

    def part(
        q: jax.Array, k: jax.Array, v: jax.Array, stored: Stored, scale: jax.Array, slope: jax.Array | None,
        start: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        first = jax.lax.axis_index(axis) * stored.key.shape[3]
        start = start - first
        stored = stored._replace(
            key=_written(stored.key, stored.layer, k, start), value=_written(stored.value, stored.layer, v, start)
        )
        if stored.rotation is not None:
            cos, sin = rotation_tables(*stored.rotation, start[:, None] + jnp.arange(C, dtype=jnp.int32))
            repeats = q.shape[2] // cos.shape[2] if cos.shape[2] > 1 else 1
            q = rotate(q, *(jnp.repeat(x, repeats, axis=2) for x in (cos, sin)))
        q = (q.astype(jnp.float32) * scale).astype(q.dtype).swapaxes(1, 2)
        side = Side(start=start, used=jnp.maximum(start + C, 0), slope=slope, rotation=stored.rotation)
        found = span(q, stored.key, stored.value, side, layer=stored.layer, window=window, wide=True)
        highest = jax.lax.pmax(found.logsumexp, axis)
        weight = jnp.exp(found.logsumexp - highest)[..., None]
        total = jax.lax.psum(weight, axis)
        out = jax.lax.psum(weight * found.out.astype(jnp.float32), axis) / total
        return out.astype(q.dtype), stored.key, stored.value

    out, new_key, new_value = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(cut.new, cut.new, cut.new, cut.stored, PartitionSpec(), cut.slope(slope), cut.rows),
        out_specs=(cut.queries, cut.stored.key, cut.stored.value),
        check_vma=False,
    )(query, key, value, stored, scale, slope, start)
    return out.swapaxes(1, 2), new_key, new_value


def _written(
    cache: Float[Array, "L B G S K"], layer: jax.Array | int, new: Float[Array, "B C G K"], start: Int[Array, " B"]
) -> Float[Array, "L B G S K"]:
    """A range of slots with those of the new tokens that fall into it, the first of which is slot `start`."""
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


class _Cut:
    """How a cache and what attends to it are cut over a mesh."""

    def __init__(self, mesh: Mesh, rules: AxisRules, stored: Stored, slots: str | None = None):
        spec = rules.spec(("layers", "batch", "kv_heads", None, "head_dim"), stored.key.shape, mesh, "the cache")
        # Where few key heads do not divide over `tensor`, every device has them all, and all queries.
        batch, heads = spec[1], spec[2]
        self._heads = heads
        of_keys = PartitionSpec(spec[0], batch, heads, slots, None)
        rotation = stored.rotation
        if rotation is not None:
            rows = heads if rotation.fixed_freq.shape[0] > 1 else None
            rotation = Rotation(PartitionSpec(rows, None, None), PartitionSpec(rows, None))
        self.stored = Stored(of_keys, of_keys, PartitionSpec(), rotation)
        self.queries = PartitionSpec(batch, heads, None, None)
        self.new = PartitionSpec(batch, None, heads, None)
        self.rows = PartitionSpec(batch)

    def slope(self, slope: jax.Array | None) -> PartitionSpec | None:
        return None if slope is None else PartitionSpec(self._heads)
