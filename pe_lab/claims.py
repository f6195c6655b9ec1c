"""`python -m pe_lab.claims NAME`: tests a claim: trains what is missing, measures, and judges with intervals."""

from __future__ import annotations

import argparse
import dataclasses
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
from pe_lab.lab.claims.power import PILOT, POWER_HEADER, power_rows, power_table, seeds_of
from pe_lab.lab.claims.rates import Rates
from pe_lab.lab.claims.reruns import summary
from pe_lab.lab.claims.results import (
    judge_again,
    make_result,
    read_result,
    read_results,
    results_directory,
    values_of,
    verdict_text,
    with_rerun,
    write_result,
)
from pe_lab.lab.claims.running import (
    OutOfTime,
    Stage,
    collect,
    conditions,
    costs,
    failed,
    flops_left,
    make_stages,
    train,
    unfinished,
)
from pe_lab.lab.sweeps import Runner, parse_seeds
from pe_lab.lab.sweeps.cells import MOST_CELLS
from pe_lab.lab.sweeps.runners import check_stack, make_runner, split_passed_on
from pe_lab.lab.sweeps.running import stacking_of, tasks_of
from pe_lab.lab.sweeps.state import Board, planned_texts, short
from pe_lab.recipes import split_overrides
from pe_lab.results.records import mappings

AUTO = "auto"  # of --seeds


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
    add(
        "--seeds",
        help="how many, or which: 3 is 0,1,2 (default 3); auto: as many as show the effects of the criteria with 80%% "
        "power, by the deviations of the last result, or of a pilot of three seeds",
    )
    add(
        "--rerun",
        metavar="ARM",
        help="train this arm and its parents again, for one seed (--seeds=2, is seed 2; default 0), in a directory of "
        "its own, and add what its numbers moved by to the result in --out; give another --workdir on another machine",
    )
    add("--budget", type=duration, help="stop after this time, as in 2h or 30m; the same command continues")
    add("--workdir", help="where the runs are, which claims share (default: runs/claims/SIZE)")
    add(
        "--out",
        help="where results are written (default: --workdir's results; claims/results holds the committed ones)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="list the runs, what they cost, and the seeds that each criterion needs, and train nothing",
    )
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
    add(
        "--why",
        metavar="WHY",
        default="",
        help="why a recipe, measure, evaluation or rule has changed since the last result; its history keeps it",
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
    if args.rerun is not None and len(args.names) != 1:
        raise ConfigError("--rerun is of one claim: python -m pe_lab.claims NAME --rerun=ARM --seeds=0,")
    if not args.names and not args.all:
        out.print(_listed())
        return 0
    if args.names and args.all:
        raise ConfigError("--all is all claims: leave the names out.")
    claims = load_claims(args.names or claim_names())
    root = storage.path("--workdir", args.workdir or f"runs/claims/{args.size}")
    if args.size == "paper":
        claims = [claim.at("paper") for claim in claims if args.names or claim.recipes]
    where = storage.path("--out", args.out or root / "results")
    deadline = time.monotonic() + args.budget if args.budget else None
    if args.rerun is not None:
        return _run_again(claims[0], args, root, where, overrides, passed_on, deadline)
    jobs = [_Job(claim, args, root, where, overrides) for claim in claims]
    jobs.sort(key=lambda one: flops_left(one.plan()))
    stack = args.stack or 1
    check_stack(stack, args.on)
    if args.dry_run:
        for job in jobs:
            out.print(f"{job.claim.name}: {job.claim.sentence}\n{_costs(job.plan())}\n{job.power()}")
            sweeps = [sweep for stage in job.plan() for sweep in stage.parts(job.claim)]
            for sweep in sweeps if stack > 1 else []:
                out.print(str(stacking_of(sweep, tasks_of(sweep, args.retry), stack)))
        return 0
    runner = make_runner(args.on, args.jobs, passed_on)
    storage.check_place("--out", where)  # before what may take days
    line = shlex.join(["python", "-m", "pe_lab.claims", *argv])
    status = 0
    for job in jobs:
        if job.seeds is None:
            pilot = _Job(job.piloted(), args, root, where, overrides, range(PILOT))
            if found := _trained(pilot, runner, line, deadline):
                if found != 1:
                    return found
                status = found
                continue
            job.choose_seeds(power_table(pilot.claim.criteria, collect(pilot.claim, pilot.plan(), out.print)), PILOT)
            out.print(job.power())
        if found := _trained(job, runner, line, deadline):
            if found != 1:
                return found
            status = found
            continue
        out.print(_conclude(job))
    return status


class _Job:
    """One claim of a command, with its seeds, which a pilot may have to choose, and its runs."""

    def __init__(
        self,
        claim: Claim,
        args: argparse.Namespace,
        root: storage.AnyPath,
        where: storage.AnyPath,
        overrides: Mapping[str, str],
        seeds: Sequence[int] | None = None,
    ):
        self.claim, self.args, self.where, self.overrides = claim, args, where, overrides
        # Recipes at paper size are a claim's own, and so are their runs.
        self.directory = root / claim.name if args.size == "paper" else root
        # A history goes on from the committed result, which is beside the claim's file, wherever the runs are.
        before = read_result(claim.name, where) or read_result(claim.name, Path(claim.file).parent / "results")
        self.before = before if before and before["size"] == args.size else None
        self.pilot: list[dict[str, Any]] = []
        self.seeds = seeds
        if seeds is None and args.seeds != AUTO:
            self.seeds = parse_seeds(args.seeds or "3")
        elif seeds is None and self.before:
            table = power_table(claim.criteria, values_of(self.before))
            asked = [(one["text"], one["effect"], one["margin"]) for one in table]
            if asked == [(one["text"], one["effect"], one["margin"]) for one in self.before.get("pilot") or []]:
                self.pilot, self.seeds = self.before["pilot"], self.before["seeds"]  # chosen before
            elif all(one["deviation"] is not None for one in table):
                self.choose_seeds(table, max(self.before["seeds"]) + 1)

    def choose_seeds(self, table: list[dict[str, Any]], first: int) -> None:
        """As many seeds as a pilot asks for, and none of its own.

        With the pilot's, a verdict would lean on the deviation that chose its seeds: it would find a gain that is the
        margin to be larger in up to 5.5 of 100 cases instead of 2.5 (counted, of pilots of three seeds).
        """
        self.pilot = table
        self.seeds = range(first, first + seeds_of(table, self.claim.name))

    def piloted(self) -> Claim:
        """The claim without its grid of rates, as a pilot for the deviation runs it."""
        return dataclasses.replace(self.claim, rates=Rates(apart="a pilot for the deviation"))

    def plan(self) -> list[Stage]:
        """The stages of its runs, of the pilot's seeds where there are no others yet."""
        seeds = range(PILOT) if self.seeds is None else self.seeds
        return make_stages(self.claim, self.args.size, seeds, self.directory, self.overrides)

    def power(self) -> str:
        """The power table for the terminal."""
        known = self.pilot or (power_table(self.claim.criteria, values_of(self.before)) if self.before else [])
        if not known:
            return f"No result tells the deviation yet: --seeds={AUTO} trains a pilot of {PILOT} seeds."
        return table(list(POWER_HEADER), power_rows(known), words=1)


def _trained(job: _Job, runner: Runner, line: str, deadline: float | None) -> int:
    """Trains what is missing of a claim; 0, or the exit status where it did not end: 1 of runs that failed."""
    out, claim = console(), job.claim
    left = sum(len(unfinished(stage)) for stage in job.plan())
    out.print(f"{claim.name}: {claim.sentence} ({left} runs to train in {job.directory})")
    try:
        with LiveText(out) as live:
            how = (Board(out, live), deadline, out.print, job.args.stack or 1)
            states, stopped = train(claim, job.plan, runner, job.args.retry, line, *how)
    except OutOfTime:
        out.print(f"{claim.name}: the budget is spent; the runs have saved, and the same command continues")
        return os.EX_TEMPFAIL
    for state in failed(states):
        log = job.directory / "logs" / f"{state.cell.name}.log"
        out.print(f"FAILED {short(state)}: {state.error} (log: {log}); --retry trains it again")
    return os.EX_TEMPFAIL if stopped else 1 if failed(states) else 0


def _conclude(job: _Job) -> str:
    """Measures, judges, writes result and figure; the text of both for the terminal."""
    claim, args, stages = job.claim, job.args, job.plan()
    values = collect(claim, stages, console().print)
    named = next((one for one in args.names if Path(one).stem == claim.name), claim.name)
    keys = [f"--config.{key}={value}" for key, value in job.overrides.items()]
    line = ["python", "-m", "pe_lab.claims", named, f"--size={args.size}", f"--seeds={args.seeds or 3}", *keys]
    result = make_result(
        claim,
        args.size,
        job.seeds or (),
        values,
        costs(stages),
        redacted(shlex.join(line)),
        conditions(claim, stages),
        before=job.before,
        pilot=job.pilot,
        why=args.why.strip(),
    )
    return _written(result, job.where)


def _written(result: Mapping[str, Any], where: storage.AnyPath) -> str:
    """Writes a result and its figure; both as text for the terminal."""
    path = write_result(result, where)
    name = result["claim"]
    figures = storage.write_files({where / f"{name}.{form}": page.draw(result, form) for form in ("png", "svg")})
    header = ["criterion or precondition", "difference [95% interval]", "outcome"]
    shown = table(header, page.outcome_rows(result), words=1)
    verdict, _, why = verdict_text(result).partition(":")
    words = f"{verdict.upper()}{f': {why.strip()}' if why else ''}"
    fits = "".join(f"\n\n{table(fit.header, fit.rows, words=1)}" for fit in page.fit_tables(result))
    more = f"{page.covered(result)}\n{summary(result)}{fits}"
    return f"{shown}\n{more}\n{name}: {words}. {path} and {figures[0].name}"


def _run_again(
    claim: Claim,
    args: argparse.Namespace,
    root: storage.AnyPath,
    where: storage.AnyPath,
    overrides: Mapping[str, str],
    passed_on: Mapping[str, Mapping[str, str]],
    deadline: float | None,
) -> int:
    """Trains one arm and seed again, in a directory for each time, and adds the re-run to the result of the claim."""
    seeds = parse_seeds(args.seeds or "0,")
    if len(seeds) != 1:
        raise ConfigError("--rerun is of one seed: --seeds=2, is seed 2.")
    (seed,) = seeds
    job = _Job(claim.only(args.rerun), args, root, where, overrides, seeds)
    if job.before is None:
        raise ConfigError(
            f"'{where}' has no result of '{claim.name}' at this size to compare a re-run with. Run it first."
        )
    times = [(one["arm"], one["seed"]) for one in mappings(job.before.get("reruns")) if "claim" not in one]
    job.directory /= f"reruns/{args.rerun}__seed={seed}__{1 + times.count((args.rerun, seed))}"
    if args.dry_run:
        console().print(_costs(job.plan()))
        return 0
    line = shlex.join(["python", "-m", "pe_lab.claims", claim.name, f"--rerun={args.rerun}", f"--seeds={seed},"])
    if status := _trained(job, make_runner(args.on, args.jobs, passed_on), line, deadline):
        return status
    numbers = {m: each[seed] for m, each in collect(job.claim, job.plan(), console().print)[args.rerun].items()}
    console().print(_written(with_rerun(claim, job.before, args.rerun, seed, numbers), where))
    return 0


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
    found = {one["claim"]: verdict_text(one) for one in read_results()}
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
        print(f"{claim.name}: {before['verdict']} -> {verdict_text(result)}")
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
        storage.write_file(path, page.with_generated(before, results, figures))
        print(f"Wrote {path}: {len(results)} claims.")
    if args.report:
        path = storage.write_file(Path(args.report), page.html_page(results))
        print(f"Wrote {path}; open it in a browser.")
    return 0


if __name__ == "__main__":
    leave(main())
