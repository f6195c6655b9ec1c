"""One step of the TPU kernel: a block of queries against a block of keys; see `tpu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pe_lab.attention.kernels.tpu_toeplitz import place, toeplitz
from pe_lab.attention.key_block import FLOOR, MASKED


@dataclass(frozen=True)
class TpuTiles:
    """Block sizes.

    Attributes:
      heads: query heads across a block of logits, all of one key head.
      queries: of each head in a block.
      keys: in a block.
      few: all queries are in one block, and are placed side by side before the kernel; else blocks are read in place.
    """

    heads: int
    queries: int
    keys: int
    few: bool

    @property
    def rows(self) -> int:
        """Queries across, rounded up to whole tiles of 16-bit numbers."""
        return -(-self.heads * self.queries // 16) * 16


@dataclass(frozen=True)
class TpuStatic:
    tiles: TpuTiles
    key_blocks: int
    visited: int  # key blocks that one block of queries visits, at most
    window: int | None
    keys: int  # S
    split_heads: bool  # keys are rotated once per query head
    channels_first: bool  # queries, keys and values are [K, tokens]

    @property
    def channels(self) -> int:
        """The axis of channels."""
        return 0 if self.channels_first else 1


def bounds(static: TpuStatic, b: Any, i: Any, start_ref: Any, used_ref: Any, *_: Any) -> tuple[Any, Any]:
    """The first and the last key block that contain visible keys of query block i."""
    cut = static.tiles
    first_query = start_ref[b] + i * cut.queries
    last = jnp.minimum(first_query + cut.queries, used_ref[b]) - 1
    last = jnp.where(last < 0, -1, jnp.minimum(jax.lax.div(jnp.maximum(last, 0), cut.keys), static.key_blocks - 1))
    if static.window is None:
        return 0, last
    return jax.lax.div(jnp.maximum(first_query - static.window + 1, 0), cut.keys), last


def key_block(static: TpuStatic, b: Any, i: Any, j: Any, start_ref: Any, used_ref: Any, *_: Any) -> Any:
    """The key block of step j. Steps beyond the last visible block return it again, so that nothing is fetched."""
    first, last = bounds(static, b, i, start_ref, used_ref)
    return jnp.clip(first + j, 0, jnp.clip(last, 0, static.key_blocks - 1))


def _rotated(key: jax.Array, coarse: jax.Array, fine: jax.Array, axis: int) -> jax.Array:
    """A block of keys, rotated by their positions; channels along `axis`; coarse [2, K], fine [2, *key.shape]."""
    cos_at, sin_at = (x if axis else down(x) for x in (coarse[0:1], coarse[1:2]))
    cos = cos_at * fine[0] - sin_at * fine[1]
    sin = sin_at * fine[0] + cos_at * fine[1]
    wide = key.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis)
    return (wide * cos + jnp.concatenate([-second, first], axis) * sin).astype(key.dtype)


def down(row: jax.Array) -> jax.Array:
    """[1, n] as [n, 1]."""
    return jnp.transpose(jnp.broadcast_to(row, (8, row.shape[1])))[:, :1]


def kernel(static: TpuStatic, names: tuple[str, ...], start_ref: Any, used_ref: Any, _: Any, *refs: Any) -> None:
    cut, window = static.tiles, static.window
    ref = dict(zip(names, refs, strict=False))
    out_ref, logsumexp_ref, highest_ref, total_ref, sum_ref = refs[len(names) :]
    b, group, i, j = (pl.program_id(axis) for axis in range(4))
    first, last = bounds(static, b, i, start_ref, used_ref)
    block = first + j
    used = used_ref[b]
    first_query = start_ref[b] + i * cut.queries
    first_key = block * cut.keys
    precision = jax.lax.Precision.HIGHEST if ref["query"].dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(j == 0)
    def _() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def logits() -> jax.Array:
        k, q_ref, axis = ref["key"][...], ref["query"], 1 - static.channels
        q = jnp.concatenate([q_ref[m] for m in range(q_ref.shape[0])], axis)
        against = (((static.channels,), (static.channels,)), ((), ()))
        if "coarse" not in ref:
            return product(k, q, against)
        rotated = lambda m: _rotated(k, ref["coarse"][m], ref["fine"][m], static.channels)  # noqa: E731
        if not static.split_heads:
            return product(rotated(0), q, against)
        of = [jax.lax.slice_in_dim(q, m * cut.queries, (m + 1) * cut.queries, axis=axis) for m in range(cut.heads)]
        return side_by_side(lambda m: product(rotated(m), of[m], against))

    def side_by_side(of_head: Any) -> jax.Array:
        """An array [keys, queries] of each head, in the order of logits."""
        parts = [of_head(m) for m in range(cut.heads)]
        if cut.rows > cut.heads * cut.queries:
            parts.append(jnp.zeros((cut.keys, cut.rows - cut.heads * cut.queries), jnp.float32))
        return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def add_block(masked: bool) -> None:
        s = logits()
        if "distance bias" in ref:
            table, begin = ref["distance bias"], place(first_query - first_key, cut.queries, cut.keys)
            s += side_by_side(lambda m: toeplitz(table, m, begin, cut.queries, cut.keys))
        if "key bias" in ref:
            bias, shape = ref["key bias"], (cut.keys, cut.queries)
            s += side_by_side(lambda m: jnp.broadcast_to(down(bias[m : m + 1, :]), shape))
        if masked or "slope" in ref:
            key_index = first_key + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
            query_index = first_query + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1) % cut.queries
            distance = query_index - key_index
        if "slope" in ref:
            far = distance
            if "query positions" in ref:
                far = ref["query positions"][...] - down(ref["key positions"][...])
            s -= ref["slope"][...] * far.astype(jnp.float32)
        v = ref["value"][...]
        if masked:
            seen = (distance >= 0) & (key_index < used)
            if window is not None:
                seen &= distance < window
            if "query segments" in ref:
                seen &= ref["query segments"][...] == down(ref["key segments"][...])
            s = jnp.where(seen, s, MASKED)
            # The weights of keys beyond `used` are 0, but 0 times NaN is NaN.
            shape = (1, cut.keys) if static.channels_first else (cut.keys, 1)
            there = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - static.channels) < used
            v = jnp.where(there, v, jnp.zeros_like(v))
        before = highest_ref[...]
        highest = jnp.maximum(before, s.max(0, keepdims=True))
        weights, shrink = jnp.exp(s - highest), jnp.exp(before - highest)
        highest_ref[...] = highest
        total_ref[...] = total_ref[...] * shrink + weights.sum(0, keepdims=True)
        sum_ref[...] = sum_ref[...] * shrink + product(
            v, weights.astype(v.dtype), (((1 - static.channels,), (0,)), ((), ()))
        )

    here = block <= last
    whole = (first_key + cut.keys - 1 <= first_query) & (first_key + cut.keys <= used)
    if window is not None:
        whole &= first_query + cut.queries - 1 - first_key < window
    if "query segments" in ref:
        pl.when(here)(lambda: add_block(True))
    else:
        pl.when(here & whole)(lambda: add_block(False))
        pl.when(here & ~whole)(lambda: add_block(True))

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        total = total_ref[...]
        some = total > 0
        out = (sum_ref[...] / jnp.where(some, total, 1)).astype(out_ref.dtype)
        logsumexp = jnp.where(some, highest_ref[...] + jnp.log(jnp.where(some, total, 1)), MASKED)
        along = logsumexp_ref.shape[1]
        for m in range(logsumexp_ref.shape[0]):
            of_head = slice(m * along, (m + 1) * along)
            out_ref[m] = out[:, of_head] if static.channels_first else jnp.transpose(out[:, of_head])
            logsumexp_ref[m : m + 1, :] = logsumexp[:, of_head]
