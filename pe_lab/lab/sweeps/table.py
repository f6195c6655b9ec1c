"""What came of a sweep: the numbers of each cell, and for each setting their means and intervals over the seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.sweeps.cells import Sweep, SweepCell, label, plain, short_keys, split_values
from pe_lab.lab.sweeps.state import is_trained, phases_of
from pe_lab.results.comparison import last_validation
from pe_lab.results.records import Record, number
from pe_lab.results.runs import RunFiles, read_runs
from pe_lab.results.scores import build_tables, label_of
from pe_lab.results.standing import cautions, is_former
from pe_lab.results.statistics import Difference
from pe_lab.results.table import Cell, Metric, Table, seeds_table

VALIDATION, TRAINING = "validation_loss", "loss"
LAST_PART = 0.1  # of the last phase's steps, whose mean is the training loss: a single step's is noise


@dataclass(frozen=True)
class CellRecord:
    """The numbers of a complete cell.

    Attributes:
      metrics: `validation_loss`, the last one; `loss`, the mean of the last tenth of the last phase's steps, both in
        nats per token; scores of evaluations by their names, perplexities as `log perplexity`, in nats.
      higher: the metrics of which a higher value is better.
      remarks: on scores that are missing, or of a former step (`standing.cautions`).
    """

    cell: SweepCell
    run: RunFiles
    metrics: Mapping[str, float]
    higher: frozenset[str]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A row of a sweep's table.

    Attributes:
      values: {key: value}, with the keys of all axes of the sweep.
      records: of the complete cells, one for each seed.
      missing: how many of its cells are not complete.
    """

    values: Mapping[str, str]
    records: tuple[CellRecord, ...]
    missing: int

    @property
    def seeds(self) -> str:
        """`3`, or `2 of 3` where cells are not complete."""
        done = len(self.records)
        return str(done) if not self.missing else f"{done} of {done + self.missing}"


@dataclass(frozen=True)
class SweepTable:
    """The settings, best first by `metric`, with their means over seeds.

    Attributes:
      numbers: means and intervals by the label of a setting and by metric; its rows are `Setting`s.
      higher: the metrics of which a higher value is better.
      keys: key -> its short name.
      baseline: the label of the setting that others are compared with.
    """

    metric: str
    numbers: Table
    higher: frozenset[str]
    keys: Mapping[str, str]
    baseline: str
    best_is_baseline: bool
    records: tuple[CellRecord, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.numbers.columns)

    def cell(self, setting: str, metric: str) -> Cell | None:
        return self.numbers.cell(setting, Metric(metric))

    def differences(self, metric: str) -> dict[str, Difference]:
        """{label: the difference to the baseline on the seeds of both}; p is corrected for the settings."""
        found = self.numbers.differences(self.baseline, Metric(metric))
        return found if metric in self.higher else {label: one.reversed for label, one in found.items()}


def collect(sweep: Sweep) -> list[CellRecord]:
    """The numbers of all complete cells of a sweep, read from their files."""
    cells = [cell for cell in sweep.cells if is_trained(sweep.directory / cell.name, phases_of(cell))]
    found = []
    for cell, run in zip(cells, read_runs([sweep.directory / cell.name for cell in cells]), strict=True):
        planned, remarks = _as_planned(run, phases_of(cell)), cautions(run)
        if planned is not run:
            longer = "It has been trained for longer; its numbers are those of the steps that the sweep asked for."
            remarks = [longer, *cautions(planned)]
        scores, higher = _scores(planned)
        remarks = tuple(f"{cell.name}: {remark}" for remark in remarks)
        found.append(CellRecord(cell, run, {**_losses(planned), **scores}, higher, remarks))
    return found


def _as_planned(run: RunFiles, steps: Mapping[str, int]) -> RunFiles:
    """The run up to the steps, {phase: steps}, that its cell asked for; the run itself if it has no more of them."""
    most = {name: steps[name] or math.inf for name in steps}
    if not any(phase.steps_done > most.get(phase.name, math.inf) for phase in run.phases):
        return run
    phases = []
    for phase in run.phases:
        end = most.get(phase.name, math.inf)
        metrics = [record for record in phase.metrics if (number(record, "step") or 0) <= end]
        asked = {"steps": end} if math.isfinite(end) else {}
        phases.append(replace(phase, metrics=metrics, info={**phase.info, **asked}))

    def asked_for(records: Iterable[Record]) -> list[Record]:
        return [one for one in records if (number(one, "step") or 0) <= most.get(str(one.get("phase")), math.inf)]

    evaluation = {suite: asked_for(records) for suite, records in run.evaluation.items()}
    return replace(run, phases=phases, evaluation=evaluation, plans=[asked_for(plan) for plan in run.plans])


def _losses(run: RunFiles) -> dict[str, float]:
    """The last validation loss, and the mean training loss of the last steps."""
    if not run.phases:
        return {}
    last, losses = run.phases[-1], {}
    if (validation := last_validation(run)) is not None:
        losses[VALIDATION] = validation
    first = (number(last.info, "steps") or 0) * (1 - LAST_PART)
    training = [
        value
        for record in last.metrics
        if (value := number(record, TRAINING)) is not None
        and "event" not in record
        and (number(record, "step") or 0) > first
    ]
    if training:
        losses[TRAINING] = math.fsum(training) / len(training)
    return losses


def _scores(run: RunFiles) -> tuple[dict[str, float], frozenset[str]]:
    """{name: value} of the evaluations of a run's last checkpoint, and those of which a higher value is better.

    Scores of an earlier step of the last phase do not count.
    """
    scores, higher = {}, set()
    last = run.phases[-1].name if run.phases else None
    for table in (table for suite in run.evaluation for table in build_tables(suite, [run])):
        for cell in table.cells.values():
            if not math.isfinite(cell.score) or cell.record.get("phase") not in (None, last):
                continue
            if is_former(run, {"phase": last, **cell.record}):
                continue
            length, source = number(cell.record, "length"), table.source if table.source != table.suite else ""
            value = cell.score if cell.higher_is_better else -cell.score
            log = "" if value == cell.value else "log"  # a perplexity
            name = " ".join(filter(None, [log, table.suite, source, f"({label_of(cell.record)})"]))
            name += f" at {length:.0f}" if length else ""
            scores[name] = value
            if cell.higher_is_better:
                higher.add(name)
    return scores, frozenset(higher)


# ---------------------------------------------------------------------------------------------------------------------
# Over the seeds


def summarize(
    sweep: Sweep, records: Sequence[CellRecord], metric: str | None = None, baseline: str | None = None
) -> SweepTable:
    """The table of a sweep.

    Args:
      metric: sorts the settings; by default the validation loss, or the training loss without one.
      baseline: the setting that others are compared with, as `learning_rate=0.001,layers=4`; by default the best.

    Raises:
      ConfigError: no complete cell has this metric, or no setting is this baseline.
    """
    names = tuple(dict.fromkeys(name for record in records for name in record.metrics))
    metrics = tuple(sorted(names, key=lambda name: (name != VALIDATION, name != TRAINING)))
    metric = metric or (metrics[0] if metrics else VALIDATION)
    if metrics and metric not in metrics:
        raise ConfigError(f"--metric='{metric}': no cell has it. {did_you_mean(metric, metrics)}")
    higher = frozenset().union(*(record.higher for record in records))
    keys = short_keys(dict.fromkeys(key for cell in sweep.cells for key in cell.setting))
    values = {cell.name: setting_of(cell, keys) for cell in sweep.cells}
    names = {cell.name: label(values[cell.name]) for cell in sweep.cells}
    cells, known = Counter(names.values()), {names[cell.name]: values[cell.name] for cell in sweep.cells}
    groups = {name: tuple(one for one in records if names[one.cell.name] == name) for name in known}
    numbers = seeds_table(
        {
            name: {metric: {one.cell.seed: one.metrics[metric] for one in group if metric in one.metrics}
                   for metric in metrics}
            for name, group in groups.items()
        },
        higher,
    )  # fmt: skip
    ranks = {name: cell.score for name, cell in numbers.column(Metric(metric)).items()}
    ordered = sorted(known, key=lambda name: -ranks.get(name, -math.inf))
    rows = {name: Setting(known[name], groups[name], cells[name] - len(groups[name])) for name in ordered}
    chosen = ordered[0] if baseline is None else _find(baseline, rows, keys)
    return SweepTable(metric, replace(numbers, rows=rows), higher, keys, chosen, baseline is None, tuple(records))


def setting_of(cell: SweepCell, keys: Iterable[str]) -> dict[str, str]:
    """The setting of a cell with the keys of all axes: those that its own grid lacked are as in its config."""
    return {key: plain(cell.setting.get(key) or _in_config(cell.config, key)) for key in keys}


def _in_config(config: Any, key: str) -> str:
    """The value of a dotted key; "" of an argument of the recipe, and of what a config lacks."""
    for name in key.split("."):
        try:
            config = config[int(name)] if isinstance(config, Sequence) else vars(config)[name]
        except (LookupError, ValueError, TypeError):
            return ""
    return str(config)


def _find(text: str, settings: Mapping[str, Setting], keys: Mapping[str, str]) -> str:
    """The label of the setting that `KEY=VALUE,KEY=VALUE` names."""
    wanted = dict(part.partition("=")[::2] for part in split_values(text, "--baseline"))
    for key in wanted:
        if key not in keys and key not in keys.values():
            near = did_you_mean(key, [*keys.values()]) if keys else "All cells have one setting."
            raise ConfigError(f"--baseline='{text}': the grid has no '{key}'. {near}")
    fits = [
        name
        for name, setting in settings.items()
        if all(value == plain(wanted.get(key, wanted.get(keys[key], value))) for key, value in setting.values.items())
    ]
    if len(fits) != 1:
        known = "; ".join([*settings][:8])
        raise ConfigError(f"--baseline='{text}' names {len(fits)} settings; name one of: {known}.")
    return fits[0]


def numeric(table: SweepTable) -> dict[str, list[float]]:
    """{key: its values in order} of the axes whose values are two or more numbers."""
    found = {}
    for key in table.keys:
        values = set()
        for setting in table.numbers.rows.values():
            try:
                values.add(float(setting.values[key]))
            except ValueError:
                values.add(math.nan)
        if len(values) > 1 and all(map(math.isfinite, values)):
            found[key] = sorted(values)
    return found
