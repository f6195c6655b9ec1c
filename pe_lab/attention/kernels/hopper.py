"""pe_lab's attention kernel for Hopper GPUs (Pallas, compiled by Mosaic GPU): flash attention with encodings.

One kernel serves whole sequences, chunks of a prompt against a KV cache, single tokens (decoding) and the key blocks
of a ring, as the Triton kernel in `gpu.py` does, which it is to replace. A program is three warpgroups. Two have a
block of queries each and compute: while one is in the softmax of a block of keys, the other's products are in the
tensor cores, which they use alternately (Shah et al. 2024, FlashAttention-3). The third one copies: blocks of keys and
values, with what belongs to them (segments, positions, biases, the part of a table by distance that the block needs),
arrive in slots of shared memory, each with a barrier for "it is there" and one for "the slot is free". Where keys are
rotated inside, the third warpgroup rotates the block that has arrived while the next one is on its way.

Without a dynamic start, end or document, a program computes which blocks it sees; otherwise XLA has done so before
(`sections.py`), and blocks of other documents are skipped. Blocks in which every query sees every key have no mask. If
there are few queries, those of the heads that share a key head are stacked in one block, and several programs share
the visible keys.

Computing warpgroups ask for 232 registers a thread. JAX's CUDA wheels compile Mosaic kernels by libnvJitLink, with
which ptxas ignores `setmaxnreg`: then they have 168, and what does not fit is spilled (table: docs/attention.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pe_lab.attention.kernels.hopper_parts import (
    ACROSS,
    DOWN,
    LINE,
    LOG2_E,
    LOGITS,
    PROGRAMS,
    ROWS,
    add_product,
    channel_tile,
    interpreter,
    looked_up,
    matrix,
)
from pe_lab.attention.key_block import (
    FLOOR,
    MASKED,
    AttentionInputs,
    PartialAttention,
    block_rotations,
    check_block,
    merge,
    padded,
    rotated_keys,
)
from pe_lab.attention.sections import Sections, ends_of_blocks, key_sections, within_documents


@dataclass(frozen=True)
class HopperTiles:
    """Block sizes.

    Attributes:
      heads: query heads of a program, all of one key head.
      warpgroups: that compute; one more copies.
      rows: queries of a warpgroup, over its heads; a multiple of 64.
      keys: in a block; a multiple of 64.
      stages: blocks of keys and values that are being copied or in use.
    """

    heads: int
    warpgroups: int
    rows: int
    keys: int
    stages: int


@dataclass(frozen=True)
class HopperStatic:
    """What a program knows when it is compiled.

    Attributes:
      queries, keys: T and S.
      length: queries of the heads of a program.
      wide: the output is float32.
      interpret: on a CPU.
    """

    tiles: HopperTiles
    splits: int
    queries: int
    keys: int
    length: int
    head_dim: int
    kv_heads: int
    batch: int
    window: int | None
    soft_cap: float | None
    wide: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Of a program."""
        return self.tiles.warpgroups * self.tiles.rows

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.length, self.rows)

    @property
    def reach(self) -> int:
        """Distances between the queries of a program and a block of keys, at most; whole lines of shared memory."""
        return pl.cdiv((self.rows if self.tiles.heads == 1 else self.queries) + self.tiles.keys, LINE) * LINE


# What is copied with each block of keys.
OF_KEYS = ("key segments", "key positions", "key bias", "distance bias", "block cos", "block sin")


def forward(static: HopperStatic, names: tuple[str, ...], *refs: Any, **shared: Any) -> None:
    """Blocks of queries of one head, or of a group's heads, one for each warpgroup, against the keys that they see.

    Args:
      names: of the input arrays, which come first in `refs`; the output and the logsumexp follow.
      shared: buffers and barriers of `shared_memory`.
    """
    cut, window, K = static.tiles, static.window, static.head_dim
    ref = dict(zip(names, refs, strict=False))
    out_ref, logsumexp_ref = refs[len(names) :]
    dtype = ref["key"].dtype
    tile = static.row_blocks - 1 - jax.lax.axis_index("tile")
    split, group, b = (jax.lax.axis_index(name) for name in ("split", "group", "batch"))
    me = jax.lax.axis_index("warpgroup")
    groups = ref["query"].shape[0] // static.batch
    here = b * groups + group
    layer = ref["layer"][0] if "layer" in ref else 0
    pair = (layer * static.batch + b) * static.kv_heads + jax.lax.div(group, groups // static.kv_heads)
    vectors = [name for name in OF_KEYS if name in ref]
    rotates = "place cos" in ref
    start = ref["start"][b] if "start" in ref else 0
    used = jnp.minimum(ref["used"][b], static.keys) if "used" in ref else static.keys
    # Whether queries may be later than keys that are not used.
    ends = "start" in ref or "used" in ref or static.queries > static.keys
    first_query = start + tile * static.rows if cut.heads == 1 else start
    if "sections" in ref:
        begin, whole_from, whole_to, end = (ref["sections"][b, tile, split, i] for i in range(4))
    else:
        last_query = jnp.minimum(first_query + static.rows, static.queries) - 1
        begin, whole_from, whole_to, end = key_sections(first_query, last_query, static.keys, window, cut.keys)
    begin, end = jnp.int32(begin), jnp.int32(end)

    def one_or_each(x: Any) -> Any:
        return x.at[0 if x.shape[0] == 1 else b]

    def compute() -> None:
        if cut.warpgroups == 2:
            plgpu.set_max_registers(208 if rotates else 232, action="increase")
        shape = cut.rows, cut.keys
        first_row = tile * static.rows + me * cut.rows
        rows = pl.ds(first_row, cut.rows)
        q = shared["query"].at[me]
        plgpu.copy_gmem_to_smem(ref["query"].at[here, rows], q, shared["query ready"].at[me])

        def to_keys(x: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(x, shape, [0])

        def to_rows(x: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(x, shape, [1])

        def of_rows(x: Any) -> jax.Array:
            return plgpu.load(x.at[rows], layout=DOWN, optimized=False)

        place_of_row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LOGITS)
        place_of_key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LOGITS)
        # The place of a query after the first of the program; of each head, where several are stacked.
        place = to_keys(of_rows(ref["query place"].at[0])) if cut.heads > 1 else me * cut.rows + place_of_row
        head = to_keys(of_rows(ref["query head"].at[0])) if cut.heads > 1 else 0
        of_queries = {
            name: of_rows(one_or_each(ref[name])) for name in ("query segments", "query positions") if name in ref
        }
        slope = None
        if "slope" in ref:
            slope = ref["slope"][group, 0] if cut.heads == 1 else to_keys(of_rows(ref["slope"].at[group]))

        def alternate() -> None:
            if cut.warpgroups == 2:
                plgpu.barrier_arrive(shared["alternate"])
                plgpu.barrier_wait(shared["alternate"])

        def of_slot(name: str, slot: jax.Array) -> jax.Array:
            return plgpu.load(shared[name].at[slot], layout=ACROSS, optimized=False)

        def biased(s: jax.Array, slot: jax.Array, j: jax.Array) -> jax.Array:
            if static.soft_cap is not None:
                s = static.soft_cap * jnp.tanh(s * (1 / static.soft_cap))
            if slope is not None:
                if "query positions" in of_queries:
                    far = to_keys(of_queries["query positions"]) - to_rows(of_slot("key positions", slot))
                else:
                    far = (first_query - j * cut.keys + place) - place_of_key
                s -= slope * far.astype(jnp.float32)
            if "distance bias" in ref:
                entry = head * static.reach + (cut.keys - 1) + place - place_of_key
                s += looked_up(shared["distance bias"], slot, entry, static.interpret)
            if "key bias" in ref:
                if cut.heads == 1:
                    s += to_rows(plgpu.load(shared["key bias"].at[slot, 0], layout=ACROSS, optimized=False))
                else:
                    s += looked_up(shared["key bias"], slot, head * cut.keys + place_of_key, static.interpret)
            return s

        def masked(s: jax.Array, slot: jax.Array, j: jax.Array) -> jax.Array:
            distance = (first_query - j * cut.keys + place) - place_of_key
            seen = distance >= 0
            if ends:
                seen &= place_of_key < used - j * cut.keys
            if window is not None:
                seen &= distance < window
            if "query segments" in of_queries:
                seen &= to_keys(of_queries["query segments"]) == to_rows(of_slot("key segments", slot))
            return jnp.where(seen, s, MASKED)

        def add_block(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, highest, total = sums
            slot = jax.lax.rem(j - begin, cut.stages)
            plgpu.barrier_wait(shared["key ready"].at[slot])

            def products(logits: Any) -> jax.Array:
                plgpu.wgmma(logits, q, shared["key"].at[slot].T)
                alternate()
                return logits[...]

            s = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))
            s = biased(s, slot, j)
            s = jax.lax.cond((j < whole_from) | (j >= whole_to), lambda s: masked(s, slot, j), lambda s: s, s)
            if vectors:
                plgpu.commit_smem()  # a copy may overwrite what threads have read
            plgpu.barrier_arrive(shared["key free"].at[slot])
            top = jnp.maximum(highest, s.max(axis=1) * LOG2_E)
            weights, shrink = jnp.exp2(s * LOG2_E - to_keys(top)), jnp.exp2(highest - top)
            out *= jax.lax.broadcast_in_dim(shrink, out.shape, [0])
            total = total * shrink + weights.sum(axis=1)
            weights = weights.astype(dtype)
            plgpu.barrier_wait(shared["value ready"].at[slot])
            alternate()
            out = add_product(out, weights, shared["value"].at[slot], static.interpret)
            plgpu.barrier_arrive(shared["value free"].at[slot])
            return out, top, total

        plgpu.barrier_wait(shared["query ready"].at[me])
        out = plgpu.layout_cast(jnp.zeros((cut.rows, K), jnp.float32), LOGITS)
        highest = plgpu.layout_cast(jnp.full((cut.rows,), FLOOR, jnp.float32), DOWN)
        total = plgpu.layout_cast(jnp.zeros((cut.rows,), jnp.float32), DOWN)
        if cut.warpgroups == 2:
            pl.when(me == 1)(alternate)
        out, highest, total = jax.lax.fori_loop(begin, end, add_block, (out, highest, total))
        if cut.warpgroups == 2:
            pl.when(me == 0)(alternate)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        at = split * static.batch * groups + here
        logsumexp_ref[at, rows] = jnp.where(some, highest * (1 / LOG2_E) + jnp.log(total), MASKED)
        out *= jax.lax.broadcast_in_dim(1 / total, out.shape, [0])
        if static.wide:
            out_ref[at, rows] = out
        else:
            q[...] = out.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q, out_ref.at[at, rows])
            plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        if cut.warpgroups == 2:
            plgpu.set_max_registers(88 if rotates else 40, action="decrease")
        heads = groups // static.kv_heads
        rotation = None
        if rotates:
            rotations = ref["block cos"].shape[0]
            rotation = 0 if rotations == 1 else jax.lax.div(group, heads) if rotations == static.kv_heads else group

        def slot_of(j: jax.Array) -> jax.Array:
            return jax.lax.rem(j - begin, cut.stages)

        def copier(j: jax.Array, kind: str) -> tuple[Any, Callable[[Any, str, str], None]]:
            """The keys of a block, and a function that copies them into their slot, once it is free."""
            slot = slot_of(j)
            pl.when(j - begin >= cut.stages)(lambda: plgpu.barrier_wait(shared[f"{kind} free"].at[slot]))

            def load(source: Any, name: str, ready: str) -> None:
                plgpu.copy_gmem_to_smem(source, shared[name].at[slot], shared[ready].at[slot])

            return pl.ds(j * cut.keys, cut.keys), load

        def start_keys(j: jax.Array) -> None:
            keys, load = copier(j, "key")
            load(ref["key"].at[pair, keys], "key", "key copied" if rotates else "key ready")
            for name in vectors:
                if name in ("block cos", "block sin"):
                    load(ref[name].at[rotation, j], name, "key copied")
                elif name == "key bias":
                    load(one_or_each(ref[name]).at[group, :, keys], name, "key ready")
                elif name == "distance bias":
                    table = ref[name].at[group]
                    nearest = jnp.minimum(first_query - (j + 1) * cut.keys + 1, table.shape[1] - 2 * static.reach)
                    load(table.at[:, pl.ds(nearest + static.reach, static.reach)], name, "key ready")
                else:
                    load(one_or_each(ref[name]).at[keys], name, "key ready")

        def start_values(j: jax.Array) -> None:
            keys, load = copier(j, "value")
            slot = slot_of(j)
            values = ref["value"].at[pair, keys]
            if "used" not in ref:
                load(values, "value", "value ready")
                return
            all_used = (j + 1) * cut.keys <= used
            pl.when(all_used)(lambda: load(values, "value", "value ready"))

            @pl.when(jnp.logical_not(all_used))
            def _() -> None:
                load(values, "value", "value copied")
                plgpu.barrier_wait(shared["value copied"].at[slot])
                erase_values(slot, used - j * cut.keys)
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared["value ready"].at[slot])

        def erase_values(slot: jax.Array, first: jax.Array) -> None:
            """Zeros for keys from `first` on, which have weight 0, and may hold NaN."""
            width = channel_tile(K)

            @pl.loop(0, cut.keys // ROWS)
            def _(part: jax.Array) -> None:
                for c in range(0, K, width):
                    v = shared["value"].at[slot, pl.ds(part * ROWS, ROWS), pl.ds(c, width)]
                    key = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=LOGITS)
                    v[...] = jnp.where(key < first - part * ROWS, plgpu.load(v, layout=LOGITS), jnp.zeros((), dtype))

        def rotate_keys(slot: jax.Array) -> None:
            half = K // 2
            width = channel_tile(half)

            @pl.loop(0, cut.keys // ROWS)
            def _(part: jax.Array) -> None:
                k = shared["key"].at[slot, pl.ds(part * ROWS, ROWS)]
                for c in range(0, half, width):
                    left, right = pl.ds(c, width), pl.ds(half + c, width)

                    def table(kind: str, left: Any = left) -> tuple[jax.Array, jax.Array]:
                        name = f"place {kind}"
                        places = shared[name] if name in shared else ref[name].at[rotation]
                        of_place = places.at[pl.ds(part * ROWS, ROWS), left]
                        of_block = plgpu.load(shared[f"block {kind}"].at[slot, left], layout=ACROSS, optimized=False)
                        return (
                            jax.lax.broadcast_in_dim(of_block, (ROWS, width), [1]),
                            plgpu.load(of_place, layout=LOGITS, optimized=False),
                        )

                    (block_cos, place_cos), (block_sin, place_sin) = table("cos"), table("sin")
                    cos = block_cos * place_cos - block_sin * place_sin
                    sin = block_sin * place_cos + block_cos * place_sin
                    a, z = (plgpu.load(k.at[:, at], layout=LOGITS).astype(jnp.float32) for at in (left, right))
                    k[:, left] = (a * cos - z * sin).astype(dtype)
                    k[:, right] = (z * cos + a * sin).astype(dtype)

        if not rotates:

            @pl.loop(begin, end)
            def _(j: jax.Array) -> None:
                start_keys(j)
                start_values(j)

            return
        if "places copied" in shared:
            for name in ("place cos", "place sin"):
                plgpu.copy_gmem_to_smem(ref[name].at[rotation], shared[name], shared["places copied"])
        pl.when(begin < end)(lambda: start_keys(begin))
        if "places copied" in shared:
            plgpu.barrier_wait(shared["places copied"])

        @pl.loop(begin, end)
        def _(j: jax.Array) -> None:
            # The next keys are copied while these are rotated. Values wait: their slot is not free before both
            # warpgroups have had these keys.
            pl.when(j + 1 < end)(lambda: start_keys(j + 1))
            slot = slot_of(j)
            plgpu.barrier_wait(shared["key copied"].at[slot])
            rotate_keys(slot)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared["key ready"].at[slot])
            start_values(j)

    pl.when(me < cut.warpgroups)(compute)
    pl.when(me == cut.warpgroups)(copy)


FEW = 64  # queries, over heads that share a key head, that one program stacks in a block
MOST_SPLITS = 128  # the merge of splits is unrolled


def tiles(H: int, G: int, T: int, S: int, K: int, *, alone: bool = False, rotates: bool = False) -> HopperTiles:
    """The block sizes for T queries of H heads against S keys of G heads.

    Args:
      alone: rotated keys serve one query head.
      rotates: keys are rotated inside.

    Shared memory of 227 KiB holds the queries of the program, and two stages of keys and values of 16 bits: in KiB,
    80 with 64 channels, 160 with 128, and with blocks of 64 keys 192 with 256 channels.
    """
    shared = 1 if alone else H // G
    heads = max(n for n in range(1, shared + 1) if shared % n == 0 and (n * T <= FEW or n == 1))
    keys = 64 if S <= 64 or rotates or K > 128 else 128
    return HopperTiles(heads, 1 if heads * T <= FEW else 2, ROWS, keys, 2)


def hopper_key_block(
    query: Float[Array, "B H T K"],
    key: Float[Array, "*layers B G S K"],
    value: Float[Array, "*layers B G S K"],
    inputs: AttentionInputs,
    *,
    layer: Int[Array, ""] | int | None = None,
    splits: int | None = None,
    wide: bool = False,
    cut: HopperTiles | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """Attention to a block of keys (Shah et al. 2024); arguments as in `kernels.tpu.tpu_key_block`, and these.

    Args:
      splits: programs that share the keys of a block of queries; their results are merged (flash-decoding). Each takes
        an equal part of the visible blocks. None: as many as keep an H100 busy.
      cut: block sizes; None: those of `tiles`.
      interpret: on a CPU, where races between warpgroups and copies are errors (JAX 0.11 or later).

    Raises:
      UnsupportedError: functions of logits.
    """
    B, H, T, K = query.shape
    if layer is None:
        layer, key, value = 0, key[None], value[None]
    if inputs.rotation is not None and K % 32:
        # Half of the channels are not whole tiles of shared memory.
        of_layer = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (key, value))
        key, value = (x[None] for x in rotated_keys(*of_layer, inputs))
        layer, inputs = 0, replace(inputs, rotation=None)
    L, _, G, S, _ = key.shape
    rotations = check_block(H, key, value, inputs, soft_cap=True)
    cut = cut or tiles(H, G, T, S, K, alone=rotations not in (0, 1, G), rotates=rotations > 0)
    groups, length = H // cut.heads, cut.heads * T
    key_blocks, rows = pl.cdiv(S, cut.keys), cut.warpgroups * cut.rows
    row_blocks = pl.cdiv(length, rows)
    visited = key_blocks if inputs.window is None else min(key_blocks, (inputs.window + rows - 2) // cut.keys + 2)
    if splits is None:
        # A split is worth its partial output from four blocks of keys on.
        splits = max(1, min(PROGRAMS // (B * groups * row_blocks), visited // 4, MOST_SPLITS))
    splits = min(splits, visited)
    wide_out = wide or splits > 1
    static = HopperStatic(cut, splits, T, S, length, K, G, B, inputs.window, inputs.soft_cap, wide_out, interpret)
    arrays = _arrays(query, key, value, layer, inputs, static)
    programs, dtype = splits * B * groups, query.dtype
    out_rows = row_blocks * rows if wide_out else arrays["query"].shape[1]
    out, logsumexp = plgpu.kernel(
        functools.partial(forward, static, tuple(arrays)),
        out_type=[
            jax.ShapeDtypeStruct((programs, out_rows, K), jnp.float32 if wide_out else dtype),
            jax.ShapeDtypeStruct((programs, row_blocks * rows), jnp.float32),
        ],
        scratch_types=shared_memory(static, arrays),
        grid=(row_blocks, splits, groups, B),
        grid_names=("tile", "split", "group", "batch"),
        num_threads=cut.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=f"pe_lab_attention_{'decode' if length <= FEW else 'flash'}",
        interpret=interpreter() if interpret else None,
    )(*arrays.values())
    out = out[:, :length].reshape(splits, B, H, T, K)
    logsumexp = logsumexp[:, :length].reshape(splits, B, H, T)
    parts = [PartialAttention(out[p], logsumexp[p]) for p in range(splits)]
    if splits == 1:
        return parts[0]
    merged = merge(parts)
    return merged if wide else merged._replace(out=merged.out.astype(dtype))


def shared_memory(static: HopperStatic, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The buffers and barriers of a program, by name."""
    cut, K, rotates = static.tiles, static.head_dim, "place cos" in arrays
    dtype, tile = arrays["query"].dtype, channel_tile(K // 2 if rotates else K)
    shared = {
        "query": matrix((cut.warpgroups, cut.rows, K), dtype, tile),
        "key": matrix((cut.stages, cut.keys, K), dtype, tile),
        "value": matrix((cut.stages, cut.keys, K), dtype, tile),
        "query ready": plgpu.Barrier(num_barriers=cut.warpgroups),
        "value ready": plgpu.Barrier(num_barriers=cut.stages),
        "key free": plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
        "value free": plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
    }
    of_keys = {
        "key segments": ((cut.keys,), jnp.int32),
        "key positions": ((cut.keys,), jnp.int32),
        "key bias": ((cut.heads, cut.keys), jnp.float32),
        "distance bias": ((cut.heads, static.reach), jnp.float32),
        **dict.fromkeys(("block cos", "block sin"), ((pl.cdiv(K // 2, LINE) * LINE,), jnp.float32)),
    }
    of_keys = {name: plgpu.SMEM((cut.stages, *shape), of) for name, (shape, of) in of_keys.items() if name in arrays}
    shared |= of_keys
    of_rotation = 2 if rotates else 0
    shared["key ready"] = plgpu.Barrier(num_arrivals=1 + len(of_keys) - of_rotation, num_barriers=cut.stages)
    if rotates:
        shared["key copied"] = plgpu.Barrier(num_arrivals=1 + of_rotation, num_barriers=cut.stages)
        if K <= 128:  # else they do not fit
            shared |= {f"place {x}": plgpu.SMEM((cut.keys, K // 2), jnp.float32) for x in ("cos", "sin")}
            shared["places copied"] = plgpu.Barrier(num_arrivals=2)
    if "used" in arrays:
        shared["value copied"] = plgpu.Barrier(num_barriers=cut.stages)
    if cut.warpgroups > 1:
        shared["alternate"] = plgpu.Barrier(num_arrivals=cut.warpgroups)
    return shared


def _arrays(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: jax.Array | int,
    inputs: AttentionInputs,
    static: HopperStatic,
) -> dict[str, jax.Array]:
    """The kernel's arrays by name."""
    B, H, T, K = query.shape
    L, _, G, S, _ = key.shape
    cut, length = static.tiles, static.length
    heads, groups = cut.heads, H // cut.heads
    to_blocks = functools.partial(padded, axis=-1, multiple=static.rows)
    # Copies take whole tiles of 8 tokens.
    arrays = {
        "query": padded(query.reshape(B * groups, length, K), 1, 8),
        "key": padded(key.reshape(L * B * G, S, K), 1, 8),
        "value": padded(value.reshape(L * B * G, S, K), 1, 8),
    }
    if L > 1:
        arrays["layer"] = jnp.asarray(layer, jnp.int32).reshape(1)
    start, used = inputs.slots(B, S)
    if inputs.start is not None:
        arrays["start"] = start
    if inputs.used is not None:
        arrays["used"] = used
    if inputs.start is not None or inputs.used is not None or static.splits > 1 or inputs.query_segments is not None:
        arrays["sections"] = _sections(start, used, inputs, static)
    if heads > 1:
        arrays["query place"] = to_blocks(jnp.tile(jnp.arange(T, dtype=jnp.int32), heads)[None])
        arrays["query head"] = to_blocks(jnp.repeat(jnp.arange(heads, dtype=jnp.int32), T)[None])
    if inputs.slope is not None:
        slope = inputs.slope.astype(jnp.float32).reshape(groups, heads)
        arrays["slope"] = slope if heads == 1 else to_blocks(jnp.repeat(slope, T, axis=1))
    if inputs.distance_bias is not None:
        table = inputs.distance_bias.astype(jnp.float32)
        # A copy may begin before the first distance and end behind the last; rows are multiples of 16 bytes.
        table = jnp.pad(table, ((0, 0), (static.reach, static.reach + -table.shape[1] % 4)), mode="edge")
        arrays["distance bias"] = table.reshape(groups, heads, -1)
    if inputs.key_bias is not None:
        bias = padded(inputs.key_bias.astype(jnp.float32), -1, 4)
        arrays["key bias"] = bias.reshape(bias.shape[0], groups, heads, -1)
    for what, (of_queries, of_keys) in inputs.compared().items():
        arrays[f"query {what}"] = to_blocks(jnp.tile(of_queries, (1, heads)))
        arrays[f"key {what}"] = padded(of_keys, -1, 4)
    if inputs.rotation is not None:
        tables = block_rotations(inputs.rotation, pl.cdiv(S, cut.keys), cut.keys)
        cos, sin, *places = tables
        arrays |= {"block cos": padded(cos, -1, LINE), "block sin": padded(sin, -1, LINE)}
        arrays |= dict(zip(("place cos", "place sin"), places, strict=True))
    return arrays


def _sections(start: jax.Array, used: jax.Array, inputs: AttentionInputs, static: HopperStatic) -> jax.Array:
    """Blocks of keys of each program, [B, row blocks, splits, 4]: begin, whole from, whole to, end."""
    cut, T = static.tiles, static.queries
    tile = jnp.arange(static.row_blocks) * static.rows if cut.heads == 1 else jnp.zeros(static.row_blocks, jnp.int32)
    first = start[:, None] + tile
    last = start[:, None] + (jnp.minimum(tile + static.rows, T) if cut.heads == 1 else T) - 1
    found = key_sections(first, last, used[:, None], static.window, cut.keys)
    if inputs.query_segments is not None and inputs.key_segments is not None:
        of_tiles = ends_of_blocks(inputs.query_segments, static.rows if cut.heads == 1 else T)
        of_tiles = tuple(jnp.broadcast_to(x, first.shape) for x in of_tiles)
        found = within_documents(found, of_tiles, ends_of_blocks(inputs.key_segments, cut.keys))
    found = Sections(*(jnp.broadcast_to(x, first.shape)[..., None] for x in found))
    each = (found.end - found.begin + static.splits - 1) // static.splits
    begin = jnp.minimum(found.begin + jnp.arange(static.splits) * each, found.end)
    found = found._replace(begin=begin, end=jnp.minimum(begin + each, found.end))
    return found.stacked()
