"""Gradients of pe_lab's attention kernel for Hopper GPUs (Pallas, compiled by Mosaic GPU).

Three kernels recompute the weights p = exp(logit - logsumexp) of blocks from the logsumexp of all keys, which the
forward pass returned, and the gradients of their logits, p (d_out . value - inner):

- A program has a block of queries of one head and loops over the keys that they see: the gradients of queries.
- A program has a block of keys of one key head and loops over the query heads of its group and the queries that see
  the keys: the gradients of keys and values, and of biases of keys.
- The third one is in `hopper_distances.py`: the gradients of biases by distance. Distances beyond the table share an
  entry, which the first kernel sums.

A program is two warpgroups, of which the first one also copies, so that sums may take 255 registers a thread. Nothing
is added atomically, so that results are the same in every run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pe_lab.attention.kernels.hopper_distances import gradient_of_distances
from pe_lab.attention.kernels.hopper_parts import ACROSS, DOWN, LOG2_E, channel_tile, looked_up, matrix
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
from pe_lab.attention.key_block import FLOOR, AttentionInputs, KeyBlockGradients, check_block
from pe_lab.attention.sections import ends_of_blocks, key_sections, query_sections, within_documents
from pe_lab.errors import UnsupportedError


def query_gradient(static: HopperGradientStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """Blocks of queries of one head against their visible keys: the gradients of the queries.

    For every query, also its part of the slope's gradient, and of that of the last entry of biases by distance.
    """
    program = GradientProgram(static, names, refs, shared)
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
                return to_rows(plgpu.load(shared[name].at[slot], layout=ACROSS, optimized=False))

            apart = first_query - j * SIDE + me * SIDE  # of the first query and the first key
            place = program.iota(0) - program.iota(1)
            biases, far = [], None
            if slope is not None:
                far = apart + place
                if "query positions" in of_queries:
                    far = to_columns(of_queries["query positions"]) - across("key positions")
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
                    mask &= to_columns(of_queries["query segments"]) == across("key segments")
                return mask

            whole = (j >= whole_from) & (j < whole_to)
            block = program.logits(
                product, lambda _: d_weights, biases, whole, seen, to_columns(logsumexp), to_columns(inner)
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
    program = GradientProgram(static, names, refs, shared)
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
    moving = ("logsumexp", "inner", "query positions", "query segments", "distance bias")
    vectors = [name for name in moving if name in ref]
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
                return to_rows(plgpu.load(shared[name].at[slot], layout=ACROSS, optimized=False))

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
                    far = across("query positions") - to_columns(of_keys["key positions"])
                biases.append(-ref["slope"][head] * far.astype(jnp.float32))
            if "distance bias" in ref:
                entry = static.tile - 1 - me * SIDE + place
                biases.append(looked_up(shared["distance bias"], slot, entry, static.interpret))
            if "key bias" in ref:
                biases.append(to_columns(of_rows(program.one_or_each("key bias").at[head])))

            def seen() -> jax.Array:
                mask = apart + place >= 0
                if "used" in ref:
                    mask &= program.iota(0) < program.used - first_key - me * SIDE
                if window is not None:
                    mask &= apart + place < window
                if "key segments" in of_keys:
                    mask &= across("query segments") == to_columns(of_keys["key segments"])
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
        warpgroups=1 if K > 128 else 2,
        stages=2,
        queries=T,
        keys=S,
        heads=H,
        kv_heads=G,
        head_dim=K,
        batch=B,
        window=inputs.window,
        soft_cap=inputs.soft_cap,
        entries=0 if table is None else table.shape[1],
        interpret=interpret,
    )
    tokens = query, key, value, d_out.astype(query.dtype), logsumexp, inner.astype(jnp.float32)
    of_queries = _of_queries(tokens, inputs, static, start, used)
    of_keys = _of_keys(tokens, inputs, static, start, used)
    d_slope = None if inputs.slope is None else of_queries["d_slope"].reshape(B, H, -1)[..., :T].sum((0, 2))
    d_table = None
    if table is not None:
        last = of_queries["d_beyond"].reshape(B, H, -1)[..., :T].sum((0, 2))[:, None]
        d_table = jnp.concatenate([gradient_of_distances(tokens, inputs, static, start, used), last], axis=1)
    d_key_bias = None
    if inputs.key_bias is not None:
        d_key_bias = of_keys["d_key_bias"][:, :S].reshape(B, H, S)
        if inputs.key_bias.shape[0] == 1:
            d_key_bias = d_key_bias.sum(0, keepdims=True)
    d_query = of_queries["d_query"][:, :T].reshape(query.shape)
    d_key, d_value = (of_keys[name][:, :S].reshape(key.shape) for name in ("d_key", "d_value"))
    return KeyBlockGradients(d_query, d_key, d_value, d_slope, d_table, d_key_bias)


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


def _of_queries(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> dict[str, jax.Array]:
    arrays = gradient_arrays(tokens, inputs, static, start, used)
    T, tiles = static.queries, pl.cdiv(static.queries, static.tile)
    if inputs.start is not None or inputs.used is not None or inputs.query_segments is not None:
        first = start[:, None] + jnp.arange(tiles) * static.tile
        last = jnp.minimum(first + static.tile, start[:, None] + T) - 1
        found = key_sections(first, last, used[:, None], static.window, SIDE)
        if inputs.query_segments is not None:
            ends = ends_of_blocks(inputs.query_segments, static.tile), ends_of_blocks(inputs.key_segments, SIDE)
            found = within_documents(found, *ends)
        arrays["sections"] = found.stacked()
    shape = static.batch * static.heads, tiles * static.tile
    out = {"d_query": (*shape, static.head_dim)}
    out |= {} if inputs.slope is None else {"d_slope": shape}
    out |= {} if inputs.distance_bias is None else {"d_beyond": shape}
    vectors = ("key positions", "key segments", "key bias", "distance bias")
    shared = _shared(arrays, static, ("query", "d_out"), ("key", "value"), vectors)
    grid = {"tile": tiles, "head": static.heads, "batch": static.batch}
    return run_program(query_gradient, static, arrays, out, shared, grid)


def _of_keys(
    tokens: Tokens, inputs: AttentionInputs, static: HopperGradientStatic, start: jax.Array, used: jax.Array
) -> dict[str, jax.Array]:
    arrays = gradient_arrays(tokens, inputs, static, start, used)
    tiles = pl.cdiv(static.keys, static.tile)
    first = jnp.broadcast_to(jnp.arange(tiles) * static.tile, (static.batch, tiles))
    blocks = pl.cdiv(static.queries, SIDE)
    found = query_sections(first, first + static.tile - 1, start[:, None], used[:, None], static.window, SIDE, blocks)
    if inputs.query_segments is not None:
        ends = ends_of_blocks(inputs.key_segments, static.tile), ends_of_blocks(inputs.query_segments, SIDE)
        found = within_documents(found, *ends, whole_at_begin=True)
    arrays["sections"] = found.stacked()
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
        found |= run_program(key_gradient, replace(static, wanted=wanted), arrays, out, shared, grid)
    return found
