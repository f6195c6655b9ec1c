"""The figure of a sweep: loss curves with bands over the seeds, and the metric against each axis of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pe_lab.lab.sweeps.cells import label
from pe_lab.lab.sweeps.table import TRAINING, VALIDATION, Setting, SweepTable, numeric
from pe_lab.page.figure_files import render_all
from pe_lab.page.plot import MOST
from pe_lab.page.run_charts import offsets
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import shortened
from pe_lab.results.groups import curve_over_seeds
from pe_lab.results.runs import RunFiles
from pe_lab.results.statistics import Mean

BINS = 100  # points of a curve: each is the mean of the steps between two of them
LOGARITHMIC = 3  # an axis whose largest value is so many times its smallest
NAMES = {VALIDATION: "validation loss", TRAINING: "training loss"}
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
