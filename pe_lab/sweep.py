"""`python -m pe_lab.sweep --config=RECIPE --grid KEY=VALUE,VALUE --seeds=3`: trains the cells of a grid as runs.

Run it again to continue: cells that are complete are left alone, those that were stopped go on. A grid with other
values adds cells.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from pe_lab.terminal import (
    LiveText,
    argument_parser,
    bounded,
    console,
    leave,
    pass_on_encodings,
    positive,
    stop_while_importing,
    works_on,
)

if __name__ == "__main__":
    stop_while_importing()

    from pe_lab.recipes import refuse_misspelt_keys

    refuse_misspelt_keys()

from pe_lab import storage
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.sweeps import (
    Sweep,
    load_sweep,
    make_sweep,
    parse_axes,
    parse_seeds,
    read_states,
    run_sweep,
    summarize,
)
from pe_lab.lab.sweeps.cells import FILE, MOST_CELLS
from pe_lab.lab.sweeps.results import TRAINING, VALIDATION, shown, write_results
from pe_lab.lab.sweeps.runners import check_stack, make_runner, split_passed_on
from pe_lab.lab.sweeps.running import exit_status, stacking_of, tasks_of
from pe_lab.lab.sweeps.state import Board, cost, counts, failures
from pe_lab.recipes import split_overrides


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    made = argument_parser(
        "sweep",
        "Trains a recipe once for each setting of a grid and each seed, several at once, and compares the settings. "
        "Run it again to continue.",
        "Any key of the recipe can be set for all cells: --config.model.layers=4",
    )
    add = made.add_argument
    add("--config", help="recipe, with an argument after a colon: configs/x.py:quick")
    add(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="a key and its values; :NAME=VALUE,VALUE is an argument of the recipe; repeatable: all combinations",
    )
    add("--seeds", help="how many, or which: 3 is 0,1,2; sets config.seed and config.data.seed")
    add("--workdir", help="where the cells and the results are written; runs/NAME_sweep by default")
    add("--dry-run", action="store_true", help="list the cells and what they cost, and train nothing")
    add("--table", action="store_true", help="write the results of the cells of --workdir now, and train nothing")
    add("--retry", action="store_true", help="train cells again that have failed")
    add(
        "--evaluate",
        nargs="?",
        const="",
        metavar="SUITE,...",
        help="run pe_lab.evaluate after each cell; --evaluate.lengths=1x,2x and others are its options",
    )
    add("--jobs", type=positive, help="cells at once (default: one for each GPU or TPU chip, or two cores)")
    add(
        "--stack",
        type=bounded(int, 2, MOST_CELLS),
        metavar="K",
        help="up to K cells that differ in seeds, data order, learning rates and the like train as one program",
    )
    add("--on", default="local", help="local, slurm (an array; --slurm-time=24:00:00 ...) or ray (--ray-address=...)")
    add("--metric", help="sorts the settings (default: validation_loss)")
    add("--baseline", metavar="KEY=VALUE,...", help="the setting that others are compared with (default: the best)")
    return made


@works_on
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    rest, passed_on = split_passed_on(rest)
    args = parser().parse_args(rest)

    import jax

    from pe_lab.positional.registry import external_files

    # The cells need the devices; this process only plans.
    jax.config.update("jax_platforms", "cpu")
    if args.table:
        return _print_table(args, overrides)
    if not args.config:
        raise ConfigError("--config is missing: which recipe is to be trained? --table needs --workdir alone.")
    evaluation = _evaluation(args.evaluate, passed_on["evaluate."])
    stack = args.stack or 1
    check_stack(stack, args.on)
    runner = make_runner(args.on, args.jobs, passed_on) if not args.dry_run else None
    before = set(external_files())
    sweep = make_sweep(
        args.config,
        parse_axes(args.grid),
        () if args.seeds is None else parse_seeds(args.seeds),
        args.workdir or "",
        overrides,
        evaluation,
    )
    for file in set(external_files()) - before:  # of the recipe: the evaluation of a cell does not read it
        pass_on_encodings(file)
    summarize(sweep, [], baseline=args.baseline)  # refuses a baseline that is none before anything is trained
    losses = (VALIDATION, TRAINING)
    if args.metric and args.metric not in losses and evaluation is None and not storage.exists(sweep.directory / FILE):
        raise ConfigError(f"--metric='{args.metric}': no cell will have it. {did_you_mean(args.metric, losses)}")
    out = console()
    if args.dry_run:
        out.print(cost(sweep, read_states(sweep)))
        if stack > 1:
            out.print(str(stacking_of(sweep, tasks_of(sweep, args.retry), stack)))
        return 0
    out.print(f"{len(sweep.asked)} cells in {sweep.directory}")
    with LiveText(out) as live:
        line = shlex.join(["python", "-m", "pe_lab.sweep", *argv])
        sweep, states, stopped = run_sweep(sweep, runner, args.retry, line, Board(out, live), stack, out.print)
    _print_results(sweep, args)
    for failure in failures(sweep, states):
        out.print(failure)
    status = exit_status(sweep, states, stopped)
    again = {1: "; --retry trains those that have failed again", os.EX_TEMPFAIL: "; the same command continues"}
    out.print(f"{counts(states)}{again.get(status, '')}")
    return status


def _evaluation(suites: str | None, options: dict[str, str]) -> list[str] | None:
    """The options of pe_lab.evaluate; None for no evaluation."""
    if suites is None:
        if options:
            raise ConfigError(f"--evaluate.{next(iter(options))} is an option of --evaluate, which is missing.")
        return None
    if own := {"from", "out", "suite"} & options.keys():
        raise ConfigError(f"--evaluate.{min(own)}: the sweep sets it. Suites are in --evaluate=SUITE,SUITE.")
    from pe_lab.evaluation.command_line import parse_arguments, parse_variants
    from pe_lab.evaluation.suites import parse_suites
    from pe_lab.evaluation.targets import parse_steps
    from pe_lab.evaluation.variants import ALL

    given = [f"--suite={suites}"] if suites else []
    given += [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
    try:
        arguments = parse_arguments(["--from=CELL", *given])
        if suites:
            parse_suites(suites)
        if arguments.variants not in (None, ALL):
            parse_variants(arguments.variants)
        if arguments.steps:
            parse_steps(arguments.steps)
    except ConfigError as error:
        raise ConfigError(f"--evaluate: {error}") from None
    return given


def _print_table(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    if not args.workdir:
        raise ConfigError("--table needs --workdir: which sweep?")
    if args.config or args.grid or args.seeds or overrides:
        raise ConfigError(f"--table reads {FILE} of --workdir: leave --config, --grid, --seeds and --config.KEY out.")
    sweep = load_sweep(storage.path("--workdir", args.workdir))
    out, states = console(), read_states(sweep)
    _print_results(sweep, args)
    for failure in failures(sweep, states):
        out.print(failure)
    out.print(counts(states))
    return exit_status(sweep, states, stopped=False)


def _print_results(sweep: Sweep, args: argparse.Namespace) -> None:
    table = write_results(sweep, args.metric, args.baseline)
    if table.records:
        print(shown(table))
        print(f"Wrote table.csv, cells.csv, table.md, figure.png, figure.svg and report.html in {sweep.directory}")


if __name__ == "__main__":
    leave(main())
