"""`python -m pe_lab.train --config=configs/x.py`: trains every phase of a recipe, or continues an interrupted run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from pe_lab import storage
from pe_lab.data.tokenizers import KIND_FILE, save_tokenizer
from pe_lab.parallel import has_accelerator, keep_freed_memory, start_processes
from pe_lab.recipes import load_config, split_overrides
from pe_lab.storage import new_directory
from pe_lab.terminal import argument_parser, command, console
from pe_lab.training import Stopped, open_run, train_phase
from pe_lab.training.logs import claim_workdir, write_run
from pe_lab.training.machine import peak_flops
from pe_lab.training.profiling import Profiler, parse_steps


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    parser = argument_parser(
        "train",
        "Trains every phase of a recipe. Run it again to continue an interrupted run.",
        "Any key of the recipe can be set: --config.model.layers=4 --config.phases.0.steps=100",
    )
    parser.add_argument("--config", required=True, help="recipe, with an argument after a colon: configs/x.py:quick")
    parser.add_argument("--workdir", help="where the run is written; runs/NAME by default")
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="trace these of the steps that this command trains for XProf, as in 10:13; the first one compiles",
    )
    return parser


@command
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)
    profiler = Profiler(parse_steps(args.profile)) if args.profile else Profiler()
    config = load_config(args.config, overrides)
    workdir = storage.path("--workdir", args.workdir) if args.workdir else Path("runs") / config.name
    claim_workdir(workdir, config)
    if not has_accelerator():
        keep_freed_memory()  # before JAX starts; halves the processor time of a small step
    start_processes()
    run = open_run(config, workdir)
    first = jax.process_index() == 0
    out = console(quiet=not first)
    if first:
        write_run(workdir, config, shlex.join(["python", "-m", "pe_lab.train", *argv]))
        if not (workdir / "tokenizer").exists():
            with new_directory(workdir / "tokenizer", marker=KIND_FILE) as building:
                save_tokenizer(run.tokenizer, building)
    out.print(
        f"{config.name}: {run.models[0].num_parameters:,} parameters, {len(run.phases)} phases, "
        f"mesh {dict(run.mesh.shape)}, in {workdir}"
    )
    peak, previous = peak_flops(), None
    try:
        for phase in run.phases:
            previous = train_phase(run, phase, previous, peak, profiler)
    except Stopped as stopped:
        out.print(f"{config.name}: {stopped}")
        return os.EX_TEMPFAIL  # 75: neither complete nor failed; a launcher runs the same command again
    if profiler.trained < profiler.steps.start:
        out.print(f"--profile={args.profile}: nothing was traced; this command trained {profiler.trained} steps")
    out.print(f"{config.name}: complete, {previous}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
