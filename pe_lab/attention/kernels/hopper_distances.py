"""Gradients of biases by distance on Hopper GPUs (Pallas, compiled by Mosaic GPU).

A program has two neighbouring diagonals of square blocks of logits of one head. All blocks of a diagonal have the same
distances, so it adds up the blocks in registers, and sums the result along its own diagonals in shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pe_lab.attention.bias import diagonals
from pe_lab.attention.kernels.hopper_parts import ACROSS, DOWN, LOGITS, PROGRAMS, channel_tile, looked_up, matrix
from pe_lab.attention.kernels.hopper_program import (
    REACH,
    SIDE,
    UNSEEN,
    GradientProgram,
    HopperGradientStatic,
    Tokens,
    gradient_arrays,
    run_program,
    to_columns,
    to_rows,
)
from pe_lab.attention.key_block import AttentionInputs


def store_rows(memory: Any, values: jax.Array) -> None:
    """Stores an array in rows of shared memory, which are not the tiles of an operand."""
    if hasattr(plgpu, "store"):
        plgpu.store(memory, values, optimized=False)
    else:  # JAX 0.11
        memory[...] = values


def distance_gradient(static: HopperGradientStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """The sums over the blocks of two neighbouring diagonals of one head, one for each warpgroup.

    Queries are aligned: the first one's index is a multiple of SIDE. At step n the first warpgroup has queries i and
    keys i - d of its diagonal d, the second keys i - d - 1, which the first one had a step before.
    """
    program = GradientProgram(static, names, refs, shared)
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
            return to_columns(plgpu.load(shared[name].at[slot], layout=DOWN, optimized=False))

        def across(name: str) -> jax.Array:
            return to_rows(plgpu.load(shared[name].at[key_slot], layout=ACROSS, optimized=False))

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
    # Query r moves on by r places, so that a column has one distance: SIDE - 1 less than its number is column - row.
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


def gradient_of_distances(
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
    # With more than 128 channels, one block of queries and of keys fits.
    static = replace(static, splits=splits, stages=1 if static.head_dim > 128 else static.stages)
    arrays = gradient_arrays(tokens, inputs, static, start, used)
    # The blocks of queries whose keys of either diagonal are used, in equal parts.
    ahead = found.first + jnp.arange(pairs) * W - (start // SIDE)[:, None]
    begin = jnp.maximum(ahead, 0)
    end = jnp.maximum(jnp.minimum(key_blocks[:, None] + W - 1 + ahead, row_blocks), begin)
    each = ((end - begin + splits - 1) // splits)[..., None]
    begin = jnp.minimum(begin[..., None] + jnp.arange(splits) * each, end[..., None])
    arrays["steps"] = jnp.stack([begin, jnp.minimum(begin + each, end[..., None])], -1).astype(jnp.int32)
    arrays["first"] = found.first
    out = {"d_diagonal": (static.batch * splits * H, pairs * W, 2 * SIDE)}
    shared = _shared(arrays, static)
    grid = {"diagonals": pairs, "split": splits, "head": H, "batch": static.batch}
    sums = run_program(distance_gradient, static, arrays, out, shared, grid)["d_diagonal"]
    sums = sums.reshape(static.batch * splits, H, pairs * W, 2 * SIDE).sum(0)
    return found.table(sums[:, : found.count, 2 * SIDE - 2 :: -1])


def _shared(arrays: dict[str, jax.Array], static: HopperGradientStatic) -> dict[str, Any]:
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
