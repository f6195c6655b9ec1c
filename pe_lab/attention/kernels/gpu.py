"""pe_lab's attention kernel for NVIDIA GPUs (Pallas, compiled by Triton): flash attention with positional encodings.

One kernel serves whole sequences, chunks of a prompt against a KV cache, single tokens (decoding) and the key blocks of
a ring. The calls differ in the index of the first query and in the numbers of queries and keys.

A program has a block of queries and loops over blocks of keys in three sections: blocks at the window's edge, blocks in
which every query sees every key, and blocks at the diagonal or at the end of the keys. The middle section, where long
sequences spend their time, has no mask by index. If there are few queries, heads that share a key head are stacked in
one block, so that their keys are read once, and several programs share the keys of one block of queries. The two
channels of a pair are K / 2 apart: keys to rotate are loaded as two halves, and logits are the sum of two products.

JAX 0.12 calls its Triton backend deprecated. This kernel uses it because it serves both the A100 and the H100, and
because its kernels can be interpreted on a CPU. Its successor, Mosaic GPU, is for the H100 and later. This kernel
serves features that cuDNN and tokamax do not honour, mainly the rotation of keys inside.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pe_lab.attention.key_block import (
    FLOOR,
    MASKED,
    AttentionInputs,
    PartialAttention,
    block_rotations,
    check_block,
    merge,
)
from pe_lab.attention.sections import key_sections

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
    """A block or a row of `ref`; `other` where the mask of its first or last axis is false."""
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


FEW = 64  # queries, over heads that share a key head, that one program stacks in a block
PROGRAMS = 2 * 132  # programs that keep an H100 busy: two for each multiprocessor
MOST_SPLITS = 128  # the merge of splits is unrolled


def tiles(
    H: int, G: int, T: int, S: int, K: int, itemsize: int, alone: bool = False, distances: bool = False
) -> GpuTiles:
    """The block sizes for T queries of H heads against S keys of G heads.

    Args:
      alone: rotated keys serve one query head.
      distances: logits have a bias by distance.

    Shared memory contains queries and `stages` blocks of keys and values; rotated keys reuse a place that is free by
    then. That is itemsize * wide * (rows + 2 * stages * keys) bytes at most, and 2 KiB of small arrays; `wide` is K
    rounded up to a power of two. In KiB:

        wide       32   64  128  256
        16 bits    56  112  128  128    128 rows, 64 at 256; 128, 128, 64, 32 keys; 3 stages
        32 bits    36   72   80   80     32 rows, 16 at 256;  64,  64, 32, 16 keys; 2 stages

    A program may have 163 KiB on an A100 and 227 KiB on an H100. With 16 rows, two programs of at most 100 KiB fit on
    an H100. 256 threads have 255 registers each. With rotated keys at K = 128, they need 64 for sums, 32 for logits,
    32 for the rotations of a block's positions and 32 for keys; larger blocks spill. With `distances`, a stage also has
    a float32 bias for each logit in shared memory: with 128 keys and three stages, 240 KiB at 64 channels. Two stages
    of 64 keys take 56, 80, 128 and 104 KiB (Triton 3.9, sm_90), in 32 bits 16 keys at most 50 KiB. Products of float32
    do not use tensor cores, whose TF32 keeps 10 bits; they are unrolled over threads and need small blocks.
    """
    half, wide = itemsize < 4, filled(K)
    most = (128 if wide <= 128 else 64) if half else min(32, 4096 // wide)
    shared = 1 if alone else H // G
    heads = max(n for n in range(1, shared + 1) if shared % n == 0 and (n * T <= min(FEW, most) or n == 1))
    rows = min(most, max(16, pl.next_power_of_2(heads * T)))
    keys = min(128, 8192 // wide) if half else min(64, 4096 // wide)
    if distances:
        keys = min(keys, 64 if half else 16)
    keys = min(keys, max(16, pl.next_power_of_2(S)))
    warps = 8 if rows == 128 or rows * wide >= (8192 if half else 1024) else 4
    return GpuTiles(heads, rows, keys, warps, 3 if half and not distances else 2)


def gpu_key_block(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    inputs: AttentionInputs,
    *,
    layer: Int[Array, ""] | int | None = None,
    splits: int | None = None,
    wide: bool = False,
    interpret: bool = False,
) -> PartialAttention:
    """Attention to a block of keys (Dao 2023); arguments as in `kernels.tpu.tpu_key_block`, and these.

    Args:
      splits: programs that share the keys of a block of queries; their results are merged (flash-decoding). Each takes
        an equal part of the visible blocks. None: as many as keep an H100 busy.

    Raises:
      UnsupportedError: functions of logits.
    """
    B, H, T, K = query.shape
    if layer is None:
        layer, key, value = 0, key[None], value[None]
    G, S = key.shape[2:4]
    rotations = check_block(H, key, value, inputs)
    alone, distances = rotations not in (0, 1, G), inputs.distance_bias is not None
    cut = tiles(H, G, T, S, K, query.dtype.itemsize, alone, distances)
    groups, length = H // cut.heads, cut.heads * T
    row_blocks, key_blocks = pl.cdiv(length, cut.rows), pl.cdiv(S, cut.keys)
    visited = key_blocks if inputs.window is None else min(key_blocks, (inputs.window + cut.rows - 2) // cut.keys + 2)
    if splits is None:
        # A split is worth its partial output from four blocks of keys on.
        splits = max(1, min(PROGRAMS // (B * groups * row_blocks), visited // 4, MOST_SPLITS))
    splits = min(splits, visited)
    static = GpuStatic(cut, splits, row_blocks, T, S, length, K, inputs.window)
    arrays = _arrays(query, key, value, layer, inputs, static, groups, key_blocks)
    # Grid: blocks of queries, splits, groups of heads, rows of the batch; neighbouring programs share their keys. The
    # last queries see most keys: they begin first, so that no long program runs alone at the end.
    at_rows = lambda i, p, g, b: (p, b, g, row_blocks - 1 - i, 0)  # noqa: E731
    at_sums = lambda *at: at_rows(*at)[:-1]  # noqa: E731
    ignore_triton_deprecation()
    out, logsumexp = pl.pallas_call(
        functools.partial(kernel, static, tuple(arrays)),
        grid=(row_blocks, splits, groups, B),
        in_specs=[spec for _, spec in arrays.values()],
        out_specs=[
            pl.BlockSpec((None, None, None, cut.rows, static.wide), at_rows),
            pl.BlockSpec((None, None, None, cut.rows), at_sums),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(
                (splits, B, groups, length, K), query.dtype if splits == 1 and not wide else jnp.float32
            ),
            jax.ShapeDtypeStruct((splits, B, groups, length), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        name=f"pe_lab_attention_{'decode' if length <= FEW else 'flash'}",
        interpret=interpret,
    )(*(array for array, _ in arrays.values()))
    # Heads of a group are stacked: [groups, heads * T] has the same memory layout as [H, T].
    parts = [PartialAttention(out[p].reshape(B, H, T, K), logsumexp[p].reshape(B, H, T)) for p in range(splits)]
    if splits == 1:
        return parts[0]
    merged = merge(parts)
    return merged if wide else merged._replace(out=merged.out.astype(query.dtype))


def ignore_triton_deprecation() -> None:
    """Suppresses JAX 0.12's warning about Triton at each compilation; see the head of this file."""
    # The warning is raised when the surrounding program is lowered, after a context manager here would have ended.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def _arrays(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: jax.Array | int,
    inputs: AttentionInputs,
    static: GpuStatic,
    groups: int,
    key_blocks: int,
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """The kernel's arrays and their blocks, by name.

    Blocks may reach beyond their array. Compiled, a block only determines the address of its first element, and the
    kernel masks its loads; interpreted, the rest is filled with NaN.
    """
    B, H, T, K = query.shape
    L, G = key.shape[0], key.shape[2]
    cut, wide, length = static.tiles, static.wide, static.length
    heads, last, all_keys = cut.heads, static.row_blocks - 1, key_blocks * cut.keys
    of_key_head = lambda g: jax.lax.div(g, groups // G)  # noqa: E731
    at_keys = pl.BlockSpec((L, None, None, all_keys, wide), lambda i, p, g, b: (0, b, of_key_head(g), 0, 0))
    arrays = {
        "query": (
            query.reshape(B, groups, length, K),
            pl.BlockSpec((None, None, cut.rows, wide), lambda i, p, g, b: (b, g, last - i, 0)),
        ),
        "key": (key, at_keys),
        "value": (value, at_keys),
        "layer": (jnp.asarray(layer, jnp.int32).reshape(1), pl.BlockSpec((1,), lambda i, p, g, b: (0,))),
    }
    for name, bound in (("start", inputs.start), ("used", inputs.used)):
        if bound is not None:
            bound = jnp.broadcast_to(bound, (B,)).astype(jnp.int32)[:, None]
            arrays[name] = bound, pl.BlockSpec((None, 1), lambda i, p, g, b: (b, 0))
    if inputs.rotation is not None:
        rotations, half = inputs.rotation.fixed_freq.shape[0], wide // 2

        def row(g: jax.Array) -> Any:
            return 0 if rotations == 1 else of_key_head(g) if rotations == G else g

        tables = block_rotations(inputs.rotation, key_blocks, cut.keys)
        for name, table in zip(("block cos", "block sin", "place cos", "place sin"), tables, strict=True):
            arrays[name] = table, pl.BlockSpec((None, table.shape[1], half), lambda i, p, g, b: (row(g), 0, 0))
    if inputs.slope is not None:
        slope = inputs.slope.astype(jnp.float32).reshape(groups, heads)
        if heads > 1:
            slope = jnp.repeat(slope, T, axis=1)
        arrays["slope"] = slope, pl.BlockSpec((None, 1 if heads == 1 else cut.rows), lambda i, p, g, b: (g, 0))
    some = None if heads == 1 else heads
    if inputs.distance_bias is not None:
        table = inputs.distance_bias.astype(jnp.float32).reshape(groups, heads, -1)
        arrays["distance bias"] = table, pl.BlockSpec((None, some, table.shape[2]), lambda i, p, g, b: (g, 0, 0))
    if inputs.key_bias is not None:
        bias = inputs.key_bias.astype(jnp.float32)
        every = bias.shape[0] == 1
        arrays["key bias"] = (
            bias.reshape(bias.shape[0], groups, heads, -1),
            pl.BlockSpec((None, None, some, all_keys), lambda i, p, g, b: (0 if every else b, g, 0, 0)),
        )
    row_of_queries = pl.BlockSpec((None, cut.rows), lambda i, p, g, b: (b, last - i))
    row_of_keys = pl.BlockSpec((None, all_keys), lambda i, p, g, b: (b, 0))
    for what, (of_queries, of_keys) in inputs.compared().items():
        arrays[f"query {what}"] = jnp.tile(of_queries, (1, heads)), row_of_queries
        arrays[f"key {what}"] = of_keys, row_of_keys
    return arrays
