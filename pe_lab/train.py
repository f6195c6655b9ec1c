"""`python -m pe_lab.train --config=configs/x.py`: trains every phase of a recipe, or continues an interrupted run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import Any

from pe_lab.terminal import argument_parser, bounded, console, leave, stop_while_importing, waiting, works_on

if __name__ == "__main__":
    stop_while_importing()

    from pe_lab.recipes import refuse_misspelt_keys

    refuse_misspelt_keys()

import jax

from pe_lab.config import INT32
from pe_lab.errors import ConfigError
from pe_lab.parallel import has_accelerator, keep_freed_memory, start_processes
from pe_lab.parallel.stopping import Stopped, StopRequests, lost_processes, stop_requests, watch_maintenance
from pe_lab.recipes import load_config, split_overrides
from pe_lab.storage import AnyPath
from pe_lab.storage.run_files import LEDGER_FILE
from pe_lab.training import Run, open_run, train_phase
from pe_lab.training.extension import extend, recorded
from pe_lab.training.inheritance import inherit, workdir_of
from pe_lab.training.ledger import Ledger, balance, read_ledger
from pe_lab.training.machine import peak_flops
from pe_lab.training.profiling import Profiler, parse_steps
from pe_lab.training.workdir import check_workdir, saved_config, working_alone, write_run


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
        "--extend",
        type=bounded(int, 1, INT32),
        metavar="STEPS",
        help="train the last phase to so many steps in all, with its optimizer's state; the recipe's "
        "optimizer.on_extend says what the learning rate does",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="trace these of the steps that this command trains for XProf, as in 10:13; the first one compiles",
    )
    return parser


@works_on
def main(argv: Sequence[str]) -> int:
    with stop_requests() as stops:
        try:
            return _train(argv, stops)
        except Stopped as stopped:
            # 75: neither complete nor failed; a launcher runs the same command again.
            print(stopped, flush=True)
            return os.EX_TEMPFAIL


def _train(argv: Sequence[str], stops: StopRequests) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)
    profiler = Profiler(parse_steps(args.profile)) if args.profile else Profiler()
    config = load_config(args.config, overrides, lambda tree: inherit(tree, workdir_of(tree, args.workdir)))
    workdir = workdir_of({"name": config.name}, args.workdir)
    saved = saved_config(workdir)
    config = recorded(config, saved)
    if not has_accelerator():
        keep_freed_memory()  # before JAX starts; halves the processor time of a small step
    if args.extend:
        if saved is None:
            raise ConfigError(f"--extend: there is no run in '{workdir}'. A new one has the steps of its recipe.")
        start_processes()  # the rate at the end of the former schedule is computed, which starts a backend
        config = extend(config, workdir, args.extend)
    before = check_workdir(workdir, config)
    start_processes()
    stops.take_sigterm()
    watch_maintenance()
    out = console(quiet=jax.process_index() != 0)
    with waiting(out, f"{config.name}: planning the run", at_once=False):
        run = open_run(config, workdir)
    config = run.config  # with the steps of epochs
    with working_alone(workdir, out.print):
        if jax.process_index() == 0:
            write_run(workdir, config, shlex.join(["python", "-m", "pe_lab.train", *argv]), before)
        out.print(
            f"{config.name}: {run.models[0].num_parameters:,} parameters, {len(run.phases)} phases, "
            f"mesh {dict(run.mesh.shape)}, in {workdir}"
        )
        last = _train_phases(run, profiler, out)
    if profiler.trained < profiler.steps.start:
        out.print(f"--profile={args.profile}: nothing was traced; this command trained {profiler.trained} steps")
    out.print(f"{config.name}: complete, {last}")
    return 0


def _train_phases(run: Run, profiler: Profiler, out: Any) -> AnyPath:
    """Trains all phases, keeps the ledger, and returns the last checkpoint."""
    peak, previous = peak_flops(), None
    ledger = Ledger(run.workdir / LEDGER_FILE if jax.process_index() == 0 else None)
    try:
        with lost_processes():
            for phase in run.phases:
                previous = train_phase(run, phase, previous, peak, profiler, ledger)
    except Stopped as stopped:
        raise Stopped(f"{run.config.name}: {stopped}") from None
    finally:
        ledger.close()
        if ledger.opened:
            out.print(f"time of this run: {balance(read_ledger(run.workdir / LEDGER_FILE))}")
    return previous


if __name__ == "__main__":
    leave(main())
