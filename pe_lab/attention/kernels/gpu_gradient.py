"""Gradients of pe_lab's attention kernel for NVIDIA GPUs (Pallas, compiled by Triton): FlashAttention-2 (Dao 2023).

Three kernels recompute the weights p = exp(logit - logsumexp) of blocks from the logsumexp of all keys, which the
forward pass returned, and the gradients of their logits, p (d_out . value - inner):

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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pe_lab.attention.bias import diagonals
from pe_lab.attention.kernels.gpu import (
    LOG2_E,
    PROGRAMS,
    distance_bias,
    filled,
    ignore_triton_deprecation,
    iota,
    load,
)
from pe_lab.attention.key_block import FLOOR, MASKED, AttentionInputs, KeyBlockGradients, check_block
from pe_lab.attention.sections import key_sections
from pe_lab.errors import UnsupportedError

UNSEEN = -MASKED  # the logsumexp of queries that see no key, and of queries beyond the last


@dataclass(frozen=True)
class GpuGradientStatic:
    """Block sizes and what else a program knows when it is compiled.

    Attributes:
      rows, keys: queries and keys in a block.
      warps: of a program, 32 threads each.
      stages: blocks that are being loaded or in use.
      queries, all_keys: T and S.
      splits: programs that share the blocks of one diagonal.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    queries: int
    all_keys: int
    head_dim: int
    window: int | None
    splits: int = 1

    @property
    def wide(self) -> int:
        return filled(self.head_dim)

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.queries, self.rows)

    @property
    def key_blocks(self) -> int:
        return pl.cdiv(self.all_keys, self.keys)


class _Queries(NamedTuple):
    query: jax.Array  # [rows, wide]
    d_out: jax.Array
    logsumexp: jax.Array  # [rows], of powers of two
    inner: jax.Array
    index: jax.Array
    positions: jax.Array | None
    segments: jax.Array | None


class _Keys(NamedTuple):
    key: jax.Array  # [keys, wide]
    value: jax.Array
    index: jax.Array  # [keys]
    here: jax.Array | None  # which are real and used; None: all
    positions: jax.Array | None
    segments: jax.Array | None


class _LogitBlock(NamedTuple):
    """[rows, keys], or [keys, rows] in a program with keys down."""

    weights: jax.Array
    d_logits: jax.Array
    distance: jax.Array
    far: jax.Array  # the distance of slopes


class _GradientProgram:
    """A program's arrays by name, and what its loops share. Arrays have an axis for heads if there are several."""

    def __init__(self, static: GpuGradientStatic, names: tuple[str, ...], refs: tuple[Any, ...], keys_down: bool):
        self.static, self.keys_down = static, keys_down
        self.ref = ref = dict(zip(names, refs, strict=True))
        self.start = ref["start"][0] if "start" in ref else 0
        self.used = jnp.minimum(ref["used"][0], static.all_keys) if "used" in ref else static.all_keys
        self.channels = None if static.wide == static.head_dim else iota(static.wide) < static.head_dim
        precision = jax.lax.Precision.HIGHEST if ref["key"].dtype == jnp.float32 else None
        self._dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def weighted(self, weights: jax.Array, x: jax.Array) -> jax.Array:
        """The product of a block, rounded to the dtype of keys, and an array [its second axis, wide]."""
        return self._dot(weights.astype(x.dtype), x, (((1,), (0,)), ((), ())))

    def queries(self, first: jax.Array, masked: bool, head: jax.Array | None = None) -> _Queries:
        ref, size, at = self.ref, self.static.rows, [] if head is None else [head]
        tokens, place = pl.ds(first, size), first + iota(size)
        there = place < self.static.queries if masked and self.static.queries % size else None
        channels = pl.ds(0, self.static.wide)
        optional = [
            load(ref[name], tokens, down=there) if name in ref else None
            for name in ("query positions", "query segments")
        ]
        return _Queries(
            *(load(ref[name], *at, tokens, channels, down=there, across=self.channels) for name in ("query", "d_out")),
            load(ref["logsumexp"], *at, tokens, down=there, other=UNSEEN),
            load(ref["inner"], *at, tokens, down=there),
            self.start + place,
            *optional,
        )

    def keys(self, first: jax.Array, masked: bool) -> _Keys:
        """A block of keys; if `masked`, it may begin before the first and end behind the last."""
        ref, size, wide = self.ref, self.static.keys, self.static.wide
        index = first + iota(size)
        here = index < self.used if masked else None
        tokens, channels = pl.ds(first, size), pl.ds(0, wide)
        of_keys = [load(ref[name], tokens, channels, down=here, across=self.channels) for name in ("key", "value")]
        optional = [
            load(ref[name], tokens, down=here) if name in ref else None for name in ("key positions", "key segments")
        ]
        return _Keys(*of_keys, index, here, *optional)

    def keys_anywhere(self, first: jax.Array) -> _Keys:
        """A block of keys that may begin before the first key and end behind the last."""
        ref, shape = self.ref, (self.static.keys, self.static.wide)
        index = first + iota(shape[0])
        here = (index >= 0) & (index < self.used)
        # Loads with computed indices: interpreted, a slice that begins before its array would be moved.
        tokens = jnp.clip(index, 0, self.static.all_keys - 1)
        at = [jnp.broadcast_to(x, shape) for x in (tokens[:, None], iota(shape[1])[None])]
        mask = jnp.broadcast_to(here[:, None] if self.channels is None else here[:, None] & self.channels[None], shape)
        of_keys = [plgpu.load(ref[name].at[*at], mask=mask, other=0) for name in ("key", "value")]
        optional = [
            plgpu.load(ref[name].at[tokens], mask=here, other=0) if name in ref else None
            for name in ("key positions", "key segments")
        ]
        return _Keys(*of_keys, index, here, *optional)

    def key_bias(self, k: _Keys, first: jax.Array, head: jax.Array | None = None) -> jax.Array | None:
        if "key bias" not in self.ref:
            return None
        at = [] if head is None else [head]
        return load(self.ref["key bias"], *at, pl.ds(first, self.static.keys), down=k.here)

    def block(
        self,
        q: _Queries,
        k: _Keys,
        masked: bool,
        head: jax.Array | None = None,
        nearest: jax.Array | None = None,
        key_bias: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> _LogitBlock:
        """The weights of a block, and the gradients of its logits.

        Args:
          masked: not all queries see all keys, by their index.
          head: of the program's, if it has several.
          nearest: the smallest distance of the block.
          key_bias: [keys].
          bias: by distance. None: from the table, if there is one.
        """
        ref, window = self.ref, self.static.window
        rows, keys = (1, 0) if self.keys_down else (0, 1)  # their axes
        of_queries, of_keys = (lambda x, axis=axis: jnp.expand_dims(x, 1 - axis) for axis in (rows, keys))

        def product(x: jax.Array, y: jax.Array) -> jax.Array:
            """Of an array of queries and an array of keys."""
            return self._dot(*((y, x) if self.keys_down else (x, y)), (((1,), (1,)), ((), ())))

        logits = product(q.query, k.key)
        distance = far = of_queries(q.index) - of_keys(k.index)
        if "slope" in ref:
            if q.positions is not None and k.positions is not None:
                far = of_queries(q.positions) - of_keys(k.positions)
            logits -= ref["slope"][0 if head is None else head] * far.astype(jnp.float32)
        if "distance bias" in ref and bias is None:
            table = ref["distance bias"]
            bias = distance_bias(table, distance, nearest if table.shape[-1] < self.static.all_keys else None, head)
        logits = logits if bias is None else logits + bias
        logits = logits if key_bias is None else logits + of_keys(key_bias)
        seen = []
        if masked:
            seen = [distance >= 0] + ([] if window is None else [distance < window])
            seen += [] if k.here is None else [of_keys(k.here)]
        if q.segments is not None and k.segments is not None:
            seen.append(of_queries(q.segments) == of_keys(k.segments))
        if seen:
            logits = jnp.where(functools.reduce(jnp.logical_and, seen), logits, MASKED)
        weights = jnp.exp2(logits * LOG2_E - of_queries(q.logsumexp))
        d_logits = weights * (product(q.d_out, k.value) - of_queries(q.inner))
        return _LogitBlock(weights, d_logits, distance, far)

    def store(self, name: str, value: jax.Array, down: jax.Array | None, head: jax.Array | None = None) -> None:
        """Stores an array of tokens, or of tokens and channels."""
        at = ([] if head is None else [head]) + [slice(None)] * value.ndim
        mask = down
        if value.ndim == 2:
            masks = [None if down is None else down[:, None], None if self.channels is None else self.channels[None]]
            masks = [one for one in masks if one is not None]
            mask = functools.reduce(jnp.logical_and, masks) if masks else None
        plgpu.store(self.ref[name].at[*at], value, mask=mask)


def _loops(sections: tuple[tuple[Any, Any, bool], ...], add: Callable[..., Any], sums: Any) -> Any:
    """`sums` with blocks first to last of each section (first, last, masked) added."""
    for first, last, masked in sections:
        sums = jax.lax.fori_loop(first, last, functools.partial(add, masked), sums)
    return sums


def query_gradient(static: GpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """A block of queries of one head against its visible keys: the gradients of the queries.

    For every query, also its part of the slope's gradient, and of that of the last entry of biases by distance.
    """
    program = _GradientProgram(static, names, refs, keys_down=False)
    ref, rows, keys, start = program.ref, static.rows, static.keys, program.start
    first_row = (static.row_blocks - 1 - pl.program_id(0)) * rows
    first_query = start + first_row
    last_query = jnp.minimum(first_query + rows, start + static.queries) - 1
    q = program.queries(first_row, True)

    def add(masked: bool, j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_query, *others = sums
        k = program.keys(j * keys, masked)
        nearest = first_query - (j + 1) * keys + 1
        block = program.block(q, k, masked, nearest=nearest, key_bias=program.key_bias(k, j * keys))
        new = []
        if "slope" in ref:
            new.append(-(block.d_logits * block.far.astype(jnp.float32)).sum(1))
        if "distance bias" in ref:
            beyond = block.distance >= ref["distance bias"].shape[-1] - 1
            new.append(jnp.where(beyond, block.d_logits, 0).sum(1))
        new = [old + one for old, one in zip(others, new, strict=True)]
        return d_query + program.weighted(block.d_logits, k.key), *new

    begin, whole_from, whole_to, end = key_sections(first_query, last_query, program.used, static.window, keys)
    whole_from = jnp.clip(whole_from, begin, end)
    whole_to = jnp.clip(whole_to, whole_from, end)
    more = [name for name in ("d_slope", "d_beyond") if name in ref]
    sums = (jnp.zeros((rows, static.wide), jnp.float32), *(jnp.zeros(rows, jnp.float32) for _ in more))
    sections = ((begin, whole_from, True),) if static.window is not None else ()
    sums = _loops((*sections, (whole_from, whole_to, False), (whole_to, end, True)), add, sums)
    there = first_row + iota(rows) < static.queries if static.queries % rows else None
    for name, one in zip(("d_query", *more), sums, strict=True):
        program.store(name, one, there)


def key_gradient(static: GpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """A block of keys of one key head against the queries that see it, head by head: the gradients of keys and values.

    Also those of biases of keys, one row for each query head.
    """
    program = _GradientProgram(static, names, refs, keys_down=True)
    ref, rows, keys, start, window = program.ref, static.rows, static.keys, program.start, static.window
    first_key = pl.program_id(0) * keys
    last_key = first_key + keys - 1
    some_unused = "used" in ref or static.all_keys % keys != 0
    k = program.keys(first_key, some_unused)

    # The blocks of queries that see any of the keys, and those in which all queries see all keys.
    before = lambda row: jax.lax.div(jnp.maximum(row, 0), rows)  # noqa: E731
    begin, end = before(first_key - start), static.row_blocks
    whole_from, whole_to = before(last_key - start + rows - 1), static.queries // rows
    if window is not None:
        end = jnp.minimum(end, before(last_key + window - start + rows - 1))
        whole_to = jnp.minimum(whole_to, before(first_key + window - start))
    if some_unused:
        # None, if no key is used; no whole ones, if not all are. (A choice of two integers does not lower in JAX 0.10.)
        end = end * jnp.clip(program.used - first_key, 0, 1)
        whole_to = whole_to * jnp.clip(program.used - last_key, 0, 1)
    begin = jnp.minimum(begin, end)
    whole_from = jnp.clip(whole_from, begin, end)
    whole_to = jnp.clip(whole_to, whole_from, end)
    sections = ((begin, whole_from, True), (whole_from, whole_to, False))
    if some_unused or window is not None or static.queries % rows:
        sections = (*sections, (whole_to, end, True))

    def of_head(head: jax.Array | None, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key_bias = program.key_bias(k, first_key, head)

        def add(masked: bool, i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_key, d_value, *others = sums
            q = program.queries(i * rows, masked, head)
            nearest = start + i * rows - last_key
            block = program.block(q, k, masked, head, nearest, key_bias)
            d_value += program.weighted(block.weights, q.d_out)
            d_key += program.weighted(block.d_logits, q.query)
            return d_key, d_value, *(one + block.d_logits.sum(1) for one in others)

        more = [] if key_bias is None else [jnp.zeros(keys, jnp.float32)]
        d_key, d_value, *others = _loops(sections, add, (*sums, *more))
        for one in others:
            program.store("d_key_bias", one, there, head)
        return d_key, d_value

    there = first_key + iota(keys) < static.all_keys if static.all_keys % keys else None
    sums = (jnp.zeros((keys, static.wide), jnp.float32),) * 2
    # Queries of several heads have an axis for heads.
    several = ref["query"].shape[0] if len(ref["query"].shape) == 3 else 0
    sums = jax.lax.fori_loop(0, several, of_head, sums) if several else of_head(None, sums)
    for name, one in zip(("d_key", "d_value"), sums, strict=True):
        program.store(name, one, there)


def distance_gradient(static: GpuGradientStatic, names: tuple[str, ...], *refs: Any) -> None:
    """The sum of the gradients of logits over the blocks of one diagonal of one head, all with the same distances.

    Blocks are square. Keys begin so far before the queries that distances are multiples of a block plus
    row - column, wherever the queries start.
    """
    program = _GradientProgram(static, names, refs, keys_down=False)
    side, start = static.rows, program.start
    apart = (program.ref["first"][0] + pl.program_id(0)) * side
    distance = apart + iota(side)[:, None] - iota(side)[None]
    bias = distance_bias(program.ref["distance bias"], distance)
    before = lambda row: jax.lax.div(jnp.maximum(row, 0), side)  # noqa: E731
    begin = before(apart - start)
    end = jnp.minimum(static.row_blocks, before(program.used + apart - start + side - 1))
    if static.splits > 1:
        each = jax.lax.div(jnp.maximum(end - begin, 0) + static.splits - 1, static.splits)
        begin += pl.program_id(1) * each
        end = jnp.minimum(begin + each, end)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        q = program.queries(i * side, True)
        first_key = start + i * side - apart
        k = program.keys_anywhere(first_key)
        key_bias = None
        if "key bias" in program.ref:
            at = program.ref["key bias"].at[jnp.clip(k.index, 0, static.all_keys - 1)]
            key_bias = plgpu.load(at, mask=k.here, other=0)
        return total + program.block(q, k, True, key_bias=key_bias, bias=bias).d_logits

    total = jax.lax.fori_loop(begin, end, add, jnp.zeros((side, side), jnp.float32))
    plgpu.store(program.ref["d_diagonal"].at[:, :], total, mask=None)


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
    M, side = H // key.shape[1], cut.rows
    entries = inputs.distance_bias.shape[1] - 1
    found = diagonals(entries, T, key.shape[2], side, inputs.window, inputs.start)
    if found.count == 0:
        return jnp.zeros((H, found.entries), jnp.float32)
    splits = max(1, min(PROGRAMS // (B * H * found.count), cut.row_blocks))
    cut = replace(cut, splits=splits)
    arrays = _arrays(tokens, inputs, cut, 1, lambda n, p, h, b: (b, h, jax.lax.div(h, M)))
    arrays["first"] = found.first, pl.BlockSpec((1,), lambda n, p, h, b: (0,))
    block = pl.BlockSpec((None, None, None, None, side, side), lambda n, p, h, b: (b, p, h, n, 0, 0))
    out = {"d_diagonal": ((B, splits, H, found.count, side, side), block)}
    blocks = run(distance_gradient, cut, (found.count, splits, H, B), arrays, out)["d_diagonal"].sum((0, 1))
    # Columns in reverse have row + column equal on a diagonal, and rows of a width that is less by one move each row on
    # by one place.
    skewed = jnp.pad(blocks[..., ::-1], ((0, 0),) * 3 + ((0, side),)).reshape(H, found.count, -1)
    return found.table(skewed[..., : side * (2 * side - 1)].reshape(H, found.count, side, -1).sum(2))
