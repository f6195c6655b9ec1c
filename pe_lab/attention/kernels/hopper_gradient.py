"""Gradients of pe_lab's attention kernel for Hopper GPUs (Pallas, compiled by Mosaic GPU).

Three kernels recompute the weights p = exp(logit - logsumexp) of blocks from the logsumexp of all keys, which the
forward pass returned, and the gradients of their logits, p (d_out . value - inner):

- A program has a block of queries of one head and loops over the keys that they see: the gradients of queries.
- A program has a block of keys of one key head and loops over the query heads of its group and the queries that see
  the keys: the gradients of keys and values, and of biases of keys.
- A program has two neighbouring diagonals of square blocks of one head. All blocks of a diagonal have the same
  distances, so it adds up the blocks in registers, and sums the result along its own diagonals in shared memory: the
  gradients of biases by distance. Distances beyond the table share an entry, which the first kernel sums.

Nothing is added atomically, so that results are the same in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pe_lab.attention.bias import diagonals
from pe_lab.attention.kernels.hopper import (
    ACROSS,
    DOWN,
    LOG2_E,
    LOGITS,
    PROGRAMS,
    channel_tile,
    looked_up,
    matrix,
)
from pe_lab.attention.key_block import (
    FLOOR,
    MASKED,
    AttentionInputs,
    KeyBlockGradients,
    check_block,
    padded,
)
from pe_lab.attention.sections import Sections, ends_of_blocks, key_sections, query_sections, within_documents
from pe_lab.errors import UnsupportedError

UNSEEN = -MASKED  # the logsumexp of queries that see no key, and of queries beyond the last
SIDE = 64  # queries, and keys, of a block of logits
REACH = 4 * SIDE  # distances in a copied part of a table


@dataclass(frozen=True)
class HopperGradientStatic:
    """What a program knows when it is compiled.

    Attributes:
      warpgroups: each has a block of SIDE queries (or keys); together they are a tile.
      stages: blocks that are being copied or in use.
      queries, keys: T and S.
      entries: of the table of biases by distance; 0: there is none.
      wanted: of key and value, the gradients that the second kernel computes.
      splits: programs that share the blocks of a diagonal.
      interpret: on a CPU.
    """

    warpgroups: int
    stages: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    window: int | None
    soft_cap: float | None
    entries: int
    interpret: bool
    wanted: tuple[str, ...] = ("key", "value")
    splits: int = 1

    @property
    def tile(self) -> int:
        return self.warpgroups * SIDE


Tokens = tuple[jax.Array, ...]  # query, key, value, d_out, logsumexp of powers of two, and inner


class _Logits(NamedTuple):
    """A block, [SIDE, SIDE].

    Attributes:
      weights: p.
      d_logits: the gradient of the logits.
      d_product: of the product of queries and keys, from which a soft cap makes the logits.
    """

    weights: jax.Array
    d_logits: jax.Array
    d_product: jax.Array


class _Program:
    """What the three kernels share: their arrays by name, the way of blocks through shared memory, and logits."""

    def __init__(self, static: HopperGradientStatic, names: tuple[str, ...], refs: tuple[Any, ...], shared: Any):
        self.static, self.shared = static, shared
        self.ref = dict(zip(names, refs, strict=True))
        self.me, self.batch = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("batch")
        self.start = self.ref["start"][self.batch] if "start" in self.ref else 0
        self.used = self.ref["used"][self.batch] if "used" in self.ref else static.keys
        self.ends = "start" in self.ref or "used" in self.ref or static.queries > static.keys
        self.dtype = self.ref["key"].dtype

    def iota(self, axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), axis, layout=LOGITS)

    def one_or_each(self, name: str) -> Any:
        x = self.ref[name]
        return x.at[0 if x.shape[0] == 1 else self.batch]

    def stream(self, count: jax.Array, start: Callable[[jax.Array], None], add: Callable[..., Any], sums: Any) -> Any:
        """`sums` after `add(n, slot, sums)` for each of `count` blocks, which the first warpgroup copies ahead.

        start: starts the copies of block n.
        """
        stages = self.static.stages
        leads = self.me == 0
        for n in range(stages - 1):
            pl.when(leads & (n < count))(lambda n=n: start(jnp.int32(n)))

        def step(n: jax.Array, sums: Any) -> Any:
            @pl.when(leads & (n + stages - 1 < count))
            def _() -> None:
                before = jax.lax.rem(n + stages - 1, stages)  # the slot of block n - 1
                pl.when(n > 0)(lambda: plgpu.barrier_wait(self.shared["free"].at[before]))
                start(n + stages - 1)

            slot = jax.lax.rem(n, stages)
            plgpu.barrier_wait(self.shared["ready"].at[slot])
            sums = add(n, slot, sums)
            plgpu.commit_smem()  # a copy may overwrite what threads have read
            plgpu.barrier_arrive(self.shared["free"].at[slot])
            return sums

        return jax.lax.fori_loop(0, count, step, sums)

    def copy(self, source: Any, name: str, slot: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(source, self.shared[name].at[slot], self.shared["ready"].at[slot])

    def add_product(self, sums: Any, left: jax.Array, right: Any) -> None:
        """sums += left @ right, of an array in registers and one in shared memory; it may still be under way.

        The interpreter has no such product (JAX 0.12), and sums there are in shared memory.
        """
        if self.static.interpret:
            sums[...] += jnp.dot(left.astype(jnp.float32), right[...].astype(jnp.float32))
        else:
            plgpu.wgmma(sums, left, right)

    def with_sums(self, count: int, run: Callable[..., Any]) -> tuple[Any, ...]:
        """What is in `count` sums [SIDE, K] after `run(*sums)`, and what it returns."""
        shape = SIDE, self.static.head_dim

        def of(*sums: Any) -> tuple[Any, ...]:
            found = run(*sums)
            return *(one[...] for one in sums), found

        if not self.static.interpret:
            return pl.run_scoped(of, *[plgpu.ACC(shape, jnp.float32)] * count)
        sums = [self.shared["sums"].at[self.me, i] for i in range(count)]
        for one in sums:
            one[...] = jnp.zeros(shape, jnp.float32)
        return of(*sums)

    def logits(
        self,
        product: jax.Array,
        d_weights: Callable[[jax.Array], jax.Array],
        biases: list[jax.Array],
        whole: jax.Array,
        seen: Callable[[], jax.Array],
        logsumexp: jax.Array,
        inner: jax.Array,
    ) -> _Logits:
        """A block of logits and their gradients.

        Args:
          product: of queries and keys.
          d_weights: the products of gradients of outputs and values, from the weights.
          biases: added to the logits.
          whole: all keys of the block are visible to all queries; else `seen` says which are.
        """
        cap = self.static.soft_cap
        logits, flat = product, None
        if cap is not None:
            flat = jnp.tanh(product * (1 / cap))
            logits = cap * flat
        for bias in biases:
            logits += bias
        logits = jax.lax.cond(whole, lambda x: x, lambda x: jnp.where(seen(), x, MASKED), logits)
        weights = jnp.exp2(logits * LOG2_E - logsumexp)
        d_logits = weights * (d_weights(weights) - inner)
        return _Logits(weights, d_logits, d_logits if flat is None else d_logits * (1 - flat * flat))

    def table(self, head: jax.Array, nearest: jax.Array) -> Any:
        """The part of a head's table that begins at a distance; behind its last entry this is repeated."""
        table = self.ref["distance bias"].at[head]
        first = jnp.minimum(nearest, self.static.entries - 1) + REACH
        return table.at[pl.ds(first, REACH)]


def store_rows(memory: Any, values: jax.Array) -> None:
    """Stores an array in rows of shared memory, which are not the tiles of an operand."""
    if hasattr(plgpu, "store"):
        plgpu.store(memory, values, optimized=False)
    else:  # JAX 0.11
        memory[...] = values


def _to_columns(x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (SIDE, SIDE), [0])


def _to_rows(x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (SIDE, SIDE), [1])


def query_gradient(static: HopperGradientStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """Blocks of queries of one head against their visible keys: the gradients of the queries.

    For every query, also its part of the slope's gradient, and of that of the last entry of biases by distance.
    """
    program = _Program(static, names, refs, shared)
    ref, me, b, window = program.ref, program.me, program.batch, static.window
    tiles = pl.cdiv(static.queries, static.tile)
    tile, head = tiles - 1 - jax.lax.axis_index("tile"), jax.lax.axis_index("head")
    here = b * static.heads + head
    pair = b * static.kv_heads + jax.lax.div(head, static.heads // static.kv_heads)
    first_query = program.start + tile * static.tile
    if "sections" in ref:
        begin, whole_from, whole_to, end = (ref["sections"][b, tile, i] for i in range(4))
    else:
        last_query = jnp.minimum(first_query + static.tile, static.queries) - 1
        begin, whole_from, whole_to, end = key_sections(first_query, last_query, static.keys, window, SIDE)
    rows = pl.ds(tile * static.tile + me * SIDE, SIDE)
    for name in ("query", "d_out"):
        plgpu.copy_gmem_to_smem(ref[name].at[here, rows], shared[name].at[me], shared["own ready"].at[me])

    def of_rows(x: Any) -> jax.Array:
        return plgpu.load(x.at[rows], layout=DOWN, optimized=False)

    logsumexp, inner = (of_rows(ref[name].at[here]) for name in ("logsumexp", "inner"))
    of_queries = {
        name: of_rows(program.one_or_each(name)) for name in ("query positions", "query segments") if name in ref
    }
    slope = ref["slope"][head] if "slope" in ref else None
    vectors = [name for name in ("key positions", "key segments", "key bias", "distance bias") if name in ref]
    plgpu.barrier_wait(shared["own ready"].at[me])

    def start(n: jax.Array) -> None:
        slot, j = jax.lax.rem(n, static.stages), begin + n
        keys = pl.ds(j * SIDE, SIDE)
        program.copy(ref["key"].at[pair, keys], "key", slot)
        program.copy(ref["value"].at[pair, keys], "value", slot)
        for name in vectors:
            if name == "distance bias":
                program.copy(program.table(head, first_query - (j + 1) * SIDE + 1), name, slot)
            else:
                at = program.one_or_each(name)
                program.copy((at.at[head, keys] if name == "key bias" else at.at[keys]), name, slot)

    def run(d_query: Any) -> Any:
        def add(n: jax.Array, slot: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            j = begin + n
            k, v = shared["key"].at[slot], shared["value"].at[slot]

            def products(logits: Any, d_weights: Any) -> tuple[jax.Array, jax.Array]:
                plgpu.wgmma(logits, shared["query"].at[me], k.T)
                plgpu.wgmma(d_weights, shared["d_out"].at[me], v.T)
                return logits[...], d_weights[...]

            product, d_weights = pl.run_scoped(products, *[plgpu.ACC((SIDE, SIDE), jnp.float32)] * 2)

            def across(name: str) -> jax.Array:
                return _to_rows(plgpu.load(shared[name].at[slot], layout=ACROSS, optimized=False))

            apart = first_query - j * SIDE + me * SIDE  # of the first query and the first key
            place = program.iota(0) - program.iota(1)
            biases, far = [], None
            if slope is not None:
                far = apart + place
                if "query positions" in of_queries:
                    far = _to_columns(of_queries["query positions"]) - across("key positions")
                biases.append(-slope * far.astype(jnp.float32))
            if "distance bias" in ref:
                entry = (me + 1) * SIDE - 1 + place
                biases.append(looked_up(shared["distance bias"], slot, entry, static.interpret))
            if "key bias" in ref:
                biases.append(across("key bias"))

            def seen() -> jax.Array:
                mask = apart + place >= 0
                if program.ends:
                    mask &= program.iota(1) < program.used - j * SIDE
                if window is not None:
                    mask &= apart + place < window
                if "query segments" in of_queries:
                    mask &= _to_columns(of_queries["query segments"]) == across("key segments")
                return mask

            whole = (j >= whole_from) & (j < whole_to)
            block = program.logits(
                product, lambda _: d_weights, biases, whole, seen, _to_columns(logsumexp), _to_columns(inner)
            )
            program.add_product(d_query, block.d_product.astype(program.dtype), k)
            more = []
            if slope is not None:
                more.append(-(block.d_logits * far.astype(jnp.float32)).sum(axis=1))
            if "distance bias" in ref:
                beyond = apart + place >= static.entries - 1
                more.append(jnp.where(beyond, block.d_logits, 0.0).sum(axis=1))
            plgpu.wgmma_wait(0)
            return tuple(one + new for one, new in zip(sums, more, strict=True))

        zero = plgpu.layout_cast(jnp.zeros((SIDE,), jnp.float32), DOWN)
        return program.stream(jnp.maximum(end - begin, 0), start, add, (zero,) * len(of_row))

    of_row = [name for name in ("d_slope", "d_beyond") if name in ref]
    d_query, sums = program.with_sums(1, run)
    ref["d_query"][here, rows] = d_query
    for name, one in zip(of_row, sums, strict=True):
        ref[name][here, rows] = one


def key_gradient(static: HopperGradientStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """Blocks of keys of one key head against the queries that see them, head by head: gradients of keys and values.

    Also those of biases of keys, of each query head. Blocks of logits have keys down and queries across.
    """
    program = _Program(static, names, refs, shared)
    ref, me, b, window = program.ref, program.me, program.batch, static.window
    tile, key_head = jax.lax.axis_index("tile"), jax.lax.axis_index("head")
    pair, each = b * static.kv_heads + key_head, static.heads // static.kv_heads
    begin, whole_from, whole_to, end = (ref["sections"][b, tile, i] for i in range(4))
    count = jnp.maximum(end - begin, 0)
    first_key = tile * static.tile
    rows = pl.ds(first_key + me * SIDE, SIDE)
    for name in ("key", "value"):
        plgpu.copy_gmem_to_smem(ref[name].at[pair, rows], shared[name].at[me], shared["own ready"].at[me])

    def of_rows(x: Any) -> jax.Array:
        return plgpu.load(x.at[rows], layout=DOWN, optimized=False)

    of_keys = {name: of_rows(program.one_or_each(name)) for name in ("key positions", "key segments") if name in ref}
    names = ("logsumexp", "inner", "query positions", "query segments", "distance bias")
    vectors = [name for name in names if name in ref]
    plgpu.barrier_wait(shared["own ready"].at[me])

    def start(n: jax.Array) -> None:
        slot, i = jax.lax.rem(n, static.stages), begin + jax.lax.rem(n, count)
        head = key_head * each + jax.lax.div(n, count)
        queries = pl.ds(i * SIDE, SIDE)
        for name in ("query", "d_out", *vectors):
            if name == "distance bias":
                source = program.table(head, program.start + i * SIDE - first_key - static.tile + 1)
            elif name in ("query positions", "query segments"):
                source = program.one_or_each(name).at[queries]
            else:
                source = ref[name].at[b * static.heads + head, queries]
            program.copy(source, name, slot)

    def run(*sums: Any) -> Any:
        of = dict(zip(static.wanted, sums, strict=True))

        def add(n: jax.Array, slot: jax.Array, d_bias: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i = begin + jax.lax.rem(n, count)
            head = key_head * each + jax.lax.div(n, count)
            q, d_out = shared["query"].at[slot], shared["d_out"].at[slot]

            def across(name: str) -> jax.Array:
                return _to_rows(plgpu.load(shared[name].at[slot], layout=ACROSS, optimized=False))

            def products(logits: Any) -> jax.Array:
                plgpu.wgmma(logits, shared["key"].at[me], q.T)
                return logits[...]

            product = pl.run_scoped(products, plgpu.ACC((SIDE, SIDE), jnp.float32))
            apart = program.start + i * SIDE - first_key - me * SIDE
            place = program.iota(1) - program.iota(0)
            biases = []
            if "slope" in ref:
                far = apart + place
                if "key positions" in of_keys:
                    far = across("query positions") - _to_columns(of_keys["key positions"])
                biases.append(-ref["slope"][head] * far.astype(jnp.float32))
            if "distance bias" in ref:
                entry = static.tile - 1 - me * SIDE + place
                biases.append(looked_up(shared["distance bias"], slot, entry, static.interpret))
            if "key bias" in ref:
                biases.append(_to_columns(of_rows(program.one_or_each("key bias").at[head])))

            def seen() -> jax.Array:
                mask = apart + place >= 0
                if "used" in ref:
                    mask &= program.iota(0) < program.used - first_key - me * SIDE
                if window is not None:
                    mask &= apart + place < window
                if "key segments" in of_keys:
                    mask &= across("query segments") == _to_columns(of_keys["key segments"])
                return mask

            def d_weights(weights: jax.Array) -> jax.Array:
                def products(found: Any) -> jax.Array:
                    plgpu.wgmma(found, shared["value"].at[me], d_out.T)
                    if "value" in of:
                        program.add_product(of["value"], weights.astype(program.dtype), d_out)
                    # The sum of values' gradients may still be under way.
                    return plgpu.wgmma_accumulator_load(found, wait_n=1 if "value" in of else 0)

                return pl.run_scoped(products, plgpu.ACC((SIDE, SIDE), jnp.float32))

            whole = (i >= whole_from) & (i < whole_to)
            block = program.logits(product, d_weights, biases, whole, seen, across("logsumexp"), across("inner"))
            if "key" in of:
                program.add_product(of["key"], block.d_product.astype(program.dtype), q)
            if d_bias:
                total = d_bias[0] + block.d_logits.sum(axis=1)
                last = jax.lax.rem(n, count) == count - 1

                @pl.when(last)
                def _() -> None:
                    ref["d_key_bias"][b * static.heads + head, rows] = total

                d_bias = (total * jnp.where(last, 0.0, 1.0),)
            plgpu.wgmma_wait(0)
            return d_bias

        zero = plgpu.layout_cast(jnp.zeros((SIDE,), jnp.float32), DOWN)
        return program.stream(count * each, start, add, (zero,) if "d_key_bias" in ref else ())

    *found, _ = program.with_sums(len(static.wanted), run)
    for name, one in zip(static.wanted, found, strict=True):
        ref[f"d_{name}"][pair, rows] = one
    if "d_key_bias" in ref:

        @pl.when(count == 0)
        def _() -> None:
            @pl.loop(0, each)
            def _(head: jax.Array) -> None:
                zero = plgpu.layout_cast(jnp.zeros((SIDE,), jnp.float32), DOWN)
                ref["d_key_bias"][b * static.heads + key_head * each + head, rows] = zero


def distance_gradient(static: HopperGradientStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """The sums over the blocks of two neighbouring diagonals of one head, one for each warpgroup.

    Queries are aligned: the first one's index is a multiple of SIDE. At step n the first warpgroup has queries i and
    keys i - d of its diagonal d, the second keys i - d - 1, which the first one had a step before.
    """
    program = _Program(static, names, refs, shared)
    ref, me, b = program.ref, program.me, program.batch
    in_use, sums = shared["in use or sums"]
    query, d_out, key, value = in_use
    pair_of_diagonals, split, head = (jax.lax.axis_index(name) for name in ("diagonals", "split", "head"))
    here = b * static.heads + head
    pair = b * static.kv_heads + jax.lax.div(head, static.heads // static.kv_heads)
    diagonal = ref["first"][0] + pair_of_diagonals * static.warpgroups
    shift = jax.lax.div(program.start, SIDE) - diagonal  # of the first warpgroup's keys, in blocks
    begin, end = (ref["steps"][b, pair_of_diagonals, split, i] for i in range(2))
    apart = (diagonal + me) * SIDE
    place = program.iota(0) - program.iota(1)
    slots = static.stages + static.warpgroups - 1  # of keys and values
    vectors = [name for name in ("key positions", "key segments", "key bias") if name in ref]
    of_queries = [name for name in ("query positions", "query segments") if name in ref]

    @pl.when(me == 0)
    def _() -> None:
        for w in range(static.warpgroups):
            table = program.table(head, (diagonal + w) * SIDE - SIDE + 1)
            plgpu.copy_gmem_to_smem(table, shared["table"].at[w], shared["table ready"])

    plgpu.barrier_wait(shared["table ready"])
    bias = looked_up(shared["table"], me, SIDE - 1 + place, static.interpret)

    def of_block(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slot of the keys that are copied at step n, and the keys; blocks before the first one are not visible."""
        return jax.lax.rem(n + slots, slots), pl.ds(jnp.maximum(begin + n + shift, 0) * SIDE, SIDE)

    def copy_keys(n: jax.Array, ready: Any) -> None:
        slot, keys = of_block(n)
        for name, into in (("key", key), ("value", value)):
            plgpu.copy_gmem_to_smem(ref[name].at[pair, keys], into.at[slot], ready)
        for name in vectors:
            at = program.one_or_each(name)
            source = at.at[head, keys] if name == "key bias" else at.at[keys]
            plgpu.copy_gmem_to_smem(source, shared[name].at[slot], ready)

    def start(n: jax.Array) -> None:
        slot = jax.lax.rem(n, static.stages)
        ready, queries = shared["ready"].at[slot], pl.ds((begin + n) * SIDE, SIDE)
        for name, into in (("query", query), ("d_out", d_out)):
            plgpu.copy_gmem_to_smem(ref[name].at[here, queries], into.at[slot], ready)
        for name in ("logsumexp", "inner"):
            program.copy(ref[name].at[here, queries], name, slot)
        for name in of_queries:
            program.copy(program.one_or_each(name).at[queries], name, slot)
        copy_keys(n, ready)

    def add(n: jax.Array, slot: jax.Array, total: jax.Array) -> jax.Array:
        key_slot, _ = of_block(n - me)
        j = begin + n + shift - me

        def products(logits: Any, d_weights: Any) -> tuple[jax.Array, jax.Array]:
            plgpu.wgmma(logits, query.at[slot], key.at[key_slot].T)
            plgpu.wgmma(d_weights, d_out.at[slot], value.at[key_slot].T)
            return logits[...], d_weights[...]

        product, d_weights = pl.run_scoped(products, *[plgpu.ACC((SIDE, SIDE), jnp.float32)] * 2)

        def down(name: str) -> jax.Array:
            return _to_columns(plgpu.load(shared[name].at[slot], layout=DOWN, optimized=False))

        def across(name: str) -> jax.Array:
            return _to_rows(plgpu.load(shared[name].at[key_slot], layout=ACROSS, optimized=False))

        biases = [bias]
        if "slope" in ref:
            far = apart + place if "key positions" not in ref else down("query positions") - across("key positions")
            biases.append(-ref["slope"][head] * far.astype(jnp.float32))
        if "key bias" in ref:
            biases.append(across("key bias"))

        def seen() -> jax.Array:
            mask = (apart + place >= 0) & (program.iota(1) < program.used - j * SIDE) & (j >= 0)
            if static.window is not None:
                mask &= apart + place < static.window
            if "key segments" in ref:
                mask &= down("query segments") == across("key segments")
            return mask

        block = program.logits(
            product, lambda _: d_weights, biases, jnp.bool_(False), seen, down("logsumexp"), down("inner")
        )
        return total + block.d_logits

    if static.warpgroups > 1:
        # The keys of the second warpgroup's first step.
        pl.when((me == 0) & (begin < end))(lambda: copy_keys(jnp.int32(-1), shared["keys ready"]))
        pl.when(begin < end)(lambda: plgpu.barrier_wait(shared["keys ready"]))
    total = plgpu.layout_cast(jnp.zeros((SIDE, SIDE), jnp.float32), LOGITS)
    total = program.stream(jnp.maximum(end - begin, 0), start, add, total)
    if static.warpgroups > 1:
        plgpu.barrier_arrive(shared["done"])
        plgpu.barrier_wait(shared["done"])
    # Row r moves on by r places, so that a column has one distance: SIDE - 1 less than its number is column - row.
    mine = sums.at[me]
    zero = jnp.zeros((SIDE, SIDE), jnp.float32)
    for columns in range(0, 3 * SIDE, SIDE):
        store_rows(mine.at[:, pl.ds(columns, SIDE)], plgpu.layout_cast(total if columns == SIDE else zero, LOGITS))
    plgpu.commit_smem()

    def add_row(r: jax.Array, sum_: jax.Array) -> jax.Array:
        return sum_ + plgpu.load(mine.at[r, pl.ds(r + 1, 2 * SIDE)], layout=plgpu.Layout.WG_STRIDED((2 * SIDE,), 1))

    none = plgpu.layout_cast(jnp.zeros((2 * SIDE,), jnp.float32), plgpu.Layout.WG_STRIDED((2 * SIDE,), 1))
    at = (b * static.splits + split) * static.heads + head
    ref["d_diagonal"][at, pair_of_diagonals * static.warpgroups + me] = jax.lax.fori_loop(0, SIDE, add_row, none)


def hopper_key_block_gradient(
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
    check_block(H, key[None], value[None], inputs, soft_cap=True)
    if inputs.rotation is not None:
        raise UnsupportedError("the gradient of attention on a GPU takes rotated keys: no rotation inside.")
    start, used = inputs.slots(B, S)
    if inputs.used is not None:
        # Keys that are not used have weight 0, and may hold NaN.
        here = (jnp.arange(S) < used[:, None])[:, None, :, None]
        key, value = jnp.where(here, key, 0), jnp.where(here, value, 0)
    logsumexp = jnp.where(logsumexp > FLOOR, logsumexp * LOG2_E, UNSEEN)
    table = inputs.distance_bias
    static = HopperGradientStatic(
        1 if K > 128 else 2,
        2,
        T,
        S,
        H,
        G,
        K,
        B,
        inputs.window,
        inputs.soft_cap,
        0 if table is None else table.shape[1],
        interpret,
    )
    tokens = query, key, value, d_out.astype(query.dtype), logsumexp, inner.astype(jnp.float32)
    of_queries = _of_queries(tokens, inputs, static, start, used)
    of_keys = _of_keys(tokens, inputs, static, start, used)
    d_slope = None if inputs.slope is None else of_queries["d_slope"].reshape(B, H, -1)[..., :T].sum((0, 2))
    d_table = None
    if table is not None:
        last = of_queries["d_beyond"].reshape(B, H, -1)[..., :T].sum((0, 2))[:, None]
        d_table = jnp.concatenate([_of_distances(tokens, inputs, static, start, used), last], axis=1)
    d_key_bias = None
    if inputs.key_bias is not None:
        d_key_bias = of_keys["d_key_bias"][:, :S].reshape(B, H, S)
        if inputs.key_bias.shape[0] == 1:
            d_key_bias = d_key_bias.sum(0, keepdims=True)
    d_query = of_queries["d_query"][:, :T].reshape(query.shape)
    d_key, d_value = (of_keys[name][:, :S].reshape(key.shape) for name in ("d_key", "d_value"))
    return KeyBlockGradients(d_query, d_key, d_value, d_slope, d_table, d_key_bias)


def _arrays(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> dict[str, jax.Array]:
    """The arrays of a kernel by name."""
    query, key, value, d_out, logsumexp, inner = tokens
    heads, pairs = static.batch * static.heads, static.batch * static.kv_heads
    # Copies of matrices take whole tiles of 8 tokens; numbers are also loaded for tokens behind the last.
    whole = functools.partial(padded, axis=1, multiple=8)
    arrays = {name: whole(x.reshape(heads, *x.shape[2:])) for name, x in (("query", query), ("d_out", d_out))}
    arrays |= {name: whole(x.reshape(pairs, *x.shape[2:])) for name, x in (("key", key), ("value", value))}
    behind = -static.queries % static.tile
    for name, x, fill in (("logsumexp", logsumexp, UNSEEN), ("inner", inner, 0.0)):
        arrays[name] = jnp.pad(x.reshape(heads, -1), ((0, 0), (0, behind)), constant_values=fill)
    if inputs.start is not None:
        arrays["start"] = start
    if inputs.used is not None:
        arrays["used"] = used
    if inputs.slope is not None:
        arrays["slope"] = inputs.slope.astype(jnp.float32)
    if inputs.distance_bias is not None:
        table = inputs.distance_bias.astype(jnp.float32)
        arrays["distance bias"] = jnp.pad(table, ((0, 0), (REACH, 2 * REACH + -table.shape[1] % 4)), mode="edge")
    to_tiles = functools.partial(padded, axis=-1, multiple=static.tile)
    if inputs.key_bias is not None:
        arrays["key bias"] = to_tiles(inputs.key_bias.astype(jnp.float32))
    for what, (of_queries, of_keys) in inputs.compared().items():
        arrays[f"query {what}"], arrays[f"key {what}"] = to_tiles(of_queries), to_tiles(of_keys)
    return arrays


def _shared(
    arrays: dict[str, jax.Array],
    static: HopperGradientStatic,
    own: tuple[str, str],
    moving: tuple[str, str],
    vectors: tuple[str, ...],
) -> dict[str, Any]:
    """Shared memory of a program that keeps two matrices for each warpgroup, and through which two others stream."""
    dtype, tile, block = arrays["query"].dtype, channel_tile(static.head_dim), (SIDE, static.head_dim)
    vectors = tuple(name for name in vectors if name in arrays)
    shared = {name: matrix((static.warpgroups, *block), dtype, tile) for name in own}
    shared |= {name: matrix((static.stages, *block), dtype, tile) for name in moving}
    for name in vectors:
        shared[name] = plgpu.SMEM((static.stages, REACH if name == "distance bias" else SIDE), arrays[name].dtype)
    if static.interpret:
        shared["sums"] = plgpu.SMEM((static.warpgroups, 2, *block), jnp.float32)
    shared["own ready"] = plgpu.Barrier(num_arrivals=2, num_barriers=static.warpgroups)
    shared["ready"] = plgpu.Barrier(num_arrivals=2 + len(vectors), num_barriers=static.stages)
    shared["free"] = plgpu.Barrier(num_arrivals=static.warpgroups, num_barriers=static.stages)
    return shared


def _run(
    program: Callable[..., None],
    static: HopperGradientStatic,
    arrays: dict[str, jax.Array],
    out: dict[str, tuple[int, ...]],
    shared: dict[str, Any],
    grid: dict[str, int],
) -> dict[str, jax.Array]:
    """Runs a kernel; float32 arrays by name."""
    found = plgpu.kernel(
        functools.partial(program, static, (*arrays, *out)),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out.values()],
        scratch_types=shared,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=static.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=f"pe_lab_attention_{program.__name__}",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if static.interpret else None,
    )(*arrays.values())
    return dict(zip(out, found, strict=True))


def _of_queries(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> dict[str, jax.Array]:
    arrays = _arrays(tokens, inputs, static, start, used)
    T, tiles = static.queries, pl.cdiv(static.queries, static.tile)
    if inputs.start is not None or inputs.used is not None or inputs.query_segments is not None:
        first = start[:, None] + jnp.arange(tiles) * static.tile
        last = jnp.minimum(first + static.tile, start[:, None] + T) - 1
        found = key_sections(first, last, used[:, None], static.window, SIDE)
        if inputs.query_segments is not None:
            ends = ends_of_blocks(inputs.query_segments, static.tile), ends_of_blocks(inputs.key_segments, SIDE)
            found = within_documents(found, *ends)
        arrays["sections"] = _stacked(found, first.shape)
    shape = static.batch * static.heads, tiles * static.tile
    out = {"d_query": (*shape, static.head_dim)}
    out |= {} if inputs.slope is None else {"d_slope": shape}
    out |= {} if inputs.distance_bias is None else {"d_beyond": shape}
    vectors = ("key positions", "key segments", "key bias", "distance bias")
    shared = _shared(arrays, static, ("query", "d_out"), ("key", "value"), vectors)
    grid = {"tile": tiles, "head": static.heads, "batch": static.batch}
    return _run(query_gradient, static, arrays, out, shared, grid)


def _of_keys(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> dict[str, jax.Array]:
    arrays = _arrays(tokens, inputs, static, start, used)
    tiles = pl.cdiv(static.keys, static.tile)
    first = jnp.broadcast_to(jnp.arange(tiles) * static.tile, (static.batch, tiles))
    blocks = pl.cdiv(static.queries, SIDE)
    found = query_sections(first, first + static.tile - 1, start[:, None], used[:, None], static.window, SIDE, blocks)
    if inputs.query_segments is not None:
        ends = ends_of_blocks(inputs.key_segments, static.tile), ends_of_blocks(inputs.query_segments, SIDE)
        found = within_documents(found, *ends, whole_at_begin=True)
    arrays["sections"] = _stacked(found, first.shape)
    vectors = ("logsumexp", "inner", "query positions", "query segments", "distance bias")
    shared = _shared(arrays, static, ("key", "value"), ("query", "d_out"), vectors)
    grid = {"tile": tiles, "head": static.kv_heads, "batch": static.batch}
    rows = tiles * static.tile
    shape = static.batch * static.kv_heads, rows, static.head_dim
    found = {}
    # With more than 128 channels, both sums do not fit into registers.
    for wanted in (("key", "value"),) if static.head_dim <= 128 else (("key",), ("value",)):
        out = {f"d_{name}": shape for name in wanted}
        if inputs.key_bias is not None and "key" in wanted:
            out["d_key_bias"] = static.batch * static.heads, rows
        found |= _run(key_gradient, replace(static, wanted=wanted), arrays, out, shared, grid)
    return found


def _stacked(sections: Sections, shape: tuple[int, ...]) -> jax.Array:
    return jnp.stack([jnp.broadcast_to(x, shape) for x in sections], -1).astype(jnp.int32)


def _of_distances(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> Float[Array, "H entries"]:
    """The gradients of all entries of a table [H, D] but the last."""
    found = diagonals(static.entries - 1, static.queries, static.keys, SIDE, inputs.window, inputs.start)
    H, W = static.heads, static.warpgroups
    if found.count == 0:
        return jnp.zeros((H, found.entries), jnp.float32)
    if inputs.start is not None:
        # Copies begin at multiples of 8 tokens, and blocks of keys at multiples of SIDE: queries move on.
        behind = start % SIDE
        start = start - behind

        def moved(x: jax.Array, fill: float = 0) -> jax.Array:
            """An array [B or 1, T] or [B, H, T, ...], moved on; `fill` is before and behind its tokens."""
            axis = min(x.ndim - 1, 2)
            x = jnp.pad(x, [(SIDE, SIDE) if i == axis else (0, 0) for i in range(x.ndim)], constant_values=fill)
            x = jnp.broadcast_to(x, (static.batch, *x.shape[1:]))
            length = static.queries + SIDE
            return jax.vmap(lambda one, at: jax.lax.dynamic_slice_in_dim(one, SIDE - at, length, axis - 1))(x, behind)

        query, key, value, d_out, logsumexp, inner = tokens
        tokens = moved(query), key, value, moved(d_out), moved(logsumexp, UNSEEN), moved(inner)
        inputs = replace(
            inputs,
            query_positions=jax.tree.map(moved, inputs.query_positions),
            query_segments=jax.tree.map(moved, inputs.query_segments),
        )
        static = replace(static, queries=static.queries + SIDE)
    pairs = pl.cdiv(found.count, W)
    row_blocks, key_blocks = pl.cdiv(static.queries, SIDE), (used + SIDE - 1) // SIDE
    splits = max(1, min(PROGRAMS // (static.batch * H * pairs), row_blocks))
    # More than 128 channels leave room for one block of queries and of keys.
    static = replace(static, splits=splits, stages=1 if static.head_dim > 128 else static.stages)
    arrays = _arrays(tokens, inputs, static, start, used)
    # The blocks of queries whose keys of either diagonal are used, in equal parts.
    ahead = found.first + jnp.arange(pairs) * W - (start // SIDE)[:, None]
    begin = jnp.maximum(ahead, 0)
    end = jnp.maximum(jnp.minimum(key_blocks[:, None] + W - 1 + ahead, row_blocks), begin)
    each = ((end - begin + splits - 1) // splits)[..., None]
    begin = jnp.minimum(begin[..., None] + jnp.arange(splits) * each, end[..., None])
    arrays["steps"] = jnp.stack([begin, jnp.minimum(begin + each, end[..., None])], -1).astype(jnp.int32)
    arrays["first"] = found.first
    out = {"d_diagonal": (static.batch * splits * H, pairs * W, 2 * SIDE)}
    shared = _shared_of_diagonals(arrays, static)
    grid = {"diagonals": pairs, "split": splits, "head": H, "batch": static.batch}
    sums = _run(distance_gradient, static, arrays, out, shared, grid)["d_diagonal"]
    sums = sums.reshape(static.batch * splits, H, pairs * W, 2 * SIDE).sum(0)
    return found.table(sums[:, : found.count, 2 * SIDE - 2 :: -1])


def _shared_of_diagonals(arrays: dict[str, jax.Array], static: HopperGradientStatic) -> dict[str, Any]:
    dtype, tile, block = arrays["query"].dtype, channel_tile(static.head_dim), (SIDE, static.head_dim)
    stages, slots = static.stages, static.stages + static.warpgroups - 1
    in_use = [matrix((count, *block), dtype, tile) for count in (stages, stages, slots, slots)]
    # Once all blocks are added, the sums of each warpgroup take their place, with zeros on both sides.
    sums = plgpu.SMEM((static.warpgroups, SIDE, 3 * SIDE), jnp.float32)
    of_queries = [x for x in ("logsumexp", "inner", "query positions", "query segments") if x in arrays]
    of_keys = [x for x in ("key positions", "key segments", "key bias") if x in arrays]
    shared = {"in use or sums": plgpu.RefUnion(in_use, sums)}
    shared |= {name: plgpu.SMEM((stages, SIDE), arrays[name].dtype) for name in of_queries}
    shared |= {name: plgpu.SMEM((slots, SIDE), arrays[name].dtype) for name in of_keys}
    shared["table"] = plgpu.SMEM((static.warpgroups, REACH), jnp.float32)
    shared["table ready"] = plgpu.Barrier(num_arrivals=static.warpgroups)
    shared["keys ready"] = plgpu.Barrier(num_arrivals=2 + len(of_keys))
    shared["ready"] = plgpu.Barrier(num_arrivals=4 + len(of_queries) + len(of_keys), num_barriers=stages)
    shared["free"] = plgpu.Barrier(num_arrivals=static.warpgroups, num_barriers=stages)
    shared["done"] = plgpu.Barrier(num_arrivals=static.warpgroups)
    return shared
