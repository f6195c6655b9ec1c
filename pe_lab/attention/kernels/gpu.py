"""Our attention kernel for NVIDIA GPUs (Pallas, compiled by Triton): flash attention that takes the schedule's row.

One kernel serves whole texts, chunks of a prompt against a cache, single tokens (decoding) and the spans of a ring:
they differ in where the first query stands, how many keys are there, and how many queries there are.

A program holds a block of queries and walks over blocks of keys in three sections: those that the window's edge cuts,
those that every query sees whole, and those that the diagonal or the end of the keys cuts. The middle one, where long
texts spend their time, has no mask by index. Where queries are few, heads that share a key head stand below each other
in one block, so that keys are read once for all of them, and several programs share the keys of one block of queries.
The two channels of a pair stand K / 2 apart: keys to be turned are loaded as two halves, and logits are the sum of
two products.

Why Triton, though JAX 0.12 calls its Triton backend deprecated: it serves the A100 as well as the H100, and its kernels
can be interpreted on a CPU. Mosaic GPU, the successor, is for the H100 and later. What cuDNN and tokamax honour they
may serve; this is for what they do not, keys that are turned inside above all.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pe_lab.attention.kernels.gpu_kernel import Static, Tiles, filled, kernel
from pe_lab.attention.key_block import Partial, Rotation, Side, merge
from pe_lab.positional import angles

FEW = 64  # queries, over heads that share a key head, that one program takes together
PROGRAMS = 2 * 132  # that keep an H100 busy: two for each multiprocessor
MOST_SPLITS = 128  # merging them is unrolled


def tiles(H: int, G: int, T: int, S: int, K: int, itemsize: int, alone: bool = False) -> Tiles:
    """The cut of T queries of H heads against S keys of G heads; `alone`: no two query heads share turned keys.

    Shared memory holds queries and `stages` blocks of keys and values; where keys are turned they take a place that
    is free by then. That is itemsize * wide * (rows + 2 * stages * keys) bytes at most, and 2 KiB of small things;
    `wide` is K filled up to a power of two. In KiB:

        wide       32   64  128  256
        16 bits    56  112  128  128    128 rows, 64 at 256; 128, 128, 64, 32 keys; 3 stages
        32 bits    36   72   80   80     32 rows, 16 at 256;  64,  64, 32, 16 keys; 2 stages

    An A100 has 163 of them for a program, an H100 227. With 16 rows an H100 holds two programs, of 100 at most.
    256 threads have 255 registers each: with keys turned, 64 for sums, 32 for logits, 32 for the rotations of a block's
    places and 32 for keys at K = 128; larger blocks spill. Products of float32 stay off tensor cores, whose TF32 keeps
    10 bits, and are unrolled over threads, hence their small blocks.
    """
    half, wide = itemsize < 4, filled(K)
    most = (128 if wide <= 128 else 64) if half else min(32, 4096 // wide)
    shared = 1 if alone else H // G
    heads = max(n for n in range(1, shared + 1) if shared % n == 0 and (n * T <= min(FEW, most) or n == 1))
    rows = min(most, max(16, pl.next_power_of_2(heads * T)))
    keys = min(128, 8192 // wide) if half else min(64, 4096 // wide)
    keys = min(keys, max(16, pl.next_power_of_2(S)))
    warps = 8 if rows == 128 or rows * wide >= (8192 if half else 1024) else 4
    return Tiles(heads, rows, keys, warps, 3 if half else 2)


def gpu_span(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    side: Side,
    *,
    layer: Int[Array, ""] | int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int | None = None,
    wide: bool = False,
    interpret: bool = False,
) -> Partial:
    """Attention of queries, turned and scaled already, to a span of keys (Dao 2023, with what `Side` adds).

    Args:
      query, key, value: G divides H; any T and S; K even where keys are to be turned.
      side: see `Side`. Rows may start at different places.
      layer: keys and values are those of many layers, [L, B, G, S, K], of which this one is read where it lies.
      window, soft_cap: as in `attention`.
      splits: programs that share the keys of a block of queries, merged afterwards (flash-decoding). None: as many as
        keep an H100 busy. Each takes its part of the blocks that are seen, wherever they lie.
      wide: give `out` in float32.
      interpret: run on whatever is here, slowly.
    """
    B, H, T, K = query.shape
    if layer is None:
        layer, key, value = 0, key[None], value[None]
    G, S = key.shape[2:4]
    if value.shape != key.shape or H % G:
        raise ValueError(f"{H} query heads, keys of shape {key.shape} and values of {value.shape} do not go together.")
    turning = 0 if side.rotation is None else side.rotation.fixed_freq.shape[0]
    if side.noise is not None and turning != H:
        raise NotImplementedError("noise is for heads that each turn keys their own way.")
    cut = tiles(H, G, T, S, K, query.dtype.itemsize, alone=turning not in (0, 1, G))
    groups, length = H // cut.heads, cut.heads * T
    row_blocks, key_blocks = pl.cdiv(length, cut.rows), pl.cdiv(S, cut.keys)
    visited = key_blocks if window is None else min(key_blocks, (window + cut.rows - 2) // cut.keys + 2)
    if splits is None:
        # A split is worth its partial output from four blocks of keys on.
        splits = max(1, min(PROGRAMS // (B * groups * row_blocks), visited // 4, MOST_SPLITS))
    splits = min(splits, visited)
    static = Static(cut, splits, row_blocks, T, S, length, K, window, soft_cap)
    inputs = _inputs(query, key, value, layer, side, static, groups, key_blocks)
    # Grid: blocks of queries, splits, groups of heads, rows of the batch; what runs side by side shares its keys. The
    # last queries see most keys: they begin first, so that no long program is left over at the end.
    at_rows = lambda i, p, g, b: (p, b, g, row_blocks - 1 - i, 0)  # noqa: E731
    at_sums = lambda *at: at_rows(*at)[:-1]  # noqa: E731
    _say_nothing_of_triton()
    out, logsumexp = pl.pallas_call(
        functools.partial(kernel, static, tuple(inputs)),
        grid=(row_blocks, splits, groups, B),
        in_specs=[spec for _, spec in inputs.values()],
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
    )(*(array for array, _ in inputs.values()))
    # Heads of a group stand below each other: [groups, heads * T] is [H, T] as it lies in memory.
    parts = [Partial(out[p].reshape(B, H, T, K), logsumexp[p].reshape(B, H, T)) for p in range(splits)]
    if splits == 1:
        return parts[0]
    merged = merge(parts)
    return merged if wide else merged._replace(out=merged.out.astype(query.dtype))


def _say_nothing_of_triton() -> None:
    """Keeps JAX 0.12 from warning, at each compilation, of what the head of this file answers."""
    # The warning comes when the program around us is lowered, which a context manager here would not outlast.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def _inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: jax.Array | int,
    side: Side,
    static: Static,
    groups: int,
    key_blocks: int,
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """The kernel's arrays, laid out, and how each is cut.

    Blocks may reach beyond their array. Compiled, nothing but the place of a block's first element comes of it, and
    the kernel masks what it loads; interpreted, the rest is filled with NaN.
    """
    B, H, T, K = query.shape
    L, G = key.shape[0], key.shape[2]
    cut, wide, length = static.tiles, static.wide, static.length
    heads, last, all_keys = cut.heads, static.row_blocks - 1, key_blocks * cut.keys
    of_key_head = lambda g: jax.lax.div(g, groups // G)  # noqa: E731
    at_keys = pl.BlockSpec((L, None, None, all_keys, wide), lambda i, p, g, b: (0, b, of_key_head(g), 0, 0))
    inputs = {
        "query": (
            query.reshape(B, groups, length, K),
            pl.BlockSpec((None, None, cut.rows, wide), lambda i, p, g, b: (b, g, last - i, 0)),
        ),
        "key": (key, at_keys),
        "value": (value, at_keys),
        "layer": (jnp.asarray(layer, jnp.int32).reshape(1), pl.BlockSpec((1,), lambda i, p, g, b: (0,))),
    }
    for name, bound in (("start", side.start), ("used", side.used)):
        if bound is not None:
            bound = jnp.broadcast_to(bound, (B,)).astype(jnp.int32)[:, None]
            inputs[name] = bound, pl.BlockSpec((None, 1), lambda i, p, g, b: (b, 0))
    if side.rotation is not None:
        turning, half = side.rotation.fixed_freq.shape[0], wide // 2

        def row(g: jax.Array) -> Any:
            return 0 if turning == 1 else of_key_head(g) if turning == G else g

        for name, table in _rotation_parts(side.rotation, key_blocks, cut.keys).items():
            inputs[name] = table, pl.BlockSpec((None, table.shape[1], half), lambda i, p, g, b: (row(g), 0, 0))
    if side.slope is not None:
        slope = side.slope.astype(jnp.float32).reshape(groups, heads)
        if heads > 1:
            slope = jnp.repeat(slope, T, axis=1)
        inputs["slope"] = slope, pl.BlockSpec((None, 1 if heads == 1 else cut.rows), lambda i, p, g, b: (g, 0))
    if side.noise is not None:
        seeds = jax.lax.bitcast_convert_type(side.noise.seeds, jnp.int32)[:, None]
        inputs["noise seed"] = seeds, pl.BlockSpec((None, 1), lambda i, p, g, b: (g, 0))
        size = side.noise.size.astype(jnp.float32)
        inputs["noise size"] = size, pl.BlockSpec((None, all_keys), lambda i, p, g, b: (b, 0))
    pairs = {"segments": (side.query_segments, side.key_segments)}
    if side.slope is not None:
        pairs["positions"] = (side.query_positions, side.key_positions)
    for what, (of_queries, of_keys) in pairs.items():
        if of_queries is None or of_keys is None:
            continue
        inputs[f"query {what}"] = (
            jnp.tile(of_queries.astype(jnp.int32), (1, heads)),
            pl.BlockSpec((None, cut.rows), lambda i, p, g, b: (b, last - i)),
        )
        inputs[f"key {what}"] = (
            of_keys.astype(jnp.int32),
            pl.BlockSpec((None, all_keys), lambda i, p, g, b: (b, 0)),
        )
    return inputs


def _rotation_parts(rotation: Rotation, blocks: int, size: int) -> dict[str, Float[Array, "rows _ R"]]:
    """Cosine and sine at the start of each block of positions, amplitude included, and at each place within one.

    The angle of a position is the sum of two, so a block's rotations follow from these by the addition theorems, to
    the accuracy of float32 at any position.
    """
    gain = rotation.gain[:, None]
    places = jnp.arange(max(blocks, size), dtype=jnp.int32)
    coarse, fine = (
        angles(rotation.fixed_freq, positions[None])[0].swapaxes(0, 1)  # [rows, positions, R]
        for positions in (places[:blocks] * size, places[:size])
    )
    return {
        "block cos": jnp.cos(coarse) * gain,
        "block sin": jnp.sin(coarse) * gain,
        "place cos": jnp.cos(fine),
        "place sin": jnp.sin(fine),
    }
