"""Layouts, shared memory and products, which the kernels for Hopper GPUs share."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pe_lab.errors import UnsupportedError

LOG2_E = math.log2(math.e)
ROWS = 64  # of a matrix product of a warpgroup
LINE = 32  # numbers of 4 bytes; copies into shared memory begin at multiples of 128 bytes
# The layouts of logits, and of a number for each query or for each key of a block.
LOGITS = plgpu.Layout.WGMMA
DOWN, ACROSS = LOGITS.reduce(1), LOGITS.reduce(0)
PROGRAMS = 132  # multiprocessors of an H100
WARPGROUPS = 3  # of a program, at most


def interpreter() -> Any:
    """JAX's interpreter of GPU kernels on a CPU, with its detector of races.

    Raises:
      UnsupportedError: XLA has fewer threads than a program has warpgroups: each keeps one while it waits for another.
    """
    bound = hasattr(os, "sched_getaffinity")  # macOS binds no process to cores
    threads = int(os.environ.get("NPROC") or (len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1))
    if threads < WARPGROUPS:
        raise UnsupportedError(
            f"A kernel for Hopper GPUs is interpreted by {WARPGROUPS} threads of XLA that wait for each other, and "
            f"XLA has {threads} here. Set the environment variable NPROC=8 before JAX computes anything."
        )
    return plgpu.InterpretGPUParams(detect_races=True)


def channel_tile(channels: int) -> int:
    """Channels of 16 bits under one swizzle of shared memory: the largest of 64, 32 and 16 that divides them."""
    return max(width for width in (64, 32, 16) if channels % width == 0)


def matrix(shape: tuple[int, ...], dtype: jnp.dtype, tile: int) -> Any:
    """Shared memory of matrices that are operands of tensor cores."""
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(tile * dtype.itemsize))
    )


def add_product(total: jax.Array, left: jax.Array, right: Any, interpret: bool) -> jax.Array:
    """total + left @ right, of an array in registers and one in shared memory.

    The interpreter has no such product (JAX 0.12).
    """
    if interpret:
        found = jnp.dot(left.astype(jnp.float32), right[...].astype(jnp.float32))
        plgpu.commit_smem()  # a copy may overwrite what tensor cores have read, but not what a thread has
        return total + found

    def product(sums: Any) -> None:
        plgpu.wgmma(sums, left, right)

    return pl.run_state(product)(plgpu.ACC.init(total))


def looked_up(tables: Any, slot: jax.Array, index: jax.Array, interpret: bool) -> jax.Array:
    """tables[slot][index], of float32 in shared memory, where all axes of a table count as one.

    The index has the layout of logits. The interpreter has no such access (JAX 0.12).
    """
    if interpret:
        return tables[slot].reshape(-1)[index]
    index += slot * math.prod(tables.shape[1:])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LOGITS),
        return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.float32, layout=LOGITS),
    )
    def gather(_: Any, memory: Any, index: Any) -> Any:
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, memref, vector

        flat = mgpu.memref_fold(memory, 0, len(tables.shape))
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        found = index.registers.copy()
        for at in np.ndindex(found.shape):
            entries = [vector.extract(index.registers[at], [], [i]) for i in range(2)]
            both = [memref.load(flat, [arith.index_cast(ir.IndexType.get(), entry)]) for entry in entries]
            found[at] = vector.from_elements(pair, both)
        return mgpu.FragmentedArray(_registers=found, _layout=index.layout, _is_signed=None)

    return gather(tables, index)
