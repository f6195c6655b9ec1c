"""The steps of the TPU kernels of the gradient: a block of queries against a block of keys; see `tpu_gradient`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pe_lab.attention.kernels.tpu_kernel import down
from pe_lab.attention.kernels.tpu_toeplitz import LANES, SUBLANES, diagonal_sums, place, toeplitz


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


def _block_of(token: Any, size: int, blocks: int) -> Any:
    """The block of a token, or the last block if the token is later; -1 before the first token."""
    return jnp.where(token < 0, -1, jnp.minimum(jax.lax.div(jnp.maximum(token, 0), size), blocks - 1))


def _over_keys(static: TpuGradientStatic, b: Any, head: Any, i: Any, n: Any, *scalars: Any) -> GridStep:
    """The key blocks of a query block, grid [B, H, query blocks, visited key blocks]."""
    start, used, _ = Scalars(*scalars)
    first_query = start[b] + i * static.block
    end = jnp.minimum(first_query + static.block, used[b])
    last = jnp.where(
        end > 0, jnp.minimum(jax.lax.div(jnp.maximum(end - 1, 0), static.block), static.key_blocks - 1), -1
    )
    first = 0
    if static.window is not None:
        first = jax.lax.div(jnp.maximum(first_query - static.window + 1, 0), static.block)
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
        last = _block_of(end - 1, static.block, static.query_blocks)
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
        far = distance
        if "query positions" in ref:
            far = ref["query positions"][...] - down(ref["key positions"][...])
        far = far.astype(jnp.float32)
        s -= ref["slope"][step.head] * far
    weights = jnp.exp(s - ref["logsumexp"][of_head, :])
    d_weights = _product(ref["value"][...], ref["d_out"][...], (axis, axis))
    d_logits = weights * (d_weights - ref["inner"][of_head, :])
    if masked:
        used = scalars.used[step.b]
        seen = (distance >= 0) & (key_index < used)
        if static.window is not None:
            seen &= distance < static.window
        if "query segments" in ref:
            seen &= ref["query segments"][...] == down(ref["key segments"][...])
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
    whole = (first_key + size - 1 <= first_query) & (first_key + size <= scalars.used[step.b])
    if static.window is not None:
        whole &= first_query + size - 1 - first_key < static.window
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
