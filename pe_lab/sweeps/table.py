"""What came of a sweep: the numbers of each cell, and for each setting their means and intervals over the seeds."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pe_lab.analysis.runs import Run, read_run
from pe_lab.analysis.scores import label_of
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.results.intervals import Interval, interval
from pe_lab.results.paired import Difference, holm, paired_t
from pe_lab.results.records import number
from pe_lab.results.scores import measure, source_of
from pe_lab.sweeps.cells import Cell, Sweep
from pe_lab.sweeps.grid import label, short_keys, split_values
from pe_lab.sweeps.state import is_trained, phases_of

VALIDATION, TRAINING = "validation_loss", "loss"
LAST_PART = 0.1  # of the last phase's steps, whose mean is the training loss: a single step's is noise


@dataclass(frozen=True)
class CellRecord:
    """The numbers of a complete cell.

    Attributes:
      metrics: `validation_loss`, the last one; `loss`, the mean of the last tenth of the last phase's steps, both in
        nats per token; scores of evaluations by their names.
      higher: the metrics of which a higher value is better.
      curves: (tokens, value) of `loss` and `validation_loss` over all phases.
    """

    cell: Cell
    metrics: Mapping[str, float]
    higher: frozenset[str] = frozenset()
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """A setting: its seeds, and for each metric the mean over them and the paired difference to the baseline.

    Attributes:
      setting: {key: value}, with the keys of all axes of the sweep.
      seeds: of the complete cells.
      missing: how many of its cells are not complete.
      means: {metric: interval}.
      differences: {metric: (the difference on the seeds of both, its p-value after Holm's correction)}; none of the
        baseline itself.
    """

    setting: Mapping[str, str]
    seeds: tuple[int | None, ...]
    missing: int
    means: Mapping[str, Interval]
    differences: Mapping[str, tuple[Difference, float]]


@dataclass(frozen=True)
class SweepTable:
    """The summaries, best first by `metric`; `baseline` is the label of the setting that others are compared with."""

    metric: str
    metrics: tuple[str, ...]
    higher: frozenset[str]
    keys: Mapping[str, str]  # key -> its short name
    summaries: tuple[Summary, ...]
    baseline: str
    best_is_baseline: bool
    records: tuple[CellRecord, ...]


def collect(sweep: Sweep) -> list[CellRecord]:
    """The numbers of all complete cells of a sweep, read from their files."""
    found = []
    for cell in sweep.cells:
        if is_trained(sweep.directory / cell.name, phases_of(cell)):
            run = read_run(sweep.directory / cell.name)
            scores, higher = _scores(run)
            found.append(CellRecord(cell, {**_losses(run), **scores}, higher, _curves(run)))
    return found


def _losses(run: Run) -> dict[str, float]:
    """The last validation loss, and the mean training loss of the last steps."""
    last, losses = run.phases[-1], {}
    validation = [value for record in last.metrics if (value := number(record, VALIDATION)) is not None]
    if validation:
        losses[VALIDATION] = validation[-1]
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


def _scores(run: Run) -> tuple[dict[str, float], frozenset[str]]:
    """{name: value} of the evaluations of a run's last checkpoint, and those of which a higher value is better."""
    scores, higher = {}, set()
    last = run.phases[-1].name
    for suite, records in run.evaluation.items():
        for record in records:
            cell = measure(record)
            if cell is None or record.get("phase") not in (None, last):
                continue
            length = number(record, "length")
            source = source_of(record)
            name = " ".join(filter(None, [suite, source if source != suite else "", f"({label_of(record)})"]))
            name += f" at {length:.0f}" if length else ""
            scores[name] = cell.value
            if cell.score == cell.value:
                higher.add(name)
    return scores, frozenset(higher)


def _curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """(tokens, value) of the losses, phase after phase."""
    curves: dict[str, list[tuple[float, float]]] = {TRAINING: [], VALIDATION: []}
    before = 0.0
    for phase in run.phases:
        for key, points in curves.items():
            points += [(before + tokens, value) for tokens, value in phase.series(key)]
        before += phase.tokens
    return {key: points for key, points in curves.items() if points}


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
    settings = {tuple(setting_of(cell, keys).items()): None for cell in sweep.cells}
    groups = {
        setting: [record for record in records if tuple(setting_of(record.cell, keys).items()) == setting]
        for setting in settings
    }
    sign = -1 if metric in higher else 1

    def place(setting: tuple) -> float:
        values = _values(groups[setting], metric).values()
        return sign * float(np.mean(list(values))) if values else math.inf

    ordered = sorted(settings, key=place)
    chosen = ordered[0] if baseline is None else _find(baseline, ordered, keys)
    differences = _differences(groups, metrics, chosen)
    summaries = []
    for setting in ordered:
        values = {name: list(_values(groups[setting], name).values()) for name in metrics}
        cells = [cell for cell in sweep.cells if tuple(setting_of(cell, keys).items()) == setting]
        summaries.append(
            Summary(
                dict(setting),
                tuple(record.cell.seed for record in groups[setting]),
                len(cells) - len(groups[setting]),
                {name: interval(np.array(found)) for name, found in values.items() if found},
                differences.get(setting, {}),
            )
        )
    return SweepTable(
        metric, metrics, higher, keys, tuple(summaries), label(dict(chosen)), baseline is None, tuple(records)
    )


def setting_of(cell: Cell, keys: Iterable[str]) -> dict[str, str]:
    """The setting of a cell with the keys of all axes: those that its own grid lacked are as in its overrides."""
    return {key: cell.setting.get(key, cell.overrides.get(key, "")) for key in keys}


def _values(records: Sequence[CellRecord], metric: str) -> dict[int | None, float]:
    return {record.cell.seed: record.metrics[metric] for record in records if metric in record.metrics}


def _differences(
    groups: Mapping[tuple, Sequence[CellRecord]], metrics: Sequence[str], baseline: tuple
) -> dict[tuple, dict[str, tuple[Difference, float]]]:
    """{setting: {metric: difference}} on the seeds of both; p-values are corrected for the settings of a metric."""
    found: dict[tuple, dict[str, tuple[Difference, float]]] = {}
    for metric in metrics:
        base = _values(groups[baseline], metric)
        pairs = {}
        for setting, records in groups.items():
            values = _values(records, metric)
            if setting != baseline and (both := [seed for seed in values if seed in base]):
                pairs[setting] = paired_t([values[seed] for seed in both], [base[seed] for seed in both])
        tested = [setting for setting, difference in pairs.items() if not math.isnan(difference.p)]
        corrected = dict(zip(tested, holm([pairs[setting].p for setting in tested]), strict=True))
        for setting, difference in pairs.items():
            found.setdefault(setting, {})[metric] = difference, float(corrected.get(setting, math.nan))
    return found


def _find(text: str, settings: Sequence[tuple], keys: Mapping[str, str]) -> tuple:
    """The setting that `KEY=VALUE,KEY=VALUE` names."""
    wanted = dict(part.partition("=")[::2] for part in split_values(text, "--baseline"))
    for key in wanted:
        if key not in keys and key not in keys.values():
            near = did_you_mean(key, [*keys.values()]) if keys else "All cells have one setting."
            raise ConfigError(f"--baseline='{text}': the grid has no '{key}'. {near}")
    fits = [
        setting
        for setting in settings
        if all(_same(value, wanted.get(key, wanted.get(keys[key], value))) for key, value in setting)
    ]
    if len(fits) != 1:
        known = "; ".join(label(dict(setting)) for setting in settings[:8])
        raise ConfigError(f"--baseline='{text}' names {len(fits)} settings; name one of: {known}.")
    return fits[0]


def _same(a: str, b: str) -> bool:
    def literal(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text

    return a == b or literal(a) == literal(b)


def numeric(table: SweepTable) -> dict[str, list[float]]:
    """{key: its values in order} of the axes whose values are two or more numbers."""
    found = {}
    for key in table.keys:
        values = set()
        for summary in table.summaries:
            try:
                values.add(float(summary.setting[key]))
            except ValueError:
                values.add(math.nan)
        if len(values) > 1 and all(map(math.isfinite, values)):
            found[key] = sorted(values)
    return found


def seeds_text(summary: Summary) -> str:
    """`3`, or `2 of 3` where cells are not complete."""
    done = len(summary.seeds)
    return str(done) if not summary.missing else f"{done} of {done + summary.missing}"
