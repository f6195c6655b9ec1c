"""The steps of K cells in one program (`pe_lab.sweep --stack=K`) against single processes.

    python benchmarks/stack.py                      # on these cores: singles are one process for each; 10 minutes
    python benchmarks/stack.py --widths=64 --stacks=4 --rounds=1

The cells are the loops of runs that differ in the seed, with their data and logs, and without validation and saves.
Singles run at once, each on a core of its own. Stacks and singles take turns. `processor` is the processor time of a
million tokens, which other processes of the machine disturb less than the rate. `loss` is the largest difference of a
loss to that of the same cell alone, over the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pe_lab.identity import versions
from pe_lab.terminal import table

RECIPE = """
from ml_collections import ConfigDict


def get_config(arg=""):
    config = ConfigDict()
    config.name = "stack"
    config.model = dict(layers=4, d_model=64, d_ff=256, heads=4, kv_heads=4, dtype="float32")
    config.data = dict(sources=[dict(source="stdlib")], tokenizer="bytes")
    adamw = dict(learning_rate=1e-3, warmup_steps=1, schedule="constant")
    config.phases = [dict(name="pretrain", steps=10**6, sequence_length=256, batch_size=8, optimizer=adamw)]
    config.log = dict(every_steps=1, validate_every_steps=10**6, validation_batches=1, trackers=())
    config.checkpoint = dict(every_steps=10**6)
    return config
"""
COMPARED = 5  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128", help="widths of the model, of 4 layers and 4 heads")
    parser.add_argument("--stacks", default="2,4,8")
    parser.add_argument("--jobs", type=int, help="singles at once (default: one for each core, 1 on a GPU)")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many is shown")
    parser.add_argument("--out", type=Path, help="a JSON file, kept up to date")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args, **json.loads(args.worker))
    gpu = os.environ.get("JAX_PLATFORMS", "") in ("cuda", "gpu")
    jobs = args.jobs or (1 if gpu else len(os.sched_getaffinity(0)))
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="pe_lab_bench_") as directory:
        for n in range(args.rounds):
            for width in map(int, args.widths.split(",")):
                plans = [[[0]], *([[[seed] for seed in range(jobs)]] if jobs > 1 else [])]
                plans += [[[*range(int(k))]] for k in args.stacks.split(",")]
                for plan in plans:
                    found = measured(Path(directory) / f"{n}_{width}_{plan}", width, plan, args)
                    key = (width, found["how"], found["cells"])
                    before = best.setdefault(key, found)
                    best[key] = found | {
                        "rate": max(before["rate"], found["rate"]),
                        "processor": min(before["processor"], found["processor"]),
                    }
                    show([*best.values()], args)


def measured(directory: Path, width: int, plan: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """What processes measure at once, each of which trains the cells of some seeds."""
    directory.mkdir()
    (directory / "stack.py").write_text(RECIPE)
    cores, workers = sorted(os.sched_getaffinity(0)), []
    for n, seeds in enumerate(plan):
        what = {"directory": str(directory), "width": width, "seeds": seeds, "workers": len(plan)}
        what["cores"] = [cores[n % len(cores)]] if len(plan) > 1 else cores
        line = [sys.executable, __file__, *sys.argv[1:], f"--worker={json.dumps(what)}"]
        workers.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
    said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("".join(said))
    found = [json.loads(text.splitlines()[-1]) for text in said]
    how = "stack" if len(plan[0]) > 1 else "1 single" if len(plan) == 1 else f"{len(plan)} singles"
    return {
        "width": width,
        "how": how,
        "cells": sum(map(len, plan)),
        "rate": sum(one["rate"] for one in found),
        "processor": sum(one["processor"] for one in found) / len(found),
        "device": found[0]["device"],
        "losses": {seed: losses for one in found for seed, losses in one["losses"].items()},
    }


def work(
    args: argparse.Namespace, directory: str, width: int, seeds: list[int], workers: int, cores: list[int]
) -> None:
    """Trains the cells of some seeds in this process, and prints what was measured."""
    os.sched_setaffinity(0, cores)

    import jax

    from pe_lab.parallel.stopping import stop_requests
    from pe_lab.recipes import load_config
    from pe_lab.storage import read_records
    from pe_lab.training import fit
    from pe_lab.training.stack import PhaseStack

    where = Path(directory)
    keys = {"model.d_model": width, "model.d_ff": 4 * width, "model.dtype": args.dtype}
    keys |= {"phases.0.sequence_length": args.length, "phases.0.batch_size": args.batch}
    keys |= {"data.cache_dir": where.parent / "data"}
    with stop_requests() as stops, open(where / f"log-{seeds[0]}", "w") as log, contextlib.redirect_stdout(log):
        loops = {}
        for seed in seeds:
            of_cell = {key: str(value) for key, value in {**keys, "seed": seed, "data.seed": seed}.items()}
            config = load_config(str(where / "stack.py"), of_cell)
            loops[str(seed)] = fit.run_steps(config, where / str(seed), stops, stacked=True)
        stack, steps = PhaseStack(), 0

        def step() -> None:
            stack.compute({seed: next(loop) for seed, loop in loops.items()})

        for _ in range(COMPARED + 2):
            step()
        (where / f"ready-{seeds[0]}").touch()
        while len([*where.glob("ready-*")]) < workers:
            time.sleep(0.01)
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + args.seconds:
            step()
            steps += 1
        seconds, used = time.monotonic() - began, time.process_time() - used
        for loop in loops.values():
            loop.close()
    tokens = steps * len(seeds) * args.batch * args.length
    losses = {}
    for seed in seeds:
        log = read_records(where / str(seed) / "pretrain" / "metrics.jsonl", partial=True)
        losses[str(seed)] = [record["loss"] for record in log if "loss" in record][:COMPARED]
    device = jax.devices()[0].device_kind
    print(json.dumps({"rate": tokens / seconds, "processor": used / tokens * 1e6, "losses": losses, "device": device}))


def show(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints the table so far, and writes it."""
    rows = []
    for one in sorted(found, key=lambda one: one["width"]):
        alike = [other for other in found if other["width"] == one["width"]]
        differ = [
            abs(a - b) / b
            for other in alike
            if "single" in other["how"] and one["how"] == "stack"
            for seed in other["losses"].keys() & one["losses"].keys()
            for a, b in zip(one["losses"][seed], other["losses"][seed], strict=True)
        ]
        one["loss"] = max(differ, default=None)
        alone = next(other for other in alike if other["how"] == "1 single")
        rate, ratio = f"{one['rate']:,.0f}", f"{one['rate'] / alone['rate']:.2f}"
        loss = "" if one["loss"] is None else f"{one['loss']:.1e}"
        rows.append([str(one["width"]), one["how"], str(one["cells"]), rate, ratio, f"{one['processor']:.1f} s", loss])
    header = ["width", "how", "cells", "tokens/s of all", "x 1 single", "processor", "loss"]
    print(table(header, rows, words=2), "\n", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        kept = [{key: value for key, value in one.items() if key != "losses"} for one in found]
        about = {"cores": len(os.sched_getaffinity(0)), "versions": versions(), "command": sys.argv[1:]}
        args.out.write_text(json.dumps({**about, "results": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
