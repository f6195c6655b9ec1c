"""What the gradient kernels for Hopper GPUs share: their arrays, blocks on their way through shared memory, logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pe_lab.attention.kernels.hopper_parts import LOG2_E, LOGITS, interpreter
from pe_lab.attention.key_block import MASKED, AttentionInputs, padded

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


class LogitBlock(NamedTuple):
    """A block, [SIDE, SIDE].

    Attributes:
      weights: p.
      d_logits: the gradient of the logits.
      d_product: of the product of queries and keys, from which a soft cap makes the logits.
    """

    weights: jax.Array
    d_logits: jax.Array
    d_product: jax.Array


class GradientProgram:
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
    ) -> LogitBlock:
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
        return LogitBlock(weights, d_logits, d_logits if flat is None else d_logits * (1 - flat * flat))

    def table(self, head: jax.Array, nearest: jax.Array) -> Any:
        """The part of a head's table that begins at a distance; behind its last entry this is repeated."""
        table = self.ref["distance bias"].at[head]
        first = jnp.minimum(nearest, self.static.entries - 1) + REACH
        return table.at[pl.ds(first, REACH)]


def to_columns(x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (SIDE, SIDE), [0])


def to_rows(x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (SIDE, SIDE), [1])


def gradient_arrays(
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


def run_program(
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
        interpret=interpreter() if static.interpret else None,
    )(*arrays.values())
    return dict(zip(out, found, strict=True))
