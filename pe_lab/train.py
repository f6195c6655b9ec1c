"""`python -m pe_lab.train --config=configs/x.py`: trains every phase of a recipe, or continues an interrupted run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import INT32
from pe_lab.errors import ConfigError
from pe_lab.recipes import split_overrides
from pe_lab.storage import read_json, write_json
from pe_lab.terminal import argument_parser, bounded, command, leave, stop_while_importing, works_on

if __name__ == "__main__":
    stop_while_importing()


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    parser = argument_parser(
        "train",
        "Trains every phase of a recipe. Run it again to continue an interrupted run.",
        "Any key of the recipe can be set: --config.model.layers=4 --config.phases.0.steps=100",
    )
    parser.add_argument("--config", help="recipe, with an argument after a colon: configs/x.py:quick")
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
    parser.add_argument("--stack", metavar="FILE", help="train the runs of a file as one program, as pe_lab.sweep does")
    return parser


@works_on
def main(argv: Sequence[str]) -> int:
    rest, overrides = split_overrides(argv)
    args = parser().parse_args(rest)
    if args.stack:
        if len(argv) > 1:
            raise ConfigError("--stack=FILE: the file has the options of each run. Leave the others out.")
        return _train_stack(Path(args.stack))
    if not args.config:
        raise ConfigError("--config is missing: which recipe is to be trained?")

    from pe_lab.parallel.stopping import Stopped, stop_requests  # these load JAX
    from pe_lab.training import fit
    from pe_lab.training.ledger import process_age
    from pe_lab.training.profiling import Profiler, parse_steps
    from pe_lab.training.step_call import alone

    _keep_freed_memory()
    profiler = Profiler(parse_steps(args.profile)) if args.profile else Profiler()
    command = shlex.join(["python", "-m", "pe_lab.train", *argv])
    with stop_requests() as stops:
        try:
            how = {"overrides": overrides, "until": args.until, "profiler": profiler}
            alone(fit.run_steps(args.config, args.workdir, stops, **how, command=command, age=process_age()))
        except Stopped as stopped:
            # 75: neither complete nor failed; a launcher runs the same command again.
            print(stopped, flush=True)
            return os.EX_TEMPFAIL
    if profiler.trained < profiler.steps.start:
        print(f"--profile={args.profile}: nothing was traced; this command trained {profiler.trained} steps")
    return 0


def _keep_freed_memory() -> None:
    """Else each step maps its scratch memory anew. Before the first thread, and before JAX starts."""
    from pe_lab.parallel import has_accelerator, keep_freed_memory

    if not has_accelerator():
        keep_freed_memory()


def _train_stack(file: Path) -> int:
    """Trains the runs of a JSON file, `{name: {arguments, log}}`, as one program; returns the highest status.

    `arguments` are those of this command for the run alone, `log` a file that its output is appended to. `FILE.status`
    gets {name: status} of the runs that have ended.
    """
    import jax

    from pe_lab.parallel.stopping import stop_requests
    from pe_lab.training import fit, stack
    from pe_lab.training.ledger import process_age

    _keep_freed_memory()
    runs, statuses, logs = read_json(file), {}, {}
    if not jax.config.jax_compilation_cache_dir:  # the cells have equal programs beside the train step
        jax.config.update("jax_compilation_cache_dir", str(file.parent / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    @contextlib.contextmanager
    def inside(name: str) -> Iterator[None]:
        with contextlib.redirect_stdout(logs[name]), contextlib.redirect_stderr(logs[name]):
            yield

    def ended(name: str, outcome: Any) -> None:
        statuses[name] = _status(outcome)
        write_json(file.with_suffix(".status"), statuses)

    with stop_requests() as stops, contextlib.ExitStack() as opened:
        fit.begin_process(stops)
        if jax.process_count() > 1:
            raise ConfigError("--stack=FILE: a stack is one process. Train runs of several processes alone.")
        steps = {}
        for name, one in runs.items():
            log = open(one["log"], "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            logs[name] = opened.enter_context(log)
            rest, overrides = split_overrides(one["arguments"])
            args = parser().parse_args(rest)
            line = shlex.join(["python", "-m", "pe_lab.train", *one["arguments"]])
            how = {"overrides": overrides, "command": line, "age": process_age(), "stacked": True}
            steps[name] = fit.run_steps(args.config, args.workdir, stops, **how)
        stack.train_together(steps, stops, inside, ended)
    return max(statuses.values())


def _status(outcome: Any) -> int:
    """The status of this command for a run that has returned or raised `outcome`, which is told."""
    from pe_lab.parallel.stopping import Stopped

    def ending(argv: Sequence[str]) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return 0

    if isinstance(outcome, Stopped):
        print(outcome, flush=True)
        return os.EX_TEMPFAIL
    try:
        return command(ending)([])
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    leave(main())
