"""The figures of an analysis as files for papers: small multiples on one page, 7 inches wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pe_lab.page import figure_style
from pe_lab.page.figure_axes import (
    axis_limits,
    axis_number,
    colour_limits,
    colour_map,
    counts,
    every,
    exceeds,
    in_powers_of_two,
    labels_of,
    powers_of_two,
    shift,
    tick_names,
    tokens_text,
)
from pe_lab.page.figure_style import OKABE_ITO, look
from pe_lab.page.ticks import log_ticks
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.formatting import shortened

WIDTH, HEIGHT = 7.0, 9.2  # inches; the height is the most that panels may take on a page
TICK, NAME, LABEL, TITLE = 6.5, 7.5, 8.5, 10.5  # points
LETTER = 0.62  # width of a letter or a digit in units of its size
PLAIN = {"parse_math": False}  # a name with a $ is no formula
DASHES = ((), (5, 1.5), (1.5, 1.2), (6, 1.5, 1.5, 1.5), (3, 1), (1, 2), (6, 1, 1, 1, 1, 1))
MARKERS = "osD^vPX*"
MARK_COLOUR, MARK_DASHES = "#555555", ((3, 2), (1, 1.5), (5, 2, 1, 2))


def draw(figure: Figure) -> Any:
    """The matplotlib figure of an analysis's figure. Its caption is not drawn, but printed beside it."""
    with look():
        return _draw_maps(figure) if isinstance(figure, HeatMaps) else _draw_lines(figure)


def render(figure: Figure, form: str) -> bytes:
    """An analysis's figure as the bytes of a `pdf`, `png` or `svg` file; the same bytes each time."""
    return figure_style.render(draw(figure), form)


def grid(count: int, wide: bool = False) -> tuple[int, int]:
    """Rows and columns of small multiples: few empty places, and about five columns (`wide`: about three)."""
    choices = [3, 2] if wide else [5, 6, 4, 3] if count <= 42 else [7, 8, 6]
    if count <= choices[0]:
        return 1, count
    columns = min(choices, key=lambda columns: (-count % columns, choices.index(columns)))
    return -(-count // columns), columns


def _panels(figure: Any, rows: int, columns: int, count: int) -> list[Any]:
    """The axes of `count` panels that share theirs; ticks have labels on the left, and below each column."""
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for empty in axes[count:]:
        empty.remove()
    for n, panel in enumerate(axes[:count]):
        panel.tick_params(length=2, pad=1.5, labelsize=TICK, labelbottom=n + columns >= count)
    return list(axes[:count])


def _titles(figure: Any, title: str, x: str, y: str) -> None:
    """The title, and one label for the axes of all panels."""
    figure.suptitle(textwrap.fill(title, 84), fontsize=TITLE, **PLAIN)
    figure.supxlabel(x, fontsize=LABEL, **PLAIN)
    figure.supylabel(y, fontsize=LABEL, **PLAIN)


def _name(panel: Any, name: str, width: float) -> None:
    """The name above a panel, in two lines if it is long."""
    letters = int(width * 72 / NAME / LETTER)
    lines = textwrap.fill(shortened(name, 2 * letters), letters)
    panel.set_title(lines, fontsize=NAME, pad=2.5, loc="left", linespacing=1.05, **PLAIN)


def _draw_maps(drawn: HeatMaps) -> Any:
    """All panels of a figure of heat maps on one scale of colours; cells that were not measured are hatched."""
    from matplotlib.figure import Figure

    count, y_count, x_count = drawn.values.shape
    rows, columns = grid(count, wide=x_count > 48)
    width = (WIDTH - 1.3) / columns
    cell = width / max(x_count, 1)
    tallest = min((HEIGHT - 1.2) / rows - 0.2, 2.4 if count > 1 else 4.8)
    height = min(max(y_count * cell * (1.7 if count > 1 else 1.0), 0.5 if count > 1 else 1.6), tallest)
    beside = rows * (height + 0.2) > 2  # the bar of colours, which would be too short there for few and low panels
    figure = Figure(figsize=(WIDTH, 1.1 + rows * (height + 0.2) + (0 if beside else 0.55)), layout="constrained")
    panels = _panels(figure, rows, columns, count)
    low, high = colour_limits(drawn)
    for panel, name, values in zip(panels, drawn.panels, drawn.values, strict=True):
        panel.patch.set(facecolor="#ededed", hatch="//////", edgecolor="#c4c4c4", linewidth=0)
        image = panel.imshow(
            np.ma.masked_where(np.isnan(values), values),
            cmap=colour_map(drawn),
            vmin=low,
            vmax=high,
            aspect="auto",
            interpolation="nearest",
        )
        panel.grid(False)
        panel.spines[:].set_visible(False)
        _name(panel, name, width)
    _name_ticks(panels[0].xaxis, tick_names(drawn.columns, drawn.column_label), width, upright=True)
    _name_ticks(panels[0].yaxis, tick_names(drawn.rows, drawn.row_label), height)
    _titles(figure, drawn.title, drawn.column_label, drawn.row_label)
    side = {"location": "right", "aspect": 30} if beside else {"location": "top", "aspect": 50, "shrink": 0.6}
    under, over = exceeds(drawn)
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((under, over), "neither")
    bar = figure.colorbar(image, ax=panels, pad=0.015, fraction=0.05, extend=extend, **side)
    bar.set_label(textwrap.fill(drawn.value_label, 60), fontsize=LABEL, **PLAIN)
    bar.ax.tick_params(length=2, labelsize=TICK + 0.5)
    bar.outline.set_visible(False)
    return figure


def _name_ticks(axis: Any, names: Sequence[str], inches: float, upright: bool = False) -> None:
    """Labels at 0, 1, 2 ...: as many names as fit. `upright` ones stand side by side, long ones among them on end."""
    names = [shortened(name, 16) for name in names]
    line = 1.3 * TICK / 72
    longest = max(map(len, names), default=1) * LETTER * TICK / 72 + 0.08
    on_end = upright and inches / longest < min(len(names), 3)
    step = every(len(names), inches / (longest if upright and not on_end else line))
    axis.set_ticks(range(0, len(names), step), labels=names[::step], rotation=90 if on_end else 0, **PLAIN)


def _draw_lines(drawn: LineCharts) -> Any:
    """All panels of a figure of lines on the same axes, with one legend below them."""
    from matplotlib.figure import Figure

    count, labels = len(drawn.panels), labels_of(drawn)
    rows, columns = grid(count)
    alone = count == 1
    height = 3.2 if alone else min(max((HEIGHT - 1.4) / rows - 0.25, 0.7), 2.4 / columns + 0.45)
    width = (WIDTH - 0.7) / columns
    names, across = _legend_names(drawn, labels, marks=not alone)
    body, foot = 0.8 + rows * (height + 0.25), 0.05 + 0.19 * -(-len(names) // across)
    figure = Figure(figsize=(WIDTH, body + foot), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(body, foot))
    panels = _panels(upper, rows, columns, count)
    for panel, (name, lines) in zip(panels, drawn.panels, strict=True):
        for line in lines:
            _draw_line(panel, line, labels.index(line.label), drawn, 1.8 if alone else 1.2)
        for n, (at, text) in enumerate(drawn.marks):
            panel.axvline(at, color=MARK_COLOUR, linewidth=0.9, dashes=MARK_DASHES[n % 3], zorder=1.5)
            if alone:
                place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -3), "textcoords": "offset points"}
                style = {"fontsize": TICK + 0.5, "color": MARK_COLOUR, "rotation": 90, "va": "top"}
                panel.annotate(text, (at, 1), **place, **style, **PLAIN)
        if not alone or name:
            _name(panel, name, width)
    _scale_axes(panels[0], drawn, width, height)
    _titles(upper, drawn.title, drawn.x_label, drawn.y_label)
    if names:
        _add_legend(lower, drawn, names, across)
    return figure


def _legend_names(drawn: LineCharts, labels: Sequence[str], marks: bool) -> tuple[list[str], int]:
    """What the legend explains, and in how many columns: the labels if they are several, and with `marks` the marks."""
    names = [*(labels if len(labels) > 1 else []), *(text for _, text in drawn.marks if marks)]
    names = [shortened(name, 60) for name in names]
    longest = max(map(len, names), default=0)
    return names, min(max(int(WIDTH * 72 / ((longest * LETTER + 5.5) * LABEL)), 1), max(len(names), 1))


def _look_of(label: int, points: bool) -> dict[str, Any]:
    """Colour, and dash pattern or marker, of the label of this number; the first 49 differ."""
    cycle, colour = divmod(label, len(OKABE_ITO))
    if points:
        return {"color": OKABE_ITO[colour], "marker": MARKERS[(label + cycle) % len(MARKERS)], "linestyle": "none"}
    dashes = DASHES[(label + cycle) % len(DASHES)]
    return {"color": OKABE_ITO[colour], "linestyle": (0, dashes) if dashes else "-"}


def _draw_line(panel: Any, line: Line, label: int, drawn: LineCharts, width: float) -> None:
    """One line with its interval as a band, or points with bars."""
    style = _look_of(label, drawn.points)
    x, y = np.asarray(line.x, np.float64), np.array(line.y, np.float64)
    x = x + shift(drawn, label)
    for values, log in ((x, drawn.log_x), (y, drawn.log_y)):
        y = np.where((values > 0) | (not log), y, np.nan)  # a logarithmic axis has no place for 0
    if line.low is not None and line.high is not None:
        low, high = np.asarray(line.low, np.float64), np.asarray(line.high, np.float64)
        low = np.where((low > 0) | (not drawn.log_y) | np.isnan(low), low, axis_limits(drawn)[1][0])
        if drawn.points:
            panel.vlines(x, low, high, color=style["color"], linewidth=0.8 * width)
        else:
            panel.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
    alone = np.isfinite(y) & ~np.isfinite(np.append(y[1:], np.nan)) & ~np.isfinite(np.append(np.nan, y[:-1]))
    panel.plot(x, y, linewidth=width, markersize=2.4 * width, **style)
    if not drawn.points and alone.any():  # a point between two gaps is no line
        panel.plot(x[alone], y[alone], color=style["color"], marker="o", markersize=2 * width, linestyle="none")


def _scale_axes(panel: Any, drawn: LineCharts, width: float, height: float) -> None:
    """Ends, scales and ticks of the axes that all panels share."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    (left, right), (low, high) = axis_limits(drawn)
    numbers = FuncFormatter(lambda value, _: axis_number(value))
    across, upwards = max(int(width / 0.45), 2), max(int(height / 0.3), 2)
    panel.set(xscale="log" if drawn.log_x else "linear", yscale="log" if drawn.log_y else "linear")
    ends = ((panel.xaxis, drawn.log_x, across, left, right), (panel.yaxis, drawn.log_y, upwards, low, high))
    for axis, log, wanted, first, last in ends:
        linear = MaxNLocator(min(wanted, 7), steps=[1, 2, 2.5, 5, 10], integer=axis is panel.xaxis and counts(drawn))
        axis.set_major_locator(FixedLocator(log_ticks(first, last, min(wanted, 7))) if log else linear)
        axis.set_major_formatter(numbers)
        axis.set_minor_locator(NullLocator())
    if drawn.x_names:
        _name_ticks(panel.xaxis, tick_names(drawn.x_names, drawn.x_label), width * 0.95, upright=True)
    elif in_powers_of_two(drawn):
        panel.xaxis.set_major_locator(FixedLocator(powers_of_two(left, right, min(int(width / 0.3), 9))))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(round(value))))
    panel.set_xlim(*_wider(left, right, drawn.log_x, 0.02))
    panel.set_ylim(*_wider(low, high, drawn.log_y, 0.05))


def _wider(low: float, high: float, log: bool, share: float) -> tuple[float, float]:
    """Two ends with a margin of a share of their distance."""
    if log:
        return low * (low / high) ** share, high * (high / low) ** share
    return low - share * (high - low), high + share * (high - low)


def _add_legend(figure: Any, drawn: LineCharts, names: Sequence[str], columns: int) -> None:
    """One legend for all panels: lines or points of the labels, then the vertical lines of the marks."""
    from matplotlib.lines import Line2D

    count = len(labels_of(drawn)) if len(labels_of(drawn)) > 1 else 0
    handles = [Line2D([], [], markersize=4, linewidth=1.6, **_look_of(n, drawn.points)) for n in range(count)]
    style = {"color": MARK_COLOUR, "linewidth": 0.9}
    handles += [Line2D([], [], dashes=MARK_DASHES[n % 3], **style) for n in range(len(names) - count)]
    fonts = {"fontsize": LABEL, "handlelength": 2.8, "frameon": False, "borderpad": 0, "labelspacing": 0.3}
    for text in figure.legend(handles, names, loc="center", ncols=columns, **fonts).get_texts():
        text.set_parse_math(False)
