"""The cost of the rotation: the train step of one model with RoPE on every layer, against the same model without.

    python benchmarks/rotation_cost.py

Both sides take the step that `pe_lab.train` takes, at the shapes of `make demo` (QK-norm and all), from the same
weights and batch. They alternate after a few steps, so that other work of the machine falls on both. Each pair of
measurements gives one ratio of wall-clock and one of processor time; the median of these ratios is reported, with the
middle half of them. `--description` measures another encoding, such as yarn:factor=2,original_length=64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # from a checkout that is not installed

import jax
import numpy as np

from pe_lab.config import Config, MeshConfig
from pe_lab.identity import machine, versions
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh, start_processes
from pe_lab.parallel.host_memory import keep_freed_memory
from pe_lab.positional import build_schedule, layers
from pe_lab.recipes import load_config
from pe_lab.terminal import command
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state, make_shardings, place_batch

VOCABULARY = 640  # the demo's tokenizer and its needles' symbols, rounded up


class Side:
    """A train step under one encoding, ready to run."""

    def __init__(self, config: Config, description: Any):
        phase = config.phases[0]
        model = Model(config.model)
        mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), AxisRules()
        optimizer = make_optimizer(phase.optimizer, phase.steps, model.axes)
        shardings = make_shardings(model, optimizer, mesh, rules)
        shape = (phase.batch_size, phase.sequence_length)
        windows = np.random.default_rng(0).integers(0, VOCABULARY, (shape[0], shape[1] + 1)).astype(np.int32)
        batch = {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": np.ones(shape, np.float32)}
        self.batch = place_batch(batch, shardings.batch)
        self.schedule = build_schedule(
            layers(description, config.model.layers), model.config.heads, model.config.kv_heads, model.config.head_dim
        )
        state = init_state(model, optimizer, model.init(jax.random.key(0)))
        self.state = jax.device_put(state, shardings.state)
        self.step = compile_train_step(model, optimizer, mesh, rules)

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds and processor seconds of so many steps."""
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, _ = self.step(self.state, self.batch, self.schedule)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, time.process_time() - cpu


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median and the middle half of some ratios, as percent above 1."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {name: round(100 * (value - 1), 2) for name, value in (("median", middle), ("from", low), ("to", high))}


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--description", default="rope:base=200", help="the encoding that is compared with none")
    parser.add_argument("--rounds", type=int, default=150, help="pairs of measurements")
    parser.add_argument("--turns", dest="rounds", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=4, help="steps of a measurement")
    parser.add_argument("--out", default=str(HERE / "results" / "cpu"), help="folder of results; empty: none")
    args = parser.parse_args(argv)
    keep_freed_memory()
    start_processes()
    overrides = {"model.vocab_size": str(VOCABULARY)}
    config = load_config(f"{HERE.parent}/configs/drope_laptop.py", overrides)
    # The same encoding twice says what the method itself is good for.
    sides = {"with": Side(config, args.description), "without": Side(config, "nope"), "again": Side(config, "nope")}
    for side in sides.values():
        side.run(20)
    ratios: dict[str, list[tuple[float, float]]] = {"with": [], "again": []}
    for round_ in range(args.rounds):
        order = list(sides) if round_ % 2 else list(sides)[::-1]
        spent = {name: sides[name].run(args.steps) for name in order}
        for name, found in ratios.items():
            found.append((spent[name][0] / spent["without"][0], spent[name][1] / spent["without"][1]))
    result: dict[str, Any] = {"description": args.description, "rounds": args.rounds, "steps_per_round": args.steps}
    for name, title in (("with", f"{args.description} over none"), ("again", "none over none")):
        wall, cpu = (spread([ratio[i] for ratio in ratios[name]]) for i in (0, 1))
        result[name] = {"wall_percent": wall, "cpu_percent": cpu}
        print(
            f"{title}: {wall['median']:+.2f}% time ({wall['from']:+.2f} to {wall['to']:+.2f}), "
            f"{cpu['median']:+.2f}% processor time ({cpu['from']:+.2f} to {cpu['to']:+.2f})"
        )
    if args.out:
        result |= {"versions": versions(), "machine": machine(), "load_average": os.getloadavg()}
        path = Path(args.out) / f"rotation_cost-jax{jax.__version__}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
