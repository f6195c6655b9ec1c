"""One program of the GPU kernel: a block of queries against its visible keys; see `gpu`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pe_lab.attention.key_block import FLOOR, MASKED

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class GpuTiles:
    """Block sizes. Every side of a product is a power of two, 16 or more.

    Attributes:
      heads: query heads of a program, all of one key head.
      rows: queries of a program, over its heads.
      keys: in a block.
      warps: of a program, 32 threads each.
      stages: blocks of keys and values that are being loaded or in use.
    """

    heads: int
    rows: int
    keys: int
    warps: int
    stages: int


def filled(head_dim: int) -> int:
    return max(32, pl.next_power_of_2(head_dim))


@dataclass(frozen=True)
class GpuStatic:
    tiles: GpuTiles
    splits: int
    row_blocks: int
    queries: int  # T
    keys: int  # S
    length: int  # queries of a group of heads
    head_dim: int
    window: int | None

    @property
    def wide(self) -> int:
        return filled(self.head_dim)


def iota(size: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def load(
    ref: Any, *at: Any, down: jax.Array | None = None, across: jax.Array | None = None, other: float = 0
) -> jax.Array:
    """A block or a row of `ref`; `other` where the mask of its first or of its last axis is false."""
    if sum(isinstance(one, pl.Slice) for one in at) > 1:
        down, across = (None if down is None else down[:, None]), (None if across is None else across[None])
    mask = across if down is None else down if across is None else down & across
    return plgpu.load(ref.at[at], mask=mask, other=None if mask is None else other)


def distance_bias(
    ref: Any, distance: jax.Array, nearest: jax.Array | None = None, head: jax.Array | None = None
) -> jax.Array:
    """The bias of each distance of a block, from a table: entry min(distance, D - 1), 0 for negative distances.

    Args:
      ref: [D], or [heads, D] with `head` of the block or of each of its rows.
      nearest: the smallest distance of the block: beyond the table, one entry is loaded for the whole block. None: most
        blocks are within the table, and this is not tested.
    """
    beyond, shape = ref.shape[-1] - 1, distance.shape
    of_rows = head is not None and head.ndim == 1
    heads = [] if head is None else [jnp.broadcast_to(head[:, None] if of_rows else head, shape)]

    def each() -> jax.Array:
        return plgpu.load(ref.at[*heads, jnp.clip(distance, 0, beyond)], mask=None, other=None)

    def one() -> jax.Array:
        last = jnp.full(head.shape if of_rows else (1,), beyond)
        first = [] if head is None else [jnp.broadcast_to(head, last.shape)]
        return jnp.broadcast_to(plgpu.load(ref.at[*first, last], mask=None, other=None)[:, None], shape)

    return each() if nearest is None else jax.lax.cond(nearest >= beyond, one, each)


def key_sections(
    first_query: jax.Array | int,
    last_query: jax.Array | int,
    used: jax.Array | int,
    window: int | None,
    size: int,
) -> tuple[jax.Array | int, jax.Array | int, jax.Array, jax.Array]:
    """The blocks of keys that queries see: the first one, the end, and between them a range that all queries see whole.

    Returns:
      begin, whole_from, whole_to, end. `whole_from` and `whole_to` are not limited to the range from begin to end.
    """
    before = lambda key: jax.lax.div(jnp.maximum(key, 0), size)  # noqa: E731
    end = before(jnp.minimum(last_query + 1, used) + size - 1)
    begin = 0 if window is None else jnp.minimum(before(first_query - window + 1), end)
    whole_from = 0 if window is None else before(last_query - window + size)
    return begin, whole_from, before(jnp.minimum(first_query + 1, used)), end


def kernel(static: GpuStatic, names: tuple[str, ...], *refs: Any) -> None:
    cut, window, K, wide = static.tiles, static.window, static.head_dim, static.wide
    ref = dict(zip(names, refs, strict=False))
    out_ref, logsumexp_ref = refs[len(names) :]
    dtype = ref["key"].dtype
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    channels = None if wide == K else iota(wide) < K
    rotates = "block cos" in ref
    half = wide // 2
    pairs = None if half == K // 2 else iota(half) < K // 2
    # The parts of a head: first channel, width, and mask of real channels.
    halves = [(0, half, pairs), (K // 2, half, pairs)] if rotates else [(0, wide, channels)]

    block = static.row_blocks - 1 - pl.program_id(0)
    rows = block * cut.rows + iota(cut.rows)
    there = None if static.length % cut.rows == 0 else rows < static.length
    layer = ref["layer"][0]
    start = ref["start"][0] if "start" in ref else 0
    used = jnp.minimum(ref["used"][0], static.keys) if "used" in ref else static.keys
    query_index = start + (rows if cut.heads == 1 else jax.lax.rem(rows, static.queries))
    first_query, last_query = start, start + static.queries - 1
    if cut.heads == 1:
        first_query = start + block * cut.rows
        last_query = jnp.minimum(first_query + cut.rows - 1, last_query)
    q = [load(ref["query"], pl.ds(0, cut.rows), pl.ds(c, w), down=there, across=m) for c, w, m in halves]
    of_rows = {
        name: load(ref[name], pl.ds(0, cut.rows), down=there)
        for name in ("slope", "query positions", "query segments")
        if name in ref and ref[name].shape[0] > 1
    }
    # The head of each query within the program's group.
    head = None if cut.heads == 1 else jnp.minimum(jax.lax.div(rows, static.queries), cut.heads - 1)
    if rotates:
        place_cos, place_sin = (
            load(ref[f"place {x}"], pl.ds(0, cut.keys), pl.ds(0, half), across=pairs) for x in ("cos", "sin")
        )

    # This split's part of the key blocks that contain visible keys of any query.
    begin, whole_from, whole_to, end = key_sections(first_query, last_query, used, window, cut.keys)
    first, last = begin, end
    if static.splits > 1:
        each = jax.lax.div(end - begin + static.splits - 1, static.splits)
        first = jnp.minimum(begin + pl.program_id(1) * each, end)
        last = jnp.minimum(first + each, end)
    whole_from = jnp.clip(whole_from, first, last)
    whole_to = jnp.clip(whole_to, whole_from, last)

    def logits(j: jax.Array, here: jax.Array | None) -> jax.Array:
        tokens = pl.ds(j * cut.keys, cut.keys)
        k = [load(ref["key"], layer, tokens, pl.ds(c, w), down=here, across=m) for c, w, m in halves]
        if rotates:
            block_cos, block_sin = (
                load(ref[f"block {x}"], pl.ds(j, 1), pl.ds(0, half), across=pairs) for x in ("cos", "sin")
            )
            cos = block_cos * place_cos - block_sin * place_sin
            sin = block_sin * place_cos + block_cos * place_sin
            left, right = (x.astype(jnp.float32) for x in k)
            k = [(left * cos - right * sin).astype(dtype), (right * cos + left * sin).astype(dtype)]
        against = (((1,), (1,)), ((), ()))
        return functools.reduce(jnp.add, (product(a, b, against) for a, b in zip(q, k, strict=True)))

    def add_block(masked: bool, j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, highest, total = sums
        key_index = j * cut.keys + iota(cut.keys)
        here = key_index < used if masked else None
        s = logits(j, here)
        distance = query_index[:, None] - key_index[None]
        of_keys = {
            what: load(ref[f"key {what}"], pl.ds(j * cut.keys, cut.keys), down=here)
            for what in ("positions", "segments")
            if f"key {what}" in ref
        }
        if "slope" in ref:
            far = distance
            if "positions" in of_keys:
                far = of_rows["query positions"][:, None] - of_keys["positions"][None]
            slope = of_rows["slope"][:, None] if cut.heads > 1 else ref["slope"][0]
            s -= slope * far.astype(jnp.float32)
        if "distance bias" in ref:
            table = ref["distance bias"]
            nearest = first_query - (j + 1) * cut.keys + 1 if table.shape[-1] < static.keys else None
            s += distance_bias(table, distance, nearest, head)
        if "key bias" in ref:
            bias = ref["key bias"]
            if cut.heads == 1:
                s += load(bias, pl.ds(j * cut.keys, cut.keys), down=here)[None]
            else:
                heads, keys = (jnp.broadcast_to(x, s.shape) for x in (head[:, None], key_index[None]))
                mask = None if here is None else jnp.broadcast_to(here[None], s.shape)
                s += plgpu.load(bias.at[heads, keys], mask=mask, other=None if mask is None else 0)
        seen = []
        if masked:
            seen = [distance >= 0, here[None]] + ([] if window is None else [distance < window])
        if "segments" in of_keys:
            seen.append(of_rows["query segments"][:, None] == of_keys["segments"][None])
        if seen:
            s = jnp.where(functools.reduce(jnp.logical_and, seen), s, MASKED)
        # Powers of two: one instruction, and the factor goes into a fused multiply-add.
        top = jnp.maximum(highest, s.max(1) * LOG2_E)
        weights, shrink = jnp.exp2(s * LOG2_E - top[:, None]), jnp.exp2(highest - top)
        v = load(ref["value"], layer, pl.ds(j * cut.keys, cut.keys), pl.ds(0, wide), down=here, across=channels)
        new = product(weights.astype(dtype), v, (((1,), (0,)), ((), ())))
        return out * shrink[:, None] + new, top, total * shrink + weights.sum(1)

    sums = (
        jnp.zeros((cut.rows, wide), jnp.float32),
        jnp.full((cut.rows,), FLOOR, jnp.float32),
        jnp.zeros((cut.rows,), jnp.float32),
    )
    if window is not None:
        sums = jax.lax.fori_loop(first, whole_from, functools.partial(add_block, True), sums)
    sums = jax.lax.fori_loop(whole_from, whole_to, functools.partial(add_block, False), sums)
    out, highest, total = jax.lax.fori_loop(whole_to, last, functools.partial(add_block, True), sums)

    some = total > 0
    total = jnp.where(some, total, 1)
    logsumexp = jnp.where(some, highest / LOG2_E + jnp.log(total), MASKED)
    masks = [None if there is None else there[:, None], None if channels is None else channels[None]]
    masks = [mask for mask in masks if mask is not None]
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    plgpu.store(out_ref.at[:, :], (out / total[:, None]).astype(out_ref.dtype), mask=mask)
    plgpu.store(logsumexp_ref.at[:], logsumexp, mask=there)
