"""Training from a recipe to the last checkpoint: `pe_lab.fit`, and what `python -m pe_lab.train` does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pe_lab.checkpoints.locating import DIRECTORY, steps_in
from pe_lab.config import Config, from_dict
from pe_lab.errors import ConfigError, UserError
from pe_lab.identity import LEASE_FILE, check_workdir, saved_config, write_run
from pe_lab.output import tell_at_once
from pe_lab.parallel import all_values, start_processes
from pe_lab.parallel.stopping import Interrupts, Stopped, StopRequests, lost_processes, stop_requests, watch_maintenance
from pe_lab.recipes import Recipe, inherit, read_recipe, with_prolonged, workdir_of
from pe_lab.storage import AnyPath, LeaseTaken, lease
from pe_lab.storage.run_files import LEDGER_FILE
from pe_lab.terminal import console, waiting
from pe_lab.training.ledger import Ledger, balance, read_ledger
from pe_lab.training.loop import train_phase
from pe_lab.training.plan import plan_here, prolong
from pe_lab.training.profiling import Profiler
from pe_lab.training.run import Run, open_run
from pe_lab.training.step_call import Steps, alone


def fit(
    config: Recipe,
    workdir: str | AnyPath | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    until: int = 0,
) -> Run:
    """Trains every phase of a recipe, or continues a run that was interrupted; as `python -m pe_lab.train` does.

    The first Ctrl-C (in a notebook: interrupt) saves a checkpoint after the step under way, and raises
    `KeyboardInterrupt`; the second one raises it at once. The same call continues.

    Args:
      config: a recipe (`configs/x.py`, with an argument after a colon), the `ConfigDict` of one, or a `Config`.
      workdir: where the run is written; `runs/NAME` by default.
      overrides: `{"model.layers": 4, "phases.0.steps": 100}`.
      until: the steps in all of the last phase of a run that has begun, see docs/recipes.md; 0: those of the recipe.

    Returns:
      The run: `run.language_model()`, `run.metrics()`, `run.plan`, `run.phases`.

    Raises:
      UserError: the recipe, its data or a checkpoint is wrong, or does not fit the devices or the workdir.
      TrainingDiverged: the loss is not finite, or skips and rewinds do not help.
      SilentCorruption: a gradient that was computed twice differs.
      SaveFailed: a checkpoint could not be written.
    """
    with stop_requests(Interrupts) as stops:
        return alone(run_steps(config, workdir, stops, overrides=overrides, until=until, command="pe_lab.fit"))


def run_steps(
    recipe: Recipe,
    workdir: str | AnyPath | None,
    stops: StopRequests,
    *,
    overrides: Mapping[str, Any] | None = None,
    until: int = 0,
    profiler: Profiler | None = None,
    command: str = "",
    age: float = 0.0,
    stacked: bool = False,
) -> Steps[Run]:
    """As `fit`, for a caller that takes the requests to stop and began `age` seconds ago; `command` is for run.json.

    It yields each step to whoever computes it: `step_call.alone`, or with those of other runs (`stacked`).
    """
    ledger = Ledger(age=age)
    tree = read_recipe(recipe, overrides)
    workdir = workdir_of(tree, workdir)
    saved = saved_config(workdir)
    config = from_dict(Config, with_prolonged(inherit(tree, workdir), saved))
    if until and saved is None:
        raise ConfigError(f"--until={until}: there is no run in '{workdir}'. A new one has the steps of its recipe.")
    if not stacked:
        begin_process(stops)
    if until:
        config = prolong(config, until, steps_in(workdir / config.phases[-1].name / DIRECTORY))
    before = check_workdir(workdir, config)
    out = console(quiet=jax.process_index() != 0)
    with waiting(out, f"{config.name}: planning the run", at_once=False):
        run = open_run(plan_here(config), workdir, ledger, profiler)
        run = dataclasses.replace(run, stacked=stacked)
    with _lease(workdir, out.print):
        if jax.process_index() == 0:
            ledger.path = workdir / LEDGER_FILE
            write_run(workdir, run.config, command, before)
        out.print(
            f"{config.name}: {run.models[0].num_parameters:,} parameters, {len(run.phases)} phases, "
            f"mesh {dict(run.mesh.shape)}, in {workdir}"
        )
        last = None
        try:
            with lost_processes():
                for phase in run.phases:
                    last = yield from train_phase(run, phase, last)
        except Stopped as stopped:
            raise Stopped(f"{config.name}: {stopped}") from None
        finally:
            ledger.close()
            if ledger.start:
                out.print(f"time of this run: {balance(read_ledger(ledger.path))}")
    out.print(f"{config.name}: complete, {last}")
    return run


def begin_process(stops: StopRequests) -> None:
    """What a process does once before it trains: connects to the others, and takes requests to stop."""
    start_processes()
    stops.take_sigterm()
    if stops.whole_process:
        watch_maintenance()


@contextlib.contextmanager
def _lease(workdir: AnyPath, show: Callable[[str], None]) -> Iterator[None]:
    """The lease of a workdir, which process 0 takes; all raise if it is refused. A process that loses it ends."""

    def stop(message: str) -> None:
        tell_at_once(f"error: {message}")
        os._exit(os.EX_TEMPFAIL)  # nothing more may be written

    with contextlib.ExitStack() as stack:
        refusal = b""
        if jax.process_index() == 0:
            try:
                stack.enter_context(lease(workdir / LEASE_FILE, show, stop))
            except LeaseTaken as taken:
                refusal = (
                    f"--workdir '{workdir}': {taken.owner} trains there, and has its lease '{LEASE_FILE}'. Stop it "
                    "first, or choose another --workdir."
                ).encode()
            except UserError as error:
                refusal = str(error).encode()
        if refusal := all_values("lease", refusal)[0]:
            raise ConfigError(refusal.decode())
        yield
