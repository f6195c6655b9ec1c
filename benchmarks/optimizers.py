"""Steps to fixed validation losses: AdamW against Muon, each at its own tuned learning rate.

    python benchmarks/optimizers.py                # 6 to 10 minutes on 2 cores
    python benchmarks/optimizers.py --seeds=5

The model, data and settings are those of configs/speedrun.py:size=laptop (0.9M parameters), with a constant learning
rate after the warm-up, so that the loss at a step does not depend on the number of steps. First each optimizer is
trained once at every rate of its grid, with a seed of its own, and the rate with the lowest last validation loss is
chosen (the ends of the grid are named if chosen). Then it is trained at that rate with other seeds, which change the
initialization and the order of the data. The step at which a loss is reached is interpolated between validations,
and the interval over seeds is Student's. Seconds are of whole steps in the steady state, without compilation and
validation; the FLOPs of a step are computed from shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from pe_lab.config import Config
from pe_lab.model import train_flops_per_token
from pe_lab.recipes import load_config
from pe_lab.results.statistics import interval
from pe_lab.terminal import table
from pe_lab.training.loop import train_phase
from pe_lab.training.muon import newton_schulz_flops
from pe_lab.training.plan import plan_here
from pe_lab.training.run import open_run

RECIPE = Path(__file__).resolve().parent.parent / "configs" / "speedrun.py"
GRIDS = {"adamw": (2.5e-3, 5e-3, 1e-2), "muon": (2.5e-3, 5e-3, 1e-2, 2e-2)}
TUNING_SEED = 1000


class Curve(NamedTuple):
    """Validation losses by step, in nats a token, and the seconds of a step."""

    steps: np.ndarray
    losses: np.ndarray
    step_seconds: float

    def step_at(self, loss: float) -> float:
        """The first step with at most this validation loss, interpolated; NaN if it is not reached."""
        reached = np.flatnonzero(self.losses <= loss)
        if not len(reached) or reached[0] == 0:
            return math.nan
        i = reached[0]
        return float(np.interp(-loss, -self.losses[[i - 1, i]], self.steps[[i - 1, i]]))


def config_of(optimizer: str, rate: float, seed: int, steps: int, cache: str, every: int) -> Config:
    config = load_config(
        f"{RECIPE}:optimizer={optimizer},size=laptop",
        {
            "seed": str(seed),
            "data.seed": str(seed),
            "data.cache_dir": cache,
            "phases.0.steps": str(steps),
            "phases.0.optimizer.schedule": "constant",
            "phases.0.optimizer.learning_rate": str(rate),
            "checkpoint.every_steps": str(steps),
            "log.every_steps": str(every),
            "log.validate_every_steps": str(every),
        },
    )
    return config


def train(config: Config) -> Curve:
    """Trains in a directory that is deleted."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        run = open_run(plan_here(config, jax.devices()[:1]), directory)
        train_phase(run, run.phases[0], None)
        phase = Path(directory) / run.phases[0].name
        metrics = [json.loads(line) for line in (phase / "metrics.jsonl").read_text().splitlines()]
        speeds = [json.loads(line) for line in (phase / "speed.jsonl").read_text().splitlines()]
    found = [(row["step"], row["validation_loss"]) for row in metrics if "validation_loss" in row]
    # Without the part of the time that waits for validation and checkpoints.
    seconds = [r["step_seconds"] - r.get("validation_seconds", 0) - r.get("checkpoint_seconds", 0) for r in speeds]
    steps, losses = map(np.asarray, zip(*found, strict=True))
    return Curve(steps, losses, float(np.median(seconds)))


def flops(config: Config) -> tuple[float, float]:
    """FLOPs of a step: of the model, and of Newton-Schulz."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        run = open_run(plan_here(config, jax.devices()[:1]), directory)
    phase, model = run.phases[0], run.models[0]
    tokens = train_flops_per_token(model.config, phase.config.sequence_length, phase.schedule.structure)
    muon = phase.config.optimizer
    extra = newton_schulz_flops(muon.muon, model.shapes, model.axes) if muon.name == "muon" else 0.0
    return tokens.full * phase.tokens_per_step, extra


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--every", type=int, default=10, help="steps between validations")
    parser.add_argument("--targets", default="3.5,3.2,3.0", help="validation losses, nats a token, falling")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", default="data", help="directory of the prepared corpus")
    arguments = parser.parse_args(argv)
    targets = [float(text) for text in arguments.targets.split(",")]
    began = time.perf_counter()

    def trained(optimizer: str, rate: float, seed: int) -> Curve:
        config = config_of(optimizer, rate, seed, arguments.steps, arguments.cache, arguments.every)
        curve = train(config)
        print(
            f"  {optimizer:6} rate {rate:<7g} seed {seed:<5} last loss {curve.losses[-1]:.4f}  "
            + "".join(f"{target:g} at step {curve.step_at(target):5.1f}  " for target in targets)
            + f"{curve.step_seconds * 1e3:.0f} ms a step  [{time.perf_counter() - began:.0f} s]",
            flush=True,
        )
        return curve

    rows, steps_to = [], {}
    for name, grid in GRIDS.items():
        print(f"{name}: one seed at each rate", flush=True)
        last = {rate: trained(name, rate, TUNING_SEED).losses[-1] for rate in grid}
        rate = min(last, key=lambda rate: last[rate])
        at = " (an end of the grid)" if rate in (grid[0], grid[-1]) else ""
        print(f"{name}: rate {rate:g}{at}, {arguments.seeds} seeds", flush=True)
        curves = [trained(name, rate, seed) for seed in range(arguments.seeds)]
        steps_to[name] = np.asarray([[curve.step_at(target) for target in targets] for curve in curves])
        model, extra = flops(config_of(name, rate, 0, arguments.steps, arguments.cache, arguments.every))
        rows.append(
            (
                name,
                f"{rate:g}{at}",
                *(interval(steps_to[name][:, i]).words("{:.0f}") for i in range(len(targets))),
                interval(np.asarray([curve.losses[-1] for curve in curves])).words("{:.3f}"),
                f"{model / 1e9:.2f} + {extra / 1e9:.2f}",
                f"{np.median([curve.step_seconds for curve in curves]) * 1e3:.0f}",
            )
        )
    print(f"\nconfigs/speedrun.py:size=laptop, {arguments.seeds} seeds, mean [95% interval]")
    header = (
        "optimizer",
        "rate",
        *(f"steps to {target:g}" for target in targets),
        f"loss at {arguments.steps}",
        "GFLOP a step",
        "ms a step",
    )
    print(table(header, rows, 2))
    for i, target in enumerate(targets):
        ratio = interval(np.log(steps_to["muon"][:, i] / steps_to["adamw"][:, i]))
        mean, low, high = (math.exp(float(part)) for part in dataclasses.astuple(ratio))
        print(f"Muon's steps over AdamW's to {target:g}, seed by seed: {mean:.2f} [{low:.2f}, {high:.2f}]")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
