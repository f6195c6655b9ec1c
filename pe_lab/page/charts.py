"""Charts on the page: plots as inline SVG, which need no script and no download, with legend and tooltip.

Each chart is drawn twice, for wide and for narrow screens, so that text keeps its size on a phone; the stylesheet shows
one of the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from pe_lab.page.axes import PlotAxis, axes_of, axis_number, decimate, labels_of, shift
from pe_lab.page.colours import COLOURS, DASHES, STYLES, Style
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.plot import (
    MOST,
    Frame,
    Mark,
    Series,
    draw,
    drawable,
    legend_shapes,
    names_fit,
    stroke_of,
    text_shape,
    with_intervals,
)
from pe_lab.page.variants import NAMES
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import Number, shortened

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
    return [*map(_digits, (a, b)), x.show(a), y.show(b) + _interval_text(ends, y), *map(_digits, ends or ())]


def _digits(value: Number) -> float:
    return float(f"{value:.6g}")


def _interval_text(ends: tuple[Number, Number] | None, y: PlotAxis) -> str:
    return f" ({y.show(ends[0])} to {y.show(ends[1])})" if ends else ""


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
