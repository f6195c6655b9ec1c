"""`python -m pe_lab.train --config=configs/x.py`: trains every phase of a recipe, or continues an interrupted run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from pe_lab.config import INT32
from pe_lab.recipes import split_overrides
from pe_lab.terminal import argument_parser, bounded, leave, stop_while_importing, works_on

if __name__ == "__main__":
    stop_while_importing()


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
        "--until",
        type=bounded(int, 1, INT32),
        default=0,
        metavar="STEPS",
        help="train the last phase of a run to so many steps in all, with its optimizer's state; the recipe's "
        "optimizer.on_prolong says what the learning rate does",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="trace these of the steps that this command trains for XProf, as in 10:13; the first one compiles",
    )
    return parser


@works_on
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)

    from pe_lab.parallel.stopping import Stopped, stop_requests  # these load JAX
    from pe_lab.training import fit
    from pe_lab.training.ledger import process_age
    from pe_lab.training.profiling import Profiler, parse_steps

    profiler = Profiler(parse_steps(args.profile)) if args.profile else Profiler()
    command = shlex.join(["python", "-m", "pe_lab.train", *argv])
    with stop_requests() as stops:
        try:
            how = {"overrides": overrides, "until": args.until, "profiler": profiler}
            fit.train_run(args.config, args.workdir, stops, **how, command=command, age=process_age())
        except Stopped as stopped:
            # 75: neither complete nor failed; a launcher runs the same command again.
            print(stopped, flush=True)
            return os.EX_TEMPFAIL
    if profiler.trained < profiler.steps.start:
        print(f"--profile={args.profile}: nothing was traced; this command trained {profiler.trained} steps")
    return 0


if __name__ == "__main__":
    leave(main())
