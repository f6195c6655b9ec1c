"""Charts on the page: plots as inline SVG, which need no script and no download, with legend and tooltip.

Each chart is drawn twice, for wide and for narrow screens, so that text keeps its size on a phone; the stylesheet shows
one of the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pe_lab.page.colours import COLOURS, DASHES, INK, STYLES, Style
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.plot import (
    MOST,
    Frame,
    Mark,
    PlotAxis,
    Point,
    Series,
    axes_of,
    axis_number,
    decimate,
    draw,
    drawable,
    labels_of,
    legend_shapes,
    names_fit,
    powers_of_two,
    shift,
    stroke_of,
    text_shape,
    with_intervals,
)
from pe_lab.page.variants import NAMES, SCORED, suite_title, task_name
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import Number, count, listing, percent, shortened, times
from pe_lab.results.records import Record, as_dict, bins, number
from pe_lab.results.runs import RunFiles
from pe_lab.results.statistics import exp
from pe_lab.results.table import Bucket, Cell, Length, Table
from pe_lab.results.variants import DROPPED, kind

FRAMES = {
    "wide": Frame(960, 360, 56, 176, 28, 46, labelled=True, ticks=(6, 6)),
    "half": Frame(520, 310, 52, 168, 28, 46, labelled=True, ticks=(6, 6)),
}
NARROW = Frame(358, 280, 44, 14, 28, 44)
SMALL = Frame(190, 136, 38, 8, 8, 24, named=False, ticks=(4, 3))
FAINT = Style("rope", None, 1.0)
SIZES = {1: "wide", 2: "half", 3: "third", 4: "half", 5: "third", 6: "third"}  # by number of panels; else small


def line_chart(
    title: str,
    series: Sequence[Series],
    x: PlotAxis,
    y: PlotAxis,
    marks: Sequence[Mark] = (),
    caption: object = "",
    size: str = "wide",
    first: Sequence[str] = (),
) -> Markup:
    """A figure with the chart in two sizes, a legend, and its data for the tooltip; "" if nothing can be drawn.

    Points that are not finite, or not positive on a logarithmic axis, are left out. `size` is wide, or half or third
    of a laptop's page, or small: one of many charts with the same axes, whose legend and names stand beside them all.

    Of more than `MOST` named series, the others are hidden until a box is checked, which the page has above the chart
    (beside them all, if `small`). Those that `first` names are shown first, then the others in their order.
    """
    series = [clean for s in series if (clean := drawable(s, x, y)).points]
    if not series:
        return Markup("")
    drawn = {s.name for s in series if not s.faint}
    order = dict.fromkeys([*(name for name in map(shortened, first) if name in drawn), *(s.name for s in series)])
    shown = [name for name in order if name in drawn][:MOST]
    series = [replace(s, hidden=s.name in drawn and s.name not in shown) for s in series]
    named = [s for s in series if not s.faint]
    summary = "; ".join(
        f"{s.name}: from {y.show(s.points[0][1])} at {x.show(s.points[0][0])} to {y.show(s.points[-1][1])} at "
        f"{x.show(s.points[-1][0])}"
        for s in named
    )
    description = f"{y.label} against {x.label}. {summary}."
    small, dots = size == "small", not any(s.line for s in named)
    long = size in FRAMES and not names_fit(named, FRAMES[size])
    data = [
        {
            "n": s.name,
            "c": s.style.colour,
            "p": [_told(point, x, y) for point in decimate(with_intervals(s), 40 if small else 160)],
            **({"m": 1} if s.hidden else {}),
        }
        for s in named
    ]
    frames = [(FRAMES[size], "wide")] if size in FRAMES else []
    frames = [(SMALL, "small")] if small else [*frames, (NARROW, "narrow")]
    return element(
        "figure",
        element("div", title, class_="chart-title"),
        None if small else [ask_for_all(named), legend(named)],
        [_svg(*frame, series, x, y, marks, (title, description), file=frame is frames[0]) for frame in frames],
        element("figcaption", caption) if caption else None,
        class_=f"chart {size}{' dots' * dots}{' long' * long}",
        data_chart=json.dumps({"x": x.label, "y": y.label, "series": data}, separators=(",", ":")),
    )


def _told(point: tuple[Number, Number, tuple[Number, Number] | None], x: PlotAxis, y: PlotAxis) -> list[object]:
    """A point for the tooltip and for files: numbers of six digits, their texts, and the ends of the interval."""
    a, b, ends = point
    interval = f" ({y.show(ends[0])} to {y.show(ends[1])})" if ends else ""
    return [*map(_digits, (a, b)), x.show(a), y.show(b) + interval, *map(_digits, ends or ())]


def _digits(value: Number) -> float:
    return float(f"{value:.6g}")


def _svg(
    frame: Frame,
    size: str,
    series: Sequence[Series],
    x: PlotAxis,
    y: PlotAxis,
    marks: Sequence[Mark],
    texts: tuple[str, str],
    file: bool,
) -> Markup:
    """One SVG of a chart. `texts`: its title and its description. `file`: it is the one that is saved as a file."""
    plot = draw(frame, series, x, y, marks)
    named = sorted((s for s in series if not s.faint), key=lambda s: s.hidden)
    labelled = frame.labelled and all(s.line for s in named) and names_fit(named, frame)  # at the ends of lines
    parts = file_parts(texts[0], [] if labelled else named, (frame.width, frame.height)) if file else None
    return element(
        "svg",
        element("title", texts[0]),
        element("desc", texts[1]) if frame.named else None,
        *plot.shapes,
        viewBox=f"0 0 {frame.width} {frame.height}",
        class_=size,
        role="img",
        aria_label=". ".join(texts),
        data_plot=json.dumps([*plot.area, *plot.x, int(x.log), *plot.y, int(y.log)]),
        data_file=parts and json.dumps(parts, separators=(",", ":"), ensure_ascii=False),
    )


def ask_for_all(series: Sequence[Series]) -> Markup:
    """The box that shows the hidden series of a chart; "" without any."""
    if not any(s.hidden for s in series):
        return Markup("")
    return element("label", element("input", type="checkbox"), f"All {len(series)} lines", class_="all")


def legend(series: Sequence[Series]) -> Markup:
    """Names beside a stroke in each one's colour and dash."""
    items = [
        element(
            "li",
            element("svg", stroke_of(s, 1, 6), width=26, height=12, aria_hidden="true"),
            s.name,
            class_="more" if s.hidden else None,
        )
        for s in series
    ]
    return element("ul", *items, class_="legend")


def file_parts(title: str, named: Sequence[Series], size: tuple[int, int]) -> tuple[str, str]:
    """The box of a picture file of a chart, and what the page has outside the chart: paper, title, names of series."""
    width, height = size
    names, y = legend_shapes(named, 4, height + 14.0, width)
    shapes = [text_shape(title, 4, -14, look="file-title"), *names]
    box = (-6.0, -34.0, max(width, 14.0 + 8 * len(title)) + 12, (y + 10 if named else height) + 34.0)
    paper = element("rect", **dict(zip(("x", "y", "width", "height"), box, strict=True)), fill="#fff")
    return " ".join(f"{part:g}" for part in box), str(text([paper, *shapes]))


# ---------------------------------------------------------------------------------------------------------------------
# An analysis's figures


def line_charts(figure: LineCharts) -> Markup:
    """All panels of a figure on the same axes: a large one, a few side by side, or many small ones with one legend."""
    styles = line_styles(labels_of(figure))
    first = list(styles)
    x, y = axes_of(figure)
    size = SIZES.get(len(figure.panels), "small")
    charts, drawn = [], {}
    for name, lines in figure.panels:
        series = [series_of(line, figure, styles) for line in lines]
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


def series_of(line: Line, figure: LineCharts, styles: dict[str, Style]) -> Series:
    """A line of a panel; points of several labels stand beside each other."""
    style = FAINT if line.faint else styles[line.label]
    beside = 0.0 if line.faint else shift(figure, list(styles).index(line.label))
    points = [(float(a) + beside, float(b)) for a, b in zip(line.x, line.y, strict=True)]
    intervals: list[tuple[Number, Number]] = []
    if line.low is not None and line.high is not None:
        intervals = [(float(low), float(high)) for low, high in zip(line.low, line.high, strict=True)]
    few = len(points) <= 16 and len(figure.panels) <= len(SIZES)
    return Series(
        shortened(line.label),
        points,
        style,
        faint=line.faint,
        markers=few or figure.bars,
        line=not figure.points,
        intervals=intervals,
        broken=True,
        bars=figure.bars,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Scores: by length, by tokens trained, by position in the sequence, and by a needle's distance


def score_chart(
    scores: Table,
    styles: Mapping[str, Style],
    title: str,
    x: PlotAxis | None = None,
    bars: bool = False,
    size: str = "half",
    caption: str = "",
) -> Markup:
    """A table's values against length, with bars of their 95% intervals; "" for fewer than two lengths.

    A table of buckets or of training tokens has an axis `x` of its own. With `bars`, only shares of 1 are drawn, on an
    axis that ends above the highest bar.
    """
    keys = [column.key for column in scores.columns]
    cells = list(scores.cells.values())
    if (x is None and (len(keys) < 2 or min(keys) <= 0)) or (bars and not all(cell.share for cell in cells)):
        return Markup("")
    multiples = all(column.factor is not None for column in scores.columns)
    marks = [(1.0, "trained")] if multiples and 1.0 in keys and min(keys) < 1 else []
    if x is None:
        name = "sequence length / training length" if multiples else "tokens"
        x = PlotAxis(name, True, times if multiples else count, keys)
    series = []
    for label in scores.rows:
        style = styles.get(label, INK)
        found = [(_place(column), cell) for column in scores.columns if (cell := scores.cell(label, column))]
        ends = [cell.ends or (math.nan, math.nan) for _, cell in found]
        points = [(at, cell.value) for at, cell in found]
        series.append(Series(label, points, style, markers=True, intervals=ends, bars=True))
    y = _value_axis(scores.suite, cells, bars)
    words = " ".join(filter(None, (caption, interval_words(cells))))
    return line_chart(title, series, x, y, marks, words, size, foremost(scores))


def foremost(scores: Table) -> list[str]:
    """The labels of a table in the order in which a chart shows them: dropped, RoPE, then the best at the end."""
    kinds = {kind(record): str(label) for label, record in reversed(scores.rows.items())}
    chosen = [kinds[name] for name in (*DROPPED, "RoPE") if name in kinds]
    last = scores.column(scores.columns[-1]) if scores.columns else {}
    ranked = sorted(last, key=lambda label: -last[label].score)
    return list(dict.fromkeys([*chosen[:1], *chosen[-1:], *map(str, ranked)]))


def interval_words(cells: Sequence[Cell]) -> str:
    """What the bars of a chart are: intervals over samples, or over training seeds."""
    if not any(cell.ends for cell in cells):
        return ""
    seeds = {int(number(cell.record, "seeds") or 0) for cell in cells}
    if not max(seeds, default=0):
        return "Thin bars: 95% intervals."
    words = f"Means over {listing([str(n) for n in sorted(seeds)])} seeds. Thin bars: "
    of_two = " (of two seeds their range)" if 2 in seeds else ""
    return words + ("their range." if max(seeds) == 2 else f"95% intervals of Student's t over them{of_two}.")


def _place(column: Length) -> float:
    """A column's place on the axis of lengths; a bucket's is the geometric middle."""
    if isinstance(column, Bucket):
        end = column.length or 1
        return math.sqrt(max(column.start, end / 2) * end)
    return column.key


def _value_axis(suite: str, cells: Sequence[Cell], bars: bool = False) -> PlotAxis:
    """The axis of a suite's values: shares from 0, perplexities logarithmic."""
    if bars:
        top = 1.04 * max([0.1, *((cell.ends or (0.0, cell.value))[1] for cell in cells)])
        return PlotAxis("score", show=percent, domain=(0.0, min(1.0, top)))
    if any(cell.share for cell in cells):
        name = "accuracy" if suite == "needles" else "score"
        return _share_axis(
            name, [value for cell in cells for value in (cell.value, (cell.ends or (0.0, 0.0))[1] / 1.12)]
        )
    return PlotAxis("perplexity (log scale)", True) if suite == "perplexity" else PlotAxis("score")


def _share_axis(name: str, values: Sequence[float]) -> PlotAxis:
    return PlotAxis(name, show=percent, domain=(0.0, min(1.0, max(1.12 * max(values, default=1.0), 0.1))))


def history_chart(phase: str, column: Length, scores: Table, styles: Mapping[str, Style]) -> Markup:
    """The scores of a phase's checkpoints against the tokens that they were trained on (DroPE's Figure 10)."""
    task = task_name(scores)
    name = suite_title(scores.suite) + (f", {task}" if task and scores.suite not in SCORED else "")
    where = length_words(column)
    title = f"{name} by tokens trained in {phase}" + (f", sequences of {where}" if where else "")
    return score_chart(scores, styles, title, PlotAxis("tokens trained", show=count))


def position_chart(
    run: RunFiles, scores: Table, column: Length, styles: Mapping[str, Style], size: str, caption: str = ""
) -> Markup:
    """Scores inside the sequences of one length, with a mark at the training length.

    Perplexity by the position of a token, or needle accuracy by the distance between a fact and its question.
    """
    series = []
    for label, cell in scores.column(column).items():
        if scores.suite == "needles":
            found = _points(as_dict(cell.record.get("accuracy_by_distance")), "edges", "accuracy", "low", "high")
            points, ends = [point for point, _ in found], [(max(low, 0.0), min(high, 1.0)) for _, (low, high) in found]
        else:
            names = ("position_edges", "nll_by_position", "nll_by_position_low", "nll_by_position_high")
            found = _points(cell.record, *names)
            points = [(x, exp(min(y, 50.0))) for (x, y), _ in found]
            ends = [(exp(min(low, 50.0)), exp(min(high, 50.0))) for _, (low, high) in found]
        known = any(math.isfinite(low) for low, _ in ends)  # records of one run have none
        style, dots = styles.get(label, INK), scores.suite == "needles"
        series.append(Series(label, points, style, markers=dots, intervals=ends if known else ()))
    if scores.suite == "needles":
        title, name = "Needle accuracy by distance", "tokens from fact to question (log scale)"
        highs = [high / 1.12 for one in series for _, high in one.intervals if math.isfinite(high)]
        y = _share_axis("accuracy", [*highs, *(y for one in series for _, y in one.points)])
    else:
        title, name = "Perplexity by position", "position in the sequence (tokens, log scale)"
        y = PlotAxis("perplexity (log scale)", True)
    xs = [x for one in series for x, _ in one.points if x > 0]
    ticks = powers_of_two(min(xs), max(xs), 11) if xs else None
    if any(one.intervals for one in series):
        two = any(number(cell.record, "seeds") == 2 for cell in scores.column(column).values())
        caption += f" Bands: {'the range of two seeds' if two else '95% intervals over the seeds'}."
    trained = float(run.training_length or 0)
    marks = [(trained, "training length")] if xs and min(xs) <= trained <= max(xs) else []
    x = PlotAxis(name, True, lambda value: f"{value:,.0f}", ticks)
    where = length_words(column)
    title = f"{title}, sequences of {where}"
    return line_chart(title, series, x, y, marks, caption.strip(), size, foremost(scores))


def _points(found: Record, edges: str, value: str, low: str, high: str) -> list[tuple[Point, tuple[float, float]]]:
    """(middle of the bin, value) and interval of the bins in a record; NaN for an end that it lacks."""

    def end(part: Mapping[str, float | None], name: str) -> float:
        return math.nan if (number := part.get(name)) is None else number

    return [
        ((max((part["start"] + part["end"]) / 2, 0.5), part[value]), (end(part, low), end(part, high)))
        for part in bins(found, edges, value, "count", low, high)
    ]


def length_words(column: Length) -> str:
    """`8× the training length (512 tokens)`."""
    tokens = f"{column.length:,} tokens" if column.length else ""
    if column.factor is None:
        return tokens
    return f"{times(column.factor)} the training length" + (f" ({tokens})" if tokens else "")
