"""The cost of verification: saving with manifests against Orbax alone, and restoring with and without verification.

    python benchmarks/save.py                        # the bytes of 494M parameters with Adam's moments: 5.9 GB
    python benchmarks/save.py --parameters=10000000

Every round saves and restores the same arrays in each way, in turn, on the disk of --directory. Prints seconds and
ratios of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from pe_lab.checkpoints.store import Store, templates

LAYERS = 24


def arrays(parameters: int) -> dict[str, jax.Array]:
    """Random float32 values of about so many parameters, in seven leaves as a decoder has."""
    each = parameters // (7 * LAYERS * 64)
    make = jax.jit(lambda key: jax.random.normal(key, (LAYERS, 64, each)))
    return {f"leaf{n}": make(jax.random.key(n)) for n in range(7)}


def seconds(action: Callable[[], object]) -> float:
    os.sync()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=494_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    params = arrays(args.parameters)
    moments = {name: {key: jnp.ones_like(leaf) * leaf for key, leaf in params.items()} for name in ("mu", "nu")}
    size = 3 * sum(leaf.nbytes for leaf in params.values())
    print(f"{size / 1e9:.2f} GB in {3 * len(params)} arrays, {args.rounds} rounds, in {args.directory}")
    where = Path(tempfile.mkdtemp(dir=args.directory))
    wanted = [templates(tree, jax.tree.map(lambda leaf: leaf.sharding, tree)) for tree in (params, moments)]

    def orbax() -> None:
        checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        checkpointer.save(
            where / "orbax",
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(moments),
                metadata=ocp.args.JsonSave({"step": 1}),
            ),
            force=True,
        )
        checkpointer.wait_until_finished()
        checkpointer.close()

    def ours() -> None:
        store = Store(where / "store")
        store.save(1, params, moments, {"format": 3})
        store.wait()
        store.close()

    def restore(verify: bool) -> None:
        store = Store(where / "store", read_only=True)
        jax.block_until_ready(store.restore(1, *wanted, verify=verify))

    ways = {
        "save, Orbax alone": orbax,
        "save, with a manifest": ours,
        "restore, not verified": lambda: restore(False),
        "restore, verified": lambda: restore(True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(args.rounds):
            shutil.rmtree(where / "store", ignore_errors=True)
            shutil.rmtree(where / "orbax", ignore_errors=True)
            for name, action in ways.items():
                times[name].append(seconds(action))
                print(f"  {name:24}{times[name][-1]:8.2f} s", flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    median = {name: statistics.median(found) for name, found in times.items()}
    print(f"save, manifest / Orbax alone:     {median['save, with a manifest'] / median['save, Orbax alone']:.3f}")
    print(f"restore, verified / not verified: {median['restore, verified'] / median['restore, not verified']:.3f}")


if __name__ == "__main__":
    main()
