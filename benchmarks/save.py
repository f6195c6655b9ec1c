"""The cost of verification: saving with manifests against Orbax alone, and restoring with and without verification.

    python benchmarks/save.py                        # the bytes of 494M parameters with Adam's moments: 5.9 GB
    python benchmarks/save.py --parameters=10000000

Every round saves and restores the same arrays in each way, in turn, on the disk of --directory, and prints ratios. Two
saves of the same bytes differ by up to a half of their time. So each save with a manifest is also compared with itself:
its whole time with that until Orbax has written the files. What follows is the digests, the manifest and the rename.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from pe_lab.checkpoints import store as checkpoints
from pe_lab.checkpoints.store import Store, templates
from pe_lab.parallel import return_freed_memory

LAYERS = 24


def arrays(parameters: int) -> dict[str, jax.Array]:
    """Random float32 values of about so many parameters, in seven leaves as a decoder has."""
    each = parameters // (7 * LAYERS * 64)
    make = jax.jit(lambda key: jax.random.normal(key, (LAYERS, 64, each)))
    return {f"leaf{n}": make(jax.random.key(n)) for n in range(7)}


seconds: dict[str, list[float]] = defaultdict(list)  # by what was measured


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Measures its block, which starts with nothing left to write to the disk, and with free memory."""
    return_freed_memory()
    os.sync()
    began = time.perf_counter()
    yield
    seconds[name].append(time.perf_counter() - began)
    print(f"  {name:24}{seconds[name][-1]:8.2f} s", flush=True)


def compare(rounds: int, ways: Mapping[str, Callable[[], None]]) -> str:
    """The seconds of the second way over those of the first, round by round.

    Each is measured first in every other round.
    """
    for number in range(rounds):
        for way in list(ways.values())[:: 1 if number % 2 == 0 else -1]:
            way()
    base, other = (seconds[name] for name in ways)
    return summary([two / one for one, two in zip(base, other, strict=True)])


def summary(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({len(ratios)} rounds, {min(ratios):.3f} to {max(ratios):.3f})"


class NotedCheckpointer(ocp.AsyncCheckpointer):
    """Notes when the files were written."""

    def wait_until_finished(self) -> None:
        super().wait_until_finished()
        written.append(time.perf_counter())


written: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=494_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    ocp.AsyncCheckpointer = NotedCheckpointer
    checkpoints.TRIMMED_BYTES = math.inf  # freed memory is returned before each measurement instead
    params = arrays(args.parameters)
    moments = {name: {key: jnp.ones_like(leaf) * leaf for key, leaf in params.items()} for name in ("mu", "nu")}
    size = 3 * sum(leaf.nbytes for leaf in params.values())
    print(f"{size / 1e9:.2f} GB in {3 * len(params)} arrays, {args.rounds} rounds, in {args.directory}")
    where = Path(tempfile.mkdtemp(dir=args.directory))
    wanted = [templates(tree, jax.tree.map(lambda leaf: leaf.sharding, tree)) for tree in (params, moments)]

    def empty() -> None:
        """Each save starts with an empty disk, and with no file of the other in memory."""
        for path in where.iterdir():
            shutil.rmtree(path)

    def orbax() -> None:
        empty()
        with timed("save, Orbax alone"):
            checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            checkpointer.save(
                where / "orbax",
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    optimizer=ocp.args.StandardSave(moments),
                    metadata=ocp.args.JsonSave({"step": 1}),
                ),
            )
            checkpointer.wait_until_finished()
            checkpointer.close()

    def ours() -> None:
        empty()
        with timed("save, with a manifest"):
            store = Store(where / "store")
            began = time.perf_counter()
            store.save(1, params, moments, {"format": 3})
            store.wait()
            shares.append((time.perf_counter() - began) / (written[-1] - began))
            store.close()

    def restore(verify: bool) -> None:
        with timed(f"restore, {'verified' if verify else 'not verified'}"):
            store = Store(where / "store", read_only=True)
            jax.block_until_ready(store.restore(1, *wanted, verify=verify))

    shares: list[float] = []  # of each save with a manifest, its seconds over those until Orbax was done
    try:
        saving = compare(args.rounds, {"save, Orbax alone": orbax, "save, with a manifest": ours})
        ours()
        params.clear()  # a restore needs the memory
        moments.clear()
        restoring = compare(
            args.rounds, {"restore, not verified": lambda: restore(False), "restore, verified": lambda: restore(True)}
        )
    finally:
        shutil.rmtree(where, ignore_errors=True)
    print(f"save, with a manifest / Orbax alone: {saving}")
    print(f"one save with a manifest / its own part until Orbax is done: {summary(shares)}")
    print(f"restore, verified / not verified:    {restoring}")


if __name__ == "__main__":
    main()
