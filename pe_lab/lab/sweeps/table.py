"""What came of a sweep: the numbers of each cell, and for each setting their means and intervals over the seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.sweeps.cells import Cell, Sweep
from pe_lab.lab.sweeps.grid import label, plain, short_keys, split_values
from pe_lab.lab.sweeps.state import is_trained, phases_of
from pe_lab.results.comparison import by_seed, last_validation
from pe_lab.results.statistics import Mean, over_seeds
from pe_lab.results.statistics import Difference, holm
from pe_lab.results.records import Record, number
from pe_lab.results.runs import RunFiles, read_runs
from pe_lab.results.standing import cautions, is_former
from pe_lab.results.scores import build_tables, label_of

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

    cell: Cell
    run: RunFiles
    metrics: Mapping[str, float]
    higher: frozenset[str]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """A setting: its seeds, and for each metric the mean over them and the paired difference to the baseline.

    Attributes:
      setting: {key: value}, with the keys of all axes of the sweep.
      records: of the complete cells, one for each seed.
      missing: how many of its cells are not complete.
      means: {metric: mean and interval}.
      differences: {metric: (the difference on the seeds of both, its p-value after Holm's correction)}; none of the
        baseline itself.
    """

    setting: Mapping[str, str]
    records: tuple[CellRecord, ...]
    missing: int
    means: Mapping[str, Mean]
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
    settings = {cell.name: tuple(setting_of(cell, keys).items()) for cell in sweep.cells}
    groups: dict[tuple, list[CellRecord]] = {setting: [] for setting in settings.values()}
    for record in records:
        groups[settings[record.cell.name]].append(record)
    means = {
        setting: {name: over_seeds([*found.values()]) for name in metrics if (found := _values(group, name))}
        for setting, group in groups.items()
    }
    sign = -1 if metric in higher else 1
    ordered = sorted(groups, key=lambda one: sign * means[one][metric].mean if metric in means[one] else math.inf)
    chosen = ordered[0] if baseline is None else _find(baseline, ordered, keys)
    differences = _differences(groups, metrics, chosen)
    cells = Counter(settings.values())
    summaries = [
        Summary(dict(one), tuple(groups[one]), cells[one] - len(groups[one]), means[one], differences[one])
        for one in ordered
    ]
    return SweepTable(
        metric, metrics, higher, keys, tuple(summaries), label(dict(chosen)), baseline is None, tuple(records)
    )


def setting_of(cell: Cell, keys: Iterable[str]) -> dict[str, str]:
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


def _values(records: Sequence[CellRecord], metric: str) -> dict[int | None, float]:
    return {record.cell.seed: record.metrics[metric] for record in records if metric in record.metrics}


def _differences(
    groups: Mapping[tuple, Sequence[CellRecord]], metrics: Sequence[str], baseline: tuple
) -> dict[tuple, dict[str, tuple[Difference, float]]]:
    """{setting: {metric: difference}} on the seeds of both; p-values are corrected for the settings of a metric."""
    found: dict[tuple, dict[str, tuple[Difference, float]]] = {setting: {} for setting in groups}
    for metric in metrics:
        base, others = _values(groups[baseline], metric), [setting for setting in groups if setting != baseline]
        known = {setting: by_seed(_values(groups[setting], metric), base) for setting in others}
        pairs = {setting: difference for setting, difference in known.items() if difference is not None}
        corrected = holm([difference.p for difference in pairs.values()])
        for (setting, difference), p in zip(pairs.items(), corrected, strict=True):
            found[setting][metric] = difference, float(p)
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
        if all(value == plain(wanted.get(key, wanted.get(keys[key], value))) for key, value in setting)
    ]
    if len(fits) != 1:
        known = "; ".join(label(dict(setting)) for setting in settings[:8])
        raise ConfigError(f"--baseline='{text}' names {len(fits)} settings; name one of: {known}.")
    return fits[0]


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
    done = len(summary.records)
    return str(done) if not summary.missing else f"{done} of {done + summary.missing}"
