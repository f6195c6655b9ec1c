"""The line charts of an analysis on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pe_lab.page.chart_parts import MOST, Axis, Series, ask_for_all, legend
from pe_lab.page.charts import line_chart
from pe_lab.page.figure_axes import (
    axis_limits,
    axis_number,
    counts,
    every,
    in_powers_of_two,
    labels_of,
    powers_of_two,
    shift,
    tokens_text,
)
from pe_lab.page.markup import Markup, element
from pe_lab.page.ticks import linear_ticks
from pe_lab.page.variants import NAMES, STYLES, Style
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import Number, shortened

COLOURS = ("ntk", "nope", "drope", "yarn", "pi", "extra-1", "rope", "extra-3", "extra-4", "extra-2")
DASHES = (None, "7 3", "2 3", "9 3 2 3")
SIZES = {1: "wide", 2: "half", 3: "third", 4: "half", 5: "third", 6: "third"}  # by number of panels; else small


def line_charts(figure: LineCharts) -> Markup:
    """All panels of a figure on the same axes: a large one, a few side by side, or many small ones with one legend."""
    styles = line_styles(labels_of(figure))
    first = list(styles)
    x, y = _axes(figure)
    size = SIZES.get(len(figure.panels), "small")
    charts, drawn = [], {}
    for name, lines in figure.panels:
        series = [_series(line, figure, styles) for line in lines]
        drawn |= {one.name: one for one in series}
        if len(figure.panels) == 1:
            title = f"{figure.title}: {name}" if name else figure.title
            return line_chart(title, series, x, y, figure.marks, figure.caption, size, first)
        charts.append(line_chart(name, series, x, y, figure.marks, size=size, first=first))
    title = element("p", figure.title, class_="title")
    caption = element("figcaption", figure.caption)
    if size != "small":
        look = "grid thirds" if size == "third" else "grid"
        return element("div", title, element("div", charts, class_=look), caption, class_="below")
    marks = [f"The vertical line marks {axis_number(at)}: {text}." for at, text in figure.marks]
    words = " ".join([f"Upwards: {figure.y_label}. To the right: {figure.x_label}.", *marks])
    named = [drawn[shortened(label)] for label in styles if shortened(label) in drawn]
    named = [replace(one, hidden=n >= MOST) for n, one in enumerate(named)]
    return element(
        "div",
        title,
        ask_for_all(named),
        legend(named),
        element("p", words, class_="soft small"),
        element("div", charts, class_="smalls"),
        caption,
        class_="chart many",
    )


def line_styles(labels: Sequence[str]) -> dict[str, Style]:
    """A style for each label: that of the page's own variants where it has their names, else a spare one."""
    variants = {NAMES.get(kind, kind): style for kind, style in STYLES.items()}
    styles = {label: variants.get(label) for label in labels}
    taken = {style.colour for style in styles.values() if style}
    spare = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
    others = [label for label, style in styles.items() if style is None]
    for n, label in enumerate(others):
        styles[label] = Style(spare[n % len(spare)], DASHES[(n + n // len(spare)) % len(DASHES)])
    return {label: style or STYLES["RoPE"] for label, style in styles.items()}


def _series(line: Line, figure: LineCharts, styles: dict[str, Style]) -> Series:
    """A line of a panel; points of several labels stand beside each other."""
    beside = shift(figure, list(styles).index(line.label))
    points = [(float(a) + beside, float(b)) for a, b in zip(line.x, line.y, strict=True)]
    intervals: list[tuple[Number, Number]] = []
    if line.low is not None and line.high is not None:
        intervals = [(float(low), float(high)) for low, high in zip(line.low, line.high, strict=True)]
    few = len(points) <= 16 and len(figure.panels) <= len(SIZES)
    style, points_only = styles[line.label], figure.points
    return Series(
        shortened(line.label), points, style, markers=few, line=not points_only, intervals=intervals, broken=True
    )


def _axes(figure: LineCharts) -> tuple[Axis, Axis]:
    """The axes that all panels share."""
    (left, right), (low, high) = axis_limits(figure)
    margin = 0.0 if figure.log_y else 0.05 * (high - low)
    y = Axis(figure.y_label, figure.log_y, axis_number, domain=(low - margin, high + margin))
    names, ticks, show = figure.x_names, None, axis_number
    if names:
        ticks = [float(n) for n in range(0, len(names), every(len(names), 24))]

        def show(value: Number) -> str:
            return shortened(names[min(max(math.floor(value + 0.5), 0), len(names) - 1)], 24)

    elif in_powers_of_two(figure):
        ticks = powers_of_two(left, right, 7)

        def show(value: Number) -> str:
            whole = value >= 1 and np.log2(value).is_integer()
            return tokens_text(int(value)) if whole else axis_number(value)

    elif counts(figure) and not figure.log_x:
        ticks = [n for n in linear_ticks(left, right) if float(n).is_integer()]
    return Axis(figure.x_label, figure.log_x, show, ticks, (left, right)), y
