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
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pe_lab.attention.kernels.gpu_kernel import GpuStatic, GpuTiles, filled, kernel
from pe_lab.attention.key_block import AttentionInputs, PartialAttention, block_rotations, check_block, merge

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
    pairs = {"segments": (inputs.query_segments, inputs.key_segments)}
    if inputs.slope is not None:
        pairs["positions"] = (inputs.query_positions, inputs.key_positions)
    for what, (of_queries, of_keys) in pairs.items():
        if of_queries is None or of_keys is None:
            continue
        arrays[f"query {what}"] = (
            jnp.tile(of_queries.astype(jnp.int32), (1, heads)),
            pl.BlockSpec((None, cut.rows), lambda i, p, g, b: (b, last - i)),
        )
        arrays[f"key {what}"] = (
            of_keys.astype(jnp.int32),
            pl.BlockSpec((None, all_keys), lambda i, p, g, b: (b, 0)),
        )
    return arrays
