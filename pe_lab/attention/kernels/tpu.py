"""pe_lab's attention kernel for TPUs (Pallas, compiled by Mosaic): flash attention with positional encodings inside.

One kernel serves whole sequences, chunks of a prompt against a KV cache, single tokens (decoding) and the key blocks of
a ring. The calls differ in the index of the first query and in the numbers of queries and keys.

Logits have keys down (sublanes) and queries across (lanes). Maxima and sums then run down, which the vector unit
computes in place, and running ones are a single sublane; accumulated outputs [K, rows] fill all lanes for K of 64 or
32. Query heads that share a key head are placed side by side, so that their keys are read once.

Heads of fewer than 128 channels are read with channels down and tokens across. XLA lays out such arrays in this way,
because 64 channels across would leave half of every tile empty. A KV cache is therefore not copied for the kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pe_lab.attention.key_block import FLOOR, MASKED, AttentionInputs, PartialAttention, block_rotations, check_block

LANES = 128
SUBLANES = 8


def _up(n: int) -> int:
    return -(-n // LANES) * LANES


def width(queries: int, keys: int) -> int:
    """How many entries of a table a block fetches: those of its distances, and what aligning to 128 entries costs."""
    return _up(keys + queries) + LANES


def padded_table(
    table: Float[Array, "H D"], heads: int, queries: int, keys: int
) -> Float[Array, "groups parts heads 128"]:
    """A table in parts of 128 entries, as far as blocks fetch it: from distances below 0 to where entries are equal.

    A block can be fetched from any part on, because parts are not an axis of the tiles of the memory.
    """
    H, D = table.shape
    table = table.astype(jnp.float32)
    first = jnp.zeros((H, _up(queries + keys)), jnp.float32)  # of keys after their query, which are not visible
    last = jnp.broadcast_to(table[:, -1:], (H, _up(D) - D + width(queries, keys)))
    table = jnp.concatenate([first, table, last], axis=1)
    return table.reshape(H // heads, heads, -1, LANES).swapaxes(1, 2)


def place(first: Int[Array, ""], queries: int, keys: int) -> Any:
    """Where a block begins in the parts that it fetches; `first`: distance of its first query from its first key."""
    return jax.lax.rem(_begin(first, queries, keys), LANES)


def _begin(first: Int[Array, ""], queries: int, keys: int) -> Any:
    """The entry of a padded table `keys` before that of the first distance."""
    return jnp.maximum(first - keys + _up(queries + keys), 0)


def fetched(table: Float[Array, "groups parts heads 128"], queries: int, keys: int) -> tuple[Any, ...]:
    """The shape of the block of a padded table that a block of logits needs."""
    parts = width(queries, keys) // LANES
    return pl.Squeezed(), pl.Element(parts), pl.Element(table.shape[2]), pl.Element(LANES)


def part(table: Float[Array, "groups parts heads 128"], first: Int[Array, ""], queries: int, keys: int) -> Any:
    """The first of the parts that a block of logits needs; `first` as in `place`."""
    # Beyond the last part, all entries are the last one: the block's place in the part does not matter.
    last = table.shape[1] - width(queries, keys) // LANES
    return jnp.minimum(jax.lax.div(_begin(first, queries, keys), LANES), last)


def _rolled_by_row(x: Float[Array, "8 W"], left: bool) -> Float[Array, "8 W"]:
    """Line r of 8, rotated by r lanes."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((row & bit) != 0, pltpu.roll(x, x.shape[1] - bit if left else bit, 1), x)
    return x


def toeplitz(ref: Any, head: int, begin: Any, queries: int, keys: int) -> Float[Array, "keys queries"]:
    """The biases of a block from the fetched parts [parts, heads, 128] of the table; `begin` is its `place`."""
    parts = ref.shape[0]
    entries = jnp.concatenate([ref[n, head : head + 1, :] for n in range(parts)], axis=1)
    wide = parts * LANES
    x = pltpu.roll(jnp.broadcast_to(entries, (SUBLANES, wide)), jax.lax.rem(wide - begin, wide), 1)
    x = _rolled_by_row(x, left=False)
    x = jnp.concatenate([pltpu.roll(x, row, 1) if row else x for row in range(0, LANES, SUBLANES)], axis=0)
    # x[r, n] is entry n - r of the block.
    return jnp.concatenate([x[:, n : n + queries] for n in range(keys, 0, -LANES)], axis=0)


def diagonal_sums(block: Float[Array, "keys queries"]) -> Float[Array, "1 both"]:
    """The sums of a block along its diagonals: entry n is that of q - k = n - keys."""
    keys, queries = block.shape
    total = 0.0
    for n in range(0, keys, LANES):
        left, right = (jnp.zeros((LANES, size), jnp.float32) for size in (keys - n, n))
        total += jnp.concatenate([left, block[n : n + LANES], *([right] if n else [])], axis=1)
    wide, x = keys + queries, 0.0
    for row in range(0, LANES, SUBLANES):
        part = total[row : row + SUBLANES]
        x += pltpu.roll(part, wide - row, 1) if row else part
    return _rolled_by_row(x, left=True).sum(0, keepdims=True)


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


def block_of(token: Any, size: int, blocks: int) -> Any:
    """The block of a token, or the last block if the token is later; -1 before the first token."""
    return jnp.where(token < 0, -1, jnp.minimum(jax.lax.div(jnp.maximum(token, 0), size), blocks - 1))


def visible_keys(first_query: Any, used: Any, queries: int, keys: int, blocks: int, window: int | None) -> tuple:
    """The first and the last of the key blocks that contain visible keys of a block of queries."""
    last = block_of(jnp.minimum(first_query + queries, used) - 1, keys, blocks)
    first = 0 if window is None else jax.lax.div(jnp.maximum(first_query - window + 1, 0), keys)
    return first, last


def bounds(static: TpuStatic, b: Any, i: Any, start_ref: Any, used_ref: Any, *_: Any) -> tuple[Any, Any]:
    """`visible_keys` of query block i."""
    cut = static.tiles
    first_query = start_ref[b] + i * cut.queries
    return visible_keys(first_query, used_ref[b], cut.queries, cut.keys, static.key_blocks, static.window)


def all_visible(first_query: Any, queries: int, first_key: Any, keys: int, used: Any, window: int | None) -> Any:
    """Whether each query of a block sees each key of another, by their indices."""
    whole = (first_key + keys - 1 <= first_query) & (first_key + keys <= used)
    return whole if window is None else whole & (first_query + queries - 1 - first_key < window)


def visible(ref: dict[str, Any], distance: Any, key_index: Any, used: Any, window: int | None) -> Any:
    """Which keys of a block are visible, [keys, queries]."""
    seen = (distance >= 0) & (key_index < used)
    if window is not None:
        seen &= distance < window
    if "query segments" in ref:
        seen &= ref["query segments"][...] == down(ref["key segments"][...])
    return seen


def slope_distance(ref: dict[str, Any], distance: Any) -> Any:
    """The distances that slopes multiply: of positions, if there are other ones than indices; float32."""
    if "query positions" in ref:
        distance = ref["query positions"][...] - down(ref["key positions"][...])
    return distance.astype(jnp.float32)


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
            s -= ref["slope"][...] * slope_distance(ref, distance)
        v = ref["value"][...]
        if masked:
            s = jnp.where(visible(ref, distance, key_index, used, window), s, MASKED)
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
    whole = all_visible(first_query, cut.queries, first_key, cut.keys, used, window)
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


ROWS = 1024  # the width of a block of logits: queries across, over the heads that share a key
VMEM = 64 * 2**20  # the kernel's limit in bytes; a v5e, v5p or v6e core has at least this much
FEW = 128  # a call with fewer queries a head is decoding: it has longer key blocks and no more rows than needed


def tiles(H: int, G: int, T: int, S: int, split_heads: bool = False) -> TpuTiles:
    """The block sizes for T queries of H heads against S keys of G heads; `split_heads`: keys rotate per query head."""
    shared = H // G
    few = T < FEW
    if few:
        # Mosaic has no product of a matrix and a single row.
        queries = 1 if T == 1 and not split_heads else -(-T // 8) * 8
        heads = max(n for n in range(1, shared + 1) if shared % n == 0 and (n * queries <= ROWS or n == 1))
        keys = 512 if split_heads else 2048
    else:
        heads = max(n for n in range(1, min(shared, ROWS // LANES) + 1) if shared % n == 0)
        queries = LANES
        while 2 * queries * heads <= ROWS and queries < min(T, 512):
            queries *= 2
        keys = 512
    return TpuTiles(heads, queries, min(keys, -(-S // LANES) * LANES), few)


def tpu_key_block(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    inputs: AttentionInputs,
    *,
    layer: Int[Array, ""] | int | None = None,
    wide: bool = False,
    cut: TpuTiles | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """Attention to a block of keys (Dao 2023).

    Args:
      query: rotated and scaled; G divides H.
      key, value: any T and S; K even.
      inputs: rows may start at different places.
      layer: keys and values are those of many layers, [L, B, G, S, K]; this one is read without a copy.
      wide: return `out` in float32.
      cut: block sizes; by default those of `tiles`.
      interpret: run on any platform, slowly.

    Raises:
      UnsupportedError: functions of logits.
    """
    B, H, T, K = query.shape
    if layer is None:
        layer, key, value = 0, key[None], value[None]
    G, S = key.shape[2:4]
    rotations = check_block(H, key, value, inputs)
    split_heads = rotations not in (0, 1, G)
    cut = cut or tiles(H, G, T, S, split_heads)
    channels_first = K % LANES != 0
    if cut.keys > S:
        key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, cut.keys - S), (0, 0))) for x in (key, value))
    key_blocks = -(-S // cut.keys)
    # The window of one block of queries overlaps at most this many key blocks.
    visited = (
        key_blocks if inputs.window is None else min(key_blocks, (inputs.window + cut.queries - 2) // cut.keys + 2)
    )
    static = TpuStatic(cut, key_blocks, visited, inputs.window, S, split_heads, channels_first)
    arrays = _arrays(query, key, value, inputs, static)
    groups, rows, query_blocks = H // cut.heads, cut.rows, -(-T // cut.queries)
    start, used = inputs.slots(B, S)
    # Grid: rows of the batch, groups of heads, blocks of queries, blocks of keys.
    across, along = (1, rows) if cut.few else (cut.heads, cut.queries)
    length = rows if cut.few else T
    at, block = _of_tokens(channels_first, along, K)
    out, logsumexp = pl.pallas_call(
        functools.partial(kernel, static, tuple(arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, groups, query_blocks, visited),
            in_specs=[spec for _, spec in arrays.values()],
            out_specs=[
                pl.BlockSpec((None, None, across, *block), lambda b, g, i, j, *_: (b, g, 0, *at(i))),
                pl.BlockSpec((None, None, across, along), lambda b, g, i, j, *_: (b, g, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((K, rows), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (B, groups, across, *((K, length) if channels_first else (length, K))),
                jnp.float32 if wide else query.dtype,
            ),
            jax.ShapeDtypeStruct((B, groups, across, length), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=_cost(B, H, T, S, K, inputs.window, key),
        name=f"pe_lab_attention_{'decode' if T < FEW else 'flash'}",
        interpret=interpret,
    )(start, used, jnp.asarray(layer, jnp.int32).reshape(1), *(array for array, _ in arrays.values()))
    if channels_first:
        out = out.swapaxes(-2, -1)
    return PartialAttention(_heads_first(out, cut, H, T), _heads_first(logsumexp[..., None], cut, H, T)[..., 0])


def _arrays(
    query: jax.Array, key: jax.Array, value: jax.Array, inputs: AttentionInputs, static: TpuStatic
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """The kernel's arrays and their blocks, by name."""
    B, H, T, K = query.shape
    cut, channels_first, key_blocks = static.tiles, static.channels_first, static.key_blocks
    G, Tq, Tk = key.shape[2], cut.queries, cut.keys
    groups, rows = H // cut.heads, cut.rows
    per_key_head = groups // G
    across, along = (1, rows) if cut.few else (cut.heads, Tq)
    query = _side_by_side(query, cut)[:, :, 0, None] if cut.few else query.reshape(B, groups, cut.heads, T, K)
    if channels_first:
        query, key, value = (x.swapaxes(-2, -1) for x in (query, key, value))
    seen = functools.partial(key_block, static)
    at, block = _of_tokens(channels_first, along, K)
    at_keys, keys_block = _of_tokens(channels_first, Tk, K)
    of_keys = pl.BlockSpec(
        (None, None, None, *keys_block),
        lambda b, g, i, j, *s: (s[2][0], b, g // per_key_head, *at_keys(seen(b, i, j, *s))),
    )
    row_of_keys = pl.BlockSpec((None, 1, Tk), lambda b, g, i, j, *s: (b, 0, seen(b, i, j, *s)))
    arrays = {
        "query": (
            query,
            pl.BlockSpec((None, None, across, *block), lambda b, g, i, j, *_: (b, g, 0, *at(i))),
        ),
        "key": (key, of_keys),
        "value": (value, of_keys),
    }
    if inputs.rotation is not None:
        tables = [jnp.concatenate([x, x], axis=-1) for x in block_rotations(inputs.rotation, key_blocks, Tk)]
        coarse, fine = jnp.stack(tables[:2], 2), jnp.stack(tables[2:], 1)  # [rows, blocks, 2, K], [rows, 2, Tk, K]
        if channels_first:
            fine = fine.swapaxes(-2, -1)
        # [key heads or 1, groups of a key head or 1, heads of a group or 1, ...]
        rotations = coarse.shape[0]
        shape = (G, per_key_head, cut.heads) if rotations not in (1, G) else (rotations, 1, 1)

        def of(g: jax.Array) -> tuple[Any, Any]:
            return (g // per_key_head if shape[0] > 1 else 0), (g % per_key_head if shape[1] > 1 else 0)

        arrays["coarse"] = (
            coarse.reshape(*shape, *coarse.shape[1:]),
            pl.BlockSpec(
                (None, None, shape[2], None, 2, K), lambda b, g, i, j, *s: (*of(g), 0, seen(b, i, j, *s), 0, 0)
            ),
        )
        arrays["fine"] = (
            fine.reshape(*shape, *fine.shape[1:]),
            pl.BlockSpec((None, None, shape[2], *fine.shape[1:]), lambda b, g, i, j, *_: (*of(g), 0, 0, 0, 0)),
        )
    if inputs.slope is not None:
        slope = jnp.repeat(inputs.slope.astype(jnp.float32).reshape(groups, cut.heads), Tq, axis=1)
        slope = jnp.pad(slope, ((0, 0), (0, rows - slope.shape[1])))[:, None]
        arrays["slope"] = slope, pl.BlockSpec((None, 1, rows), lambda b, g, i, j, *_: (g, 0, 0))
    if inputs.distance_bias is not None:
        table = padded_table(inputs.distance_bias, cut.heads, Tq, Tk)

        def of_table(b: Any, g: Any, i: Any, j: Any, *s: Any) -> tuple[Any, ...]:
            return g, part(table, s[0][b] + i * Tq - seen(b, i, j, *s) * Tk, Tq, Tk), 0, 0

        arrays["distance bias"] = table, pl.BlockSpec(fetched(table, Tq, Tk), of_table)
    if inputs.key_bias is not None:
        bias = inputs.key_bias.astype(jnp.float32)
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, key_blocks * Tk - bias.shape[2])))
        row = (lambda b: b) if bias.shape[0] > 1 else (lambda b: 0)
        arrays["key bias"] = (
            bias.reshape(-1, groups, cut.heads, key_blocks * Tk),
            pl.BlockSpec((None, None, cut.heads, Tk), lambda b, g, i, j, *s: (row(b), g, 0, seen(b, i, j, *s))),
        )
    for what, (queries, keys) in inputs.compared().items():
        wide = jnp.broadcast_to(queries[:, None, :, None], (B, cut.heads, T, 1))
        arrays[f"query {what}"] = (
            _side_by_side(wide, cut)[:, 0, :, None, :, 0],
            pl.BlockSpec((None, None, 1, rows), lambda b, g, i, j, *_: (b, i, 0, 0)),
        )
        # Padded to whole blocks; the kernel masks keys beyond the last one by their index.
        keys = jnp.pad(keys, ((0, 0), (0, key_blocks * Tk - keys.shape[1])))
        arrays[f"key {what}"] = keys[:, None], row_of_keys
    return arrays


def _of_tokens(channels_first: bool, tokens: int, K: int) -> tuple[Any, tuple[int, int]]:
    """A function from a block's number to its index in the last two axes, and its shape there."""
    if channels_first:
        return lambda n: (0, n), (K, tokens)
    return lambda n: (n, 0), (tokens, K)


def _side_by_side(x: Num[Array, "B H T C"], cut: TpuTiles) -> Num[Array, "B groups blocks rows C"]:
    """Stacks heads and queries in one axis: row n of a block is query n % queries of head n // queries."""
    B, H, T, C = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -T % cut.queries), (0, 0)))
    x = x.reshape(B, H // cut.heads, cut.heads, -1, cut.queries, C).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(*x.shape[:3], cut.heads * cut.queries, C)
    return jnp.pad(x, ((0, 0),) * 3 + ((0, cut.rows - x.shape[3]), (0, 0)))


def _heads_first(x: Float[Array, "B groups across length C"], cut: TpuTiles, H: int, T: int) -> Float[Array, "B H T C"]:
    """An output of the kernel as [B, H, T, C]."""
    if cut.few:
        x = x[:, :, 0, : cut.heads * cut.queries]
        return x.reshape(x.shape[0], H, cut.queries, x.shape[-1])[:, :, :T]
    return x.reshape(x.shape[0], H, T, x.shape[-1])


def _cost(B: int, H: int, T: int, S: int, K: int, window: int | None, key: jax.Array) -> pl.CostEstimate:
    """The visible pairs for XLA's scheduler, if queries are the last T of S tokens."""
    each = S - (T - 1) / 2 if window is None else min(window, S)
    pairs = int(B * H * T * each)
    moved = 2 * key.size // key.shape[0] * key.dtype.itemsize + 2 * B * H * T * K * key.dtype.itemsize
    return pl.CostEstimate(flops=4 * pairs * K, bytes_accessed=moved, transcendentals=pairs)
