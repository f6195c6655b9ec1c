"""The figure of a sweep: loss curves with bands over the seeds, and the metric against each axis of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pe_lab.lab.sweeps.grid import label
from pe_lab.lab.sweeps.table import TRAINING, VALIDATION, SweepTable, numeric
from pe_lab.page.chart_parts import MOST
from pe_lab.page.figure_style import OKABE_ITO, look, render
from pe_lab.page.loss_charts import offsets
from pe_lab.results.formatting import count, shortened
from pe_lab.results.groups import curve_over_seeds
from pe_lab.results.statistics import Mean
from pe_lab.results.runs import RunFiles

BINS = 100  # points of a curve: each is the mean of the steps between two of them
LOGARITHMIC = 3  # an axis whose largest value is so many times its smallest
GREY = "#b8bcc2"  # of the settings that are not named
PLAIN = {"parse_math": False}  # a name with a $ is no formula
AXIS = {VALIDATION: "validation loss, nats per token", TRAINING: "training loss, nats per token"}


def draw(table: SweepTable, form: str) -> bytes:
    """The figure as the bytes of a `png` or `svg` file."""
    from matplotlib.figure import Figure

    curves = {name: found for name in (TRAINING, VALIDATION) if (found := _curves(table, name))}
    axes = numeric(table)
    columns = min(len(curves) + len(axes), 2)
    rows = -(-(len(curves) + len(axes)) // columns)
    names = [label(summary.setting) for summary in table.summaries if summary.records]
    listed = names[:MOST] + [name for name in names[MOST:] if name == table.baseline]
    styles = dict.fromkeys(names, GREY) | dict(zip(listed, OKABE_ITO, strict=False))
    with look():
        figure = Figure(figsize=(7, 2.9 * rows + 0.17 * -(-len(listed) // 2) + 0.2), layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flatten())
        for panel, (name, lines) in zip(panels, curves.items(), strict=False):
            _draw_curves(panel, lines, styles, name)
        for panel, (key, values) in zip(panels[len(curves) :], axes.items(), strict=False):
            _draw_axis(panel, table, key, values)
        for empty in panels[len(curves) + len(axes) :]:
            empty.remove()
        if len(names) > 1:
            _legend(figure, listed, styles, len(names) - len(listed))
        return render(figure, form)


def _curves(table: SweepTable, name: str) -> dict[str, list[tuple[float, Mean]]]:
    """{setting: (tokens, mean and interval over its seeds)}; a setting without two common points is left out."""
    found = {}
    for summary in table.summaries:
        curve = curve_over_seeds([_binned(record.run, name) for record in summary.records])
        common = [(tokens, over) for tokens, over in curve if over.count == len(summary.records)]
        if len(common) > 1:
            found[label(summary.setting)] = common
    return found


def _binned(run: RunFiles, name: str) -> list[tuple[float, float]]:
    """(tokens, mean value) of a curve over all phases, in at most `BINS` parts of equal numbers of points."""
    before = offsets(run)
    points = sorted((before[phase.name] + x, y) for phase in run.phases for x, y in phase.series(name))
    parts = np.array_split(np.array(points), min(BINS, len(points))) if points else []
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def _draw_curves(panel: Any, lines: Mapping[str, Any], styles: Mapping[str, Any], name: str) -> None:
    """Means over the seeds as lines, their intervals as bands."""
    ends = []
    for setting, curve in reversed(lines.items()):  # the best on top
        tokens = [x for x, _ in curve]
        means, lows, highs, _ = zip(*(over for _, over in curve), strict=True)
        named = styles[setting] != GREY
        panel.plot(tokens, means, color=styles[setting], linewidth=1.4 if named else 0.6)
        if named:
            panel.fill_between(tokens, lows, highs, color=styles[setting], alpha=0.18, linewidth=0)
        ends += means
    low, high = min(ends), max(ends)
    panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))  # bands of three seeds may reach far
    panel.set_xlabel("training tokens")
    panel.set_ylabel(AXIS[name])
    panel.xaxis.set_major_formatter(lambda value, _: count(value))


def _draw_axis(panel: Any, table: SweepTable, key: str, values: Sequence[float]) -> None:
    """The metric against one axis, with 95% intervals; a line for each setting of the other axes."""
    others: dict[str, list[Any]] = {}
    for summary in table.summaries:
        if table.metric in summary.means:
            rest = {name: value for name, value in summary.setting.items() if name != key}
            others.setdefault(label(rest) if rest else "", []).append(summary)
    for n, (name, summaries) in enumerate(sorted(others.items())):
        summaries = sorted(summaries, key=lambda summary: float(summary.setting[key]))
        means = [summary.means[table.metric] for summary in summaries]
        x = [float(summary.setting[key]) for summary in summaries]
        y = [mean.mean for mean in means]
        bars = np.nan_to_num([mean.high - mean.mean for mean in means])
        style = {"color": OKABE_ITO[n % len(OKABE_ITO)], "marker": "os^Dv"[n % 5], "markersize": 4, "linewidth": 1.2}
        panel.errorbar(x, y, yerr=bars, capsize=2.5, label=shortened(name, 40) if len(others) > 1 else None, **style)
    if values[0] > 0 and values[-1] >= LOGARITHMIC * values[0]:
        panel.set_xscale("log")
    if len(values) <= 8:
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.minorticks_off()
    panel.set_xlabel(table.keys[key], **PLAIN)
    panel.set_ylabel(AXIS.get(table.metric, table.metric), **PLAIN)
    if 1 < len(others) <= 12:
        panel.legend(fontsize=7 if len(others) <= 6 else 5.5)


def _legend(figure: Any, names: Sequence[str], styles: Mapping[str, Any], left_out: int) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=styles[name], linewidth=2) for name in names]
    texts = [shortened(name, 60) for name in names]
    title = f"best first; {left_out} more are grey" if left_out else "best first"
    drawn = figure.legend(
        handles, texts, loc="outside lower center", ncols=2 if len(names) > 1 else 1, fontsize=7.5, title=title
    )
    drawn.get_title().set_fontsize(7.5)
    for text in drawn.get_texts():
        text.set_parse_math(False)
