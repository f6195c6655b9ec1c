"""Runs of claims: the cells of all arms and seeds, trained stage by stage, parents first, and their numbers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.config import to_json
from pe_lab.errors import ConfigError, UserError
from pe_lab.identity import config_hash, identity
from pe_lab.lab.claims.claim import Arm, Claim
from pe_lab.lab.claims.equal_help import helped
from pe_lab.lab.claims.measures import losses, scores
from pe_lab.lab.claims.values import Values, WindowMean
from pe_lab.lab.sweeps import Runner, Sweep, run_sweep
from pe_lab.lab.sweeps.cells import FILE, LAST_PHASE, SweepCell, joined, load_sweep
from pe_lab.lab.sweeps.state import COMPLETE, FAILED, CellState, is_trained, phases_of, planned
from pe_lab.recipes import explained, load_config
from pe_lab.results.groups import SEEDS
from pe_lab.results.records import digest, number
from pe_lab.storage import AnyPath, exists, is_file, read_json, write_file, write_json

# Added to the data's seed for each parent: an arm that starts from another one reads other windows than that one did.
DATA_ORDER = 1000


class OutOfTime(Exception):
    """The budget of `--budget` is spent; what was trained is saved."""


@dataclass(frozen=True)
class Stage:
    """Cells that need none of each other: their arms are built on equally many others.

    Attributes:
      sweep: of the cells whose config is known.
      edits: (arm, seed) whose parent is to be trained, and edited by its surgery, before its config is known.
    """

    sweep: Sweep
    edits: tuple[tuple[Arm, int], ...] = ()

    def parts(self, claim: Claim) -> list[Sweep]:
        """The cells that are trained together: of arms that are only started from, and of those that are evaluated."""
        listed, found = {arm.name for arm in claim.arms}, []
        for evaluated in (False, True):
            names = frozenset(cell.name for cell in self.sweep.asked if (cell.setting["arm"] in listed) == evaluated)
            evaluation = self.sweep.evaluation if evaluated else None
            found += [dataclasses.replace(self.sweep, names=names, evaluation=evaluation)] if names else []
        return found


def make_stages(
    claim: Claim, size: str, seeds: Sequence[int], directory: AnyPath, overrides: Mapping[str, str] | None = None
) -> list[Stage]:
    """The cells of a claim that is at this size (`Claim.at`), parents first; writes nothing.

    Raises:
      ConfigError: the config of an arm is wrong.
    """
    depths = sorted({arm.depth for arm in claim.all_arms})
    return [_make_stage(claim, depth, size, seeds, directory, overrides or {}) for depth in depths]


def _make_stage(
    claim: Claim, depth: int, size: str, seeds: Sequence[int], directory: AnyPath, overrides: Mapping[str, str]
) -> Stage:
    cells: list[SweepCell] = []
    edits: list[tuple[Arm, int]] = []
    for arm in (arm for arm in claim.all_arms if arm.depth == depth):
        for seed in claim.seeds_of(arm, seeds):
            there = arm.parent is None or exists(arm.start(directory, seed))
            if arm.surgery and not there:
                edits.append((arm, seed))
                continue
            name, reference = arm.cell(seed), arm.reference(size, directory, seed)
            keys = {**overrides, "seed": str(seed), "data.seed": str(seed + DATA_ORDER * depth)}
            try:
                config = load_config(reference, keys, inherits=True, workdir=directory / name)
            except UserError as error:
                if there:
                    raise type(error)(f"arm '{arm.name}': {error}") from None
                edits.append((arm, seed))
                continue
            cells.append(SweepCell(name, {"arm": arm.name}, seed, reference, keys, config))
    described = {"recipe": f"claims-{size}", "overrides": dict(overrides), "grid": {"arm": []}, "seeds": []}
    evaluation = None if claim.evaluation is None else (LAST_PHASE, *claim.evaluation)
    sweep = Sweep(directory, tuple(cells), frozenset(cell.name for cell in cells), evaluation, described)
    sweep = joined(sweep, load_sweep(directory)) if exists(directory / FILE) else sweep
    return Stage(sweep, tuple(edits))


def _edit(stage: Stage, show: Callable[[str], None]) -> None:
    """Edits the parents of a stage's arms; `ConfigError` with the reason of one that fails."""
    directory = stage.sweep.directory
    for arm, seed in stage.edits:
        assert arm.parent is not None
        if not arm.surgery:
            raise ConfigError(f"arm '{arm.name}': its parent {arm.parent.cell(seed)} is not trained.")
        to = arm.start(directory, seed)
        show(f"surgery {arm.surgery} for {arm.cell(seed)}")
        line = ["-m", "pe_lab.surgery", f"--from={directory / arm.parent.cell(seed)}", f"--to={to}"]
        done = subprocess.run(
            [sys.executable, *line, *shlex.split(arm.surgery)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise ConfigError(f"arm '{arm.name}': surgery {arm.surgery}: {reason[0].removeprefix('error: ')}")
        write_file(directory / "logs" / f"{arm.cell(seed)}.surgery.log", done.stdout)


def unfinished(stage: Stage) -> list[SweepCell]:
    """The cells that are not trained."""
    return [cell for cell in stage.sweep.asked if not is_trained(stage.sweep.directory / cell.name, phases_of(cell))]


def train(
    claim: Claim,
    plan: Callable[[], list[Stage]],
    runner: Runner,
    retry: bool,
    command: str,
    look: Callable[[Sequence[CellState]], None],
    deadline: float | None = None,
    show: Callable[[str], None] = print,
    stack: int = 1,
) -> tuple[list[CellState], bool]:
    """Trains and evaluates all cells; returns the states of the last stage that was begun, and whether it was stopped.

    Arms that are only started from are trained, and not evaluated. `plan` makes the stages, `stack` is `run_sweep`'s.

    Raises:
      OutOfTime: `deadline`, by time.monotonic(), has come; the cells have saved.
    """

    def watched(states: Sequence[CellState]) -> None:
        look(states)
        if deadline is not None and time.monotonic() > deadline and any(s.state != COMPLETE for s in states):
            raise OutOfTime(claim.name)

    states: list[CellState] = []
    for depth in range(len(plan())):
        # Planned anew each time: the configs of this stage take over what only trained parents have.
        stage = plan()[depth]
        if stage.edits:
            _edit(stage, show)
            stage = plan()[depth]
        for sweep in stage.parts(claim):
            _, states, stopped = run_sweep(sweep, runner, retry, command, watched, stack, show)
            states = [state for state in states if state.cell.name in sweep.names]
            if stopped or any(state.state != COMPLETE for state in states):
                return states, stopped
    return states, False


def failed(states: Sequence[CellState]) -> list[CellState]:
    """The cells that have failed."""
    return [state for state in states if state.state == FAILED]


def collect(claim: Claim, stages: Sequence[Stage], show: Callable[[str], None] = print) -> Values:
    """The numbers of all trained cells of the claim's arms, and of its references, {arm: {metric: {seed: value}}}.

    What a claim's own function measures is kept in `measures/CLAIM` of the directory, by the run's config and logs and
    the code that measures, and not measured twice. Arms of the pilot have their validation losses.
    """
    names = {arm.name for arm in claim.arms}
    pilot = {arm.name for arm in claim.pilot}
    values: dict[str, dict[str, dict[int, float]]] = {
        name: {} for name in (*(arm.name for arm in (*claim.arms, *claim.pilot)), *claim.references)
    }
    for stage in stages:
        left = {cell.name for cell in unfinished(stage)}
        for cell in stage.sweep.asked:
            arm = cell.setting["arm"]
            if arm not in names | pilot or cell.name in left:
                continue
            run, where = stage.sweep.directory / cell.name, stage.sweep.directory / "measures"
            if claim.measure is scores and arm in names:
                measures = {arm: scores(run)}
            else:
                evaluated = claim.evaluation is not None and arm in names
                of_run = functools.partial(claim.measure if arm in names else losses, run)
                key = [measuring_code(claim), records_digest(run, evaluated)]
                measures = {arm: _kept(where / claim.name, cell, key, claim.file, of_run, show)}
            for name, reference in claim.references.items():
                if reference.arm == arm:
                    code = inspect.getfile(reference.measure)
                    of_config = functools.partial(reference.measure, cell.config)
                    measures[name] = _kept(where / name, cell, [_code(code)], code, of_config, show)
            for name, found in measures.items():
                for metric, value in found.items():
                    values[name].setdefault(metric, {})[int(cell.seed or 0)] = value
    return values


def conditions(claim: Claim, stages: Sequence[Stage]) -> dict[str, Any]:
    """What a verdict of the claim depends on, as `history` keeps it: recipe, measure, evaluation and rule.

    A recipe is its text with a digest of the config that it makes, apart from seeds and the parent's directory.
    """
    cells = {cell.setting["arm"]: cell for stage in stages for cell in stage.sweep.asked}
    recipes = {}
    for arm in claim.all_arms:
        made = identity(cells[arm.name].config) if arm.name in cells else {}
        kept = {key: value for key, value in made.items() if key not in SEEDS and not key.endswith(".init_from")}
        surgery = f" after surgery {arm.surgery}" if arm.surgery else ""
        recipes[arm.name] = f"{arm.recipe}{surgery} ({digest(kept)})"
    of_arms = [cells[arm.name].config for arm in claim.arms if arm.name in cells]
    settings = to_json(of_arms[0].evaluation) if of_arms and claim.evaluation is not None else None
    of = claim.measure.func if isinstance(claim.measure, functools.partial) else claim.measure
    return {
        "recipe": recipes,
        "measure": {"name": getattr(of, "__qualname__", str(of)), "code": measuring_code(claim)},
        "evaluation": {"options": list(claim.evaluation or ()), "settings": settings},
        "rule": claim.rule,
    }


def measuring_code(claim: Claim) -> str:
    """A digest of the code that measures the runs of a claim: of its file, and of the shared measures."""
    return _code(claim.file, inspect.getfile(scores), inspect.getfile(helped))


def _code(*files: str) -> str:
    """A digest of code that measures: of files, and of those that they import from their directory (`from .arms`)."""
    found: dict[Path, str] = {}
    left = [Path(file) for file in files]
    while left:
        path = left.pop()
        if path not in found and path.is_file():
            found[path] = path.read_text()
            left += [path.with_name(f"{name}.py") for name in re.findall(r"^from \.(\w+)", found[path], re.MULTILINE)]
    return digest(sorted((path.name, text) for path, text in found.items()))


def records_digest(run: AnyPath, evaluated: bool) -> str:
    """A digest of what a run has logged in training, and of its evaluations if it is `evaluated` for the claim."""
    from pe_lab.results.runs import read_runs

    (read,) = read_runs([run])
    return digest([[phase.metrics for phase in read.phases], read.evaluation if evaluated else {}])


def _kept(
    directory: AnyPath,
    cell: SweepCell,
    key: Sequence[str],
    code: str,
    measure: Callable[[], Mapping[str, float]],
    show: Callable[[str], None],
) -> Mapping[str, float]:
    """The numbers of a cell from its file in `directory`, or measured and kept there.

    Args:
      key: of all that they depend on, apart from the cell's config.
      code: the file that an error of `measure` is blamed on.
    """
    path, key = directory / f"{cell.name}.json", [config_hash(cell.config), *key]
    if is_file(path) and (known := read_json(path)).get("key") == key:
        windows = known.get("windows") or {}
        return {
            name: WindowMean(value, windows[name]["values"], windows[name]["text"]) if name in windows else value
            for name, value in known["values"].items()
        }
    show(f"measuring {cell.name}: {directory.name}")
    with explained(code, "claim"):
        values = {name: one if isinstance(one, WindowMean) else float(one) for name, one in measure().items()}
    windows = {
        name: {"values": one.windows, "text": one.text} for name, one in values.items() if isinstance(one, WindowMean)
    }
    write_json(path, {"key": key, "values": values, "windows": windows})
    return values


def costs(stages: Sequence[Stage]) -> dict[str, dict[str, float]]:
    """{arm: parameters, tokens and FLOPs of one seed, and the mean seconds of its trained cells}.

    What cannot be known yet, since data are not prepared, is NaN.
    """
    found: dict[str, dict[str, Any]] = {}
    for stage in stages:
        for cell in stage.sweep.asked:
            arm = cell.setting["arm"]
            if arm not in found:
                found[arm] = {**planned(cell.config), "seconds": []}
            seconds = [_seconds(stage.sweep.directory / cell.name / phase.name) for phase in cell.config.phases]
            if all(seconds):
                found[arm]["seconds"].append(sum(seconds))
    for each in found.values():
        each["seconds"] = sum(each["seconds"]) / len(each["seconds"]) if each["seconds"] else 0.0
    return found


def _seconds(phase: AnyPath) -> float:
    """The seconds that a phase was trained for, over all of its sessions; 0 if it is not complete."""
    from pe_lab.results.runs import read_runs

    try:
        (run,) = read_runs([phase.parent])
    except UserError:
        return 0.0
    total, last = 0.0, 0.0
    for record in run.phase(phase.name).speed if run.phase(phase.name) else []:
        seconds = number(record, "seconds") or 0.0
        total += last if seconds < last else 0.0
        last = seconds
    return total + last


def flops_left(stages: Sequence[Stage]) -> float:
    """The FLOPs of the cells that are not trained."""
    known = costs(stages)
    return sum(known[cell.setting["arm"]]["flops"] for stage in stages for cell in unfinished(stage))
