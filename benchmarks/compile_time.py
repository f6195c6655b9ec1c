"""Seconds to trace and compile the train step at two depths: with a scan, both should take the same time.

    python benchmarks/compile_time.py --depths=12,48 --repeats=5

The step is the one that trains, optimizer included, from shapes alone. Depths take turns, every compilation
starts with empty caches, and the medians are compared. `--pattern` takes layers as a config's `positional`
does, such as `rope/window=128 rope/window=128 nope`; `--unrolled` shows what the scan saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout that is not installed

import jax
import jax.numpy as jnp

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh, start_processes
from pe_lab.positional import build_schedule, layers
from pe_lab.terminal import command
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state

BATCH, LENGTH = 8, 256
MODEL = ModelConfig(vocab_size=4096, d_model=256, d_ff=768, heads=4, kv_heads=2, remat="full", loss_chunks=4)


def seconds(config: ModelConfig, description: Sequence[str]) -> tuple[float, float, float]:
    """Of one train step from empty caches: tracing and lowering, XLA, and the processor time of both together."""
    jax.clear_caches()
    model = Model(config)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=10), 100, model.axes)
    state = jax.eval_shape(lambda p: init_state(model, optimizer, p), model.shapes)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "weights": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.float32),
    }
    described = layers(list(description), config.layers)
    schedule = build_schedule(described, config.heads, config.kv_heads, model.config.head_dim)
    step = compile_train_step(model, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), AxisRules())
    start, start_cpu = time.perf_counter(), time.process_time()
    lowered = step.lower(state, batch, schedule)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced, time.process_time() - start_cpu


@command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="12,48", help="numbers of layers (default: 12,48)")
    parser.add_argument("--repeats", type=int, default=5, help="compilations of each (default: 5)")
    parser.add_argument("--pattern", nargs="+", default=["rope"], help="layers, repeated (default: rope)")
    parser.add_argument("--unrolled", action="store_true", help="without the scan over layers")
    arguments = parser.parse_args(argv)
    start_processes()
    depths = [int(depth) for depth in arguments.depths.split(",")]
    config = dataclasses.replace(MODEL, scan=not arguments.unrolled)
    took: dict[int, list[tuple[float, float, float]]] = {depth: [] for depth in depths}
    # The first compilation of a process also starts XLA: it is not counted.
    for repeat in range(arguments.repeats + 1):
        for depth in depths if repeat else depths[:1]:
            pair = seconds(dataclasses.replace(config, layers=depth), arguments.pattern)
            if repeat:
                took[depth].append(pair)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, median of {arguments.repeats}", end="; ")
    print("unrolled" if arguments.unrolled else "scanned", *arguments.pattern)
    totals = {}
    for depth in depths:
        trace, xla, cpu = (statistics.median(part) for part in zip(*took[depth], strict=True))
        totals[depth] = statistics.median(a + b for a, b, _ in took[depth]), cpu
        parts = f"({trace:.2f} tracing and lowering, {xla:.2f} XLA), {cpu:.2f} s of processor time"
        print(f"{depth:4d} layers: {totals[depth][0]:6.2f} s {parts}")
    wall, cpu = (deep / shallow for deep, shallow in zip(totals[depths[-1]], totals[depths[0]], strict=True))
    print(f"ratio {depths[-1]} / {depths[0]} layers: {wall:.3f}, of processor time {cpu:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
