"""The memory of attention kernels on a TPU core, from its compiler, without a TPU; compared with JAX's splash.

    python -m benchmarks.attention_compile --write docs/attention.md

VMEM is what the compiler says that the kernel allocates, or the largest of a gradient's kernels: compiled once more
under a limit too small for it. HBM is what the program needs beside its arguments and its result; XLA may keep some of
that in VMEM. No time is measured: there is no TPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.document import Place
from pe_lab.attention.kernels import external, tpu, tpu_gradient
from pe_lab.attention.key_block import AttentionInputs, KeyRotation, scaled
from pe_lab.errors import UserError
from pe_lab.parallel.compiler import NoCompiler, libtpu_version, topology_devices
from pe_lab.parallel.topology import parse_topology
from pe_lab.terminal import command

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LENGTH = 2**17
LONG = 2**20  # of these kinds also:
LONG_KINDS = ("whole sequence", "rotating", "decode", "splash")
HEADS = {64: (14, 2), 128: (8, 2)}  # of 64 channels those of drope_16b
KINDS = {
    "whole sequence": "pallas_tpu, whole sequence",
    "rotating": "pallas_tpu, keys rotated per query head",
    "decode": "pallas_tpu, one token against a cache",
    "distance bias": "pallas_tpu, with a bias by distance",
    "gradient": "pallas_tpu, gradient",
    "gradient, distance bias": "pallas_tpu, gradient with a bias by distance",
    "splash": "splash, whole sequence",
}
TOO_SMALL = 2**20  # bytes of VMEM with which no kernel compiles


@dataclass(frozen=True)
class Compiled:
    """The memory of one kernel on one chip, in bytes; `refused` is the reason if it does not compile."""

    chip: str
    kind: str
    head_dim: int
    length: int
    vmem: int = 0
    hbm: int = 0
    seconds: float = 0.0
    refused: str = ""


def _arguments(kind: str, head_dim: int, length: int, place: Any) -> tuple[Any, tuple[Any, ...]]:
    """A function to compile, and its arguments as shapes."""
    H, G = HEADS[head_dim]

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    if kind == "splash":
        texts = tuple(shape(1, length, n, head_dim) for n in (H, G, G))
        function = lambda q, k, v, scale: external.splash_attention(scaled(q, scale), k, v, AttentionInputs())  # noqa: E731
        return function, (*texts, shape(dtype=jnp.float32))
    queries = 1 if kind == "decode" else length
    inputs = AttentionInputs()
    if kind == "decode":
        inputs = AttentionInputs(start=shape(1, dtype=jnp.int32), used=shape(1, dtype=jnp.int32))
    if kind == "rotating":
        inputs = AttentionInputs(
            rotation=KeyRotation(
                shape(H, head_dim // 2, 2, dtype=jnp.uint32), shape(H, head_dim // 2, dtype=jnp.float32)
            )
        )
    if kind.endswith("distance bias"):
        inputs = AttentionInputs(distance_bias=shape(H, length, dtype=jnp.float32))  # of each distance its own
    texts = shape(1, H, queries, head_dim), shape(1, G, length, head_dim), shape(1, G, length, head_dim)
    if kind.startswith("gradient"):
        each = shape(1, H, length, dtype=jnp.float32)  # the logsumexp, and the inner product of output and gradient
        # A new function, as below: of the same one, JAX would keep the program with the old limit of VMEM.
        return lambda *of: tpu_gradient.tpu_key_block_gradient(*of), (*texts, inputs, each, each, texts[0])
    return lambda q, k, v, inputs: tpu.tpu_key_block(q, k, v, inputs).out, (*texts, inputs)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def compile_one(chip: str, kind: str, head_dim: int, length: int) -> Compiled:
    """Compiles a kernel for a chip. A failure to compile is also a result."""
    device = topology_devices(parse_topology(CHIPS[chip]))[0]
    mesh = Mesh(np.array([device]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())
    start = time.perf_counter()

    def lowered() -> Any:
        function, arguments = _arguments(kind, head_dim, length, place)
        # The kernel's compiler asks which chip it is for.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(function).lower(*arguments)

    try:
        analysis = lowered().compile().memory_analysis()
    except (jax.errors.JaxRuntimeError, NotImplementedError, UserError, ValueError) as error:
        reason = str(error).splitlines()[0][:160]
        return Compiled(chip, kind, head_dim, length, seconds=time.perf_counter() - start, refused=reason)
    seconds = time.perf_counter() - start
    return Compiled(chip, kind, head_dim, length, _vmem(kind, lowered), analysis.temp_size_in_bytes, seconds)


def _vmem(kind: str, lowered: Any) -> int:
    """What the kernel allocates: limits are raised to what it asks for, until it asks for no more."""
    limit, asked = TOO_SMALL, 0
    while True:
        # Of splash the limit is the compiler's, for all of a program: copies into VMEM may be what is refused.
        options = {"xla_tpu_scoped_vmem_limit_kib": str(limit // 1024)} if kind == "splash" else None
        try:
            with mock.patch.object(tpu, "VMEM", limit), mock.patch.object(tpu_gradient, "VMEM", limit):
                lowered().compile(compiler_options=options)
            return asked
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"Scoped allocation with size ([\d.]+)([KMG]?) and limit", str(error))
            if not found:
                raise
            size = round(float(found[1]) * _UNITS[found[2]])
            if "tpu_custom_call" in str(error):
                asked = size
            limit = max(size, limit) + 64 * 1024  # sizes are rounded


def everything(
    chips: Sequence[str] = tuple(CHIPS),
    kinds: Sequence[str] = tuple(KINDS),
    head_dims: Sequence[int] = tuple(HEADS),
) -> Iterator[Compiled]:
    """All of them, one after another."""
    for head_dim in head_dims:
        for kind in kinds:
            for length in (LENGTH, LONG) if kind in LONG_KINDS else (LENGTH,):
                for chip in chips:
                    yield compile_one(chip, kind, head_dim, length)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}" if size < 2**30 else f"{size / 2**20:,.0f}"


def markdown(found: Sequence[Compiled]) -> str:
    """A table: a kernel and length a row, VMEM and HBM of each chip."""
    chips = list(dict.fromkeys(one.chip for one in found))
    lines = [
        "| kernel | K | tokens | " + " | ".join(f"{chip} VMEM, HBM (MiB)" for chip in chips) + " |",
        "|---|---|---|" + "---|" * len(chips),
    ]
    rows: dict[tuple[int, str, int], dict[str, Compiled]] = {}
    for one in found:
        rows.setdefault((one.head_dim, one.kind, one.length), {})[one.chip] = one
    for (head_dim, kind, length), of in rows.items():
        cells = [
            "refused" if of[chip].refused else f"{_mebibytes(of[chip].vmem)}, {_mebibytes(of[chip].hbm)}"
            for chip in chips
        ]
        lines.append(f"| {KINDS[kind]} | {head_dim} | {length:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    arguments = parser.parse_args(argv)
    chips = arguments.chips.split(",")
    if unknown := [chip for chip in chips if chip not in CHIPS]:
        raise UserError(f"--chips: '{unknown[0]}' is none of {', '.join(CHIPS)}.")
    place = Place(arguments.write, "compiled") if arguments.write else None
    jax.config.update("jax_platforms", "cpu")
    found = []
    try:
        for one in everything(chips):
            found.append(one)
            told = one.refused or f"VMEM {_mebibytes(one.vmem)} MiB, HBM {_mebibytes(one.hbm)} MiB, {one.seconds:.1f} s"
            print(f"{one.chip} {one.kind} K={one.head_dim} {one.length:,}: {told}", file=sys.stderr, flush=True)
    except NoCompiler as reason:
        raise UserError(f"Nothing here compiles for TPUs: {reason}.") from None
    refused = dict.fromkeys(f"{one.kind} at {one.length:,} tokens: {one.refused}" for one in found if one.refused)
    text = markdown(found) + f"\n\nCompiled by libtpu {libtpu_version()}, JAX {jax.__version__}, bfloat16; "
    text += "query and key heads " + ", ".join(f"{H} and {G} of {K}" for K, (H, G) in HEADS.items()) + " channels."
    if refused:
        text += "\n\nRefused: " + "; ".join(one.rstrip(".") for one in refused) + "."
    if place:
        place.write(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
