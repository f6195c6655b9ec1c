"""`python -m pe_lab.extend --from=CHECKPOINT --length=4x`: a longer context, by the best method for this budget.

It compares methods without training, trains the best few at equal FLOPs, measures them, and answers on a page which to
take. Run it again to continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pe_lab.terminal import LiveText, argument_parser, bounded, console, leave, positive, stop_while_importing, works_on

if __name__ == "__main__":
    stop_while_importing()

    from pe_lab.recipes import refuse_misspelt_keys

    refuse_misspelt_keys()

from pe_lab import storage
from pe_lab.errors import ConfigError, UnsupportedError, UserError, did_you_mean
from pe_lab.lab.extend.budget import amount

if TYPE_CHECKING:
    from pe_lab.evaluation.variants import Subject
    from pe_lab.lab.extend.extension import ExtensionPlan

PARTS = ("screen", "train", "evaluate", "suites", "answer")


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    made = argument_parser(
        "extend",
        "A longer context for a checkpoint: methods are compared without training, the best few are trained at equal "
        "FLOPs, and a page says which to take, by how much, and at what price. Run it again to continue.",
        "Any key of the runs can be set (--config.mesh.context=8), and any option of suites (--evaluate.documents=32)",
    )
    add = made.add_argument
    share, rate = bounded(float, 0.0, 1.0), bounded(float, 1e-12, 1e3)
    add("--from", dest="source", help="a run, a phase, a checkpoint, hf:DIR or gguf:FILE")
    add("--length", default="4x", help="the target, such as 4x, 32k or 131072 (default: 4x)")
    add(
        "--data",
        help="text to train and to measure on: a glob of .jsonl, .parquet or .txt files, a source as in recipes, or a "
        "directory of pe_lab.prepare (default: the checkpoint's own)",
    )
    add("--workdir", help="where everything is kept (default: runs/NAME_LENGTH)")
    add(
        "--tokens",
        type=amount,
        help="that the arm without any change is trained on; the others spend as many FLOPs (default: 50M)",
    )
    add(
        "--budget",
        help="of all arms together instead: tokens, as 300M; FLOPs, as 2e18flops; or time on this machine, as 3h",
    )
    add("--methods", help="to compare without training (default: all): unchanged, pi, ntk, yarn, ...")
    add("--arms", help="to train (default: unchanged, yarn, the best others, drope, slow_half)")
    add(
        "--best",
        type=bounded(int, 0, 100),
        default=2,
        help="how many others are trained, the first in the screening (2)",
    )
    add(
        "--suites",
        metavar="SUITE,...",
        help="to measure the trained arms with too, at all lengths, such as ruler or lm_eval:TASK (default: none); "
        "--evaluate.samples=20 and others are their options",
    )
    add("--seeds", default="1", help="of each arm: how many, or which: 3 is 0,1,2 (default: 1)")
    add("--batch", type=amount, help="tokens a step (default: those of the checkpoint's run)")
    add("--rate", type=rate, help="learning rate (default: a tenth of the checkpoint's peak, or 3e-5)")
    add("--recalibration-rate", type=rate, help="of arms that lose an encoding (default: ten times --rate)")
    add("--long", type=share, default=0.5, help="share of the text that is of long documents (0.5)")
    add("--stages", type=positive, default=1, help="of growing lengths up to the target (1)")
    teach = ("none", "logits", "hidden")
    add("--distill", default="none", choices=teach, help="what the checkpoint teaches arms that lose an encoding")
    add("--population", type=bounded(int, 0, 2**16), help="candidates of the search (64; 0: no search)")
    add("--iterations", type=bounded(int, 0, 2**16), help="generations after the first (40)")
    add("--search-sequences", type=positive, default=4, help="sequences that a candidate is measured on (4)")
    add(
        "--export",
        metavar="FORM,...",
        help="hf, gguf or both: export best/ too; what cannot be is told before training",
    )
    add("--no-training", action="store_true", help="compare without training, and stop")
    add("--only", choices=PARTS, help="this part alone, of a command whose earlier parts are done")
    add("--dry-run", action="store_true", help="print the plan with its cost, and do nothing")
    add("--retry", action="store_true", help="train runs again that have failed")
    add("--jobs", type=positive, help="runs at once (default: one for each GPU or TPU chip, or two cores)")
    add("--on", default="local", help="where runs are trained: local, slurm (--slurm-time=24:00:00 ...) or ray")
    return made


@works_on
def main(argv: Sequence[str]) -> int:
    from pe_lab.lab.sweeps.runners import make_runner, split_passed_on
    from pe_lab.recipes import split_overrides

    rest, overrides = split_overrides(argv)
    rest, passed_on = split_passed_on(rest)
    args = parser().parse_args(rest)
    if not args.source:
        raise ConfigError("--from is missing: which checkpoint is to get a longer context?")
    if args.only not in ("screen", "evaluate"):
        import jax

        # Other parts need the devices, in processes of their own.
        jax.config.update("jax_platforms", "cpu")
    from pe_lab.lab.extend import extension
    from pe_lab.lab.extend.methods import parse_methods

    subject = extension.described(args.source)
    plan = make_plan(args, subject, overrides, passed_on["evaluate."])
    extension.check(plan, subject)
    check_measured(plan, subject, args.suites, passed_on["evaluate."])
    out = console()
    named = [key for given in (args.methods, args.arms) if given for key in parse_methods(given)]
    plan = without_search(plan, subject, named, out)
    plan = without_unexportable(plan, subject, named, out)
    asked = _asked(args, passed_on["evaluate."])
    extension.check_plan(plan.directory, asked)
    if plan.training is not None:
        extension.check_training(plan, subject)
        make_runner(args.on, args.jobs, passed_on)
    elif args.only not in (None, "screen"):
        raise ConfigError(f"--no-training trains nothing, so that --only={args.only} has nothing to do.")
    if args.dry_run:
        _print_plan(plan, subject, out)
        return 0
    extension.write_plan(plan.directory, asked, _budget(args, plan))
    line = shlex.join(["python", "-m", "pe_lab.extend", *argv])
    for part in (args.only,) if args.only else PARTS:
        if part in ("screen", "evaluate") and args.only is None:
            status = _stoppable([sys.executable, "-m", "pe_lab.extend", *argv, f"--only={part}"])
        else:
            status = _run_part(part, plan, subject, args, passed_on, line, out)
        if status:
            return status
        if part == "screen" and plan.training is None:
            return 0
    return 0


def _stoppable(command: Sequence[str]) -> int:
    """Runs a part that needs the devices in a process of its own, so that they are free for the runs afterwards.

    A request to stop is passed on; what was measured is kept, and the status is that of a stopped run.

    Raises:
      UserError: something else has killed it.
    """
    process = subprocess.Popen(command)
    requests: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        requests.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status < 0 and not requests:
        raise UserError(
            f"'{shlex.join(command[1:3])}' was killed by signal {-status} (9: often for memory). What it measured is "
            "kept; run the command again to continue."
        )
    return os.EX_TEMPFAIL if requests else status


def make_plan(
    args: argparse.Namespace, subject: Subject, overrides: Mapping[str, str], options: Mapping[str, str]
) -> ExtensionPlan:
    """The plan that a command line asks for; raises `ConfigError` for what contradicts the checkpoint."""
    from pe_lab.evaluation.command_line import parse_length
    from pe_lab.evaluation.suites import check_options
    from pe_lab.lab.extend.arms import TrainingSettings, flops_per_token
    from pe_lab.lab.extend.best import parse_forms
    from pe_lab.lab.extend.budget import TOKENS, tokens_of
    from pe_lab.lab.extend.extension import ExtensionPlan, data_of, known_budget
    from pe_lab.lab.extend.methods import SEARCHED, parse_methods
    from pe_lab.lab.extend.search import SearchSettings
    from pe_lab.lab.sweeps import parse_seeds
    from pe_lab.recipes import name_of

    target = parse_length("--length", args.length, subject.training_length)
    data = data_of(args.data, subject)
    given = {name.replace("-", "_"): value or True for name, value in options.items()}
    check_options(given)
    measured = {"documents": 16, "windows": 64, "tokens": 4 * target, "fit_tokens": 2 * target} | given
    searches = args.population != 0
    methods = tuple(key for key in parse_methods(args.methods) if searches or key != SEARCHED)
    arms = parse_methods(args.arms, "--arms") if args.arms else ()
    for key in arms:
        if key == SEARCHED and not searches:
            raise ConfigError("--arms=searched needs a search, and --population=0 has none.")
    given_sizes = {"population": args.population, "iterations": args.iterations}
    sizes = {key: value for key, value in given_sizes.items() if value is not None}
    seeds = tuple(parse_seeds(args.seeds))
    if args.budget and args.tokens:
        raise ConfigError("--tokens are an arm's, and --budget is that of all arms: give one of them.")
    if target % 2 ** (args.stages - 1):
        raise ConfigError(f"--stages={args.stages}: {target:,} tokens cannot be halved {args.stages - 1} times.")
    where = storage.path("--workdir", args.workdir or f"runs/{name_of(args.source)}_{target}")
    tokens = args.tokens or TOKENS
    if args.budget:
        each = flops_per_token(subject, subject.lm.layers, target, args.stages)
        runs = arm_count(arms, args.best) * len(seeds)
        tokens = known_budget(where, args.budget, runs) or tokens_of(args.budget, each, runs)
    training = None
    if not args.no_training:
        training = TrainingSettings(
            checkpoint=args.source,
            data=data,
            length=target,
            tokens=tokens,
            batch=args.batch or 0,
            rate=args.rate or 0.0,
            recalibration_rate=args.recalibration_rate or 0.0,
            long=args.long,
            stages=args.stages,
            distill=args.distill,
            overrides=dict(overrides),
        )
    elif args.arms or args.budget or args.tokens:
        raise ConfigError("--no-training trains nothing: leave --arms, --tokens and --budget out.")
    return ExtensionPlan(
        source=args.source,
        target=target,
        methods=methods,
        arms=arms,
        train_best=args.best,
        training=training,
        seeds=seeds,
        search=SearchSettings(**sizes) if SEARCHED in (*methods, *arms) else None,
        search_sequences=args.search_sequences,
        options=measured,
        data=data,
        directory=where,
        suites=suites_of(args.suites, options),
        export=parse_forms(args.export),
    )


def arm_count(arms: Sequence[str], best: int) -> int:
    """How many arms are trained, at most."""
    from pe_lab.lab.extend.extension import ALWAYS, FORMS

    return len(arms) or len((*ALWAYS, *FORMS)) + best


def suites_of(text: str | None, options: Mapping[str, str]) -> tuple[str, ...]:
    """The options of `pe_lab.evaluate` for `--suites`; `ConfigError` for one that there is not or that has no score."""
    from pe_lab.evaluation.suites import SUITES, parse_suites

    if not text:
        return ()
    for name in parse_suites(text):
        if "score" not in {metric.key for metric in SUITES[name].metrics}:
            with_score = [one for one, suite in SUITES.items() if "score" in {metric.key for metric in suite.metrics}]
            raise ConfigError(f"--suites: {name} has no score. Those that have one: {', '.join(with_score)}.")
    return (f"--suite={text}", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items()))


def check_measured(plan: ExtensionPlan, subject: Subject, suites: str | None, options: Mapping[str, str]) -> None:
    """Raises `ConfigError` for an option (`--evaluate.NAME`) of suites that this command does not measure."""
    from pe_lab.evaluation.suite import options_of
    from pe_lab.evaluation.suites import SUITES, parse_suites
    from pe_lab.lab.extend.extension import lengths_of
    from pe_lab.lab.extend.screening import suites_for

    scored = suites_for(plan.data, min(lengths_of(plan, subject)))
    measured = dict.fromkeys([*scored, "beta", *(parse_suites(suites) if suites else ())])
    used = [name.replace("_", "-") for name in options_of([SUITES[name] for name in measured])]
    for name in options:
        if (given := name.replace("_", "-")) not in used:
            sharing = options_of(SUITES.values())[name.replace("-", "_")][1]
            raise ConfigError(
                f"--evaluate.{name} is an option of {', '.join(suite.name for suite in sharing)}, but this command "
                f"measures {', '.join(measured)}. {did_you_mean(given, used)}"
            )


def _asked(args: argparse.Namespace, options: Mapping[str, str]) -> dict[str, Any]:
    """What all measurements depend on, for `extend.json`."""
    from pe_lab.evaluation.suite import options_of
    from pe_lab.evaluation.suites import SUITES

    scored = options_of([SUITES[name] for name in ("long_range", "needles", "passkeys", "beta")])
    measured = {name: value for name, value in options.items() if name.replace("-", "_") in scored}
    return {"source": args.source, "length": args.length, "data": args.data, "evaluate": measured}


def _budget(args: argparse.Namespace, plan: ExtensionPlan) -> dict[str, Any]:
    """What a budget is for this command, for `extend.json`; {} without one."""
    if not args.budget or plan.training is None:
        return {}
    return {
        "text": args.budget,
        "runs": arm_count(plan.arms, plan.train_best) * len(plan.seeds),
        "tokens": plan.training.tokens,
    }


def _print_plan(plan: ExtensionPlan, subject: Subject, out: Any) -> None:
    """Prints what would be done, with its cost."""
    from pe_lab.evaluation.suite import read_settings
    from pe_lab.evaluation.suites import suite_of
    from pe_lab.lab.extend.arms import flops_per_token, plan_arms
    from pe_lab.lab.extend.extension import ALWAYS, FORMS, expected, lengths_of
    from pe_lab.lab.extend.methods import METHODS, SEARCHED, distinct
    from pe_lab.lab.extend.page import plan_rows
    from pe_lab.lab.extend.screening import suites_for
    from pe_lab.terminal import table

    lengths = lengths_of(plan, subject)
    suites = [suite_of(name) for name in suites_for(plan.data, min(lengths))]

    def cost(n: int) -> float:
        """FLOPs that measure one method at a length, with the fit of its scale."""
        fitted = [suite_of("beta")] if n > subject.training_length else []
        read = sum(suite.cost(read_settings(suite, plan.options), n) for suite in [*suites, *fitted])
        return read * flops_per_token(subject, subject.lm.layers, n) / 3

    shown = ", ".join(f"{n:,}" for n in lengths)
    flops = len(plan.methods) * sum(map(cost, lengths))
    out.print(f"Without training: {len(plan.methods)} methods at {shown} tokens, about {flops:.1e} FLOPs.")
    searched = 0.0
    if plan.search is not None:
        forward = flops_per_token(subject, subject.lm.layers, plan.target) / 3
        searched = plan.search.measurements * 2 * plan.search_sequences * plan.target * forward
        out.print(f"Search: {plan.search.measurements:,} candidates, about {searched:.1e} FLOPs.")
    if plan.training is None:
        return
    chosen, impossible = expected(plan, subject, plan.arms or (*ALWAYS, *FORMS))
    chosen, same = distinct(chosen)
    arms, left_out = plan_arms(chosen, subject, plan.training, {SEARCHED: searched})
    out.print(table(*plan_rows(arms)))
    for key, reason in {**impossible, **same, **left_out}.items():
        out.print(f"{METHODS[key].name} is not trained: {reason}.")
    if not plan.arms:
        out.print(f"And the best {plan.train_best} of the screening.")
    count = (len(arms) + (0 if plan.arms else plan.train_best)) * len(plan.seeds)
    total = sum(arm.flops for arm in arms) / max(len(arms), 1) * count
    out.print(f"{count} runs, {total:.2e} FLOPs of training in all.")
    measured = count * sum(map(cost, (*lengths, 2 * plan.target)))
    out.print(f"Evaluation: at most {2 * plan.target:,} tokens, about {measured:.1e} FLOPs.")


def _run_part(
    part: str,
    plan: ExtensionPlan,
    subject: Subject,
    args: argparse.Namespace,
    passed_on: Mapping[str, Mapping[str, str]],
    line: str,
    out: Any,
) -> int:
    from pe_lab.lab.extend import extension
    from pe_lab.lab.extend.best import write_best
    from pe_lab.lab.extend.page import plan_rows
    from pe_lab.lab.extend.screening import text_rows
    from pe_lab.lab.sweeps.runners import make_runner
    from pe_lab.lab.sweeps.state import Board, short
    from pe_lab.terminal import table

    def show(text: str) -> None:
        print(text, flush=True)

    if part == "screen":
        screened = extension.screen_methods(plan, show)
        out.print(table(*text_rows(screened.screening)))
    elif part == "train":
        arms = extension.make_arms(plan, subject, extension.read_screened(plan), show)
        out.print(table(*plan_rows(arms)))
        runner = make_runner(args.on, args.jobs, passed_on)
        with LiveText(out) as live:
            states, stopped = extension.train_arms(plan, arms, runner, args.retry, line, Board(out, live))
        if stopped:
            return os.EX_TEMPFAIL
        for state in extension.failed(states):
            log = plan.directory / "arms" / "logs" / f"{state.cell.name}.log"
            out.print(f"FAILED {short(state)}: {state.error} (log: {log}); --retry trains it again")
        return 1 if extension.failed(states) else 0
    elif part == "evaluate":
        extension.evaluate_arms(plan, show)
    elif part == "suites":
        for command in extension.suite_commands(plan, subject):
            if status := _stoppable([sys.executable, *command]):
                return status
    else:
        answer = extension.read_answer(plan, subject)
        extension.write_answer(plan, answer, extension.read_screened(plan).screening, line)
        write_best(plan, show)
    return 0


def without_search(plan: ExtensionPlan, subject: Subject, named: Sequence[str], out: Any) -> ExtensionPlan:
    """The plan without a search where the checkpoint allows none.

    Raises:
      ConfigError: so, and the command line names it.
    """
    from pe_lab.lab.extend.methods import SEARCHED
    from pe_lab.lab.extend.search import search_space

    if plan.search is None:
        return plan
    try:
        search_space(subject, plan.target)
        return plan
    except ConfigError as error:
        if SEARCHED in named:
            raise
        out.print(f"searched left out: {error}")
    methods = tuple(key for key in plan.methods if key != SEARCHED)
    return dataclasses.replace(plan, methods=methods, search=None)


def without_unexportable(plan: ExtensionPlan, subject: Subject, named: Sequence[str], out: Any) -> ExtensionPlan:
    """The plan without the methods that cannot be exported, as far as that is known before the screening.

    Raises:
      UnsupportedError: the command line names one of them.
    """
    from pe_lab.lab.extend.arms import not_exportable
    from pe_lab.lab.extend.extension import ALWAYS, FORMS, expected
    from pe_lab.lab.extend.methods import METHODS

    keys = tuple(dict.fromkeys((*plan.methods, *plan.arms, *ALWAYS, *FORMS)))
    reasons = not_exportable(plan.source, plan.target, expected(plan, subject, keys)[0], plan.export)
    for key, reason in reasons.items():
        if key in named:
            raise UnsupportedError(f"--export: {METHODS[key].name}: {reason}.")
        out.print(f"{METHODS[key].name} left out: {reason}.")
    methods = tuple(key for key in plan.methods if key not in reasons)
    return dataclasses.replace(plan, methods=methods, left_out=tuple(reasons))


if __name__ == "__main__":
    leave(main())
