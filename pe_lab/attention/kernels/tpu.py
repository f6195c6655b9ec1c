"""Our attention kernel for TPUs (Pallas, compiled by Mosaic): flash attention that takes the schedule's row inside.

One kernel serves whole texts, chunks of a prompt against a cache, single tokens (decoding) and the spans of a ring:
they differ in where the first query stands, how many keys are there, and how many queries there are.

Logits lie with keys down (sublanes) and queries across (lanes): maxima and sums then run down, which the vector unit
does in place, and running ones are rows of a single sublane; accumulated outputs [K, rows] fill all lanes where K is
64 or 32. Query heads that share a key head are so many more queries across, so keys are read once for all of them.

Heads of fewer than 128 channels are read with channels down and tokens across: that is how XLA lays such arrays out by
itself, since 64 channels across would leave half of every tile empty, and a cache need not be copied for the kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pe_lab.attention.kernels.tpu_kernel import Static, Tiles, kernel, key_block
from pe_lab.attention.key_block import Partial, Rotation, Side, merge
from pe_lab.positional import angles

LANES = 128
ROWS = 1024  # queries across, over the heads that share a key: what a block of logits is wide
VMEM = 64 * 2**20  # that the kernel may take; a v5e, v5p or v6e core has as much or more
FEW = 128  # queries of a head below which a call is decoding: longer key blocks, and as few rows as there are


def tiles(H: int, G: int, T: int, S: int, split_heads: bool = False) -> Tiles:
    """The cut of T queries of H heads against S keys of G heads; `split_heads`: each turns keys its own way."""
    shared = H // G
    few = T < FEW
    if few:
        # Mosaic multiplies no matrix by a single row.
        queries = 1 if T == 1 and not split_heads else -(-T // 8) * 8
        heads = max(n for n in range(1, shared + 1) if shared % n == 0 and (n * queries <= ROWS or n == 1))
        keys = 512 if split_heads else 2048
    else:
        heads = max(n for n in range(1, min(shared, ROWS // LANES) + 1) if shared % n == 0)
        queries = LANES
        while 2 * queries * heads <= ROWS and queries < min(T, 512):
            queries *= 2
        keys = 512
    return Tiles(heads, queries, min(keys, -(-S // LANES) * LANES), few)


def tpu_span(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    side: Side,
    *,
    layer: Int[Array, ""] | int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int = 1,
    wide: bool = False,
    cut: Tiles | None = None,
    interpret: bool = False,
) -> Partial:
    """Attention of queries, turned and scaled already, to a span of keys (Dao 2023, with what `Side` adds).

    Args:
      query, key, value: G divides H; any T and S; K even.
      side: see `Side`. Rows may start at different places.
      layer: keys and values are those of many layers, [L, B, G, S, K], of which this one is read where it lies.
      window, soft_cap: as in `attention`.
      splits: ranges of keys that are attended to side by side and merged (flash-decoding): for few queries and many
        keys on chips of several cores. Only without a window.
      wide: give `out` in float32.
      cut: of the span into blocks; by default what `tiles` says.
      interpret: run on whatever is here, slowly.
    """
    B, H, T, K = query.shape
    if layer is None:
        layer, key, value = 0, key[None], value[None]
    G, S = key.shape[2:4]
    if value.shape != key.shape or H % G:
        raise ValueError(f"{H} query heads, keys of shape {key.shape} and values of {value.shape} do not go together.")
    split_heads = side.rotation is not None and side.rotation.fixed_freq.shape[0] not in (1, G)
    if side.noise is not None:
        if side.rotation is None or side.rotation.fixed_freq.shape[0] != H:
            raise NotImplementedError("noise is for heads that each turn keys their own way.")
        split_heads = True
    cut = cut or tiles(H, G, T, S, split_heads)
    channels_first = K % LANES != 0
    if cut.keys > S:
        key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, cut.keys - S), (0, 0))) for x in (key, value))
        if side.noise is not None:
            size = jnp.pad(side.noise.size, ((0, 0), (0, cut.keys - S)))
            side = side._replace(noise=side.noise._replace(size=size))
    key_blocks = -(-S // cut.keys)
    splits = 1 if window is not None else min(splits, key_blocks)
    per_split = -(-key_blocks // splits)
    if window is not None:
        # The blocks that the window of one block of queries touches, wherever it begins.
        per_split = min(key_blocks, (window + cut.queries - 2) // cut.keys + 2)
    arrays, specs, present = _inputs(query, key, value, side, cut, key_blocks, channels_first)
    groups, rows, query_blocks = H // cut.heads, cut.rows, -(-T // cut.queries)
    static = Static(
        cut,
        key_blocks,
        per_split,
        window,
        soft_cap,
        S,
        split_heads,
        channels_first,
        frozenset(present),
    )
    start = jnp.zeros(B, jnp.int32) if side.start is None else jnp.broadcast_to(side.start, (B,)).astype(jnp.int32)
    used = jnp.full(B, S, jnp.int32) if side.used is None else jnp.minimum(side.used, S).astype(jnp.int32)
    narrow = query.dtype if splits == 1 and not wide else jnp.float32
    # Grid: rows of the batch, groups of heads, splits, blocks of queries, blocks of keys.
    across, along = (1, rows) if cut.few else (cut.heads, cut.queries)
    length = rows if cut.few else T
    at, block = _of_tokens(channels_first, along, K)
    seen = functools.partial(key_block, static)
    out, logsumexp = pl.pallas_call(
        functools.partial(kernel, static, tuple(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, groups, splits, query_blocks, per_split),
            in_specs=[specs[name](seen) for name in arrays],
            out_specs=[
                pl.BlockSpec((None, None, None, across, *block), lambda b, g, p, i, j, *_: (b, g, p, 0, *at(i))),
                pl.BlockSpec((None, None, None, across, along), lambda b, g, p, i, j, *_: (b, g, p, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((K, rows), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (B, groups, splits, across, *((K, length) if channels_first else (length, K))), narrow
            ),
            jax.ShapeDtypeStruct((B, groups, splits, across, length), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=_cost(B, H, T, S, K, window, key),
        name=f"pe_lab_attention_{'decode' if T < FEW else 'flash'}",
        interpret=interpret,
    )(start, used, jnp.asarray(layer, jnp.int32).reshape(1), *arrays.values())
    if channels_first:
        out = out.swapaxes(-2, -1)
    parts = [
        Partial(_heads_first(out[:, :, p], cut, H, T), _heads_first(logsumexp[:, :, p, ..., None], cut, H, T)[..., 0])
        for p in range(splits)
    ]
    if splits == 1:
        return parts[0]
    merged = merge(parts)
    return merged if wide else merged._replace(out=merged.out.astype(query.dtype))


def _inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    side: Side,
    cut: Tiles,
    key_blocks: int,
    channels_first: bool,
) -> tuple[dict[str, jax.Array], dict[str, Any], set[str]]:
    """The kernel's arrays, laid out; how each is cut; and which of them are there."""
    B, H, T, K = query.shape
    G, Tq, Tk = key.shape[2], cut.queries, cut.keys
    groups, rows = H // cut.heads, cut.rows
    per_key_head = groups // G
    across, along = (1, rows) if cut.few else (cut.heads, Tq)
    laid = _side_by_side(query, cut)[:, :, 0, None] if cut.few else query.reshape(B, groups, cut.heads, T, K)
    arrays = {"query": laid, "key": key, "value": value}
    if channels_first:
        arrays = {name: array.swapaxes(-2, -1) for name, array in arrays.items()}
    at, block = _of_tokens(channels_first, along, K)
    specs: dict[str, Any] = {
        "query": lambda _: pl.BlockSpec((None, None, across, *block), lambda b, g, p, i, j, *_: (b, g, 0, *at(i))),
    }

    def of_keys(seen: Any) -> pl.BlockSpec:
        at, block = _of_tokens(channels_first, Tk, K)
        return pl.BlockSpec(
            (None, None, None, *block),
            lambda b, g, p, i, j, *s: (s[2][0], b, g // per_key_head, *at(seen(b, p, i, j, *s))),
        )

    specs |= {"key": of_keys, "value": of_keys}
    if side.rotation is not None:
        coarse, fine = rotation_parts(side.rotation, key_blocks, Tk)
        # [key heads or 1, groups of a key head or 1, heads of a group or 1, ...]
        turning = coarse.shape[0]
        split = turning not in (1, G)
        shape = (G, per_key_head, cut.heads) if split else (turning, 1, 1)
        each = shape[2]

        def of(g: jax.Array) -> tuple[Any, Any]:
            return (g // per_key_head if shape[0] > 1 else 0), (g % per_key_head if shape[1] > 1 else 0)

        arrays["coarse"] = coarse.reshape(*shape, *coarse.shape[1:])
        if channels_first:
            fine = fine.swapaxes(-2, -1)
        arrays["fine"] = fine.reshape(*shape, *fine.shape[1:])
        specs["coarse"] = lambda seen: pl.BlockSpec(
            (None, None, each, None, 2, K), lambda b, g, p, i, j, *s: (*of(g), 0, seen(b, p, i, j, *s), 0, 0)
        )
        specs["fine"] = lambda _: pl.BlockSpec(
            (None, None, each, *fine.shape[1:]), lambda b, g, p, i, j, *_: (*of(g), 0, 0, 0, 0)
        )
    if side.slope is not None:
        slope = jnp.repeat(side.slope.astype(jnp.float32).reshape(groups, cut.heads), Tq, axis=1)
        arrays["slope"] = jnp.pad(slope, ((0, 0), (0, rows - slope.shape[1])))[:, None]
        specs["slope"] = lambda _: pl.BlockSpec((None, 1, rows), lambda b, g, p, i, j, *_: (g, 0, 0))
    if side.noise is not None:
        arrays["noise seed"] = jax.lax.bitcast_convert_type(side.noise.seeds, jnp.int32)
        specs["noise seed"] = lambda _: pl.BlockSpec(memory_space=pltpu.SMEM)
        arrays["noise size"] = side.noise.size.astype(jnp.float32)[:, None]
        specs["noise size"] = lambda seen: pl.BlockSpec(
            (None, 1, Tk), lambda b, g, p, i, j, *s: (b, 0, seen(b, p, i, j, *s))
        )
    pairs = {"segments": (side.query_segments, side.key_segments)}
    if side.slope is not None:
        pairs["positions"] = (side.query_positions, side.key_positions)
    for what, (queries, keys) in pairs.items():
        if queries is None or keys is None:
            continue
        spread = jnp.broadcast_to(queries.astype(jnp.int32)[:, None, :, None], (B, cut.heads, T, 1))
        arrays[f"query {what}"] = _side_by_side(spread, cut)[:, 0, :, None, :, 0]
        specs[f"query {what}"] = lambda _: pl.BlockSpec((None, None, 1, rows), lambda b, g, p, i, j, *_: (b, i, 0, 0))
        # Laid out in whole blocks: what lies beyond the last key is masked by its index.
        keys = jnp.pad(keys.astype(jnp.int32), ((0, 0), (0, key_blocks * Tk - keys.shape[1])))
        arrays[f"key {what}"] = keys[:, None]
        specs[f"key {what}"] = lambda seen: pl.BlockSpec(
            (None, 1, Tk), lambda b, g, p, i, j, *s: (b, 0, seen(b, p, i, j, *s))
        )
    return arrays, specs, set(arrays)


def _of_tokens(channels_first: bool, tokens: int, K: int) -> tuple[Any, tuple[int, int]]:
    """Block number -> its index in the last two axes, and its shape there."""
    if channels_first:
        return lambda n: (0, n), (K, tokens)
    return lambda n: (n, 0), (tokens, K)


def _side_by_side(x: Num[Array, "B H T C"], cut: Tiles) -> Num[Array, "B groups blocks rows C"]:
    """Heads and queries in one axis: row n of a block is query n % queries of head n // queries."""
    B, H, T, C = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -T % cut.queries), (0, 0)))
    x = x.reshape(B, H // cut.heads, cut.heads, -1, cut.queries, C).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(*x.shape[:3], cut.heads * cut.queries, C)
    return jnp.pad(x, ((0, 0),) * 3 + ((0, cut.rows - x.shape[3]), (0, 0)))


def _heads_first(x: Float[Array, "B groups across length C"], cut: Tiles, H: int, T: int) -> Float[Array, "B H T C"]:
    """An output of the kernel as [B, H, T, C]."""
    if cut.few:
        x = x[:, :, 0, : cut.heads * cut.queries]
        return x.reshape(x.shape[0], H, cut.queries, x.shape[-1])[:, :, :T]
    return x.reshape(x.shape[0], H, T, x.shape[-1])


def rotation_parts(
    rotation: Rotation, blocks: int, size: int
) -> tuple[Float[Array, "rows blocks 2 K"], Float[Array, "rows 2 size K"]]:
    """Cosine and sine at the start of each block of positions, amplitude included, and at each place within one.

    The angle of a position is the sum of two, so a block's rotations follow from these by the addition theorems, to
    the accuracy of float32 at any position. Each is as wide as a head: pair r stands at r and at r + R.
    """

    def table(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        angle = angles(rotation.fixed_freq, positions[None])[0].swapaxes(0, 1)  # [rows, positions, R]
        return jnp.cos(angle), jnp.sin(angle)

    gain = rotation.gain[:, None]
    coarse = [x * gain for x in table(jnp.arange(blocks, dtype=jnp.int32) * size)]
    fine = table(jnp.arange(size, dtype=jnp.int32))
    wide = lambda x: jnp.concatenate([x, x], axis=-1)  # noqa: E731
    return jnp.stack([wide(x) for x in coarse], 2), jnp.stack([wide(x) for x in fine], 1)


def _cost(B: int, H: int, T: int, S: int, K: int, window: int | None, key: jax.Array) -> pl.CostEstimate:
    """For XLA's scheduler: what the mask leaves, where queries are the last T of S tokens."""
    each = S - (T - 1) / 2 if window is None else min(window, S)
    pairs = int(B * H * T * each)
    moved = 2 * key.size // key.shape[0] * key.dtype.itemsize + 2 * B * H * T * K * key.dtype.itemsize
    return pl.CostEstimate(flops=4 * pairs * K, bytes_accessed=moved, transcendentals=pairs)
