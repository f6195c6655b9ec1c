"""Gradients of pe_lab's attention kernel for NVIDIA GPUs (Pallas, compiled by Triton): FlashAttention-2 (Dao 2023).

Three kernels recompute the weights of blocks from the logsumexp of all keys, which the forward pass returned:

- A program has a block of queries of one head and loops over the keys that they see: the gradients of queries.
- A program has a block of keys of one key head and loops over the query heads of its group and the queries that see
  the keys: the gradients of keys and values, and of biases of keys.
- A program has one diagonal of square blocks of one head. All blocks of a diagonal have the same distances, so it adds
  up the blocks, and XLA sums the result along its own diagonals: the gradients of biases by distance, without atomic
  additions and thus deterministic. Distances beyond the table share an entry, which the first kernel sums.

Memory is linear in the length: sums of the third kernel take a block's side times the table's entries, of each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pe_lab.attention.kernels.gpu import LOG2_E, PROGRAMS, filled, ignore_triton_deprecation
from pe_lab.attention.kernels.gpu_gradient_kernel import (
    UNSEEN,
    GpuGradientStatic,
    distance_gradient,
    key_gradient,
    query_gradient,
)
from pe_lab.attention.key_block import FLOOR, AttentionInputs, KeyBlockGradients, check_block
from pe_lab.errors import UnsupportedError

Blocks = dict[str, tuple[jax.Array, pl.BlockSpec]]  # a kernel's arrays and their blocks, by name


def gradient_tiles(
    T: int, S: int, K: int, itemsize: int, window: int | None, distances: bool
) -> dict[str, GpuGradientStatic]:
    """The block sizes of the three kernels, by name: queries, keys and distances.

    Shared memory contains the blocks that a program keeps (queries and gradients of outputs, or keys and values), two
    stages of those that it loops over, and with `distances`, which says that there is a bias by distance, a block of
    float32 biases. In KiB, with such a bias, compiled by Triton 3.9 for sm_90:

        wide         32   64  128  256
        16 bits      64   96  160  100    queries: 128 rows, 64 at 256; 64 keys, 16 at 256 (32 without such a bias)
                     41   64   72   70    keys: 128, 128, 64, 32; 32 rows (64 up to 64 channels without such a bias)
                     32   64  128   64    distances: blocks of 64 by 64, 32 by 32 at 256
        32 bits           28   52   66    queries: 32 rows, 16 at 256; 16 keys (as many as rows without such a bias)
                          44   76   67    keys: 32, 16 at 256; as many rows
                          32   64   64    distances: blocks of 32 by 32, 16 by 16 at 256

    A program may have 163 KiB on an A100 and 227 KiB on an H100. 256 threads have 255 registers each. A program of keys
    has two sums of keys * wide / 256 registers (32 to 64 each) and two blocks of logits (8 to 32 each), and addresses
    of biases take two registers for each logit: larger blocks spill. At 256 channels, 64 keys would allow the H100's
    wide matrix instructions, but spill a hundred registers.
    """
    half, wide = itemsize < 4, filled(K)
    if half:
        of_queries = min(128, 16384 // wide), 16 if distances and wide > 128 else min(64, 8192 // wide)
        of_keys = 32 if distances or wide > 64 else 64, min(128, 8192 // wide)
        side = min(64, 8192 // wide)
    else:
        side = min(32, 4096 // wide)
        of_queries, of_keys = (side, min(side, 16) if distances else side), (side, side)
    warps = 4 if wide < 256 else 8
    sizes = {"queries": (*of_queries, 8), "keys": (*of_keys, 8), "distances": (side, side, warps)}

    def of(rows: int, keys: int, warps: int) -> GpuGradientStatic:
        at_most = lambda size, tokens: min(size, max(16, pl.next_power_of_2(tokens)))  # noqa: E731
        return GpuGradientStatic(at_most(rows, T), at_most(keys, S), warps, 2, T, S, K, window)

    found = {name: of(*size) for name, size in sizes.items()}
    side = min(found["distances"].rows, found["distances"].keys)
    return found | {"distances": replace(found["distances"], rows=side, keys=side)}


def gpu_key_block_gradient(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    inputs: AttentionInputs,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
    *,
    interpret: bool = False,
) -> KeyBlockGradients:
    """The gradients that come from one block of keys (Dao 2023, algorithm 2).

    Arguments as in `key_block.KeyBlockGradient`; d_out is rounded to the dtype of the queries, and `interpret` runs the
    kernels on a CPU.

    Raises:
      UnsupportedError: a rotation or a function of logits.
    """
    B, H, T, K = query.shape
    G, S = key.shape[1:3]
    check_block(H, key[None], value[None], inputs)
    if inputs.rotation is not None:
        raise UnsupportedError("the gradient of attention on a GPU takes rotated keys: no rotation inside.")
    M = H // G
    logsumexp = jnp.where(logsumexp > FLOOR, logsumexp * LOG2_E, UNSEEN)
    tokens = query, key, value, d_out.astype(query.dtype), logsumexp, inner.astype(jnp.float32)
    table = inputs.distance_bias
    cuts = gradient_tiles(T, S, K, query.dtype.itemsize, inputs.window, table is not None)
    run = functools.partial(_run, interpret=interpret)

    cut = cuts["queries"]
    at_queries = lambda i, h, b: (b, h, cut.row_blocks - 1 - i)  # noqa: E731
    out = {"d_query": ((B, H, T, K), pl.BlockSpec((None, None, cut.rows, cut.wide), lambda *at: (*at_queries(*at), 0)))}
    a_number = (B, H, T), pl.BlockSpec((None, None, cut.rows), at_queries)
    out |= {} if inputs.slope is None else {"d_slope": a_number}
    out |= {} if table is None else {"d_beyond": a_number}
    arrays = _arrays(tokens, inputs, cut, 1, lambda i, h, b: (b, h, jax.lax.div(h, M)))
    of_queries = run(query_gradient, cut, (cut.row_blocks, H, B), arrays, out)

    cut = cuts["keys"]
    at_keys = pl.BlockSpec((None, None, cut.keys, cut.wide), lambda j, g, b: (b, g, j, 0))
    out = {"d_key": ((B, G, S, K), at_keys), "d_value": ((B, G, S, K), at_keys)}
    if inputs.key_bias is not None:
        heads = pl.BlockSpec((None, None if M == 1 else M, cut.keys), lambda j, g, b: (b, g, j))
        out["d_key_bias"] = (B, H, S), heads
    arrays = _arrays(tokens, inputs, cut, M, lambda j, g, b: (b, g, g))
    of_keys = run(key_gradient, cut, (cut.key_blocks, G, B), arrays, out)

    d_slope = None if inputs.slope is None else of_queries["d_slope"].sum((0, 2))
    d_table = None
    if table is not None:
        last = of_queries["d_beyond"].sum((0, 2))[:, None]
        d_table = jnp.concatenate([_of_distances(tokens, inputs, cuts["distances"], run), last], axis=1)
    d_key_bias = of_keys.get("d_key_bias")
    if d_key_bias is not None and inputs.key_bias.shape[0] == 1:
        d_key_bias = d_key_bias.sum(0, keepdims=True)
    return KeyBlockGradients(of_queries["d_query"], of_keys["d_key"], of_keys["d_value"], d_slope, d_table, d_key_bias)


def _run(
    program: Callable[..., None],
    cut: GpuGradientStatic,
    grid: tuple[int, ...],
    arrays: Blocks,
    out: dict[str, tuple[tuple[int, ...], pl.BlockSpec]],
    interpret: bool,
) -> dict[str, jax.Array]:
    """Runs a kernel; float32 arrays by name."""
    ignore_triton_deprecation()
    found = pl.pallas_call(
        functools.partial(program, cut, (*arrays, *out)),
        grid=grid,
        in_specs=[spec for _, spec in arrays.values()],
        out_specs=[spec for _, spec in out.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in out.values()],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        name=f"pe_lab_attention_{program.__name__}",
        interpret=interpret,
    )(*(array for array, _ in arrays.values()))
    return dict(zip(out, found, strict=True))


def _arrays(
    tokens: tuple[jax.Array, ...],
    inputs: AttentionInputs,
    cut: GpuGradientStatic,
    heads: int,
    at: Callable[..., tuple[Any, Any, Any]],
) -> Blocks:
    """A kernel's arrays: whole sequences, of which programs load blocks; blocks of `heads` query heads.

    Args:
      tokens: query, key, value, d_out, logsumexp of powers of two, and inner.
      at: from a program's place in the grid: its row of the batch, block of query heads, and key head.
    """
    query, key, value, d_out, logsumexp, inner = tokens
    B = query.shape[0]
    several = None if heads == 1 else heads
    all_queries, all_keys = cut.row_blocks * cut.rows, cut.key_blocks * cut.keys

    def of_row(rows: int) -> Callable[..., Any]:
        return lambda *place: 0 if rows == 1 else at(*place)[0]

    def spec(x: jax.Array, *block: int) -> pl.BlockSpec:
        """Of an array [B, H, tokens, ...]."""
        row, rest = of_row(x.shape[0]), (0,) * len(block)
        return pl.BlockSpec((None, several, *block), lambda *place: (row(*place), at(*place)[1], *rest))

    keys = pl.BlockSpec((None, None, all_keys, cut.wide), lambda *place: (at(*place)[0], at(*place)[2], 0, 0))
    arrays = {
        "query": (query, spec(query, all_queries, cut.wide)),
        "d_out": (d_out, spec(d_out, all_queries, cut.wide)),
        "logsumexp": (logsumexp, spec(logsumexp, all_queries)),
        "inner": (inner, spec(inner, all_queries)),
        "key": (key, keys),
        "value": (value, keys),
    }
    for name, bound in (("start", inputs.start), ("used", inputs.used)):
        if bound is not None:
            bound = jnp.broadcast_to(bound, (B,)).astype(jnp.int32)[:, None]
            arrays[name] = bound, pl.BlockSpec((None, 1), lambda *place: (at(*place)[0], 0))
    if inputs.slope is not None:
        slope = inputs.slope.astype(jnp.float32).reshape(-1, heads)
        arrays["slope"] = slope, pl.BlockSpec((None, heads), lambda *place: (at(*place)[1], 0))
    if inputs.distance_bias is not None:
        table = inputs.distance_bias.astype(jnp.float32)
        arrays["distance bias"] = table, pl.BlockSpec((several, table.shape[1]), lambda *place: (at(*place)[1], 0))
    if inputs.key_bias is not None:
        bias = inputs.key_bias.astype(jnp.float32)
        arrays["key bias"] = bias, spec(bias, all_keys)
    for what, pair in inputs.compared().items():
        for name, size, x in zip(("query", "key"), (all_queries, all_keys), pair, strict=True):
            row = of_row(x.shape[0])
            arrays[f"{name} {what}"] = x, pl.BlockSpec((None, size), lambda *place, row=row: (row(*place), 0))
    return arrays


def _of_distances(
    tokens: tuple[jax.Array, ...],
    inputs: AttentionInputs,
    cut: GpuGradientStatic,
    run: Callable[..., dict[str, jax.Array]],
) -> Float[Array, "H entries"]:
    """The gradients of all entries of a table [H, D] but the last."""
    query, key = tokens[:2]
    B, H, T, _ = query.shape
    S, M, side = key.shape[2], H // key.shape[1], cut.rows
    entries = inputs.distance_bias.shape[1] - 1
    # The entries that any query can need.
    needed = entries if inputs.window is None else min(entries, inputs.window)
    needed = min(needed, T) if inputs.start is None else needed
    if needed == 0:
        return jnp.zeros((H, entries), jnp.float32)
    # Blocks of diagonal n have the distances n * side + row - column.
    every = diagonals = pl.cdiv(needed - 1 + side, side)
    first = jnp.zeros(1, jnp.int32)
    if inputs.start is not None and inputs.start.shape[0] == 1:
        # All sequences have distances from start - S + 1 to start + T - 1.
        diagonals = min(every, pl.cdiv(S + T, side) + 2)
        first = jnp.clip((inputs.start.astype(jnp.int32) - S) // side, 0, every - diagonals)
    splits = max(1, min(PROGRAMS // (B * H * diagonals), cut.row_blocks))
    cut = replace(cut, splits=splits)
    arrays = _arrays(tokens, inputs, cut, 1, lambda n, p, h, b: (b, h, jax.lax.div(h, M)))
    arrays["first"] = first, pl.BlockSpec((1,), lambda n, p, h, b: (0,))
    block = pl.BlockSpec((None, None, None, None, side, side), lambda n, p, h, b: (b, p, h, n, 0, 0))
    out = {"d_diagonal": ((B, splits, H, diagonals, side, side), block)}
    blocks = run(distance_gradient, cut, (diagonals, splits, H, B), arrays, out)["d_diagonal"].sum((0, 1))
    # Columns in reverse have row + column equal on a diagonal, and rows of a width that is less by one move each row on
    # by one place. The sums are of distances -side + 1 to side - 1 of each block.
    skewed = jnp.pad(blocks[..., ::-1], ((0, 0),) * 3 + ((0, side),)).reshape(H, diagonals, -1)
    sums = skewed[..., : side * (2 * side - 1)].reshape(H, diagonals, side, -1).sum(2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0)))  # and of -side, which is 0
    # The negative distances of a block are those of the block before.
    total = sums[..., side:] + jnp.pad(sums[:, 1:, :side], ((0, 0), (0, 1), (0, 0)))
    total = total.reshape(H, -1)
    if diagonals < every:
        zeros = jnp.zeros((H, (every + 1) * side), jnp.float32)
        before = sums[:, 0, :side]  # of distances that the diagonal before would have
        total = jnp.concatenate([before, total], axis=1)
        total = jax.lax.dynamic_update_slice(zeros, total, (0, first[0] * side))[:, side:]
    total = total[:, :needed]
    return jnp.pad(total, ((0, 0), (0, entries - needed)))
