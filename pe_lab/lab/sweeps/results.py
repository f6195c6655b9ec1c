"""What came of a sweep: the numbers of each cell, their means over the seeds by setting, and the files that show them.

The files are table.csv, cells.csv, table.md, figure.png, figure.svg and report.html.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pe_lab import terminal
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.sweeps.cells import Sweep, SweepCell, label, plain, short_keys, split_values
from pe_lab.lab.sweeps.state import is_trained, phases_of
from pe_lab.page.document import build_page
from pe_lab.page.figure_files import render_all
from pe_lab.page.plot import MOST
from pe_lab.page.run_charts import offsets
from pe_lab.results.comparison import last_validation
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import shortened
from pe_lab.results.groups import curve_over_seeds
from pe_lab.results.records import Record, number
from pe_lab.results.runs import RunFiles, read_runs
from pe_lab.results.scores import build_tables, label_of
from pe_lab.results.standing import cautions, is_former
from pe_lab.results.statistics import Difference, Mean
from pe_lab.results.table import Cell, Metric, Table, TextTable, csv_text, seeds_table, with_half
from pe_lab.storage import AnyPath, write_files

VALIDATION, TRAINING = "validation_loss", "loss"
NAMES = {VALIDATION: "validation loss", TRAINING: "training loss"}
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


# ---------------------------------------------------------------------------------------------------------------------
# The files, and the table in a terminal

SHOWN = 4  # metrics in a terminal; table.md has all


def write_results(sweep: Sweep, metric: str | None = None, baseline: str | None = None) -> SweepTable:
    """Writes the files of the results of a sweep, and returns its table; the files need a complete cell.

    Raises:
      ConfigError: no complete cell has this metric, or no setting is this baseline.
      DataError: a file cannot be written.
    """
    table = summarize(sweep, collect(sweep), metric, baseline)
    if not table.records:
        return table
    files: dict[AnyPath, bytes | str] = {
        sweep.directory / "table.csv": _settings_csv(table),
        sweep.directory / "cells.csv": _cells_csv(table),
        sweep.directory / "table.md": _markdown(sweep, table),
        sweep.directory / "report.html": build_page([record.run for record in table.records]),
    }
    for form in ("png", "svg"):
        files[sweep.directory / f"figure.{form}"] = draw(table, form)
    write_files(files)
    return table


def shown(table: SweepTable) -> str:
    """The table for a terminal."""
    metrics = _first(table)[:SHOWN]
    texts = _texts(table, metrics)
    left = len(table.metrics) - len(metrics)
    more = f"\n{left} more metrics are in table.md" if left else ""
    caption = "\n".join([_caption(table), *_remarks(table)])
    return f"{terminal.table(texts.header, texts.rows, texts.words)}{more}\n{caption}"


def _remarks(table: SweepTable) -> list[str]:
    """What the numbers of some cells lack, the first few."""
    found = [remark for record in table.records for remark in record.remarks]
    return found[:SHOWN] + ([f"{len(found) - SHOWN} more cells have such remarks."] if len(found) > SHOWN else [])


def _first(table: SweepTable) -> list[str]:
    """The metrics, the one that sorts first."""
    return [table.metric, *(name for name in table.metrics if name != table.metric)] if table.metrics else []


def _texts(table: SweepTable, metrics: Sequence[str]) -> TextTable:
    """A row for each setting; of the first metric with the difference to the baseline, and the corrected p-value."""
    header, rows = [*table.keys.values(), "seeds"], []
    for n, name in enumerate(metrics):
        header += [NAMES.get(name, name), *(["difference", "p"] if n == 0 else [])]
    differences = table.differences(metrics[0]) if metrics else {}
    for name, setting in table.numbers.rows.items():
        row, of = [*setting.values.values(), setting.seeds], len(setting.records)
        for n, metric in enumerate(metrics):
            found = table.cell(name, metric)
            few = f" ({len(found.scores)} of {of})" if found and len(found.scores) < of else ""
            row.append(
                "–" if found is None else with_half(found.value, found.ends and found.ends[1], ".4g", ".4g") + few
            )
            if n == 0 and (one := differences.get(name)):
                p = "" if math.isnan(one.corrected) else f"{one.corrected:.2g}"
                row += [with_half(one.mean, one.high, "+.3g", ".2g"), p]
            elif n == 0:
                row += ["", ""]
        rows.append(tuple(row))
    return TextTable("", tuple(header), tuple(rows), len(table.keys))


def _caption(table: SweepTable) -> str:
    name = NAMES.get(table.metric, table.metric)
    order = "highest" if table.metric in table.higher else "lowest"
    which = "the best setting" if table.best_is_baseline else "the baseline"
    fewer = any(
        len(cell.scores) < len(table.numbers.rows[label].records) for (label, _), cell in table.numbers.cells.items()
    )
    few = " (2 of 3): of so many seeds, where not all have been measured." if fewer else ""
    chosen = " It was chosen by these numbers, which favours it." if table.best_is_baseline else ""
    return (
        f"{order.capitalize()} {name} first. ±: 95% intervals over the seeds (Student's t), of two seeds their range. "
        f"Differences of {name}: to {which} ({table.baseline}), on the same seeds, p by Student's t test for pairs, "
        f"corrected for the number of settings by Holm's method.{chosen}{few}"
    )


def _markdown(sweep: Sweep, table: SweepTable) -> str:
    title = f"Sweep of {sweep.description.get('recipe', '')}"
    body = _texts(table, _first(table)).markdown
    return "\n\n".join([f"# {title}", body, _caption(table), *_remarks(table)]) + "\n"


def _settings_csv(table: SweepTable) -> str:
    """A line for each setting; numbers that are not known are empty."""
    parts = ("mean", "low", "high", "difference", "difference_low", "difference_high", "p")
    header = ["setting", *table.keys, "seeds", "missing", *(f"{m} {part}" for m in table.metrics for part in parts)]
    rows = []
    differences = {metric: table.differences(metric) for metric in table.metrics}
    for name, setting in table.numbers.rows.items():
        row = [name, *setting.values.values(), len(setting.records), setting.missing]
        for metric in table.metrics:
            cell, one = table.cell(name, metric), differences[metric].get(name)
            mean = (cell.value, *(cell.ends or ("", ""))) if cell else ("", "", "")
            numbers = (one.mean, one.low, one.high, one.corrected) if one else ("", "", "", "")
            row += ["" if number != number else number for number in (*mean, *numbers)]
        rows.append(row)
    return csv_text([header, *rows])


def _cells_csv(table: SweepTable) -> str:
    """A line for each complete cell."""
    rows = [["cell", *table.keys, "seed", *table.metrics]]
    for record in table.records:
        cell = record.cell
        seed = "" if cell.seed is None else cell.seed
        setting = setting_of(cell, table.keys).values()
        rows.append([cell.name, *setting, seed, *(record.metrics.get(name, "") for name in table.metrics)])
    return csv_text(rows)


# ---------------------------------------------------------------------------------------------------------------------
# The figure: loss curves with bands over the seeds, and the metric against each axis of numbers

BINS = 100  # points of a curve: each is the mean of the steps between two of them
LOGARITHMIC = 3  # an axis whose largest value is so many times its smallest
NATS = "nats per token"


def draw(table: SweepTable, form: str) -> bytes:
    """The figure as the bytes of a `png` or `svg` file."""
    curves = {name: found for name in (TRAINING, VALIDATION) if (found := _curves(table, name))}
    figures = [_loss_chart(table, name, found) for name, found in curves.items()]
    figures += [_axis_chart(table, key, values) for key, values in numeric(table).items()]
    return render_all([figures], form)


def _curves(table: SweepTable, name: str) -> dict[str, list[tuple[float, Mean]]]:
    """{setting: (tokens, mean and interval over its seeds)}; a setting without two common points is left out."""
    found = {}
    for setting, row in table.numbers.rows.items():
        curve = curve_over_seeds([_binned(record.run, name) for record in row.records])
        common = [(tokens, over) for tokens, over in curve if over.count == len(row.records)]
        if len(common) > 1:
            found[setting] = common
    return found


def _binned(run: RunFiles, name: str) -> list[tuple[float, float]]:
    """(tokens, mean value) of a curve over all phases, in at most `BINS` parts of equal numbers of points."""
    before = offsets(run)
    points = sorted((before[phase.name] + x, y) for phase in run.phases for x, y in phase.series(name))
    parts = np.array_split(np.array(points), min(BINS, len(points))) if points else []
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def _loss_chart(table: SweepTable, name: str, curves: Mapping[str, Sequence[tuple[float, Mean]]]) -> LineCharts:
    """The means over seeds of the best settings and of the baseline as lines, with their intervals as bands."""
    best = [*curves][:MOST]
    named = best + [setting for setting in curves if setting == table.baseline and setting not in best]
    lines = [
        Line(setting, *np.array([(tokens, over.mean) for tokens, over in curve]).T, faint=True)
        for setting, curve in curves.items()
        if setting not in named
    ]
    for setting in named:
        tokens, found = zip(*curves[setting], strict=True)
        mean, low, high = np.array([one.numbers for one in found]).T
        lines.append(Line(shortened(setting, 60), np.array(tokens), mean, low, high))
    means = np.concatenate([line.y for line in lines])
    margin = 0.05 * float(np.ptp(means) or 1.0)  # bands of three seeds may reach far
    ends = (float(means.min()) - margin, float(means.max()) + margin)
    left_out = len(curves) - len(named)
    title = f"{NAMES[name].capitalize()}, best settings first" + (f"; {left_out} more are grey" * bool(left_out))
    return LineCharts(
        name,
        title,
        "",
        (("", tuple(lines)),),
        "training tokens",
        f"{NAMES[name]}, {NATS}",
        x_unit="tokens",
        y_limits=ends,
    )


def _axis_chart(table: SweepTable, key: str, values: Sequence[float]) -> LineCharts:
    """The metric against one axis, with 95% intervals; a line for each setting of the other axes."""
    others: dict[str, list[tuple[float, str]]] = {}
    settings: Mapping[str, Setting] = table.numbers.rows
    for name, row in settings.items():
        if table.cell(name, table.metric):
            rest = {other: value for other, value in row.values.items() if other != key}
            others.setdefault(label(rest) if rest else "", []).append((float(row.values[key]), name))
    lines = []
    for rest, found in sorted(others.items()):
        cells = [(x, table.cell(name, table.metric)) for x, name in sorted(found)]
        numbers = [(x, cell.value, *(cell.ends or (np.nan, np.nan))) for x, cell in cells]
        lines.append(Line(shortened(rest, 40), *np.array(numbers).T))
    metric = f"{NAMES[table.metric]}, {NATS}" if table.metric in NAMES else table.metric
    log = values[0] > 0 and values[-1] >= LOGARITHMIC * values[0]
    ticks = tuple(values) if len(values) <= 8 else ()
    short = table.keys[key]
    return LineCharts(
        key, f"{metric} by {short}", "", (("", tuple(lines)),), short, metric, log_x=log, bars=True, x_ticks=ticks
    )


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
