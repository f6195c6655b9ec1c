"""The lines of a chart as they are given, and their names: legends, the box that asks for all, what a file shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pe_lab.page.markup import Markup, element, text
from pe_lab.page.ticks import Point
from pe_lab.page.variants import Style
from pe_lab.results.formatting import Number, short_number

MOST = 5  # lines of a chart until its reader asks for all


@dataclass(frozen=True)
class Series:
    """One line. `faint`: without label and tooltip. `markers`: with a dot at each point. `line=False`: dots only.

    `intervals`, a low and a high value for each point, are drawn as a band; with `bars`, and where there are dots only,
    as a bar at each point.
    Points that cannot be drawn are left out; `broken`: they break the line. `gaps` and `hidden` are for `line_chart`.
    """

    name: str
    points: Sequence[Point]
    style: Style
    faint: bool = False
    markers: bool = False
    line: bool = True
    intervals: Sequence[tuple[Number, Number]] = ()
    broken: bool = False
    gaps: tuple[int, ...] = ()  # numbers of the points before which the line is broken
    bars: bool = False
    hidden: bool = False  # until all are asked for; `line_chart` decides


@dataclass(frozen=True)
class Axis:
    """An axis. `ticks` and `domain`, its ends, are in data units; None: chosen from the data."""

    label: str
    log: bool = False
    show: Callable[[Number], str] = short_number
    ticks: Sequence[Number] | None = None
    domain: tuple[Number, Number] | None = None


def colour_of(series: Series) -> str:
    return f"var(--c-{series.style.colour})"


def line_shape(x1: Number, x2: Number, y1: Number, y2: Number, **attributes: object) -> Markup:
    return element("line", x1=x1, x2=x2, y1=y1, y2=y2, **attributes)


def text_shape(words: str, x: Number, y: Number, anchor: str | None = None, look: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=look)


def hidden(shapes: object) -> Markup:
    """Shapes that are not shown until all are asked for; nor in a file."""
    return element("g", shapes, class_="more", display="none")


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


def stroke_of(s: Series, x: Number, y: Number) -> Markup:
    """A short stroke in a series' colour and dash, or its dot."""
    if not s.line:
        return element("circle", cx=x + 12, cy=y, r=4, fill=colour_of(s))
    return line_shape(x, x + 24, y, y, stroke=colour_of(s), stroke_width=s.style.width, stroke_dasharray=s.style.dash)


def file_parts(title: str, named: Sequence[Series], size: tuple[int, int]) -> tuple[str, str]:
    """The box of a picture file of a chart, and what the page has outside the chart: paper, title, names of series."""
    width, height = size
    shapes, x, y = [text_shape(title, 4, -14, look="file-title")], 4.0, height + 14.0
    for s in named:
        wide = 38 + 7 * len(s.name)
        if x > 4 and x + wide > width:
            x, y = 4.0, y + 18
        name = [stroke_of(s, x, y - 4), text_shape(s.name, x + 30, y)]
        shapes += [hidden(name)] if s.hidden else name
        x += wide
    box = (-6.0, -34.0, max(width, 14.0 + 8 * len(title)) + 12, (y + 10 if named else height) + 34.0)
    paper = element("rect", **dict(zip(("x", "y", "width", "height"), box, strict=True)), fill="#fff")
    return " ".join(f"{part:g}" for part in box), str(text([paper, *shapes]))
