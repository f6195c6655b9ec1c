"""`python -m pe_lab.claims NAME`: tests a claim: trains what is missing, measures, and judges with intervals."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.terminal import (
    LiveText,
    argument_parser,
    bounded,
    console,
    leave,
    positive,
    stop_while_importing,
    table,
    works_on,
)

if __name__ == "__main__":
    stop_while_importing()

from pe_lab import storage
from pe_lab.errors import ConfigError, redacted
from pe_lab.lab.claims import page
from pe_lab.lab.claims.claim import SIZES, Claim, claim_names, load_claim, load_claims
from pe_lab.lab.claims.results import (
    judge_again,
    make_result,
    read_result,
    read_results,
    results_directory,
    write_result,
)
from pe_lab.lab.claims.running import (
    OutOfTime,
    Stage,
    collect,
    costs,
    failed,
    flops_left,
    make_stages,
    train,
    unfinished,
)
from pe_lab.lab.sweeps import parse_seeds
from pe_lab.lab.sweeps.cells import MOST_CELLS
from pe_lab.lab.sweeps.runners import check_stack, make_runner, split_passed_on
from pe_lab.lab.sweeps.running import stacking_of, tasks_of
from pe_lab.lab.sweeps.state import Board, planned_texts, short
from pe_lab.recipes import split_overrides


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    made = argument_parser(
        "claims",
        "Tests a claim: trains the runs of claims/NAME.py that are missing, evaluates them, and writes a table, a "
        "figure and a verdict. Run it again to continue. Without a name it lists the claims.",
        "Any key of all recipes can be set: --config.phases.0.steps=100",
    )
    add = made.add_argument
    add("names", nargs="*", metavar="NAME", help="of claims/NAME.py, or a file of your own, PATH.py")
    add("--all", action="store_true", help="all claims, those with the fewest FLOPs left first")
    add("--size", default="laptop", choices=SIZES, help="laptop (default), paper, or quick: to see that it works")
    add("--seeds", help="how many, or which: 3 is 0,1,2 (default 3)")
    add("--budget", type=duration, help="stop after this time, as in 2h or 30m; the same command continues")
    add("--workdir", help="where the runs are, which claims share (default: runs/claims/SIZE)")
    add(
        "--out",
        help="where results are written (default: --workdir's results; claims/results holds the committed ones)",
    )
    add("--dry-run", action="store_true", help="list the runs and what they cost, and train nothing")
    add("--retry", action="store_true", help="train runs again that have failed")
    add("--jobs", type=positive, help="runs at once (default: one for each GPU or TPU chip, or two cores)")
    add(
        "--stack",
        type=bounded(int, 2, MOST_CELLS),
        metavar="K",
        help="up to K runs that differ in seeds, data order, learning rates and the like train as one program",
    )
    add("--on", default="local", help="local, slurm (an array; --slurm-time=24:00:00 ...) or ray (--ray-address=...)")
    add(
        "--write",
        metavar="PAGE.md",
        help="write the table of all results in --out to a page, as docs/claims.md, and exit",
    )
    add(
        "--judge",
        metavar="WHY",
        help="judge results in --out again, of the names or all, by the rules that the claims have now, from the "
        "numbers that the results have; WHY goes into their history",
    )
    add("--report", metavar="PAGE.html", help="write all results in --out as one HTML page, and exit")
    return made


def duration(text: str) -> float:
    """The seconds of `2h`, `30m` or `90s`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([hms])", text.strip())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write it as 2h, 30m or 90s")
    return float(found[1]) * {"h": 3600.0, "m": 60.0, "s": 1.0}[found[2]]


@works_on
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    rest, passed_on = split_passed_on(rest)
    args = parser().parse_args(rest)

    import jax

    jax.config.update("jax_platforms", "cpu")  # the runs need the devices; this process only plans and reads
    out = console()
    if passed_on["evaluate."]:
        option = next(iter(passed_on["evaluate."]))
        raise ConfigError(f"--evaluate.{option}: a claim's file says how its runs are evaluated.")
    if args.write or args.report:
        if args.names or args.all:
            raise ConfigError("--write and --report take all results that are in --out: leave the names out.")
        return _write_pages(args)
    if args.judge is not None:
        return _judge_again(args)
    if not args.names and not args.all:
        out.print(_listed())
        return 0
    if args.names and args.all:
        raise ConfigError("--all is all claims: leave the names out.")
    claims = load_claims(args.names or claim_names())
    seeds = parse_seeds(args.seeds or "3")
    root = storage.path("--workdir", args.workdir or f"runs/claims/{args.size}")
    if args.size == "paper":
        claims = [claim.at("paper") for claim in claims if args.names or claim.recipes]
    planned = []
    for claim in claims:
        # Recipes at paper size are a claim's own, and so are their runs.
        directory = root / claim.name if args.size == "paper" else root
        plan = functools.partial(make_stages, claim, args.size, seeds, directory, overrides)
        planned.append((claim, directory, plan, plan()))
    planned.sort(key=lambda one: flops_left(one[3]))
    stack = args.stack or 1
    check_stack(stack, args.on)
    if args.dry_run:
        for claim, _, _, stages in planned:
            out.print(f"{claim.name}: {claim.sentence}\n{_costs(stages)}")
            sweeps = [sweep for stage in stages for sweep in stage.parts(claim)]
            for sweep in sweeps if stack > 1 else []:
                out.print(str(stacking_of(sweep, tasks_of(sweep, args.retry), stack)))
        return 0
    runner = make_runner(args.on, args.jobs, passed_on)
    where = storage.path("--out", args.out or root / "results")
    storage.check_place("--out", where)  # before what may take days
    deadline = time.monotonic() + args.budget if args.budget else None
    status = 0
    for claim, directory, plan, stages in planned:
        left = sum(len(unfinished(stage)) for stage in stages)
        out.print(f"{claim.name}: {claim.sentence} ({left} runs to train in {directory})")
        try:
            with LiveText(out) as live:
                line = shlex.join(["python", "-m", "pe_lab.claims", *argv])
                states, stopped = train(
                    claim, plan, runner, args.retry, line, Board(out, live), deadline, out.print, stack
                )
        except OutOfTime:
            out.print(f"{claim.name}: the budget is spent; the runs have saved, and the same command continues")
            return os.EX_TEMPFAIL
        for state in failed(states):
            log = directory / "logs" / f"{state.cell.name}.log"
            out.print(f"FAILED {short(state)}: {state.error} (log: {log}); --retry trains it again")
        if stopped:
            return os.EX_TEMPFAIL
        if failed(states):
            status = 1
            continue
        out.print(_conclude(claim, plan(), args, seeds, where, overrides))
    return status


def _conclude(
    claim: Claim,
    stages: Sequence[Stage],
    args: argparse.Namespace,
    seeds: Sequence[int],
    where: storage.AnyPath,
    overrides: Mapping[str, str],
) -> str:
    """Measures, judges, writes result and figure; the text of both for the terminal."""
    values = collect(claim, stages, console().print)
    named = next((one for one in args.names if Path(one).stem == claim.name), claim.name)
    keys = [f"--config.{key}={value}" for key, value in overrides.items()]
    line = ["python", "-m", "pe_lab.claims", named, f"--size={args.size}", f"--seeds={args.seeds or 3}", *keys]
    # A history goes on from the committed result, which is beside the claim's file, wherever the runs are.
    before = read_result(claim.name, where) or read_result(claim.name, Path(claim.file).parent / "results")
    before = before if before and before["size"] == args.size else None
    result = make_result(claim, args.size, seeds, values, costs(stages), redacted(shlex.join(line)), before)
    path = write_result(result, where)
    figures = storage.write_files({where / f"{claim.name}.{form}": page.draw(result, form) for form in ("png", "svg")})
    header = ["criterion or precondition", "difference [95% interval]", "outcome"]
    shown = table(header, page.outcome_rows(result), words=1)
    return f"{shown}\n{claim.name}: {result['verdict'].upper()}. {path} and {figures[0].name}"


def _costs(stages: Sequence[Stage]) -> str:
    known = costs(stages)
    rows = []
    for stage in stages:
        left = {cell.name for cell in unfinished(stage)}
        for arm in dict.fromkeys(cell.setting["arm"] for cell in stage.sweep.asked):
            cells = [cell for cell in stage.sweep.asked if cell.setting["arm"] == arm]
            done = sum(cell.name not in left for cell in cells)
            rows.append([arm, f"{done} of {len(cells)}", *planned_texts(known[arm]), cells[0].reference])
        for arm in dict.fromkeys(arm for arm, _ in stage.edits):
            after = f" after surgery {arm.surgery}" if arm.surgery else ""
            rows.append([arm.name, "0", "?", "?", "?", f"{arm.recipe}{after}"])
    return table(["arm", "trained", "parameters", "tokens", "FLOPs a seed", "recipe"], rows, words=1)


def _listed() -> str:
    """The claims there are, with their sentences and committed verdicts."""
    names = claim_names()
    found = {one["claim"]: one["verdict"] for one in read_results()}
    rows = [[claim.name, claim.paper, found.get(claim.name, "not run"), claim.sentence] for claim in load_claims(names)]
    return table(["claim", "paper", "verdict", "sentence"], rows, words=4)


def _judge_again(args: argparse.Namespace) -> int:
    if not args.judge.strip():
        raise ConfigError("--judge: say why the rules have changed; the history of each result keeps it.")
    where, found = _results(args)
    results = {result["claim"]: result for result in found}
    for name in args.names or results:
        claim = load_claim(name)
        if claim.name not in results:
            raise ConfigError(f"'{where}' has no result of '{claim.name}'. Run the claim with --out={where} first.")
        before = results[claim.name]
        others = [one for one in results.values() if one is not before]
        result = judge_again(claim.at(before["size"]), before, others, args.judge.strip())
        results[claim.name] = result
        write_result(result, where)
        storage.write_file(where / f"{claim.name}.png", page.draw(result, "png"))
        print(f"{claim.name}: {before['verdict']} -> {result['verdict']}")
    return 0


def _results(args: argparse.Namespace) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of --out and its results."""
    where = Path(args.out) if args.out else results_directory()
    results = read_results(where)
    if not results:
        raise ConfigError(f"'{where}' has no results. Run a claim with --out={where} first.")
    return where, results


def _write_pages(args: argparse.Namespace) -> int:
    where, results = _results(args)
    if args.write:
        path = Path(args.write)
        figures = os.path.relpath(where, path.parent)
        before = path.read_text() if path.is_file() else "# Claims\n"
        storage.write_file(path, page.with_generated(before, page.markdown(results, figures)))
        print(f"Wrote {path}: {len(results)} claims.")
    if args.report:
        path = storage.write_file(Path(args.report), page.html_page(results))
        print(f"Wrote {path}; open it in a browser.")
    return 0


if __name__ == "__main__":
    leave(main())
