"""Compiles the kernels for Hopper GPUs to machine code, without a GPU, and says what ptxas says: registers and spills.

    python -m benchmarks.attention_compile_gpu --write docs/attention.md     # the extra `gpu`, Python 3.12; one minute

JAX compiles Mosaic kernels by libnvJitLink if it is installed, as it is with JAX's CUDA wheels. Then ptxas treats a
kernel as one part of a program and ignores `setmaxnreg`, by which warpgroups that compute take registers from the one
that copies. The second column is what ptxas makes of the same code by itself.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
FOLDER = tempfile.TemporaryDirectory()
os.environ |= {"MOSAIC_GPU_DUMP_TO": FOLDER.name, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.document import Place
from pe_lab.attention.kernels.hopper import hopper_key_block
from pe_lab.attention.kernels.hopper_gradient import hopper_key_block_gradient
from pe_lab.attention.key_block import AttentionInputs
from pe_lab.identity import versions
from pe_lab.parallel.compiler import topology_devices
from pe_lab.parallel.topology import parse_topology
from pe_lab.terminal import command

H, G, T = 16, 4, 8192
HEAD_DIMS = (64, 128, 256)
of = jax.ShapeDtypeStruct


def inputs_of() -> dict[str, Callable[[], AttentionInputs]]:
    """What a layer may have, as shapes."""
    ids = of((1, T), jnp.int32)
    return {
        "plain": AttentionInputs,
        "ALiBi": lambda: AttentionInputs(slope=of((H,), jnp.float32)),
        "documents": lambda: AttentionInputs(query_segments=ids, key_segments=ids),
        "a bias for every distance": lambda: AttentionInputs(distance_bias=of((H, T), jnp.float32)),
        "a bias of keys": lambda: AttentionInputs(key_bias=of((1, H, T), jnp.float32)),
        "a soft cap": lambda: AttentionInputs(soft_cap=50.0),
    }


def compiled(call: Callable[..., Any], arguments: Any) -> list[tuple[str, str, str]]:
    """The kernels of a call: name, and registers and bytes of spills as JAX compiles them, and by ptxas alone."""
    for path in Path(FOLDER.name).iterdir():
        path.unlink()
    device = topology_devices(parse_topology("h100:1"))[0]
    sharding = NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec())
    placed = jax.tree.map(lambda x: of(x.shape, x.dtype, sharding=sharding), arguments)
    jax.jit(call).lower(*placed).compile()
    found = []
    for path in sorted(Path(FOLDER.name).glob("*.ptx")):
        name = re.sub(r"^pe_lab_attention_|_\d+$", "", path.stem)
        found.append((name, told(path.with_suffix(".ptxas").read_text()), told(by_ptxas(path))))
    return found


def by_ptxas(path: Path) -> str:
    import nvidia

    program = Path(list(nvidia.__path__)[0]) / "cu13/bin/ptxas"
    done = subprocess.run(
        [program, "-v", "-arch=sm_90a", "-o", f"{path}.cubin", path], capture_output=True, text=True, check=True
    )
    return done.stderr


def told(text: str) -> str:
    """Registers of a thread and bytes of spilled registers, from what ptxas prints."""
    registers, spilled = (
        re.search(pattern, text) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return f"{registers[1]}, {spilled[1]}" if registers and spilled else "–"


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="a document for the table (docs/attention.md)")
    args = parser.parse_args(argv)
    place = Place(args.write, "compiled for hopper") if args.write else None
    cells: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for K in HEAD_DIMS:
        query, key, number = of((1, H, T, K), jnp.bfloat16), of((1, G, T, K), jnp.bfloat16), of((1, H, T), jnp.float32)
        for what, make in inputs_of().items():
            inputs = make()
            kernels = compiled(functools.partial(hopper_key_block), (query, key, key, inputs))
            kernels += compiled(hopper_key_block_gradient, (query, key, key, inputs, number, number, query))
            for name, *numbers in kernels:
                cells.setdefault((what, name), {})[K] = tuple(numbers)
    head = ["", "kernel", *(f"{K} channels, {how}" for K in HEAD_DIMS for how in ("as JAX compiles", "by ptxas"))]
    rows = [
        [what, name, *(cell for K in HEAD_DIMS for cell in found.get(K, ("–", "–")))]
        for (what, name), found in cells.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    release = versions()
    note = (
        f"Registers of a thread, and bytes of registers that are spilled; sm_90a, JAX {release['jax']}, bfloat16, {H} "
        f"query and {G} key heads, {T:,} tokens."
    )
    text = "\n".join([lines[0], "|---|---|" + "---:|" * (len(head) - 2), *lines[1:]]) + f"\n\n{note}"
    print(text)
    if place:
        place.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
