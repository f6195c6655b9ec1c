"""Runs of studies: the cells of all arms and seeds, trained level by level, parents first, and their numbers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.analysis.groups import SEEDS
from pe_lab.errors import ConfigError, UserError
from pe_lab.identity import config_hash
from pe_lab.recipes import load_config
from pe_lab.results.records import number
from pe_lab.storage import AnyPath, exists, is_file, read_json, write_json
from pe_lab.studies.study import Arm, Study, studies_directory
from pe_lab.studies.verdict import Values
from pe_lab.sweeps import Runner, Sweep, run_sweep
from pe_lab.sweeps.cells import FILE, Cell, load_sweep
from pe_lab.sweeps.state import COMPLETE, FAILED, CellState, is_trained, phases_of


class OutOfTime(Exception):
    """The budget of `--budget` is spent; what was trained is saved."""


@dataclass(frozen=True)
class Level:
    """Cells that need none of each other: their arms are built on equally many others."""

    sweep: Sweep

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.sweep.asked


def make_levels(
    study: Study, size: str, seeds: Sequence[int], directory: AnyPath, overrides: Mapping[str, str] | None = None
) -> list[Level]:
    """The cells of a study, parents first; writes nothing.

    Raises:
      ConfigError: an arm has no recipe of this size, or its config is wrong.
    """
    from pe_lab.training.inheritance import inherit

    by_depth: dict[int, list[Cell]] = {}
    for arm in study.all_arms:
        for seed in seeds:
            name, reference = arm.cell(seed), arm.reference(size, directory, seed)
            keys = {**(overrides or {}), **dict.fromkeys(SEEDS, str(seed))}
            try:
                config = load_config(reference, keys, functools.partial(inherit, workdir=directory / name))
            except UserError as error:
                raise type(error)(f"arm '{arm.name}': {error}") from None
            cell = Cell(name, {"arm": arm.name}, seed, reference, keys, config)
            by_depth.setdefault(arm.depth, []).append(cell)
    described = {"recipe": f"studies-{size}", "overrides": dict(overrides or {}), "grid": {"arm": []}, "seeds": []}
    before = load_sweep(directory).cells if exists(directory / FILE) else ()
    levels = []
    for depth in sorted(by_depth):
        cells = by_depth[depth]
        known = {cell.name: cell for cell in before}
        for cell in cells:
            if cell.name in known and config_hash(known[cell.name].config) != config_hash(cell.config):
                raise ConfigError(
                    f"'{directory / cell.name}' is a run of arm '{cell.setting['arm']}' as it was before its recipe "
                    "changed. Move it away, or give another --workdir."
                )
        names = frozenset(cell.name for cell in cells)
        others = [cell for cell in before if cell.name not in names]
        # The parents are evaluated too if the study lists them.
        levels.append(Level(Sweep(directory, (*others, *cells), names, study.evaluation, described)))
    return levels


def unfinished(level: Level) -> list[Cell]:
    """The cells that are not trained."""
    return [cell for cell in level.cells if not is_trained(level.sweep.directory / cell.name, phases_of(cell))]


def train(
    study: Study,
    levels: Sequence[Level],
    runner: Runner | None,
    retry: bool,
    command: str,
    look: Callable[[Sequence[CellState]], None],
    deadline: float | None = None,
) -> tuple[list[CellState], bool]:
    """Trains and evaluates all cells; returns the states of the last level that was begun, and whether it was stopped.

    Arms that are only started from are trained, and not evaluated.

    Raises:
      OutOfTime: `deadline`, by time.monotonic(), has come; the cells have saved.
    """

    def watched(states: Sequence[CellState]) -> None:
        look(states)
        if deadline is not None and time.monotonic() > deadline and any(s.state != COMPLETE for s in states):
            raise OutOfTime(study.name)

    listed = {arm.name for arm in study.arms}
    states: list[CellState] = []
    for level in levels:
        for evaluated in (False, True):
            names = frozenset(cell.name for cell in level.cells if (cell.setting["arm"] in listed) == evaluated)
            if not names:
                continue
            sweep = dataclasses.replace(
                level.sweep, names=names, evaluation=level.sweep.evaluation if evaluated else None
            )
            _, states, stopped = run_sweep(sweep, runner, retry, command, watched)
            states = [state for state in states if state.cell.name in names]
            if stopped or any(state.state != COMPLETE for state in states):
                return states, stopped
    return states, False


def failed(states: Sequence[CellState]) -> list[CellState]:
    """The cells that have failed."""
    return [state for state in states if state.state == FAILED]


def collect(study: Study, levels: Sequence[Level], show: Callable[[str], None] = print) -> Values:
    """The numbers of all trained cells of the study's arms, {arm: {metric: {seed: value}}}.

    What a study's own function measures is kept in `measures/STUDY` of the directory, by the run's config and the code
    of the study, and not measured twice.
    """
    from pe_lab.studies.measures import scores

    listed = {arm.name for arm in study.arms}
    values: dict[str, dict[str, dict[int, float]]] = {arm.name: {} for arm in study.arms}
    for level in levels:
        left = {cell.name for cell in unfinished(level)}
        for cell in level.cells:
            if cell.setting["arm"] not in listed or cell.name in left:
                continue
            run = level.sweep.directory / cell.name
            if study.measure is scores:
                found = scores(run)
            else:
                found = _measured(study, cell, run, level.sweep.directory, show)
            for metric, value in found.items():
                values[cell.setting["arm"]].setdefault(metric, {})[int(cell.seed or 0)] = float(value)
    return values


def _measured(
    study: Study, cell: Cell, run: AnyPath, directory: AnyPath, show: Callable[[str], None]
) -> Mapping[str, float]:
    path = directory / "measures" / study.name / f"{cell.name}.json"
    source = studies_directory() / f"{study.name}.py"
    code = hashlib.sha256(source.read_bytes()).hexdigest()[:12] if source.is_file() else ""
    key = [config_hash(cell.config), code]
    if is_file(path) and (known := read_json(path)).get("key") == key:
        return known["values"]
    show(f"measuring {cell.name}")
    values = {name: float(value) for name, value in study.measure(run).items()}
    write_json(path, {"key": key, "values": values})
    return values


def costs(levels: Sequence[Level]) -> dict[str, dict[str, float]]:
    """{arm: parameters, tokens and FLOPs of one seed, and the mean seconds of its trained cells}."""
    from pe_lab.parallel.topology import parse_topology
    from pe_lab.planning.plan import make_plan

    found: dict[str, dict[str, Any]] = {}
    for level in levels:
        for cell in level.cells:
            arm = cell.setting["arm"]
            if arm not in found:
                plan = make_plan(cell.config, parse_topology("cpu:1"))
                found[arm] = {
                    "parameters": plan.model.num_parameters,
                    "tokens": sum(phase.tokens for phase in plan.phases),
                    "flops": sum(phase.total_flops for phase in plan.phases),
                    "seconds": [],
                }
            seconds = [_seconds(level.sweep.directory / cell.name / phase.name) for phase in cell.config.phases]
            if all(seconds):
                found[arm]["seconds"].append(sum(seconds))
    for each in found.values():
        each["seconds"] = sum(each["seconds"]) / len(each["seconds"]) if each["seconds"] else 0.0
    return found


def _seconds(phase: AnyPath) -> float:
    """The seconds that a phase was trained for, over all of its sessions; 0 if it is not complete."""
    from pe_lab.analysis.runs import read_runs

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


def flops_left(levels: Sequence[Level]) -> float:
    """The FLOPs of the cells that are not trained."""
    known = costs(levels)
    return sum(known[cell.setting["arm"]]["flops"] for level in levels for cell in unfinished(level))


def arms_of(studies: Sequence[Study]) -> dict[str, Arm]:
    """All arms by name."""
    return {arm.name: arm for study in studies for arm in study.all_arms}
