"""The gradient of attention to a block of keys on TPUs (Pallas, compiled by Mosaic), with memory linear in the length.

Logits are computed again from their logsumexp, as in FlashAttention-2 (Dao 2023, algorithm 2), by up to three kernels:

- queries: a block of them walks over its keys. The gradient of ALiBi's slope is summed on the way.
- keys and values: a block of them walks over its queries, of all query heads that share it. So is that of key biases.
- a bias by distance: all blocks of logits on one block-diagonal have equal distances. A program adds up their gradients
  in VMEM, and sums the result along its diagonals. There are no atomic additions, so results do not vary.

All have keys down and queries across, as the forward kernel; its docstring says why. A block is of one query head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pe_lab.attention.kernels.tpu import (
    LANES,
    SUBLANES,
    VMEM,
    all_visible,
    block_of,
    diagonal_sums,
    down,
    fetched,
    padded_table,
    part,
    place,
    slope_distance,
    toeplitz,
    visible,
    visible_keys,
)
from pe_lab.attention.key_block import MASKED, AttentionInputs, KeyBlockGradients, check_block, padded
from pe_lab.errors import UnsupportedError


@dataclass(frozen=True)
class TpuGradientStatic:
    block: int  # queries, and keys, of a block of logits
    query_blocks: int
    key_blocks: int
    shared: int  # query heads of a key head
    window: int | None
    channels_first: bool  # queries, keys, values and gradients of outputs are [K, tokens]

    @property
    def channels(self) -> int:
        """The axis of channels."""
        return 0 if self.channels_first else 1

    def visited(self, blocks: int) -> int:
        """How many of the blocks along one axis a block of the other sees at most."""
        return blocks if self.window is None else min(blocks, (self.window + self.block - 2) // self.block + 2)

    def diagonals(self, late: bool) -> int:
        """How many block-diagonals have visible pairs at most; `late`: the first query may be later than the first key.

        A block-diagonal is all pairs of blocks with equal differences of their numbers.
        """
        count = self.query_blocks + (self.key_blocks - 1 if late else 0)
        return count if self.window is None else min(count, (self.window + 2 * self.block - 3) // self.block + 1)


class GridStep(NamedTuple):
    """What one step of a grid computes: a query head, a query block, a key block, and whether any pair is visible."""

    b: Any
    head: Any
    query_block: Any
    key_block: Any
    here: Any


class Scalars(NamedTuple):
    """Prefetched: index of the first query, number of used keys, and the first block-diagonal; of each row, [B]."""

    start: Any
    used: Any
    diagonal: Any


def _over_keys(static: TpuGradientStatic, b: Any, head: Any, i: Any, n: Any, *scalars: Any) -> GridStep:
    """The key blocks of a query block, grid [B, H, query blocks, visited key blocks]."""
    start, used, _ = Scalars(*scalars)
    first_query = start[b] + i * static.block
    first, last = visible_keys(first_query, used[b], static.block, static.block, static.key_blocks, static.window)
    j = jnp.clip(first + n, 0, jnp.clip(last, 0, static.key_blocks - 1))
    return GridStep(b, head, i, j, first + n <= last)


def _over_queries(static: TpuGradientStatic, b: Any, g: Any, j: Any, n: Any, *scalars: Any) -> GridStep:
    """The query blocks of a key block, of one query head after another; grid [B, G, key blocks, heads and blocks]."""
    start, used, _ = Scalars(*scalars)
    visited = static.visited(static.query_blocks)
    first_key = j * static.block
    first = jax.lax.div(jnp.maximum(first_key - start[b], 0), static.block)
    last = static.query_blocks - 1
    if static.window is not None:
        end = first_key + static.block + static.window - 1 - start[b]
        last = block_of(end - 1, static.block, static.query_blocks)
    last = jnp.where(first_key < used[b], last, -1)
    m = jax.lax.rem(n, visited)
    i = jnp.clip(first + m, 0, jnp.clip(last, 0, static.query_blocks - 1))
    return GridStep(b, g * static.shared + jax.lax.div(n, visited), i, j, first + m <= last)


def _over_diagonal(static: TpuGradientStatic, b: Any, head: Any, n: Any, t: Any, *scalars: Any) -> GridStep:
    """The blocks of a block-diagonal, grid [B, H, block-diagonals, blocks]."""
    _, used, diagonal = Scalars(*scalars)
    lead = diagonal[b] + n
    i, j = jnp.maximum(lead, 0), jnp.maximum(-lead, 0)
    # With `used` of 0, the last key block is -1.
    end = jax.lax.div(used[b] + static.block - 1, static.block)
    last = jnp.minimum(static.query_blocks - i, jnp.minimum(static.key_blocks, end) - j) - 1
    step = jnp.clip(t, 0, jnp.maximum(last, 0))
    here = t <= last
    if static.window is not None:
        here &= Scalars(*scalars).start[b] + (lead - 1) * static.block + 1 < static.window
    return GridStep(
        b,
        head,
        jnp.clip(i + step, 0, static.query_blocks - 1),
        jnp.clip(j + step, 0, static.key_blocks - 1),
        here,
    )


class Tile(NamedTuple):
    """Weights and gradients of the logits of a block; 0 where a key is not visible.

    Attributes:
      weights, d_logits: [keys, queries], float32.
      far: the distance of slopes; None without slopes.
      key: the block's keys; with 0 beyond the used ones.
    """

    weights: jax.Array
    d_logits: jax.Array
    far: jax.Array | None
    key: jax.Array


def _product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product over one axis of each, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)


def _tile(static: TpuGradientStatic, ref: dict[str, Any], step: GridStep, scalars: Scalars, masked: bool) -> Tile:
    size, axis = static.block, static.channels
    first_query = scalars.start[step.b] + step.query_block * size
    first_key = step.key_block * size
    key, shape = ref["key"][...], (size, size)
    s = _product(key, ref["query"][...], (axis, axis))
    if "distance bias" in ref:
        s += toeplitz(ref["distance bias"], 0, place(first_query - first_key, size, size), size, size)
    of_head = pl.ds(jax.lax.rem(step.head, SUBLANES), 1)
    if "key bias" in ref:
        s += down(ref["key bias"][of_head, :])
    far = None
    if masked or "slope" in ref:
        key_index = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        distance = first_query + jax.lax.broadcasted_iota(jnp.int32, shape, 1) - key_index
    if "slope" in ref:
        far = slope_distance(ref, distance)
        s -= ref["slope"][step.head] * far
    weights = jnp.exp(s - ref["logsumexp"][of_head, :])
    d_weights = _product(ref["value"][...], ref["d_out"][...], (axis, axis))
    d_logits = weights * (d_weights - ref["inner"][of_head, :])
    if masked:
        used = scalars.used[step.b]
        seen = visible(ref, distance, key_index, used, static.window)
        # A query without visible keys has a logsumexp of MASKED: its weights here are infinite, and not chosen.
        weights, d_logits = jnp.where(seen, weights, 0), jnp.where(seen, d_logits, 0)
        # 0 times NaN is NaN.
        there = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, size) if axis == 0 else (size, 1), 1 - axis) < used
        key = jnp.where(there, key, jnp.zeros_like(key))
    return Tile(weights, d_logits, far, key)


def _when_visible(static: TpuGradientStatic, ref: dict[str, Any], step: GridStep, scalars: Scalars, use: Any) -> None:
    """Calls `use` with the block's tile if it has visible pairs; without masks if all pairs are visible."""
    size = static.block
    first_query, first_key = scalars.start[step.b] + step.query_block * size, step.key_block * size
    whole = all_visible(first_query, size, first_key, size, scalars.used[step.b], static.window)
    if "query segments" in ref:
        pl.when(step.here)(lambda: use(_tile(static, ref, step, scalars, True)))
    else:
        pl.when(step.here & whole)(lambda: use(_tile(static, ref, step, scalars, False)))
        pl.when(step.here & ~whole)(lambda: use(_tile(static, ref, step, scalars, True)))


def _begin(walk: Any, static: TpuGradientStatic, names: tuple[str, ...], refs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The scalars, the step, the arrays by name, and the other references."""
    scalars, refs = Scalars(*refs[:3]), refs[3:]
    step = walk(static, *(pl.program_id(axis) for axis in range(4)), *scalars)
    return scalars, step, dict(zip(names, refs, strict=False)), refs[len(names) :]


def query_kernel(static: TpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """Gradients of a block of queries, [K, tokens] while they are summed, and of the slope."""
    scalars, step, ref, (d_query_ref, *d_slope_ref, sum_ref) = _begin(_over_keys, static, names, refs)
    i, n = pl.program_id(2), pl.program_id(3)

    @pl.when(n == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    for d_slope in d_slope_ref:
        pl.when((i == 0) & (n == 0))(functools.partial(_clear, d_slope))

    def use(tile: Tile) -> None:
        d_logits = tile.d_logits.astype(tile.key.dtype)
        sum_ref[...] += _product(tile.key, d_logits, (1 - static.channels, 0))
        for d_slope in d_slope_ref:
            d_slope[...] -= (tile.d_logits * tile.far).sum(0, keepdims=True)

    _when_visible(static, ref, step, scalars, use)

    @pl.when(n == pl.num_programs(3) - 1)
    def _() -> None:
        d_query_ref[...] = sum_ref[...] if static.channels_first else jnp.transpose(sum_ref[...])


def key_kernel(static: TpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """Gradients of a block of keys and values, over all queries of the heads that share them, and of key biases."""
    scalars, step, ref, (d_key_ref, d_value_ref, *bias_refs) = _begin(_over_queries, static, names, refs)
    n = pl.program_id(3)
    visited = static.visited(static.query_blocks)

    @pl.when(n == 0)
    def _() -> None:
        _clear(d_key_ref)
        _clear(d_value_ref)

    if bias_refs:
        pl.when(jax.lax.rem(n, visited) == 0)(lambda: _clear(bias_refs[1]))

    def use(tile: Tile) -> None:
        query, d_out = ref["query"][...], ref["d_out"][...]
        for out_ref, x, y in ((d_key_ref, query, tile.d_logits), (d_value_ref, d_out, tile.weights)):
            y = y.astype(x.dtype)
            out_ref[...] += _product(x, y, (1, 1)) if static.channels_first else _product(y, x, (1, 0))
        if bias_refs:
            # Tiles of 128 queries are added up; their lanes only once per query head.
            parts = (tile.d_logits[:, at : at + LANES] for at in range(0, static.block, LANES))
            bias_refs[1][...] += functools.reduce(jnp.add, parts)

    _when_visible(static, ref, step, scalars, use)

    if bias_refs:
        d_bias_ref, sum_ref = bias_refs

        @pl.when(jax.lax.rem(n, visited) == visited - 1)
        def _() -> None:
            of_head = pl.ds(jax.lax.div(n, visited), 1)
            d_bias_ref[of_head, :] = jnp.transpose(sum_ref[...]).sum(0, keepdims=True)


def diagonal_kernel(static: TpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """The sums of gradients of logits by distance, of one block-diagonal: all of its blocks have equal distances."""
    scalars, step, ref, (out_ref, sum_ref) = _begin(_over_diagonal, static, names, refs)
    n, t = pl.program_id(2), pl.program_id(3)
    pl.when(t == 0)(lambda: _clear(sum_ref))

    def use(tile: Tile) -> None:
        sum_ref[...] += tile.d_logits

    _when_visible(static, ref, step, scalars, use)

    @pl.when(t == pl.num_programs(3) - 1)
    def _() -> None:
        out_ref[pl.ds(jax.lax.rem(n, SUBLANES), 1), :] = diagonal_sums(sum_ref[...])


def _clear(ref: Any) -> None:
    ref[...] = jnp.zeros_like(ref)


WALKS = {query_kernel: _over_keys, key_kernel: _over_queries, diagonal_kernel: _over_diagonal}


BLOCK = 512  # queries and keys of a block of logits

# An array, the shape of its block (empty: all of it, as scalars), and the block's index at a step of the grid.
Input = tuple[jax.Array, tuple[Any, ...], Callable[[GridStep, Scalars], tuple[Any, ...]]]
# A shape, that of its block, and the block's index from the first three indices of the grid.
Output = tuple[tuple[int, ...], tuple[Any, ...], Callable[[Any, Any, Any], tuple[Any, ...]]]


def tpu_key_block_gradient(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    inputs: AttentionInputs,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
    *,
    block: int | None = None,
    interpret: bool = False,
) -> KeyBlockGradients:
    """The gradients that come from a block of keys (Dao 2023, algorithm 2).

    Arguments as in `key_block.KeyBlockGradient`, and these; d_out is multiplied in the dtype of values.

    Args:
      block: queries and keys of a block of logits, a multiple of 128; by default 512, or fewer for fewer tokens.
      interpret: run on any platform, slowly.

    Raises:
      UnsupportedError: keys are to be rotated, or there are functions of logits.
    """
    B, H, T, K = query.shape
    G, S = key.shape[1:3]
    if inputs.rotation is not None:
        raise UnsupportedError("pallas_tpu: no gradient of keys that the kernel rotates.")
    check_block(H, key[None], value[None], inputs)
    size = block or min(BLOCK, -(-max(T, S) // LANES) * LANES)
    channels_first = K % LANES != 0
    static = TpuGradientStatic(size, -(-T // size), -(-S // size), H // G, inputs.window, channels_first)
    start, used = inputs.slots(B, S)
    # The first block-diagonal with visible pairs: that of the smallest distance of at least 0.
    diagonal = jnp.maximum(-((start + size - 1) // size), 1 - static.key_blocks)
    scalars = Scalars(start, used, diagonal)
    arrays = _arrays(query, key, value, inputs, logsumexp, inner, d_out.astype(value.dtype), static)
    run = functools.partial(_run, static, scalars, arrays, interpret)

    def of_tokens(heads: int, blocks: int) -> Output:
        """Gradients of queries, keys or values, in whole blocks."""
        if channels_first:
            return (B, heads, K, blocks * size), (None, None, K, size), lambda b, x, n: (b, x, 0, n)
        return (B, heads, blocks * size, K), (None, None, size, K), lambda b, x, n: (b, x, n, 0)

    def tokens_first(x: jax.Array, length: int) -> jax.Array:
        return (x.swapaxes(2, 3) if channels_first else x)[:, :, :length]

    outputs = [of_tokens(H, static.query_blocks)]
    if inputs.slope is not None:
        outputs.append(((B, H, 1, size), (None, None, 1, size), lambda b, head, _: (b, head, 0, 0)))
    steps = static.visited(static.key_blocks)
    d_query, *d_slope = run(query_kernel, (B, H, static.query_blocks, steps), outputs, [(K, size)])

    outputs, scratch = [of_tokens(G, static.key_blocks)] * 2, []
    if inputs.key_bias is not None:
        shape = B, G, static.shared, static.key_blocks * size
        outputs.append((shape, (None, None, static.shared, size), lambda b, g, j: (b, g, 0, j)))
        scratch.append((size, LANES))
    steps = static.shared * static.visited(static.query_blocks)
    d_key, d_value, *d_key_bias = run(key_kernel, (B, G, static.key_blocks, steps), outputs, scratch)

    d_distance_bias = d_bias = None
    if inputs.distance_bias is not None:
        count = static.diagonals(late=inputs.start is not None)
        shape, steps = (B, H, -(-count // SUBLANES) * SUBLANES, 2 * size), min(static.query_blocks, static.key_blocks)
        output = shape, (None, None, SUBLANES, 2 * size), lambda b, head, n: (b, head, jax.lax.div(n, SUBLANES), 0)
        (sums,) = run(diagonal_kernel, (B, H, count, steps), [output], [(size, size)])
        first = None if inputs.start is None else start + (diagonal - 1) * size
        d_distance_bias = _by_distance(sums[:, :, :count], first, inputs.distance_bias.shape[1])
    if inputs.key_bias is not None:
        d_bias = d_key_bias[0].reshape(B, H, -1)[:, :, :S]
        d_bias = d_bias.sum(0, keepdims=True) if inputs.key_bias.shape[0] == 1 else d_bias
    return KeyBlockGradients(
        tokens_first(d_query, T),
        tokens_first(d_key, S),
        tokens_first(d_value, S),
        d_slope[0].sum((0, 2, 3)) if d_slope else None,
        d_distance_bias,
        d_bias,
    )


def _run(
    static: TpuGradientStatic,
    scalars: Scalars,
    arrays: dict[str, Input],
    interpret: bool,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outputs: Sequence[Output],
    scratch: Sequence[tuple[int, int]],
) -> Sequence[jax.Array]:
    """The results of a kernel over a grid."""
    walk = functools.partial(WALKS[kernel], static)

    def spec(block: tuple[Any, ...], index: Callable[[GridStep, Scalars], tuple[Any, ...]]) -> pl.BlockSpec:
        if not block:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec(block, lambda *at: index(walk(*at), Scalars(*at[4:])))

    name = kernel.__name__.removesuffix("_kernel")
    query, key = arrays["query"][0], arrays["key"][0]
    B, H, _, _ = query.shape
    pairs = B * H * static.query_blocks * static.block * static.visited(static.key_blocks) * static.block // 2
    K = query.shape[2 if static.channels_first else 3]
    return pl.pallas_call(
        functools.partial(kernel, static, tuple(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[spec(block, index) for _, block, index in arrays.values()],
            out_specs=[pl.BlockSpec(block, lambda *at, index=index: index(*at[:3])) for _, block, index in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            # Slopes and sums by distance are in one block of the result for several steps of the third axis.
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=pl.CostEstimate(
            flops=(8 if kernel is key_kernel else 4 if kernel is diagonal_kernel else 6) * pairs * K,
            bytes_accessed=2 * (query.size + key.size) * query.dtype.itemsize,
            transcendentals=pairs,
        ),
        name=f"pe_lab_attention_gradient_{name}",
        interpret=interpret,
    )(*scalars, *(array for array, _, _ in arrays.values()))


def _arrays(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    inputs: AttentionInputs,
    logsumexp: Float[Array, "B H T"],
    inner: Float[Array, "B H T"],
    d_out: Float[Array, "B H T K"],
    static: TpuGradientStatic,
) -> dict[str, Input]:
    """The arrays that all kernels read, by name, in whole blocks."""
    K, size = query.shape[3], static.block

    def tokens(x: jax.Array, of_keys: bool) -> Input:
        x = padded(x, 2, size)

        def index(step: GridStep, _: Scalars) -> tuple[Any, ...]:
            head = jax.lax.div(step.head, static.shared) if of_keys else step.head
            block = step.key_block if of_keys else step.query_block
            return (step.b, head, 0, block) if static.channels_first else (step.b, head, block, 0)

        if static.channels_first:
            return x.swapaxes(2, 3), (None, None, K, size), index
        return x, (None, None, size, K), index

    def heads(x: jax.Array, of_keys: bool) -> Input:
        """An array [rows, H, tokens] in groups of 8 heads: a block of one head would take as much memory as 8."""
        x = padded(padded(x.astype(jnp.float32), 2, size), 1, SUBLANES)
        x = x.reshape(x.shape[0], -1, SUBLANES, x.shape[2])

        def index(step: GridStep, _: Scalars) -> tuple[Any, ...]:
            block = step.key_block if of_keys else step.query_block
            return step.b if x.shape[0] > 1 else 0, jax.lax.div(step.head, SUBLANES), 0, block

        return x, (None, None, SUBLANES, size), index

    def row(x: jax.Array, of_keys: bool) -> Input:
        """Integers [rows, tokens]."""
        x = padded(x, 1, size)[:, None]

        def index(step: GridStep, _: Scalars) -> tuple[Any, ...]:
            return step.b if x.shape[0] > 1 else 0, 0, step.key_block if of_keys else step.query_block

        return x, (None, 1, size), index

    # Padded queries get weight 0: with a logsumexp of 0, their weights could overflow.
    T = logsumexp.shape[2]
    logsumexp = jnp.pad(logsumexp, ((0, 0), (0, 0), (0, -T % size)), constant_values=-MASKED)
    arrays = {
        "query": tokens(query, False),
        "key": tokens(key, True),
        "value": tokens(value, True),
        "d_out": tokens(d_out, False),
        "logsumexp": heads(logsumexp, False),
        "inner": heads(inner, False),
    }
    if inputs.slope is not None:
        arrays["slope"] = inputs.slope.astype(jnp.float32), (), lambda *_: ()
    if inputs.distance_bias is not None:
        table = padded_table(inputs.distance_bias, 1, size, size)

        def of_table(step: GridStep, scalars: Scalars) -> tuple[Any, ...]:
            first = scalars.start[step.b] + (step.query_block - step.key_block) * size
            return step.head, part(table, first, size, size), 0, 0

        arrays["distance bias"] = table, fetched(table, size, size), of_table
    if inputs.key_bias is not None:
        arrays["key bias"] = heads(inputs.key_bias, True)
    for what, (queries, keys) in inputs.compared().items():
        arrays[f"query {what}"], arrays[f"key {what}"] = row(queries, False), row(keys, True)
    return arrays


def _by_distance(
    sums: Float[Array, "B H diagonals both"], first: Int[Array, " B"] | None, entries: int
) -> Float[Array, "H D"]:
    """The gradient of a table of biases from the sums by distance of block-diagonals.

    Args:
      sums: entry n of block-diagonal m is that of the distance `first` + m * block + n, with blocks of both / 2.
      first: of each row; None: the first block-diagonal is that of queries and keys of the same index.
      entries: D; larger distances have the last one.
    """
    # The end of each block-diagonal has the same distances as the begin of the next one.
    begin, end = jnp.split(sums, 2, axis=3)
    ends = [(0, 0), (0, 0)]
    sums = jnp.pad(begin, (*ends, (0, 1), (0, 0))) + jnp.pad(end, (*ends, (1, 0), (0, 0)))
    sums, size = sums.reshape(*sums.shape[:2], -1), begin.shape[3]
    if first is None:
        sums = sums.sum(0)[:, size:]
        near, far = sums[:, : entries - 1], sums[:, entries - 1 :].sum(1, keepdims=True)
        return jnp.concatenate([near, jnp.zeros((sums.shape[0], entries - 1 - near.shape[1])), far], axis=1)

    def of_row(sums: jax.Array, first: jax.Array) -> jax.Array:
        # Where `first` is far from 0, the slice is all padding. A negative index would count from the end.
        around = jnp.pad(sums, ((0, 0), (entries, entries)))
        at = jnp.clip(entries - first, 0, sums.shape[1] + entries)
        table = jax.lax.dynamic_slice_in_dim(around, at, entries, axis=1)
        farther = jnp.where(first + jnp.arange(sums.shape[1]) >= entries, sums, 0).sum(1)
        return table.at[:, -1].add(farther)

    return jax.vmap(of_row)(sums, first).sum(0)
